"""Verbs that write files: convert, draw and vectors; the files of llama.cpp, MLX and kvkit's own caches."""

import json

import llama_state
import numpy as np
import pytest
import verbs
from folder_scenes import changed, sealed
from safetensors.numpy import save_file
from verbs import kvkit as run

from kvkit import files
from kvkit.cache import DynamicCache, PagedCache
from kvkit.tools.source import CacheSource

LAYERS, HEADS, TOKENS, DIM = 2, 3, 21, 8


@pytest.fixture
def cache(rng):
    """Return keys and values of a sequence in Transformers' layout."""
    return [
        [rng.standard_normal((1, HEADS, TOKENS, DIM)).astype(np.float16) for _ in range(2)]
        for _ in range(LAYERS)
    ]


@pytest.fixture
def file(tmp_path, cache):
    files.write(tmp_path / "hf.safetensors", cache, files.Description("hf", rope_applied=True, rope_base=1e5))
    return tmp_path / "hf.safetensors"


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_convert_to_pages_and_back(file, tmp_path, cache, suffix):
    pool, back = tmp_path / f"pool{suffix}", tmp_path / f"back{suffix}"
    code, out, err = run("convert", file, pool, "--to", "vllm-lbnhc", "--page-size", 4, "--verify")
    assert (code, err) == (0, "")
    assert out.startswith("hf -> vllm-lbnhc (l 2, b 6, n 4, h 3, c 8): ")
    assert out.endswith("read back and equal bit for bit\n")
    found = files.read(pool)
    assert found.description == files.Description(
        "vllm-lbnhc", {"l": 2, "b": 6, "n": 4, "h": 3, "c": 8}, tables="blocks", rope_applied=True,
        rope_base=1e5,
    )  # fmt: skip
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


def test_convert_to_another_format_and_back(file, tmp_path, cache):
    code, out, err = run("convert", file, tmp_path / "codes.npz", "--format", "int8:g8")
    assert (code, err) == (0, "")
    assert "int8:g8" in out
    assert files.read(tmp_path / "codes.npz").description.format == "int8:g8"
    assert run("convert", tmp_path / "codes.npz", tmp_path / "back.npz", "--format", "fp16")[0] == 0
    for one, other in zip(files.nested(files.read(tmp_path / "back.npz").arrays), cache, strict=True):
        for got, given in zip(one, other, strict=True):
            np.testing.assert_allclose(got.swapaxes(1, 2), given, atol=np.abs(given).max() / 200)


def test_convert_says_how_many_bytes_it_writes(tmp_path):
    arrays = {
        "block_table": np.array([[4, 1]]),
        "seq_lens": np.array([6]),
        "cache": np.zeros((5, 2, 4, 1, 8)),
    }
    np.savez(tmp_path / "x.npz", **arrays)
    how = "--from", "flashinfer-nhd", "--to", "flashinfer-nhd", "--page-size", 2
    assert run("convert", tmp_path / "x.npz", tmp_path / "y.npz", *how)[1].endswith(": 768 B\n")
    assert files.read(tmp_path / "y.npz").arrays["cache"].nbytes == 3 * 2 * 2 * 8 * 8


def test_what_a_drawing_lacks_is_said(tmp_path):
    pool = {"cache": np.ones((2, 2, 4, 2, 1, 8), np.float16), "block_tables": np.array([[0, 1]])}
    lengths = {"context_lens": np.array([3])}
    np.savez(tmp_path / "x.npz", **pool, **lengths)
    assert "--layout: expected the layout of the cache" in run("draw", tmp_path / "x.npz")[2]
    drawn = run("draw", tmp_path / "x.npz", "--layout", "| l kv b n h c")
    assert drawn == (0, "0  aa\n1  a~\n2  ~~\n3  ~~\na 3 rows; ~ stale 5\n", "")
    code, out, _ = run("draw", tmp_path / "x.npz", "--sizes", "n=2")
    assert (code, out.splitlines()[:2]) == (0, ["0  aa", "1  a"])
    assert out.splitlines()[-1].startswith("note: drawn up to the last row in use")
    np.savez(tmp_path / "half.npz", **pool)
    assert "context_lens: expected an array, beside block_tables" in run("draw", tmp_path / "half.npz")[2]
    np.savez(tmp_path / "none.npz", cache=pool["cache"], layout="| l kv b n h c")
    assert "note: the file has no page tables" in run("draw", tmp_path / "none.npz")[1]
    pool["block_tables"][0, 1] = 9
    np.savez(tmp_path / "wrong.npz", **pool, **lengths, layout="| l kv b n h c")
    wanted = "block_tables[0, 1]: expected a page of the pool, 0 to 3 (see kvkit check), got 9"
    for command in (["draw"], ["study", "--schemes", "fp8"]):
        assert wanted in run(*command, tmp_path / "wrong.npz")[2]
    how = "--to", "hf", "--page-size", "longest"
    assert wanted in run("convert", tmp_path / "wrong.npz", tmp_path / "y.npz", *how)[2]


