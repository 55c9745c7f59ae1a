"""Layers that compute their state, and pools of states for many sequences."""

import copy

import ml_dtypes
import numpy as np
import pytest

import kvkit
from kvkit import KvkitError
from kvkit.cache import Cache, CapacityError, DynamicLayer, GatedDeltaLayer, PagedCache, StatePool

HEADS, KEYS, DK, DV, WIDTH = 4, 2, 8, 6, 4
CHANNELS = 2 * KEYS * DK + HEADS * DV
kinds = pytest.mark.parametrize("kind", ["gdn", "kda"])


def layer_of(kind="gdn", **more):
    return GatedDeltaLayer(HEADS, DK, DV, CHANNELS, WIDTH, kind=kind, **more)


class Model:
    """Inputs and weights of one layer for a batch of sequences."""

    def __init__(self, kind="gdn", batch=2, tokens=40, dtype=np.float32):
        rng = np.random.default_rng(0)
        inner = (HEADS, DK) if kind == "kda" else (HEADS,)
        self.qkv = rng.standard_normal((batch, tokens, CHANNELS)).astype(dtype)
        self.a, self.b = (
            rng.standard_normal((batch, tokens, *shape), np.float32) for shape in (inner, (HEADS,))
        )
        self.weight = rng.standard_normal((CHANNELS, WIDTH), np.float32)
        self.gates = rng.standard_normal(HEADS, np.float32), rng.standard_normal(inner, np.float32)
        self.kind = kind

    def step(self, layer, begin, end, rows=np.s_[:]):
        part = rows, np.s_[begin:end]
        return layer.step(self.qkv[part], self.a[part], self.b[part], self.weight, gates=self.gates)

    def expected(self, tokens):
        """Return outputs and states after so many tokens, by the operators."""
        x = self.qkv[:, :tokens].astype(np.float32)
        batch, starts = len(x), np.arange(len(x) + 1) * tokens
        rows, conv = kvkit.causal_conv(x.reshape(-1, CHANNELS), self.weight, starts=starts)
        g, beta = kvkit.delta_gates(self.a[:, :tokens], self.b[:, :tokens], *self.gates, kind=self.kind)
        q, k, v = np.split(rows, [KEYS * DK, 2 * KEYS * DK], axis=1)
        q, k = (part.reshape(batch, tokens, KEYS, DK) for part in (q, k))
        v = v.reshape(batch, tokens, HEADS, DV)
        out, state = kvkit.gated_delta_rule(q, k, v, g=g, beta=beta, norm=True, chunk=1)
        return out, {"recurrent": state, "conv": conv}


def assert_states(layer, expected, tolerance=2e-5):
    assert set(layer.states) == {"recurrent", "conv"}
    for name, array in layer.states.items():
        np.testing.assert_allclose(array, expected[name], atol=tolerance, rtol=tolerance)


@kinds
def test_steps_of_any_size_are_the_operators_in_order(kind):
    model, layer = Model(kind), layer_of(kind)
    out = [model.step(layer, *span) for span in ((0, 20), (20, 21), (21, 24), (24, 40))]
    expected, states = model.expected(40)
    np.testing.assert_allclose(np.concatenate(out, axis=1), expected, atol=2e-5)
    assert_states(layer, states)
    assert layer.get_seq_length() == 40
    assert layer.nbytes == sum(array.nbytes for array in states.values())


@kinds
@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("accepted", [1, 3, 4, 6])
def test_drafts_are_taken_back_by_capsules(kind, begin, accepted):
    """A copy takes back more of the next step, and a step after it goes on from there."""
    model, layer, left = Model(kind), layer_of(kind), begin + accepted
    if begin:
        model.step(layer, 0, begin)
    layer.activate_past_recording()
    model.step(layer, begin, begin + 6)
    layer.crop(left)
    assert layer.get_seq_length() == left
    assert_states(layer, model.expected(left)[1])
    other = copy.deepcopy(layer)
    expected = model.expected(left + 3)[0][:, left:]
    np.testing.assert_allclose(model.step(other, left, left + 3), expected, atol=2e-5)
    other.crop(left + 2)
    assert_states(other, model.expected(left + 2)[1])
    np.testing.assert_allclose(model.step(layer, left, left + 3), expected, atol=2e-5)


