"""Load and store scalars at byte addresses of any alignment, for the plain loops of CPU kernels."""

import functools
import inspect

from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic

from kvkit.formats.elements import FLOAT32, FLOATS, FLOATS8, INT8
from kvkit.formulas import numeric
from kvkit.runtime.jit import helper

BITS = {fmt.name: from_dtype(fmt.word) for fmt in (*FLOATS, *FLOATS8, INT8)} | {FLOAT32.name: types.float32}


@functools.cache
def load(scalar):
    """Return f(address), which loads a number of a Numba type."""

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, values):
            pointer = builder.inttoptr(values[0], context.get_value_type(scalar).as_pointer())
            value = builder.load(pointer)
            value.align = 1
            return value

        return scalar(types.int64), codegen

    return load


@functools.cache
def store(scalar):
    """Return f(address, value), which stores a number of a Numba type."""

    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, values):
            pointer = builder.inttoptr(values[0], context.get_value_type(scalar).as_pointer())
            builder.store(values[1], pointer).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, scalar), codegen

    return store


@intrinsic
def integers(typingctx, address):
    """Return a pointer to the int64 at an address, to index like an array."""

    def codegen(context, builder, signature, values):
        return builder.inttoptr(values[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), codegen


def record(form):
    """Return f(address), which returns the record of this form at an address; its fields can be changed."""
    kind = from_dtype(form.dtype)

    @intrinsic
    def record(typingctx, address):
        def codegen(context, builder, signature, values):
            return builder.inttoptr(values[0], context.get_value_type(kind))

        return kind(types.int64), codegen

    return record


@functools.cache
def read(element):
    """Return f(address), which loads a number of a float format as float32."""
    raw, widen = load(BITS[element]), numeric.widening(element)
    if element == FLOAT32.name:
        return raw
    return helper(lambda address: widen(raw(address)))


@functools.cache
def write(element):
    """Return f(address, float32), which stores a number, rounded once to a float format."""
    raw, narrow = store(BITS[element]), numeric.narrowing(element)
    if element == FLOAT32.name:
        return raw
    return helper(lambda address, x: raw(address, narrow(x)))


@functools.cache
def scratch(size):
    """Return f(), which returns the address, a multiple of 64, of `size` bytes on the caller's stack."""

    @intrinsic
    def scratch(typingctx):
        def codegen(context, builder, signature, values):
            with builder.goto_entry_block():  # `alloca_once` would store a zero for each byte
                memory = builder.alloca(ir.ArrayType(ir.IntType(8), size))
                memory.align = 64
            return builder.ptrtoint(memory, ir.IntType(64))

        return types.int64(), codegen

    return scratch


@intrinsic
def address_of(typingctx, record):
    """Return the address of a record."""

    def codegen(context, builder, signature, values):
        return builder.ptrtoint(values[0], ir.IntType(64))

    return types.int64(record), codegen


def machine_code(prototype):
    """Decorate `prototype`, a function without a body, as an intrinsic that calls machine code.

    The first argument is the address of the code. The others are int64, or records, which are passed by
    address. They may be given by name.
    """
    parameters = [*inspect.signature(prototype).parameters.values()]

    @functools.wraps(prototype)
    def typer(typingctx, *given, **named):
        kinds = [kind if isinstance(kind, types.Record) else types.int64 for kind in given]
        kinds += [types.int64] * (len(parameters) - len(kinds))

        def codegen(context, builder, signature, values):
            int64, (code, *numbers) = ir.IntType(64), values
            numbers = [
                builder.ptrtoint(x, int64) if isinstance(x.type, ir.PointerType) else x for x in numbers
            ]
            function = ir.FunctionType(ir.VoidType(), [int64] * len(numbers))
            builder.call(builder.inttoptr(code, function.as_pointer()), numbers)
            return context.get_dummy_value()

        return types.void(*kinds), codegen

    first = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    typer.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return intrinsic(typer)


@intrinsic
def count_up(typingctx, address):
    """Add 1 to the int64 at an address atomically; return the old number, so that no two threads get it."""

    def codegen(context, builder, signature, values):
        int64 = ir.IntType(64)
        pointer = builder.inttoptr(values[0], int64.as_pointer())
        return builder.atomic_rmw("add", pointer, int64(1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def add_at(typingctx, address, number):
    """Add a number to the int64 at an address atomically."""

    def codegen(context, builder, signature, values):
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        builder.atomic_rmw("add", pointer, values[1], "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
