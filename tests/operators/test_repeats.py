"""Calls that run again without Python: each gives the bits of a first call, whatever is new in its arguments.

`again` counts the calls that the compiled function ran, so that no test passes because nothing is repeated.
"""

import copy
import gc
import multiprocessing
import os
import pickle
import threading
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import kvkit
from kvkit.calls import prepared
from kvkit.calls.prepared import PreparedCall, Refit, forget_all
from kvkit.interop import numpy_to_tensor
from kvkit.runtime import locks, repeats

pytestmark = pytest.mark.cpu
B, PAST, HEADS, QUERY_HEADS, DIM, PAGE = 3, 4, 2, 4, 32, 16
ROWS = PAST + 1
SIZES = {"num_heads": QUERY_HEADS, "num_kv_heads": HEADS, "head_dim": DIM}


@pytest.fixture(autouse=True)
def fresh():
    forget_all()
    yield
    forget_all()


@pytest.fixture
def again(monkeypatch):
    """Return a list that gets an entry for each call that the compiled function has run."""
    ran, own = [], repeats.Repeats.again

    def counted(self, args, keywords):
        answer = own(self, args, keywords)
        if answer is not None:
            ran.append(1)
        return answer

    monkeypatch.setattr(repeats.Repeats, "again", counted)
    return ran


def floats(rng, *shape, dtype=np.float16):
    return rng.standard_normal(shape, np.float32).astype(dtype)


def index(length=ROWS):
    """Return the index tensors of sequences of one length, one new token each."""
    counts = np.arange(B + 1)
    return {
        "seqstarts": counts, "kvstarts": counts * length, "cachestarts": counts[:-1] * 20,
        "start_pos": np.full(B, length - 1),
    }  # fmt: skip


def arguments(rng, dtype=np.float16):
    """Return the arrays of all calls below, by name."""

    def of(*shape):
        return floats(rng, *shape, dtype=dtype)

    return {
        "query": of(B, QUERY_HEADS, DIM), "key": of(B, HEADS, DIM), "value": of(B, HEADS, DIM),
        "cache": of(2, 2, HEADS, 80, DIM), "own": of(B, 2, 2, 20, HEADS, DIM),
        "pools": floats(rng, 2, 5, PAGE, HEADS, DIM),
    }  # fmt: skip


def planned(a, plan, **more):
    options = {"cache_layout": 3, "num_layer": 2} | SIZES | more
    return plan.multi_head_cache_attention(a["query"], a["key"], a["value"], a["cache"], **options)


def packed(a, tensors, **more):
    options = {"cache_layout": 3, "num_layer": 2, **SIZES} | more
    options |= {"decoding_batches": 0, "max_seqlen": None, "max_kvlen": None}
    call = kvkit.dynamic_batching.multi_head_cache_attention
    return call(a["query"], a["key"], a["value"], cache=a["cache"], **tensors, **options)


def static(a, start=PAST, **more):
    new = [a[name][:, None] for name in ("query", "key", "value")]
    return kvkit.multi_head_cache_attention(*new, start, a["own"], num_layer=2, **SIZES, **more)


def loaded(a, tensors, **more):
    call = kvkit.dynamic_batching.key_value_cache
    options = {"max_seqlen": None, "max_kvlen": None, "cache_layout": 3, "num_layer": 2} | more
    return call(a["key"], a["value"], cache=a["cache"], **tensors, **options)


def keys(a, **more):
    new = a["query"][:, None], a["own"][:, 0, 0], a["own"][:, 0, 1]
    return kvkit.multi_head_attention(*new, **SIZES, **more)


def paged(a, tables, lens, **more):
    return kvkit.paged_attention(a["query"], *a["pools"], tables, lens, **more)


def pages():
    return np.array([[0, 3], [1, -1], [2, 4]]), np.array([18, 5, 17])


def paged_planned(a, plan, **more):
    plan.paged_append(a["key"], a["value"], *a["pools"])
    return plan.paged_attention(a["query"], *a["pools"], **more)


def new_plan(length=ROWS):
    return kvkit.dynamic_batching.plan(**index(length))


def new_pages():
    return kvkit.paged_plan(*pages(), page_size=PAGE)


CALLS = {
    "planned": (planned, lambda: (new_plan(),)),
    "packed": (packed, lambda: (index(),)),
    "static": (static, lambda: ()),
    "load": (loaded, lambda: (index(),)),
    "keys": (keys, lambda: ()),
    "paged": (paged, pages),
    "planned pages": (paged_planned, lambda: (new_pages(),)),
}  # fmt: skip
every_call = pytest.mark.parametrize("name", CALLS)


