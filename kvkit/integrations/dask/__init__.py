"""Attend to caches that are too large for one machine, on Dask; needs the extra ``dask``.

`attend` is attention over dask arrays, for work without a loop over tokens. `ShardedCache` is a cache whose
tokens, or heads, lie on many workers, for decoding over very long contexts. Where one machine holds the
cache, `kvkit.cache.PagedCache` is faster. `mapper` gives the tasks of `kvkit.tools` to a cluster.
"""

from kvkit.integrations.dask.actors import ShardError
from kvkit.integrations.dask.arrays import attend
from kvkit.integrations.dask.sharded import ShardedCache
from kvkit.integrations.dask.tasks import mapper

__all__ = ["ShardError", "ShardedCache", "attend", "mapper"]
__dir__ = __all__.copy  # modules are not listed
