"""Copy rows to and from Ascend's NZ layout, which stores rows in groups (fractals) of 32 bytes."""

from kvkit.checks.records import FRACTAL_BYTES
from kvkit.cpu.simd.lanes import I8, I64, loop, micro_kernel, read, row_id_at, write


@micro_kernel
def fractals(b, source, source_row, source_group, target, target_row, target_group, rows, groups):
    """Copy rows between a row-major and an NZ array. In NZ, the rows of one 32-byte group are neighbours."""
    move(b, lambda row: b.add(source, b.mul(row, source_row)), source_group, target, target_row, target_group,
         rows, groups)  # fmt: skip


@micro_kernel
def scattered_fractals(b, sources, source_group, target, target_row, target_group, rows, groups):
    """Copy rows, given as a list of addresses, to NZ."""

    move(b, lambda row: row_id_at(b, sources, row), source_group, target, target_row, target_group,
         rows, groups)  # fmt: skip


def move(b, source_of, source_group, target, target_row, target_group, rows, groups):
    """Copy two groups at a time, so that each cache line of the row-major array is used once."""

    def copy_groups(first, count):
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
        copy_groups(first, 2)
    with loop(b, b.sub(groups, even)) as rest:
        copy_groups(b.add(even, rest), 1)
