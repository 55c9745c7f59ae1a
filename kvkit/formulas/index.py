"""Index math, written once for CPU and GPU: a token's row, the keys it sees, the shares of workers.

A mode of addressing is a page table: offset mode is a table of one endless page a sequence, a static
cache is offset mode from row 0 with a stride between sequences, a slot mapping is pages of one row.
Every index is int64. Formulas take scalars, and kernels read the tables; only the two binary searches at the
end read sorted tables.
"""

from kvkit.runtime.jit import shared


@shared
def page_of(position, page_size):
    """Return the page of a sequence that holds a position: a column of its page table."""
    return position // page_size


@shared
def row_of(page_start, position, page_size):
    """Return the row that holds a position, in a page that begins at row `page_start`."""
    return page_start + position % page_size


@shared
def rest_of_page(position, page_size):
    """Return how many tokens from `position` on lie in the same page, in neighbouring rows."""
    return page_size - position % page_size


@shared
def filled_rows(tokens, page, page_size):
    """Return how many rows of a page hold one of a sequence's first `tokens` tokens."""
    return min(page_size, max(tokens - page * page_size, 0))


@shared
def rows_inside(first, count, rows):
    """Return whether `count` rows from `first` on are among `rows`, without a sum that can overflow."""
    return 0 <= first <= rows - count


@shared
def visible_range(seqlen, kvlen, token, left, right, causal):
    """Return the positions [begin, end) that causal rule and window let a token see; -1 is no limit."""
    position = kvlen - seqlen + token
    begin = max(position - left, 0) if left >= 0 else 0
    end = min(position + right + 1, kvlen) if right >= 0 else kvlen
    if causal:
        end = min(end, position + 1)
    return begin, max(end, begin)


@shared
def share(total, number, shares):
    """Return where share `number` of `total` equal items begins; share number `shares` begins at the end."""
    return total // shares * number + min(number, total % shares)


@shared
def sequence_among(starts, sequences, token):
    """Return the sequence of a packed token: the last one that begins at or before it."""
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= token:
            low = middle
        else:
            high = middle
    return low


@shared
def overlapping_run(begins, ends, runs, first, last):
    """Return the last of the sorted runs that shares a row with [first, last); -1 if none does."""
    low, high = 0, runs
    while low < high:
        middle = (low + high) // 2
        if begins[middle] < last:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low and ends[low - 1] > first else -1
