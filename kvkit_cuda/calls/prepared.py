"""Prepare calls of a plan once; other calls of the same form exchange addresses and run again.

Calls of one form differ only in the addresses of their arrays: calls for the layers of a model in one step,
and, if a plan is filled with later steps, calls for a layer in successive steps.
"""

import functools
import inspect
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvkit.operators import OPERATORS
from kvkit.runtime import locks
from kvkit.runtime.arrays import address, overlap_distances
from kvkit_cuda.calls import homes
from kvkit_cuda.calls.tables import SCRATCH
from kvkit_cuda.device_runtime import host
from kvkit_cuda.names import origin

MOST_CALLS = 4096  # prepared calls of a step
# Arguments that are read when a call is prepared; calls with one of them do not repeat.
READ_ONCE = "attn_mask", "sinks", "alibi_slopes", "return_key_weights"


class Repeatable(NamedTuple):
    """A method of a plan whose calls can repeat, by the names of its arguments."""

    arrays: tuple[str, ...]
    attributes: Callable[[dict], tuple]  # f(arguments by name) -> the stream and the attributes
    written: frozenset[str]  # the names of inputs that a call changes; results are not among them


ONE_POOL = {  # if keys and values are one array, launches know it by one of its two names
    "key_cache": "value_cache", "value_cache": "key_cache",
    "key_scale": "value_scale", "value_scale": "key_scale",
}  # fmt: skip
RUNNING = locks.OneCallLock()  # one call launches at a time, because calls share scratch memory


@functools.cache
def operator_of(path: str) -> str:
    """Return the operator that a plan's method runs: dynamic_batching.Plan.x -> dynamic_batching.x."""
    return re.sub(r"\w*Plan\.", "", path)


@functools.cache
def plan_method(path: str) -> Repeatable | None:
    """Return the arguments of a plan's method; None for another operator."""
    if path == operator_of(path):
        return None
    names = [
        name for name in inspect.signature(origin(path)).parameters if name not in ("self", "out", *READ_ONCE)
    ]
    inputs = OPERATORS[operator_of(path)].inputs
    arrays = tuple(each.name for each in inputs if each.name in names)
    attributes = operator.itemgetter("stream", *(name for name in names if name not in arrays))
    return Repeatable(arrays, attributes, frozenset(each.name for each in inputs if each.inout or each.found))


class RepeatableCall(NamedTuple):
    """A call that may repeat: its form, and its arrays by name, with their addresses."""

    form: tuple
    arrays: dict[str, Any]
    places: dict[str, int]  # the arrays' addresses
    written: frozenset[str]  # as in `Repeatable`
    stream: int | None  # the current stream of the arrays' library
    producers: set[int]  # streams that write numba's arrays


def of_torch(tensor):
    """Return the form of a tensor, and its address; this is faster than array protocols."""
    form = type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return form, tensor.data_ptr()


def of_cupy(array):
    """Return the form of a CuPy array, and its address."""
    return (type(array), array.shape, array.strides, array.dtype, array.device.id), array.data.ptr


def of_numba(array):
    """Return the form of a device array of numba, and its address."""
    memory = array.gpu_data
    form = type(array), array.shape, array.strides, array.dtype, id(memory.context)
    return form, memory.device_ctypes_pointer.value


def form_reader(array):
    """Return `of_torch`, `of_cupy` or `of_numba` for an array of their library, else None."""
    kind = type(array)
    if kind not in FORM_READERS:
        found = {"torch": of_torch, "cupy": of_cupy}.get(homes.library(array))
        FORM_READERS[kind] = of_numba if hasattr(array, "gpu_data") else found
    return FORM_READERS[kind]


FORM_READERS: dict[type, Any] = {}


def repeatable(path, method, values):
    """Return the `RepeatableCall` of a method's arguments by name; None if it cannot repeat."""
    for name in READ_ONCE:
        if values.get(name) is not None and values[name] is not False:
            return None
    given = {name: values[name] for name in method.arrays}
    out = values.get("out")
    if out is not None:
        several = out if isinstance(out, (tuple, list)) else (out,)
        given |= {result(i): each for i, each in enumerate(several)}
    _, *attributes = method.attributes(values)
    form = [path, *attributes, *map(type, attributes)]
    arrays, places, producers, first = {}, {}, set(), None  # the first array of a library with streams
    for name, array in given.items():
        if array is None or isinstance(array, (int, float)):  # a scale that is a number
            form.append(array)
            continue
        read_form = FORM_READERS.get(type(array)) or form_reader(array)
        if read_form is None:
            return None
        arrays[name] = array
        array_form, places[name] = read_form(array)
        form += name, array_form
        if read_form is not of_numba:
            first = array if first is None else first
        elif array.stream:
            producers.add(int(array.stream.handle))
    form.append(places.get("key_cache") == places.get("value_cache"))  # one pool, given twice
    try:
        hash(tuple(form))
    except TypeError:
        return None
    stream = None if first is None else homes.stream_of(first)
    return RepeatableCall(tuple(form), arrays, places, method.written, stream, producers)


