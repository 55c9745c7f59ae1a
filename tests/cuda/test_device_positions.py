"""The position operators of kvkit_cuda: the CPU twin's bits, arrays of the device."""

import sys
import types

import numpy as np
import pytest
from device_arrays import KINDS, Array, Capsule, Tensor, contents, moved
from scenes import DTYPES

import kvkit
import kvkit_cuda
from kvkit_cuda.device_runtime import host
from kvkit_cuda.positions import alibi, rotary

every_kind = pytest.mark.parametrize("kind", KINDS)
packed = kvkit_cuda.dynamic_batching


@pytest.fixture
def spans(monkeypatch):
    """Return a list that gets the chunk sizes of the kernels in use."""
    found = []

    def watched(module, place):
        compiled = module.compiled

        def compile_(*variant):
            found.append(variant[place])
            return compiled(*variant)

        monkeypatch.setattr(module, "compiled", compile_)

    watched(rotary, 1)
    watched(alibi, 2)
    return found


def same(got, expected):
    for array, wanted in zip(got, expected, strict=True):
        assert contents(array).dtype == wanted.dtype
        assert contents(array).shape == wanted.shape
        assert contents(array).tobytes() == wanted.tobytes()


def kind_of(kind):
    return Tensor if kind == "torch" else type(host.empty(1, np.int8, 0))


# Rotary position embedding


def turn_call(rng, t1, dim=16, heads=(3, 2)):
    """Return query, key, seqstarts and start_pos of three sequences, one of them empty."""
    arrays = [rng.standard_normal((6, h, dim)).astype(DTYPES[t1]) for h in heads]
    return arrays, np.array([0, 4, 4, 6]), np.array([7, 1, 900])


@pytest.mark.parametrize("start", [2**24 - 3, 2**24 + 8, 2**63 - 5])
def test_far_positions(start, rng):
    """Where some angle is too large for the device's formula, the table is made on the host."""
    arrays, starts, first = turn_call(rng, "fp32")
    first[1:] = start - 5, start - 3
    twin = kvkit.dynamic_batching.rotary_position_embedding
    same(packed.rotary_position_embedding(*arrays, starts, first, None), twin(*arrays, starts, first, None))


@pytest.mark.parametrize("bypass", [False, True])
def test_rotary_in_place(bypass, rng):
    arrays, starts, first = turn_call(rng, "fp16")
    arguments = starts, first, None
    expected = kvkit.dynamic_batching.rotary_position_embedding(*arrays, *arguments, bypass_key=bypass)
    hosts = [array.copy() for array in arrays]
    out = packed.rotary_position_embedding(*hosts, *arguments, bypass_key=bypass, out=tuple(hosts))
    assert out[0] is hosts[0]
    same(hosts, expected)
    given = tuple(map(Array, arrays))
    assert packed.rotary_position_embedding(*given, *arguments, bypass_key=bypass, out=given) == given
    same(given, expected)


@pytest.mark.parametrize(
    ("t1", "dim", "elements", "rotary_dim", "span"),
    [
        ("fp16", 16, 0, 0, 8), ("fp16", 16, 8, 8, 8), ("fp16", 16, 1, 0, 2), ("fp16", 16, 0, 6, 2),
        ("fp16", 20, 0, 0, 2), ("fp16", 7, 0, 6, 2), ("fp32", 12, 0, 4, 4), ("fp32", 6, 0, 0, 2),
        ("fp32", 5, 1, 2, 2),
    ],
)  # fmt: skip
def test_rotary_in_chunks(t1, dim, elements, rotary_dim, span, rng, spans):
    """16 bytes at a time where all is aligned and whole, pairs elsewhere."""
    arrays, starts, first = turn_call(rng, t1, dim)
    arguments = starts, first, None
    expected = kvkit.dynamic_batching.rotary_position_embedding(*arrays, *arguments, rotary_dim=rotary_dim)
    out = tuple(moved(np.zeros_like(array)) for array in arrays)
    given = moved(arrays[0], elements), moved(arrays[1])
    packed.rotary_position_embedding(*given, *arguments, rotary_dim=rotary_dim, out=out)
    same(out, expected)
    assert spans == [span]


# ALiBi


@every_kind
def test_masks_of_the_device(kind, rng):
    mask = rng.standard_normal((3, 1, 20)).astype(np.float32)[..., ::2]
    expected = kvkit.alibi_mask(5, 9, mask, num_heads=3)
    given = KINDS[kind](mask if kind == "interface" else np.ascontiguousarray(mask))
    result = kvkit_cuda.alibi_mask(Array(np.array([5])), 9, given, num_heads=3)
    assert type(result) is kind_of(kind)
    same([result], [expected])
    assert type(kvkit_cuda.alibi_mask(5, 9, num_heads=3)) is np.ndarray


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_masks_of_other_types_than_the_added_one(library, rng, monkeypatch):
    """A new array of the library is asked for by the dtype of the result."""
    asked = []

    class Tensor_(Capsule if library == "torch" else Array):
        if library == "torch":

            def new_empty(self, shape, dtype):
                return empty(shape, dtype)

    def empty(shape, dtype):
        asked.append(dtype)
        return Tensor_(np.empty(shape, np.float32))

    Tensor_.__module__ = f"{library}.core"
    monkeypatch.setitem(
        sys.modules, library, types.SimpleNamespace(__name__=library, empty=empty, float32="its float32")
    )
    mask = rng.random((5, 9)) > 0.5
    expected = kvkit.alibi_mask(5, 9, mask, num_heads=3)
    result = kvkit_cuda.alibi_mask(5, 9, Tensor_(mask), num_heads=3)
    assert type(result) is Tensor_
    assert asked == ["its float32" if library == "torch" else np.float32]
    same([result], [expected])


@pytest.mark.parametrize(("elements", "span"), [(0, 8), (1, 1), (8, 8)])
def test_masks_in_chunks(elements, span, rng, spans):
    expected = kvkit.alibi_mask(3, 17, num_heads=2, data_type="float16")
    out = moved(np.zeros_like(expected), elements)
    assert kvkit_cuda.alibi_mask(3, 17, num_heads=2, data_type="float16", out=out) is out
    same([out], [expected])
    assert spans == [span]


# Positions


@every_kind
def test_positions_of_the_device(kind):
    starts, first = np.array([0, 0, 2, 2, 3]), np.array([5, 2**63 - 3, 9, 0])
    tokens = KINDS[kind](np.full(3, 7))
    result = packed.position_index(tokens, Array(starts), Array(first))
    assert type(result) is kind_of(kind)
    same([result], [np.array([2**63 - 3, 2**63 - 2, 0])])
    with pytest.raises(kvkit.KvkitError, match=r"^sequences: expected integers"):
        packed.position_index(Array(np.zeros(3, np.float32)), starts, first)
