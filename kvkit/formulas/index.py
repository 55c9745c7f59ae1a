"""Index formulas, written once for CPU and GPU: a token's row, the keys it sees, the shares of workers.

Every mode of addressing is a page table. In offset mode each sequence has one endless page. A static cache is
offset mode from row 0, with a stride between sequences. A slot mapping has pages of one row. Every index is
int64. Formulas take scalars; only the two binary searches at the end read arrays, which are sorted.
"""

from kvkit.runtime.jit import shared


@shared
def page_of(position, page_size):
    """Return the column of a sequence's page table whose page holds a position."""
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
    """Return whether rows first .. first + count - 1 are among `rows` rows, without overflow."""
    return 0 <= first <= rows - count


@shared
def visible_range(seqlen, kvlen, token, left, right, causal):
    """Return the positions [begin, end) that the causal rule and the window let new token `token` see.

    The window is `left` and `right` positions; -1 means no limit.
    """
    position = kvlen - seqlen + token
    begin = max(position - left, 0) if left >= 0 else 0
    end = min(position + right + 1, kvlen) if right >= 0 else kvlen
    if causal:
        end = min(end, position + 1)
    return begin, max(end, begin)


@shared
def share(total, number, shares):
    """Return the first of `total` items that belongs to share `number`, when workers get equal shares.

    Share number `shares` begins after the last item.
    """
    return total // shares * number + min(number, total % shares)


@shared
def sequence_among(starts, sequences, token):
    """Return the sequence of a packed token: the last sequence that begins at or before the token."""
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
    """Return the last of the sorted runs [begins[i], ends[i]) that shares a row with [first, last), or -1."""
    low, high = 0, runs
    while low < high:
        middle = (low + high) // 2
        if begins[middle] < last:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low and ends[low - 1] > first else -1
