"""Latent rows through tensor cores: the kernel of `kvkit_cuda.attention.latent` against the CPU in float32.

In the CUDA simulator, on the machine that runs PTX, or on a device.
"""

import attention_scenes
import numpy as np
import pytest
from device_arrays import Array, contents
from tensor_cores import DTYPES, forms_taken

import kvkit
import kvkit_cuda
from kvkit_cuda.attention import latent
from kvkit_cuda.calls import tables
from kvkit_cuda.device_runtime import device

# Numbers that are no longer finite are what a test is about; numpy, in the simulator, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ROOMS = {"8.0": 163 * 1024, "9.0": 227 * 1024, "12.0": 99 * 1024}


@pytest.fixture
def taken(monkeypatch):
    """Return a list that gets the forms of the kernel in use."""
    return forms_taken(latent, monkeypatch)


def scene(rng, element, heads, lengths, queries=None, dim=192, value_dim=128, page=16, **more):
    """Return a call over pages in any order; rows outside contexts are NaN."""
    queries = queries or [1] * len(lengths)
    pages = [-(-length // page) for length in lengths]
    pool = np.full((sum(pages) + 1, page, dim), np.nan, DTYPES[element])
    order, starts = rng.permutation(sum(pages)) + 1, np.cumsum([0, *pages])
    for i, length in enumerate(lengths):
        rows = np.full((pages[i] * page, dim), np.nan, DTYPES[element])
        rows[:length] = rng.standard_normal((length, dim))
        pool[order[starts[i] : starts[i + 1]]] = rows.reshape(-1, page, dim)
    query = rng.standard_normal((sum(queries), heads, dim)).astype(DTYPES[element])
    return {
        "query": query, "latent": pool, "block_tables": (starts, order), "context_lens": np.array(lengths),
        "query_starts": np.cumsum([0, *queries]), "softmax_scale": dim**-0.5, "value_dim": value_dim,
        "return_lse": True, **more,
    }  # fmt: skip


def check(call, taken):
    """Check results against the CPU's for the same numbers in float32, and that the kernel ran."""
    wide = {name: call[name].astype(np.float32) for name in ("query", "latent")}
    expected = kvkit.mla_attention(**call | wide)
    found = kvkit_cuda.mla_attention(**call | {name: Array(call[name]) for name in wide})
    output, lse = map(contents, found)
    assert output.dtype == call["query"].dtype
    tolerance = attention_scenes.TOLERANCE[str(output.dtype)]
    attention_scenes.assert_near(output, expected[0].astype(np.float64), tolerance)
    attention_scenes.assert_near(lse, expected[1].astype(np.float64), 2e-5)
    assert taken


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
def test_pages_of_64_heads(element, rng, taken):
    """DeepSeek's rows; a sequence of several queries, one that ends within a tile, one without rows."""
    check(scene(rng, element, 64, [70, 9, 0], [2, 1, 1], 576, 512, 64), taken)
    assert (taken[-1].rows, taken[-1].tile) == (64, 64)


@pytest.mark.parametrize(
    ("heads", "room", "rows", "tile"),
    [
        (128, "9.0", 64, 64), (128, "8.0", 64, 32), (128, "12.0", 16, 32), (32, "9.0", 32, 64),
        (16, "9.0", 16, 64), (9, "8.0", 16, 32),
    ],
)  # fmt: skip
def test_devices(heads, room, rows, tile, rng, monkeypatch):
    """Each form of DeepSeek's rows, by what a device has of shared memory, over smaller rows."""
    form = latent.form("bfloat16", 576, 512, heads, ROOMS[room])
    assert (form.rows, form.tile) == (rows, tile)
    taken = []
    monkeypatch.setattr(
        latent, "form", lambda element, *sizes: latent.LatentForm(element, 192, 128, rows, tile)
    )
    compiled = latent.compiled
    monkeypatch.setattr(latent, "compiled", lambda form: taken.append(form) or compiled(form))
    check(scene(rng, "bfloat16", heads, [70, 33], [1, 1]), taken)
    assert (taken[-1].rows, taken[-1].tile) == (rows, tile)


def test_splits_with_sinks(rng, taken, monkeypatch):
    """Contexts that blocks share, and tiles of more rows than a query has heads."""
    monkeypatch.setattr(tables, "LEAST_SPLIT", 32)
    sinks = rng.standard_normal(12).astype(np.float32)
    check(scene(rng, "bfloat16", 12, [70, 20], [1, 2], sinks=sinks), taken)


@pytest.mark.parametrize("odd", [np.nan, np.inf, 3e38])
def test_numbers_that_are_not_finite(odd, rng, taken):
    """What a query does not see does not reach it, and a sum that overflows stays finite where it can."""
    call = scene(rng, "bfloat16", 16, [20], [2])
    pages, place = call["block_tables"][1], (1, 19 - 16)  # the row that the last query alone sees
    row = call["latent"][pages[place[0]], place[1]]
    row[3] = odd
    call["query"][..., 3] = 0 if np.isfinite(odd) else call["query"][..., 3]
    check(call, taken)


def test_what_the_general_kernel_takes(rng, taken, monkeypatch):
    """Few rows, values that are not all of a warp's elements, and no room."""

    def refused(**changes):
        given = {"heads": 20, "dim": 128, "value_dim": 128} | changes
        call = scene(rng, "bfloat16", lengths=[5], **given)
        kvkit_cuda.mla_attention(**call)
        assert not taken

    refused(heads=8)
    refused(value_dim=112)
    refused(dim=144)
    monkeypatch.setattr(device, "shared_memory", lambda: 20 * 1024)
    refused()
