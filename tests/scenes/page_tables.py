"""List the page table of the specification, and wrong ones."""

import numpy as np

INT64_MAX = np.iinfo(np.int64).max
PAGED = {
    "cache_mode": 1, "page_size": 4, "seqstarts": [0, 1, 7, 7], "kvstarts": [0, 6, 12, 15],
    "start_pos": [5, 0, 3], "cachestarts": [[8, 2, -1], [20, 16, INT64_MAX], [8, INT64_MAX, -1]],
}  # fmt: skip


def paged(*, rows=(), **changes):
    table = [list(row) for row in PAGED["cachestarts"]]
    for batch, start in rows:
        table[batch][: len(start)] = start
    return {**PAGED, "cachestarts": table, **changes}


REFUSED = {
    "row_24": paged(rows=[(1, [12, 23])]), "rows_20_21_stored_twice": paged(rows=[(1, [20, 20])]),
    "loads_row_3_of_another": paged(rows=[(2, [2])]),
    "own_past_is_stored": paged(rows=[(0, [8, 8]), (2, [0])]), "row_minus_1": paged(rows=[(0, [8, -1])]),
    "kvlen_is_not_start_plus_seqlen": paged(kvstarts=[0, 5, 11, 14]),
    "max_seqlen_too_small": paged(max_seqlen=5), "max_kvlen_too_small": paged(max_kvlen=5),
}  # fmt: skip
