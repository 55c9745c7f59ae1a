"""Scalar index math, written once for both targets: which row a token has, and how work is shared out.

A mode of addressing is a page table. Offset mode is a table of one endless page a sequence, a static
cache is offset mode from row 0 with a stride between sequences, a slot mapping is pages of one row.
Every index is int64.
"""

from kvkit.jit import shared


@shared
def row_of(table, sequence, position, page_size):
    """The row that holds a sequence's token; `table` [sequences, pages] holds the row where a page begins."""
    page = position // page_size
    return table[sequence, page] + (position - page * page_size)


@shared
def rest_of_page(position, page_size):
    """How many tokens from `position` on lie in one page, hence in neighbouring rows."""
    return page_size - position % page_size


@shared
def sequence_of(starts, token):
    """The sequence of a packed token: the last one that begins at or before it."""
    low, high = 0, starts.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= token:
            low = middle
        else:
            high = middle
    return low


@shared
def share(total, part, parts):
    """Where share `part` of `total` equal items begins; share `parts` begins at the end."""
    return total // parts * part + min(part, total % parts)
