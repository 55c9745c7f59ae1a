"""Up to 16 neighbouring bytes of device memory in one instruction, as two 64-bit words.

They are LLVM's own loads and stores at addresses, which the compiler for either target knows: a simulated
kernel makes the same ones in the host's memory.
"""

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I32, I64 = ir.IntType(32), ir.IntType(64)
GLOBAL = 1  # the address space
WORD = {1: ir.IntType(8), 2: ir.IntType(16), 4: I32, 8: I64, 16: ir.VectorType(I64, 2)}


@functools.cache
def load(size, align, invariant=True):
    """(address) -> low and high word of `size` bytes; `invariant` ones no thread of the kernel writes."""

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, values):
            pointer = builder.inttoptr(values[0], ir.PointerType(WORD[size], GLOBAL))
            bits = builder.load(pointer, align=align)
            if invariant:
                bits.set_metadata("invariant.load", builder.module.add_metadata([]))
            if size == 16:
                words = builder.extract_element(bits, I32(0)), builder.extract_element(bits, I32(1))
            else:
                words = builder.zext(bits, I64) if size < 8 else bits, I64(0)
            return context.make_tuple(builder, signature.return_type, words)

        return types.UniTuple(types.uint64, 2)(types.int64), codegen

    return load


@functools.cache
def store(size, align):
    """(address, low, high): `size` bytes."""

    @intrinsic
    def store(typingctx, address, low, high):
        def codegen(context, builder, signature, values):
            pointer = builder.inttoptr(values[0], ir.PointerType(WORD[size], GLOBAL))
            bits = builder.trunc(values[1], WORD[size]) if size < 8 else values[1]
            if size == 16:
                bits = builder.insert_element(ir.Constant(WORD[size], ir.Undefined), values[1], I32(0))
                bits = builder.insert_element(bits, values[2], I32(1))
            builder.store(bits, pointer, align=align)
            return context.get_dummy_value()

        return types.void(types.int64, types.uint64, types.uint64), codegen

    return store
