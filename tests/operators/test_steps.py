"""Calls that bring their own index tensors, of one form: each is checked, and nothing is left of the last."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from surroundings import in_threads

import kvkit
from kvkit.calls import positions, prepared, steps
from kvkit.calls.prepared import forget_all

pytestmark = pytest.mark.cpu
ROWS, HEADS, DIM = 4096, 2, 16
SIZES = {"num_heads": 2 * HEADS, "num_kv_heads": HEADS, "head_dim": DIM, "cache_layout": 3}


@pytest.fixture(autouse=True)
def none_kept():
    steps.planned_steps.clear()


def tensors(lengths, tokens=(2, 1), spread=2000):
    """Return index tensors of two sequences with such contexts, of which `tokens` are new."""
    starts = [np.cumsum([0, *counts]) for counts in (tokens, lengths)]
    return {
        "seqstarts": starts[0],
        "kvstarts": starts[1],
        "cachestarts": np.array([0, spread]),
        "start_pos": np.subtract(lengths, tokens),
    }


def arrays(rng):
    return {
        "query": rng.standard_normal((3, 2 * HEADS, DIM), np.float32),
        "current_key": rng.standard_normal((3, HEADS, DIM), np.float32),
        "current_value": rng.standard_normal((3, HEADS, DIM), np.float32),
    }


def attend(new, cache, index):
    given = {**new, **index, "cache": cache, "decoding_batches": 0, "max_seqlen": None, "max_kvlen": None}
    return kvkit.dynamic_batching.multi_head_cache_attention(**given, **SIZES)


def load(new, cache, index):
    given = {name: new[name] for name in ("current_key", "current_value")}
    given |= {**index, "cache": cache, "max_seqlen": None, "max_kvlen": None, "cache_layout": 3}
    return kvkit.dynamic_batching.key_value_cache(**given)


def anew(operator, *given):
    """Run an operator as if it had not been called before."""
    kept = dict(steps.planned_steps)
    steps.planned_steps.clear()
    try:
        return operator(*given)
    finally:
        steps.planned_steps.update(kept)


@pytest.mark.parametrize("operator", [attend, load])
def test_steps_of_one_form(operator, rng, monkeypatch):
    """Contexts grow, shrink and are shared out among more threads or fewer; tensors are int64 or int32."""
    cache = rng.standard_normal((1, 2, HEADS, ROWS, DIM), np.float32)
    for lengths in ((2, 1), (3, 2), (2, 1), (1900, 700), (1901, 701), (2, 1), (40, 2000), (41, 2000)):
        for kind in (np.int64, np.int32):
            index, new, other = tensors(lengths), arrays(rng), cache.copy()
            index = {name: tensor.astype(kind) for name, tensor in index.items()}
            for _ in range(2):
                result = operator(new, cache, index)
                assert_array_equal(result, anew(operator, new, other, index))
                assert_array_equal(cache, other)
            assert len(steps.planned_steps) <= 2
            for tensor in index.values():
                tensor[...] = -1  # its caller's, who may do so


def test_a_call_of_a_known_form_is_not_prepared(rng, monkeypatch):
    cache, new = np.zeros((1, 2, HEADS, ROWS, DIM), np.float32), arrays(rng)
    attend(new, cache, tensors((5, 4)))
    monkeypatch.setattr(steps, "checked_cache_attention", None)
    for length in (6, 7, 8):
        attend(arrays(rng), cache, tensors((length, 5)))


BROKEN = {
    "a length": {"start_pos": np.array([1, 4])},
    "a start": {"kvstarts": np.array([1, 5, 9])},
    "the tokens": {"seqstarts": np.array([0, 2, 4]), "kvstarts": np.array([0, 5, 10])},
    "a row below 0": {"cachestarts": np.array([-1, 2000])},
    "rows behind the cache": {"cachestarts": np.array([0, ROWS - 3])},
    "a row twice": {"cachestarts": np.array([0, 2])},
    "an order": {"seqstarts": np.array([0, 4, 3]), "start_pos": np.array([1, 5])},
    "a dtype": {"start_pos": np.array([3.0, 3.0])},
    "a length of a tensor": {"start_pos": np.array([3])},
}


@pytest.mark.parametrize("operator", [attend, load])
@pytest.mark.parametrize("broken", BROKEN)
def test_broken_steps_of_a_known_form(operator, broken, rng):
    """They are refused in the words of a first call, and write nothing; the next call is right again."""
    cache, new, index = np.zeros((1, 2, HEADS, ROWS, DIM), np.float32), arrays(rng), tensors((5, 4))
    right = operator(new, cache, index)
    before = cache.copy()
    with pytest.raises(kvkit.KvkitError) as first:
        anew(operator, new, cache, index | BROKEN[broken])
    with pytest.raises(kvkit.KvkitError) as known:
        operator(new, cache, index | BROKEN[broken])
    assert str(known.value) == str(first.value)
    assert_array_equal(cache, before)
    assert_array_equal(operator(new, cache, index), right)


@pytest.mark.parametrize("operator", [attend, load])
def test_tensors_that_change_during_a_call_are_another_call(operator, rng, monkeypatch):
    """Another thread may change them once they have been checked."""
    new, cache = arrays(rng), rng.standard_normal((1, 2, HEADS, ROWS, DIM), np.float32)
    index, check = tensors((9, 7)), steps.packed_in_cache

    def change(*given):
        checked = check(*given)
        index["cachestarts"][1] = 3000
        return checked

    with monkeypatch.context() as patch:
        patch.setattr(steps, "packed_in_cache", change)
        operator(new, cache.copy(), index)
    found = operator(new, cache.copy(), index)
    forget_all()
    for one, other in zip(found, operator(new, cache.copy(), index), strict=True):
        assert_array_equal(one, other)


def test_a_smaller_cache_of_a_known_step(rng):
    cache, new, index = np.zeros((1, 2, HEADS, ROWS, DIM), np.float32), arrays(rng), tensors((5, 4))
    attend(new, cache, index)
    for rows in (2004, 2003):
        small = np.zeros((1, 2, HEADS, rows, DIM), np.float32)
        if rows == 2004:
            attend(new, small, index)
        else:
            with pytest.raises(kvkit.KvkitError, match="row"):
                attend(new, small, index)


def test_threads_have_steps_of_their_own(rng):
    """Calls of one form at the same time."""
    given = [(arrays(rng), tensors((5 + i, 4 + i))) for i in range(4)]
    caches = [np.zeros((1, 2, HEADS, ROWS, DIM), np.float32) for _ in given]
    expected = [
        anew(attend, new, cache.copy(), index) for cache, (new, index) in zip(caches, given, strict=True)
    ]

    def work(i):
        for _ in range(50):
            assert np.array_equal(attend(given[i][0], caches[i], given[i][1]), expected[i])

    in_threads(work, 4)


def attend_static(new, cache, start):
    new = {name: tokens[:, None] for name, tokens in new.items()}
    sizes = SIZES | {"cache_layout": 0}
    return kvkit.multi_head_cache_attention(**new, start_pos=start, cache=cache, **sizes)


def load_static(new, cache, start):
    key, value = new["current_key"][:, None], new["current_value"][:, None]
    return kvkit.key_value_cache(key, value, start, cache)


@pytest.mark.parametrize("operator", [attend_static, load_static])
def test_sequences_of_one_length(operator, rng):
    """They begin anywhere, one call after the other; what has no room is refused as by a first call."""
    cache = rng.standard_normal((3, 1, 2, 900, HEADS, DIM), np.float32)
    for start in (5, 6, 6, 600, 601, 0, 899):
        new, other = arrays(rng), cache.copy()
        assert_array_equal(operator(new, cache, start), anew(operator, new, other, start))
        assert_array_equal(cache, other)
    for start in (900, -1, 2**70, True, 1.0):
        with pytest.raises(kvkit.KvkitError, match="start_pos: expected") as first:
            anew(operator, new, cache, start)
        with pytest.raises(kvkit.KvkitError) as known:
            operator(new, cache, start)
        assert str(known.value) == str(first.value)
        assert_array_equal(cache, other)
        operator(new, cache, 899)


@pytest.mark.parametrize("places", ["new", "given", "in place"])
def test_rotary_embedding(places, rng):
    """Of a known form, at other positions and places; a broken call is refused as a first one."""
    turn, out = kvkit.dynamic_batching.rotary_position_embedding, None
    for first in ([3, 9], [4, 9], [70, 0]):
        query, key = (
            rng.standard_normal((3, 4, DIM), np.float32),
            rng.standard_normal((3, 2, DIM), np.float32),
        )
        positions.rotations.clear()
        wanted = turn(query.copy(), key.copy(), [0, 2, 3], first, None)
        turn(query.copy(), key.copy(), [0, 1, 3], [1, 1], None)
        for starts in ([0, 2, 3], np.array([0, 2, 3], np.int32)):
            given = query.copy(), key.copy()
            if places != "new":
                out = given if places == "in place" else (np.empty_like(query), np.empty_like(key))
            for got, right in zip(turn(*given, starts, first, None, out=out), wanted, strict=True):
                assert_array_equal(got, right)
    for broken in (([0, 2, 4], [0, 0]), ([0, 2, 3], [-1, 0]), ([0, 2, 3], [0.5, 1])):
        with pytest.raises(kvkit.KvkitError, match=r"(seqstarts|start_pos): expected"):
            turn(query, key, *broken, None)
    with pytest.raises(kvkit.KvkitError, match="memory apart"):
        turn(query, key, [0, 2, 3], first, None, out=(key.repeat(2, 1), query[:, :2]))


def test_attention_to_keys_is_checked_once_for_arrays_of_one_form(rng, monkeypatch):
    """Values are read anew in each call; masks, lse and arrays that overlap are checked each time."""
    checked, own = [], prepared.checked_attention
    monkeypatch.setattr(prepared, "checked_attention", lambda *call: checked.append(1) or own(*call))
    prepared.attentions.clear()
    sizes = {"num_heads": 2 * HEADS, "num_kv_heads": HEADS, "head_dim": DIM}

    def call(count, new=3, out=None, **options):
        query, key, value = (
            rng.standard_normal((2, n, h, DIM), np.float32)
            for n, h in ((new, 2 * HEADS), (9, HEADS), (9, HEADS))
        )
        checked.clear()
        result = kvkit.multi_head_attention(query, key, value, out=out, **sizes, **options)
        assert len(checked) == count
        right, _ = kvkit.multi_head_attention(query, key, value, return_lse=True, **sizes)
        assert_array_equal(result[0] if options else result, right)

    out = np.empty((2, 3, 2 * HEADS, DIM), np.float32)
    for given in (None, out):
        for count in (1, 0, 0):
            call(count, out=given)
    call(1, new=2)
    call(0)
    call(1, return_lse=True)
    call(1, return_lse=True)
    key = np.ones((2, 9, HEADS, DIM), np.float32)
    with pytest.raises(kvkit.KvkitError, match="memory apart from query"):
        kvkit.multi_head_attention(out, key, key, out=out, **sizes)
    out.flags.writeable = False
    with pytest.raises(kvkit.KvkitError, match="writeable"):
        call(1, out=out)


class Changing:
    """Stands for an integer that a caller changes in place, as a tensor of one number."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_an_attribute_that_changes_in_place_is_read_again():
    query = np.ones((1, 3, 2, DIM), np.float32)
    key, cache = query, np.zeros((1, 2, 2, 8, 2, DIM), np.float32)
    heads, layer = Changing(2), Changing(0)
    for _ in range(3):
        kvkit.multi_head_attention(query, key, key, num_heads=2, head_dim=DIM, num_kv_heads=heads)
        kvkit.key_value_cache(key, key, 0, cache, num_layer=2, layer_idx=layer)
    heads.value, layer.value = 1, 1
    with pytest.raises(kvkit.KvkitError, match=r"key: expected shape \(1, 3, 1, 16\)"):
        kvkit.multi_head_attention(query, key, key, num_heads=2, head_dim=DIM, num_kv_heads=heads)
    assert not cache[:, 1].any()
    kvkit.key_value_cache(key, key, 0, cache, num_layer=2, layer_idx=layer)
    assert cache[:, 1].any()
