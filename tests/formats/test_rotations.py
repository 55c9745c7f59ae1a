"""Rotations: their matrices, their inverse, and that attention does not see them."""

import numpy as np
import pytest

from kvkit import KvkitError, formats
from kvkit.formats import rotate

NAMES = ("hadamard", "hadamard:16", "llama.cpp", "vllm")


def matrix(block):
    """Return Sylvester's matrix of 1 and -1."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)], np.float64)


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("name", NAMES)
def test_matrices(rng, name, dim, value):
    x = rng.standard_normal((3, dim)).astype(np.float32)
    if (name, dim, value) == ("llama.cpp", 96, True):
        with pytest.raises(
            KvkitError, match=r"^rotation: expected a head size of a multiple of 64, for llama.cpp"
        ):
            rotate(x, name, value=value)
        return
    block = {"hadamard:16": 16, "llama.cpp": 64 if value else None}.get(name) or {64: 64, 96: 32, 128: 128}[
        dim
    ]
    whole = np.kron(np.eye(dim // block), matrix(block))
    signs = formats.rotation_named("vllm").sign_factors[:dim]
    whole = whole * signs if name == "vllm" else whole / np.sqrt(block)
    tolerance = {"rtol": 1e-5, "atol": 1e-5 * np.abs(whole).max() * dim}
    np.testing.assert_allclose(rotate(x, name, value=value), x @ whole.T, **tolerance)
    back = rotate(rotate(x, name, value=value), name, what="output", value=value)
    np.testing.assert_allclose(back, x, atol=1e-5)
    query = rng.standard_normal((2, dim)).astype(np.float32)
    turned = rotate(query, name, what="query", value=value) @ rotate(x, name, value=value).T
    np.testing.assert_allclose(turned, query @ x.T, atol=1e-4)


def test_signs_of_vllm():
    """The first and last bits of the line, the lowest of a byte first."""
    signs = formats.rotation_named("vllm").sign_factors
    assert signs[:8].tolist() == [1, -1, 1, 1, -1, -1, -1, -1]  # 0x0d
    assert signs[-8:].tolist() == [-1, 1, -1, 1, -1, -1, -1, 1]  # 0x8a
    assert len(signs) == 512


@pytest.mark.parametrize("name", ["hadamard:12", "hadamard:0", "hadamard:", "fwht"])
def test_unknown(name):
    with pytest.raises(KvkitError, match=r"rotation: expected hadamard, llama.cpp, vllm, or hadamard:N"):
        rotate(np.ones((1, 32), np.float32), name)


def test_codes_lose_less(rng):
    """Keys with three channels that stand out."""
    x = rng.standard_normal((512, 1, 128)).astype(np.float32)
    x[..., [3, 50, 99]] *= 12

    def off(y):
        return np.sqrt(np.mean((y - x) ** 2) / np.mean(x * x))

    plain = off(formats.decode(formats.encode(x, "int4:g128"), "int4:g128"))
    turned = formats.decode(formats.encode(rotate(x, "hadamard"), "int4:g128"), "int4:g128")
    assert off(rotate(turned, "hadamard", what="output")) < plain / 2.5


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("block", [8, 16, 128])
def test_machine_code(rng, block, dtype):
    from kvkit.cpu.copy import rotations

    rotation = formats.rotation_named(f"hadamard:{block}")
    x = rng.standard_normal((2, 5, 3, 128)).astype(dtype).swapaxes(1, 2)
    for what in ("stored", "output"):
        expected = rotate(x, rotation, what=what)
        got = rotations.rotated_rows(x, rotation, what)
        assert got.dtype == x.dtype
        np.testing.assert_allclose(got, expected, atol=1e-5 if dtype == "float32" else 4e-3)
