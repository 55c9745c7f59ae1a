"""Remove arrays from the processor's caches, so that the next read comes from memory."""

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkit.runtime.jit import compiled

LINE = 64  # bytes of a cache line


@intrinsic
def flush_line(typingctx, address):
    """Write a cache line back to memory and remove it from all caches (x86)."""

    def codegen(context, builder, signature, values):
        pointer = ir.IntType(8).as_pointer()
        fast = binding.get_host_cpu_features().get("clflushopt")
        name = "llvm.x86.clflushopt" if fast else "llvm.x86.sse2.clflush"
        kind = ir.FunctionType(ir.VoidType(), [pointer])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [builder.inttoptr(values[0], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@compiled(types.void(types.int64, types.int64))
def flush(address, size):
    """Remove `size` bytes from all caches."""
    at = address
    while at < address + size:
        flush_line(at)
        at += LINE
