"""Layouts that names of arrays leave open: refused with both readings, or read rightly and called a guess."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvkit import files, tools
from kvkit.errors import KvkitError
from kvkit.layouts import NAMED, parse
from kvkit.tools.readers import open_cache
from kvkit_cli.main import main

pytestmark = pytest.mark.cpu
L, D = 2, 4
PAIRS = ("key_cache", "value_cache"), ("keys", "values"), ("key", "value"), ("key_states", "value_states")


def by_layer(*patterns):
    return lambda keys, values: {
        pattern.format(i): x for i, pair in enumerate(zip(keys, values, strict=True))
        for pattern, x in zip(patterns, pair, strict=True)
    }  # fmt: skip


DUMPS = {  # what people write of transformers' layers, [sequences, heads, tokens, content]
    **{f"{pair[0]}, a list": lambda k, v, pair=pair: files.flat({pair[0]: k, pair[1]: v}) for pair in PAIRS},
    **{f"{pair[0]}, stacked": lambda k, v, pair=pair: {pair[0]: np.stack(k), pair[1]: np.stack(v)}
       for pair in PAIRS},
    **{key: by_layer(key, key[::-1].replace("yek", "eulav", 1)[::-1]) for key in (
        "layer_{}.key", "layer_{}_key", "key_cache_{}", "layers.{}.key_cache", "present.{}.key",
        "past_key_values.{}.key", "model.layers.{}.self_attn.key",
    )},
    "k_cache_{}": by_layer("k_cache_{}", "v_cache_{}"),
    "self_attn.k": by_layer("model.layers.{}.self_attn.k", "model.layers.{}.self_attn.v"),
    "layers.{}.k_cache": by_layer("layers.{}.k_cache", "layers.{}.v_cache"),
    "past_key_values.{}.0": by_layer("past_key_values.{}.0", "past_key_values.{}.1"),
}  # fmt: skip
HF = {False: "l | b h n c", True: "| l b h n c"}  # of a list of layers, of one array of all


def sides(batch, heads, tokens):
    counted = np.arange(2 * L * batch * heads * tokens * D, dtype=np.float32)
    return [list(side) for side in counted.reshape(2, L, batch, heads, tokens, D)]


def tokens_of(keys):
    """Return the keys of layer 0 as readers give them, [sequences and tokens, heads, content]."""
    return keys[0].swapaxes(1, 2).reshape(-1, keys[0].shape[1], D)


@pytest.mark.parametrize("name", DUMPS)
@settings(max_examples=15, deadline=None)
@given(batch=st.sampled_from([1, 1, 2, 5]), heads=st.integers(1, 128), tokens=st.integers(1, 200))
@example(batch=1, heads=3, tokens=100)
@example(batch=1, heads=8, tokens=5)
@example(batch=1, heads=32, tokens=32)
@example(batch=2, heads=3, tokens=100)
def test_layers_of_transformers_are_read_rightly_or_refused(name, batch, heads, tokens):
    """Short prompts of many heads in a batch are the one case that only looks like pages."""
    if batch > 1 and tokens < heads:
        return
    keys, values = sides(batch, heads, tokens)
    arrays = DUMPS[name](keys, values)
    hf = HF["stacked" in name]
    refused, found = None, None
    try:
        found = open_cache(arrays).layer(0).key.read(slice(None))
    except KvkitError as error:
        refused = str(error)
    if refused is None:
        assert np.array_equal(found, tokens_of(keys))
    else:
        assert "layout: expected a layout, as " in refused
        assert f"'{hf}' ({tokens} tokens of {heads} heads)" in refused.replace(" rows of", " tokens of")
        assert re.search(r"or the size h, as sizes=\{'h': [0-9]+\}, got None", refused)
    assert np.array_equal(open_cache(arrays, hf).layer(0).key.read(slice(None)), tokens_of(keys))
    if heads != tokens:  # the size decides between two orders
        read = open_cache(arrays, sizes={"h": heads}).layer(0).key.read(slice(None))
        assert np.array_equal(read, tokens_of(keys))


def saved_by_torch(path, arrays):
    torch = pytest.importorskip("torch")
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)


WRITERS = {".npz": files.write, ".safetensors": files.write, ".pt": saved_by_torch}


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_guess_is_noted_for_every_kind_of_file(tmp_path, suffix):
    path, out = str(tmp_path / f"cache{suffix}"), str(tmp_path / "out.npz")
    keys, values = sides(3, 20, 2)  # that is 20 rows of 2 heads in 3 pages
    WRITERS[suffix](path, by_layer("key_cache_{}", "value_cache_{}")(keys, values))
    verbs = ["inspect", path], ["check", path], ["study", path, "--schemes", "fp8"], ["draw", path]
    for verb in (*verbs, ["convert", path, out, "--to", "hf"], ["convert", path, out, "--format", "float16"]):
        shown = CliRunner().invoke(main, verb)
        assert shown.exit_code == 0, shown.output
        assert "the layout 'kv l | b n h c' is guessed from the names of arrays" in shown.output, verb
        assert "guessed" not in CliRunner().invoke(main, ["inspect", out]).output


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_verb_refuses_what_names_leave_open(tmp_path, suffix):
    path, out = str(tmp_path / f"cache{suffix}"), tmp_path / "out.npz"
    WRITERS[suffix](path, files.flat(dict(zip(("key_cache", "value_cache"), sides(1, 3, 100), strict=True))))
    said = (
        "a layout, as key_cache (1, 3, 100, 4) may be 'l | b n h c' (3 tokens of 100 heads) or 'l | b h n c'"
    )
    for verb in ["check", path], ["study", path], ["draw", path], ["convert", path, str(out), "--to", "hf"]:
        shown = CliRunner().invoke(main, verb)
        assert (shown.exit_code, said in shown.stderr) == (2, True), (verb, shown.output)
    shown = CliRunner().invoke(main, ["inspect", path])  # which lists arrays, and what may be given
    assert shown.exit_code == 0
    assert f"note: give {said}" in shown.stdout
    assert not out.exists()


@pytest.mark.transformers
def test_the_dump_of_transformers_4(tmp_path):
    """`{"key_cache": cache.key_cache, "value_cache": cache.value_cache}`, where they are lists of tensors."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    keys, values = sides(1, 3, 100)
    for i in range(L):
        cache.update(torch.from_numpy(keys[i]), torch.from_numpy(values[i]), i)
    lists = {
        f"{side[:-1]}_cache": [getattr(layer, side) for layer in cache.layers] for side in ("keys", "values")
    }
    torch.save(lists, tmp_path / "cache.pt")
    with pytest.raises(KvkitError, match="layout: expected a layout, as key_cache"):
        open_cache(tmp_path / "cache.pt")
    done = tools.convert(
        tmp_path / "cache.pt", None, from_layout="hf", to_layout="vllm-lbnhc", page_size=16, verify=True
    )
    assert done.description.sizes == {"l": L, "b": 7, "n": 16, "h": 3, "c": D}
    config = {"model_type": "llama", "num_hidden_layers": L, "num_attention_heads": 9, "head_dim": D}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    shown = CliRunner().invoke(
        main, ["inspect", str(tmp_path / "cache.pt"), "--model", str(tmp_path / "config.json")]
    )
    assert "sizes: l 2, b 1, n 100, h 3, c 4" in shown.stdout