def bits(result):
    return [each.tobytes() for each in (result if isinstance(result, tuple) else (result,))]


def check(call, a, *given, **more):
    """Run a call, and compare its results and all arrays with those of a first call of copies."""
    other = copy.deepcopy(a)
    result = call(a, *given, **more)
    kept = [repeats.Repeats.again, repeats.Repeats.record]
    try:
        repeats.Repeats.again = lambda self, args, keywords: None
        repeats.Repeats.record = lambda self, function, names, args, keywords: function(*args, **keywords)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepared.PreparedCall, "run", lambda *arguments: False)
            assert bits(result) == bits(call(other, *given, **more))
    finally:
        repeats.Repeats.again, repeats.Repeats.record = kept
    assert [array.tobytes() for array in a.values()] == [array.tobytes() for array in other.values()]


def learn(call, a, *given, **more):
    """Make a call until it is repeated."""
    for _ in range(4):
        check(call, a, *given, **more)


@every_call
def test_calls_of_one_form(name, rng, again):
    """Other arrays, and the same objects with other numbers in them."""
    (call, make), a = CALLS[name], arguments(rng)
    given = make()
    learn(call, a, *given)
    assert again
    again.clear()
    for _ in range(3):
        check(call, arguments(rng), *given)
        for array in a.values():
            array[...] = rng.standard_normal(array.shape)
        check(call, a, *given)
    assert len(again) >= 6


@every_call
@pytest.mark.parametrize("what", ["dtype", "bfloat16", "strides", "shape", "read-only", "subclass"])
def test_another_form(name, what, rng, again):
    """Each array in turn; what is refused is refused in the words of a first call, and nothing is written."""
    (call, make), a = CALLS[name], arguments(rng)
    given = make()
    learn(call, a, *given)
    for key in a:
        others = arguments(rng)
        others[key] = changed(others[key], what)
        copies = {each: copy.deepcopy(array) for each, array in others.items()}
        if what == "strides":  # of which a copy has others
            copies[key] = changed(copy.deepcopy(a[key]), what)
            copies[key][...] = others[key]
        if what == "read-only":
            copies[key].flags.writeable = False
        before = [array.tobytes() for array in others.values()]
        known = outcome(call, others, *given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepared.PreparedCall, "run", lambda *arguments: False)
            patch.setattr(repeats.Repeats, "again", lambda *arguments: None)
            assert outcome(call, copies, *given) == known
        if isinstance(known, str) and name != "planned pages":  # which appends first
            assert before == [array.tobytes() for array in others.values()]
        check(call, a, *given)


def outcome(call, a, *given, **more):
    """Return the bits of a call's results and arrays, or its error."""
    try:
        result = bits(call(a, *given, **more))
    except kvkit.KvkitError as error:
        return str(error)
    return result, [np.asarray(array).tobytes() for array in a.values()]


