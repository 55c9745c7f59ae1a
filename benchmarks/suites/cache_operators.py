"""Cases of cache operators: B=8, H=8, Dh=128; 4,096 past tokens and one new, or 512 new."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

import kvkit
from benchmarks.suites.measuring import Case, Work
from benchmarks.suites.memory import plain_copy
from kvkit import cpu
from kvkit.checks import caches
from kvkit.checks.arguments import CacheArguments, StepArguments
from kvkit.checks.index_tensors import packed_in_cache
from kvkit.checks.values import check_apart, check_new_tokens
from kvkit.layouts import pmx

B, H, DIM, PAST, PREFILL, PAGE = 8, 8, 128, 4096, 512, 128
GROUP = 8
SETS = 8  # inputs and layers that stores rotate through, so that data come from memory
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}


@dataclass(frozen=True)
class Kind:
    """The formats of data and cache: `float16->int8`."""

    data: str
    cache: str

    @property
    def quant(self):
        return {"int8": 8, "int4": 4}.get(self.cache, 0)

    def arrays(self, order, rows, layers=1):
        """Return a cache and its scale with `rows` tokens, in the axis order of a layout."""
        sizes = {"b": B, "l": layers, "kv": 2, "n": rows, "h": H}
        shape = tuple(sizes[axis] for axis in order.axes[:-1])
        width = DIM // 2 if self.quant == 4 else DIM
        cache = np.ones((*shape, width), DTYPES["int8" if self.quant else self.cache])
        return cache, np.ones((*shape, DIM // GROUP), np.float16) if self.quant else None

    def token_bytes(self):
        """Return the bytes of one token's keys and values in a cache and as data."""
        stored = (
            DIM * self.quant // 8 + DIM // GROUP * 2
            if self.quant
            else DIM * np.dtype(DTYPES[self.cache]).itemsize
        )
        return 2 * H * stored, 2 * H * DIM * np.dtype(DTYPES[self.data]).itemsize


def tokens(kind, *shape, seed=0):
    return np.random.default_rng(seed).standard_normal((*shape, H, DIM), np.float32).astype(DTYPES[kind.data])


def index_tensors(mode, past, new, batch=B, page=PAGE):
    """Return the keyword arguments of a step; pages lie in random order."""
    lengths = past + new
    if mode:
        pages = -(-lengths // page)
        table = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages) * page
    else:
        table = np.arange(batch) * lengths
    return {
        "seqstarts": np.arange(batch + 1) * new,
        "kvstarts": np.arange(batch + 1) * lengths,
        "cachestarts": table,
        "start_pos": np.full(batch, past),
        "max_seqlen": None,
        "max_kvlen": None,
    }


