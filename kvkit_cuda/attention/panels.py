"""Multiply a warp's own tile of 16 tokens by panels: a fragment is a chunk of keys or values.

    s^T = k q^T   [tokens, rows] = [tokens, dim] [dim, rows]
    o^T = v^T p^T   [dim, rows] = [dim, tokens] [tokens, rows]

Tokens, or elements of values, are the 16 rows of a product, and rows of queries are its 8 columns. The inner
axis may be permuted if both factors permute it alike. So a thread reads chunks, 8 neighbouring elements, and
widens codes between shared memory and the product. With g = lane // 4 and t = lane % 4 a thread takes

                panel 0             panel 1
    keys      | t=0  t=1  t=2  t=3 | t=0 ..      chunk t of each panel of 4 chunks, of tokens g and g+8
    values    | g=0  g=1 ..    g=7 | g=0 ..      chunk g of each panel of 8 chunks, of tokens 2t, 2t+1,
                                                 2t+8, 2t+9

and has s [rows 2t, 2t+1; tokens g, g+8] and o [rows 2t, 2t+1; elements of its chunks of values]. A chunk is 4
words (see `stored_tiles`).
"""

import numpy as np

from kvkit_cuda.attention.fragments import EVERYONE, SMALLER, mma, score_rotator
from kvkit_cuda.attention.stored_tiles import VALUES
from kvkit_cuda.attention.tile_words import (
    PIECE,
    arranged,
    both,
    pair_decoder,
    piece_loader,
    reader,
    start,
    word_decoder,
    words_loader,
)
from kvkit_cuda.attention.tiles import CHUNK
from kvkit_cuda.attention.work_items import near_row_of, query_address
from kvkit_cuda.device_runtime import device, ptx

int32, fresh_register = device.int32, ptx.fresh_register
B = 4 * PIECE  # index of the words of weights, after those of values
WORDS, ZERO = B + 4, np.float32(0)  # words of keys, values and weights that a thread holds
load_chunk = words_loader(16)


def query_loader(form):
    """Return f(params, item, lane, held), which loads q [blocks of 8 rows, panels, words].

    q is arranged like chunks of keys; a lane has row lane // 4 of each block, or the last one. f returns a
    factor of all scores: 1 here, other forms fold scales into it.
    """
    tile, blocks = form.keys, form.blocks
    panels, whole = tile.panels, tile.chunks % tile.panel == 0
    chunks_of_row, first, pace, put = tile.chunks, tile.first(1), tile.pace, arranged(4, tile.held)

    def load_queries(params, item, lane, held):
        for block in range(blocks):
            row = near_row_of(params, item, min(int32(8 * block + (lane >> 2)), item.last))
            address = query_address(params, item, row)
            for panel in range(panels):
                chunk, words = (lane & 3) * first + panel * pace, (np.uint64(0), np.uint64(0))
                if whole or chunk < chunks_of_row:
                    words = load_chunk(address + 16 * chunk)
                put(held.q, (block * panels + panel) * 4, words)
        return np.float32(1)

    return device.force_inlined(load_queries)


