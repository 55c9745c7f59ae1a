"""Rows in groups of 32 bytes, as NZ keeps them."""

from kvkit.cpu.simd.lanes import I8, I64, loop, micro_kernel, prefetch, read, write
from kvkit.layouts.places import FRACTAL_BYTES

LINE = 64  # bytes


@micro_kernel(8)
def fractals(b, source, source_row, source_group, target, target_row, target_group, rows, groups):
    """Move groups of 32 bytes: of each group all rows, which are neighbours on one side."""
    move(b, lambda row: b.add(source, b.mul(row, source_row)), source_group, target, target_row, target_group,
         rows, groups)  # fmt: skip


@micro_kernel(7)
def scattered_fractals(b, sources, source_group, target, target_row, target_group, rows, groups):
    """Copy rows, whose addresses are in a list, to fractals."""

    def address(row):
        value = b.load(b.inttoptr(b.add(sources, b.mul(row, I64(8))), I64.as_pointer()))
        value.align = 8
        return value

    move(b, address, source_group, target, target_row, target_group, rows, groups)


def move(b, source_of, source_group, target, target_row, target_group, rows, groups):
    """Two groups at a time, so that a cache line of the side that is not in groups is used in one go."""

    def some(first, count):
        at = [b.add(I64(i), first) for i in range(count)]
        sources = [b.mul(group, source_group) for group in at]
        targets = [b.add(target, b.mul(group, target_group)) for group in at]
        with loop(b, rows) as row:
            source = source_of(row)
            for from_, to in zip(sources, targets, strict=True):
                group = read(b, b.add(source, from_), I8, FRACTAL_BYTES)
                write(b, b.add(to, b.mul(row, target_row)), group)

    even = b.and_(groups, I64(-2))
    with loop(b, even, 2) as first:
        some(first, 2)
    with loop(b, b.sub(groups, even)) as rest:
        some(b.add(even, rest), 1)


@micro_kernel(2)
def ask(b, address, size):
    """Ask for the cache lines of so many bytes, in order."""
    with loop(b, size, LINE) as i:
        prefetch(b, b.add(address, i))
