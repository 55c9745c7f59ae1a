"""The mean of Ascend's compressed runs in whole numbers, without any float arithmetic of the machine."""

import math
from fractions import Fraction

PRECISION = {  # bits of a significand, lowest and highest exponent of its leading bit
    "float32": (24, -126, 127),
    "float16": (11, -14, 15),
    "bfloat16": (8, -126, 127),
}


def rounded(x, element):
    """Return the number of a type next to a fraction, ties to even; infinity (a float) beyond the last."""
    bits, lowest, highest = PRECISION[element]
    if x == 0:
        return Fraction(0)
    size, exponent = abs(x), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    unit = Fraction(2) ** (max(exponent, lowest) - bits + 1)
    whole = x / unit
    floor = whole.numerator // whole.denominator
    rest = whole - floor
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2):
        floor += 1
    result = floor * unit
    if abs(result) >= Fraction(2) ** (highest + 1):
        return math.copysign(math.inf, x)
    return result


def exact_mean(numbers, element):
    """Return (number, is negative) of the mean of finite numbers, as a float or an exact fraction."""
    total = Fraction(0)
    for number in numbers:
        total = rounded(total + Fraction(float(number)), "float32")
        if isinstance(total, float):
            return total, total < 0  # finite numbers do not lead back
    quotient = rounded(total / len(numbers), "float32")
    return rounded(quotient, element), total < 0
