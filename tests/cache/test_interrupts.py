"""An interrupt, or the end of memory, inside a call: the cache is as before it or after it, or refuses."""

import collections
import copy
import functools
import itertools
import os
import re
import sys

import numpy as np
import pytest
import surroundings
from block_scenes import filled as added
from block_scenes import state
from kind_scenes import CODES, KINDS, append, attend, bits, tokens

import kvkit
from kvkit import KvkitError
from kvkit.cache import (
    BlockAllocator,
    Cache,
    DynamicLayer,
    QuantizedLayer,
    SharedLayer,
    SlidingWindowLayer,
    StaticLayer,
)
from kvkit.cache.stores import allocation
from kvkit.cpu import launches
from kvkit.runtime import arrays, repeats

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files left open
ROOT = os.path.dirname(kvkit.__file__)
CACHE = os.path.join(ROOT, "cache")
REFUSAL = "interrupted call"
ERRORS = KeyboardInterrupt, MemoryError
ONE_LAYER = "update", "mixed"  # updates are of one layer: after an interrupt, layers differ
# What computes and changes nothing: an error inside is one at the line that calls it.
PURE = re.compile(
    r"(positions|joining|compression|heads|padding|requests|quant_spec|view|span|attention).py$"
)


# Kinds that have lost two tokens, so that their rows have positions of their own.
HOLES = "dynamic", "by channel", "shared", "latent", "paged int8"
# Kinds with one layer that is called without its cache, whose calls leave all layers whole or none.
THROUGH_CACHES = "sliding", "static chunked", "shared", "compressed codes", "delta"
ALONE = {kind for kind in KINDS if kind not in THROUGH_CACHES and not kind.startswith("paged")}
MIXED = 6  # lines of a call that are tried with five layers, where each line runs several times


def mixed():
    layers = DynamicLayer(), SlidingWindowLayer(40), QuantizedLayer(CODES, residual_length=4), StaticLayer(80)
    return Cache([*layers, SharedLayer(0)], rope="none")


def rows_of(cache):
    """Return what has the calls that move tokens."""
    return getattr(cache, "rows", cache)


def alone(cache):
    """Return the layer of a cache that is called without it, or else the cache."""
    return cache.layers[0] if getattr(cache, "kind", "") in ALONE else cache


CALLS = {
    "update": lambda cache: append(cache, 3, 50, indexes=False),
    "replace": lambda cache: cache.update(tokens(3, 50), tokens(3, 51), 0, [7, 8, 9]),
    "append": lambda cache: alone(cache).append(alone(few(cache.kind))),
    "append before": lambda cache: alone(cache).append(alone(few(cache.kind)), 7),
    "crop": lambda cache: alone(cache).crop(2 if cache.kind in HOLES else -1),
    "remove": lambda cache: alone(rows_of(cache)).remove(2, 5),
    "remove, close": lambda cache: alone(rows_of(cache)).remove(2, 5, close=True),
    "retain": lambda cache: alone(rows_of(cache)).retain([0, 2, 3, 9, 10, 11]),
    "shift": lambda cache: alone(rows_of(cache)).shift(4, None, 3),
    "reorder": lambda cache: alone(cache).reorder([1, 0]),
    "reorder to more": lambda cache: alone(cache).reorder([1, 0, 0]),
    "repeat": lambda cache: alone(cache).repeat(2),
    "compress": lambda cache: rows_of(cache).compress("knorm", keep=0.5),
    "compress by head": lambda cache: cache.compress("knorm", budget=[[3, 9]] * len(cache)),
    "reset": lambda cache: alone(cache).reset(),
    "reserve": lambda cache: alone(cache).reserve(70),
    "record": lambda cache: cache.activate_past_recording(),
    "offload": lambda cache: cache.offload("/tmp", only_non_sliding=False),
}


READS = {
    "attend": lambda cache: attend_all(cache),
    "keys and values": lambda cache: [(np.array(k), np.array(v)) for k, v in cache],
    "scores": lambda cache: rows_of(cache).compress(unscored, keep=0.5),
    "save": lambda cache: cache.save(os.devnull),
    "can": lambda cache: rows_of(cache).can("crop", -1),
    "text": lambda cache: repr((cache, [(layer, layer.positions) for layer in cache.layers])),
    "sizes": lambda cache: [(layer.get_seq_length(), layer.get_mask_sizes(1)) for layer in cache.layers],
    "copy": copy.deepcopy,
}


