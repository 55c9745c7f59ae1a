"""One reading of caches: whatever the arrays are called, every tool takes them, and says the same of them."""

import numpy as np
import pytest
from click.testing import CliRunner

from kvkit import files, formats, tools
from kvkit.errors import KvkitError
from kvkit.tools.readers import open_cache
from kvkit.tools.source import NAMES
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


SCHEMES = {
    "cache": whole, "cache.N": by_layer, "key_cache.N": lists, "a layout said": heads_first,
    **{"/".join(names): apart(names) for names in NAMES},
}  # fmt: skip


@pytest.fixture
def sides(rng):
    return rng.standard_normal((2, L, B, N, H, C)).astype(np.float16)


def inspected(arrays):
    found = tools.inspect(arrays, stats=True)
    return found.sizes, found.numbers, found.use


def converted(arrays):
    done = tools.convert(arrays, None, to_layout=CANONICAL)
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
    return shown.exit_code, shown.stdout


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


@pytest.mark.parametrize("names", NAMES[1:], ids="/".join)
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
        assert tools.check(arrays).checked == ["D1"]
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


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"key_cache": np.zeros((2, 3, 4, 5))}, "value_cache: expected an array, beside key_cache, got None"),
        ({"cache": np.zeros((2, 3, 4, 5))}, "layout: expected a layout, as the file does not say its own"),
        ({"a": np.zeros(3)}, "source: expected an array 'cache' and its layout"),
        (
            {"key": np.ones((2, 3, 4), np.float32), "value": np.ones((2, 2, 4), np.float32)},
            "^value: expected",
        ),
        (
            {"key": np.zeros((2, 3, 4)), "value": np.zeros((2, 3, 4)), "layout": "| kv n h c"},
            "layout: expected a layout without an axis kv, as keys and values are arrays of their own",
        ),
    ],
)
def test_what_is_no_cache_is_refused_by_its_name(arrays, message):
    for tool in lambda: tools.study(arrays, "fp8"), lambda: tools.convert(arrays, None, to_layout="hf"):
        with pytest.raises(KvkitError, match=message):
            tool()
