"""Attend to caches that are too large for one machine, on Dask; needs the extra ``dask``.

`attend` computes attention over dask arrays, for work without a loop over tokens. `ShardedCache` distributes
tokens or heads over many workers, for decoding with very long contexts; if the cache fits one machine,
`kvkit.cache.PagedCache` is faster. `mapper` gives the tasks of `kvkit.tools` to a cluster.
"""

from kvkit.integrations.dask.actors import ShardError
from kvkit.integrations.dask.arrays import attend
from kvkit.integrations.dask.sharded import ShardedCache
from kvkit.integrations.dask.tasks import mapper

__all__ = ["ShardError", "ShardedCache", "attend", "mapper"]
__dir__ = __all__.copy  # modules are not listed
