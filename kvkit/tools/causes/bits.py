"""Guess causes within an element or a head."""

import numpy as np

from kvkit.formats import BY_DTYPE
from kvkit.tools.causes.evidence import Guess, count_words
from kvkit.tools.causes.trial import Guesses, Trial, cause
from kvkit.tools.counting import word_view

LEAST_ALIKE = 0.1  # the least share of differing elements with one ratio, for a factor
POWER_BITS, FACTOR_BITS = 4.0, 24.0  # bits that describe a factor: a power of two, and any other


@cause("old bytes: not written")
def not_written(trial: Trial) -> Guesses:
    """The bytes are unchanged by the call, or have one value, as new memory: zeros, NaN, a marker."""
    if trial.before is not None:
        yield Guess("as before", trial.before)
    yield Guess("zeros", np.zeros_like(trial.expected), bits=1)
    expected, got = word_view(trial.expected), word_view(trial.got)
    words, counts = count_words(got[expected != got])
    if not len(words) or not words[counts.argmax()]:
        return
    value = words[counts.argmax()].view(trial.expected.dtype)
    is_nan = bool(value != value)
    detail = "NaN" if is_nan else f"all {value.item() if value.dtype.kind in 'iufb' else float(value)}"
    yield Guess(detail, np.full_like(trial.expected, value), bits=2 if is_nan else 8 * value.itemsize)


@cause("nibbles swapped")
def nibbles(trial: Trial) -> Guesses:
    """The even element is in the high nibble, as in OpenVINO's u4; other engines use the low nibble."""
    if trial.expected.dtype.itemsize == 1 and not trial.is_float:
        byte = trial.expected.view(np.uint8)
        yield Guess("", ((byte >> 4) | (byte << 4)).view(trial.expected.dtype))


@cause("halves of a head interleaved")
def interleaved_halves(trial: Trial) -> Guesses:
    """Elements of both halves of a head are interleaved, or are not but should be. LMDeploy packs halves."""
    array, axis = trial.expected, trial.axis("c")
    if axis is None or array.shape[axis] % 2 or array.shape[axis] < 4:
        return
    array = np.moveaxis(array, axis, -1)
    pairs = array.reshape(*array.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(array.shape)
    apart = array.reshape(*array.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(array.shape)
    # Of elements 0 1 2 3 4 5, pairs are 0 3 1 4 2 5, and neighbours apart 0 2 4 1 3 5.
    yield Guess("halves side by side", np.moveaxis(pairs, -1, axis), bits=1)
    yield Guess("neighbours apart", np.moveaxis(apart, -1, axis), bits=1)


@cause("endianness")
def endianness(trial: Trial) -> Guesses:
    """The bytes of each element are in the opposite order."""
    if trial.expected.dtype.itemsize > 1:
        yield Guess("", word_view(trial.expected).byteswap().view(trial.expected.dtype))


@cause("flushed subnormals")
def flushed(trial: Trial) -> Guesses:
    """Numbers below the smallest normal one became 0."""
    if trial.is_float:
        smallest = np.finfo(np.float16 if trial.expected.dtype == np.float16 else np.float32).tiny
        small = np.abs(trial.expected.astype(np.float32)) < smallest
        zero = np.zeros((), trial.expected.dtype)
        yield Guess("", np.where(small, np.copysign(zero, trial.expected), trial.expected), bits=5)
        yield Guess("without their signs", np.where(small, zero, trial.expected), bits=6)


@cause("a factor")
def factor(trial: Trial) -> Guesses:
    """Numbers, often scales, are the expected numbers times a constant."""
    fmt = BY_DTYPE.get(trial.expected.dtype)
    if fmt is None or not fmt.significant or fmt.bits < 16:
        return
    wrong = word_view(trial.expected) != word_view(trial.got)
    pairs = (array[wrong].astype(np.float64) for array in (trial.got, trial.expected))
    ratios = np.divide(*pairs)
    ratios = ratios[np.isfinite(ratios) & (ratios != 0)]
    if not len(ratios):
        return
    middle = float(np.partition(ratios, len(ratios) // 2)[len(ratios) // 2])
    alike = np.isclose(ratios, middle, rtol=2.0 ** (2 - fmt.significant), atol=0)
    if alike.mean() < LEAST_ALIKE:
        return
    power = float(np.sign(middle) * 2.0 ** np.round(np.log2(abs(middle))))
    expected, got = (array.astype(np.float64) for array in (trial.expected, trial.got))
    for number, bits in ((power, POWER_BITS), (float(ratios[alike].mean()), FACTOR_BITS)):
        predicted = expected * number
        limit = np.abs(predicted) * 2.0 ** (1 - fmt.significant)
        changed = np.abs(expected - got) > limit
        # A mean ratio predicts numbers up to rounding, a power of two predicts their bits.
        near = (np.abs(predicted - got) <= limit) & changed if bits == FACTOR_BITS else None
        yield Guess(f"{number:.6g}", predicted.astype(trial.expected.dtype), bits, near=near)
