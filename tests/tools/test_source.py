"""One reading of caches: whatever the arrays are called, every tool takes them, and says the same of them."""

import numpy as np
import pytest
from click.testing import CliRunner

import kvkit
from kvkit import files, formats, tools
from kvkit.errors import KvkitError
from kvkit.tools.contents import by_patterns
from kvkit.tools.names import HEADS_FIRST, NAMINGS, TOKENS_FIRST
from kvkit.tools.readers import open_cache
from kvkit_cli.main import main

pytestmark = pytest.mark.cpu

L, B, N, H, C = 2, 3, 8, 2, 16
CANONICAL = "| l kv b n h c"
TABLES = {"block_tables": np.array([[2, 0], [1, -1]]), "context_lens": np.array([13, 5])}


def whole(key, value):
    return {"cache": np.stack([key, value], axis=1), "layout": CANONICAL}


def by_layer(key, value):
    return {"cache": [np.stack(pair) for pair in zip(key, value, strict=True)], "layout": "l | kv b n h c"}


def apart(names, layers=slice(None)):
    return lambda key, value: dict(zip(names, (key[layers], value[layers]), strict=True))


def lists(key, value):
    return {"key_cache": list(key), "value_cache": list(value)}


def heads_first(key, value):
    return {"key": key.swapaxes(2, 3).copy(), "value": value.swapaxes(2, 3).copy(), "layout": "| l b h n c"}


def per_layer(patterns, heads_first=False):
    def made(key, value):
        sides = (side.swapaxes(2, 3).copy() if heads_first else side for side in (key, value))
        return {name.format(l=i): x for name, side in zip(patterns, sides, strict=True)
                for i, x in enumerate(side)}  # fmt: skip

    return made


def stacked(key, value):
    """Return arrays [L, B, H, S, D], whose names alone do not tell them from pages."""
    return per_layer(("keys", "values"))(*([side.swapaxes(2, 3).copy()] for side in (key, value))) | {
        "layout": "| l b h n c"
    }


SCHEMES = {
    "stacked": stacked,
    **{f"{names[0]} and another layout": lambda key, value, names=names: per_layer(names)(
        *(side.swapaxes(2, 3).copy() for side in (key, value))) | {"layout": "l | b h n c"}
       for names in TOKENS_FIRST[:1]},
    **{names[0]: per_layer(names, heads_first=True) for names in HEADS_FIRST},
    **{names[0]: per_layer(names) for names in TOKENS_FIRST},
    "cache": whole, "cache.N": by_layer, "key_cache.N": lists, "a layout said": heads_first,
    **{"/".join(names): apart(names) for names in NAMINGS},
}  # fmt: skip


@pytest.fixture
def sides(rng):
    return rng.standard_normal((2, L, B, N, H, C)).astype(np.float16)


def inspected(arrays):
    found = tools.inspect(arrays, stats=True)
    return found.sizes, found.numbers, found.use


def converted(arrays, **options):
    done = tools.convert(arrays, None, to_layout=CANONICAL, **options)
    return done.arrays["cache"].tobytes(), done.description.sizes


def paged_again(arrays):
    done = tools.convert(arrays, None, to_layout="hf", page_size="longest", verify=True)
    return [[side.tobytes() for side in layer] for layer in done.arrays["cache"]]


def checked(arrays):
    return [(each.rule, each.where.partition("[")[2], each.message) for each in tools.check(arrays)]


def studied(arrays):
    return tools.study(arrays, "fp8,int8:g8").summary


def drawn(arrays, path):
    said = files.Description(arrays.get("layout"))
    files.write(path, {name: each for name, each in arrays.items() if name != "layout"}, said)
    shown = CliRunner().invoke(main, ["draw", str(path)])
    lines = shown.stdout.splitlines()  # which say of some names that they are a guess
    return shown.exit_code, [line for line in lines if "is guessed" not in line]


