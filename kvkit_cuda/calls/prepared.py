"""Calls of a plan that are prepared once; others of the same form exchange addresses and run again.

Calls of one form differ only in the addresses of their arrays: the calls for the layers of a model in one
step, and, if a plan is filled with later steps, the calls of a layer in one step after the other.
"""

from typing import Any, NamedTuple

from kvkit.checks.arguments import CacheArguments, Heads, Scoring
from kvkit.runtime import locks
from kvkit_cuda.calls import homes
from kvkit_cuda.calls.tables import SCRATCH
from kvkit_cuda.device_runtime import host

MOST = 4096  # prepared calls of a step
INPUTS = "query", "current_key", "current_value", "cache", "scale"
ATTRIBUTES = {  # names of attributes, for operators whose calls can repeat
    "dynamic_batching.Plan.key_value_cache": (*CacheArguments._fields, "num_repeat"),
    "dynamic_batching.Plan.multi_head_cache_attention": (
        *CacheArguments._fields, *Heads._fields, *Scoring._fields, "return_lse"
    ),
}  # fmt: skip
WRITTEN = "cache", "scale"
RUNNING = locks.OneCallLock()  # one call launches at a time, because calls share scratch memory


class RepeatableCall(NamedTuple):
    """A call that may repeat: its form, and its arrays by name, with their addresses."""

    form: tuple
    arrays: dict[str, Any]
    places: dict[str, int]
    stream: int | None  # the current one of their library
    producers: set[int]  # streams that numba's arrays wait for


# (form of an array, its address) for each library, faster than by protocols.


def of_torch(tensor):
    form = type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return form, tensor.data_ptr()


def of_cupy(array):
    return (type(array), array.shape, array.strides, array.dtype, array.device.id), array.data.ptr


def of_numba(array):
    memory = array.gpu_data
    form = type(array), array.shape, array.strides, array.dtype, id(memory.context)
    return form, memory.device_ctypes_pointer.value


def form_reader(array):
    """Return the function that returns form and address of arrays of this type, or None."""
    kind = type(array)
    if kind not in FORM_READERS:
        found = {"torch": of_torch, "cupy": of_cupy}.get(homes.library(array))
        FORM_READERS[kind] = of_numba if hasattr(array, "gpu_data") else found
    return FORM_READERS[kind]


FORM_READERS: dict[type, Any] = {}


def repeatable(path, values):
    """Return the `RepeatableCall` of arguments by name; None if it cannot repeat."""
    if values.get("attn_mask") is not None or values.get("sinks") is not None:
        return None
    named, out = {name: values.get(name) for name in INPUTS}, values["out"]
    several = out if isinstance(out, (tuple, list)) else (out,)
    named |= {result(i): each for i, each in enumerate(several)}
    given = {name: array for name, array in named.items() if array is not None}
    attributes: list[object] = [path]
    for name in ATTRIBUTES[path]:
        attributes += [values[name], type(values[name])]
    places, producers, library = {}, set(), None
    for name, array in given.items():
        known_by = FORM_READERS.get(type(array)) or form_reader(array)
        if known_by is None:
            return None
        form, places[name] = known_by(array)
        attributes += [name, form]
        if known_by is not of_numba:
            library = library or array
        elif array.stream:
            producers.add(int(array.stream.handle))
    call = tuple(attributes)
    try:
        hash(call)
    except TypeError:
        return None
    stream = None if library is None else homes.stream_of(library)
    return RepeatableCall(call, given, places, stream, producers)


def result(i):
    """Return the name of a result in launches."""
    return f"result {i}"


class PreparedCalls(dict):
    """Prepared calls, by their form."""

    def keep(self, form, prepared):
        """Keep a call for the next ones of its form."""
        if len(self) >= MOST:
            self.clear()
        self[form] = prepared


class PreparedCall:
    """A checked call whose launches can run again at other addresses, if what it writes overlaps nothing."""

    def __init__(self, launches, operands, forms, capacity):
        """Prepare a call of operands by name, results among them, whose `forms` are (shape, dtype)."""
        self.launches = [launch.prepared() for launch in launches if all(launch.blocks[1:])]
        self.forms, self.capacity = forms, capacity
        self.device, self.context = host.current(), host.context()
        self.results = [result(i) for i in range(len(forms))]
        self.like = next(iter(operands.values())).like
        self.spans = {name: span(operand.seen) for name, operand in operands.items()}
        self.written = [name for name in operands if name in WRITTEN or name not in INPUTS]
        self.size = max([launch.scratch for launch in launches], default=0)
        self.moved, self.shared = [], []  # places in launches: addresses of operands, of scratch
        self.places = {}  # the addresses that launches have now
        for launch in self.launches:
            for at, name in launch.owners.items():
                if name == host.SCRATCH:
                    self.shared.append((launch.argument_words, at))
                elif name in operands:
                    offset = int(launch.argument_words[at]) - operands[name].seen.ctypes.data
                    self.moved.append((launch.argument_words, at, name, offset))

    def run(self, call, step, stream):
        """Run another call of the form; return its results, or None if it needs the full checks."""
        if host.context() != self.context or step.sequences.steps.rows > self.capacity:
            return None
        number = call.stream or host.LEGACY_DEFAULT
        if stream is not None:
            number = stream if type(stream) is int and stream else host.number(host.stream(stream))
        places, arrays = call.places, call.arrays
        if self.results[0] not in arrays:
            forms = zip(self.results, self.forms, strict=True)
            new = {name: self.like(*form, host.stream(number)) for name, form in forms}
            arrays, places = (
                arrays | new,
                places | {name: form_reader(new[name])(new[name])[1] for name in new},
            )
        handle = host.handle(number)
        with RUNNING:
            if places != self.places:
                if self.overlaps(places):
                    return None
                self.move(places)
            captured = host.is_captured(handle)
            if captured:
                step.on[self.device].captured = True
            else:
                self.order(call, step, number, stream)
            if self.shared:
                scratch = SCRATCH.of(self.size, self.device, number, captured)
                for words, at in self.shared:
                    words[at] = scratch
            for launch in self.launches:
                launch.start(handle, captured)
        return [arrays[name] for name in self.results]

    def move(self, places):
        """Set the addresses of operands in all launches."""
        for words, at, name, offset in self.moved:
            words[at] = places[name] + offset
        self.places = places

    def overlaps(self, places):
        """Return whether an array that is written may overlap another array."""
        ends = [(name, places[name] + low, places[name] + high) for name, (low, high) in self.spans.items()]
        for name in self.written:
            low, high = self.spans[name]
            begin, end = places[name] + low, places[name] + high
            for other, first, last in ends:
                if first < end and begin < last and other != name:
                    return True
        return False

    def order(self, call, step, number, stream):
        """Let a stream wait for the streams that wrote what the call reads."""
        tables = step.on[self.device]
        if host.key(number) not in tables.ready:
            tables.follow(host.stream(number if stream is None else stream))
        for producer in (*call.producers, call.stream or number):
            if producer != number:
                host.wait_for(producer, host.stream(number))


def span(array):
    """Return the range of byte offsets of an array's elements, relative to its address."""
    if not array.size:
        return 0, 0
    reach = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    return sum(min(0, far) for far in reach), sum(max(0, far) for far in reach) + array.itemsize
