"""Multiply with a warp's own tile of 16 tokens, by slices: a slice is 16 bytes of each row.

    s^T = k q^T             [tokens, rows] = [tokens, dim] [dim, rows]
    o^T = v^T w^T           [value dim, rows] = [value dim, tokens] [tokens, rows]

Scales of codes are factors of scores and of weights, so that no element is multiplied. For groups G of a row:

    s[t, r] = sum over G of key scale[t, G] (sum over e in G of k[t, e] q[r, e])
    w[r, t] = p[r, t] value scale[t, G]                         for elements of G; p without scales

Tokens, or elements of values, are the 16 rows of a product, and rows of queries are its 8 columns. Eight rows
of a slice are a matrix of 16-bit units, which `ldmatrix` loads (see `ptx`). With g = lane // 4 and
t = lane % 4 a thread has these bytes of a slice, in `held.words`:

    keys      bytes 4t .. 4t+3 of token g                    of token g+8
    values    bytes 2g, 2g+1 of tokens 2t and 2t+1           of tokens 2t+8 and 2t+9 (matrices are transposed)
    word      0; 2 for the next slice                        1; 3 for the next slice
              4, 5: codes 0 (see below)                      6 ..: weights

and s [rows 2t, 2t+1; tokens g, g+8], o [rows 2t, 2t+1; its elements of each slice].

An integer code c with a flipped sign is c + z, with z = 128 or 8. In the low bits of a float16 that is the
subnormal number (c + z) 2^-24, or 16 times as much if a code of 4 bits was not shifted down. So codes are
not converted:

    c 2^-24 = (c + z) 2^-24 - z 2^-24           -3: 0xFD, sign flipped 0x7D = 125 = -3 + 128

The second term is a product too: of queries once for a work item, of weights for each 8 bytes of values.
Tensor cores take subnormal numbers (Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor
cores, 2021).
"""

import functools

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit.runtime.jit import shared
from kvkit_cuda.attention.fragments import EVERYONE, SMALLER, mma, score_rotator
from kvkit_cuda.attention.stored_tiles import TILE_TOKENS
from kvkit_cuda.attention.tile_words import arranged, both, twice, words_loader
from kvkit_cuda.attention.work_items import query_address, row_of_int32
from kvkit_cuda.copy import chunks
from kvkit_cuda.device_runtime import device, memory, ptx

ZERO, SIGN = np.float32(0), 0x8000  # SIGN: the bit of a float16
ZEROS, WEIGHTS = 4, 6  # indices in `held.words`: codes 0, weights
CODE_POWER = 24  # a code c is multiplied as c 2^-24
int32, fresh_register = device.int32, ptx.fresh_register


def place_finder(tile):
    """Return f(lane) -> the offsets that a lane loads from: rows of matrices, and scales of its token.

    For matrices a lane gives the address of its token, 0-7 and 8-15 of a slice, then of the next slice.
    """
    step, scale_step = tile.step, tile.scale_step

    def find_place(lane):
        row = int32((lane & 15) * step + (lane >> 4 & 1) * 16)
        return fresh_register(row), fresh_register(int32(TILE_TOKENS * step + (lane >> 2 & 7) * scale_step))

    return device.inlined(find_place)


def query_loader(form):
    """Return f(params, item, lane, held), which loads q [blocks of 8 rows, slices, words].

    q is arranged like keys; a lane has row lane // 4 of each block, or the last one. It returns the factor of
    all scores.
    """
    tile, blocks = form.keys, form.blocks
    apart, count, slices, size = tile.apart, tile.in_16_bits, tile.slices, 4 * tile.in_16_bits
    load, into_range, find_zeros = words_loader(size), range_finder(form), zero_finder(form)
    factor, put = np.float32(2.0**CODE_POWER if tile.integer else 1), arranged(count, apart)
    key_place, value_place = place_finder(tile), place_finder(form.values)
    zeros = zero_words(tile) if tile.integer else (0, 0)

    def load_queries(params, item, lane, held):
        for block in range(blocks):
            row = row_of_int32(params, item, min(int32(8 * block + (lane >> 2)), item.last))
            address = query_address(params, item, row) + size * (lane & 3)
            for i in range(slices):
                put(held.q, (block * slices + i) * count, load(address + 4 * size * i))
        score_factor = into_range(held.q)
        find_zeros(held)
        held.places[0], held.places[1] = key_place(lane)
        held.places[2], held.places[3] = value_place(lane)
        for i in range(2):
            held.words[ZEROS + i] = np.uint32(fresh_register(int32(zeros[i])))
        return score_factor * factor

    return device.force_inlined(load_queries)


