"""Caches of tensor-parallel ranks: heads that several have are written once, and cut and join are inverse."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkit import files, tools
from kvkit.cache import DynamicCache
from kvkit.errors import KvkitError
from kvkit.files import Contents, Description
from kvkit_cli.main import main

pytestmark = pytest.mark.cpu
L, N, D = 2, 9, 8
LAYOUTS = "| kv l n h c", "l kv | b h n c", "l | b n h (kv c)", "l kv | b (h c1) n c0[4]", "b l kv | n h c"


def whole(heads, batch=1):
    """Return keys and values whose elements all differ, float32 [2, L, batch, N, heads, D]."""
    return np.arange(2 * L * batch * N * heads * D, dtype=np.float32).reshape(2, L, batch, N, heads, D)


def ranks_of(heads, count, order=lambda rank, heads, count: rank * heads // count):
    """Return the arrays of each rank, which holds one head."""
    keys, values = whole(heads)[:, :, 0]
    heads_of = (order(rank, heads, count) for rank in range(count))
    return [{"key": keys[:, :, head, None], "value": values[:, :, head, None]} for head in heads_of]


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 8), ranks=st.integers(1, 16), batch=st.integers(1, 2),
    layout=st.sampled_from(LAYOUTS), narrow=st.sampled_from([np.float32, np.float16, np.uint8]),
)  # fmt: skip
def test_what_is_cut_joins_to_the_same_bytes(heads, ranks, batch, layout, narrow):
    batch = batch if "b" in layout else 1
    sides = (1 + whole(heads, batch) % 251).astype(narrow)
    source = Contents({"cache": list(sides.swapaxes(0, 1))}, {}, description=Description("l | kv b n h c"))
    if "b" not in layout:
        source = Contents({"cache": sides[:, :, 0]}, {}, description=Description("| kv l n h c"))
    made = tools.convert(source, None, to_layout=layout)
    arrays = Contents(files.flat(made.arrays), {}, description=made.description)
    if heads % ranks and ranks % heads:
        with pytest.raises(
            KvkitError, match=rf"ranks: expected a number that divides {heads} heads, or a multiple"
        ):
            tools.cut(arrays, ranks)
        return
    parts = [tools.convert(part, None, to_layout=layout) for part in tools.cut(arrays, ranks)]
    assert {part.description.sizes["h"] for part in parts} == {max(heads // ranks, 1)}
    again = tools.join([Contents(files.flat(x.arrays), {}, description=x.description) for x in parts])
    back = tools.convert(again, None, to_layout=layout)
    found, expected = (files.flat(each.arrays) for each in (back, made))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name
    assert bool(again.notes) == (ranks > heads)


def test_what_is_equal_by_chance_is_no_copy():
    """Zeros tell nothing; two equal ranks of many are noted, but may be one file that was given twice."""
    zeros = [{"key": np.zeros((L, N, 1, D)), "value": np.zeros((L, N, 1, D))} for _ in range(4)]
    joined = tools.join(zeros)
    assert (joined.arrays["cache.0.0"].shape[2], joined.notes) == (4, ())
    assert tools.join(zeros, num_kv_heads=4).arrays["cache.0.0"].shape[2] == 4
    ranks = {f"rank{i}": arrays for i, arrays in enumerate(ranks_of(4, 4))} | {"rank3": ranks_of(4, 4)[1]}
    joined = tools.join(ranks)
    assert joined.arrays["cache.0.0"].shape[2] == 4
    assert joined.notes == ("rank1 and rank3 are equal bit for bit, unlike others",)
    wanted = (
        "sources: expected ranks with the 2 key heads of the model, or with equal copies of them, got 4 that"
    )
    with pytest.raises(KvkitError, match=wanted):
        tools.join(ranks_of(4, 4), num_kv_heads=2)


def test_queries_are_cut_and_joined(rng):
    keys, values = whole(4)[:, :, 0]
    query = rng.standard_normal((L, 1, 3, 8, D)).astype(np.float32)
    for ranks in 2, 4, 8:
        parts = tools.cut({"key": keys, "value": values, "query": query}, ranks)
        assert [part.arrays["query"].shape[3] for part in parts] == [8 // ranks] * ranks
        assert np.array_equal(parts[-1].arrays["query"][..., -1, :], query[..., -1, :])
        assert np.array_equal(tools.join(parts).arrays["query"], query)


def test_the_command_line(tmp_path):
    keys, values = whole(4)[:, :, 0]
    path, folder, back = tmp_path / "whole.npz", tmp_path / "ranks", tmp_path / "back.npz"
    files.write(
        path, {"cache": np.stack([keys, values]), "positions": np.arange(N)}, Description("| kv l n h c")
    )
    config = {"model_type": "llama", "num_hidden_layers": L, "num_attention_heads": 32, "head_dim": D}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4, "hidden_size": 256}))
    model = ["--model", str(tmp_path / "config.json")]
    shown = CliRunner().invoke(main, ["convert", str(path), str(folder), "--ranks", "8"])
    assert shown.exit_code == 0, shown.output
    names = [str(folder / f"rank{rank}.npz") for rank in range(8)]
    assert [line.partition(":")[0] for line in shown.stdout.splitlines()] == names
    for more in [], model:
        verb = ["convert", *names, str(back), "--axis", "h", "--to", "| kv l n h c", *more]
        shown = CliRunner().invoke(main, verb)
        assert shown.exit_code == 0, shown.output
        assert "note: 8 heads of 8 ranks are 4" in shown.stdout
        found = files.read(back)
        assert np.array_equal(found.arrays["cache"], np.stack([keys, values]))
        assert found.arrays["positions"].tolist() == [*range(N)]
    named = CliRunner().invoke(
        main, ["convert", str(path), str(tmp_path / "x.safetensors"), "--ranks", "2", "--to", "hf"]
    )
    assert named.exit_code == 0, named.output
    assert files.read(tmp_path / "x.rank1.safetensors").description.sizes["h"] == 2
    for words in (["--axis", "h"], ["--ranks", "3"], ["--ranks", "0"]):
        verb = ["convert", str(path), str(folder), *(["--ranks", "2"] if "--axis" in words else []), *words]
        shown = CliRunner().invoke(main, verb)
        assert (shown.exit_code, "--ranks: expected" in shown.stderr) == (2, True), shown.output
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    shown = CliRunner().invoke(main, ["convert", *names, str(back), "--axis", "h", "--to", "hf", *model])
    assert "expected ranks with the 2 key heads of the model" in shown.stderr


LINE = "| l b n h c"


def test_parts_of_a_prompt_are_joined_along_tokens(tmp_path):
    keys, values = whole(2)
    for layout in ("hf", "l | b n h c kv"):
        parts = [
            {"key": keys[:, :, begin:end], "value": values[:, :, begin:end]}
            for begin, end in ((0, 4), (4, 5), (5, N))
        ]
        queries = np.arange(2 * 2 * D, dtype=np.float32).reshape(1, 1, 2, 2, D)
        joined = tools.join([*parts[:2], parts[2] | {"query": queries}], axis="n", layout=LINE)
        np.testing.assert_array_equal(joined.arrays["query"], queries)
        first = [parts[0] | {"query": queries}, *parts[1:]]
        assert "query" not in tools.join(first, axis="n", layout=LINE).arrays
        assert "keys are as they were" in joined.notes[-1]
        found = tools.convert(joined, None, to_layout=layout)
        wanted = tools.convert({"key": keys, "value": values}, None, from_layout=LINE, to_layout=layout)
        for name, array in wanted.arrays.items():
            np.testing.assert_array_equal(np.asarray(found.arrays[name]), np.asarray(array))


def test_what_has_positions_is_not_joined_along_tokens(tmp_path):
    keys, values = whole(2)
    plain = {"key": keys, "value": values}
    with pytest.raises(KvkitError, match=r"sources: expected .* but for its tokens"):
        tools.join([plain, {"key": keys[..., :1, :], "value": values[..., :1, :]}], axis="n", layout=LINE)
    with pytest.raises(KvkitError, match=r"without tables or positions .* got positions in"):
        tools.join([plain | {"positions": np.arange(N)}] * 2, axis="n", layout=LINE)
    cache = DynamicCache(1, rope="none")
    cache.update(keys[0].swapaxes(1, 2), values[0].swapaxes(1, 2), 0)
    cache.remove(2, 4)
    cache.save(tmp_path / "moved.npz")
    with pytest.raises(KvkitError, match=r"^source: expected a cache whose row r has position r"):
        tools.join([tmp_path / "moved.npz"] * 2, axis="n")
    with pytest.raises(KvkitError, match="axis: expected 'h', the heads, or 'n', the tokens"):
        tools.join([plain], axis="b")
