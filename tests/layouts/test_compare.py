"""Layouts that are one, layouts that arrays may have, and how views refuse."""

import itertools

import engine_caches
import numpy as np
import pytest
from engine_caches import NAMES

from kvkit import KvkitError, layouts
from kvkit.layouts import fits, same_bytes, view
from kvkit.tools import inspect


@pytest.mark.parametrize("changes", [{}, {"H": 1}, {"N": 1, "C": 16}], ids=str)
def test_same_bytes_as_the_formulas_say(changes):
    """For pairs of layouts with all axes: the same arrays, and the same offset of every element."""
    names = [name for name in NAMES if {"l", "b", "n", "h", "kv"} <= engine_caches.axes_of(name)]
    names = [name for name in names if name != "vllm-cpu-amx" or "N" not in changes]
    sizes = engine_caches.SIZES | changes
    places = {}
    for name in names:
        order = [axis for axis in ("l", "kv", "b") if axis in layouts.NAMED[name].layout.lists]
        lists = layouts.NAMED[name].layout.lists
        places[name] = {
            (layer, kv, b): (frozenset(zip(lists, path, strict=True)), len(order), offsets.tobytes())
            for layer, kv, b, path, offsets in engine_caches.elements(name, sizes)
        }
    known = {axis.lower(): size for axis, size in sizes.items()}
    for one, other in itertools.combinations(names, 2):
        assert same_bytes(one, other, **known) == (places[one] == places[other]), (one, other)


def test_lines_that_are_one_only_for_some_sizes():
    nhd, hnd = "flashinfer-nhd", "flashinfer-hnd"
    assert not same_bytes(nhd, hnd)
    assert same_bytes(nhd, hnd, h=1)
    assert same_bytes(nhd, hnd, n=1)
    assert same_bytes("vllm-lbnhc", "l | b n h kv c")
    assert same_bytes("| b n h c", "| b n c")  # the axis that only one of them has is of length 1
    assert not same_bytes("| b n h c", "| b n c", h=2)
    assert same_bytes("ascend-nz", "kv | b (h c1) n c0[16]")
    assert not same_bytes("ascend-nz", "kv | b (h c1) n c0[16]", itemsize=1)
    assert same_bytes("vllm-dsa-indexer", "NL_X_NB_BSV_BSS")
    with pytest.raises(KvkitError, match="sizes: expected sizes of"):
        same_bytes(nhd, hnd, x=3)