@pytest.mark.parametrize("name", SCHEMES)
def test_every_tool_takes_every_name(sides, name, tmp_path):
    sides[0, 1, 2, 3, 1, 5] = np.nan
    expected, arrays = whole(*sides) | TABLES, SCHEMES[name](*sides) | TABLES
    assert inspected(arrays) == inspected(expected)
    assert converted(arrays) == converted(expected)
    assert paged_again(arrays) == paged_again(expected)
    assert checked(arrays)[0][:2] == ("D1", "1, 2, 3]")
    assert checked(arrays) == checked(expected)
    assert tools.diff(expected, arrays).equal
    assert drawn(arrays, tmp_path / "one.npz") == drawn(expected, tmp_path / "other.npz")
    assert drawn(arrays, tmp_path / "one.npz")[0] == 0
    rolled = np.roll(sides[1], 1, axis=2)
    [found] = tools.diff(expected, SCHEMES[name](sides[0], rolled)).arrays
    assert found.differing == (rolled != sides[1]).sum()
    sides[0, 1, 2, 3, 1, 5], sides[:, :, 1, 5:] = 0, np.nan  # rows without a token are not read
    expected, arrays = whole(*sides) | TABLES, SCHEMES[name](*sides) | TABLES
    assert studied(arrays) == studied(expected)


@pytest.mark.parametrize("name", [HEADS_FIRST[0][0], TOKENS_FIRST[2][0], "key_cache.N", "keys/values"])
def test_a_layout_is_used_or_refused(sides, name, tmp_path):
    """By every verb, beside names that imply one; files without tables are taken, too."""
    path, odd, out = (str(tmp_path / each) for each in ("a.npz", "odd.npz", "out.npz"))
    files.write(path, SCHEMES[name](*sides))
    sides[0, 1, 2, 3, 1, 5] = np.nan  # which `check` names a row of
    files.write(odd, SCHEMES[name](*sides))
    other = "l | b n h c" if name == HEADS_FIRST[0][0] else "l | b h n c"
    results = []
    for layout in None, other, "| l kv b n h c":
        to, one, both = (
            [word for option in options for word in (option, layout)] if layout else []
            for options in (["--from"], ["--layout"], ["--layout-a", "--layout-b"])
        )
        verbs = (
            ["inspect", path, *one], ["check", odd, *one], ["study", path, "--schemes", "fp8", *one],
            ["convert", path, out, "--to", "hf", *to], ["convert", path, out, "--format", "float32", *to],
            ["diff", path, path, *both],
        )  # fmt: skip
        results.append([CliRunner().invoke(main, verb) for verb in verbs])
        if layout == other:
            assert files.read(out).description.sizes == {"l": L, "b": B, "n": H, "h": N, "c": C}
    assert [[one.exit_code for one in each] for each in results] == [[0, 1, 0, 0, 0, 0]] * 2 + [[2] * 6]
    implied, used, refused = ([one.output for one in each] for each in results)
    assert all(one != another for one, another in zip(implied[:-1], used[:-1], strict=True))
    assert all("a layout without an axis kv" in text for text in refused)


@pytest.mark.parametrize("names", NAMINGS[1:], ids="/".join)
def test_packed_tokens_are_sequences(sides, names):
    """[layers, tokens, heads, content], or one layer; in pages they are where `seqstarts` cuts them."""
    key, value = sides.reshape(2, L, B * N, H, C)
    starts = {"seqstarts": np.array([0, 9, B * N])}
    for layers in slice(None), 0:
        arrays = apart(names, layers)(key, value) | starts
        assert (tools.inspect(arrays).sizes["n"], tools.inspect(arrays).use.lengths) == (B * N, [9, 15])
        done = tools.convert(arrays, None, to_layout="hf", page_size="longest")
        first = done.arrays["cache"][0][0].swapaxes(1, 2)
        assert np.array_equal(first[0, :9], key[0, :9])
        assert np.array_equal(first[1], key[0, 9:])
        assert not done.arrays.keys() & {"seqstarts"}
        assert set(tools.check(arrays).checked) - {"D6"} == {"L3", "D1", "D4", "D5", "D7"}
        again = tools.convert(arrays, None, to_layout="hf")
        again = files.Contents(files.flat(again.arrays), {}, description=again.description)
        assert open_cache(again).layer(0).starts == [0, 9, B * N]
        assert tools.study(arrays, "fp8").tokens == B * N
    assert tools.diff(apart(names)(key, value), whole(*sides.reshape(2, L, 1, B * N, H, C))).equal