def test_pictures(tmp_path):
    verbs.fill(tmp_path)
    assert run("draw", tmp_path / "shared.npz", "-o", tmp_path / "x.svg")[:2] == (0, "")
    picture = (tmp_path / "x.svg").read_text()
    assert [picture.count(f'class="{kind}"') for kind in ("shared", "stale", "s0")] == [4, 1, 2]
    assert "prefers-color-scheme:dark" in picture
    assert run("draw", "hf", "-o", tmp_path / "hf.svg")[0] == 0
    assert (tmp_path / "hf.svg").read_text().startswith("<svg ")


def put(name, row, value):
    return lambda arrays, about: arrays[f"sequences.0.{name}"].__setitem__(row, value)


def length_of(tokens):
    return lambda arrays, about: about["paged"]["sequences"][0].update(length=tokens)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (put("block_table", 0, 99), "block_table: expected ids of blocks that the file has, got 99"),
        (put("block_table", 1, -1), "block_table: expected ids of blocks that the file has, got -1"),
        (put("segments", 0, -3), "segments: expected ascending ends among 9 tokens"),
        (length_of(4000), "block_table: expected 1002 blocks for 4000 tokens, got 4"),
        (length_of(1 << 50), " tokens, got 4"),
        (length_of(-2), "length: expected at least 0"),
        (lambda arrays, about: arrays.update(blocks=arrays["blocks"][::-1]), "blocks: expected ascending"),
    ],
)
def test_tables_of_a_paged_file_that_lie_are_named_in_a_line(tmp_path, lie, said):
    """Rows of a moved sequence are not looked for in blocks that the file does not have."""
    paged, states = PagedCache(16, 4, 1, 1, DIM, np.float16), np.ones((14, 1, DIM), np.float16)
    seq = paged.blocks.add(range(14))
    with paged.begin_step([(seq, 14)]) as step:
        step.update(states, states, 0)
    paged.remove(seq, 2, 7, close=True, rope="none")
    paged.save(tmp_path / "cache.npz", [seq])
    assert run("inspect", tmp_path / "cache.npz", "-q")[0] == 0
    changed(tmp_path / "cache.npz", lambda arrays, about: (lie(arrays, about), sealed(about, arrays))[1])
    for verb in ("inspect", "check", "draw", "edit"):
        more = {"draw": ["-o", tmp_path / "x.svg"], "edit": ["-o", tmp_path / "x.npz", "--remove", "1:2"]}
        code, out, err = run(verb, tmp_path / "cache.npz", *more.get(verb, []))
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert verb == "edit" or said in err, err
    assert not list(tmp_path.glob("x.*"))


def test_packs_of_vectors(tmp_path):
    code, out, _ = run("vectors", "make", tmp_path / "p", "--suite", "ascend", "--json")
    assert (code, json.loads(out)["cases"]) == (0, 29)
    assert run("vectors", "diff", tmp_path / "p", tmp_path)[0] == 1
    (tmp_path / "p" / "more").write_text("")
    assert run("vectors", "verify", tmp_path / "p")[0] == 1


def test_cells_of_llama_cpp_become_pages(tmp_path, rng):
    cells = [(position, ids) for position, ids in ((0, [3, 7]), (1, [3, 7]), (2, [7]), (2, [3]))]
    rows = [[rng.bytes(2 * HEADS * DIM) for _ in cells] for _ in range(2)]
    data = llama_state.head(False, 2, []) + llama_state.memory([(cells, [((1, rows[0]), (1, rows[1]))])], 1)
    (tmp_path / "state").write_bytes(data)
    assert run("draw", tmp_path / "state")[1].splitlines()[0] == "0  ##ba"
    found = json.loads(run("inspect", tmp_path / "state", "--stats", "--json")[1])
    assert (found["use"]["convention"], found["use"]["lengths"]) == ("cells", [3, 3])
    assert found["sizes"] == {"l": 1, "b": 1, "n": 4}
    how = "--to", "hf", "--page-size", "longest", "--sizes", "h=3"
    assert run("convert", tmp_path / "state", tmp_path / "x.npz", *how)[::2] == (0, "")
    [[keys, values]] = files.nested(files.read(tmp_path / "x.npz").arrays)
    assert keys.shape == values.shape == (2, HEADS, 3, DIM)
    for sequence, picked in enumerate(([0, 1, 3], [0, 1, 2])):
        for array, source in ((keys, rows[0]), (values, rows[1])):
            expected = [np.frombuffer(source[cell], np.float16).reshape(HEADS, DIM) for cell in picked]
            assert array[sequence].tobytes() == np.stack(expected, 1).tobytes()


