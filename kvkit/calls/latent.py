"""Read and write rows of latent caches; multiply heads with their projections."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvkit import cpu
from kvkit.checks.attention import AttentionCall
from kvkit.checks.latent import HeadProduct, LatentCall, LatentPool, attention_to_rows
from kvkit.formats.coding import encode
from kvkit.formats.elements import BFLOAT16, E4M3, FLOAT32
from kvkit.formats.known import Format
from kvkit.formats.packing import from_bytes, split_blocks
from kvkit.runtime.arrays import empty_result
from kvkit.typed import Array

ROWS = 2**14  # rows that are gathered at a time, some 20 MB


def attention_over_bytes(call: LatentCall) -> AttentionCall | None:
    """Return attention that reads rows of 656 bytes in place; None for other pools."""
    pool = call.pool
    if call.contexts is None or pool.format is None or len(pool.parts) > 1:
        return None
    attention = attention_to_rows(call, call.query, pool.rows.view(E4M3.dtype), call.contexts)
    context = attention.context._replace(
        dim=pool.dim, value_dim=call.value_dim, decoder=cpu.attention.latent.row_decoder()
    )
    return attention._replace(context=context)


def gather_rows(pool: LatentPool, slots: Array) -> Array:
    """Return the rows in some slots, [slots, dim] or [slots, heads, dim]; codes become float32."""
    places = np.divmod(slots, pool.page_size)
    parts = [part[places] for part in pool.parts]  # each [slots, .., width]
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    return rows if pool.format is None else decoded_rows(rows, pool.format, pool.dim)


def decoded_rows(rows: Array, format: Format, dim: int) -> Array:
    """Decode rows of bytes [tokens, bytes] to float32 [tokens, dim], as `formats.decode` does."""
    parts, coded = split_blocks(format, rows), dim - format.tail
    decoded = empty_result((len(rows), dim), FLOAT32.dtype)
    decoded[:, coded:] = from_bytes(parts["tail"], BFLOAT16)[:, 0]
    scales = from_bytes(parts["scale"], format.scale_type())[:, 0]  # [tokens, groups]
    kind = cpu.copy.rows.READ, FLOAT32.name, format.code.name, FLOAT32.name, format.group
    code = cpu.copy.rows.rows(*kind).address
    sides: list[int] = []  # address and strides of sequences, tokens and heads, as in `COPY_SIDE`
    for array in (decoded, rows, scales):  # codes are the first bytes of a row
        sides += cpu.launches.address(array), 0, array.strides[0], 0
    cpu.launches.start(cpu.copy.codes.prepare_codes(code, 1, len(rows), sides, 1, coded, len(rows) * coded))
    return decoded


def scatter_rows(pool: LatentPool, rows: Array, slots: Array) -> None:
    """Write rows [slots, dim] to slots; encode them if the pool has a format."""
    places = np.divmod(slots, pool.page_size)
    for part, stored in zip(pool.parts, stored_parts(pool, rows), strict=True):
        part[places] = stored


def stored_parts(pool: LatentPool, rows: Array) -> list[Array]:
    """Split rows [slots, dim] into the parts of a pool; encode them if it has a format."""
    stored = rows if pool.format is None else encode(rows, pool.format)["codes"]
    ends = np.cumsum([part.shape[2] for part in pool.parts])
    return np.split(stored, ends[:-1], axis=1)


def multiply_heads(call: HeadProduct, out: Array | None) -> Array:
    """Multiply the rows of each head with its weights, in float32."""
    (result,) = call.results.arrays(out)
    wide = call.weight.astype(np.float32)
    product = call.rows.astype(np.float32).swapaxes(0, 1) @ (wide if call.axis == 1 else wide.swapaxes(1, 2))
    result[...] = product.swapaxes(0, 1)
    return result


def pieces_of_contexts(lengths: Array, queries: Array) -> Iterator[list[tuple[int, int, int]]]:
    """Yield lists of pieces (sequence, begin, end) of contexts; a list has about `ROWS` rows.

    A longer context is split, and all pieces but its last have lists of their own. The last piece contains
    the positions of all its queries. With 2 queries each and ROWS = 100, contexts of 30, 250 and 40 tokens
    give [(1, 0, 100)], [(1, 100, 200)], [(0, 0, 30), (1, 200, 250)] and [(2, 0, 40)].
    """
    batch: list[tuple[int, int, int]] = []
    rows = 0  # of the batch
    for sequence, (length, count) in enumerate(zip(lengths.tolist(), queries.tolist(), strict=True)):
        last = max(0, length - max(count, 1)) // ROWS * ROWS  # where the last piece begins
        yield from ([(sequence, begin, begin + ROWS)] for begin in range(0, last, ROWS))
        if rows and rows + length - last > ROWS:
            yield batch
            batch, rows = [], 0
        batch.append((sequence, last, length))
        rows += length - last
    if batch:
        yield batch
