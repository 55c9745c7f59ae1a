"""Make operators for a GPU that have the names, arguments and documentation of `kvkit`.

`kvkit_cuda.calls`, which the first call loads, does the work.
"""

import functools
import importlib
import inspect
import os
import re
import textwrap

from kvkit.operators import OPERATORS
from kvkit_cuda.device_runtime import needs
from kvkit_cuda.names import inputs, origin

WHERE = """`kvkit.{path}` on a CUDA device. Arrays of a device (with the CUDA array interface or DLPack) are
used in place. Numpy arrays are copied to the current device, and back if they change."""
NEW_RESULTS = """Without `out`, results are new arrays of the library and device of `{first}`."""
ON_HOST = """Index tensors should be on the host, where they are checked: the call waits for index tensors on
the device."""
EQUAL = "Stored bits equal those of the CPU."
CODES = """If fewer than 32 codes share a scale, or, for many rows, fewer than a head has, kernels with tensor
cores round code times scale to the type of the data, as `key_value_cache` returns it; other scales multiply
scores and weights. Other kernels keep float32, as the CPU does; only they read formats of `quant_format`."""
SUMS = "Sums are added in another order than on the CPU, so the last bits differ, but not between devices."
KEY_WEIGHTS = "With `return_key_weights`, kernels without tensor cores compute all scores twice."
GATHERED = """Contexts in one pool of floats are read where they lie. Rows of 656 bytes, also chosen ones, are
first decoded into a pool of the dtype of `query` on the device. Other rows (of two pools, of 584 bytes,
chosen floats) are joined and decoded on the host, rounded to that dtype, and copied to the device."""
ENCODED_ON_HOST = "Tokens are copied to the host, where rows of bytes are encoded, and back into the pool."
ON_THE_CPU = "The CPU computes it: arrays of a device are copied to the host, the result is copied back."
INDEX_ON_HOST = "The CPU computes it, and the result stays on the host, as index tensors should."
STEPS_OF_STATES = """The CPU computes it with `gates`, with g or beta that are not contiguous float32, with
states of bfloat16, and with keys of more than 512 elements."""
PROMPTS_OF_STATES = """Chunks have 16 tokens, whatever `chunk` is. The CPU computes it without `state`, with
`gates`, `return_states` or `return_capsule`, with g or beta that are not contiguous float32, with states of
bfloat16, with four axes that are not contiguous or have an `out`, and with keys of more than 128 elements."""
ANGLES = """Products and sums equal those of the CPU bit for bit; cosines and sines too, except rare ties in
rounding. If an angle reaches 2^24, all angles of the call are computed on the host."""
ONCE = """After the first call of a form, calls of the plan's methods copy nothing to the device and allocate
nothing there, if their arrays are on the device and results are given as `out`."""
INTO = """into : optional
    An earlier plan {same} It becomes the plan of this step: its tables are overwritten, and
    nothing is allocated if index tensors are on the host. A CUDA graph that captured calls of the plan's
    methods then computes this step when it is replayed, if caches are large enough; `stream` is the stream
    that replays it. Before a call is captured, one of the same form must have run, and graphs that were
    captured on one stream must be replayed on one stream.
"""
STREAM = """stream : optional
    The stream to work on, of numba, torch, CuPy or cuda.core, or its address. By default it is the current
    stream of the first array's library (torch or CuPy), else the default stream. It waits for the streams
    that write the arrays, if their libraries name them; the host does not wait, unless arrays are copied. If
    it is not the current stream of their library, keep the arrays and results alive until it has finished:
    torch and CuPy reuse freed memory (a tensor's `record_stream` defers that).
"""
NO_DEVICE = """DeviceError
    If there is no device.
"""


class Arguments:
    """The arguments of a function of `kvkit`, and `own` keyword arguments with their defaults."""

    def __init__(self, function, own):
        given = inspect.signature(function)
        self.function, self.own = function, own
        more = [parameter(name, default) for name, default in own.items()]
        self.signature = given.replace(parameters=[*given.parameters.values(), *more])
        parameters = self.signature.parameters.values()
        self.positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        self.defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        self.names = frozenset(self.signature.parameters)
        # others[i]: the names that keywords may have after i positional arguments.
        self.others = [self.names.difference(self.positional[:i]) for i in range(len(self.positional) + 1)]

    def bind(self, args, kwargs):
        """Return the values of all arguments of a call, by name; faster than `signature.bind`."""
        values, count = self.defaults | kwargs, len(args)
        values.update(zip(self.positional, args, strict=False))
        known = count < len(self.others) and kwargs.keys() <= self.others[count]
        if not known or len(values) < len(self.names):
            kwargs = {name: kwargs[name] for name in kwargs if name not in self.own}
            self.function(*args, **kwargs)  # Python raises its own error
        return values


def parameter(name, default):
    """Return a keyword-only parameter."""
    kind = object if default is None else type(default)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def on_device(path, *notes, own=None, then=None):
    """Return the operator for a GPU that mirrors the function of `kvkit` at a path.

    `notes` on the differences are added to its docstring. `own` maps additional arguments to (default, text);
    all operators take `stream`. Results are passed through `then`.
    """
    own = own or {}
    function = origin(path)
    arguments = Arguments(function, {name: default for name, (default, _) in own.items()} | {"stream": None})
    bind = arguments.bind

    def operator(*args, **kwargs):
        values = bind(args, kwargs)
        result = kernels().call(path, values)
        return then(result) if then else result

    room = path.partition(".")[0] if "." in path and path[0].islower() else ""  # not for PagedPlan.method
    name = path.removeprefix(f"{room}.")
    operator.__module__ = f"kvkit_cuda.{room}" if room else "kvkit_cuda"
    operator.__qualname__, operator.__name__ = name, function.__name__
    operator.__signature__ = arguments.signature  # type: ignore[attr-defined]
    operator.__doc__ = docstring(path, function, notes, [text for _, text in own.values()])
    return operator


@functools.cache
def kernels():
    """Import the module that runs operators, and Numba with it."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") in ("", "0"):
        needs.packages()
    return importlib.import_module("kvkit_cuda.calls.operators")


def docstring(path, function, notes, more):
    """Return the documentation of a function, with the arguments in `more` and the `notes`."""
    summary, _, rest = str(inspect.getdoc(function)).partition("\n\n")
    arrays, index = inputs(path) if path in OPERATORS else ([], [])
    about = [WHERE.format(path=path)]
    if arrays and OPERATORS[path].outputs:
        about.append(NEW_RESULTS.format(first=arrays[0]))
    if index:
        about.append(ON_HOST)
    rest = rest.replace("\nReturns\n", "".join([*more, STREAM, "\nReturns\n"]))
    rest = rest.replace("Raises\n------\n", "Raises\n------\n" + NO_DEVICE)
    about = [textwrap.fill(" ".join([*about, *notes]), 105)]
    both = {path.partition(".")[0] for path in OPERATORS} | {"paged_plan"}  # names that only kvkit has stay
    rest = re.sub(
        r"\bkvkit\b(?=\.(\w+)|)",
        lambda found: "kvkit_cuda" if found[1] is None or found[1] in both else "kvkit",
        rest,
    )
    return "\n\n".join([summary, *about, rest]).rstrip()