def test_arrays_that_a_verb_does_not_use_are_noted(tmp_path):
    keys, values = np.zeros((2, L, 40, 2, 64), np.float16)
    arrays = {
        "key": keys,
        "value": values,
        "queries": np.zeros((L, 1, 4, 8, 64), np.float16),
        "extra": np.zeros(3),
    }
    path, state = str(tmp_path / "cache.npz"), str(tmp_path / "state.bin")
    files.write(path, arrays)
    for verb, note in (
        (["inspect", path], "not read: extra"),
        (["check", path], "not read: queries (did you mean query?), extra"),
        (["study", path, "--schemes", "fp8"], "not read: extra"),
        (["draw", path], "not read: queries, extra"),
        (
            ["diff", path, path, "--layout-a", "| l n h c", "--layout-b", "| l n h c"],
            "not compared: queries, extra",
        ),
        (["convert", path, state, "--to", "l | kv b n h c"], "not written: queries, extra"),
    ):
        shown = CliRunner().invoke(main, verb)
        assert shown.exit_code == 0, shown.output
        assert note in shown.stdout, verb
    both = tools.study(arrays | {"query": arrays["queries"]}, "fp8")
    assert "not read: queries (did you mean query?), extra" in both.notes
    assert {"queries", "extra"} <= tools.convert(path, None, to_layout="hf").arrays.keys()