@kinds
@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("left", [17, 18, 21, 24])
def test_the_last_tokens_of_a_recorded_prompt_are_taken_back(kind, begin, left):
    """A capsule of every token of a prompt would be larger than its keys and values."""
    model, layer = Model(kind), layer_of(kind, drafts=7)
    if begin:
        model.step(layer, 0, begin)
    layer.activate_past_recording()
    out = model.step(layer, begin, 24)
    np.testing.assert_allclose(out, model.expected(24)[0][:, begin:], atol=2e-5)
    assert_states(layer, model.expected(24)[1])
    assert [each.capsule.shape[1] for each in layer._recordings.values()] == [7]
    other = copy.deepcopy(layer)
    with pytest.raises(KvkitError, match=r"expected 0, .*17 or 24 tokens to stay, which it has states of"):
        layer.crop(16)
    layer.crop(left)
    assert_states(layer, model.expected(left)[1])
    expected = model.expected(left + 9)[0][:, left:]
    np.testing.assert_allclose(model.step(layer, left, left + 9), expected, atol=2e-5)
    other.crop(begin - 24)
    out = model.step(other, begin, 24)
    np.testing.assert_allclose(out, model.expected(24)[0][:, begin:], atol=2e-5)


def test_checkpoints_are_those_of_states():
    model, layer = Model(), layer_of(checkpoint_every=4)
    for begin in range(0, 20, 4):
        model.step(layer, begin, begin + 4)
    assert layer.checkpoints == [8, 12, 16, 20]
    layer.crop(12)
    assert_states(layer, model.expected(12)[1])
    with pytest.raises(KvkitError, match=r"expected 0, 8 or 12 tokens to stay"):
        layer.crop(10)


def test_rows_of_the_batch(tmp_path):
    model, cache = Model(batch=3), Cache([layer_of(), DynamicLayer()])
    keys = np.zeros((3, 1, 10, 4), np.float32)
    cache.layers[0].activate_past_recording()
    model.step(cache.layers[0], 0, 10)
    cache.update(keys, keys, 1)
    states = model.expected(10)[1]
    cache.reorder([2, 0, 1])
    assert_states(cache.layers[0], {name: array[[2, 0, 1]] for name, array in states.items()})
    cache.reorder([0, 1])
    cache.repeat(2)
    rows = [2, 2, 0, 0]
    assert_states(cache.layers[0], {name: array[rows] for name, array in states.items()})
    cache.layers[0].crop(-3)  # what was recorded moved with the batch
    assert_states(cache.layers[0], {name: array[rows] for name, array in model.expected(7)[1].items()})


@kinds
def test_saved_and_reset(kind, tmp_path):
    model, cache = Model(kind), Cache([layer_of(kind, checkpoint_every=5)])
    model.step(cache.layers[0], 0, 10)
    cache.save(tmp_path / "saved")
    loaded = kvkit.cache.load(tmp_path / "saved")
    assert type(loaded.layers[0]) is GatedDeltaLayer
    for other in (loaded, copy.deepcopy(cache)):
        np.testing.assert_allclose(
            model.step(other.layers[0], 10, 12), model.expected(12)[0][:, 10:], atol=2e-5
        )
        assert_states(other.layers[0], model.expected(12)[1])
    assert_states(cache.layers[0], model.expected(10)[1])
    cache.reset()
    model.step(cache.layers[0], 0, 3)
    assert_states(cache.layers[0], model.expected(3)[1])


