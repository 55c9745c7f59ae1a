"""Attend to dask arrays, and run tools on a cluster; needs the extra ``dask``.

`attend` computes attention over dask arrays, for work without a loop over tokens. `mapper` gives the tasks of
`kvkit.tools` to a cluster.
"""

try:
    from kvkit.integrations.dask.arrays import attend
except ModuleNotFoundError as error:
    error.add_note("pip install '.[dask]' in a clone")
    raise
from kvkit.integrations.dask.tasks import mapper

__all__ = ["attend", "mapper"]
__dir__ = __all__.copy  # modules are not listed