def range_finder(form):
    """Return f(q) -> the factor of scores; it scales q and converts it to the type of products.

    A power of 2 brings the largest magnitude of all rows, x, to 2^15 <= x < 2^16. Then float16 holds
    each element as exactly as bfloat16, down to 2^-29 of the largest one, and its error is 2^-40 of that.
    Elements that meet codes 16 times too large are divided by 16.
    """
    tile, held = form.keys, form.blocks * form.keys.dim // 8
    if form.data_dtype == form.element and tile.in_16_bits < 4:
        return device.inlined(lambda q: np.float32(1))
    two, packed = both(form.data_dtype), ptx.packed(form.element)
    exchange, larger = device.exchange, ptx.larger
    odd_factor = np.float32(1 / 16 if tile.in_16_bits == 4 else 1)

    def into_range(q):
        peak = ZERO
        for i in range(held):
            x, y = two(q[i])
            peak = larger(peak, larger(abs(x), abs(y)))
        for distance in (1, 2, 4, 8, 16):
            peak = larger(peak, exchange(EVERYONE, peak, distance))
        # The exponent's bits are e + 127. The factor is 2^(15 - e), in return 2^(e - 15); both are normal.
        exponent = min(max(numeric.bits_of(peak) >> np.uint32(23), np.uint32(16)), np.uint32(254))
        even_factor = numeric.float_of(np.uint32((np.uint32(269) - exponent) << np.uint32(23)))
        for i in range(held):
            x, y = two(q[i])
            factor = even_factor * odd_factor if i % 2 else even_factor
            q[i] = packed(x * factor, y * factor)
        return numeric.float_of(np.uint32((exponent - np.uint32(15)) << np.uint32(23)))

    return device.force_inlined(into_range)


def zero_words(tile):
    """Return -z 2^-24, twice in a word, for codes in even places, and for those in odd places.

    Of codes of 4 bits the latter are not shifted down: theirs is -16 z 2^-24.
    """
    zero = 2 ** (BY_NAME[tile.cache_format].bits - 1)
    odd_zero = 16 * zero if tile.in_16_bits == 4 else zero
    return int(twice(SIGN + zero)), int(twice(SIGN + odd_zero))