def whole_step(kind, number, mode, past, new, new_outputs=False):
    """Prepare the operator as users call it: append `new` tokens to each sequence, read all back.

    `number` is that of the layout; `mode` is a cache mode, or None for a static cache.
    """

    def prepare():
        static = mode is None
        order = (pmx.STATIC if static else pmx.DYNAMIC)[number]
        length = past + new
        rows = length if static else B * -(-length // PAGE) * PAGE
        cache, scale = kind.arrays(order, rows)
        attributes = {"quant_bit": kind.quant, "quant_group": GROUP, "cache_layout": number}
        if static:
            x, shape = tokens(kind, B, new), (B, length, H, DIM)
            call, inputs = kvkit.key_value_cache, {"start_pos": past}
        else:
            x, shape = tokens(kind, B * new), (B * length, H, DIM)
            call, inputs = kvkit.dynamic_batching.key_value_cache, index_tensors(mode, past, new)
            attributes |= {"cache_mode": mode, "page_size": PAGE}
        out = None if new_outputs else tuple(np.zeros(shape, x.dtype) for _ in range(2))

        def run(i):
            call(x, x, cache=cache, scale=scale, out=out, **inputs, **attributes)

        stored, data = kind.token_bytes()
        moved = B * (length + new) * (stored + data)
        return Work(run, moved, beside={"copy": plain_copy(moved, new_outputs)})

    return prepare


def append_only(kind, number, mode, past, new, timed=False):
    """Prepare the append alone: checks and stores, no context read back."""

    def prepare():
        order = pmx.DYNAMIC[number]
        layers = 1 if timed else SETS
        cache, scale = kind.arrays(order, B * -(-(past + new) // PAGE) * PAGE, layers)
        inputs = [tokens(kind, B * new, seed=i) for i in range(layers)]
        index = StepArguments(**index_tensors(mode, past, new), cache_mode=mode, page_size=PAGE)
        place = CacheArguments(layers, 0, kind.quant, GROUP, cache_layout=number)

        def run(i):
            layer, x = i % layers, inputs[i % layers]
            fmt, key, value = check_new_tokens(x, x, 3)
            checked = caches.cache_layer(
                fmt, H, DIM, cache, scale, pmx.DYNAMIC, place._replace(layer_idx=layer)
            )
            step = packed_in_cache(("current_key", x), index).over_cache("current_key", x, checked)
            cpu.launches.start(cpu.copy.transfer.prepare_transfer("store", key, value, checked, step))

        if timed:
            return Work(run)
        moved = B * new * sum(kind.token_bytes())
        return Work(run, moved, beside={"copy": plain_copy(moved)})

    return prepare


def checks_only(kind, batch):
    """Prepare the checks of a decode step of `batch` sequences in a page each."""

    def prepare():
        cache, scale = kind.arrays(pmx.DYNAMIC[3], batch * PAGE)
        x = tokens(kind, batch)
        index = StepArguments(**index_tensors(1, PAGE - 1, 1, batch), cache_mode=1, page_size=PAGE)
        place = CacheArguments(1, 0, kind.quant, GROUP, cache_layout=3)

        def run(i):
            fmt, _, _ = check_new_tokens(x, x, 3)
            checked = caches.cache_layer(fmt, H, DIM, cache, scale, pmx.DYNAMIC, place)
            packed_in_cache(("current_key", x), index).over_cache("current_key", x, checked)
            for name, array in (("cache", cache), ("scale", scale)):
                check_apart(name, array, [("current_key", x), ("current_value", x)])

        return Work(run)

    return prepare


def loads(kind, goal):
    """Yield the cases that load a cache of a kind, in every layout and mode."""
    places = [("static", number, None) for number in range(2)]
    places += [(name, number, mode) for number in range(4) for mode, name in enumerate(("offsets", "pages"))]
    for name, number, mode in places:
        label = f"load {kind.cache}->{kind.data}, layout {number}, {name}"
        yield Case(label, whole_step(kind, number, mode, PAST, 1), {"copy": goal})


SAME = [Kind(name, name) for name in ("float16", "float32")]
QUANTIZED = [Kind("float16", "int8"), Kind("float16", "int4")]
STORES = [Kind(data, cache) for data in ("float32", "float16", "bfloat16") for cache in ("int8", "int4")]

CASES = [
    *(case for kind in SAME for case in loads(kind, 0.8)),
    *(case for kind in QUANTIZED for case in loads(kind, 0.6)),
    *(
        Case(
            f"load {kind.cache}->{kind.data}, layout 3, pages, made outputs",
            whole_step(kind, 3, 1, PAST, 1, True),
            {"copy": 0.75},
        )
        for kind in (*SAME, *QUANTIZED)
    ),
    *(
        Case(
            f"store {kind.data}->{kind.cache}, layout {number}, pages",
            append_only(kind, number, 1, 0, PREFILL),
            goals,
        )
        for kinds, goals in (([*SAME, Kind("float32", "float16")], {}), (STORES, {"copy": 0.5}))
        for kind in kinds
        for number in (0, 3)
    ),
    *(
        Case(f"prefill {kind.data}->{kind.cache}, layout 3, pages", whole_step(kind, 3, 1, 0, PREFILL))
        for kind in (*SAME, *QUANTIZED)
    ),
    *(
        Case(
            f"append a token after {past:,}, float16->int8",
            append_only(QUANTIZED[0], 3, 1, past, 1, True),
            calls=50,
        )
        for past in (0, 32768)
    ),
    Case("checks of a decode step, 64 sequences", checks_only(QUANTIZED[0], 64), calls=50),
]