ONE_LAYER = np.arange(8 * 16 * 3 * 128, dtype=np.float32).reshape(8, 16, 3, 128)
LAYERED = [name for name, named in NAMED.items() if named.layout.lists and not named.layout.has_scales]


@pytest.mark.parametrize("name", LAYERED)
def test_one_layer_is_no_list_of_layers(tmp_path, name):
    """Its blocks counted as layers. Every verb says the same, whatever sizes are given."""
    line = parse(name)
    path = str(tmp_path / "pool.npy")
    np.save(path, np.zeros([8, 16, 3, 4, 2, 32, 2][: min(len(line.axes), len(line.value_axes))], np.float16))
    said = set()
    for sizes in [], ["--sizes", "c=16"], ["--sizes", "h=1,c=16"]:
        for verb in (
            ["inspect", path, "--layout", name, *sizes], ["check", path, "--layout", name, *sizes],
            ["study", path, "--layout", name, "--schemes", "fp8", *sizes], ["draw", path, "--layout", name],
            ["convert", path, str(tmp_path / "out.npz"), "--from", name, "--to", "hf", *sizes],
            ["diff", path, path, "--layout-a", name, "--layout-b", name, *sizes],
        ):  # fmt: skip
            shown = CliRunner().invoke(main, verb)
            assert shown.exit_code == (1 if verb[0] == "check" else 2), (verb, shown.output)
            said.add(
                next(line for line in shown.output.splitlines() if "cache[0]" in line)[-300:].partition(
                    "cache[0]"
                )[2]
            )
    assert len(said) == 1
    assert f"(without a list of layers the layout is '{' '.join(line.axes)}')" in said.pop()


def test_a_stack_of_layers_still_stands_for_their_list():
    stack = np.stack([ONE_LAYER, -ONE_LAYER])
    assert tools.inspect({"cache": stack}, layout="vllm-lbnhc").sizes == {
        "l": 2,
        "b": 8,
        "n": 16,
        "h": 3,
        "c": 64,
    }
    joined = stack.reshape(2, 8, 16, -1)  # whose number of layers is said
    sizes = {"l": 2, "c": 64}
    assert tools.inspect({"cache": joined}, layout="vllm-lbnhc", sizes=sizes).sizes["h"] == 3
    alone = tools.convert({"cache": ONE_LAYER}, None, from_layout="b n h (kv c)", to_layout="l | kv b n h c")
    assert np.array_equal(alone.arrays["cache"][0][0], ONE_LAYER[..., :64])


FUSED = {"model.layers.{}.self_attn.attn": "model.layers.{l}.self_attn.attn", "layer{}": "layer{l}"}


@pytest.mark.parametrize("name", FUSED)
def test_fused_arrays_under_engines_names(tmp_path, name):
    """They are named in errors, with a pattern that reads them; `num_blocks` is not to blame."""
    arrays = {name.format(i): (i + 1) * ONE_LAYER for i in range(2)}
    path, out = str(tmp_path / "pool.npz"), str(tmp_path / "out.npz")
    files.write(path, arrays | {"block_tables": np.array([[3, 1]]), "context_lens": np.array([20])})
    hint, layout = f"or a pattern (--cache {FUSED[name]}, say, and its layout)", ["--layout", "vllm-lbnhc"]
    verbs = ["check", path], ["study", path, "--schemes", "fp8"], ["draw", path]
    for verb in verbs:
        shown = CliRunner().invoke(main, verb)
        assert (shown.exit_code, hint in shown.stderr) == (2, True), shown.output
        assert name.format(0) in shown.stderr
        assert "num_blocks" not in shown.stderr
    assert f"--cache {FUSED[name]}" in CliRunner().invoke(main, ["inspect", path]).stdout
    given = ["--cache", FUSED[name]]
    for verb in (*verbs, ["inspect", path]):
        shown = CliRunner().invoke(main, [*verb, *given, *layout])
        assert shown.exit_code == 0, shown.output
    verb = ["convert", path, out, "--from", "vllm-lbnhc", "--to", "hf", "--page-size", "longest", *given]
    assert CliRunner().invoke(main, verb).exit_code == 0
    keys = files.read(out).arrays["cache.1.0"]
    assert np.array_equal(keys[0].swapaxes(0, 1)[:16], 2 * ONE_LAYER[3, :, :, :64])
    shown = CliRunner().invoke(main, ["check", path, *given, "--keys", "a{l}"])
    assert "--cache: expected no pattern beside one of keys or values" in shown.stderr
