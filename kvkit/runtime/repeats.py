"""Run calls again through one compiled function, which Python calls directly as a built-in.

A call that was checked is remembered as a list of numbers: the form of each argument, and what runs it again.
The compiled function compares the arguments of a later call with such lists. If one fits, it writes the
addresses of the arrays into the records of the kernels and calls them. Otherwise it has written nothing that
counts, and returns False: the call takes the way through the checks.

    argument    compared
    array       type, dtype, shape, strides, writeable, aligned, which arrays are one, which overlap
    tensor      the numbers too, with those of the step
    other       the object itself; a float or a small int by its value

The function holds the GIL, so only work for one thread is run like this, and no call runs meanwhile. It reads
objects of CPython and numpy as C does. `layouts_fit` compares what it reads with what Python says; if
anything differs, nothing is remembered.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import struct
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np

from kvkit.runtime import lazy_imports, locks
from kvkit.runtime.arrays import MEMORY, SMALLEST, address
from kvkit.typed import Array, Method

MOST_CALLS, MOST_BYTES = 64, 2**16  # of a function; of a tensor whose numbers are compared
CONSTANT, ARRAY, NUMBER = 0, 1, 2  # kinds of arguments; a number is compared with that of a step
MOST_INT = 2**30  # integers below have one digit
FLAGS = 0x0500  # numpy's flags WRITEABLE and ALIGNED
HEADER, SLOT = 16, 8  # words before the arguments of a remembered call, and of an array before its axes
ITEMS = 4 if sys.version_info >= (3, 14) else 3  # words of a tuple before its items; 3.14 keeps a hash there
STATES = 8  # words of a table before the addresses of its calls
VALUES = frozenset({type(None), bool, int, float, str})  # types of arguments that are compared as constants
FASTCALL_KEYWORDS = 0x0080 | 0x0002  # how Python passes arguments: (self, args, count, names)


class Single(NamedTuple):
    """Describes the kernel of a launch that one call runs, in one thread or in a team's."""

    code: int  # the address of f(worker, params)
    params: int  # an address
    counters: Array | None = None  # zeroed before each run
    grants: Sequence[tuple[int, Any, int]] = ()  # (where its address is written, workspace, bytes)
    # What divides the work for other lengths, f(0, params), and its params
    schedule: tuple[int, int] = 0, 0
    division: Sequence[tuple[int, int, int]] = ()  # (address, least, most) of words that it must leave
    team: Array | None = None  # the record of a team, which `params` is the address of


class Program(NamedTuple):
    """Describes what runs a prepared call again. Arrays are numbers of the arrays that it gets."""

    kernels: Sequence[Single]
    addresses: Sequence[tuple[int, int, int]]  # (where an address is written, its array, the offset in it)
    distances: Sequence[tuple[int, int, int, int, int]]  # see `arrays.overlap_distances`
    step: Array | None  # the int64 words (version, rows) of the step; the version is -1 while it changes
    version: int  # of the step, for which the work is divided; 0 without a step
    room: int  # rows of the cache; -1 if the call cannot follow its step
    alive: object  # all that the addresses point into


class BuiltinDef(ctypes.Structure):
    """C's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )  # fmt: skip


@functools.cache
def method() -> BuiltinDef:
    """Compile `run_again` and return its definition, which lives as long as the process."""
    code = lazy_imports.import_module("kvkit.runtime.run_again").run_again.code
    return BuiltinDef(b"run_again", code.address, FASTCALL_KEYWORDS, None)


def word(value: Any, i: int) -> int:
    """Return the word at index i of an object."""
    return int(MEMORY[(id(value) >> 3) + i])


@functools.cache
def layouts_fit() -> bool:
    """Return whether arrays, floats, ints and tuples of this process lie as `run_again` reads them."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    if sys.maxsize != 2**63 - 1 or sys.byteorder != "little" or np.ndarray.__basicsize__ < 72:
        return False
    base = np.zeros((4, 3, 2, 8), np.float16)
    read_only = base[:, 1, ::-1]
    read_only.flags.writeable = False
    unaligned = np.frombuffer(bytearray(41), np.int32, 10, 1)
    arrays: Any = base, read_only, unaligned, np.zeros(()), base.T, np.ma.zeros(3), np.zeros((0, 5), np.int64)
    numbers = 1000, -1000, 2**30 - 1, 12345
    return (
        all(map(array_lies_as_in_c, arrays))
        and all(word(x, 1) == id(float) and float_word(x) == word(x, 2) for x in (0.5, -1e300, 3.25))
        and all(small_int(x) == small_int(int(str(x))) for x in numbers)
        and len(set(map(small_int, numbers))) == len(numbers)
        and all(
            (word(t, 2), word(t, ITEMS), word(t, ITEMS + 1)) == (2, id(t[0]), id(t[1]))
            for t in (("a", base),)
        )
        and id(None) == word((None,), ITEMS)
    )


