"""Decode DeepSeek's latent rows of 656 bytes: codes, a scale for each group of 128, then bfloat16 numbers."""

import functools

from kvkit.cpu.attention.prepare import RowDecoder
from kvkit.cpu.copy.rows import LOAD, READ, SIGNATURE, dequantized_row, moved_row
from kvkit.formats.elements import BY_NAME
from kvkit.runtime.jit import callback, helper

CODES, GROUP = 512, 128
TAIL = CODES + CODES // GROUP * 4  # byte where the bfloat16 numbers begin


@functools.cache
def decoded_rows(target):
    """Compile the decoding of rows to a float format; the code has the arguments of `copy.rows.rows`."""
    codes = helper(dequantized_row(target, "e4m3", "float32", GROUP, "float32", stream=False, plain=False))
    tail = helper(moved_row(LOAD, target, "bfloat16", stream=False, plain=False))
    coded_bytes = BY_NAME[target].bytes(CODES)

    def decode_rows(
        packed, packed_token, packed_head, cache, cache_token, cache_head,
        scale, scale_token, scale_head, tokens, heads, repeat, dim,
    ):  # fmt: skip
        for token in range(tokens):
            row, place = cache + token * cache_token, packed + token * packed_token
            codes(place, row, row + CODES, min(dim, CODES))
            if dim > CODES:
                tail(place + coded_bytes, row + TAIL, 0, dim - CODES)

    return callback(decode_rows, SIGNATURE, (READ, target))


@functools.cache
def row_decoder():
    """Return the decoder with which attention reads such rows in place."""
    return RowDecoder(decoded_rows("float32").address, None, None, decoded_rows("bfloat16").address)
