"""The KeyValueCache vectors of the specification, section 9, on the reference; what the package must refuse.

Random calls compare the package with the reference by bits (`test_random_calls.py`).
"""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from page_tables import REFUSED, paged

import kvkit
from kvkit.reference import cache as reference

FP32, FP16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
FLOATS = (FP32, FP16, BF16)
BITS = {FP32: np.uint32, FP16: np.uint16, BF16: np.uint16}
SHORT = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}
ONE = {FP32: 0x3F800000, FP16: 0x3C00, BF16: 0x3F80}
EPS = {FP32: 0x3727C5AC, FP16: 0x00A8, BF16: 0x3728}


def i64(values):
    return np.array(values, np.int64)


def from_bits(pattern, dtype):
    return np.array(pattern, BITS[dtype]).view(dtype)


def test_error_is_a_value_error():
    assert issubclass(kvkit.KvkitError, ValueError)


# Quantization


def vec(name, t1, bit, x, s, q, *, y=None, y_t3=(), group=8, packed=None):
    """Return a vector of one row; s has bit patterns, y values by element, for the scale dtypes in y_t3."""
    return SimpleNamespace(
        name=name, t1=t1, bit=bit, x=x, s=s, q=q, y=y, y_t3=y_t3, group=group, packed=packed
    )