# One of so many lines is tried, fewer of calls that only read, or whose lines another call runs too.
STRIDES = dict.fromkeys(CALLS, 5) | dict.fromkeys(READS, 20)
STRIDES |= dict.fromkeys(("remove, close", "shift", "retain"), 15)
STRIDES |= dict.fromkeys(("compress", "append before", "reorder to more"), 10)


def unscored(layer, keys, values, queries):
    raise ReadError


class ReadError(Exception):
    """Ends a call that has only read."""


def append_all(cache, count, seed):
    """Append to every layer that has rows of its own, and attend."""
    if len(cache) == 1 or isinstance(cache.layers[1], SharedLayer):
        return append(cache, count, seed)
    batch = cache.layers[0].batch_size or 2
    new = np.random.default_rng(seed).standard_normal((batch, 2, count, 16)).astype(np.float32)
    for i in range(len(cache) - 1):
        cache.update(new, new, i)
    return attend_all(cache)


def attend_all(cache):
    if len(cache) == 1 or isinstance(cache.layers[1], SharedLayer):
        return attend(cache)
    query = (
        np.random.default_rng(7).standard_normal((cache.layers[0].batch_size, 4, 1, 16)).astype(np.float32)
    )
    return [cache.attend(query, i) for i in range(len(cache))]


@functools.cache
def made(kind):
    cache = (KINDS | {"mixed": mixed})[kind]()
    cache.kind = kind
    for seed, count in enumerate((9, 2, 1)):
        append_all(cache, count, 10 * seed)
    if kind in HOLES:
        rows_of(cache).remove(3, 5)
    return cache


def filled(kind, files):
    cache = copy.deepcopy(made(kind))
    if files:
        cache.offload("/tmp", only_non_sliding=False)
    return cache


@functools.cache
def few(kind):
    """Return another cache of a kind with four tokens, which is made before lines are counted."""
    cache = (KINDS | {"mixed": mixed})[kind]()
    cache.kind = kind
    append_all(cache, 4, 70)
    return cache


def attended(cache):
    """Return the bits of attention, or why windows are no longer there after a crop."""
    try:
        return bits(attend_all(cache))
    except KvkitError as error:
        if REFUSAL in str(error):
            raise
        return str(error)


def outcome(cache):
    """Return all that one sees of a cache, before and after more tokens."""
    layers = cache.layers
    seen = [
        [*map(str, (one.get_seq_length(), one.batch_size, one.positions, one.rope_shifts))] for one in layers
    ]
    empty = not layers[0].batch_size or not layers[0].get_seq_length()
    before = [] if empty else attended(cache)
    stored = [bits(map(np.asarray, one._stored())) for one in layers if one._has_rows and not empty]
    return seen, before, stored, bits(append_all(cache, 2, 90)), bits(append_all(cache, 1, 91))


def outcome_or_refusal(cache):
    try:
        return outcome(cache)
    except KvkitError as refusal:
        return str(refusal)


@functools.cache
def in_package(path):
    return path.startswith(ROOT) and not path.endswith("/locks.py")


@functools.cache
def changes(path):
    return path.startswith(CACHE) and not PURE.search(path)


def interrupted(call, cache, line=0, error=None, counts=changes):
    """Raise an error at a line, if a call comes so far; return the lines of files that count."""
    lines = []

    def at_line(frame, event, argument):
        if event == "line":
            lines.append((frame.f_code, frame.f_lineno))
            if len(lines) == line:
                raise error
        return at_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: at_line if counts(frame.f_code.co_filename) else None)
    try:
        call(cache)
    except (*ERRORS, ReadError):
        pass
    finally:
        sys.settrace(before)
        locks = (each._lock for each in (cache, *getattr(cache, "layers", ())) if hasattr(each, "_lock"))
        for lock in (launches.running, repeats.changing, *locks):
            while lock.is_owned():  # a trace can raise between the end of a block and its lock's release
                lock.release()
    return lines


@functools.cache
def cost(kind):
    """Return how many lines it takes to look at a cache of a kind."""
    return len(interrupted(outcome, filled(kind, False)))


