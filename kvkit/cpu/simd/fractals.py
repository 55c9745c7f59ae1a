"""Rows in groups of 32 bytes, as NZ keeps them."""

from kvkit.cpu.simd.lanes import I8, I64, loop, micro_kernel, read, write
from kvkit.layouts.places import FRACTAL_BYTES


@micro_kernel(8)
def fractals(b, source, source_row, source_group, target, target_row, target_group, rows, groups):
    """Move groups of 32 bytes: of each group all rows, which are neighbours on one side.

    Two groups at a time, so that a cache line of the other side is used in one go.
    """

    def move(first, count):
        at = [b.add(I64(i), first) for i in range(count)]
        sources = [b.add(source, b.mul(group, source_group)) for group in at]
        targets = [b.add(target, b.mul(group, target_group)) for group in at]
        with loop(b, rows) as row:
            for from_, to in zip(sources, targets, strict=True):
                group = read(b, b.add(from_, b.mul(row, source_row)), I8, FRACTAL_BYTES)
                write(b, b.add(to, b.mul(row, target_row)), group)

    even = b.and_(groups, I64(-2))
    with loop(b, even, 2) as first:
        move(first, 2)
    with loop(b, b.sub(groups, even)) as rest:
        move(b.add(even, rest), 1)