def changed(array, what):
    if what == "dtype":
        return array.astype(np.float32)
    if what == "bfloat16":
        return array.astype(ml_dtypes.bfloat16)
    if what == "strides":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., : array.shape[-1]] = array
        return wide[..., : array.shape[-1]]
    if what == "shape":
        return array[..., : DIM // 2].copy()
    if what == "subclass":
        return np.ma.masked_array(array)
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("ignore:Setting the .* on a NumPy array:DeprecationWarning")
def test_arrays_that_change_their_form_in_place(rng, again):
    a, plan = arguments(rng), new_plan()
    learn(planned, a, plan)
    before, right = a["cache"].copy(), a["query"]
    wrong = right.copy()
    wrong.dtype = np.int16
    for query in (wrong, right.reshape(B, DIM, QUERY_HEADS), right[::-1][::-1].reshape(-1)):
        again.clear()
        with pytest.raises(kvkit.KvkitError, match="query"):
            planned(a | {"query": query}, plan)
        assert not again
        np.testing.assert_array_equal(a["cache"], before)
    turned = right.copy()
    turned.shape = B, QUERY_HEADS * DIM
    turned.shape = B, QUERY_HEADS, DIM
    check(planned, a | {"query": turned}, plan)


def test_memory_that_another_array_has_had(rng, again):
    """Arrays are compared when they come, not remembered by their addresses."""
    plan = new_plan()
    for kind in (np.float16, np.float32, np.float16, ml_dtypes.bfloat16) * 3:
        a = arguments(rng, kind)
        learn(planned, a, plan)
        del a
        gc.collect()
    assert again


def test_attributes(rng, again):
    """True is not 1, 2**40 is not a small integer, and numbers of equal value are one attribute."""
    a, plan = arguments(rng), new_plan()
    learn(planned, a, plan, softmax_scale=0.125, softcap=3.0)
    again.clear()
    check(planned, a, plan, softmax_scale=float("0.125"), softcap=float("3"), layer_idx=int("0"))
    planned(a, plan, softmax_scale=float("0.125"), softcap=float("3"))
    assert again
    again.clear()
    for more in (
        {"softmax_scale": 0.25, "softcap": 3.0}, {"softcap": 3.0}, {"softmax_scale": 0.125, "softcap": 2.0},
        {"softmax_scale": 0.125, "softcap": 3.0, "layer_idx": 1}, {"window": (2, -1)}, {"is_causal": False},
    ):  # fmt: skip
        check(planned, a, plan, **more)
    assert not again
    learn(planned, a, plan)
    again.clear()
    for more in ({"layer_idx": False}, {"num_heads": 2**40}, {"layer_idx": -1}, {"quant_group": 8.0}):
        known = outcome(planned, copy.deepcopy(a), plan, **more)
        assert known == outcome(planned, copy.deepcopy(a), new_plan(), **more)
    assert not again


def test_outputs(rng, again):
    a, plan = arguments(rng), new_plan()
    out = np.empty_like(a["query"])
    learn(planned, a, plan, out=out)
    again.clear()
    assert planned(a, plan, out=out) is out
    other = np.empty_like(out)
    assert planned(a, plan, out=other) is other
    assert len(again) == 2
    np.testing.assert_array_equal(out, other)
    inside = a["cache"].reshape(-1)[: out.size].reshape(out.shape)
    read_only = np.empty_like(out)
    read_only.flags.writeable = False
    for wrong in (a["query"], inside, read_only):
        with pytest.raises(kvkit.KvkitError, match="out"):
            planned(a, plan, out=wrong)
    assert len(again) == 2


def test_arguments_that_are_returned(rng, again):
    """An append returns both its pools in any order of calls, None for one that it does not have."""
    a, plan = arguments(rng), new_pages()
    names, pairs = ("key", "value", "key_cache", "value_cache"), {}
    for has in (True, True), (True, False), (False, True):
        arrays = a["key"], a["value"], *a["pools"]
        pairs[has] = [array if has[i % 2] else None for i, array in enumerate(arrays)]
    for i in rng.integers(len(pairs), size=60):
        given, positional = [*pairs.values()][i], int(rng.integers(len(names) + 1))
        more = dict(zip(names[positional:], given[positional:], strict=True))
        key_cache, value_cache = plan.paged_append(*given[:positional], **more)
        assert key_cache is given[2]
        assert value_cache is given[3]
    assert again


def test_a_call_while_another_is_remembered(rng, again):
    """From a signal handler or a finalizer: it is computed, and not remembered."""
    a, plan = arguments(rng), new_plan()
    with repeats.changing:
        learn(planned, a, plan)
    assert not again
    learn(planned, a, plan)
    assert again


def test_one_array_for_two(rng, again):
    """A call with one array as key and value is another than one with two."""
    a, plan = arguments(rng), new_plan()
    a["value"] = a["key"]
    learn(planned, a, plan)
    again.clear()
    check(planned, arguments(rng), plan)
    assert not again
    learn(planned, arguments(rng), plan)
    a["value"] = a["key"]
    check(planned, a, plan)


@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_index_tensors_are_read_in_each_call(kind, rng, again):
    """They change in place, one by one; a step that grows is that of the next token."""
    a, tensors = arguments(rng), index()
    tensors = {name: tensor.astype(kind) for name, tensor in tensors.items()}
    learn(packed, a, tensors)
    for length in (6, 7, 19, 5, 8):
        for name, tensor in index(length).items():
            tensors[name][...] = tensor
        check(packed, a, tensors)
        check(packed, a, tensors, layer_idx=1)
        check(packed, a, tensors)
    assert again
    for name in ("kvstarts", "start_pos", "cachestarts"):
        before = tensors[name].copy()
        tensors[name][-1] += 1 if name != "cachestarts" else 10**6
        with pytest.raises(kvkit.KvkitError):
            packed(a, tensors)
        tensors[name][...] = before
        check(packed, a, tensors)


def test_layers_of_a_token(rng, again):
    """Every layer of a later token repeats the call of the token before."""
    a, tensors = arguments(rng), index(5)
    for length in range(5, 16):
        tensors = index(length)
        again.clear()
        for layer in (0, 1):
            check(packed, a, tensors, layer_idx=layer)
            check(static, a, length - 1, layer_idx=layer)
    assert len(again) >= 2


def test_starts_of_sequences_of_one_length(rng, again):
    a = arguments(rng)
    learn(static, a, 4)
    for start in (4, 5, 5, 0, 0, 4, 17, 17):
        check(static, a, start)
    assert again
    for wrong in (-1, 19.0, 20, True, 2**70):
        with pytest.raises(kvkit.KvkitError, match="start_pos"):
            static(a, wrong)
    check(static, a, 17)


def test_a_smaller_cache(rng, again):
    a, plan = arguments(rng), new_plan()
    learn(planned, a, plan)
    small = floats(rng, 2, 2, HEADS, 44, DIM)
    with pytest.raises(kvkit.KvkitError, match="cache"):
        planned(a | {"cache": small}, plan)
    check(planned, a | {"cache": floats(rng, 2, 2, HEADS, 45, DIM)}, plan)


def test_tables_of_pages(rng, again):
    a, (tables, lens) = arguments(rng), pages()
    learn(paged, a, tables, lens)
    again.clear()
    for change in ((0, 1, 4), (2, 0, 1), (1, 0, 2)):
        tables[change[:2]] = change[2]
        check(paged, a, tables, lens)
    lens[1] = 9
    check(paged, a, tables, lens)
    assert not again
    tables[0, 0] = 5
    with pytest.raises(kvkit.KvkitError, match="block_tables"):
        paged(a, tables, lens)


def test_threads(rng, again):
    """Threads that call with arrays of their own get the results of their own."""
    plan, tensors = new_plan(), index()
    given = [arguments(rng) for _ in range(6)]
    expected = [(bits(planned(a, plan)), bits(packed(a, tensors)), bits(static(a))) for a in given]
    wrong = []

    def run(a, right):
        for _ in range(60):
            if (bits(planned(a, plan)), bits(packed(a, tensors)), bits(static(a))) != right:
                wrong.append(1)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(given, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert again
    assert not wrong


def test_a_call_inside_another_is_refused(rng):
    """From a signal handler or a finalizer, while a launch runs."""
    a, plan = arguments(rng), new_plan()
    learn(planned, a, plan)
    with kvkit.cpu.launches.running:
        locks.BUSY[0] = 1
        with pytest.raises(kvkit.KvkitError, match="one call at a time"):
            planned(a, plan)
    locks.BUSY[0] = 0
    check(planned, a, plan)


def test_a_call_that_ends_early_leaves_no_kernel_busy():
    """Else no call would run again without Python until another one has run to its end."""
    attention = SimpleNamespace(params=np.zeros(1), owners={}, reschedule=lambda: False)
    assert not PreparedCall([attention], {}, attention=attention).run_at([], Refit(version=1))
    assert not locks.BUSY[0]
    with pytest.raises(ZeroDivisionError):
        kvkit.cpu.launches.start(SimpleNamespace(run=lambda: 1 // 0))
    assert not locks.BUSY[0]


def forked(queue, plan, a):
    try:
        planned(a, plan)
    except kvkit.KvkitError as error:
        queue.put(str(error))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process(rng, again):
    a, plan = arguments(rng), new_plan()
    learn(planned, a, plan)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=forked, args=(queue, plan, a))
    process.start()
    process.join(60)
    assert "forked after kvkit was used" in queue.get()


def test_copies_repeat_nothing(rng, again):
    a, plan = arguments(rng), new_plan()
    learn(planned, a, plan)
    again.clear()
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        check(planned, a, other)
    assert not again


def test_tensors_of_torch(rng, again):
    torch = pytest.importorskip("torch")
    a, plan = arguments(rng), new_plan()
    tensors = {name: numpy_to_tensor(array.copy()) for name, array in a.items() if name != "pools"}
    for _ in range(6):
        result = planned(tensors, plan)
        assert isinstance(result, torch.Tensor)
        assert result.numpy().tobytes() == planned(a, plan).tobytes()
    assert len(again) > 2
    with pytest.raises(kvkit.KvkitError):
        planned(tensors | {"query": tensors["query"].float()}, plan)


def test_more_calls_than_are_remembered(rng, again, monkeypatch):
    monkeypatch.setattr(repeats, "MOST_CALLS", 3)
    a, plan = arguments(rng), new_plan()
    for _ in range(3):
        for cap in (1.0, 2.0, 3.0, 4.0, 5.0):
            learn(planned, a, plan, softcap=cap)
    assert again


def test_objects_lie_as_they_are_read():
    """On an interpreter where this fails, calls take the way through Python."""
    assert repeats.layouts_fit()
    assert repeats.small_int(1000) != repeats.small_int(-1000)


def test_without_known_layouts(rng, again, monkeypatch):
    monkeypatch.setattr(repeats, "layouts_fit", lambda: False)
    a, plan = arguments(rng), new_plan()
    learn(planned, a, plan)
    assert not again
