"""Files that are not what they say are refused by `load`: caches of layers, of codes, of blocks."""

import zipfile

import ml_dtypes
import numpy as np
import pytest
from folder_scenes import changed, filled, sealed
from paged_scenes import IDS, paged, run
from quantized_cache_scenes import OPTIONS, feed, states

import kvkit
from kvkit.cache import Cache, QuantizedLayer, load
from kvkit.files import npz


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.npz"


def save_layers(path):
    filled(np.float16).save(path)


def save_codes(path):
    layer = QuantizedLayer(**OPTIONS)
    feed(layer, states(40), 40)
    Cache([layer]).save(path)


def save_blocks(path):
    cache = paged("int8")
    seq = cache.blocks.add(IDS)
    run(cache, (seq, len(IDS)))
    cache.save(path, [seq])


def array(name, function):
    """Return a change of an array by a function; it is removed if the function returns None."""

    def change(arrays, about):
        arrays[name] = function(arrays[name])
        if arrays[name] is None:
            del arrays[name]

    return change


def said(where, value):
    """Return a change of the cache's description at names with spaces between; None removes the entry."""

    def change(arrays, about):
        *inner, last = [int(name) if name.isdigit() else name for name in where.split(" ")]
        for name in inner:
            about = about[name]
        about[last] = value
        if value is None:
            del about[last]

    return change


def one_bit(x):
    x.view(np.uint8).reshape(-1)[77] ^= 1
    return x


def put(x, where, value):
    x[where] = value
    return x


def swapped(arrays, about):
    arrays["layers.0.keys"], arrays["layers.2.keys"] = arrays["layers.2.keys"], arrays["layers.0.keys"]


def empty(arrays, about):
    del arrays["layers.3.keys"], arrays["layers.3.values"]


FINGERPRINT, LAYER, BLOCKS = (
    "contents with the fingerprint",
    "a valid layer 0",
    "a valid description of a paged cache",
)
SHAPE = "{} with the described dtype and shape, {}"
CHANGES = [  # of what; the change; whether the file is sealed again; what was expected
    (save_layers, array("layers.2.values", one_bit), False, FINGERPRINT),
    (save_layers, said("layers 1 length", 9), False, FINGERPRINT),
    (save_layers, swapped, False, FINGERPRINT),
    (save_layers, array("layers.0.keys", lambda x: x.reshape(2, 3, -1, 2)), False,
     SHAPE.format("layers.0.keys", "['float16', 2, 3, 7, 4], got")),
    (save_layers, array("layers.0.keys", lambda x: x.view(ml_dtypes.bfloat16)), False,
     SHAPE.format("layers.0.keys", "['float16', 2, 3, 7, 4], got")),
    (save_layers, said("arrays layers.0.keys", ["float16", 2, 3, 14, 2]), False,
     SHAPE.format("layers.0.keys", "")),
    (save_layers, array("layers.3.keys", lambda x: None), False, SHAPE.format("layers.3.keys", "")),
    (save_layers, lambda arrays, about: arrays.update({"layers.9.keys": np.zeros(3)}), False,
     SHAPE.format("layers.9.keys", "None, got")),
    (save_layers, empty, True, "a valid layer 3, got "),
    (save_layers, said("layers 3 length", 0), True, "a valid layer 3, got "),
    (save_layers, said("version", 3), False, "a file of cache.save, of version 1 or 2, got 3"),
    (save_layers, said("layers", None), True, "a description of every layer"),
    (save_layers, lambda arrays, about: "cache", False, "a file of cache.save, of version 1 or 2, got none"),
    (save_layers, said("layers 0 kind", "PagedLayer"), True, LAYER),
    (save_layers, said("layers 1 arguments sliding_window", 9), True, "a valid layer 1, got "),
    (save_layers, said("layers 2 arguments max_cache_len", 3), True, "a valid layer 2, got "),
    (save_layers, array("layers.0.keys", np.ravel), True, LAYER),
    (save_codes, array("layers.0.keys.codes", np.ravel), True, LAYER),
    (save_codes, array("layers.0.values.codes", lambda x: x[:, :, :-1].copy()), True, LAYER),
    (save_codes, array("layers.0.keys.ends", lambda x: put(x, 0, x[0] + 1)), True, LAYER),
    (save_codes, array("layers.0.keys.ends", lambda x: put(x, 0, 0)), True, LAYER),
    (save_codes, said("layers 0 length", 41), True, LAYER),
    (save_codes, array("layers.0.keys.cells", lambda x: x.astype(np.float32)), True, LAYER),
    (save_codes, said("layers 0 arguments key bits", 8), True, LAYER),
    (save_codes, said("layers 0 arguments key bits", 5), True, LAYER),
    (save_codes, array("layers.0.values.tail", lambda x: None), True, LAYER),
    (save_codes, array("layers.0.values.codes", one_bit), False, FINGERPRINT),
    (save_blocks, array("cache", one_bit), False, FINGERPRINT),
    (save_blocks, array("sequences.0.block_table", lambda x: put(x, 0, 20)), True, BLOCKS),
    (save_blocks, array("published.blocks", lambda x: put(x, 0, 21)), True, BLOCKS),
    (save_blocks, said("paged sequences 0 length", 15), True, BLOCKS),
    (save_blocks, said("paged arguments num_kv_heads", 3), True, BLOCKS),
    (save_blocks, said("paged arguments num_blocks", 2), True, BLOCKS),
    (save_blocks, said("paged arguments", None), True, BLOCKS),
    (save_blocks, array("scale", lambda x: None), True, BLOCKS),
]  # fmt: skip


@pytest.mark.parametrize(("save", "change", "again", "expected"), CHANGES)
def test_what_is_not_what_it_says_is_refused(path, save, change, again, expected):
    save(path)
    load(path)

    def changing(arrays, about):
        found = change(arrays, about)
        if again:
            sealed(about, arrays)
        return found

    changed(path, changing)
    with pytest.raises(kvkit.KvkitError) as error:
        load(path)
    assert f"cache.npz: expected {expected}" in str(error.value)


def test_files_that_are_no_caches(path):
    with pytest.raises(kvkit.KvkitError, match="no such file"):
        load(path)
    path.write_bytes(b"PK")
    with pytest.raises(kvkit.KvkitError, match="not a zip archive"):
        load(path)
    np.savez(path, key=np.zeros(3))
    with pytest.raises(
        kvkit.KvkitError, match=r"expected a file of cache\.save, of version 1 or 2, got none"
    ):
        load(path)


def test_a_cut_file_is_refused(path):
    filled().save(path)
    whole = path.read_bytes()
    for end in (len(whole) // 3, len(whole) - 30):
        path.write_bytes(whole[:end])
        with pytest.raises(kvkit.KvkitError):
            load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kvkit.json", "{}")
    with pytest.raises(kvkit.KvkitError, match="expected a file of"):
        load(path)


def test_what_a_file_says_is_cut(path):
    """However much it says."""
    for about in ({"version": ["\x1b[31m"] * 9999}, {"version": 1, "arrays": ["\n"] * 9999}):
        npz.write(path, {}, {"cache": about})
        with pytest.raises(kvkit.KvkitError) as caught:
            load(path)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400 + len(str(path))
