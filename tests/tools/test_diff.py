"""`kvkit.tools.diff`: what differs is counted and named, and every cause is found where it is the cause."""

import json

import ml_dtypes
import numpy as np
import pytest
from planted_faults import FAULTS

import kvkit.layouts
from kvkit.errors import KvkitError
from kvkit.reference import cache as reference
from kvkit.tools import contents, convert, counting, diff
from kvkit.tools.causes import CAUSES
from kvkit.tools.source import CacheSource

L, B, N, H, C = 2, 3, 4, 2, 16  # layers, pages, positions, heads, content
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def cache(dtype=np.float16, seed=1):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((L, B, N, H, C)).astype(dtype) for name in ("key", "value")}


def coded(dtype, bit, seed=2):
    """Return inputs with ties, tiny groups and zeros, and the specification's codes and scales."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((60, H, C)).astype(np.float32)
    most = {8: 127, 4: 7}[bit]
    x[:20] = rng.integers(-2 * most, 2 * most, (20, H, C)) / 2
    x[:20, :, ::8] = most
    x[20:24] *= 1e-7
    x[24:26] = 0
    x = x.astype(dtype)
    codes, scales = reference.quantize_heads(x, bit, 8)
    codes = codes if bit == 8 else reference.pack_int4(codes).view(np.int8)
    return {"key": codes, "key_scale": scales}, {"key": x}


def rotate(x, positions, interleaved=False, base=10000.0):
    out = np.zeros(x.shape)
    for n, position in enumerate(positions):
        for i in range(C // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + C // 2)
            angle = position * base ** (-2 * i / C)
            one, two = x[..., n, :, a].astype(float), x[..., n, :, b].astype(float)
            out[..., n, :, a] = one * np.cos(angle) - two * np.sin(angle)
            out[..., n, :, b] = two * np.cos(angle) + one * np.sin(angle)
    return out.astype(x.dtype)


def other(arrays, **changes):
    return {name: changes.get(name, array) for name, array in arrays.items()}


def places():
    """Return {cause: (expected, got, like)} of caches of floats."""
    key, value = cache().values()
    flat = key.reshape(L, B * N, H, C)
    turned = np.concatenate([key[..., :8, None], key[..., 8:, None]], -1).reshape(key.shape)
    strayed = np.zeros_like(flat)
    for row in range(B * N):
        strayed[:, row // N + row % N] = flat[:, row]
    tiny = key.copy()
    tiny[:, 1] = (np.arange(C) - 8) * np.float16(2**-24)
    cut = key.copy()
    cut[0, 1] = 0
    stale = key.copy()
    stale[:, 2] = value[:, 2]
    plain, positions = cache()["key"].astype(np.float32), np.arange(N)
    once = rotate(plain, positions)
    shifted = np.zeros_like(flat)
    shifted[:, 1:] = flat[:, :-1]
    layers = key.copy()
    layers[1, 2, :, 1] = key[0, 2, :, 1]
    swapped = np.ascontiguousarray(key.swapaxes(2, 3)).reshape(key.shape)
    yield "halves of a head interleaved", key, turned, {}
    yield "halves of a head interleaved", turned, key, {}
    yield "endianness", key, key.view(np.uint16).byteswap().view(np.float16), {}
    yield "flushed subnormals", tiny, np.where(np.abs(tiny) < 2**-14, np.float16(0), tiny), {}
    yield "old bytes: not written", key, cut, {}
    yield "old bytes: not written", key, stale, {"before": value}
    yield "heads and tokens swapped", key, swapped, {}
    yield "heads and tokens swapped", swapped, key, {}
    yield "row off by one", key, shifted.reshape(key.shape), {}
    yield "row off by one", shifted.reshape(key.shape), key, {}
    yield "page number for row", key, strayed.reshape(key.shape), {}
    yield "another token's or layer's bytes", key, layers, {}
    yield "rotation of keys", once, rotate(once, positions), {}
    yield "rotation of keys", once, plain, {}
    yield "rotation of keys", once, rotate(plain, positions, True), {}
    yield "rotation of keys", rotate(plain, positions, True), once, {}
    yield "rotation of keys", rotate(plain, positions + 5, base=500.0), plain, {
        "positions": np.tile(positions + 5, B), "rope_base": 500.0,
    }  # fmt: skip


@pytest.mark.parametrize("case", [*places()], ids=lambda case: case[0])
def test_causes_of_places(case):
    cause, expected, got, like = case
    found = diff({"key": expected}, {"key": got}, like=like or None)
    names = [each.name for each in found.causes]
    assert cause in names, str(found)
    best = found.causes[names.index(cause)]
    assert best.explained == found.causes[0].explained, str(found)  # nothing explains more
    assert best.explained >= 0.9 * best.differing


@pytest.mark.parametrize("name", ["layers.0.ssm_state", "state", "cache_s_l3"])
@pytest.mark.parametrize("sizes", [(8, 8), (6, 10)], ids=str)
def test_states_in_the_other_order(rng, name, sizes):
    """If dk = dv, no shape tells KV from VK; of other sizes the bytes of one are read as the other."""
    right = rng.standard_normal((3, 4, *sizes), np.float32)
    wrong = np.ascontiguousarray(right.swapaxes(2, 3)).reshape(right.shape)
    for pair in ((right, wrong), (wrong, right)):
        found = diff(*({name: array} for array in pair))
        assert [(each.name, each.explained == each.differing) for each in found.causes] == [
            ("state in the other order", True)
        ]
    assert found.arrays[0].axes[-1] in ("column", "element")


def recipe(x, most, rounding=np.rint, reciprocal=False, exact=False, wide=False, smallest=True):
    """Return codes and scales group by group, with a step of the recipe left out or changed."""
    t1, codes, scales = x.dtype, np.zeros(x.shape, np.int8), np.zeros((*x.shape[:-1], C // 8), x.dtype)
    for t in range(len(x)):
        for h in range(H):
            for g in range(C // 8):
                group = x[t, h, 8 * g : 8 * g + 8].astype(np.float32)
                s = np.float32(max(abs(group)) / np.float32(most))
                s = s if wide else np.float32(s.astype(t1))
                s = (
                    max(s, np.float32(1e-5) if wide else np.float32(np.float32(1e-5).astype(t1)))
                    if smallest
                    else s
                )
                with np.errstate(all="ignore"):
                    inverse = np.float32(1) / s
                    inverse = inverse if wide else np.float32(inverse.astype(t1))
                    u = group * inverse if reciprocal else group / s
                u = u if exact else u.astype(t1).astype(np.float32)
                q = np.clip(rounding(np.nan_to_num(u)), -most, most).astype(np.int8)
                codes[t, h, 8 * g : 8 * g + 8], scales[t, h, g] = q, s.astype(t1)
    if most == 7:
        codes = reference.pack_int4(codes).view(np.int8)
    return {"key": codes, "key_scale": scales}


RECIPES = {
    "truncation": {"rounding": np.trunc},
    "rounding half away from zero":
        { "rounding": lambda u: np.sign(u) * np.floor(np.abs(u) + np.float32(0.5)) },
    "reciprocal instead of division": {"reciprocal": True},
    "quotient not rounded to the data's type": {"exact": True},
    "float32 scale for a 16-bit one": {"wide": True},
    "missing smallest scale": {"smallest": False},
}  # fmt: skip


@pytest.mark.parametrize("bit", [8, 4])
@pytest.mark.parametrize("cause", RECIPES)
def test_causes_of_rounding(cause, bit):
    dtype = np.float16 if bit == 8 else BFLOAT16
    expected, like = coded(dtype, bit)
    assert diff(expected, recipe(like["key"], 2 ** (bit - 1) - 1)).equal
    got = recipe(like["key"], 2 ** (bit - 1) - 1, **RECIPES[cause])
    found = diff(expected, got, like=like)
    if found.equal:
        pytest.fail("the inputs do not tell this recipe from the right one")
    for name in {each.name for each in found.arrays}:
        causes = {each.name: each.explained for each in found.causes if each.array == name}
        assert causes[cause] == max(causes.values()), str(found)


@pytest.mark.parametrize(("dtype", "low"), [(np.float16, 13), (BFLOAT16, 16)])
@pytest.mark.parametrize("cause", ["truncation", "rounding half away from zero"])
def test_floats_that_were_narrowed_otherwise(dtype, low, cause):
    x = (np.random.default_rng(3).integers(0, 2**20, (40, 2, C)) * 2.0**-10 + 2).astype(np.float32)
    x.view(np.uint32)[:20] = x.view(np.uint32)[:20] & (0xFFFFFFFF ^ ((1 << low) - 1)) | (
        1 << (low - 1)
    )  # ties
    bits = x.view(np.uint32).astype(np.int64) + ((1 << (low - 1)) if "half" in cause else 0)
    cut = (bits >> low << low).astype(np.uint32).view(np.float32)
    found = diff({"key": x.astype(dtype)}, {"key": cut.astype(dtype)}, like={"key": x})
    assert found.causes[0].name == cause
    assert found.causes[0].explained == found.causes[0].differing


def test_every_cause_is_tested():
    others = {"nibbles swapped", "state in the other order"}
    others |= {name for name, function in CAUSES.items() if "attention" in function.__module__}
    assert set(CAUSES) <= {case[0] for case in places()} | set(RECIPES) | others | set(FAULTS)
    for function in CAUSES.values():
        assert function.__doc__


# What is counted


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, BFLOAT16, np.int8, ml_dtypes.float8_e4m3fn, np.int64]
)
def test_counts_are_those_of_loops(rng, dtype):
    expected = (rng.standard_normal((L, B, N, H, C)) * 4).astype(dtype)
    got = expected.copy()
    hit = rng.random(expected.shape) < 0.01
    got[hit] = (rng.standard_normal(int(hit.sum())) * 4).astype(dtype)
    differing = np.zeros(expected.shape, bool)
    for at in np.ndindex(expected.shape):
        differing[at] = expected[at].tobytes() != got[at].tobytes()
    [found] = diff(expected, got).arrays
    assert (found.differing, found.total) == (differing.sum(), differing.size)
    first = tuple(np.argwhere(differing)[0])
    assert tuple(found.first[axis] for axis in found.axes) == first
    assert found.axes == ("layer", "page", "position", "head", "element")
    for axis, at in (("layer", 0), ("page", 1), ("head", 3)):
        sums = differing.sum(axis=tuple(i for i in range(5) if i != at))
        assert found.counts[axis] == {i: n for i, n in enumerate(sums) if n}
    error = np.abs(expected.astype(np.float64) - got.astype(np.float64))
    assert np.isclose(found.worst["error"], error.max(), rtol=1e-6)
    worst = error.max(axis=(1, 2, 4))
    assert worst[found.worst["layer"], found.worst["head"]] == error.max()
    if dtype != np.int64:
        assert sum(found.histogram.values()) == found.differing


WORD, OTHER = np.array([[0x7FC00001], [0x7FE00001]], np.uint32).view(np.float32)  # NaN
CLOSE = [  # expected, got, tolerances, whether they are equal
    (np.array([2**53 + 1]), np.array([2**53]), {}, False),
    (np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64), {"ulp": 1}, True),
    (np.array([0.0]), np.array([-0.0]), {}, False),
    (np.array([0.0]), np.array([-0.0]), {"ulp": 1}, True),
    (np.array([1.0]), np.nextafter([1.0], 2), {"ulp": 1}, True),
    (np.array([1.0]), np.nextafter([1.0], 2) + 2**-51, {"ulp": 2}, False),
    *((np.array([np.inf], dtype), np.array([5], dtype), {"rtol": 1e-3}, False) for dtype in "efd"),
    (np.array([-128], np.int8), np.array([0], np.int8), {"atol": 1}, False),
    (np.array([127], np.uint8), np.array([128], np.uint8), {"ulp": 1}, True),
    (WORD, np.array([np.inf], np.float32), {"ulp": 1}, False),
    (WORD, OTHER, {"ulp": 1}, True),
    (np.float32(1), np.float32(2), {}, False),
    (np.array([2**60 + 1]), np.array([2**60 + 2]), {"ulp": 1}, True),
    (np.array([1], ">f4"), np.array([1 + 2**-23], ">f4"), {"ulp": 1}, True),
    *(  # types of at most 8 bits: without a sign, without -0, with the sign in bit 3, integers of 4 bits
        (np.array([one]).astype(dtype), np.array([two]).astype(dtype), {"ulp": ulp}, equal)
        for dtype, one, two in [
            (ml_dtypes.float8_e8m0fnu, 1, 4), (ml_dtypes.float8_e4m3fnuz, 2**-10, -(2**-10)),
            (ml_dtypes.float4_e2m1fn, 0.5, -0.5), (ml_dtypes.int4, 1, -1), (ml_dtypes.uint4, 7, 9),
        ]
        for ulp, equal in ((1, False), (2, True))
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CLOSE)
def test_what_is_close(case):
    """Of all dtypes, by the compiled pass and by numpy."""
    expected, got, tolerances, equal = case
    pairs = [(expected, got)]
    if expected.ndim:
        pairs.append((np.stack([expected] * 3), np.stack([got] * 3)))
    for one, two in pairs:
        found = diff({"x": one}, {"x": two}, **tolerances)
        assert found.equal == equal
        if expected.ndim:
            each = [tolerances.get(name, 0) for name in ("atol", "rtol", "ulp")]
            assert np.all(counting.equal_elements(one, two, each)) == equal
        assert equal or found.arrays[0].differing == one.size


def test_ulps_and_tolerances():
    expected = np.array([[1.0, -1.0, 0.0, 65504.0, np.nan]], np.float16)
    words = expected.view(np.uint16).astype(np.int64)
    got = (words + np.array([1, 3, 0, 1, 1])).astype(np.uint16).view(np.float16)
    got[0, 2] = -0.0
    [found] = diff(expected, got).arrays
    assert found.differing == 5
    assert found.histogram == {"0": 1, "1": 3, "2-3": 1}
    assert diff(expected, got, ulp=3).equal
    [found] = diff(expected, got, ulp=1).arrays
    assert found.first == {"position": 0, "element": 1, "expected": -1.0, "got": got[0, 1].item()}
    [found] = diff(expected, got, atol=0.01).arrays
    assert found.first["element"] == 3
    assert found.worst["error"] == np.inf


def test_layouts():
    arrays = cache()
    engine = {"cache.0": np.stack([arrays["key"][0], arrays["value"][0]], axis=1)}  # b kv n h c
    other = {"cache": np.stack([arrays["key"][:1], arrays["value"][:1]]).transpose(1, 2, 4, 0, 3, 5).copy()}
    assert diff(engine, other, layout_a="l | b kv n h c", layout_b="| l b h kv n c").equal
    kvkit.layouts.view(other["cache"], "| l b h kv n c").values[0, 2, 3, 1, 5] = 9
    stated = engine | {"layout": "l | b kv n h c"}  # `axes` are those of arrays without a layout
    [found] = diff(stated, other, layout_b="| l b h kv n c", axes="h n b l c").arrays
    assert (found.name, found.first["page"], found.first["position"], found.first["head"]) == (
        "values", 2, 3, 1,
    )  # fmt: skip
    coded = {f"{name}_cache": array for name, array in arrays.items()}
    ones = np.ones((L, H), np.float32)
    scales = [coded | {"key_scale": scale, "value_scale": ones} for scale in (ones, 2 * ones)]
    [found] = diff(*scales, layout_a="l b n h c", layout_b="l b n h c").arrays
    assert (found.name, found.axes) == ("keys_scale", ("layer", "head"))


def test_large_arrays_are_tried_in_part(monkeypatch):
    monkeypatch.setattr("kvkit.tools.comparison.MOST_TRIED", 700)
    expected = cache()
    got = other(expected, key=np.roll(expected["key"], 1, axis=2))
    got["key"][:, :2] = expected["key"][:, :2]
    found = diff(expected, got)
    assert found.notes
    assert found.arrays[0].first["page"] == 2
    assert found.causes[0].name in ("row off by one", "another token's or layer's bytes")


def test_arrays_are_compared_in_blocks(monkeypatch, rng):
    monkeypatch.setattr("kvkit.tools.comparison.COMPARED", 1000)
    expected, blocks = rng.standard_normal((1, 2, 40, 2, 4)).astype(np.float32), []
    got = expected + (rng.random(expected.shape) < 0.1)
    [found] = diff(expected, got, advance=blocks.append).arrays
    assert blocks == [31 * 32, 9 * 32] * 2
    assert found.differing == (expected != got).sum()
    assert tuple(found.first[axis] for axis in found.axes) == tuple(np.argwhere(expected != got)[0])


def test_a_report(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    expected, path = cache(), tmp_path / "map.png"
    found = diff(expected, other(expected, key=np.roll(expected["key"], 1, axis=2)), plot=path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(found.to_dict()))["arrays"][0]["first"]["layer"] == 0
    assert "first: layer 0, page 0, position 0, head 0, element 0" in str(found)
    assert "\n  first: expected 1.0, got 2.0\n" in str(diff(np.array(1.0), np.array(2.0)))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        for axes, label in (("h n c", "head"), ("b n c", "")):
            diff(expected["key"][0, 0], expected["key"][0, 1], plot=tmp_path / "map.svg", axes=axes)
            assert (">head<" in (tmp_path / "map.svg").read_text()) == bool(label)
    assert str(diff(expected, expected)) == f"equal: {expected['key'].nbytes * 2} bytes"


def test_names_that_only_one_side_has():
    """The error proposes patterns, which then rename the arrays of the side that has them."""
    states = np.arange(64, dtype=np.float32).reshape(1, 2, 4, 8)
    usual = {f"past_key_values.{i}.{name}": states + i for i in (0, 1) for name in ("key", "value")}
    others = {f"{name[0]}{i}": states + i for i in (0, 1) for name in ("k", "v")}
    with pytest.raises(KvkitError, match=r"or their names \(keys='k\{l\}' values='v\{l\}'\), got k0, v0, k1"):
        diff(usual, others)
    sides = contents.by_patterns_of_any((usual, others), "k{l}", "v{l}")
    assert diff(*sides, layout_b="hf").equal
    with pytest.raises(KvkitError, match="keys: expected the name of an array"):
        contents.by_patterns_of_any((usual, usual), "k{l}", "v{l}")
    del others["v1"]
    with pytest.raises(KvkitError, match="values: expected the layers of keys"):
        contents.by_patterns_of_any((usual, others), "k{l}", "v{l}")


def test_tokens_in_other_pages_are_told():
    tokens = {"key": np.arange(80.0, dtype=np.float32).reshape(1, 10, 2, 4)}
    tokens["value"] = -tokens["key"]
    line = "vllm-lbnhc"
    four, two = (convert(tokens, None, to_layout=line, page_size=size).arrays for size in (4, 2))
    for one, layout in ((four, line), (tokens, None)):
        found = diff(one, two, layout_a=layout, layout_b=line)
        assert not found.equal
        assert found.notes[-1].startswith("the tokens of all sequences are equal, if each side is read by")
    table = four["block_tables"].copy()
    table[0, 1] = 0
    found = diff(four, four | {"block_tables": table}, layout_a=line, layout_b=line)
    assert [cause.name for cause in found.causes] == ["wrong id in a block table"]
    assert found.arrays[0].axes == ("sequence", "entry")
    two["cache"][0][0, 1] = 7
    assert not diff(four, two, layout_a=line, layout_b=line).notes


def test_each_cache_is_opened_once(monkeypatch, tmp_path):
    """Also where page tables differ, and the tokens are then compared by them."""
    one, opened, tables_read = np.ones((1, 10, 2, 4), np.float32), [], []
    for size in (4, 2):
        convert({"key": one, "value": one}, tmp_path / f"{size}.npz", to_layout="vllm-lbnhc", page_size=size)
    reading, tables_of = contents.files.read, CacheSource.read_tables
    monkeypatch.setattr(contents.files, "read", lambda path: opened.append(path) or reading(path))
    monkeypatch.setattr(CacheSource, "read_tables", lambda *x: tables_read.append(x) or tables_of(*x))
    found = diff(tmp_path / "4.npz", tmp_path / "2.npz")
    assert not found.equal
    assert "the tokens of all sequences are equal" in found.notes[-1]
    assert (len(opened), len(tables_read)) == (2, 2)


def test_page_tables_and_lengths_of_caches_with_a_layout_are_compared():
    """Equal pools with other tables or lengths differ. Ids after the end of a sequence do not count."""
    pool, line = np.zeros((1, 2, 6, 16, 2, 8), np.float16), "| l kv b n h c"
    given = {"layout_a": line, "layout_b": line}

    def cache(table, lengths):
        return {"cache": pool, "block_tables": np.array(table), "context_lens": np.array(lengths)}

    one = cache([[0, 1, 2], [3, 4, -1]], [37, 20])
    assert diff(one, cache([[0, 1, 2], [3, 4, 5]], [37, 20]), **given).equal
    for two, cause in (
        (
            cache([[0, 1, 2], [3, 1, -1]], [37, 20]),
            "wrong id in a block table (entry 1 of sequence 1: 1 for 4)",
        ),
        (cache([[0, 1, 2], [3, 4, -1]], [38, 20]), "other lengths (sequence 0: 38 for 37)"),
        (cache([[0, 1], [3, 4]], [32, 20]), "other lengths (sequence 0: 32 for 37)"),
        (
            cache([[0, -2, 2], [3, 4, -1]], [37, 20]),
            "wrong id in a block table (entry 1 of sequence 0: -2 for 1)",
        ),
    ):
        found = diff(one, two, **given)
        assert not found.equal
        [found] = found.causes
        assert cause in str(found)
    assert diff(one, cache([[0, 1, 2]], [37]), **given).problems == [
        "context_lens: expected shape (2,), got (1,)"
    ]
    none = diff({"cache": one["cache"]}, one, **given)
    assert (none.equal, none.notes) == (True, ["only b has page tables: they are not compared"])


def test_complex_numbers_are_compared_by_bytes():
    one, two = np.full((2, 4), 1 + 1j, np.complex64), np.full((2, 4), 1 + 2j, np.complex64)
    assert diff({"x": one}, {"x": one.copy()}).equal
    [problem] = diff({"x": one, "y": one}, {"x": two, "y": one}, atol=5).problems
    assert problem.startswith("x: expected equal bytes, because complex numbers")


def test_another_dtype_is_a_difference_of_bits():
    """Not so with a tolerance, nor of index tensors, where it is told beside."""
    half = {"key": np.ones((2, 3, 4), np.float16)}
    found = diff(half, {"key": np.ones((2, 3, 4), np.float32)})
    assert not found.equal
    assert str(found) == "key: expected dtype float16, got float32"
    found = diff(half, {"key": np.ones((2, 3, 4), np.float32)}, atol=1e-3)
    assert found.equal
    assert str(found).splitlines()[1] == "key: expected dtype float16, got float32"
    assert diff({"slots": np.int32([1])}, {"slots": np.int64([1])}).equal


def test_without_a_cause_it_says_which_axes_were_guessed():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, 50, 16)).astype(np.float16)  # [heads, tokens, dim]
    other = rows.copy()
    other[1] = rng.standard_normal((50, 16))
    found = diff({"v_out": rows}, {"v_out": other})
    assert found.notes == ["v_out: no cause found, with axes n h c; axes=LETTERS names others"]
    found = diff({"v_out": rows}, {"v_out": other}, axes="h n c")
    assert (found.notes, found.arrays[0].counts["head"]) == (["v_out: no cause found"], {1: 800})
