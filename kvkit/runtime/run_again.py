"""The compiled function that compares the arguments of a call with those of earlier ones, and runs one again.

It reads Python's objects as C does; `repeats.py` writes the numbers that it compares them with.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvkit.runtime.jit import INDEX, compiled, helper
from kvkit.runtime.repeats import CONSTANT, FLAGS, HEADER, ITEMS, NUMBER, SLOT, STATES


@intrinsic
def words(typingctx: Any, place: Any) -> Any:
    """Return a pointer to the int64 at an address, to index like an array."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(64).as_pointer())

    return INDEX(types.int64), codegen


@intrinsic
def call(typingctx: Any, code: Any, first: Any, second: Any) -> Any:
    """Call the C function of two int64 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        int64 = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [int64, int64])
        builder.call(builder.inttoptr(values[0], function.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@helper
def constant_fits(slot: Any, value: int) -> bool:
    """Return whether an argument is the object of a slot, or a number of the same type and value."""
    if value == slot[1]:
        return True
    if slot[2] == 0 or words(value)[1] != slot[2] or words(value)[2] != slot[3]:
        return False
    return slot[4] < 0 or words(value)[3] & 0xFFFFFFFF == slot[4]  # an int has its digits there


@helper
def number_fits(slot: Any, value: int) -> bool:
    """Return whether an argument is the integer of a step, from 0 on."""
    number = words(slot[1])[0]
    if number == 0 or value == slot[4]:
        return number == 0 and value == slot[4]
    object_words = words(value)
    if object_words[1] != slot[2] or object_words[2] != slot[3]:
        return False
    return object_words[3] & 0xFFFFFFFF == number


@helper
def array_fits(slot: Any, value: int) -> bool:
    """Return whether an argument is an array of a slot's form; write its address into the slot."""
    array = words(value)
    if array[1] != slot[2] or array[3] & 0xFFFFFFFF != slot[3] or array[7] != slot[4]:
        return False
    if array[8] & FLAGS != slot[5]:
        return False
    ndim, shape, strides = slot[3], words(array[4]), words(array[5])
    for i in range(ndim):
        if shape[i] != slot[SLOT + i] or strides[i] != slot[SLOT + ndim + i]:
            return False
    slot[1] = array[2]
    if slot[7]:
        numbers, known, count = words(array[2]), words(slot[6]), slot[7] >> 3
        for i in range(count):
            if numbers[i] != known[i]:
                return False
        if slot[7] & 4:
            return numbers[count] & 0xFFFFFFFF == known[count] & 0xFFFFFFFF
    return True


@helper
def arguments_fit(state: Any, place: int, args: Any, nargs: int, names: int) -> bool:
    """Return whether arguments have the forms of a remembered call."""
    named = words(names)[2] if names else 0
    if nargs != state[0] or named != state[1]:
        return False
    at = HEADER
    for i in range(named):
        if words(names)[ITEMS + i] != state[at + i]:
            return False
    at += named
    for i in range(nargs + named):
        slot = words(place + 8 * at)
        if slot[0] == CONSTANT:
            if not constant_fits(slot, args[i]):
                return False
            at += SLOT
        elif slot[0] == NUMBER:
            if not number_fits(slot, args[i]):
                return False
            at += SLOT
        else:
            if not array_fits(slot, args[i]):
                return False
            at += SLOT + 2 * slot[3]
    return True


@helper
def overlaps(state: Any) -> bool:
    """Return whether arrays may overlap, or are one, otherwise than in the remembered call."""
    at = state[3]
    for _ in range(state[4]):
        distance = state[state[at + 1]] - state[state[at]]
        if state[at + 2] < distance and distance < state[at + 3] and distance != state[at + 4]:
            return True
        at += 5
    for _ in range(state[5]):
        if (state[state[at]] == state[state[at + 1]]) != state[at + 2]:
            return True
        at += 3
    return False


@helper
def step_fits(state: Any) -> bool:
    """Return whether the step is one that the kernels can run; divide their work if it is another one."""
    if state[8] == 0:
        return True
    version = words(state[8])[0]
    if version == state[9]:
        return True
    if version < 0 or words(state[8])[1] > state[10]:
        return False
    state[9] = -2
    at = state[6]
    for _ in range(state[7]):
        grants, division = state[at + 4], state[at + 7]
        if state[at + 5]:
            call(state[at + 5], 0, state[at + 6])
            for i in range(division):
                part = at + 8 + 3 * (grants + i)
                number = words(state[part])[0]
                if number < state[part + 1] or number > state[part + 2]:
                    return False
        at += 8 + 3 * (grants + division)
    state[9] = version
    return True


@helper
def run_kernels(state: Any) -> None:
    """Write the addresses of arrays and of workspaces into the records of the kernels, and call them."""
    at = state[11]
    for _ in range(state[12]):
        words(state[at])[0] = state[state[at + 1]] + state[at + 2]
        at += 3
    at = state[6]
    for _ in range(state[7]):
        grants, division = state[at + 4], state[at + 7]
        counters = words(state[at + 2])
        for i in range(state[at + 3]):
            counters[i] = 0
        for i in range(grants):
            part = at + 8 + 3 * i
            words(state[part])[0] = words(state[part + 1])[0]
        call(state[at], 0, state[at + 1])
        at += 8 + 3 * (grants + division)


@helper
def workspaces_fit(state: Any) -> bool:
    """Return whether all workspaces are as large as the kernels need."""
    at = state[6]
    for _ in range(state[7]):
        grants, division = state[at + 4], state[at + 7]
        for i in range(grants):
            part = at + 8 + 3 * i
            if words(state[part + 1])[1] < state[part + 2]:
                return False
        at += 8 + 3 * (grants + division)
    return True


@compiled(types.int64(INDEX, INDEX, types.int64, types.int64))
def run_again(itself: Any, args: Any, nargs: int, names: int) -> int:
    """Run the remembered call whose form the arguments have, and return True; return False if none has it.

    This is a built-in function of Python: `itself` is the table, an array of int64.
    """
    table = words(itself[2])
    answer, count = table[4], table[0]
    if words(table[2])[0] == 0:  # else another call is running
        for k in range(count):
            i = table[1] + k
            if i >= count:
                i -= count
            state = words(table[STATES + i])
            fits = arguments_fit(state, table[STATES + i], args, nargs, names) and not overlaps(state)
            if fits and workspaces_fit(state) and step_fits(state):
                run_kernels(state)
                table[1], answer = i, table[3]
                break
    call(table[5], answer, 0)  # Py_IncRef
    return answer
