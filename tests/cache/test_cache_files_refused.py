"""Files that are not what they say are refused by `load`."""

import zipfile

import ml_dtypes
import numpy as np
import pytest
from folder_scenes import changed, filled, sealed

import kvkit
from kvkit.cache import load
from kvkit.files import npz

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.npz"


def one_bit(arrays, about):
    arrays["layers.2.values"].view(np.uint8)[1, 2, 3, 4] ^= 1


def another_length(arrays, about):
    about["layers"][1]["length"] += 1


def reshaped(arrays, about):
    arrays["layers.0.keys"] = arrays["layers.0.keys"].reshape(2, 3, -1, 2)


def another_geometry(arrays, about):
    about["arrays"]["layers.0.keys"] = ["float16", 2, 3, 14, 2]


def another_dtype(arrays, about):
    arrays["layers.0.keys"] = arrays["layers.0.keys"].view(BF16)


def swapped(arrays, about):
    arrays["layers.0.keys"], arrays["layers.2.keys"] = arrays["layers.2.keys"], arrays["layers.0.keys"]


def missing(arrays, about):
    del arrays["layers.3.keys"]


def another_array(arrays, about):
    arrays["layers.9.keys"] = arrays["layers.0.keys"]


def another_version(arrays, about):
    about["version"] = 2


def no_layers(arrays, about):
    del about["layers"]
    sealed(about, arrays)


def no_cache(arrays, about):
    return "cache"


def another_kind(arrays, about):
    about["layers"][0]["kind"] = "PagedLayer"
    sealed(about, arrays)


def another_window(arrays, about):
    about["layers"][1]["arguments"]["sliding_window"] = 9
    sealed(about, arrays)


def too_short_a_static_layer(arrays, about):
    about["layers"][2]["arguments"]["max_cache_len"] = 3
    sealed(about, arrays)


REFUSED = [
    (one_bit, "expected contents with the fingerprint"),
    (another_length, "expected contents with the fingerprint"),
    (swapped, "expected contents with the fingerprint"),
    (
        reshaped,
        r"expected layers\.0\.keys with the described dtype and shape, \['float16', 2, 3, 7, 4\], got",
    ),
    (another_geometry, r"expected layers\.0\.keys with the described dtype and shape"),
    (another_dtype, r"expected layers\.0\.keys with the described dtype and shape"),
    (missing, r"expected layers\.3\.keys with the described dtype and shape, .*, got None"),
    (another_array, r"expected layers\.9\.keys with the described dtype and shape, None, got"),
    (another_version, "expected a cache of version 1, got 2"),
    (no_layers, "expected a description of every layer"),
    (no_cache, "expected a cache of version 1, got none"),
    (another_kind, "expected a valid layer 0"),
    (another_window, "expected a valid layer 1, got .* the last tokens of 7"),
    (too_short_a_static_layer, "expected a valid layer 2, got .* room for 7 new tokens"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_not_what_it_says_is_refused(path, change, message):
    filled(np.float16).save(path)
    load(path)
    changed(path, change)
    with pytest.raises(kvkit.KvkitError, match=rf"cache\.npz: {message}"):
        load(path)


def test_files_that_are_no_caches(path):
    with pytest.raises(kvkit.KvkitError, match="no such file"):
        load(path)
    path.write_bytes(b"PK")
    with pytest.raises(kvkit.KvkitError, match="not a zip archive"):
        load(path)
    np.savez(path, key=np.zeros(3))
    with pytest.raises(kvkit.KvkitError, match="expected a cache of version 1, got none"):
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
    with pytest.raises(kvkit.KvkitError, match="expected a cache"):
        load(path)


def test_what_a_file_says_is_cut(path):
    """However much it says."""
    for about in ({"version": ["\x1b[31m"] * 9999}, {"version": 1, "arrays": ["\n"] * 9999}):
        npz.write(path, {}, {"cache": about})
        with pytest.raises(kvkit.KvkitError) as caught:
            load(path)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400 + len(str(path))
