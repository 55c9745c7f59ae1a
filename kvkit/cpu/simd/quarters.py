"""Scores of 4 or 8 query rows over float32 or bfloat16: each of 4 query rows has a quarter of a vector.

    S = K Q^T                    [token, row]

    key        k0 k1 k2 k3 | k0 k1 k2 k3 | k0 k1 k2 k3 | k0 k1 k2 k3        16 bytes, read into all quarters
    queries    a0 a1 a2 a3 | b0 b1 b2 b3 | c0 c1 c2 c3 | d0 d1 d2 d3        of query rows a, b, c, d

So a score is the sum of 4 lanes, not of 16. If `paired`, keys and queries are bfloat16, of which a lane
has and multiplies two (AVX-512 BF16); subnormals count as 0.
"""

import functools

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.chunks import bytes_of, for_chunks
from kvkit.cpu.simd.lanes import F32, I32, I64, LANES, loop, micro_kernel, read, write
from kvkit.cpu.simd.pairs import add_products

TOKENS = 8  # whose scores are computed together
QUARTERS = 4


def fits(rows: int, stored: str, paired: bool) -> bool:
    """Return whether these kernels can compute the scores of `rows` query rows over keys of a format."""
    return rows >= QUARTERS and (paired or stored == "float32")


@functools.cache
def arrange_queries(rows: int, paired: bool):
    """Return f(queries, dim), which arranges queries [dim / 16, row, 16] in place.

    They become [dim / 4, row / 4, 4 rows, 4 elements] of float32, or [dim / 8, row / 4, 4 rows, 8 elements]
    of bfloat16 if `paired`.
    """

    @micro_kernel
    def arrange_queries(b, queries, dim):
        parts = 2 if paired else 4  # of 16 elements; a part has 16 bytes of each row
        with loop(b, dim, LANES) as i:
            source = b.add(queries, b.mul(i, I64(4 * rows)))
            target = b.add(queries, b.mul(i, I64(parts * rows)))
            panel = [read(b, b.add(source, I64(4 * LANES * r)), F32, LANES) for r in range(rows)]
            if paired:
                panel = [lanes.narrow(row, "bfloat16").as_bits() for row in panel]
            for part in range(parts):
                quarter = [row.pick(range(4 * part, 4 * part + 4)) for row in panel]
                for group in range(rows // QUARTERS):
                    vector = lanes.concatenate(quarter[QUARTERS * group : QUARTERS * (group + 1)])
                    write(b, b.add(target, I64(64 * (part * rows // QUARTERS + group))), vector)

    return arrange_queries


@functools.cache
def scores(rows: int, near: bool, paired: bool):
    """Return f(queries, keys, key_row, row_ids, ahead, count, dim, factor, scores).

    Queries are those of `arrange_queries`, the rest is as in `attention.narrow_scores`; `count` is a multiple
    of 8. If `paired`, scores are multiplied with the float32 at the address `factor`.
    """
    groups, word = rows // QUARTERS, I32 if paired else F32  # groups of 4 rows; a lane's part of a key
    stored, step = ("bfloat16", 8) if paired else ("float32", 4)  # elements of a quarter
    sizes = (2, 1) if paired else (1,)  # how many times 16 elements are taken at a time: a line, or the rest

    @micro_kernel
    def scores(b, queries, keys, key_row, row_ids, ahead, count, dim, factor, scores):
        with loop(b, count, TOKENS) as first:
            tokens = [b.add(first, I64(t)) for t in range(TOKENS)]
            sums = lanes.StackSlots(b, lanes.zeros(b, LANES, TOKENS * groups))
            at = [b.add(keys, b.mul(lanes.row_id_at(b, row_ids, token), key_row)) for token in tokens]
            later_keys = [lanes.row_id_at(b, ahead, token) for token in tokens]

            def add(i, vectors):
                base = b.add(queries, b.mul(i, I64((2 if paired else 4) * rows)))
                here = bytes_of(b, stored, i)
                key_at = [b.add(address, here) for address in at]
                later = [b.add(address, here) for address in later_keys]
                count = vectors * LANES // step
                for quarter in range(count):
                    for t in range(quarter * TOKENS // count, (quarter + 1) * TOKENS // count):
                        lanes.prefetch(b, later[t], near)
                    places = [b.add(base, I64(64 * (quarter * groups + g))) for g in range(groups)]
                    query = [read(b, place, word, LANES) for place in places]
                    for t in range(TOKENS):
                        key = read(b, b.add(key_at[t], I64(16 * quarter)), word, 4)
                        key = key.pick([0, 1, 2, 3] * QUARTERS)
                        for g in range(groups):
                            total = sums[t * groups + g]
                            total = add_products(total, key, query[g]) if paired else key.fma(query[g], total)
                            sums[t * groups + g] = total

            for_chunks(b, dim, sizes, add)
            scale = lanes.broadcast(b, factor, LANES) if paired else None
            target = b.add(scores, b.mul(first, I64(4 * rows)))
            # Lane i of quarter r is row r of vector i, which has token i // groups and row group i % groups.
            order = [
                row % QUARTERS * 4 + token * groups + row // QUARTERS
                for token in range(4 // groups)
                for row in range(rows)
            ]
            for n in range(0, TOKENS * groups, 4):  # lane i of a quarter: the quarter of vector i
                low, high = (
                    lanes.add_lanes(sums[i], sums[i + 1], (0, 16, 1, 17), (2, 18, 3, 19)) for i in (n, n + 2)
                )
                total = lanes.add_lanes(low, high, (0, 1, 16, 17), (2, 3, 18, 19)).pick(order)
                write(b, b.add(target, I64(LANES * n)), total * scale if paired else total)

    return scores
