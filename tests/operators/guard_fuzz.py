"""Calls whose arrays end or begin where memory does: `python guard_fuzz.py COUNT SEED [FIRST]`.

Every array, outputs too, lies right before or right behind a page that nobody may touch, so that a kernel
which reads or writes a byte outside ends the process. Results and all that was written have the bits of the
same call on ordinary memory. Half of the calls have a number changed or an array cut, by one mostly: they are
refused in the same words, or have the same bits. The last line is what was called and what came of it; where
the process ends before, it is the number of the call. `PYTHONPATH` has the rooms of the tests.
"""

import collections
import functools
import inspect
import itertools
import json
import sys
import warnings

import attention_scenes
import engine_caches
import numpy as np
import plan_scenes
import random_calls
from borders import BEGIN, END, at_border
from random_calls import append, attend, one, pools, reshape
from scenes import INT64_MAX, INT64_MIN

import kvkit
from kvkit import KvkitError, layouts
from kvkit.cpu.copy import pieces, transfer
from kvkit.cpu.positions import alibi, rotary
from kvkit.reference.ascend import KVHEAD
from kvkit.tools.vectors.draws import normal

NEAR = (-2, -1, 1, 1, 2)
# What says where something lies, and the arrays where it does.
PLACES = {
    *("start_pos", "seqstarts", "kvstarts", "cachestarts", "decoding_batches", "cache", "scale", "m", "n"),
    *("slot_mapping", "wins", "offset_index", "seq_lens", "block_tables", "context_lens", "seq_starts"),
    *("src", "dst", "cum_sum", "key_cache", "value_cache", "pad_len", "query_starts", "pairs", "cos", "sin"),
    *("source", "target", "old", "new", "lengths", "page_sizes"),
}
THRESHOLDS = [
    *((module, "SMALL_BYTES") for module in (transfer, alibi, pieces, rotary)),
    *((module, "STREAM_BYTES") for module in (transfer, pieces, rotary)),
]


ATTENTION = attention_scenes.OPERATORS["dynamic_cache"]

# Legal calls of more than one operator: (function, arguments by name)


def by_plan(**arguments):
    """Run a plan's two operators for two layers; the second call repeats the first at other addresses."""
    calls = [attention_scenes.Call(ATTENTION, *pair) for pair in arguments["calls"]]
    step = plan_scenes.planned(calls[0])
    return [method(step, call) for method in (plan_scenes.append, plan_scenes.attend) for call in calls]


def plan(rng):
    call = random_calls.attention(rng, "dynamic_cache")
    second = call.copy()
    for name in ("query", "current_key", "current_value"):
        second.inputs[name] = normal(rng, call[name].shape, call[name].dtype)
    return by_plan, {"calls": [[one.inputs, one.attributes] for one in (call, second)]}


def tables_of(function, seq_lens, **more):
    made = function(seq_lens, **more)
    if function is kvkit.ascend.razor_windows:
        return made
    names = ("context_lens", "block_tables", "slot_mapping", "mean_slots", "mean_counts")
    return [getattr(made, name) for name in names]


def tables(rng):
    heads, lengths = int(rng.integers(1, 4)), rng.integers(1, 30, int(rng.integers(0, 6)))
    more = {"block_size": int(rng.integers(1, 9)), "headroom": int(rng.integers(0, 5))}
    operator = rng.integers(3)
    if operator == 0:
        return functools.partial(tables_of, kvkit.ascend.slots), {"seq_lens": lengths, **more}
    if operator == 1:
        more = {"retrieval_heads": [0], "sinks": 2, "recent": 5, "fraction": 3}
        return functools.partial(tables_of, kvkit.ascend.razor_windows), {
            "seq_lens": lengths, "num_head": heads, **more,
        }  # fmt: skip
    spread = np.repeat(lengths, heads)
    wins = rng.integers(0, spread + 1)
    more |= {"num_head": heads, "wins": wins, "compress_type": KVHEAD}
    return functools.partial(tables_of, kvkit.ascend.compressed_slots), {"seq_lens": lengths, **more}