@pytest.mark.parametrize("name", ["cache", "cache.N", "key_cache/value_cache", "keys/values"])
@pytest.mark.parametrize(
    ("format", "said"), [("int8:g8", "int8:g8"), ("int8:g8", None), ("uint4:g8", "uint4:g8")]
)
def test_codes_with_what_is_beside_them(sides, name, format, said, tmp_path):
    """Also int8 whose format nobody says: the scales tell the groups."""
    coded = [formats.encode(side, formats.named(format, cell=formats.FLOAT16)) for side in sides]
    arrays = {"layout": None, **TABLES}
    for part in coded[0]:
        for one, each in SCHEMES[name](*(side[part] for side in coded)).items():
            side = {"keys": "key", "values": "value"}.get(one, one).removesuffix("_cache")
            beside = part if side == "cache" else f"{side}_{part}"
            arrays[one if one == "layout" or part == "codes" else beside] = each
    path, layout = tmp_path / "coded.npz", arrays.pop("layout")
    files.write(path, arrays, files.Description(layout, format=said))
    decoded = [formats.decode(side, format) for side in coded]
    expected = studied(whole(*decoded) | TABLES)
    for source in arrays | {"layout": layout, "format": said}, path:
        for one, other in zip(studied(source), expected, strict=True):
            assert (one.key_error, one.value_error) == (other.key_error, other.value_error)
        assert {"Q1", "Q4"} <= set(tools.check(source).checked)
        found = tools.convert(source, None, to_layout="l kv | b n h c").arrays
        for part in coded[0]:
            assert np.array_equal(found["cache" if part == "codes" else part][1][0], coded[0][part][1])
        other = tools.convert(source, None, to_layout=CANONICAL)
        assert tools.diff(source, files.Contents(other.arrays, {}, description=other.description)).equal
    files.write(
        tmp_path / "other.npz",
        {**arrays, **{each: 2 * np.array(arrays[each]) for each in arrays if "scale" in each}},
        files.Description(layout),
    )
    assert "scale" in str(tools.diff(path, tmp_path / "other.npz"))


def test_names_by_patterns(sides, tmp_path):
    """--keys and --values, with and without {l}; what they do not find is told the nearest names."""
    arrays = per_layer(("block{l}/attn/K", "block{l}/attn/V"))(*sides)
    shifted = {name.replace("block", "block1"): x for name, x in arrays.items()}
    files.write(tmp_path / "a.npz", arrays | {"other": np.zeros(3)})
    files.write(tmp_path / "whole.npz", {"k": sides[0], "v": sides[1]})
    found = by_patterns(arrays, "block{l}/attn/K", "block{l}/attn/V")
    assert converted(found) == converted(whole(*sides))
    numbered = by_patterns(shifted, "block{l}/attn/K", "block{l}/attn/V")
    assert [open_cache(numbered).layer(i).name for i in (0, 1)] == ["layer 10", "layer 11"]
    named, pool = ["--keys", "block{l}/attn/K", "--values", "block{l}/attn/V"], str(tmp_path / "a.npz")
    verbs = [["inspect", pool], ["study", pool, "--schemes", "fp8"], ["check", pool], ["diff", pool, pool]]
    for verb in (*verbs, ["convert", pool, str(tmp_path / "b.npz"), "--to", CANONICAL]):
        shown = CliRunner().invoke(main, [*verb, *named])
        assert shown.exit_code == 0, (verb, shown.output)
    assert tools.diff(tmp_path / "b.npz", whole(*sides)).equal
    assert tools.diff(by_patterns(tmp_path / "whole.npz", "k", "v"), whole(*sides)).equal
    shown = CliRunner().invoke(main, ["inspect", pool, "--keys", "block{l}/attn/Q", "--values", "v"])
    assert shown.stderr.startswith(
        "kvkit: --keys: expected the name of an array, with {l} for the number of "
    )
    assert "names like it: block0/attn/V, block0/attn/K, block1" in shown.stderr


def test_layers_of_other_lengths(sides):
    """--layers takes those of one length, which keep their numbers; convert says so where it is wanted."""
    short = per_layer(HEADS_FIRST[0], heads_first=True)(*sides[:, :, :, :3].copy())
    arrays = per_layer(HEADS_FIRST[0], heads_first=True)(*sides)
    mixed = {**arrays, **{name.replace(".0.", ".4.").replace(".1.", ".7."): x for name, x in short.items()}}
    assert converted(mixed, layers="0,1") == converted(whole(*sides))
    assert converted(mixed, layers="0:2") == converted(whole(*sides))
    done = tools.convert(mixed, None, to_layout="hf", layers="4:")
    assert (done.arrays["layers"].tolist(), done.description.sizes["n"]) == ([4, 7], 3)
    assert "n" not in tools.inspect(mixed).sizes
    with pytest.raises(KvkitError, match=r"in each layer, got .* \(layers=0,2: takes those of one length\)"):
        tools.convert(mixed, None, to_layout="hf")
    for text, got in (("9", "9"), ("x", "x"), ("2:4", "2:4"), ("::0", "::0")):
        with pytest.raises(KvkitError, match=rf"layers: expected .*, got {got}$"):
            tools.convert(mixed, None, to_layout="hf", layers=text)
    for scheme in ("cache", "cache.N", "key_cache.N", "keys/values", "stacked", "a layout said"):
        whole_one = SCHEMES[scheme](*sides)
        one = tools.convert(whole_one, None, to_layout="hf", layers="1::2")
        assert one.arrays["layers"].tolist() == [1]
        assert np.array_equal(one.arrays["cache"][0][1].swapaxes(1, 2), sides[1, 1])


