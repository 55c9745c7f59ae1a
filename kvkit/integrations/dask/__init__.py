"""Attend to dask arrays, and run tools on a cluster; needs the extra ``dask``.

`attend` computes attention over dask arrays, for work without a loop over tokens. `mapper` gives the tasks of
`kvkit.tools` to a cluster.
"""

from kvkit.integrations.dask.arrays import attend
from kvkit.integrations.dask.tasks import mapper

__all__ = ["attend", "mapper"]
__dir__ = __all__.copy  # modules are not listed
