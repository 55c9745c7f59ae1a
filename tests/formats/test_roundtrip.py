"""What `decode` gives of what `encode` took: its shape, and every number within the format's bound.

Or a KvkitError, of any head, any number of tokens and any magnitude.
"""

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16, finfo
from surroundings import budget

from kvkit import KvkitError
from kvkit.formats import NAMED, decode, encode, named, rotate
from kvkit.formats.groups import split_groups
from kvkit.formats.scales import TINY

HEADS = (0, 1, 2, 4, 5, 6, 7, 8, 12, 14, 16, 20, 28, 30, 31, 32, 40, 64, 96, 100, 128, 192, 320, 576)
TOKENS = (0, 1, 2, 3, 7, 32, 64)
MAGNITUDES = (0, 1e-44, 1e-38, 1e-20, 1e-6, 1e-3, 1, 60, 3e3, 7e4, 1e7, 3e9, 1e20, 1e38, 3.4e38)
LEAST = {
    "pmx": 1e-5,
    "kvkit_minimum": 1e-5,
    "vllm_token": 1e-6,
    "mlx_affine": 1e-7,
    "turbo_value": 1e-8,
    "p2": 2**-13 / 448,
}  # scales that a rule takes at least


def relative_error(fmt, bits):
    """Return the largest error of a number, in units of the largest magnitude that shares its scale."""
    table = np.sort(fmt.code.table[np.isfinite(fmt.code.table)])
    table = table[(table >= fmt.code.limits[0]) & (table <= fmt.code.limits[1])]
    top = table[-1]
    half = np.diff(table).max() / 2 / top * (2 if fmt.rounding == "trunc" else 1)
    if fmt.offset:  # codes span twice the magnitude; MLX's scale fits one end
        half *= 4 if fmt.rule == "mlx_affine" else 2
    if fmt.exponent:  # a scale is up to twice what it need be, or clips what is above the largest code
        half *= 2
        clipped = 1 - top / 2 ** np.ceil(np.log2(top))
        half = max(half, clipped) if fmt.exponent == "floor" else half
    if fmt.rule == "ggml_signed":
        half = 1 / 8  # of 8 and -8 one alone is a code
    if fmt.rule == "ggml_searched":
        half *= 2  # the scale is of least squares, and may clip
    return half + 2.0 ** (2 - bits)


def error_bound(fmt, x, dtype, arrays):
    """Return the largest legal |decode - x|, for each number or all of them."""
    cell = finfo(fmt.cell.dtype if fmt.cell and fmt.cell.name != "e8m0" else dtype)
    numbers, top = x.astype(np.float64), float(fmt.code.limits[1])
    rounding = 2.0 ** -(min(cell.nmant, finfo(dtype).nmant if fmt.rule == "pmx" else 99) + 1)
    least = (
        float(cell.smallest_subnormal) * float(arrays.get("whole", 1))
        + LEAST.get(fmt.rule, 0)
        + LEAST.get(fmt.exponent, 0)
        + 2 * float(TINY)
    )
    if fmt.rule == "turbo_key":  # an error of the whole row; to bring levels to a length may double it
        size = np.sqrt((numbers**2).sum(-1, keepdims=True)) + TINY
        turned = np.abs(rotate(x, "hadamard")) / size * np.sqrt(x.shape[-1])
        off = np.maximum(turned - top, np.diff(np.sort(fmt.code.table)).max() / 2 + 1e-5)
        off = np.sqrt((off**2).mean(-1, keepdims=True)) * (2 if fmt.unit == "length" else 1)
        return size * (off + 2.0**-9) + top * least
    if fmt.zero_in_scale:  # zeros are codes 0 to 15, so that rows of one sign are cut; the scale loses 4 bits
        parts = split_groups(numbers, fmt.per, x.shape[-1])
        low, high = parts.min(-1, keepdims=True), parts.max(-1, keepdims=True)
        scale = np.maximum((high - low) / 15, 1e-6)
        zero = np.clip(np.floor(-low / scale + 0.5), 0, 15)
        cut = np.maximum(np.maximum(parts - (15 - zero) * scale, -zero * scale - parts), 0)
        return cut + scale * (0.51 + 30 * 2.0**-19)
    if fmt.needs_scale:
        return float(arrays["scale"]) * 0.5001
    if fmt.rule == "given" and not fmt.per:
        return np.abs(numbers) * 2.0**-fmt.code.significant + float(finfo(fmt.code.dtype).smallest_subnormal)
    if fmt.tail:
        coded, tail = numbers[..., : -fmt.tail], np.abs(numbers[..., -fmt.tail :]) * 2.0**-8
        parts = split_groups(coded, fmt.per, fmt.group)
        bound = np.abs(parts).max(-1, keepdims=True, initial=0) * relative_error(fmt, 23) + top * least
        return np.concatenate(((bound + 0 * parts).reshape(coded.shape), tail + TINY), -1)
    parts = split_groups(numbers, fmt.per, fmt.group or x.shape[-1])
    largest = np.abs(parts).max(-1, keepdims=True, initial=0) * relative_error(fmt, -np.log2(rounding))
    zero = np.abs(np.float64(arrays.get("zero", 0)))[..., None]  # multiplies what rounding does to the scale
    return largest + (top + zero) * least


