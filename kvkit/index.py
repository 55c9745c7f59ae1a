"""Scalar index math, written once for both targets: which row a token has, and how work is shared out.

A mode of addressing is a page table: offset mode is a table of one endless page a sequence, a static
cache is offset mode from row 0 with a stride between sequences, a slot mapping is pages of one row.
Every index is int64. Helpers take scalars only; reading a table is the kernel's business.
"""

from kvkit.jit import shared


@shared
def page_of(position, page_size):
    """The page of a sequence that holds a position: a column of its page table."""
    return position // page_size


@shared
def row_of(page_start, position, page_size):
    """The row that holds a position, in a page that begins at row `page_start`."""
    return page_start + position % page_size


@shared
def rest_of_page(position, page_size):
    """How many tokens from `position` on lie in its page, hence in neighbouring rows."""
    return page_size - position % page_size


@shared
def filled(tokens, page, page_size):
    """How many rows of a page hold one of a sequence's first `tokens` tokens."""
    return min(page_size, max(tokens - page * page_size, 0))


@shared
def inside(first, count, rows):
    """Whether `count` rows from `first` on are among `rows`; no sum here can overflow."""
    return 0 <= first <= rows - count


@shared
def share(total, part, parts):
    """Where share `part` of `total` equal items begins; share `parts` begins at the end."""
    return total // parts * part + min(part, total % parts)