def result(i):
    """Return the name of a result in launches."""
    return f"result {i}"


class PreparedCalls(dict):
    """Prepared calls, by their form."""

    def keep(self, form, prepared):
        """Keep a call for the next ones of its form; drop all calls if there are too many."""
        if len(self) >= MOST_CALLS:
            self.clear()
        self[form] = prepared


class PreparedCall:
    """A checked call whose launches can run again at other addresses, if no written array overlaps another.

    `room` is the number of rows of the cache, or of pages of the pools. `tables` are those of the step.
    `alive` are objects that must not be freed while launches point at their memory. A launch's arguments are
    words; those that are addresses are exchanged:

        argument_words   .. | address of `query` + offset | stride | .. | address of scratch memory | ..
    """

    def __init__(self, written, launches, operands, forms, room, tables, alive):
        """Prepare a call of operands by name, results among them, whose `forms` are (shape, dtype)."""
        self.launches = [launch.prepared() for launch in launches if all(launch.blocks[1:])]
        self.forms, self.room, self.tables, self.alive = forms, room, tables, alive
        self.device, self.context = host.current(), host.context()
        self.results = [result(i) for i in range(len(forms))]
        self.like = next(iter(operands.values())).like
        seen = {name: operand.seen for name, operand in operands.items()}
        places = {name: address(array) for name, array in seen.items()}
        self.overlapping = overlap_distances(seen, places, {*written, *self.results})
        self.scratch_bytes = max([launch.scratch for launch in launches], default=0)
        self.places = {}  # the addresses of operands that launches have now
        # where launches have addresses of operands, and of scratch
        self.operand_words, self.scratch_words = [], []
        for launch in self.launches:
            for i, name in launch.owners.items():
                name = name if name in operands else ONE_POOL.get(name, name)
                if name == host.SCRATCH:
                    self.scratch_words.append((launch.argument_words, i))
                elif name in operands:
                    offset = int(launch.argument_words[i]) - operands[name].seen.ctypes.data
                    self.operand_words.append((launch.argument_words, i, name, offset))

    def run(self, call, needed, stream):
        """Run another call of the form, whose step has `needed` rows or pages.

        Return its results, or None if it needs the full checks.
        """
        if host.context() != self.context or needed > self.room:
            return None
        number = call.stream or host.LEGACY_DEFAULT  # the address of the stream
        if stream is not None:
            number = stream if type(stream) is int and stream else host.stream_address(host.stream(stream))
        places, arrays = call.places, call.arrays
        if self.results and self.results[0] not in arrays:
            forms = zip(self.results, self.forms, strict=True)
            new = {name: self.like(*form, host.stream(number)) for name, form in forms}
            arrays = arrays | new
            places = places | {name: form_reader(new[name])(new[name])[1] for name in new}
        handle = host.driver_stream(number)
        with RUNNING:
            if places != self.places:
                if self.overlaps(places):
                    return None
                self.move(places)
            captured = host.is_captured(handle)
            if captured:
                self.tables.captured = True
            else:
                self.order(call, number, stream)
            if self.scratch_words:
                scratch = SCRATCH.of(self.scratch_bytes, self.device, number, captured)
                for words, i in self.scratch_words:
                    words[i] = scratch
            for launch in self.launches:
                launch.start(handle, captured)
        return [arrays[name] for name in self.results]

    def move(self, places):
        """Set the addresses of operands in all launches."""
        for words, i, name, offset in self.operand_words:
            words[i] = places[name] + offset
        self.places = places

    def overlaps(self, places):
        """Return whether an array that is written may overlap another array (see `overlap_distances`).

        They may at distances between `least` and `most`, but not at the distance that they had in the first
        call, which was `checked` in full.
        """
        for one, other, least, most, checked in self.overlapping:
            distance = places[other] - places[one]
            if least < distance < most and distance != checked:
                return True
        return False

    def order(self, call, number, stream):
        """Let a stream wait for the streams that wrote the arrays and tables of the call."""
        if host.stream_key(number) not in self.tables.ready:
            self.tables.follow(host.stream(number if stream is None else stream))
        for producer in (*call.producers, call.stream or number):
            if producer != number:
                host.wait_for(producer, host.stream(number))
