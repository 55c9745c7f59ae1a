"""Sort numbers within the compiled passes of checks."""

from kvkit.runtime.jit import Integers, helper


@helper
def ascending(
    keys: Integers, first: int, step: int, count: int, places: Integers, order: int, spare: int,
) -> None:  # fmt: skip
    """Merge-sort `count` keys: write their indices, by ascending key, to `places[order:]`.

    Key i is ``keys[first + i * step]``. `places[spare:]` is workspace for `count` numbers.
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
                one, other = places[order + min(left, count - 1)], places[order + min(right, count - 1)]
                takes = left < middle and (
                    right == end or keys[first + one * step] <= keys[first + other * step]
                )
                places[spare + i] = one if takes else other
                left, right = left + takes, right + (not takes)
            begin = end
        for i in range(count):
            places[order + i] = places[spare + i]
        width *= 2