def test_states_beside_pages():
    cache = PagedCache(
        16, 4, num_layers=2, num_kv_heads=1, head_dim=4, dtype=np.float32, others={0: layer_of()}
    )
    model, keys = Model(batch=1), np.zeros((1, 1, 10, 4), np.float32)
    layer = cache.rows.layers[0]
    model.step(layer, 0, 10)
    cache.update(keys, keys, 1)
    assert layer.get_seq_length() == cache.get_seq_length() == 10


def test_bfloat16_inputs_and_torch():
    torch = pytest.importorskip("torch")
    model, layer = Model(dtype=ml_dtypes.bfloat16), layer_of()
    tensors = [torch.from_numpy(x) for x in (model.a, model.b, model.weight)]
    qkv = torch.from_numpy(model.qkv.astype(np.float32)).to(torch.bfloat16)
    out = layer.step(qkv, *tensors, gates=tuple(map(torch.from_numpy, model.gates)))
    assert out.dtype == torch.bfloat16
    assert layer.states["conv"].dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(out.float().numpy(), model.expected(40)[0], atol=2e-2)


@pytest.mark.parametrize(("change", "message"), [
    ({"qkv": np.zeros((2, 3, 9), np.float32)}, r"qkv: expected .* = \[2, any, 56\], got \(2,"),
    ({"qkv": np.zeros((1, 3, CHANNELS), np.float32)}, r"qkv: expected shape .* = \[2, any, 56\], got"),
    ({"a": np.zeros((2, 3, 5), np.float32)}, r"a: expected .*tokens, heads\] = \[2, 3, 4\], got"),
    ({"b": np.zeros((2, 2, 4), np.float32)}, r"b: expected shape .* = \[2, 3, 4\], got"),
    ({"conv_weight": np.zeros((CHANNELS, 3), np.float32)}, r"conv_weight: expected .* = \[56, 4\], got"),
    ({"gates": np.zeros(2)},
     r"gates: expected a pair"), ({"chunk": 0}, r"chunk: expected an integer from 1 to"),
])  # fmt: skip
def test_wrong_steps_change_nothing(change, message):
    model, layer = Model(), layer_of()
    model.step(layer, 0, 5)
    before = {name: array.tobytes() for name, array in layer.states.items()}
    part = np.s_[:, 5:8]
    call = {"qkv": model.qkv[part], "a": model.a[part], "b": model.b[part], "conv_weight": model.weight}
    with pytest.raises(KvkitError, match=f"^{message}"):
        layer.step(**call | {"gates": model.gates} | change)
    assert layer.get_seq_length() == 5
    assert {name: array.tobytes() for name, array in layer.states.items()} == before


# Pools


def pool_of(slots=5):
    return StatePool([layer_of(), {"ssm": ((3,), np.float32)}], slots)


def test_a_pool_has_the_states_of_all_layers():
    pool = pool_of()
    assert [sorted(layer) for layer in pool.arrays] == [["conv", "recurrent"], ["ssm"]]
    assert pool.arrays[0]["recurrent"].shape == (5, HEADS, DK, DV)
    assert pool.nbytes == sum(array.nbytes for layer in pool.arrays for array in layer.values())
    pool.arrays[1]["ssm"][...] = 7
    assert not pool.arrays[1]["ssm"][pool.allocate("a")].any()  # what another sequence has left is gone


def test_forks_are_copies_and_freed_slots_are_used_again():
    pool = pool_of(2)
    one = pool.allocate("a")
    pool.arrays[1]["ssm"][one] = 3
    other = pool.fork("a", "b")
    pool.arrays[1]["ssm"][one] = 4
    assert pool.arrays[1]["ssm"][other].tolist() == [3, 3, 3]
    assert pool.indices(["b", None, "a"]).tolist() == [other, -1, one]
    with pytest.raises(CapacityError, match=r"^slots: expected a free slot, got 2 in use"):
        pool.allocate("c")
    pool.free("a")
    assert pool.allocate("c") == one
    for call in (lambda: pool.free("a"), lambda: pool.fork("a", "d"), lambda: pool.indices(["x"])):
        with pytest.raises(KvkitError, match=r"^seq: expected a sequence of this pool, got"):
            call()
    for call in (lambda: pool.allocate("b"), lambda: pool.allocate(None)):
        with pytest.raises(KvkitError, match=r"^seq: expected a name that no sequence has"):
            call()