def compare(fmt, x, dtype, arrays):
    decoded = decode(arrays, fmt)
    assert decoded.shape == x.shape
    assert np.isfinite(decoded).all()
    if fmt.rule == "given" and not fmt.per:  # codes saturate
        x = np.clip(x, *(np.float32(fmt.code.limits) * arrays.get("scale", np.float32(1))))
    wrong = np.abs(decoded.astype(np.float64) - x)
    if fmt.per and not fmt.tail:
        wrong = split_groups(wrong, fmt.per, fmt.group or x.shape[-1])
    assert (wrong <= error_bound(fmt, x, dtype, arrays)).all()


def options(fmt):
    """Return the words that may stand behind a name, or nothing."""
    groups = [f"g{n}" for n in (1, 2, 3, 5, 6, 7, 16, 25, 33)]
    return ["", *[word for takes in fmt.options for word in (groups if takes == "gN" else [takes])]]


@pytest.mark.parametrize("name", NAMED)
@settings(max_examples=budget(40))
@given(st.data())
def test_every_number_comes_back_or_is_refused(name, data):
    words = data.draw(st.lists(st.sampled_from(options(NAMED[name])), max_size=2, unique=True))
    fmt = named(":".join([name, *filter(None, words)]))
    dtype = np.dtype(data.draw(st.sampled_from([np.float32, np.float16, bfloat16])))
    shape = (data.draw(st.sampled_from(TOKENS)), 2, data.draw(st.sampled_from(HEADS)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = rng.standard_normal(shape[-data.draw(st.integers(1, 3)) :])
    x = x / np.abs(x).max(initial=1e-9) * data.draw(st.sampled_from(MAGNITUDES))
    x += data.draw(st.sampled_from([0, 1, -100])) * np.abs(x).max(initial=0)
    most = float(finfo(dtype).max)
    x = np.clip(x, -most, most).astype(dtype)
    scale = (
        {"scale": np.clip(np.abs(np.float32(x)).max(initial=0), 1e-30, 2e38) / fmt.code.limits[1]}
        if fmt.needs_scale
        else {}
    )
    try:
        arrays = encode(x, fmt, **scale)
    except KvkitError as error:
        event(str(error).split(":")[0])
        return
    compare(fmt, x.astype(np.float32), dtype, arrays)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_1", "iq4_nl", "mlx_nvfp4"])
@pytest.mark.parametrize("magnitude", [1e7, 1e20])
def test_numbers_whose_scales_have_no_room_are_refused(rng, name, magnitude):
    x = rng.standard_normal((2, 2, 64)).astype(np.float32) * np.float32(magnitude)
    with pytest.raises(KvkitError, match=rf"x: expected numbers whose \w+ \w+ holds, for {name}, got up to"):
        encode(x, name)


@pytest.mark.parametrize(("shape", "wanted"), [((0, 4), None), ((3, 0, 8), None), ((2, 0), "head size")])
def test_rotation_of_nothing(shape, wanted):
    x = np.zeros(shape, np.float32)
    for name in ("hadamard", "hadamard:2", "vllm"):
        if wanted:
            with pytest.raises(KvkitError, match=wanted):
                rotate(x, name)
        else:
            assert rotate(x, name).shape == shape
