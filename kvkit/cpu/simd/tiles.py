"""The vocabulary of tiles: registers of 16 rows of 64 bytes, and their products (AMX), or both in memory.

    C[m, n] += sum over k, j of A[m, k, j] B[k, n, j]

C has words of 32 bits. A word of A and B has two bfloat16 numbers, or four bytes, whose products are added.
So B has neighbouring rows in pairs, or in fours.

    tiles = Tiles(b, FULL, in_memory)          # in a micro-kernel; b is the LLVM builder
    tiles.zero(0)
    tiles.load(4, keys, row)                   # A: 16 rows at keys, keys + row, ..
    tiles.load(6, queries, 128)                # B
    tiles.multiply(0, 4, 6)
    tiles.store(0, scores, 128)

The thread's tiles are opened where a work item begins, with `open`, and released where it ends, with `close`:
open tiles cost 8 KiB at each change of threads. LLVM keeps the order of these steps, and of memory accesses
beside them.

With `in_memory` the steps are vector instructions over memory on the stack, which give the same bits on any
processor, but take some 7 times as long: for tests. There tiles hold nothing from one micro-kernel to the
next, so no micro-kernel may expect that.
"""

from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.lanes import F32, I8, I32, I64, Lanes, loop, read, write

ROWS, ROW = 16, 64  # the most rows of a tile, and the most bytes of a row
TILE_BYTES, TILES = ROWS * ROW, 8
LEAST_NORMAL = 2.0**-126
# The instruction that multiplies tiles, by the elements of A and of B.
PRODUCTS = {
    ("bfloat16", "bfloat16"): "tdpbf16ps",
    ("int8", "int8"): "tdpbssd", ("int8", "uint8"): "tdpbsud",
    ("uint8", "int8"): "tdpbusd", ("uint8", "uint8"): "tdpbuud",
}  # fmt: skip
BFLOAT16 = "bfloat16", "bfloat16"


class Shape(NamedTuple):
    """The rows, and the bytes of a row, of each of the eight tiles: the configuration of a thread's tiles."""

    rows: tuple[int, ...]
    bytes: tuple[int, ...]

    def palette(self) -> bytearray:
        """Return the 64 bytes that `ldtilecfg` reads."""
        palette = bytearray(64)
        palette[0] = 1
        for tile, (rows, size) in enumerate(zip(self.rows, self.bytes, strict=True)):
            palette[16 + 2 * tile], palette[48 + tile] = size, rows
        return palette


FULL = Shape((ROWS,) * TILES, (ROW,) * TILES)


