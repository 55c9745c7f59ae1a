"""A warp's products with its own tile of 16 tokens; a fragment is a chunk of keys or values.

    s^T = k q^T   [tokens, rows] = [tokens, dim] [dim, rows]
    o^T = v^T p^T   [dim, rows] = [dim, tokens] [tokens, rows]

Tokens, or elements of values, are the 16 rows of a product, and rows of queries are its 8 columns. Both
factors may permute the inner axis alike. So a thread reads chunks, 8 neighbouring elements, and widens codes
between shared memory and the product. With
g = lane // 4 and t = lane % 4 a thread takes

                panel 0             panel 1
    keys      | t=0  t=1  t=2  t=3 | t=0 ..      chunk t of each panel of 4 chunks, of tokens g and g+8
    values    | g=0  g=1 ..    g=7 | g=0 ..      chunk g of each panel of 8 chunks, of tokens 2t, 2t+1,
                                                 2t+8, 2t+9

and has s [rows 2t, 2t+1; tokens g, g+8] and o [rows 2t, 2t+1; elements of its chunks of values]. A chunk is 4
words (see `stored_tiles`).
"""

import numpy as np

from kvkit.formulas import numeric
from kvkit_cuda.attention.fragments import EVERYONE, SMALLER, mma, score_rotator
from kvkit_cuda.attention.stored_tiles import VALUES
from kvkit_cuda.attention.tile_words import (
    PIECE,
    both,
    four_of,
    pair_decoder,
    piece_loader,
    reader,
    start,
    word_decoder,
)
from kvkit_cuda.attention.work_items import near_row_of, query_address
from kvkit_cuda.device_runtime import device, memory, ptx
from kvkit_cuda.device_runtime.ptx import high, low

fresh_register = ptx.fresh_register
B = 4 * PIECE  # index of the words of weights, after those of values
WORDS, ZERO = B + 4, np.float32(0)  # words that a thread holds on their way to a product
four_of_memory = four_of(memory.load(16, 16))


