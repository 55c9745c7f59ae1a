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

and has s [rows 2t, 2t+1; tokens g, g+8] and o [rows 2t, 2t+1; elements of its chunks of values]. Its words
`held.words` are (`tile_words` describes chunks as words, and pieces)

    word      0 ..          4 ..            8 ..          16 ..          24 ..         32 ..
    keys      chunk of g    chunk of g+8    piece of g    piece of g+8
    values    piece of 2t                   of 2t+1       of 2t+8        of 2t+9       weights
"""

import numpy as np

from kvkit_cuda.attention import tile_words
from kvkit_cuda.attention.fragments import EVERYONE, SMALLER, mma, score_rotator
from kvkit_cuda.attention.tiles import CHUNK
from kvkit_cuda.attention.work_items import query_address, row_of_int32
from kvkit_cuda.device_runtime import device, ptx

int32, fresh_register = device.int32, ptx.fresh_register
WEIGHTS = 4 * tile_words.PIECE  # index of the words of weights
WORDS = WEIGHTS + 4  # all words of `held.words`
ZERO = np.float32(0)
load_chunk = tile_words.words_loader(16)


def query_loader(form):
    """Return f(params, item, lane, held), which loads q [blocks of 8 rows, panels, words].

    q is arranged like chunks of keys; a lane has row lane // 4 of each block, or the last one. f returns a
    factor of all scores, which is 1 here (`slices` needs another one).
    """
    tile, blocks = form.keys, form.blocks
    panels, whole = tile.panels, tile.chunks % tile.panel == 0
    chunks_of_row, thread_step, panel_step = tile.chunks, tile.thread_step, tile.panel_step
    put = tile_words.arranged(4, tile.in_16_bits)

    def load_queries(params, item, lane, held):
        for block in range(blocks):
            row = row_of_int32(params, item, min(int32(8 * block + (lane >> 2)), item.last))
            address = query_address(params, item, row)
            for panel in range(panels):
                chunk = (lane & 3) * thread_step + panel * panel_step
                words = np.uint64(0), np.uint64(0)
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
    whole, begin = chunks % panel_chunks == 0, tile_words.start(tile)
    load_piece, widen = tile_words.piece_loader(tile), tile_words.word_decoder(tile)

    def fetch(place, panel, words):
        """Load the chunks of a panel of tokens g and g+8."""
        if panel % piece == 0:
            load_piece(place, 0, panel // piece, words, 8)
            load_piece(place, 8, panel // piece, words, 8 + tile_words.PIECE)
        for k in range(4):
            words[k] = widen(place, words, 8, panel % piece, k)
            words[4 + k] = widen(place, words, 8 + tile_words.PIECE, panel % piece, k)

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
                for k in range(0, 4, 2):  # words k and k+1 of the chunks of 4 threads: 16 elements
                    i = (block * panels + panel) * 4 + k
                    keys = words[k], words[4 + k], words[k + 1], words[4 + k + 1]
                    multiply(keys, (q[i], q[i + 1]), s, 2 * block, 0)

    return device.force_inlined(multiply_keys)


def multiply_values(form):
    """Return f(held, p, at, lane, mask, o): o += p v for values at `at`; p is rounded to the data's type."""
    tile, blocks, width = form.values, form.blocks, form.width
    multiply = mma(form.element, width, form.fragment.transposed)
    panels, begin, piece = tile.panels, tile_words.start(tile), tile.piece
    packed, transposed = ptx.packed(form.element), ptx.transposed
    load_piece, decode_pairs = tile_words.piece_loader(tile), tile_words.pair_decoder(tile)

    def fetch(place, panel, words):
        """Load the pieces of tokens 2t, 2t+1, 2t+8, 2t+9, where a piece begins."""
        if panel % piece == 0:
            for i in range(4):
                load_piece(place, (i >> 1) * 8 + (i & 1), panel // piece, words, tile_words.PIECE * i)

    def pairs(place, words, panel, k):
        """Return the fragment whose rows g and g+8 are the two elements of word k of each thread."""
        a0, a1 = decode_pairs(place, words, 0, tile_words.PIECE, panel % piece, k)
        a2, a3 = decode_pairs(place, words, 2 * tile_words.PIECE, 3 * tile_words.PIECE, panel % piece, k)
        return a0, a1, a2, a3

    fetch, pairs = device.inlined(fetch), device.inlined(pairs)

    def multiply_values(held, p, at, lane, mask, o):
        words = held.words
        for i in range(2 * blocks):  # [blocks, tokens 0-7 and 8-15]
            j = i // 2 * 4 + i % 2  # p [rows 2t and 2t+1 of each block, tokens g and g+8]
            words[WEIGHTS + i] = transposed(packed(p[j], p[j + 2]))
        lane = fresh_register(lane)
        place = begin(at, (lane & 3) * 2, lane >> 2 & 7, mask)
        for panel in range(panels):
            fetch(place, panel, words)  # [4 tokens, 4 words]
            for k in range(4):
                values = pairs(place, words, panel, k)
                for block in range(blocks):
                    weights = words[WEIGHTS + 2 * block], words[WEIGHTS + 2 * block + 1]
                    multiply(values, weights, o, 2 * block, panel * CHUNK + 2 * k)

    return device.force_inlined(multiply_values)


def multiply_nan_safe(form):
    """Return f(held, p, at, lane, mask, o): o += p v in float32; weights of 0 add nothing, even for NaN.

    Weights are multiplied with `SMALLER`, so that sums stay finite.
    """
    tile, rows, columns, width = form.values, form.thread_rows, form.columns, form.width
    panels, begin, read = tile.panels, tile_words.start(tile), tile_words.reader(tile)
    two, exchange, rotate = tile_words.both(form.element), device.exchange, score_rotator(form)

    def multiply_nan_safe(held, p, at, lane, mask, o):
        lane, words = fresh_register(lane), held.words
        for column in range(columns):
            for other in range(8):  # the 8 threads of equal t have the weights of 8 tokens
                place = begin(at, column * 8 + ((lane >> 2) ^ other), lane >> 2 & 7, mask)
                for r in range(rows):
                    weight = exchange(EVERYONE, p[r * columns], 4 * other) * SMALLER
                    if weight != ZERO:
                        for panel in range(panels):
                            read(place, 0, panel, words, 0)
                            for k in range(4):
                                x, y = two(words[k])
                                i = r * width + panel * CHUNK + 2 * k
                                o[i] += weight * x
                                o[i + 1] += weight * y
            rotate(p, 1)

    return device.force_inlined(multiply_nan_safe)


def element_of(tile):
    """Return f(g, i) -> the element of values whose sum is number i of a thread; g is as above.

    Sums are numbered [panel, word of the chunk, half of the word].
    """
    thread_step, panel_step, apart = tile.thread_step, tile.panel_step, tile.in_16_bits

    def element_of(g, i):
        chunk, k, half = g * thread_step + i // CHUNK * panel_step, i % CHUNK // 2, i % 2
        return chunk * CHUNK + tile_words.first_of_word(k, apart) + half * apart

    return device.inlined(element_of)


def sum_factor(tile):
    """Return f(i) -> the factor that makes a thread's sum number i a sum of values; 1 here."""
    return device.inlined(lambda i: np.float32(1))