def lines_of(call):
    """Return {kind: numbers of lines in the call}, so that source lines of kvkit/cache are tried once.

    Lines that few kinds run are given first, each to the kind that has run the fewest lines for it, to layers
    that are called alone if they run it. They are tried when they run for the last time: then loops are done
    in part.
    """
    last, kinds, tried, work = {}, collections.defaultdict(list), {}, {}
    for kind in EVERY:
        if legal(kind, call) is not None and (call, kind) != ONE_LAYER:
            lines = interrupted((CALLS | READS)[call], filled(kind, False))
            last[kind] = {place: i for i, place in enumerate(lines, 1)}
            for place in last[kind]:
                kinds[place].append(kind)
            tried[kind], work[kind] = [], 0
    for place in sorted(kinds, key=lambda place: len(kinds[place]))[:: STRIDES[call]]:
        kind = min(ALONE.intersection(kinds[place]) or kinds[place], key=lambda kind: (work[kind], kind))
        tried[kind].append(last[kind][place])
        work[kind] += cost(kind) + 2 * max(last[kind].values())
    if "mixed" in tried:
        places = sorted(last["mixed"].values())
        tried["mixed"] += places[:: -(-len(places) // MIXED)]
    return tried


@functools.cache
def unchanged(kind):
    """Return the outcome of a cache that no call has changed."""
    return outcome(filled(kind, False))


@functools.cache
def legal(kind, call):
    """Return the outcomes before and after a call, or before one that reads; None where it is refused."""
    after = filled(kind, False)
    try:
        (CALLS | READS)[call](after)
    except ReadError:
        pass
    except (KvkitError, RuntimeError, TypeError, AttributeError, ValueError):
        return None
    return (unchanged(kind), outcome(after)) if call in CALLS else (unchanged(kind),)


def check_lines(kind, call, files, error, numbers, counts=changes):
    """Raise at lines of a call: the cache is old or new or refused; after a call that reads it is old."""
    outcomes = legal(kind, call)
    for line in numbers:
        cache = filled(kind, files)
        if len(interrupted((CALLS | READS)[call], cache, line, error, counts)) < line:
            break
        found = outcome_or_refusal(cache)
        if isinstance(found, str):
            assert REFUSAL in found, (kind, line)
            assert call in CALLS, (kind, line)
            check_refused(cache, line)
        else:
            assert found in outcomes, (kind, line)
        if files:
            cache.close()
    assert outcome(filled(kind, False)) == outcomes[0]


def check_refused(cache, line):
    """Check that every later call is refused, and that a reset cache is as a new one."""
    lost = [layer for layer in cache.layers if layer._of is None]
    calls = (lambda layer: layer.get_seq_length(), lambda layer: layer.keys, lambda layer: layer.crop(-1))
    for call, layer in itertools.product(calls, () if hasattr(cache, "rows") else lost):
        if layer._has_rows:
            with pytest.raises(KvkitError, match=REFUSAL):
                call(layer)
    with pytest.raises(KvkitError, match=REFUSAL):
        append_all(cache, 1, 0)
    with pytest.raises(KvkitError, match=REFUSAL):
        cache.save("/tmp/never.npz")
    if hasattr(cache, "rows"):
        with pytest.raises(KvkitError, match=REFUSAL):
            cache.reset()
        return
    cache.reset()
    append_all(cache, 4, 0)
    assert {layer.get_seq_length() for layer in cache.layers} == {4}, line


EVERY = [*KINDS, "mixed"]


@pytest.mark.parametrize("call", CALLS | READS)
def test_an_error_at_some_lines_of_a_call_in_one_kind(call):
    for i, (kind, numbers) in enumerate(lines_of(call).items()):
        check_lines(kind, call, i % 3 == 0, ERRORS[i % 2], numbers)


# Layers in memory are interrupted, those in files find no memory; thorough runs try the other pairs too.
PAIRS = [(False, KeyboardInterrupt), (True, MemoryError)]
if surroundings.thorough:
    PAIRS += [(False, MemoryError), (True, KeyboardInterrupt)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "files", "error"),
    [*((call, *pair) for call in CALLS for pair in PAIRS), *((call, *PAIRS[0]) for call in READS)],
)
@pytest.mark.parametrize("kind", EVERY)
def test_an_error_at_every_line_of_a_call(kind, call, files, error):
    if legal(kind, call) is None or (call, kind) == ONE_LAYER:
        pytest.skip("refused")
    check_lines(kind, call, files, error, itertools.count(1), in_package)


def recording():
    """Return a layer of codes that keeps drafts as floats until it stops recording."""
    layer = filled("by channel", False).layers[0]
    layer.activate_past_recording()
    layer.update(tokens(9, 60), tokens(9, 61))
    return layer


OF_ONE_LAYER = {
    "stop recording": (recording, lambda layer: layer._stop_past_recording()),
    "shift states": (lambda: filled("state", False).layers[0], lambda layer: layer.shift(9, None, 3)),
}


def arrays_of(layer):
    return layer.get_seq_length(), {name: array.tobytes() for name, array in layer._arrays().items()}


@pytest.mark.parametrize("case", OF_ONE_LAYER)
def test_an_error_at_each_line_of_a_call_of_a_layer_of_its_own(case):
    """What a saved file would hold is as before the call, or after it."""
    make, call = OF_ONE_LAYER[case]
    after = make()
    count, outcomes = len(interrupted(call, after)), [arrays_of(make()), arrays_of(after)]
    assert outcomes[0] != outcomes[1]
    for line in range(1, count + 1):
        layer = make()
        interrupted(call, layer, line, KeyboardInterrupt)
        assert arrays_of(layer) in outcomes, line


def test_a_layer_that_finds_no_memory_elsewhere_has_its_new_arrays_where_it_had_them():
    layer, nowhere = filled("dynamic", False).layers[0], Failing()
    nowhere.left = 0
    before = layer.allocate
    with pytest.raises(MemoryError):
        layer._lie_in(nowhere)
    assert layer.allocate is before


def test_a_pool_of_heads_that_finds_no_memory_to_shrink_stays_as_it_is(monkeypatch):
    """The tokens have gone all the same."""
    one, other = (filled("ragged", False) for _ in range(2))
    for cache in one, other:
        append(cache, 200, 50)
    restores = iter([BlockAllocator._restore, full])  # a crop grows its pool first
    one.layers[0].crop(20)
    with monkeypatch.context() as patch:
        patch.setattr(BlockAllocator, "_restore", lambda *how, **more: next(restores)(*how, **more))
        other.layers[0].crop(20)
    assert not list(restores)
    assert one.layers[0].blocks.num_blocks < other.layers[0].blocks.num_blocks
    assert outcome(one) == outcome(other)


def full(*how, **more):
    raise MemoryError


def step(blocks, end):
    """Begin a step of two sequences that share a block, and end it."""
    end(blocks.begin_step([(blocks.seq, 3), (blocks.other, 1)]))


BLOCK_CALLS = {
    "add": lambda blocks: blocks.add(range(10)),
    "extend": lambda blocks: blocks.extend(blocks.seq, [10, 11]),
    "fork": lambda blocks: blocks.fork(blocks.seq),
    "fork a part": lambda blocks: blocks.fork(blocks.seq, 2, 7),
    "crop": lambda blocks: blocks.crop(blocks.seq, 3),
    "free": lambda blocks: blocks.free(blocks.other),
    "step": lambda blocks: step(blocks, lambda step: step.commit()),
    "abandon": lambda blocks: step(blocks, lambda step: step.abandon()),
}


@functools.cache
def two_sequences():
    blocks = BlockAllocator(9, 4, copy_rows=lambda sources, targets: None)
    blocks.seq = added(blocks, range(10))
    blocks.other = blocks.fork(blocks.seq)
    return blocks


@pytest.mark.parametrize("call", BLOCK_CALLS)
def test_an_error_at_each_line_of_a_call_of_blocks(call):
    """Blocks are as before the call or after it, or are refused."""
    after = copy.deepcopy(two_sequences())
    lines = interrupted(BLOCK_CALLS[call], after, counts=in_package)
    outcomes = [state(blocks, blocks.seq, blocks.other) for blocks in (two_sequences(), after)]
    for line in range(1, len(lines) + 1):
        blocks = copy.deepcopy(two_sequences())
        interrupted(BLOCK_CALLS[call], blocks, line, KeyboardInterrupt, in_package)
        if blocks._guard.interrupted:
            for later in BLOCK_CALLS.values():
                with pytest.raises(KvkitError, match=REFUSAL):
                    later(blocks)
            continue
        if blocks.open_step:
            blocks.open_step.abandon()
        assert state(blocks, blocks.seq, blocks.other) in outcomes, line


class Failing:
    """Allocates arrays in memory until it has none left."""

    def __init__(self):
        self.left = None

    def __call__(self, shape, dtype):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise MemoryError
        return arrays.zeros(shape, dtype)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if not kind.startswith("paged")), "mixed"])
def test_an_allocation_that_fails_leaves_every_layer_as_it_was(kind, call, monkeypatch):
    outcomes = legal(kind, call)
    if outcomes is None:
        pytest.skip("refused")
    for left in itertools.count():
        cache, allocate = filled(kind, False), Failing()
        for layer in cache.layers:
            layer._lie_in(allocate)
        monkeypatch.setattr(allocation, "InFiles", lambda folder, allocate=allocate: allocate)
        allocate.folder, allocate.left = None, left
        try:
            CALLS[call](cache)
        except MemoryError:
            allocate.left = None
            found = outcome(cache)
            if (call, kind) != ONE_LAYER:
                assert found == outcomes[0] or (call.startswith("compress") and found == outcomes[1])
        else:
            allocate.left = None
            break
    assert outcome(cache) == outcomes[1]