class Tiles:
    """Emits steps on the tiles of a shape; numbers of tiles are constants."""

    def __init__(self, builder: ir.IRBuilder, shape: Shape = FULL, in_memory: bool = False) -> None:
        self.builder, self.shape, self.in_memory = builder, shape, in_memory
        self._memory = lanes.stack_buffer(builder, TILES * TILE_BYTES)[0] if in_memory else None

    def open(self) -> None:
        """Configure the thread's tiles for this shape; their contents become zero."""
        if self.in_memory:
            return
        b, kind = self.builder, ir.ArrayType(I8, 64)
        palette = ir.GlobalVariable(b.module, kind, b.module.get_unique_name("tile_shape"))
        palette.initializer, palette.global_constant = ir.Constant(kind, self.shape.palette()), True
        palette.linkage, palette.align = "internal", 64
        self._call("ldtilecfg", b.bitcast(palette, I8.as_pointer()))

    def close(self) -> None:
        """Release the thread's tiles, so that the system need not save them."""
        if not self.in_memory:
            self._call("tilerelease")

    def zero(self, tile: int) -> None:
        """Fill a tile with zeros."""
        if not self.in_memory:
            self._call("tilezero", I8(tile))
            return
        zero = ir.Constant(ir.VectorType(I32, self._words(tile)), [0] * self._words(tile))
        for row in range(self.shape.rows[tile]):
            write(self.builder, self._row(tile, row), Lanes(self.builder, zero))

    def load(self, tile: int, address: ir.Value, stride: ir.Value | int, again: bool = True) -> None:
        """Load the rows of a tile from `address`, `address + stride`, ..; not `again` hints at one use only.

        All rows of the shape are read. Rows that do not begin at cache lines take six times as long.
        """
        stride = I64(stride) if isinstance(stride, int) else stride
        if not self.in_memory:
            self._call("tileloadd64" if again else "tileloaddt164", I8(tile), self._pointer(address), stride)
            return
        for row, place in enumerate(self._places(tile, address, stride)):
            write(self.builder, self._row(tile, row), read(self.builder, place, I32, self._words(tile)))

    def store(self, tile: int, address: ir.Value, stride: ir.Value | int) -> None:
        """Store the rows of a tile at `address`, `address + stride`, .."""
        stride = I64(stride) if isinstance(stride, int) else stride
        if not self.in_memory:
            self._call("tilestored64", I8(tile), self._pointer(address), stride)
            return
        for row, place in enumerate(self._places(tile, address, stride)):
            write(self.builder, place, read(self.builder, self._row(tile, row), I32, self._words(tile)))

    def multiply(self, c: int, x: int, y: int, elements: tuple[str, str] = BFLOAT16) -> None:
        """Add the product of tiles x and y, whose elements are named in `elements`, to tile c."""
        rows, sizes = self.shape
        if (rows[c], sizes[c], 4 * rows[y]) != (rows[x], sizes[y], sizes[x]):  # the processor would fault
            raise ValueError(f"tiles {c}, {x} and {y} of {self.shape} do not fit each other")
        if not self.in_memory:
            self._call(PRODUCTS[elements], I8(c), I8(x), I8(y))
        elif elements == BFLOAT16:
            self._multiply_bfloat16(c, x, y)
        else:
            self._multiply_bytes(c, x, y, elements)

    def _multiply_bfloat16(self, c: int, x: int, y: int) -> None:
        """Add the sums of products of even and of odd elements, as the processor does.

        Each step is rounded to float32; subnormals count as 0, going in and coming out.
        """

        def product(total, word, other, part):
            halves = [vector & 0xFFFF0000 if part else vector << 16 for vector in (word, other)]
            factors = [flushed(half.cast("bitcast", F32)) for half in halves]
            return flushed(factors[0].fma(factors[1], total))

        for place, before, (even, odd) in self._sums(c, x, y, F32, product, parts=2):
            write(self.builder, place, flushed(flushed(before) + flushed(even + odd)))

    def _multiply_bytes(self, c: int, x: int, y: int, elements: tuple[str, str]) -> None:
        """Add the products of the four bytes of each word, which is exact up to int32."""

        def product(total, word, other, _):
            for part in range(4):
                tops = [vector << 24 - 8 * part for vector in (word, other)]  # the byte is the highest
                word_part, other_part = (
                    top.signed_rshift(24) if element == "int8" else top >> 24
                    for top, element in zip(tops, elements, strict=True)
                )
                total = total.plus(word_part.apply("mul", other_part))
            return total

        for place, before, (total,) in self._sums(c, x, y, I32, product, parts=1):
            write(self.builder, place, before.plus(total))

    def _sums(self, c, x, y, element, product, parts):
        """Yield (address of a row of c, the row, sums of each part of its products), in a loop over rows."""
        b, words = self.builder, self._words(c)
        zero = Lanes(b, ir.Constant(ir.VectorType(element, words), [0] * words))
        totals = lanes.StackSlots(b, [zero] * parts)
        with loop(b, I64(self.shape.rows[c])) as m:
            row = b.mul(m, I64(ROW))
            for part in range(parts):
                totals[part] = zero
            with loop(b, I64(self._words(x))) as k:
                at = b.add(b.add(self._row(x, 0), row), b.mul(k, I64(4)))
                word = lanes.broadcast(b, at, words).as_bits()
                other = read(b, b.add(self._row(y, 0), b.mul(k, I64(ROW))), I32, words)
                for part in range(parts):
                    totals[part] = product(totals[part], word, other, part)
            place = b.add(self._row(c, 0), row)
            yield place, read(b, place, element, words), [totals[part] for part in range(parts)]

    def _words(self, tile: int) -> int:
        return self.shape.bytes[tile] // 4

    def _row(self, tile: int, row: int) -> ir.Value:
        """Return the address of a tile's row in the memory that stands for the tiles."""
        return self.builder.add(self._memory, I64(tile * TILE_BYTES + row * ROW))

    def _places(self, tile: int, address: ir.Value, stride: ir.Value) -> list[ir.Value]:
        b = self.builder
        return [b.add(address, b.mul(stride, I64(row))) for row in range(self.shape.rows[tile])]

    def _pointer(self, address: ir.Value) -> ir.Value:
        return self.builder.inttoptr(address, I8.as_pointer())

    def _call(self, name: str, *values: ir.Value) -> None:
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.x86.{name}"), values
        )


def flushed(x: Lanes) -> Lanes:
    """Return float32 lanes with a zero of the same sign for subnormals."""
    b, zero = x.builder, (x.as_bits() & 0x80000000).cast("bitcast", F32)
    small = b.fcmp_ordered("<", abs(x).value, x.of(LEAST_NORMAL))
    return Lanes(b, b.select(small, zero.value, x.value))
