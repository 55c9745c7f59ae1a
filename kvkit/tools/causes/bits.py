"""Causes within an element or a head."""

import numpy as np

from kvkit.tools.causes.trial import Guesses, Trial, cause


@cause("nibbles swapped")
def nibbles(trial: Trial) -> Guesses:
    """The even element is in the high nibble: OpenVINO's u4; elsewhere it is in the low one."""
    if trial.expected.dtype.itemsize == 1 and not trial.is_float:
        byte = trial.expected.view(np.uint8)
        yield "", ((byte >> 4) | (byte << 4)).view(trial.expected.dtype)


@cause("halves of a head interleaved")
def interleaved_halves(trial: Trial) -> Guesses:
    """Element i of the first half is beside that of the second, or was and is not: LMDeploy packs halves."""
    array, axis = trial.expected, trial.axis("c")
    if axis is None or array.shape[axis] % 2 or array.shape[axis] < 4:
        return
    array = np.moveaxis(array, axis, -1)
    pairs = array.reshape(*array.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(array.shape)
    apart = array.reshape(*array.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(array.shape)
    yield "halves side by side", np.moveaxis(pairs, -1, axis)
    yield "neighbours apart", np.moveaxis(apart, -1, axis)


@cause("endianness")
def endianness(trial: Trial) -> Guesses:
    """The bytes of an element are in the other order."""
    if trial.expected.dtype.itemsize > 1:
        word = trial.expected.view(f"u{trial.expected.dtype.itemsize}")
        yield "", word.byteswap().view(trial.expected.dtype)


@cause("flushed subnormals")
def flushed(trial: Trial) -> Guesses:
    """Numbers below the smallest normal one became 0."""
    if trial.is_float:
        from_here = (
            np.finfo(np.float32).tiny if trial.expected.dtype != np.float16 else np.finfo(np.float16).tiny
        )
        small = np.abs(trial.expected.astype(np.float32)) < from_here
        zero = np.zeros((), trial.expected.dtype)
        yield "", np.where(small, np.copysign(zero, trial.expected), trial.expected)
        yield "without their signs", np.where(small, zero, trial.expected)


@cause("old bytes: not written")
def not_written(trial: Trial) -> Guesses:
    """The bytes are those of before the call, or the zeros of new memory."""
    before = trial.like.get(f"before_{trial.name}", trial.like.get("before"))
    if isinstance(before, np.ndarray) and before.shape == trial.expected.shape:
        yield "as before", before.astype(trial.expected.dtype, copy=False)
    yield "zeros", np.zeros_like(trial.expected)