def query_loader(form):
    """Return f(params, step, item, lane, words, q), which loads q [blocks of 8 rows, panels, words].

    q is arranged like chunks of keys. A lane has row lane // 4 of each block; rows after the last are zeros.
    It returns a factor of all scores: 1, but where q is brought to float16.
    """
    tile, blocks = form.keys, form.blocks
    apart, panels, whole = tile.apart, tile.panels, tile.chunks % tile.panel == 0
    chunks_of_row, first, pace = tile.chunks, tile.first(1), tile.pace
    into_range = range_finder(form)

    def load_queries(params, step, item, lane, words, q):
        for block in range(blocks):
            number = 8 * block + (lane >> 2)
            row = near_row_of(params, item, min(number, item.last))
            address = query_address(params, step, row)
            for panel in range(panels):
                chunk = (lane & 3) * first + panel * pace
                for k in range(4):
                    words[k] = np.uint32(0)
                if number <= item.last and (whole or chunk < chunks_of_row):
                    words[0], words[1], words[2], words[3] = four_of_memory(address + 16 * chunk)
                for k in range(4):
                    e = k // apart * 2 * apart + k % apart  # the first element of the word
                    word = words[k]
                    if apart > 1:
                        one, other = words[e // 2], words[(e + apart) // 2]
                        word = high(one, other) if e % 2 else low(one, other)
                    q[(block * panels + panel) * 4 + k] = word
        return into_range(q)

    return device.force_inlined(load_queries)


def range_finder(form):
    """Return f(q) -> the factor of scores; it brings q to the type of products.

    The largest magnitude of all rows, x, is brought to 2^15 <= x < 2^16 by a power of 2. Then float16 holds
    each element as exactly as bfloat16, down to 2^-29 of the largest one, and its error is 2^-40 of that.
    """
    if form.data_dtype == form.element:
        return device.inlined(lambda q: np.float32(1))
    held, two, packed = form.blocks * form.keys.panels * 4, both(form.data_dtype), ptx.packed(form.element)
    exchange, larger = device.exchange, ptx.larger

    def into_range(q):
        peak = ZERO
        for i in range(held):
            x, y = two(q[i])
            peak = larger(peak, larger(abs(x), abs(y)))
        for distance in (1, 2, 4, 8, 16):
            peak = larger(peak, exchange(EVERYONE, peak, distance))
        exponent = min(max(numeric.bits_of(peak) >> np.uint32(23), np.uint32(16)), np.uint32(254))
        more = numeric.float_of(np.uint32((np.uint32(269) - exponent) << np.uint32(23)))
        for i in range(held):
            x, y = two(q[i])
            q[i] = packed(x * more, y * more)
        return numeric.float_of(np.uint32((exponent - np.uint32(15)) << np.uint32(23)))

    return device.force_inlined(into_range)


def multiply_keys(form):
    """Return f(q, at, lane, mask, words, s): s = q k^T for the keys of a tile at address `at`."""
    tile, blocks, columns = form.keys, form.blocks, form.columns
    multiply = mma(form.element, columns, form.fragment.transposed)
    panels, chunks, piece, panel_chunks = tile.panels, tile.chunks, tile.piece, tile.panel
    whole, coded, begin = chunks % panel_chunks == 0, tile.coded, start(tile)
    read = reader(tile)
    take, widen = (piece_loader(tile), word_decoder(tile)) if coded else (read, read)

    def read_codes(place, panel, words):
        if panel % piece == 0:
            take(place, 0, panel // piece, words, 8)
            take(place, 8, panel // piece, words, 8 + PIECE)
        for k in range(4):
            words[k] = widen(place, words, 8, panel % piece, k)
            words[4 + k] = widen(place, words, 8 + PIECE, panel % piece, k)

    def read_floats(place, panel, words):
        for half in range(2):
            read(place, 8 * half, panel, words, 4 * half)

    fetch = device.inlined(read_codes if coded else read_floats)

    def multiply_keys(q, at, lane, mask, words, s):
        for i in range(2 * blocks * columns):
            s[i] = ZERO
        lane = fresh_register(lane)
        place = begin(at, lane >> 2 & 7, lane & 3, mask)
        for panel in range(panels):
            fetch(place, panel, words)  # [2 tokens, 4 words]
            if not whole and panel_chunks * panel + (lane & 3) >= chunks:  # zeros, because 0 times NaN is NaN
                for k in range(8):
                    words[k] = np.uint32(0)
            for block in range(blocks):
                for k in range(0, 4, 2):
                    i = (block * panels + panel) * 4 + k
                    keys = words[k], words[4 + k], words[k + 1], words[5 + k]
                    multiply(keys, (q[i], q[i + 1]), s, 2 * block, 0)

    return device.force_inlined(multiply_keys)


def multiply_values(form):
    """Return f(p, at, lane, mask, words, o): o += p v for values at `at`; p is rounded to the data's type."""
    tile, blocks, width = form.values, form.blocks, form.width
    multiply = mma(form.element, width, form.fragment.transposed)
    panels, begin, read, piece = tile.panels, start(tile), reader(tile), tile.piece
    packed, transposed, coded = ptx.packed(form.element), ptx.transposed, tile.coded
    take, decode_pairs = (piece_loader(tile), pair_decoder(tile)) if coded else (read, read)

    def fetch_codes(place, panel, words):
        if panel % piece == 0:
            for i in range(4):
                take(place, (i >> 1) * 8 + (i & 1), panel // piece, words, PIECE * i)

    def fetch_floats(place, panel, words):
        for i in range(4):
            read(place, (i >> 1) * 8 + (i & 1), panel, words, 4 * i)

    def pairs_of_codes(place, words, panel, k):
        a0, a1 = decode_pairs(place, words, 0, PIECE, panel % piece, k)
        a2, a3 = decode_pairs(place, words, 2 * PIECE, 3 * PIECE, panel % piece, k)
        return a0, a1, a2, a3

    def pairs_of_floats(place, words, panel, k):
        one, other, third, last = words[k], words[4 + k], words[8 + k], words[12 + k]
        return low(one, other), high(one, other), low(third, last), high(third, last)

    fetch = device.inlined(fetch_codes if coded else fetch_floats)
    pairs = device.inlined(pairs_of_codes if coded else pairs_of_floats)

    def multiply_values(p, at, lane, mask, words, o):
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
    """Return f(p, at, lane, mask, words, o): o += p v in float32; weights of 0 add nothing, even for NaN.

    Weights are multiplied with `SMALLER`, so that sums stay finite.
    """
    tile, rows, columns, width = form.values, form.thread_rows, form.columns, form.width
    panels, begin, read, rotate = tile.panels, start(tile), reader(tile), score_rotator(form)
    two, exchange = both(form.element), device.exchange

    def multiply_nan_safe(p, at, lane, mask, words, o):
        lane = fresh_register(lane)
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