def test_tables_in_a_file_of_their_own(tmp_path, rng):
    pool = [rng.standard_normal((6, 4, 2, 16)).astype(np.float32)]
    files.write(tmp_path / "pool.safetensors", pool, files.Description("vllm-lbnhc"))
    numbers = {"kv_indptr": [0, 2, 3], "kv_indices": [5, 2, 3], "kv_last_page_len": [3, 2], "page_size": 4}
    files.write(tmp_path / "tables.npz", {name: np.array(each) for name, each in numbers.items()})
    code, _, err = run(
        "convert", tmp_path / "pool.safetensors", tmp_path / "out.npz", "--to", "hf", "--tables",
        tmp_path / "tables.npz", "--page-size", "longest",
    )  # fmt: skip
    assert (code, err) == (0, "")
    [[keys, _]] = files.nested(files.read(tmp_path / "out.npz").arrays)
    expected = np.concatenate([pool[0][5], pool[0][2]])[:7, :, :8].transpose(1, 0, 2)
    assert np.array_equal(keys[0], expected)


def test_codes_of_mlx_move_with_their_scales(tmp_path, rng):
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


def test_caches_that_kvkit_saved(tmp_path, cache, rng):
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


def test_a_saved_paged_cache_whose_tokens_moved(tmp_path, rng):
    """Its tables have a page for each token; findings and pictures name blocks and rows."""
    paged, tokens, path = PagedCache(9, 4, LAYERS, HEADS, DIM, np.float16), 11, tmp_path / "paged.npz"
    seq = paged.blocks.add(range(tokens))
    with paged.begin_step([(seq, tokens)]) as step:
        for layer in range(LAYERS):
            step.update(*rng.standard_normal((2, tokens, HEADS, DIM)).astype(np.float16), layer)
    paged.remove(seq, 2, 5)
    paged.save(path, [seq])
    code, out, err = run("check", path)
    assert (code, out.partition(":")[0], err) == (0, "nothing found", "")
    assert "aa==" in run("draw", path)[1]  # rows of a published block stay as they are
    paged.save(tmp_path / "none.npz", [])
    assert run("draw", tmp_path / "none.npz")[1] == "0  ====\n1  ====\n= published 8\n"
    compared = [files.read(path).arrays[name].nbytes for name in ("cache", "sequences.0.positions")]
    assert run("diff", path, path)[:2] == (0, f"equal: {sum(compared)} bytes\n")
    assert run("study", path, "--schemes", "fp8")[0] == 0
    assert run("convert", path, tmp_path / "x.npz", "--format", "float32")[0] == 0
    assert files.read(tmp_path / "x.npz").description.sizes["n"] == tokens - 3
    found = files.read(path)
    arrays = {name: np.array(array) for name, array in found.arrays.items()}
    block, row = divmod(int(CacheSource(path).block_tables()[1].rows()[3]), 4)
    arrays["cache"][1, 0, block, row, 1, 5] = np.nan
    files.write(tmp_path / "odd.npz", arrays, found.description, metadata=found.metadata)
    code, out, _ = run("check", tmp_path / "odd.npz")
    assert (code, f"key_cache[1, {block}, {row}]" in out, "\n1 finding; " in out) == (1, True, True), out


def test_a_saved_cache_with_holes_is_converted_to_no_layout(tmp_path):
    cache, states = DynamicCache(1), np.ones((1, HEADS, TOKENS, DIM), np.float16)
    cache.update(states, states, 0)
    cache.remove(3, 5)
    cache.save(tmp_path / "holes.npz")
    code, out, err = run("convert", tmp_path / "holes.npz", tmp_path / "out.npz", "--to", "vllm-lbnhc")
    assert (code, out) == (2, "")
    assert "got removed or moved tokens (kvkit.cache.load reads them)" in err