def test_a_prefix_is_found_only_where_a_checkpoint_ends():
    pool = pool_of(8)
    slot = pool.allocate("a")
    for length in (2, 4):
        pool.arrays[1]["ssm"][slot] = length
        pool.checkpoint("a", range(length))
    assert pool.find(range(3)) == (2, pool.find([0, 1])[1])
    assert [pool.find(tokens)[0] for tokens in ([0], [0, 1, 9, 3], [0, 1, 2, 3, 9], [1, 2])] == [0, 2, 4, 0]
    assert pool.resume("b", [0, 1, 2, 9]) == 2
    assert pool.arrays[1]["ssm"][pool.sequences["b"]].tolist() == [2, 2, 2]
    assert pool.resume("c", [9]) == 0
    assert not pool.arrays[1]["ssm"][pool.sequences["c"]].any()
    assert pool.checkpoint("b", [0, 1]) == pool.find([0, 1])[1]  # it is there


def test_the_oldest_checkpoint_gives_way_to_a_sequence():
    pool = pool_of(3)
    pool.allocate("a")
    pool.checkpoint("a", [1])
    pool.checkpoint("a", [1, 2])
    assert pool.resume("b", [1]) == 1  # that of [1, 2] gives way, as [1] was just used
    assert pool.find([1, 2])[0] == 1
    pool.free("b")
    pool.allocate("c"), pool.allocate("d")
    assert pool.find([1]) == (0, -1)


def test_check_finds_slots_of_nobody():
    pool = pool_of(6)
    a, b = pool.allocate("a"), pool.allocate("b")
    pool.free("b")
    pool.arrays[0]["recurrent"][a, 0, 0, 0] = np.nan
    wrong = {"state_indices": np.array([a, -1, a, b]), "free_slots": np.array(pool.free_slots)}
    found = kvkit.check(wrong | {"recurrent_state": pool.arrays[0]["recurrent"]})
    assert found.rules == {"R1", "R2", "R3", "R4"}
    right = {"state_indices": pool.indices(["a", None]), "free_slots": np.array(pool.free_slots)}
    assert not kvkit.check(right).rules


def test_steps_over_a_pool():
    """Two sequences of other lengths, in one call for each operator."""
    pool, model = pool_of(), Model(tokens=12)
    for seq in ("a", "b"):
        pool.allocate(seq)
    slots, starts = pool.indices(["b", "a"]), [0, 12, 17]
    x = np.concatenate([model.qkv[0], model.qkv[1, :5]])
    rows, _ = kvkit.causal_conv(
        x, model.weight, state=pool.arrays[0]["conv"], state_indices=slots, starts=starts
    )
    q, k, v = np.split(rows, [KEYS * DK, 2 * KEYS * DK], axis=1)
    a, b = (np.concatenate([x[0], x[1, :5]]) for x in (model.a, model.b))
    g, beta = kvkit.delta_gates(a, b, *model.gates)
    out, _ = kvkit.gated_delta_rule(
        q.reshape(17, KEYS, DK), k.reshape(17, KEYS, DK), v.reshape(17, HEADS, DV), g=g, beta=beta, norm=True,
        state=pool.arrays[0]["recurrent"], state_indices=slots, starts=starts,
    )  # fmt: skip
    for n, (seq, tokens) in enumerate((("b", 12), ("a", 5))):
        expected, states = model.expected(tokens)
        np.testing.assert_allclose(out[starts[n] : starts[n + 1]], expected[n], atol=2e-5)
        slot = pool.sequences[seq]
        np.testing.assert_allclose(pool.arrays[0]["recurrent"][slot], states["recurrent"][n], atol=2e-5)
