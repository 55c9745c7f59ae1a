"""Load a saved cache of any kind into memory."""

import os

from kvkit.cache import reading
from kvkit.cache.caches import Cache
from kvkit.cache.paged.cache import PagedCache
from kvkit.errors import argument_error, hints_keywords
from kvkit.files import npz
from kvkit.typed import FilePath


@hints_keywords
def load(path: FilePath) -> Cache | PagedCache:
    """Load into memory a cache that `Cache.save` or `PagedCache.save` wrote.

    Parameters
    ----------
    path : path
        A .npz file.

    Returns
    -------
    Cache or PagedCache
        A cache with the same stored bits. Quantized layers attend to codes wherever they have them.

    Raises
    ------
    KvkitError
        If the file is damaged or of another version, or if its arrays do not match its description.

    Examples
    --------
    >>> import os, tempfile, numpy as np
    >>> from kvkit.cache import DynamicCache, load
    >>> cache, tokens = DynamicCache(), np.ones((1, 2, 3, 4), np.float32)
    >>> keys, values = cache.update(tokens, tokens, 0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "prefix.npz")
    ...     cache.save(path)
    ...     again = load(path)
    >>> again.get_seq_length(), bool((again.layers[0].keys == keys).all())
    (3, True)
    """
    if isinstance(path, (str, os.PathLike)) and os.path.isdir(path):
        wanted = "a file of `save` (Cache.open opens a folder of `offload`)"
        raise argument_error("path", wanted, path, npz.FileError)
    contents = reading.read_file(path)
    if "paged" in contents[0]:
        return reading.read_paged(path, contents, PagedCache)
    return Cache(reading.read_layers(path, contents))