def rotated(rng, blocks, page, heads, dim):
    """Return keys as models have them, rotated and with channels far from 0, and values."""
    frequencies = 10000.0 ** (-np.arange(dim // 2) / (dim // 2))
    keys = 2 * rng.standard_normal((heads, dim)) + rng.standard_normal((blocks, page, heads, dim))
    angle = np.arange(blocks * page).reshape(blocks, page, 1, 1) * frequencies
    left, right = keys[..., : dim // 2], keys[..., dim // 2 :]
    keys = np.concatenate(
        [left * np.cos(angle) - right * np.sin(angle), left * np.sin(angle) + right * np.cos(angle)], -1
    )
    values = rng.standard_normal((blocks, page, heads, dim))
    keys[-1, page // 2 :] = values[-1, page // 2 :] = 0
    return keys.astype(np.float32), values.astype(np.float32)


def test_layouts_whose_content_is_split_stay_proposed(rng):
    """Contents cannot speak for NZ; `inspect --stats` names it behind those they speak for."""
    arrays = layouts.convert([rotated(rng, 16, 16, 16, 32)], "l kv | b n h c", "vllm-ascend-nz")
    found = inspect({"cache": arrays}, stats=True).fits
    assert "vllm-ascend-nz" in found
    assert found.index("vllm-ascend-nz") >= len(fits(arrays, contents=True))


def test_float64_is_counted_as_it_is():
    keys = np.zeros((1, 1, 2, 4, 8))
    keys[0, 0, 0, 0, :2] = -1e300, np.inf
    found = inspect({"key_cache": keys, "value_cache": keys[..., ::-1]}, stats=True).numbers[0]
    assert (found.minimum, found.maximum, found.infinite) == (-1e300, 0, 1)


def test_fits_takes_axes_as_they_lie_in_memory():
    """vLLM's code sees [blocks, heads, tokens, 2 D] of any order in memory."""
    pool = np.zeros((10, 16, 3, 32), np.float16)
    found = fits([pool.transpose(0, 2, 1, 3)])
    assert found == fits([pool])
    assert "vllm-lbnhc" in found
    assert "hf" not in found
    assert fits([np.zeros((3, 5, 7), np.int8)], contents=True) == []
    with pytest.raises(KvkitError, match="arrays: expected arrays that are not empty"):
        fits([3])


POOL = np.zeros((10, 16, 2, 128), np.float16)
REFUSED = {
    "sizes of arrays: expected h or c too": lambda: view(np.zeros((4, 2, 3, 16)), "flashinfer-nhd"),
    r"arrays\[0\]: expected axes of .* outermost first, got strides .* in the order \(0, 2, 1, 3\)":
        lambda: view([POOL.transpose(0, 2, 1, 3)], "vllm-lbhnc"),
    "arrays: expected the shape of .*: 2 for kv, not 16":
        lambda: view(POOL[:, :, :, :, None], "flashinfer-nhd"),
    "arrays: expected a list, of arrays along l": lambda: view(7, "vllm-lbnhc"),
    "arrays: expected two arrays, keys and values": lambda: view([POOL] * 3, "flash-attn"),
    r"arrays\[0\]\[0\]: expected an array, got int 3": lambda: view([[3, 4]], "hf"),
    r"arrays\[1\]: expected a size n of 16, as keys have, got 15":
        lambda: view([POOL, POOL[:, :15]], "flash-attn"),
    "arrays: expected 3 arrays along l": lambda: view([POOL], "vllm-lbnhc", sizes={"l": 3}),
    r"sizes\['v'\]: expected at most the 576":
        lambda: view([np.zeros((4, 8, 576))], "vllm-mla", sizes={"v": 600}),
    "arrays: expected an axis h in .*, for a size of 8, got none":
        lambda: view([np.zeros((4, 8, 576))], "vllm-mla", sizes={"h": 8}),
    "layout: expected elements of one kind": lambda: view([POOL], "vllm-dsa-indexer"),
    "no axis of length 0": lambda: view([POOL[:0]], "vllm-lbnhc"),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_views_refuse(message):
    with pytest.raises(KvkitError, match=message):
        REFUSED[message]()


def test_a_latent_row_is_key_and_value():
    rows = np.arange(2 * 4 * 576, dtype=np.float32).reshape(2, 4, 576)
    kv = view([rows], "vllm-mla", sizes={"v": 512})
    assert kv.keys[0].shape == (2, 4, 1, 576)
    assert kv.values[0].shape == (2, 4, 1, 512)
    assert np.shares_memory(kv.keys[0], kv.values[0])
    assert kv.values[0][1, 2, 0, 511] == rows[1, 2, 511]


def test_tensors_and_strided_arrays():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3, 4, 2, 16, dtype=torch.bfloat16)
    kv = view([tensor], "vllm-lbnhc")
    assert isinstance(kv.values[0], torch.Tensor)
    kv.values[0][1, 2, 1] = 3
    assert tensor[1, 2, 1].tolist() == [0.0] * 8 + [3.0] * 8
    [pair] = layouts.convert([tensor], "vllm-lbnhc", "hf")
    assert pair[1].dtype is torch.bfloat16
    assert pair[1][1, 1, 2].tolist() == [3.0] * 8
    padded = np.zeros((3, 4, 2, 20))[..., :16]  # rows longer than their content
    assert view([padded], "vllm-lbnhc").keys[0].strides == (1280, 320, 160, 8)
