"""Read a row of keys, values or codes as vectors of float32, a chunk at a time, for the narrow products.

A chunk is one or more vectors of 16 elements. Codes are not brought into their order: lanes read whole words
and shift their own code out, so that no lane moves. Queries are arranged in the same order (`chunk_order`).
"""

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.lanes import F16, F32, I32, I64, LANES, RAW, loop, narrow, read, widen, write
from kvkit.formats.elements import BY_NAME

NARROW = 8  # most query rows of narrow products
LINE = 64  # bytes of a cache line


def tile_tokens(rows):
    """Return how many tokens narrow scores take at a time."""
    return 8 if rows == 1 else LANES // rows


def tile_columns(rows):
    """Return how many vectors of a value narrow sums take at a time."""
    return min(8, LANES // rows)


def chunk_vectors(rows, stored, scale_format, group):
    """Return how many vectors of a row narrow products widen at a time.

    Floats are read a cache line at a time; of codes, a chunk holds whole groups, or a group whole chunks.
    """
    element = BY_NAME[stored]
    if element.block:
        return min(4, tile_columns(rows))
    if not (scale_format or element.minifloat):
        return LINE * 8 // element.bits // LANES
    most = min(4, tile_columns(rows))
    return next(n for n in (most, 2, 1) if not group or n * LANES % group == 0 or group % (n * LANES) == 0)


def fewest_vectors(stored):
    """Return how many vectors are widened at a time at the end of a row: a block's, or one."""
    block = BY_NAME[stored].block
    return block.elements // LANES if block else 1


def chunk_order(stored, scale_format, vectors):
    """Return the element of a chunk that each lane holds.

    Words have 32 bits, or 16 bits for 8-bit floats. A chunk of two vectors of 4-bit codes has 4 words:

        lane       0  1  2  3   4  5  6  7   8  9 ..
        word       0  1  2  3   0  1  2  3   0  1 ..
        element    0  8 16 24   1  9 17 25   2 10 ..
    """
    element = BY_NAME[stored]
    if (vectors == 1 and element.minifloat) or not (scale_format or element.minifloat or element.block):
        return list(range(LANES * vectors))
    codes = (16 if element.minifloat else 32) // element.bits  # of a word
    words = LANES * vectors // codes
    if element.block and element.block.halves:  # a byte has two codes, half a block apart
        half, words_of_block = element.block.elements // 2, element.block.elements // codes
        return [
            word // words_of_block * 2 * half
            + (word % words_of_block * codes // 2 + code // 2)  # the byte of the block
            + code % 2 * half
            for code in range(codes)
            for word in range(words)
        ]
    return [word * codes + code for code in range(codes) for word in range(words)]


def query_order(rows, stored, scale_format, group, dim):
    """Return the elements of a row in the order in which narrow products need queries."""
    vectors, fewest = chunk_vectors(rows, stored, scale_format, group), fewest_vectors(stored)
    size = LANES * vectors
    whole = dim - dim % size
    chunks = [(first, vectors) for first in range(0, whole, size)]
    chunks += [(first, fewest) for first in range(whole, dim, LANES * fewest)]
    return [first + i for first, n in chunks for i in chunk_order(stored, scale_format, n)]


def row_scale(stored, scale_format, group):
    """Return the factors of a row's products that `chunk_reader` leaves out, as (format, constant).

    The format is that of the one scale of the row, or None; e4m3 is read 256 times too small.
    """
    minifloat = BY_NAME[stored].minifloat
    return (scale_format if minifloat and not group else None), (256.0 if stored == "e4m3" else 1.0)


def chunk_reader(stored, scale_format, group, rounds, like=None):
    """Return a function (builder, row address, scale address, i, vectors, dim) that reads a chunk from i on.

    Its result is a function of m: vector m of the chunk as float32, in `chunk_order`. Floats that are read
    beside codes `like` (stored, scale format, group) have the order of the codes. Dequantized elements are
    rounded to the formats `rounds` in turn, as a load does. Minima of unsigned codes follow a row's scales.
    """
    element = BY_NAME[stored]
    bits, block = element.bits, element.block

    def code_on_top(words, count, m):
        """Shift the words of vector m so that each lane's code is on top; `count` words are repeated."""
        return words << [32 - bits - bits * (lane // count) for lane in range(m * LANES, (m + 1) * LANES)]

    def read_scales(b, scale_base, i, size):
        """Read the scales of `size` elements from i on; return them and their address."""
        scale_at = b.add(scale_base, b.mul(b.udiv(i, I64(group)), I64(BY_NAME[scale_format].bytes(1))))
        count = max(1, size // group)
        return widen(read(b, scale_at, RAW[scale_format], count), scale_format), scale_at

    def floats(b, row, scale_base, i, vectors, dim):
        if like:
            whole = widen(read(b, element_at(b, stored, row, i), RAW[stored], LANES * vectors), stored)
            order = chunk_order(like[0], like[1], vectors)
            return lambda m: whole.pick(order[m * LANES : (m + 1) * LANES])
        first, size = element_at(b, stored, row, i), element.bytes(LANES)
        return lambda m: widen(read(b, b.add(first, I64(m * size)), RAW[stored], LANES), stored)

    def minifloats(b, row, scale_base, i, vectors, dim):
        """Read 8-bit floats; factors of `row_scale` are left out."""
        size, scales, order = LANES * vectors, None, chunk_order(stored, scale_format, vectors)
        if vectors == 1:
            codes = read(b, element_at(b, stored, row, i), RAW[stored], size)
            whole = lanes.as_halves(codes, stored).cast("fpext", F32)
        else:
            place, seen = lanes.stack_buffer(b, 2 * size)
            write_halves(b, stored, element_at(b, stored, row, i), vectors, place)
        if scale_format and group:
            scales, _ = read_scales(b, scale_base, i, size)

        def vector(m):
            number = whole if vectors == 1 else read_half_vector(b, seen, m)
            of_vector = order[m * LANES : (m + 1) * LANES]
            return number * scales.pick(i * scales.count // size for i in of_vector) if scales else number

        return vector

    def block_parts(b, row, i, size):
        """Read the scales and the codes of the blocks of `size` elements from i on."""
        first = element_at(b, stored, row, i)
        starts = [b.add(first, I64(k * block.bytes)) for k in range(size // block.elements)]
        scales = [read(b, start, RAW[block.cell], 1) for start in starts]
        scales = widen(lanes.concatenate(scales), block.cell)
        words = block.elements * bits // 32
        codes = [read(b, b.add(start, I64(block.codes_at)), I32, words) for start in starts]
        codes = lanes.concatenate(codes)
        # Unsigned codes become signed ones: the highest bit of each is flipped.
        return scales, codes.apply("xor", 0x88888888) if block.bias else codes

    def quantized(b, row, scale_base, i, vectors, dim):
        size, order = LANES * vectors, chunk_order(stored, scale_format, vectors)
        if block:
            scales, codes = block_parts(b, row, i, size)
        else:
            scales, scale_at = read_scales(b, scale_base, i, size)
            if not element.symmetric:
                scale_bytes = b.mul(b.udiv(dim, I64(group)), I64(BY_NAME[scale_format].bytes(1)))
                at = b.add(scale_at, scale_bytes)
                minima = widen(read(b, at, RAW[scale_format], scales.count), scale_format)
            codes = read(b, element_at(b, stored, row, i), I32, size * bits // 32)
        of_lanes = codes.pick(lane % codes.count for lane in range(LANES))

        def vector(m):
            of_group = [i * scales.count // size for i in order[m * LANES : (m + 1) * LANES]]
            code, scale = code_on_top(of_lanes, codes.count, m), scales.pick(of_group)
            if block or element.symmetric:
                number = code.signed_rshift(32 - bits).cast("sitofp", F32) * scale
            else:
                number = (code >> (32 - bits)).cast("sitofp", F32) * scale + minima.pick(of_group)
            for coarser in () if block else rounds:
                number = widen(narrow(number, coarser), coarser)
            return number

        return vector

    return minifloats if element.minifloat else quantized if block or scale_format else floats


def even_and_odd(b, row, scale_base, i, vectors, dim):
    """Read two vectors of bfloat16 as a chunk: even elements, then odd ones, so that no lane moves."""
    words = read(b, b.add(row, b.mul(i, I64(2))), I32, LANES)
    return lambda m: (words & 0xFFFF0000 if m else words << 16).cast("bitcast", F32)


def write_halves(b, stored, address, vectors, place):
    """Write vectors of 8-bit floats to memory as halves, in `chunk_order`; see `lanes.pair_halves`.

    One instruction converts halves from memory; two or three are needed for a part of a register.
    """
    codes = read(b, address, RAW[stored], LANES * vectors)
    for i, halves in enumerate(lanes.pair_halves(codes, stored)):
        write(b, b.add(place, I64(i * LANES * vectors)), halves)


def read_half_vector(b, place, m):
    """Read vector m of the halves that `write_halves` wrote, as float32."""
    return read(b, b.add(place, I64(2 * LANES * m)), F16, LANES).cast("fpext", F32)


def bytes_of(b, stored, count):
    """Return the bytes of a number of elements, which are whole blocks in formats of blocks."""
    element = BY_NAME[stored]
    if element.block:
        return b.mul(b.udiv(count, I64(element.block.elements)), I64(element.block.bytes))
    if element.bits % 8 == 0:  # a product of a constant shows LLVM the distance of two elements
        return b.mul(count, I64(element.bits // 8))
    return b.lshr(b.mul(count, I64(element.bits)), I64(3))


def element_at(b, stored, row, i):
    """Return the address of element i of a row."""
    return b.add(row, bytes_of(b, stored, i))


def for_chunks(b, dim, sizes, body):
    """Emit body(first element, vectors) over a row, as many vectors at a time as the first size that fits."""
    done = I64(0)
    for vectors in dict.fromkeys(sizes):
        size = I64(vectors * LANES)
        begin, whole = done, b.mul(b.udiv(b.sub(dim, done), size), size)
        with loop(b, whole, vectors * LANES) as i:
            body(b.add(begin, i), vectors)
        done = b.add(begin, whole)