def multiply_keys(form):
    """Return f(held, at, lane, mask, s): s = q k^T for the keys of a tile at address `at`."""
    tile, blocks, columns = form.keys, form.blocks, form.columns
    multiply = mma(form.element, columns, form.fragment.transposed)
    panels, chunks, piece, panel_chunks = tile.panels, tile.chunks, tile.piece, tile.panel
    whole, begin, take, widen = (
        chunks % panel_chunks == 0, start(tile), piece_loader(tile), word_decoder(tile)
    )  # fmt: skip

    def fetch(place, panel, words):
        if panel % piece == 0:
            take(place, 0, panel // piece, words, 8)
            take(place, 8, panel // piece, words, 8 + PIECE)
        for k in range(4):
            words[k] = widen(place, words, 8, panel % piece, k)
            words[4 + k] = widen(place, words, 8 + PIECE, panel % piece, k)

    fetch = device.inlined(fetch)

    def multiply_keys(held, at, lane, mask, s):
        for i in range(2 * blocks * columns):
            s[i] = ZERO
        lane = fresh_register(lane)
        place, q, words = begin(at, lane >> 2 & 7, lane & 3, mask), held.q, held.words
        for panel in range(panels):
            fetch(place, panel, words)  # [2 tokens, 4 words]
            if not whole and panel_chunks * panel + (lane & 3) >= chunks:  # 0 times NaN would be NaN
                for k in range(8):
                    words[k] = np.uint32(0)
            for block in range(blocks):
                for k in range(0, 4, 2):
                    i = (block * panels + panel) * 4 + k
                    keys = words[k], words[4 + k], words[k + 1], words[5 + k]
                    multiply(keys, (q[i], q[i + 1]), s, 2 * block, 0)

    return device.force_inlined(multiply_keys)


def multiply_values(form):
    """Return f(held, p, at, lane, mask, o): o += p v for values at `at`; p is rounded to the data's type."""
    tile, blocks, width = form.values, form.blocks, form.width
    multiply = mma(form.element, width, form.fragment.transposed)
    panels, begin, piece = tile.panels, start(tile), tile.piece
    packed, transposed = ptx.packed(form.element), ptx.transposed
    take, decode_pairs = piece_loader(tile), pair_decoder(tile)

    def fetch(place, panel, words):
        if panel % piece == 0:
            for i in range(4):
                take(place, (i >> 1) * 8 + (i & 1), panel // piece, words, PIECE * i)

    def pairs(place, words, panel, k):
        a0, a1 = decode_pairs(place, words, 0, PIECE, panel % piece, k)
        a2, a3 = decode_pairs(place, words, 2 * PIECE, 3 * PIECE, panel % piece, k)
        return a0, a1, a2, a3

    fetch, pairs = device.inlined(fetch), device.inlined(pairs)

    def multiply_values(held, p, at, lane, mask, o):
        words = held.words
        for i in range(2 * blocks):
            j = i // 2 * 4 + i % 2
            words[B + i] = transposed(packed(p[j], p[j + 2]))
        lane = fresh_register(lane)
        place = begin(at, (lane & 3) * 2, lane >> 2 & 7, mask)
        for panel in range(panels):
            fetch(place, panel, words)  # [4 tokens, 4 words]
            for k in range(4):
                values = pairs(place, words, panel, k)
                for block in range(blocks):
                    weights = words[B + 2 * block], words[B + 2 * block + 1]
                    multiply(values, weights, o, 2 * block, panel * VALUES + 2 * k)

    return device.force_inlined(multiply_values)


def multiply_nan_safe(form):
    """Return f(held, p, at, lane, mask, o): o += p v in float32; weights of 0 add nothing, even for NaN.

    Weights are multiplied with `SMALLER`, so that sums stay finite.
    """
    tile, rows, columns, width = form.values, form.thread_rows, form.columns, form.width
    panels, begin, read, rotate = tile.panels, start(tile), reader(tile), score_rotator(form)
    two, exchange = both(form.element), device.exchange

    def multiply_nan_safe(held, p, at, lane, mask, o):
        lane, words = fresh_register(lane), held.words
        for column in range(columns):
            for other in range(8):
                place = begin(at, column * 8 + ((lane >> 2) ^ other), lane >> 2 & 7, mask)
                for r in range(rows):
                    weight = exchange(EVERYONE, p[r * columns], 4 * other) * SMALLER
                    if weight != ZERO:
                        for panel in range(panels):
                            read(place, 0, panel, words, 0)
                            for k in range(4):
                                x, y = two(words[k])
                                i = r * width + panel * VALUES + 2 * k
                                o[i] += weight * x
                                o[i + 1] += weight * y
            rotate(p, 1)

    return device.force_inlined(multiply_nan_safe)


def element_of(tile):
    """Return f(g, i) -> the element of values whose sum is number i of a thread; g is as above."""
    times, pace, apart = tile.first(1), tile.pace, tile.held

    def element_of(g, i):
        chunk, k, half = g * times + i // VALUES * pace, i % VALUES // 2, i % 2
        return chunk * CHUNK + k // apart * 2 * apart + k % apart + half * apart

    return device.inlined(element_of)


def unit_of(tile):
    """Return f(i) -> the factor that makes a thread's sum number i a sum of values; 1 here."""
    return device.inlined(lambda i: np.float32(1))