def array_lies_as_in_c(array: Array) -> bool:
    """Return whether the words of an array are its type, address, axes, shape, strides, dtype and flags."""
    if word(array, 1) != id(type(array)) or word(array, 2) != array.ctypes.data:
        return False
    if word(array, 3) & 0xFFFFFFFF != array.ndim or word(array, 7) != id(array.dtype):
        return False
    ndim, places = array.ndim, (word(array, 4), word(array, 5))
    if word(array, 8) & FLAGS != array.flags.num & FLAGS or (ndim and places[1] - places[0] != 8 * ndim):
        return False
    return not ndim or [int(MEMORY[(places[0] >> 3) + i]) for i in range(2 * ndim)] == [
        *array.shape, *array.strides
    ]  # fmt: skip


def float_word(number: float) -> int:
    """Return the bits of a float."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def small_int(number: int) -> tuple[int, int]:
    """Return the words of an int of one digit: its sign and number of digits, and its digit."""
    return word(number, 2), word(number, 3) & 0xFFFFFFFF


class CallNotes(threading.local):
    """Holds what is said of the call that a thread records, while it takes the way through the checks."""

    def __init__(self) -> None:
        # With the arrays that a program got; None while no call is recorded
        self.programs: list[tuple[Program, Sequence[Array | None]]] | None = None
        self.tensors: list[tuple[Any, Array]] = []  # index tensors, with the numbers that a step has of them
        self.numbers: dict[str, int] = {}  # names of integers, with the address of the step's


notes = CallNotes()


def note(program: Program, arrays: Sequence[Array | None]) -> None:
    """Note what has run the recorded call again, with these arrays."""
    if notes.programs is not None:
        notes.programs.append((program, arrays))


def note_tensors(tensors: Iterable[Any], numbers: Iterable[Array]) -> None:
    """Note the index tensors of the recorded call, and the numbers that its step has of them."""
    if notes.programs is not None:
        notes.tensors.extend(zip(tensors, numbers, strict=True))


def note_number(name: str, place: int) -> None:
    """Note an integer of the recorded call, and the address of that of its step."""
    if notes.programs is not None:
        notes.numbers[name] = place


KNOWN: weakref.WeakSet[Repeats] = weakref.WeakSet()
changing = locks.LayerLock()  # while calls are remembered or forgotten


class Repeats:
    """Remembers calls of one function, to run them again.

    `returned` has the places and names of the arguments that the function returns in place of new arrays.
    """

    __slots__ = "__weakref__", "_alive", "_function", "_results", "_returned", "_table"

    def __init__(self, *returned: tuple[int, str]) -> None:
        self._results: list[tuple[tuple[int, ...], np.dtype[Any]]] = []  # forms of new arrays
        self._returned = returned
        self._alive: dict[tuple[int, ...], tuple[Array, Any]] = {}  # states by the numbers of arguments
        self._function: Callable[..., bool] | None = None
        self._table = np.zeros(STATES + MOST_CALLS, np.int64)
        KNOWN.add(self)

    def __reduce__(self) -> tuple[type, tuple[tuple[int, str], ...]]:
        return Repeats, self._returned  # a copy has other arrays

    def forget(self) -> None:
        """Forget all calls."""
        with changing:
            self._function, self._table[0] = None, 0
            self._alive = {}

    def again(self, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Run a remembered call of this form and return what it returns; None if there is none."""
        function = self._function
        if function is None:
            return None
        out, results = keywords.get("out"), self._results
        if out is not None:
            return out if function(*args, **keywords) else None
        if len(results) == 1:
            result = np.empty(*results[0])
            return result if function(result, *args, **keywords) else None
        new = tuple([np.empty(*form) for form in results])
        if not function(*new, *args, **keywords):
            return None
        return new or tuple([args[i] if i < len(args) else keywords[name] for i, name in self._returned])

    def record(
        self, function: Callable[..., Any], names: list[str], args: Sequence[Any], keywords: dict[str, Any]
    ) -> Any:
        """Call a function with parameters of these names; remember the call if it ran a prepared one."""
        outer = notes.programs, notes.tensors, notes.numbers
        programs: list[tuple[Program, Sequence[Array | None]]] = []
        tensors: list[tuple[Any, Array]] = []
        numbers: dict[str, int] = {}
        notes.programs, notes.tensors, notes.numbers = programs, tensors, numbers
        try:
            answer = function(*args, **keywords)
        finally:
            notes.programs, notes.tensors, notes.numbers = outer
        if len(programs) == 1:
            arguments = dict(zip(names, args, strict=False)) | keywords
            program, arrays = programs[0]
            self.remember(program, arrays, arguments, [*keywords], answer, tensors=tensors, numbers=numbers)
        return answer

    def remember(
        self, program: Program, arrays: Sequence[Array | None], arguments: dict[str, Any],
        keywords: list[str], answer: Any, *, tensors: Sequence[tuple[Any, Array]] = (),
        numbers: Mapping[str, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Remember a call, the last arguments by `keywords`, if what decides its results can be compared.

        `program` has run it again with `arrays`; `tensors` and `numbers` are those of `CallNotes`.
        """
        answers = answer if isinstance(answer, tuple) else (answer,)
        own = {id(value) for value in arguments.values()}
        results = [each for each in answers if id(each) not in own]
        is_new = len(results) == len(answers) and all(
            type(each) is np.ndarray and each.nbytes < SMALLEST for each in results
        )
        named = [*zip(itertools.repeat(""), results), *arguments.items()]
        slots, count = slots_of(named, arrays, tensors, numbers), len(named) - len(keywords)
        if slots is None or not layouts_fit() or not (is_new or not results):
            return
        if changing.is_owned():  # a signal handler or a finalizer calls
            return
        key = (count, *map(id, keywords), *itertools.chain(*slots))
        values = [value for _, value in named]
        alive = [value.dtype if isinstance(value, np.ndarray) else value for value in values]
        state = state_of(count, keywords, slots, values, program, arrays)
        with changing:
            self._table[0] = 0
            if len(self._alive) >= MOST_CALLS and key not in self._alive:
                self._alive = {}
            self._alive[key] = state, (alive, keywords, program, tensors)
            if results:
                self._results = [(each.shape, each.dtype) for each in results]
            for i, (each, _) in enumerate(self._alive.values()):
                self._table[STATES + i] = address(each)
            increase = ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p).value or 0
            self._table[1:6] = len(self._alive) - 1, address(locks.BUSY), id(True), id(False), increase
            self._table[0] = len(self._alive)
            if self._function is None:
                new = ctypes.pythonapi.PyCFunction_NewEx
                new.argtypes = ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p
                new.restype = ctypes.py_object
                self._function = cast(Callable[..., bool], new(ctypes.addressof(method()), self._table, None))


def slots_of(
    arguments: Sequence[tuple[str, Any]], arrays: Sequence[Array | None],
    noted: Sequence[tuple[Any, Array]], integers: Mapping[str, int],
) -> list[list[int]] | None:  # fmt: skip
    """Return the numbers that arguments are compared with; None if some argument cannot be compared."""
    owned, tensors = {id(each) for each in arrays}, {id(a): b for a, b in noted}
    slots = []
    for name, value in arguments:
        if name in integers:
            at, one = integers[name], small_int(1)
            slots.append([NUMBER, at, id(int), one[0], id(0), 0, 0, 0])
        elif type(value) is np.ndarray and id(value) in owned:
            slots.append(array_slot(value, 0, 0))
        elif type(value) is np.ndarray and id(value) in tensors:
            numbers = tensors[id(value)]
            if not value.flags.c_contiguous or value.nbytes > MOST_BYTES or value.nbytes % 4:
                return None
            slots.append(array_slot(value, address(numbers), value.nbytes))
        elif is_constant(value):
            slot = [CONSTANT, id(value), 0, 0, -1, 0, 0, 0]
            if type(value) is float:
                slot[2:4] = id(float), float_word(value)
            elif type(value) is int and abs(value) < MOST_INT:
                slot[2:5] = id(int), *small_int(value)
            slots.append(slot)
        else:
            return None
    found = {id(value) for _, value in arguments}
    return slots if all(each is None or id(each) in found for each in arrays) else None


def array_slot(array: Array, numbers: int, size: int) -> list[int]:
    """Return the numbers of an array; those of a tensor are compared with `size` bytes at `numbers`."""
    kind, flags = id(np.ndarray), array.flags.num & FLAGS
    return [ARRAY, 0, kind, array.ndim, id(array.dtype), flags, numbers, size, *array.shape, *array.strides]


def is_constant(value: Any) -> bool:
    """Return whether an argument never changes its value."""
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(is_constant, value))
    frozen = getattr(getattr(value, "__dataclass_params__", None), "frozen", False)
    return type(value) in VALUES or isinstance(value, np.generic) or bool(frozen)


def state_of(
    count: int, names: list[str], slots: list[list[int]], values: list[Any], program: Program,
    arrays: Sequence[Array | None],
) -> Array:  # fmt: skip
    """Return the numbers of a call: those of its arguments, and what runs it again."""
    place: dict[int, int] = {}
    begin, everywhere = HEADER + len(names), []
    for slot, value in zip(slots, values, strict=True):
        if slot[0] == ARRAY and not slot[7]:
            place.setdefault(id(value), begin + 1)
            everywhere.append((begin + 1, address(value)))
        begin += len(slot)
    own = [place.get(id(each), 0) for each in arrays]
    distances = [(own[one], own[other], *rest) for one, other, *rest in program.distances]
    pairs = [(a, b, int(x == y)) for (a, x), (b, y) in itertools.combinations(everywhere, 2)]
    addresses = [(where, own[i], offset) for where, i, offset in program.addresses]
    kernels = [
        [
            each.code, each.params, 0 if each.counters is None else address(each.counters),
            0 if each.counters is None else each.counters.size, len(each.grants), *each.schedule,
            len(each.division), *itertools.chain(*each.grants, *each.division),
        ]
        for each in program.kernels
    ]  # fmt: skip
    parts = distances, pairs, kernels, addresses
    sizes = [sum(map(len, part)) for part in parts]
    at = [begin + sum(sizes[:i]) for i in range(4)]
    step = program.step
    header = [
        count, len(names), 0, at[0], len(distances), len(pairs), at[2], len(kernels),
        0 if step is None else address(step), program.version, program.room,
        at[3], len(addresses),
    ]  # fmt: skip
    numbers = itertools.chain(*slots, *itertools.chain(*parts))
    return np.array([*header, *[0] * (HEADER - len(header)), *map(id, names), *numbers], np.int64)


def repeatable(operator: Method) -> Method:
    """Decorate a function, or a method of an object with `repeats`, so that its calls can run again.

    A call that runs a prepared call a second time says so by `note`. The next one is compared with it here.
    """
    names = [*inspect.signature(operator).parameters]
    name = operator.__name__

    @functools.wraps(operator)
    def call_method(itself: Any, *args: Any, **keywords: Any) -> Any:
        try:
            repeats = itself.repeats[name]
        except AttributeError:  # Python says what is wrong
            return operator(itself, *args, **keywords)
        answer = repeats.again(args, keywords)
        if answer is not None:
            return answer
        return repeats.record(functools.partial(operator, itself), names[1:], args, keywords)

    if names[0] == "self":
        return cast(Method, call_method)
    repeats = Repeats()

    @functools.wraps(operator)
    def call_function(*args: Any, **keywords: Any) -> Any:
        answer = repeats.again(args, keywords)
        return answer if answer is not None else repeats.record(operator, names, args, keywords)

    return cast(Method, call_function)