def zero_finder(form):
    """Return f(held), which finds -q z 2^-24 of each group, where scores begin."""
    tile, blocks, rows, columns = form.keys, form.blocks, form.thread_rows, form.columns
    if not tile.integer:
        return device.inlined(lambda held: None)
    multiply, count = mma(form.element, columns, True), tile.in_16_bits
    slices, group_slices = tile.slices, tile.group_slices
    even, odd = map(np.uint32, zero_words(tile))

    def find_zeros(held):
        sums = held.sums
        for i in range(slices):  # bounds that depend on a group would keep q in local memory
            if i % group_slices == 0:
                for j in range(rows * columns):
                    sums[j] = ZERO
            for block in range(blocks):
                for k in range(0, count, 2):
                    j = (block * slices + i) * count + k
                    multiply((even, even, odd, odd), (held.q[j], held.q[j + 1]), sums, 2 * block, 0)
            if (i + 1) % group_slices == 0:
                for j in range(rows * columns):
                    held.zeros[i // group_slices * rows * columns + j] = sums[j]

    return device.force_inlined(find_zeros)


def code_widener(tile):
    """Return f(word, k, mask) -> word k of the pairs of elements in a word of codes, as float16."""
    if tile.minifloat:
        widened = ptx.widened(tile.cache_format, tile.native)
        return device.inlined(lambda word, k, mask: widened(word >> np.uint32(16 * k)))
    signs = twice(2 ** (BY_NAME[tile.cache_format].bits - 1))
    short = tile.in_16_bits == 4

    def widen(word, k, mask):
        if short:
            shift = np.uint32(k % 2 * 4)
            return ((word >> np.uint32(k // 2 * 8)) & (mask << shift)) ^ (signs << shift)
        return ((word >> np.uint32(8 * k)) & mask) ^ signs

    return device.inlined(widen)


@functools.cache
def scales_loader(tile):
    """Return f(at, scales), which loads the scales of tokens g and g+8 of a tile, [tokens, groups].

    `at` is the address of the first scale of token g.
    """
    if not tile.scale_format:
        return device.inlined(lambda at, scales: None)
    (raw, decode), bits = chunks.DECODE[tile.scale_format], BY_NAME[tile.scale_format].bits
    size = next(size for size in (16, 8, 4, 2) if tile.scale_bytes % size == 0)
    load, step, groups = memory.load(size, size, space=memory.SHARED), tile.scale_step, tile.groups
    loads, at_once = tile.scale_bytes // size, size * 8 // bits

    @shared
    def load_scales(at, scales):
        for token in range(2):
            for i in range(loads):
                low, high = load(np.int64(at) + (8 * token * step + i * size))
                for j in range(at_once):
                    word = np.uint32(chunks.field(low, high, j * bits // 32 * 32)) >> np.uint32(j * bits % 32)
                    scales[token * groups + i * at_once + j] = np.float32(decode(raw(word)))

    return load_scales


def multiply_keys(form):
    """Return f(held, at, lane, mask, s): s = q k^T for the keys of a tile at address `at`."""
    tile, blocks, columns, rows = form.keys, form.blocks, form.columns, form.thread_rows
    multiply, load, widen = mma(form.element, columns, True), ptx.matrices(False), code_widener(tile)
    count, slices, group_slices, groups = tile.in_16_bits, tile.slices, tile.group_slices, tile.groups
    load_scales, scaled, integer = scales_loader(tile), bool(tile.scale_format), tile.integer
    held_scores = rows * columns

    def begin_group(held, group, sums):
        for i in range(held_scores):
            sums[i] = held.zeros[group * held_scores + i] if integer else ZERO

    def add_slice(held, i, mask, sums):
        first, second = held.words[i % 2 * 2], held.words[i % 2 * 2 + 1]  # of tokens g, g+8
        for k in range(0, count, 2):
            a0, a1 = widen(first, k, mask), widen(second, k, mask)
            a2, a3 = widen(first, k + 1, mask), widen(second, k + 1, mask)
            for block in range(blocks):
                j = (block * slices + i) * count + k
                multiply((a0, a1, a2, a3), (held.q[j], held.q[j + 1]), sums, 2 * block, 0)

    def add_floats(held, i, mask, sums):
        if i % 2:  # a product takes 16 elements, two slices
            keys = held.words[0], held.words[1], held.words[2], held.words[3]
            for block in range(blocks):
                j = block * slices + i - 1
                multiply(keys, (held.q[j], held.q[j + 1]), sums, 2 * block, 0)

    begin_group = device.inlined(begin_group)
    add = device.inlined(add_slice if tile.coded else add_floats)

    def multiply_keys(held, at, lane, mask, s):
        place, scales, sums = int32(at + int32(held.places[0])), held.scales, held.sums
        load_scales(int32(at + int32(held.places[1])), scales)
        for i in range(slices):
            if i % group_slices == 0:
                begin_group(held, i // group_slices, sums)
            if i % 2 == 0:
                load_pair(load, place, i, slices, lane, held.words)
            add(held, i, mask, sums)
            if (i + 1) % group_slices == 0:
                for j in range(held_scores):
                    if not scaled:
                        s[j] = sums[j]
                    elif i + 1 == group_slices:  # the first group
                        s[j] = sums[j] * scales[j % columns * groups]
                    else:
                        s[j] += sums[j] * scales[j % columns * groups + i // group_slices]

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
    count, slices, group_slices, groups = tile.in_16_bits, tile.slices, tile.group_slices, tile.groups
    load_scales, scaled, integer = scales_loader(tile), bool(tile.scale_format), tile.integer
    packed, transposed, minifloat = ptx.packed(form.element), ptx.transposed, tile.minifloat
    pair_tokens = ptx.bytes_of(0x3120)  # bytes x0 x1 of a token, y0 y1 of the next one -> x0 y0 x1 y1

    def weigh(p, group, scales, words):
        """Make the fragments of w: [blocks, tokens 2t, 2t+1 and 2t+8, 2t+9] of row g."""
        for i in range(2 * blocks):
            j = i // 2 * 2 * columns + i % 2
            one, other = p[j], p[j + columns]  # of rows 2t, 2t+1, for token g or g+8; transposed afterwards
            if scaled:
                one, other = one * scales[i % 2 * groups + group], other * scales[i % 2 * groups + group]
            words[WEIGHTS + i] = transposed(packed(one, other))

    def add_slice(held, i, mask, o):
        first, second = held.words[i % 2 * 2], held.words[i % 2 * 2 + 1]  # of tokens 2t, 2t+1; 2t+8, 2t+9
        if minifloat:
            first, second = pair_tokens(first, first), pair_tokens(second, second)
        for k in range(0, count, 2):
            a0, a1 = widen(first, k, mask), widen(first, k + 1, mask)
            a2, a3 = widen(second, k, mask), widen(second, k + 1, mask)
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
            if i % group_slices == 0:
                weigh(p, i // group_slices, scales, held.words)
            if i % 2 == 0:
                load_pair(load, place, i, slices, lane, held.words)
            add(held, i, mask, o)

    return device.force_inlined(multiply_values)


def multiply_nan_safe(form):
    """Return f(held, p, at, lane, mask, o): o += w v in float32; weights of 0 add nothing, even for NaN.

    Weights are multiplied with `SMALLER`, so that sums stay finite.
    """
    tile, rows, columns, width = form.values, form.thread_rows, form.columns, form.width
    count, slices, group_slices = tile.in_16_bits, tile.slices, tile.group_slices
    step, groups, number = tile.step, tile.groups, number_of(tile)
    load, load_scales = memory.load(2, 2, space=memory.SHARED), scales_loader(tile)
    rotate, exchange, scaled = score_rotator(form), device.exchange, bool(tile.scale_format)
    first_scale, scale_step = TILE_TOKENS * step, tile.scale_step

    @shared
    def load_unit(address):
        low, _ = load(address)
        return np.uint32(low)

    def multiply_nan_safe(held, p, at, lane, mask, o):
        lane, scales = fresh_register(lane), held.scales
        for column in range(columns):
            for other in range(8):  # the 8 threads of equal t have the weights of 8 tokens
                token = (lane >> 2 & 7) ^ other
                load_scales(int32(at + first_scale + token * scale_step), scales)
                token += 8 * column
                for r in range(rows):
                    weight = exchange(EVERYONE, p[r * columns], 4 * other) * SMALLER
                    if weight != ZERO:
                        for i in range(slices):
                            unit = load_unit(np.int64(at + token * step + 16 * i + (lane >> 2 & 7) * 2))
                            share, group = weight, i // group_slices
                            if scaled:  # registers have constant indices
                                share *= scales[groups + group] if column else scales[group]
                            for k in range(count):
                                o[r * width + i * count + k] += share * number(unit, k, mask)
            rotate(p, 1)

    return device.force_inlined(multiply_nan_safe)


def element_of(tile):
    """Return f(g, i) -> the element of values whose sum is number i of a thread."""
    count = tile.in_16_bits
    return device.inlined(lambda g, i: (i // count * 8 + g) * count + i % count)


def sum_factor(tile):
    """Return f(i) -> the factor that makes a thread's sum number i a sum of values."""
    even = np.float32(2.0**CODE_POWER if tile.integer else 1)
    odd = np.float32(even / 16 if tile.integer and tile.in_16_bits == 4 else even)
    return device.inlined(lambda i: odd if i % 2 else even)


def largest_scales(form):
    """Return f((held, values)) -> the largest scale of values of each of a thread's two tokens.

    `values` is the address of a tile's values.
    """
    load_scales, larger = scales_loader(form.values), ptx.larger
    groups, columns = form.values.groups, form.columns

    def load_largest(tile):
        held, values = tile
        largest, scales = held.sums, held.scales
        load_scales(int32(values + int32(held.places[3])), scales)
        for column in range(columns):
            largest[column] = ZERO
            for group in range(groups):
                largest[column] = larger(largest[column], abs(scales[column * groups + group]))
        return largest

    return device.inlined(load_largest)


def number_of(tile):
    """Return f(unit, k, mask) -> element k of a unit of values, as sums have it."""
    if not tile.coded:
        raw, decode = chunks.DECODE[tile.cache_format]
        return device.inlined(lambda unit, k, mask: np.float32(decode(raw(unit))))
    widen, two, minifloat = code_widener(tile), both("float16"), tile.minifloat
    if minifloat:
        return device.inlined(lambda unit, k, mask: two(widen(unit, 0, mask))[k])
    minus_zeros = zero_words(tile)

    def number(unit, k, mask):
        minus_zero, _ = two(np.uint32(minus_zeros[k % 2]))
        return two(widen(unit, k, mask))[0] + minus_zero

    return device.inlined(number)
