"""Sort numbers within the compiled passes of checks."""

from kvkit.runtime.jit import Integers, helper


@helper
def ascending(
    keys: Integers, first: int, step: int, count: int, places: Integers, order: int, merged: int,
) -> None:  # fmt: skip
    """Merge-sort `count` keys: write their indices, by ascending key, to `places[order:]`.

    Key i is ``keys[first + i * step]``. `places[merged:]` is workspace for `count` numbers.
    """
    for i in range(count):
        places[order + i] = i
    width = 1
    while width < count:
        begin = 0
        while begin < count:
            middle, end = min(begin + width, count), min(begin + 2 * width, count)
            left, right = begin, middle
            for i in range(begin, end):
                # Both are read before either is chosen, so an end is clamped to the last key.
                a, b = places[order + min(left, count - 1)], places[order + min(right, count - 1)]
                takes_a = left < middle and (right == end or keys[first + a * step] <= keys[first + b * step])
                places[merged + i] = a if takes_a else b
                left, right = left + takes_a, right + (not takes_a)
            begin = end
        for i in range(count):
            places[order + i] = places[merged + i]
        width *= 2
