"""A cache in one .npz file, which says all about itself; see `kvkit.files.npz` for its form.

Arrays are ``layers.I.keys`` and ``layers.I.values``, the stored tokens of layer I; a layer without tokens has
none. The metadata's ``cache`` says of each layer what it is and how many tokens it has seen, and has the
sha256 of that and of all bytes of the arrays.
"""

import hashlib
import json

from kvkit.cache import kinds
from kvkit.cache.store import geometry
from kvkit.errors import KvkitError
from kvkit.files import members, npz

VERSION = 1
SIDES = "keys", "values"


def save(cache, path):
    layers, arrays = [], {}
    for i, layer in enumerate(cache.layers):
        about = kinds.described(layer) | {"length": layer.get_seq_length(), "record_past": layer.record_past}
        if layer.keys is not None:
            for side in SIDES:
                arrays[f"layers.{i}.{side}"] = array = getattr(layer, side)
                about[side] = list(array.shape)
            about["dtype"] = array.dtype.name
        layers.append(about)
    about = {"version": VERSION, "layers": layers, "fingerprint": fingerprint(layers, arrays)}
    npz.write(path, arrays, {"cache": about})


def fingerprint(layers, arrays):
    """sha256 of what is said about layers, and of the bytes of their arrays in order."""
    total = hashlib.sha256(json.dumps(layers, sort_keys=True).encode())
    for array in arrays.values():
        for chunk in members.chunks(array):
            total.update(chunk)
    return total.hexdigest()


def load(path):
    """The cache that `Cache.save` wrote, in memory.

    Parameters
    ----------
    path : path
        A .npz file.

    Returns
    -------
    Cache
        Of layers as they were, bit for bit.

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

    contents = npz.read(path)
    about = contents.metadata.get("cache")
    if not isinstance(about, dict) or about.get("version") != VERSION:
        found = about.get("version") if isinstance(about, dict) else "none"
        raise unfit(path, f"a cache of version {VERSION}", found)
    try:
        layers, expected = about["layers"], about["fingerprint"]
        names = [f"layers.{i}.{side}" for i, said in enumerate(layers) for side in SIDES if side in said]
        described = {name: form_of(layers, *name.split(".")[1:]) for name in names}
    except (AttributeError, KeyError, TypeError) as error:
        raise unfit(path, "a description of every layer", f"{type(error).__name__} {error}") from None
    found = {name: (array.dtype.name, *array.shape) for name, array in contents.arrays.items()}
    for name in described | found:
        if found.get(name) != described.get(name):
            raise unfit(path, f"{name} as it is described, {described.get(name)}", found.get(name))
    arrays = {name: contents.arrays[name] for name in names}
    if fingerprint(layers, arrays) != expected:
        raise unfit(path, f"contents with the fingerprint {expected}", "others")
    return Cache(
        restored(path, i, about, [arrays[f"layers.{i}.{side}"] for side in SIDES if side in about])
        for i, about in enumerate(layers)
    )


def form_of(layers, number, side):
    about = layers[int(number)]
    return about["dtype"], *about[side]


def restored(path, number, about, sides):
    """A layer with its tokens."""
    stored = sides[0].shape[2] if sides else 0
    try:
        layer, length = kinds.made(about), about["length"]
        layer._check_room(0, length)
        oldest = length - stored
        legal = 0 <= oldest <= layer._croppable_to(length)
    except (KvkitError, KeyError, TypeError) as error:
        raise unfit(path, f"a layer {number} that kvkit has", error) from None
    if not legal:
        raise unfit(path, f"the last tokens of layer {number} of {length}", stored)
    if sides:
        layer._store = layer._new_store(geometry(sides[0], sides[1], None), layer._capacity(stored))
        layer._store.write(0, *sides)
        layer._length, layer.record_past = length, about["record_past"]
        layer._oldest = layer._begin = layer._origin = oldest
    return layer


def unfit(path, expected, got):
    return npz.FileError(f"{path}: expected {expected}, got {got}")
