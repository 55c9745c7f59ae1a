"""Multiply with a warp's own tile of 16 tokens, by slices: a slice is 16 bytes of each row.

    s^T = k q^T             [tokens, rows] = [tokens, dim] [dim, rows]
    o^T = v^T w^T           [value dim, rows] = [value dim, tokens] [tokens, rows]

Scales of codes are factors of scores and of weights, so that no element is multiplied. For groups G of a row:

    s[t, r] = sum over G of key scale[t, G] (sum over e in G of k[t, e] q[r, e])
    w[r, t] = p[r, t] value scale[t, G]                         for elements of G; p without scales

Tokens, or elements of values, are the 16 rows of a product, and rows of queries are its 8 columns. Eight rows
of a slice are a matrix of 16-bit units, which `ldmatrix` loads. With g = lane // 4 and t = lane % 4 a thread
has

    keys      bytes 4t .. 4t+3 of the slice, of tokens g and g+8
    values    bytes 2g, 2g+1 of the slice, of tokens 2t, 2t+1 and of 2t+8, 2t+9 (the matrix is transposed)

and s [rows 2t, 2t+1; tokens g, g+8], o [rows 2t, 2t+1; its elements of each slice].

An integer code c with a flipped sign is c + z, with z = 128 or 8. In the low bits of a float16 that is the
subnormal number (c + z) 2^-24, or 16 times as much if a code of 4 bits was not shifted down. So codes are
not converted:

    c 2^-24 = (c + z) 2^-24 - z 2^-24

The second term is a product too: of queries once for a work item, of weights for each 8 bytes of values.
Tensor cores take subnormal numbers (Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor
cores, 2021).
"""

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit.runtime.jit import shared
from kvkit_cuda.attention.fragments import EVERYONE, SMALLER, mma, score_rotator
from kvkit_cuda.attention.stored_tiles import TOKENS
from kvkit_cuda.attention.tile_words import arranged, both, words_loader
from kvkit_cuda.attention.work_items import near_row_of, query_address
from kvkit_cuda.copy import chunks
from kvkit_cuda.device_runtime import device, memory, ptx

ZERO, SIGN = np.float32(0), 0x8000
ZEROS, WEIGHTS = 4, 6  # indices of the words of codes 0 and of weights, after those of two slices
CODE_POWER = 24  # codes are multiplied as numbers 2^-24 of theirs
int32, fresh_register = device.int32, ptx.fresh_register


def place_finder(tile):
    """Return f(lane) -> the offsets that a lane loads from: rows of matrices, and scales of its token.

    For matrices a lane gives the address of its token, 0-7 and 8-15 of a slice, then of the next slice.
    """
    step, scale_step = tile.step, tile.scale_step

    def find_place(lane):
        row = int32((lane & 15) * step + (lane >> 4 & 1) * 16)
        return fresh_register(row), fresh_register(int32(TOKENS * step + (lane >> 2 & 7) * scale_step))

    return device.inlined(find_place)


def query_loader(form):
    """Return f(params, item, lane, held), which loads q [blocks of 8 rows, slices, words].

    q is arranged like keys; a lane has row lane // 4 of each block, or the last one. It returns the factor of
    all scores.
    """
    tile, blocks = form.keys, form.blocks
    apart, count, slices, size = tile.apart, tile.held, tile.slices, 4 * tile.held
    load, into_range, find_zeros = words_loader(size), range_finder(form), zero_finder(form)
    factor, put = np.float32(2.0**CODE_POWER if tile.integer else 1), arranged(count, apart)
    key_place, value_place = place_finder(tile), place_finder(form.values)
    zeros = zero_words(tile) if tile.integer else (0, 0)

    def load_queries(params, item, lane, held):
        for block in range(blocks):
            row = near_row_of(params, item, min(int32(8 * block + (lane >> 2)), item.last))
            address = query_address(params, item, row) + size * (lane & 3)
            for i in range(slices):
                put(held.q, (block * slices + i) * count, load(address + 4 * size * i))
        less = into_range(held.q)
        find_zeros(held)
        held.places[0], held.places[1] = key_place(lane)
        held.places[2], held.places[3] = value_place(lane)
        for i in range(2):
            held.words[ZEROS + i] = np.uint32(fresh_register(int32(zeros[i])))
        return less * factor

    return device.force_inlined(load_queries)


