"""Load and store up to 16 bytes of device memory in one instruction, as two 64-bit words.

They are LLVM's loads and stores at addresses, which both targets have. A simulated kernel uses them on host
memory.
"""

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkit_cuda.device_runtime import device

I32, I64 = ir.IntType(32), ir.IntType(64)
GLOBAL, SHARED = 1, 3  # address spaces
LINE = 128  # bytes that the 32 banks of shared memory read at once
WORD = {1: ir.IntType(8), 2: ir.IntType(16), 4: I32, 8: I64, 16: ir.VectorType(I64, 2)}


@functools.cache
def load(size, align, invariant=True, space=GLOBAL):
    """Return f(address) -> (low, high) words of `size` bytes. `invariant` memory is never written."""

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, values):
            pointer = builder.inttoptr(values[0], ir.PointerType(WORD[size], space))
            bits = builder.load(pointer, align=align)
            if invariant and space == GLOBAL:
                bits.set_metadata("invariant.load", builder.module.add_metadata([]))
            if size == 16:
                words = builder.extract_element(bits, I32(0)), builder.extract_element(bits, I32(1))
            else:
                words = builder.zext(bits, I64) if size < 8 else bits, I64(0)
            return context.make_tuple(builder, signature.return_type, words)

        return types.UniTuple(types.uint64, 2)(types.int64), codegen

    return load


@functools.cache
def store(size, align, space=GLOBAL):
    """Return f(address, low, high), which writes `size` bytes."""

    @intrinsic
    def store(typingctx, address, low, high):
        def codegen(context, builder, signature, values):
            pointer = builder.inttoptr(values[0], ir.PointerType(WORD[size], space))
            bits = builder.trunc(values[1], WORD[size]) if size < 8 else values[1]
            if size == 16:
                bits = builder.insert_element(ir.Constant(WORD[size], ir.Undefined), values[1], I32(0))
                bits = builder.insert_element(bits, values[2], I32(1))
            builder.store(bits, pointer, align=align)
            return context.get_dummy_value()

        return types.void(types.int64, types.uint64, types.uint64), codegen

    return store


@functools.cache
def shared(size):
    """Return f() -> the address, a multiple of 16, of `size` bytes of shared memory."""

    @intrinsic
    def place(typingctx):
        def codegen(context, builder, signature, values):
            kind = ir.ArrayType(ir.IntType(8), size)
            block = cgutils.add_global_variable(builder.module, kind, "kvkit_shared", SHARED)
            block.linkage, block.align = "internal", 16
            block.initializer = ir.Constant(kind, ir.Undefined)
            return builder.ptrtoint(block, I64)

        return types.int64(), codegen

    def simulated():
        place = device.simulated_memory(size + 16).ctypes.data
        return place + -place % 16

    return simulated if device.SIMULATED else place


@functools.cache
def dynamic(size):
    """Return f() -> the address, a multiple of 128, of a block's dynamic shared memory."""

    @intrinsic
    def place(typingctx):
        def codegen(context, builder, signature, values):
            name, kind = "kvkit_dynamic", ir.ArrayType(ir.IntType(8), 0)
            block = builder.module.globals.get(name)
            if block is None:
                block = cgutils.add_global_variable(builder.module, kind, name, SHARED)
                block.linkage, block.align = "external", LINE
            return builder.ptrtoint(block, I64)

        return types.int64(), codegen

    def simulated():
        place = device.simulated_memory(size + LINE).ctypes.data
        return place + -place % LINE

    return simulated if device.SIMULATED else place