def converted(before, after, source, target, sizes, to_sizes, page_sizes=None, verify=False, **pages):
    """Move a cache to a layout; rows as two tables have them, where there are page sizes."""
    tables = None
    if page_sizes is not None:
        old, new, lengths = pages["old"], pages["new"], pages["lengths"]
        tables = tuple(
            layouts.tables.from_blocks(table, lengths, size)
            for table, size in zip((old, new), page_sizes, strict=True)
        )
    layouts.convert(
        source, before, after, sizes=sizes, to_sizes=to_sizes, tables=tables, out=target, verify=verify
    )
    return []


def conversion(rng):
    before = one(rng, engine_caches.NAMES)
    after = one(rng, [name for name in engine_caches.NAMES
                      if engine_caches.kinds_of(name) == engine_caches.kinds_of(before)])  # fmt: skip
    rows = (16, 32) if "vllm-cpu-amx" in (before, after) else (1, 2, 5, 16)
    sizes = engine_caches.sizes_for(
        before, after, L=int(rng.integers(1, 3)), B=int(rng.integers(1, 4)), N=int(one(rng, rows)),
        H=int(one(rng, (1, 2, 3))), C=int(one(rng, (16, 32))),
    )  # fmt: skip
    dtype = one(rng, (np.uint8, np.uint16, np.float32, np.float64))
    if any("B]" in str(layouts.NAMED[name].layout) for name in (before, after)):
        dtype = np.uint16  # pieces of so many bytes
    data = engine_caches.values(sizes, engine_caches.kinds_of(before)).astype(dtype)
    known = [engine_caches.said(name, sizes) for name in (before, after)]
    tree = {"source": engine_caches.filled(before, sizes, data), "sizes": known[0], "to_sizes": known[1]}
    tree["target"] = engine_caches.filled(after, sizes, np.zeros_like(data))
    tree["verify"] = bool(rng.integers(2))
    if rng.random() < 0.5:
        blocks, size = sizes["B"], sizes["N"]
        lengths = np.array([int(rng.integers(0, blocks * size + 1))], np.int64)
        tree |= {"old": rng.permutation(blocks)[None], "new": rng.permutation(blocks)[None]}
        tree |= {"lengths": lengths, "page_sizes": [size, size]}
    return functools.partial(converted, before, after), tree


KINDS = (
    conversion, conversion, *random_calls.GENERATORS, append, attend, attend, random_calls.rotary, reshape,
    pools, pools, plan, tables,
)  # fmt: skip


def call_of(rng, kind):
    """Return (function, arguments by name) of a legal call."""
    call = kind(rng)
    return call if isinstance(call, tuple) else (call.operator.function("kvkit"), call.inputs)


# Their arguments elsewhere, and changed


def mapped(tree, change):
    """Return the arguments with a changed value for each that is no mapping or list."""
    if isinstance(tree, dict):
        return {name: mapped(value, change) for name, value in tree.items()}
    return [mapped(value, change) for value in tree] if isinstance(tree, list) else change(tree)