def range_finder(form):
    """Return f(q) -> the factor of scores; it scales q and converts it to the type of products.

    A power of 2 brings the largest magnitude of all rows, x, to 2^15 <= x < 2^16. Then float16 holds
    each element as exactly as bfloat16, down to 2^-29 of the largest one, and its error is 2^-40 of that.
    Elements that meet codes 16 times too large are divided by 16.
    """
    tile, held = form.keys, form.blocks * form.keys.dim // 8
    if form.data_dtype == form.element and tile.held < 4:
        return device.inlined(lambda q: np.float32(1))
    two, packed = both(form.data_dtype), ptx.packed(form.element)
    exchange, larger = device.exchange, ptx.larger
    less_of_odd = np.float32(1 / 16 if tile.held == 4 else 1)

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
            factor = more * less_of_odd if i % 2 else more
            q[i] = packed(x * factor, y * factor)
        return numeric.float_of(np.uint32((exponent - np.uint32(15)) << np.uint32(23)))

    return device.force_inlined(into_range)


def zero_words(tile):
    """Return -z 2^-24 as words of pairs, for codes that were shifted down and for codes that were not."""
    zero = 2 ** (BY_NAME[tile.cache_format].bits - 1)
    even, odd = ((SIGN + zero * 16 ** (k * (tile.held == 4))) * 0x10001 for k in range(2))
    return even, odd


