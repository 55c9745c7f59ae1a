"""A cache in one .npz file, which says all about itself; see `kvkit.files.npz` for its form.

The metadata's ``cache`` has the version, the dtype and shape of every array, the sha256 of all that is said
and of all bytes of the arrays, and:

    layers      of each layer what it is, and how many tokens it has seen. Arrays are ``layers.I.keys`` and
                ``layers.I.values``, the stored tokens of layer I; of a quantized one ``layers.I.keys.codes``
                and so on, see `kvkit.cache.layers.codes.PARTS`. A layer without tokens has none
    paged       what a `PagedCache` is, in the place of layers; see `kvkit.cache.paged.saved`
"""

import hashlib
import json

from kvkit.cache.layers import kinds
from kvkit.cache.paged import saved as paged_saved
from kvkit.checks.words import wrong
from kvkit.errors import KvkitError
from kvkit.files import members, npz

VERSION = 1


def save(cache, path):
    """Write a `Cache`."""
    layers: list = []
    arrays: dict = {}
    for i, layer in enumerate(cache.layers):
        state = {"length": layer.get_seq_length(), "record_past": layer.record_past}
        layers.append(kinds.described(layer) | state)
        arrays |= {f"layers.{i}.{name}": array for name, array in layer._arrays().items()}
    write(path, {"layers": layers}, arrays)


def save_paged(cache, path, sequences):
    """Write a `PagedCache`."""
    about, arrays = paged_saved.described(cache, sequences)
    write(path, {"paged": about}, arrays)


def write(path, about, arrays):
    about = {"version": VERSION, **about, "arrays": {name: form(array) for name, array in arrays.items()}}
    npz.write(path, arrays, {"cache": about | {"fingerprint": fingerprint(about, arrays)}})


def form(array):
    return [array.dtype.name, *array.shape]


def fingerprint(about, arrays):
    """sha256 of what is said, and of the bytes of all arrays in the order of their names."""
    total = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(arrays):
        for chunk in members.chunks(arrays[name]):
            total.update(chunk)
    return total.hexdigest()


def load(path):
    """The cache that `Cache.save` or `PagedCache.save` wrote, in memory.

    Parameters
    ----------
    path : path
        A .npz file.

    Returns
    -------
    Cache or PagedCache
        As it was, bit for bit. Of quantized layers attention sees what is stored.

    Raises
    ------
    KvkitError
        If the file is damaged or of another version, or if its arrays are not what it says.

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
    from kvkit.cache.caches import Cache

    about, arrays = read(path)
    if "paged" in about:
        try:
            return paged_saved.made(about["paged"], arrays)
        except (KvkitError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise unfit(path, "a paged cache that kvkit has", error) from None
    if not isinstance(about.get("layers"), list):
        raise unfit(path, "a description of every layer", sorted(about))
    return Cache([restored(path, i, said, arrays) for i, said in enumerate(about["layers"])])


def read(path):
    """What a file says of a cache, and its arrays, which are as it says."""
    contents = npz.read(path)
    about = contents.metadata.get("cache")
    if not isinstance(about, dict) or about.get("version") != VERSION:
        found = about.get("version") if isinstance(about, dict) else "none"
        raise unfit(path, f"a cache of version {VERSION}", found)
    expected, said = about.pop("fingerprint", None), about.get("arrays")
    if not isinstance(said, dict):
        raise unfit(path, "a description of every array", said)
    found = {name: form(array) for name, array in contents.arrays.items()}
    for name in said | found:
        if found.get(name) != said.get(name):
            raise unfit(path, f"{name} as it is described, {said.get(name)}", found.get(name))
    if fingerprint(about, contents.arrays) != expected:
        raise unfit(path, f"contents with the fingerprint {expected}", "others")
    return about, contents.arrays


def restored(path, number, about, arrays):
    """A layer with its tokens."""
    begin = f"layers.{number}."
    arrays = {name.removeprefix(begin): array for name, array in arrays.items() if name.startswith(begin)}
    try:
        layer = kinds.made(about)
        if arrays or about["length"]:
            layer._fill(arrays, about["length"])
        layer.record_past = about["record_past"]
    except (KvkitError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise unfit(path, f"a layer {number} that kvkit has", error) from None
    return layer


def unfit(path, expected, got):
    return wrong(path, expected, got, npz.FileError)