def leaves(tree, name=""):
    """Yield (nearest name, value) of each argument."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, key)]
    if isinstance(tree, list):
        return [leaf for value in tree for leaf in leaves(value, name)]
    return [(name, tree)]


def arrays_of(tree):
    return [value for _, value in leaves(tree) if isinstance(value, np.ndarray)]


def changed(rng, value):
    """Return a number, or an array with a number, a little off or far outside; or an array without a row."""
    if not isinstance(value, np.ndarray):
        return value + int(one(rng, NEAR))
    value = value.copy()
    if value.dtype.kind == "i" and value.itemsize > 1 and value.size and rng.random() < 0.7:
        at = int(rng.integers(value.size))
        if rng.random() < 0.5:
            at = int(np.where(value < 2**32, value, -1).argmax())
        far = (-1, INT64_MAX, INT64_MIN, 2**40)
        near = value.flat[at] + one(rng, NEAR) if abs(int(value.flat[at])) < 2**62 else 0
        value.flat[at] = near if rng.random() < 0.7 else one(rng, far)
        return value
    axis = int(rng.integers(value.ndim))
    cut = slice(1, None) if rng.random() < 0.3 else slice(None, -1)
    return np.ascontiguousarray(value[(slice(None),) * axis + (cut,)])


def with_a_change(rng, tree):
    able = [
        (i, name)
        for i, (name, value) in enumerate(leaves(tree))
        if type(value) is int or isinstance(value, np.ndarray)
    ]
    places = [pair for pair in able if pair[1] in PLACES]
    wrong, _ = one(rng, places if places and rng.random() < 0.7 else able)
    number = itertools.count()
    return mapped(tree, lambda value: changed(rng, value) if next(number) == wrong else value)


class Places:
    """Puts arrays where their memory ends, or ordinary copies; both with the same order of axes."""

    def __init__(self, rng, tree):
        count = len(leaves(tree))
        self.ends = rng.choice([END, END, END, BEGIN], count)
        self.seeds = rng.integers(2**32, size=count) * (rng.random(count) < 0.15)

    def put(self, tree, border):
        number = itertools.count()

        def place(value):
            i = next(number)
            if not isinstance(value, np.ndarray):
                return value
            order = np.arange(value.ndim)
            if self.seeds[i]:
                np.random.default_rng(self.seeds[i]).shuffle(order[:-1])
            turned = np.ascontiguousarray(value.transpose(order))
            turned = at_border(turned, self.ends[i]) if border else turned.copy()
            return turned.transpose(np.argsort(order))

        return mapped(tree, place)


def seen(results, tree):
    """Return all bits that a call has made or written."""
    return [(array.shape, array.dtype.str, array.tobytes()) for array in arrays_of([results, tree])]


def run(function, tree, **more):
    """Run a call; return (results or the words of a refusal, all bits)."""
    try:
        results = function(**tree, **more)
    except (KvkitError, MemoryError) as error:
        return str(error), seen([], tree)
    results = list(results) if isinstance(results, tuple) else results
    return results, seen(results, tree)


def check(rng):
    """Run a random call; return its name, its outcome, and how many arrays were at borders."""
    kind = one(rng, KINDS)
    function, tree = call_of(rng, kind)
    if broken := rng.random() < 0.5:
        tree = with_a_change(rng, tree)
    places = Places(rng, tree)
    if kind is conversion:
        places.seeds[:] = 0  # a layout says the order of axes
    results, bits = run(function, places.put(tree, True))
    expected, same = run(function, places.put(tree, False))
    if isinstance(expected, str):
        assert broken, expected
        assert results == expected
        assert bits == same
        assert function is by_plan or bits == seen([], tree)  # of several calls the last may be refused
        return kind.__name__, "refused", 1
    assert not isinstance(results, str), results
    assert bits == same
    if isinstance(function, functools.partial) or "out" not in inspect.signature(function).parameters:
        return kind.__name__, "changed" if broken else "legal", 1
    full = [
        np.full(array.nbytes, 0xFF, np.uint8).view(array.dtype).reshape(array.shape)
        for array in arrays_of(results)
    ]
    out = [at_border(array, one(rng, (END, END, BEGIN))) for array in full]
    _, bits = run(function, places.put(tree, True), out=tuple(out) if isinstance(results, list) else out[0])
    assert bits == same
    return kind.__name__, "changed" if broken else "legal", 2


def fuzz(count, seed, first=0):
    """Run random calls, some with all threads, some that bypass the caches as large ones do."""
    warnings.simplefilter("error")
    usual = [getattr(*where) for where in THRESHOLDS]
    found = collections.Counter()
    for number in range(first, first + count):
        print(number, flush=True)
        rng = np.random.default_rng([seed, number])
        for where, size in zip(THRESHOLDS, usual, strict=True):
            setattr(*where, 0 if rng.random() < 0.2 else size)
        name, outcome, calls = check(rng)
        found.update({name: 1, outcome: 1, "calls at borders": calls})
    return found


if __name__ == "__main__":
    print(json.dumps(fuzz(*map(int, sys.argv[1:]))))