def zero_finder(form):
    """Return f(held), which finds -q z 2^-24 of each group, where scores begin."""
    tile, blocks, rows, columns = form.keys, form.blocks, form.thread_rows, form.columns
    if not tile.integer:
        return device.inlined(lambda held: None)
    multiply, count = mma(form.element, columns, True), tile.held
    slices, each = tile.slices, tile.group_slices
    even, odd = map(np.uint32, zero_words(tile))

    def find_zeros(held):
        sums = held.sums
        for i in range(slices):  # bounds that depend on a group would keep q in local memory
            if i % each == 0:
                for j in range(rows * columns):
                    sums[j] = ZERO
            for block in range(blocks):
                for k in range(0, count, 2):
                    j = (block * slices + i) * count + k
                    multiply((even, even, odd, odd), (held.q[j], held.q[j + 1]), sums, 2 * block, 0)
            if (i + 1) % each == 0:
                for j in range(rows * columns):
                    held.zeros[i // each * rows * columns + j] = sums[j]

    return device.force_inlined(find_zeros)


def code_widener(tile):
    """Return f(word, k, mask) -> word k of the pairs of elements in a word of codes, as float16."""
    if tile.minifloat:
        widened = ptx.widened(tile.cache_format, tile.native)
        return device.inlined(lambda word, k, mask: widened(word >> np.uint32(16 * k)))
    short, zero = tile.held == 4, 2 ** (BY_NAME[tile.cache_format].bits - 1) * 0x10001

    def widen(word, k, mask):
        if short:
            shift = np.uint32(k % 2 * 4)
            return word >> np.uint32(k // 2 * 8) & mask << shift ^ np.uint32(zero) << shift
        return word >> np.uint32(8 * k) & mask ^ np.uint32(zero)

    return device.inlined(widen)


def scales_loader(tile):
    """Return f(at, scales), which loads the scales of tokens g and g+8 of a tile, [tokens, groups].

    `at` is the address of the first scale of token g.
    """
    if not tile.scale_format:
        return device.inlined(lambda at, scales: None)
    (raw, decode), bits = chunks.DECODE[tile.scale_format], BY_NAME[tile.scale_format].bits
    size = next(size for size in (16, 8, 4, 2) if tile.scale_bytes % size == 0)
    load, step, groups = memory.load(size, size, space=memory.SHARED), tile.scale_step, tile.groups
    pieces, each = tile.scale_bytes // size, size * 8 // bits

    @shared
    def load_scales(at, scales):
        for token in range(2):
            for piece in range(pieces):
                low, high = load(np.int64(at) + (8 * token * step + piece * size))
                for j in range(each):
                    word = np.uint32(chunks.field(low, high, j * bits // 32 * 32)) >> np.uint32(j * bits % 32)
                    scales[token * groups + piece * each + j] = np.float32(decode(raw(word)))

    return load_scales


def multiply_keys(form):
    """Return f(held, at, lane, mask, s): s = q k^T for the keys of a tile at address `at`."""
    tile, blocks, columns, rows = form.keys, form.blocks, form.columns, form.thread_rows
    multiply, load, widen = mma(form.element, columns, True), ptx.matrices(False), code_widener(tile)
    count, slices, each, groups = tile.held, tile.slices, tile.group_slices, tile.groups
    load_scales, scaled, integer = scales_loader(tile), bool(tile.scale_format), tile.integer
    held_scores = rows * columns

    def begin(held, group, sums):
        for i in range(held_scores):
            sums[i] = held.zeros[group * held_scores + i] if integer else ZERO

    def add_slice(held, i, mask, sums):
        one, other = held.words[i % 2 * 2], held.words[i % 2 * 2 + 1]  # of tokens g, g+8
        for k in range(0, count, 2):
            a0, a1 = widen(one, k, mask), widen(other, k, mask)
            a2, a3 = widen(one, k + 1, mask), widen(other, k + 1, mask)
            for block in range(blocks):
                j = (block * slices + i) * count + k
                multiply((a0, a1, a2, a3), (held.q[j], held.q[j + 1]), sums, 2 * block, 0)

    def add_floats(held, i, mask, sums):
        if i % 2:
            keys = held.words[0], held.words[1], held.words[2], held.words[3]
            for block in range(blocks):
                j = block * slices + i - 1
                multiply(keys, (held.q[j], held.q[j + 1]), sums, 2 * block, 0)

    begin, add = device.inlined(begin), device.inlined(add_slice if tile.coded else add_floats)

    def multiply_keys(held, at, lane, mask, s):
        place, scales, sums = int32(at + int32(held.places[0])), held.scales, held.sums
        load_scales(int32(at + int32(held.places[1])), scales)
        for i in range(slices):
            if i % each == 0:
                begin(held, i // each, sums)
            if i % 2 == 0:
                load_pair(load, place, i, slices, lane, held.words)
            add(held, i, mask, sums)
            if (i + 1) % each == 0:
                for j in range(held_scores):
                    if not scaled:
                        s[j] = sums[j]
                    elif i + 1 == each:
                        s[j] = sums[j] * scales[j % columns * groups]
                    else:
                        s[j] += sums[j] * scales[j % columns * groups + i // each]

    return device.force_inlined(multiply_keys)


@device.inlined
def load_pair(load, place, i, slices, lane, words):
    """Load slices i and i + 1, [slice, tokens 0-7 and 8-15]; after the last slice, that one again."""
    if i + 1 == slices:
        place = int32(place - (lane >> 4 & 1) * 16)
    words[0], words[1], words[2], words[3] = load(place, 16 * i)


def multiply_values(form):
    """Return f(held, p, at, lane, mask, o): o += w v for values at `at`, where w is rounded."""
    tile, blocks, columns, width = form.values, form.blocks, form.columns, form.width
    multiply, load, widen = mma(form.element, width, True), ptx.matrices(True), code_widener(tile)
    count, slices, each, groups = tile.held, tile.slices, tile.group_slices, tile.groups
    load_scales, scaled, integer = scales_loader(tile), bool(tile.scale_format), tile.integer
    packed, transposed, minifloat = ptx.packed(form.element), ptx.transposed, tile.minifloat
    sort = ptx.bytes_of(0x3120)

    def weigh(p, group, scales, words):
        """Make the fragments of w: [blocks, tokens 2t, 2t+1 and 2t+8, 2t+9] of row g."""
        for i in range(2 * blocks):
            j = i // 2 * 2 * columns + i % 2
            one, other = p[j], p[j + columns]
            if scaled:
                one, other = one * scales[i % 2 * groups + group], other * scales[i % 2 * groups + group]
            words[WEIGHTS + i] = transposed(packed(one, other))

    def add_slice(held, i, mask, o):
        one, other = held.words[i % 2 * 2], held.words[i % 2 * 2 + 1]  # of tokens 2t, 2t+1; 2t+8, 2t+9
        if minifloat:
            one, other = sort(one, one), sort(other, other)
        for k in range(0, count, 2):
            a0, a1 = widen(one, k, mask), widen(one, k + 1, mask)
            a2, a3 = widen(other, k, mask), widen(other, k + 1, mask)
            for block in range(blocks):
                pair = held.words[WEIGHTS + 2 * block], held.words[WEIGHTS + 2 * block + 1]
                if integer:
                    even, odd = held.words[ZEROS], held.words[ZEROS + 1]
                    multiply((even, odd, even, odd), pair, o, 2 * block, i * count + k)
                multiply((a0, a1, a2, a3), pair, o, 2 * block, i * count + k)

    def add_floats(held, i, mask, o):
        if i % 2:
            values = held.words[0], held.words[2], held.words[1], held.words[3]
            for block in range(blocks):
                pair = held.words[WEIGHTS + 2 * block], held.words[WEIGHTS + 2 * block + 1]
                multiply(values, pair, o, 2 * block, i - 1)

    weigh, add = device.inlined(weigh), device.inlined(add_slice if tile.coded else add_floats)

    def multiply_values(held, p, at, lane, mask, o):
        place, scales = int32(at + int32(held.places[2])), held.scales
        load_scales(int32(at + int32(held.places[3])), scales)
        for i in range(slices):
            if i % each == 0:
                weigh(p, i // each, scales, held.words)
            if i % 2 == 0:
                load_pair(load, place, i, slices, lane, held.words)
            add(held, i, mask, o)

    return device.force_inlined(multiply_values)


def multiply_nan_safe(form):
    """Return f(held, p, at, lane, mask, o): o += w v in float32; weights of 0 add nothing, even for NaN.

    Weights are multiplied with `SMALLER`, so that sums stay finite.
    """
    tile, rows, columns, width = form.values, form.thread_rows, form.columns, form.width
    count, slices, step, each, groups = tile.held, tile.slices, tile.step, tile.group_slices, tile.groups
    load, number, load_scales = memory.load(2, 2, space=memory.SHARED), number_of(tile), scales_loader(tile)
    rotate, exchange, scaled = score_rotator(form), device.exchange, bool(tile.scale_format)
    first_scale, scale_step = TOKENS * step, tile.scale_step

    @shared
    def load_unit(address):
        low, _ = load(address)
        return np.uint32(low)

    def multiply_nan_safe(held, p, at, lane, mask, o):
        lane, scales = fresh_register(lane), held.scales
        for column in range(columns):
            for other in range(8):
                token = (lane >> 2 & 7) ^ other
                load_scales(int32(at + first_scale + token * scale_step), scales)
                token += 8 * column
                for r in range(rows):
                    weight = exchange(EVERYONE, p[r * columns], 4 * other) * SMALLER
                    if weight != ZERO:
                        for i in range(slices):
                            unit = load_unit(np.int64(at + token * step + 16 * i + (lane >> 2 & 7) * 2))
                            share, group = weight, i // each
                            if scaled:  # registers have constant indices
                                share *= scales[groups + group] if column else scales[group]
                            for k in range(count):
                                o[r * width + i * count + k] += share * number(unit, k, mask)
            rotate(p, 1)

    return device.force_inlined(multiply_nan_safe)


def element_of(tile):
    """Return f(g, i) -> the element of values whose sum is number i of a thread."""
    each = tile.held
    return device.inlined(lambda g, i: (i // each * 8 + g) * each + i % each)


def unit_of(tile):
    """Return f(i) -> the factor that makes a thread's sum number i a sum of values."""
    one, every = np.float32(2.0**CODE_POWER if tile.integer else 1), tile.integer and tile.held == 4
    odd = np.float32(one / 16 if every else one)
    return device.inlined(lambda i: odd if i % 2 else one)


def largest_scales(form):
    """Return f(tile) -> the largest scale of values of each of a thread's two tokens."""
    load_scales, larger = scales_loader(form.values), ptx.larger
    groups, columns = form.values.groups, form.columns

    def load_largest(tile):
        held, values = tile
        tops, scales = held.sums, held.scales
        load_scales(int32(values + int32(held.places[3])), scales)
        for column in range(columns):
            tops[column] = ZERO
            for group in range(groups):
                tops[column] = larger(tops[column], abs(scales[column * groups + group]))
        return tops

    return device.inlined(load_largest)


def number_of(tile):
    """Return f(unit, k, mask) -> element k of a unit of values, as sums have it."""
    if not tile.coded:
        raw, decode = chunks.DECODE[tile.cache_format]
        return device.inlined(lambda unit, k, mask: np.float32(decode(raw(unit))))
    widen, two, minifloat = code_widener(tile), both("float16"), tile.minifloat
    if minifloat:
        return device.inlined(lambda unit, k, mask: two(widen(unit, 0, mask))[k])
    words = zero_words(tile)

    def number(unit, k, mask):
        zero, _ = two(np.uint32(words[k % 2]))
        return two(widen(unit, k, mask))[0] + zero

    return device.inlined(number)