def test_layers_are_numbered_and_whole(sides):
    """Hybrid models have keys in some layers; a layer without values is no guess."""
    arrays = per_layer(HEADS_FIRST[0], heads_first=True)(*sides)
    hybrid = {name.replace(".1.", ".7."): x for name, x in arrays.items()}
    assert [open_cache(hybrid).layer(i).name for i in (0, 1)] == ["layer 0", "layer 7"]
    assert converted(hybrid) == converted(whole(*sides))
    del hybrid["past_key_values.7.value"]
    with pytest.raises(KvkitError, match=r"past_key_values\.7\.value: expected an array, as there is"):
        tools.inspect(hybrid)


def test_cache_objects(sides):
    """Of kvkit: every tool takes them, and says of them what it says of their arrays."""
    cache = kvkit.cache.DynamicCache(L)
    for i in range(L):
        cache.layers[i].update(*(side[i].swapaxes(1, 2).copy() for side in sides))
    assert converted(cache) == converted(whole(*sides)) == converted({"past_key_values": cache})
    assert tools.inspect(cache).sizes == tools.inspect(whole(*sides)).sizes
    assert studied(cache) == studied({"past_key_values": cache})
    assert tools.diff(cache, whole(*sides)).equal


@pytest.mark.transformers
def test_cache_objects_of_transformers(sides, tmp_path):
    """Static layers without their room; quantized ones, whose .keys are their last tokens, are refused."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    config = transformers.LlamaConfig(num_hidden_layers=L, num_key_value_heads=H, num_attention_heads=H)
    static = transformers.StaticCache(config=config, max_cache_len=4 * N)
    for i in range(L):
        states = [torch.tensor(side[i].swapaxes(1, 2).copy()) for side in sides]
        cache.update(*states, i)
        static.update(*states, i)
    for each in cache, static, {"past_key_values": cache}:
        assert converted(each) == converted(whole(*sides))
        assert tools.diff(each, whole(*sides)).equal
        assert tools.inspect(each).sizes == tools.inspect(whole(*sides)).sizes
        assert studied(each) == studied(per_layer(HEADS_FIRST[0], heads_first=True)(*sides))

    torch.save(cache, tmp_path / "cache.pt")
    with pytest.raises(KvkitError, match=r"it has a transformers\.cache_utils\.DynamicCache, which") as error:
        tools.inspect(tmp_path / "cache.pt")
    lines = str(error.value).partition("save its arrays: ")[2]
    exec(lines, {"cache": cache, "torch": torch, "path": tmp_path / "cache.pt"})
    assert converted(tmp_path / "cache.pt") == converted(whole(*sides))

    class HQQQuantizedLayer:
        keys = values = torch.zeros(1, 2, 3, 4)

    cache.layers[1] = HQQQuantizedLayer()
    with pytest.raises(KvkitError, match=r"got a HQQQuantizedLayer, whose \.keys are only the last ones"):
        tools.study(cache, "fp8")


@pytest.mark.parametrize(
    "layout", ["vllm-v0", "vllm-ascend-nz", "vllm-cpu-amx", "vllm-cpu-vec", "sglang-mha"]
)
def test_every_tool_reads_what_convert_writes(sides, tmp_path, layout):
    source, path = whole(*sides) | TABLES, tmp_path / "made.npz"
    done = tools.convert(source, path, to_layout=layout, page_size=16, verify=True)
    assert done.description.sizes == {"l": L, "b": 2, "n": 16, "h": H, "c": C}
    assert paged_again(path) == paged_again(source)
    assert not tools.check(path)
    assert "the tokens of all sequences are equal" in str(tools.diff(source, path))
    assert studied(path) == studied(source)