def q_vectors():
    q1 = [127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    q1_codes = [127, -127, 0, 2, 2, 0, -2, -2]
    for t1 in FLOATS:
        yield vec("Q1", t1, 8, q1, [ONE[t1]], q1_codes, y=q1_codes, y_t3=FLOATS)
        for bit in (8, 4):
            yield vec("Q2", t1, bit, [0] * 8, [EPS[t1]], [0] * 8, y=[0] * 8, y_t3=FLOATS)

    q3 = [-3, 1, 0.5, 0, 2, -1, 0.25, 1.5]
    q3_codes = [-127, 42, 21, 0, 85, -42, 11, 64]
    q3_y = [-3, 0.9921875, 0.49609375, 0, 2.0078125, -0.9921875, 0.259765625, 1.51171875]
    yield vec("Q3", FP32, 8, q3, [0x3CC18306], q3_codes, y=q3_y, y_t3=(FP16,))
    yield vec("Q3", FP16, 8, q3, [0x260C], q3_codes, y=q3_y, y_t3=(FP16, FP32))

    q4 = [1, 0.95654296875, 0.98046875, 0.99609375, -0.95654296875, 0, 0.5, -1]
    q4_codes = [127, 122, 124, 126, -122, 0, 64, -127]
    yield vec("Q4", FP16, 8, q4, [0x2008], q4_codes, y={1: 0.96044921875}, y_t3=(FP16, FP32))

    q5 = [2**-8, -(2**-9), 2**-10, 3 * 2**-12, 0, 2**-16, -(2**-8), 2**-15]
    yield vec("Q5", FP16, 8, q5, [0x0204], [127, -64, 32, 24, 0, 0, -127, 1])

    q6 = [1.375, -1.375, 0, 0.6875, 0, 0, 0, 0]
    q6_y = [1.375, -1.375, 0, 0.69140625, 0, 0, 0, 0]
    yield vec("Q6", BF16, 8, q6, [0x3C31], [127, -127, 0, 64, 0, 0, 0, 0], y=q6_y, y_t3=(FP32,))

    q7 = [1e-3, -5e-4, 2e-5, 0, 1e-5, -1e-5, 4e-6, 6e-6]
    yield vec("Q7", FP32, 8, q7, [0x3727C5AC], [100, -50, 2, 0, 1, -1, 0, 1])

    c = float(from_bits(0x3D3162C5, FP32))
    yield vec("Q8", FP32, 8, [1, c] + [0] * 6, [0x3C010204], [127, 6] + [0] * 6)
    yield vec("Q9", FP32, 8, [9] + [0] * 7, [0x3D912245], [127] + [0] * 7)

    q10 = [7, -7, 0.5, 1.5, 2.5, -0.5, -3.5, 3.5]
    for t1 in (FP32, FP16):
        yield vec("Q10", t1, 4, q10, [ONE[t1]], [7, -7, 0, 2, 2, 0, -4, 4], packed="97 20 02 4C")

    q11 = [-2, 1, 0.25, 0.75, 0.5, -0.5, 0.125, 0]
    yield vec("Q11", FP16, 4, q11, [0x3492], [-7, 4, 1, 3, 2, -2, 0, 0], packed="49 31 E2 00")
    yield vec("Q12", FP32, 4, q11, [0x3E924925], [-7, 3, 1, 3, 2, -2, 0, 0], packed="39 31 E2 00")

    q13 = [7, -7, 0.5, 1.5, 14, -1, 3, -14]
    yield vec(
        "Q13", FP32, 4, q13, [0x3F800000, 0x40000000], [7, -7, 0, 2, 7, 0, 2, -7], group=4,
        packed="97 20 07 92",
    )  # fmt: skip

    inf = float("inf")
    q14 = [65504, -65504, 32752, 0, 1, 2, 3, 4]
    yield vec(
        "Q14", FP16, 8, q14, [0x6008], [127, -127, 63, 0, 0, 0, 0, 0], y=[inf, -inf, 32512, 0, 0, 0, 0, 0],
        y_t3=(FP16, FP32),
    )  # fmt: skip


def q_cases():
    """Yield every vector with T3 = T1, int4 in int8 and uint8 bytes, and with every T3 that has values."""
    for v in q_vectors():
        for t3 in FLOATS:
            if t3 != v.t1 and t3 not in v.y_t3:
                continue
            for t2 in (np.int8, np.uint8) if v.bit == 4 and t3 == v.t1 else (np.int8,):
                case_id = f"{v.name}-{SHORT[v.t1]}-bit{v.bit}-{np.dtype(t2).name}-scale_{SHORT[t3]}"
                yield pytest.param(v, t2, t3, id=case_id)


def codes_of(stored, bit):
    if bit == 8:
        return stored.view(np.int8).tolist()
    nibbles = np.stack([stored.view(np.uint8) & 15, stored.view(np.uint8) >> 4], axis=-1).reshape(-1)
    return [n - 16 if n > 7 else n for n in nibbles.tolist()]


def assert_values(actual, expected):
    pairs = expected.items() if isinstance(expected, dict) else enumerate(expected)
    for d, value in pairs:
        assert float(actual[d]) == value, f"element {d}"


@pytest.mark.parametrize(("v", "t2", "t3"), list(q_cases()))
def test_quantization(v, t2, t3):
    head_dim = len(v.x)
    x = np.array(v.x, np.float64).astype(v.t1).reshape(1, 1, head_dim)
    cache = np.zeros((1, 1, 2, 1, head_dim if v.bit == 8 else head_dim // 2), t2)
    scale = np.zeros((1, 1, 2, 1, head_dim // v.group), t3)
    outputs = reference.dynamic_key_value_cache(
        x, x.copy(), *map(i64, ([0, 1], [0, 1], [0], [0])), 1, 1, cache, scale, quant_bit=v.bit,
        quant_group=v.group,
    )  # fmt: skip
    # Exact where T3 holds T1; Q3 alone narrows the scale, to the very value its fp16 row gives.
    cells = [int(from_bits(s, v.t1).astype(t3).view(BITS[t3])) for s in v.s]
    for kv, out in enumerate(outputs):
        stored = cache[0, 0, kv, 0]
        assert [hex(b) for b in scale[0, 0, kv, 0].view(BITS[t3]).tolist()] == [hex(b) for b in cells]
        assert codes_of(stored, v.bit) == v.q
        if v.packed is not None:
            assert stored.tobytes() == bytes.fromhex(v.packed)
        assert out.dtype == v.t1
        assert out.shape == (1, 1, head_dim)
        if v.y is not None and t3 in v.y_t3:
            assert_values(out[0, 0], v.y)


def test_q3_narrow_scale_is_the_fp16_scale():
    assert from_bits(0x3CC18306, FP32).astype(FP16).view(np.uint16) == 0x260C


def test_q10_as_int8():
    x = np.array([7, -7, 0.5, 1.5, 2.5, -0.5, -3.5, 3.5], np.float32).reshape(1, 1, 1, 8)
    cache = np.zeros((1, 1, 2, 1, 1, 4), np.int8)
    reference.key_value_cache(
        x, x.copy(), i64([0]), cache, np.zeros((1, 1, 2, 1, 1, 1), np.float32), quant_bit=4
    )
    assert cache.reshape(2, 4).tolist() == [[-105, 32, 2, 76]] * 2


# T2 rounding

INF = float("inf")


@pytest.mark.parametrize(
    ("t2", "x", "stored"),
    [
        pytest.param(
            FP16,
            [0.1, 2049, 2051, 65519, 65520, 1e-8],
            [0.0999755859375, 2048, 2052, 65504, INF, 0],
            id="fp16",
        ),
        pytest.param(BF16, [0.1, 257, 259], [0.10009765625, 256, 260], id="bf16"),
    ],
)
def test_t2_rounding(t2, x, stored):
    current = np.array(x, np.float32).reshape(1, 1, -1)
    cache = np.zeros((1, 1, 2, 1, len(x)), t2)
    key, value = reference.dynamic_key_value_cache(
        current, -current, i64([0, 1]), i64([0, 1]), i64([0]), i64([0]), 1, 1, cache
    )
    negated = [-s for s in stored]
    assert_values(cache[0, 0, 0, 0], stored)
    assert_values(cache[0, 0, 1, 0], negated)
    assert key.dtype == value.dtype == FP32
    assert_values(key[0, 0], stored)
    assert_values(value[0, 0], negated)


# Flat offsets: L 2, H 2, Dh 8, G 4; layer 1, V, head 1, d 5

DYNAMIC_SHAPES = {0: (24, 2, 2, 2), 1: (2, 24, 2, 2), 2: (2, 2, 24, 2), 3: (2, 2, 2, 24)}
STATIC_SHAPES = {0: (3, 2, 2, 5, 2), 1: (2, 3, 2, 2, 5)}
DYNAMIC_OFFSETS = {0: (253, 63, 126), 1: (893, 223, 446), 2: (1213, 303, 606), 3: (1373, 343, 686)}
STATIC_OFFSETS = {0: (941, 235, 470), 1: (949, 237, 474)}


def run_dynamic_offset(layout, quant_bit, cache, scale):
    current = np.zeros((1, 2, 8), np.float32)
    spot = current.copy()
    spot[0, 1, 5] = 7
    key, value = reference.dynamic_key_value_cache(
        current, spot, *map(i64, ([0, 1], [0, 3], [1], [2])), 1, 3, cache, scale, num_layer=2, layer_idx=1,
        quant_bit=quant_bit, quant_group=4, cache_layout=layout,
    )  # fmt: skip
    assert not key.any()
    assert np.argwhere(value).tolist() == [[2, 1, 5]]


def run_static_offset(layout, quant_bit, cache, scale):
    current = np.zeros((3, 1, 2, 8), np.float32)
    spot = current.copy()
    spot[2, 0, 1, 5] = 7
    key, value = reference.key_value_cache(
        current, spot, i64([3]), cache, scale, num_layer=2, layer_idx=1, quant_bit=quant_bit, quant_group=4,
        cache_layout=layout,
    )  # fmt: skip
    assert not key.any()
    assert np.argwhere(value).tolist() == [[2, 3, 1, 5]]


def check_offsets(run, lead, layout, quant_bit, offsets):
    element, scale_cell, int4_byte = offsets
    if quant_bit == 0:
        cache, scale = np.zeros((*lead, 8), np.float32), None
    else:
        cache = np.zeros((*lead, 8 if quant_bit == 8 else 4), np.int8)
        scale = np.zeros((*lead, 2), np.float32)
    run(layout, quant_bit, cache, scale)
    flat = cache.reshape(-1)
    where = int4_byte if quant_bit == 4 else element
    assert np.flatnonzero(flat).tolist() == [where]
    assert flat[where] == {0: 7, 8: 127, 4: 0x70}[quant_bit]
    if scale is not None:
        # A stored group of zeros gets the smallest scale, 1e-5, not zero.
        assert np.flatnonzero(scale.reshape(-1) > 1e-4).tolist() == [scale_cell]


QUANT_IDS = {0: "element", 8: "int8_and_scale", 4: "int4_and_scale"}


@pytest.mark.parametrize("quant_bit", QUANT_IDS, ids=QUANT_IDS.get)
@pytest.mark.parametrize("layout", DYNAMIC_SHAPES, ids="layout{}".format)
def test_flat_offset_dynamic(layout, quant_bit):
    check_offsets(run_dynamic_offset, DYNAMIC_SHAPES[layout], layout, quant_bit, DYNAMIC_OFFSETS[layout])


@pytest.mark.parametrize("quant_bit", QUANT_IDS, ids=QUANT_IDS.get)
@pytest.mark.parametrize("layout", STATIC_SHAPES, ids="layout{}".format)
def test_flat_offset_static(layout, quant_bit):
    check_offsets(run_static_offset, STATIC_SHAPES[layout], layout, quant_bit, STATIC_OFFSETS[layout])


# Rows: every cached row and every current token carries a number that survives any quantization

HEADS, HEAD_DIM, GROUP, LAYERS, LAYER = 2, 8, 8, 2, 1
TO_LAYOUT = {0: (0, 1, 2, 3, 4), 1: (1, 0, 2, 3, 4), 2: (1, 2, 0, 3, 4), 3: (1, 2, 3, 0, 4)}


def row_tag(row, head):
    return row + 1 + 3000 * head


def token_tag(token, head):
    # A multiple of 127 and of 7, so that both quantizations return it exactly.
    return 127 * 7 * (token + 1 + 10 * head)


def tagged_tokens(count):
    tags = [[token_tag(i, h) for h in range(HEADS)] for i in range(count)]
    key = np.repeat(np.array(tags, np.float32).reshape(count, HEADS, 1), HEAD_DIM, axis=2)
    return key, -key


def tagged_cache(max_t, layout, quant_bit):
    """Return a cache and scale; the key of a row has its tag in every element, the value the negated tag."""
    tags = np.array([[row_tag(r, h) for h in range(HEADS)] for r in range(max_t)], np.float32)
    signed = np.stack([tags, -tags], axis=1)[:, None, :, :, None]
    if quant_bit == 0:
        cache, scale = np.broadcast_to(signed, (max_t, LAYERS, 2, HEADS, HEAD_DIM)), None
    else:
        width = HEAD_DIM if quant_bit == 8 else HEAD_DIM // 2
        plus, minus = (1, -1) if quant_bit == 8 else (0x11, -1)
        cache = np.empty((max_t, LAYERS, 2, HEADS, width), np.int8)
        cache[:, :, 0] = plus
        cache[:, :, 1] = minus
        scale = np.broadcast_to(np.abs(signed), (max_t, LAYERS, 2, HEADS, HEAD_DIM // GROUP))
    order = TO_LAYOUT[layout]
    return tuple(None if a is None else a.transpose(order).copy(order="C") for a in (cache, scale))


def changed_rows(before, after, layout):
    """Return the rows of layer LAYER that differ, after a check that other layers do not."""
    if after is None:
        return set()
    back = np.argsort(TO_LAYOUT[layout])
    differs = (before != after).transpose(back)
    assert not np.delete(differs, LAYER, axis=1).any()
    return set(np.flatnonzero(differs[:, LAYER].any(axis=(1, 2, 3))).tolist())


def expected_key(loads, stores):
    """Return tags by output row and head; `loads` are rows in output order, `stores` in packed order."""
    stored = {row: token for token, row in enumerate(stores)}
    return [[token_tag(stored[r], h) if r in stored else row_tag(r, h) for h in range(HEADS)] for r in loads]


def call_dynamic(operator, case, cache, scale, *, quant_bit, layout):
    key, value = tagged_tokens(int(case["seqstarts"][-1]))
    return operator(
        key, value, *map(i64, (case["seqstarts"], case["kvstarts"], case["cachestarts"], case["start_pos"])),
        case.get("max_seqlen"), case.get("max_kvlen"), cache, scale, num_layer=LAYERS, layer_idx=LAYER,
        quant_bit=quant_bit, quant_group=GROUP, cache_layout=layout, cache_mode=case.get("cache_mode", 0),
        page_size=case.get("page_size", 128),
    )  # fmt: skip


def check_rows(case, *, max_t, loads, stores, quant_bit=0, layout=0):
    cache, scale = tagged_cache(max_t, layout, quant_bit)
    before = cache.copy(), None if scale is None else scale.copy()
    key, value = call_dynamic(
        reference.dynamic_key_value_cache, case, cache, scale, quant_bit=quant_bit, layout=layout
    )
    assert changed_rows(before[0], cache, layout) == set(stores)
    assert changed_rows(before[1], scale, layout) == (set(stores) if quant_bit else set())
    assert key.shape == value.shape == (len(loads), HEADS, HEAD_DIM)
    expected = np.array(expected_key(loads, stores), np.float32)[:, :, None]
    assert (key == expected).all()
    assert (value == -expected).all()


def check_refused(case, *, max_t, quant_bit=8, layout=2):
    cache, scale = tagged_cache(max_t, layout, quant_bit)
    before = cache.tobytes(), b"" if scale is None else scale.tobytes()
    with pytest.raises(kvkit.KvkitError):
        call_dynamic(
            kvkit.dynamic_batching.key_value_cache, case, cache, scale, quant_bit=quant_bit, layout=layout
        )
    assert before == (cache.tobytes(), b"" if scale is None else scale.tobytes())


quant_bits = pytest.mark.parametrize("quant_bit", [0, 8, 4], ids="bit{}".format)
layouts = pytest.mark.parametrize("layout", [0, 1, 2, 3], ids="layout{}".format)


@layouts
@quant_bits
def test_page_table(quant_bit, layout):
    check_rows(
        paged(), max_t=24, quant_bit=quant_bit, layout=layout,
        loads=[8, 9, 10, 11, 2, 3, 20, 21, 22, 23, 16, 17, 8, 9, 10], stores=[3, 20, 21, 22, 23, 16, 17],
    )  # fmt: skip


@layouts
@quant_bits
def test_page_table_overhang(quant_bit, layout):
    check_rows(
        paged(rows=[(1, [12, 22])]), max_t=24, quant_bit=quant_bit, layout=layout,
        loads=[8, 9, 10, 11, 2, 3, 12, 13, 14, 15, 22, 23, 8, 9, 10], stores=[3, 12, 13, 14, 15, 22, 23],
    )  # fmt: skip


@pytest.mark.parametrize("hint", ["max_seqlen", "max_kvlen"])
@pytest.mark.parametrize("given", [6, 7, 100], ids="hint{}".format)
def test_page_table_hint_large_enough(hint, given):
    check_rows(
        paged(**{hint: given}), max_t=24, loads=[8, 9, 10, 11, 2, 3, 20, 21, 22, 23, 16, 17, 8, 9, 10],
        stores=[3, 20, 21, 22, 23, 16, 17],
    )  # fmt: skip


@pytest.mark.parametrize("change", REFUSED)
def test_page_table_refused(change):
    check_refused(REFUSED[change], max_t=24)


OFFSET = {"seqstarts": [0, 1, 4], "kvstarts": [0, 4, 7], "start_pos": [3, 0], "cachestarts": [10, 0]}


@layouts
@quant_bits
def test_offset_mode(quant_bit, layout):
    check_rows(
        OFFSET, max_t=14, quant_bit=quant_bit, layout=layout, loads=[10, 11, 12, 13, 0, 1, 2],
        stores=[13, 0, 1, 2],
    )  # fmt: skip


def test_offset_mode_refused():
    check_refused(OFFSET, max_t=13)


@layouts
def test_specification_table(layout):
    case = {
        "cache_mode": 1, "page_size": 256, "seqstarts": [0, 1, 2], "kvstarts": [0, 301, 602],
        "start_pos": [300, 300], "cachestarts": [[0, 256, -1], [1024, 2048, -1]],
    }  # fmt: skip
    first = list(range(301))
    second = list(range(1024, 1280)) + list(range(2048, 2093))
    assert [first[t] for t in (0, 255, 256, 300)] == [0, 255, 256, 300]
    assert [second[t] for t in (0, 255, 256, 300)] == [1024, 1279, 2048, 2092]
    check_rows(case, max_t=2093, layout=layout, loads=first + second, stores=[300, 2092])


# Head repetition


@quant_bits
def test_num_repeat_dynamic(quant_bit):
    key, value = tagged_tokens(1)
    cache, scale = tagged_cache(4, 0, quant_bit)
    out_key, out_value = reference.dynamic_key_value_cache(
        key, value, *map(i64, ([0, 1], [0, 2], [1], [1])), 1, 2, cache, scale, num_layer=LAYERS,
        layer_idx=LAYER, quant_bit=quant_bit, num_repeat=3,
    )  # fmt: skip
    sources = [0, 0, 0, 1, 1, 1]
    expected = np.array([[row_tag(1, h) for h in sources], [token_tag(0, h) for h in sources]])[:, :, None]
    assert out_key.shape == out_value.shape == (2, 6, HEAD_DIM)
    assert (out_key == expected).all()
    assert (out_value == -expected).all()


@pytest.mark.parametrize("layout", [0, 1], ids="layout{}".format)
def test_num_repeat_static(layout):
    key, value = tagged_tokens(1)
    shape = (1, 1, 2, 2, HEADS, HEAD_DIM) if layout == 0 else (1, 1, 2, HEADS, 2, HEAD_DIM)
    out_key, out_value = reference.key_value_cache(
        key[None], value[None], i64([1]), np.zeros(shape, np.float32), num_repeat=3, cache_layout=layout
    )
    expected = np.array([[0] * 6, [token_tag(0, h) for h in [0, 0, 0, 1, 1, 1]]])[None, :, :, None]
    assert out_key.shape == out_value.shape == (1, 2, 6, HEAD_DIM)
    assert (out_key == expected).all()
    assert (out_value == -expected).all()
