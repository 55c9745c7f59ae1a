"""Verbs on caches in files: layouts, inspect, convert, draw."""

import json

import llama_state
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from kvkit import files
from kvkit.cache import DynamicCache, PagedCache
from kvkit.layouts import NAMED, tables
from kvkit_cli.main import main

LAYERS, HEADS, TOKENS, DIM = 2, 3, 21, 8


@pytest.fixture
def run(monkeypatch):
    """Runs a command in this process; gives its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*args):
        done = CliRunner().invoke(main, [str(arg) for arg in args], prog_name="kvkit")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stdout, done.stderr

    return call


@pytest.fixture
def cache(rng):
    """Keys and values of a sequence as Transformers has them."""
    return [
        [rng.standard_normal((1, HEADS, TOKENS, DIM)).astype(np.float16) for _ in range(2)]
        for _ in range(LAYERS)
    ]


@pytest.fixture
def file(tmp_path, cache):
    files.write(tmp_path / "hf.safetensors", cache, files.Description("hf", rope_applied=True, rope_base=1e5))
    return tmp_path / "hf.safetensors"


def assert_refused(done, what):
    code, out, err = done
    assert (code, out) == (2, "")
    assert err.startswith("kvkit: ")
    assert err.count("\n") == 1
    assert what in err


def test_layouts_lists_all(run):
    code, out, err = run("layouts")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(NAMED)
    assert json.loads(run("layouts", "--json")[1])["hf"]["line"] == "l kv | b h n c"


def test_layouts_draws_one_with_strides(run):
    code, out, _ = run("layouts", "LBNHC", "--sizes", "n=2,c=64")
    assert code == 0
    for line in (
        "kv         2      64",
        "n          2     256",
        "b0 | K n0 h0 | V n0 h0 | K n0 h1 | V n0 h1 |",
    ):
        assert line in out.splitlines()
    assert "vLLM, since 0.26" in out
    assert "also called LBNHC" in out
    assert run("layouts", "| b c n")[1].startswith("| b c n\none array")
    assert_refused(run("layouts", "vllm-lbnh"), "no layout 'vllm-lbnh' (did you mean vllm-lbnhc?)")
    assert_refused(run("layouts", "hf", "--sizes", "n"), "--sizes n: expected AXIS=NUMBER")
    assert_refused(run("layouts", "hf", "--sizes", "q=1"), "sizes: expected positive integers for")


def test_inspect_says_what_a_file_says(run, file, cache):
    code, out, err = run("inspect", file, "--stats")
    assert (code, err) == (0, "")
    for text in (".safetensors: 4 arrays", "layout: hf", "rope_base: 100000.0", "layer 1 values"):
        assert text in out
    found = json.loads(run("inspect", file, "--stats", "--json")[1])
    assert found["sizes"] == {"l": LAYERS, "b": 1, "n": TOKENS, "h": HEADS, "c": DIM}
    keys = found["numbers"][0]
    assert (keys["name"], keys["minimum"], keys["nan"]) == ("layer 0 keys", float(cache[0][0].min()), 0)
    assert_refused(run("inspect", file, "--layout", "vllm-lbnhc"), "arrays")
    assert_refused(run("inspect", file.parent / "none"), "no such file: check the name")


def test_inspect_counts_and_proposes(run, tmp_path):
    pool = np.ones((4, 16, 2, 128), np.float32)
    pool[3] = np.nan
    pool[0, 5] = 0
    pool[1, 0, 0, 0] = np.inf
    np.savez(
        tmp_path / "x.npz", **{"cache.0": pool, "block_tables": [[2, 0], [2, -1]], "context_lens": [20, 9]}
    )
    code, out, _ = run("inspect", tmp_path / "x.npz")
    assert code == 0
    assert "vllm-lbnhc" in out
    done = run("inspect", tmp_path / "x.npz", "--layout", "vllm-lbnhc", "--stats", "--json")
    found = json.loads(done[1])
    assert found["numbers"][0] == {
        "name": "layer 0 keys", "minimum": 0, "maximum": 1, "nan": 16 * 2 * 64, "infinite": 1, "zero_rows": 2,
        "rows": 128,
    }  # fmt: skip
    assert found["use"] == {
        "convention": "block tables", "lengths": [20, 9], "page_size": 16, "blocks": 2, "shared": 1,
    }  # fmt: skip


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_convert_to_pages_and_back(run, file, tmp_path, cache, suffix):
    pool, back = tmp_path / f"pool{suffix}", tmp_path / f"back{suffix}"
    code, out, err = run("convert", file, pool, "--to", "vllm-lbnhc", "--page-size", 4, "--verify")
    assert (code, err) == (0, "")
    assert out.startswith("hf -> vllm-lbnhc (l 2, b 6, n 4, h 3, c 8): ")
    assert out.endswith("read back and equal bit for bit\n")
    found = files.read(pool)
    assert found.description == files.Description(
        "vllm-lbnhc",
        {"l": 2, "b": 6, "n": 4, "h": 3, "c": 8},
        tables="blocks",
        rope_applied=True,
        rope_base=1e5,
    )
    assert (found.arrays["block_tables"].tolist(), found.arrays["context_lens"].tolist()) == (
        [[*range(6)]],
        [21],
    )
    for layer, pages in enumerate(files.nested(found.arrays)):
        rows = pages.reshape(24, HEADS, 2 * DIM)[:TOKENS].transpose(1, 0, 2)
        assert np.array_equal(rows[..., :DIM], cache[layer][0][0])
        assert np.array_equal(rows[..., DIM:], cache[layer][1][0])
    assert run("convert", pool, back, "--to", "hf", "--page-size", "longest", "--quiet")[:2] == (0, "")
    for one, other in zip(files.nested(files.read(back).arrays), cache, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_convert_keeps_rows_and_other_arrays_where_they_are(run, tmp_path, rng):
    pool = rng.standard_normal((5, 2, 4, 3, 8)).astype(np.float32)
    arrays = {
        "cache": pool,
        "block_tables": np.array([[4, 1]]),
        "context_lens": np.array([6]),
        "more": np.arange(3),
    }
    np.savez(tmp_path / "x.npz", **arrays)
    done = run(
        "convert",
        tmp_path / "x.npz",
        tmp_path / "y.npz",
        "--from",
        "flashinfer-nhd",
        "--to",
        "flashinfer-hnd",
    )
    assert done[0] == 0
    found = files.read(tmp_path / "y.npz").arrays
    assert np.array_equal(found["cache"], pool.transpose(0, 1, 3, 2, 4))
    assert all(np.array_equal(found[name], arrays[name]) for name in ("block_tables", "context_lens", "more"))


def test_convert_refuses_and_leaves_the_target(run, file, tmp_path):
    target = tmp_path / "out.npz"
    target.write_bytes(b"old")
    for args, what in (
        ((file, target, "--to", "no-such"), "layout: expected"),
        ((file, target, "--to", "vllm-lbnhc", "--from", "mlx-not"), "layout: expected"),
        (
            (file, target, "--to", "vllm-lbnhc", "--from", "ort-paged"),
            "expected hf, as the file says, got ort-paged",
        ),
        ((file, target, "--to", "vllm-lbnhc", "--sizes", "h=4"), "expected"),
        (
            (file, target, "--to", "vllm-lbnhc", "--page-size", "0"),
            "--page-size 0: expected a positive number",
        ),
        (
            (file, target, "--to", "vllm-lbnhc", "--tables", file.parent / "none", "--page-size", 4),
            "no such file",
        ),
        ((file, file, "--to", "vllm-lbnhc"), "OUT is IN: give another name"),
        ((file, tmp_path / "x.pt", "--to", "vllm-lbnhc"), "give such a name"),
        ((file, tmp_path / "x.npy", "--to", "vllm-lbnhc"), "a .npy file has one array"),
    ):
        assert_refused(run("convert", *args), what)
    np.savez(tmp_path / "odd.npz", cache=np.zeros((2, 3)))
    assert_refused(run("convert", tmp_path / "odd.npz", target, "--to", "hf"), "does not say its own")
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf.safetensors", "odd.npz", "out.npz"]


def test_draw_rows_by_sequence(run, tmp_path):
    pool = np.zeros((4, 2, 4, 1, 2), np.float32)
    pool[3, 0, 2] = 1
    arrays = {"cache": pool, "block_tables": np.array([[2, 0], [2, -1]]), "context_lens": np.array([6, 4])}
    path = tmp_path / "x.npz"
    files.write(path, arrays, files.Description("flashinfer-nhd", {"n": 4}))
    code, out, _ = run("draw", path)
    assert code == 0
    assert out.splitlines() == [
        "0  aa..", "1  ....", "2  ####", "3  ..~.",
        "a 6 rows, b 4 rows; . free 9, ~ stale 1, # shared by several 4",
    ]  # fmt: skip
    assert run("draw", path, "-o", tmp_path / "x.svg")[:2] == (0, "")
    picture = (tmp_path / "x.svg").read_text()
    assert (picture.count('class="shared"'), picture.count('class="stale"'), picture.count('class="s0"')) == (
        4,
        1,
        2,
    )
    assert "prefers-color-scheme:dark" in picture


def test_draw_layouts(run, file, tmp_path):
    assert run("draw", file)[1].startswith("hf: l kv | b h n c\nlists of 2 (l) of 2 (kv) arrays")
    assert run("draw", "LBNHC")[1].startswith("vllm-lbnhc: ")
    assert run("draw", "hf", "-o", tmp_path / "hf.svg")[0] == 0
    assert (tmp_path / "hf.svg").read_text().startswith("<svg ")
    assert_refused(run("draw", "vllm-lbnh"), "no such file, and no layout (did you mean vllm-lbnhc?)")
    assert_refused(run("draw", "hf", "-o", tmp_path / "hf.png"), "give -o")
    np.save(tmp_path / "x.npy", np.zeros(3))
    assert_refused(run("draw", tmp_path / "x.npy"), "it has no tables and says no layout")


def test_cells_of_llama_cpp_become_pages(run, tmp_path, rng):
    cells = [(position, ids) for position, ids in ((0, [3, 7]), (1, [3, 7]), (2, [7]), (2, [3]))]
    rows = [[rng.bytes(2 * HEADS * DIM) for _ in cells] for _ in range(2)]
    data = llama_state.head(False, 2, []) + llama_state.memory([(cells, [((1, rows[0]), (1, rows[1]))])], 1)
    (tmp_path / "state").write_bytes(data)
    assert run("draw", tmp_path / "state")[1].splitlines()[0] == "0  ##ba"
    found = json.loads(run("inspect", tmp_path / "state", "--stats", "--json")[1])
    assert (found["use"]["convention"], found["use"]["lengths"], found["sizes"]) == (
        "cells",
        [3, 3],
        {"l": 1, "b": 1, "n": 4},
    )
    code, _, err = run(
        "convert",
        tmp_path / "state",
        tmp_path / "x.npz",
        "--to",
        "hf",
        "--page-size",
        "longest",
        "--sizes",
        "h=3",
    )
    assert (code, err) == (0, ""), err
    [[keys, values]] = files.nested(files.read(tmp_path / "x.npz").arrays)
    assert keys.shape == values.shape == (2, HEADS, 3, DIM)
    for sequence, picked in enumerate(([0, 1, 3], [0, 1, 2])):
        for array, source in ((keys, rows[0]), (values, rows[1])):
            expected = np.stack(
                [np.frombuffer(source[cell], np.float16).reshape(HEADS, DIM) for cell in picked], 1
            )
            assert array[sequence].tobytes() == expected.tobytes()


def test_tables_in_a_file_of_their_own(run, tmp_path, rng):
    pool = [rng.standard_normal((6, 4, 2, 16)).astype(np.float32)]
    files.write(tmp_path / "pool.safetensors", pool, files.Description("vllm-lbnhc"))
    parts = tables.to_csr(tables.from_blocks([[5, 2], [3, -1]], [7, 2], 4))
    names = dict(zip(("kv_indptr", "kv_indices", "kv_last_page_len"), parts, strict=True))
    files.write(tmp_path / "tables.npz", {**names, "page_size": np.array(4)})
    code, _, err = run(
        "convert", tmp_path / "pool.safetensors", tmp_path / "out.npz", "--to", "hf", "--tables",
        tmp_path / "tables.npz", "--page-size", "longest",
    )  # fmt: skip
    assert (code, err) == (0, "")
    [[keys, _]] = files.nested(files.read(tmp_path / "out.npz").arrays)
    expected = np.concatenate([pool[0][5], pool[0][2]])[:7, :, :8].transpose(1, 0, 2)
    assert np.array_equal(keys[0], expected)


def test_codes_of_mlx_move_with_their_scales(run, tmp_path, rng):
    state, texts = {}, {"0.0.0": "5", "0.0.1": "32", "0.0.2": "4", "2.0": "QuantizedKVCache"}
    for kv in range(2):
        state[f"0.{kv}.0"] = rng.integers(0, 2**32, (1, HEADS, 5, 8), np.uint32)
        state[f"0.{kv}.1"], state[f"0.{kv}.2"] = (
            rng.random((1, HEADS, 5, 2)).astype(np.float16) for _ in range(2)
        )
    save_file(state, tmp_path / "mlx", texts)
    code, out, _ = run("inspect", tmp_path / "mlx", "--stats")
    assert code == 0
    assert "format: mlx4:g32" in out
    assert (
        run("convert", tmp_path / "mlx", tmp_path / "x.npz", "--to", "vllm-lbnhc", "--page-size", 2)[0] == 0
    )
    found = files.read(tmp_path / "x.npz")
    assert found.description.format == "mlx4:g32"
    for part, name in enumerate(("cache", "scales", "minima")):
        pool = found.arrays[f"{name}.0"].reshape(6, HEADS, 2, -1)[:5]
        for kv in range(2):
            assert np.array_equal(pool[:, :, kv], state[f"0.{kv}.{part}"][0].transpose(1, 0, 2))


def test_caches_that_kvkit_saved(run, tmp_path, cache, rng):
    saved = DynamicCache()
    for layer, (keys, values) in enumerate(cache):
        saved.update(keys, values, layer)
    saved.save(tmp_path / "dynamic.npz")
    found = json.loads(run("inspect", tmp_path / "dynamic.npz", "--json", "--stats")[1])
    assert (found["kind"], found["sizes"]["n"]) == (".npz, a cache of 2 layers", TOKENS)
    assert len(found["numbers"]) == 2 * LAYERS
    assert run("convert", tmp_path / "dynamic.npz", tmp_path / "x.npz", "--to", "hf")[0] == 0
    for one, other in zip(files.read(tmp_path / "x.npz").cache, cache, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    paged = PagedCache(9, 4, LAYERS, HEADS, DIM, np.float16)
    for layer, (keys, values) in enumerate(cache):
        paged.update(keys, values, layer)
    paged.save(tmp_path / "paged.npz")
    assert run("draw", tmp_path / "paged.npz")[1].splitlines()[-2:] == ["5  a...", "a 21 rows; . free 3"]
    assert (
        run("convert", tmp_path / "paged.npz", tmp_path / "y.npz", "--to", "hf", "--page-size", "longest")[0]
        == 0
    )
    for one, other in zip(files.read(tmp_path / "y.npz").cache, cache, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_tables_that_are_none_are_refused(run, tmp_path):
    path, cells = tmp_path / "x.npz", {"cache_cells.positions": np.zeros((2, 2))}
    for arrays, metadata in (
        ({}, {"cache": {"paged": {}}}),
        ({}, {"cache": {"paged": 5}}),
        ({}, {"cache": {"paged": {"sequences": [{}], "arguments": {}}}}),
        (cells | {"cache_cells.sequences": np.zeros(3)}, {}),
        (
            cells
            | {"cache_cells.sequences": np.zeros(3, int), "cache_cells.sequence_starts": np.zeros(9, int)},
            {},
        ),
        ({"block_tables": np.zeros(3), "context_lens": np.zeros((2, 2)), "page_size": np.array(4)}, {}),
    ):
        files.write(path, {"a": np.zeros(3), **arrays}, metadata=metadata)
        assert_refused(run("inspect", path), "expected")
        assert_refused(run("draw", path), "expected")
