"""`inspect` says what the states of engines are, and no longer calls them arrays that nobody knows."""

import numpy as np
import pytest

import kvkit
from kvkit.tools import check, convert, diff, inspect
from kvkit.tools.state_names import COMPRESSOR_STATES, STATES, kind_of_state


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("recurrent_states", "recurrent"), ("ssm_state", "recurrent"), ("conv_states", "conv"),
        ("recurrent_states.3", "recurrent"), ("layers.3.conv_state", "conv"),
        ("layer_3_ssm_states", "recurrent"),
        ("past_key_values.11.recurrent_state", "recurrent"), ("conv_state_7", "conv"),
        ("cache_r_l0", "conv"), ("cache_s_l11", "recurrent"), ("cache_k_l0", None), ("cache_s", None),
        ("key_states", None), ("conv_statement", None), ("deconv_state", None), ("states.conv", None),
        ("recurrent_state_indices", None), ("layers.2.compressor_state", "compressor"),
        ("inner_compress_state", "compressor"), ("layers.0.states.indexer", "compressor"),
        ("layers.2.compressed_kv.compressor", "compressed"), ("overlap_gate.indexer", "compressed"),
        ("layers.2.compressed_kv", None), ("compressed_kv.gate", None), ("compressor_states", None),
    ],
)  # fmt: skip
def test_kinds(name, kind):
    assert kind_of_state(name) == kind


def test_every_name_of_check_is_known():
    assert all(kind_of_state(name) for name in (*STATES, *COMPRESSOR_STATES))


def states(layers):
    arrays = {}
    for layer in layers:
        arrays[f"layers.{layer}.recurrent_state"] = np.zeros((3, 4, 8, 8), np.float32)
        arrays[f"layers.{layer}.conv_state"] = np.zeros((3, 96, 3), np.float16)
    return arrays


def test_states_alone():
    found = inspect(states((0, 1, 2)))
    assert [(each.pattern, each.kind, each.count, each.dtype, each.shape) for each in found.states] == [
        ("layers.{l}.recurrent_state", "recurrent", 3, "float32", (3, 4, 8, 8)),
        ("layers.{l}.conv_state", "conv", 3, "float16", (3, 96, 3)),
    ]
    assert not found.notes
    text = str(found)
    assert "recurrent states, 3 arrays layers.{l}.recurrent_state: last axes [dk, dv] (state" in text
    assert "conv states, 3 arrays layers.{l}.conv_state: last inputs of convolutions" in text
    assert found.to_dict()["states"][1]["shape"] == (3, 96, 3)


def compressed_rows(rng):
    """Return what transformers holds of DeepSeek V4's layers 2 (CSA) and 3 (HCA) after 22 tokens, by name."""
    arrays = {}
    for layer, ratio, names in ((2, 4, ("compressor", "indexer")), (3, 8, ("compressor",))):
        keys = rng.standard_normal((1, 1, 5, 8), np.float32)  # values too
        arrays |= {f"past_key_values.{layer}.{side}": keys for side in ("key", "value")}
        for name in names:
            arrays[f"layers.{layer}.compressed_kv.{name}"] = np.ones((1, 22 // ratio, 8), np.float32)
            arrays[f"layers.{layer}.entry_count.{name}"] = np.array(22 // ratio)
            for each in ("buffer_kv", "buffer_gate"):
                arrays[f"layers.{layer}.{each}.{name}"] = np.ones((1, 22 % ratio, 8), np.float32)
            if ratio == 4:
                for each in ("overlap_kv", "overlap_gate"):
                    arrays[f"layers.{layer}.{each}.{name}"] = np.ones((1, ratio, 8), np.float32)
    return arrays


def test_compressed_rows_of_transformers(rng):
    """They are named, go along with keys, are compared, and their counts are checked."""
    arrays = compressed_rows(rng)
    found = inspect(arrays)
    assert not found.notes
    assert sum(each.count for each in found.states) == len(arrays) - 4
    text = str(found)
    assert "\nindex keys layers.{l}.compressed_kv.indexer: [sequences, rows, dim]\n" in text
    assert "\ncompressed rows, 2 arrays layers.{l}.entry_count.compressor: how many there are\n" in text
    moved = convert(arrays, None, to_layout="hf")
    assert not moved.notes
    assert all(np.array_equal(moved.arrays[x], arrays[x]) for x in arrays if x.startswith("layers."))
    stated = {"context_lens": np.array([22]), "compress_ratios": np.array([0, 0, 4, 8])}
    report = check(arrays | stated)
    assert "C5" in report.checked
    assert not report.found
    assert not check(arrays, layout="hf").found  # without words, too
    assert "compressed_kv" not in str(report.notes)  # which name what no rule reads
    arrays["layers.3.entry_count.compressor"] = np.array(3)
    assert [(each.rule, each.where, each.message) for each in check(arrays | stated)] == [
        ("C5", "layers.3.entry_count.compressor", "3 rows; 22 tokens make 2")
    ]
    changed = dict(arrays) | {"layers.2.compressed_kv.indexer": np.ones((1, 5, 8), np.float32) * 2}
    said = str(diff(arrays, changed))
    assert "layers.2.compressed_kv.indexer: 40 of 40 elements differ" in said
    assert "first: sequence 0, row 0, element 0" in said


HK, HV, D = 2, 6, 8  # heads of keys and of values, elements
TILED = (
    np.arange(HV).reshape(HK, HV // HK).T.ravel()
)  # the value heads of a grouped state, as llama.cpp has them


def step(rng, layout="KV"):
    """Return (arrays of a step of the delta rule, states before it, states after it)."""
    q, k = rng.standard_normal((2, 3, HK, D), np.float32)
    tokens = {"k": k, "v": rng.standard_normal((3, HV, D), np.float32),
              "g": -rng.random((3, HV), np.float32), "beta": rng.random((3, HV), np.float32)}  # fmt: skip
    before = rng.standard_normal((5, HV, D, D), np.float32)
    after = before.copy()
    slots = np.array([4, 0, 2], np.int32)
    kvkit.gated_delta_step(q, **tokens, state=after, state_indices=slots, norm=True, state_layout=layout)
    return tokens | {"state_indices": slots}, before, after


def test_states_in_another_order(rng):
    """A result of convert continues in the other order with the same numbers."""
    _, state, _ = step(rng)
    done = convert({"layers.0.recurrent_state": state}, None, states="VK", from_states="KV")
    turned = done.arrays["layers.0.recurrent_state"]
    assert np.array_equal(turned, state.swapaxes(-1, -2))
    assert turned.flags.c_contiguous
    assert str(done) == "KV -> VK (order of states): 7.5 KiB"
    for order in ("VK", "KV:tiled", "VK:tiled"):
        there = convert({"ssm_state": state}, None, states=order, from_states="KV", state_heads=(HK, HV))
        back = convert(there.arrays, None, states="KV", from_states=order, state_heads=f"{HK}/{HV}")
        assert np.array_equal(back.arrays["ssm_state"], state)
    assert np.array_equal(there.arrays["ssm_state"], state[:, TILED].swapaxes(-1, -2))


@pytest.mark.parametrize("flat", [False, True])
def test_states_of_llama(rng, flat):
    """A row has the states of all heads; value heads are tiled, also among the convolution's channels."""
    state, inputs = rng.standard_normal((2, HV, D, D)), rng.standard_normal((2, 3, 2 * HK * D + HV * D))
    values = inputs[..., 2 * HK * D :].reshape(2, 3, HV, D)[:, :, TILED].reshape(2, 3, -1)
    tiled = np.concatenate([inputs[..., : 2 * HK * D], values], -1)
    names = ("recurrent.0.1", "recurrent.0.0") if flat else ("cache_s_l0", "cache_r_l0")
    rows = {names[0]: state[:, TILED].swapaxes(-1, -2).reshape(2, -1), names[1]: tiled.reshape(2, -1)}
    done = convert(rows, None, states="KV", from_states="VK:tiled", state_heads="2/6").arrays
    assert np.array_equal(done[names[0]], state)
    assert np.array_equal(done[names[1]], inputs.reshape(2, -1))


def test_states_beside_a_layout(rng, tmp_path):
    keys = rng.standard_normal((1, 2, 5, 8), np.float32)
    arrays = {"past_key_values.3.key": keys, "past_key_values.3.value": keys} | states((0,))
    arrays["layers.0.recurrent_state"] = rng.standard_normal((3, 4, 8, 8), np.float32)
    done = convert(arrays, tmp_path / "out.npz", to_layout="hf", states="VK", from_states="KV")
    assert done.states == "VK"
    found = kvkit.files.read(tmp_path / "out.npz").arrays
    turned = arrays["layers.0.recurrent_state"].swapaxes(-1, -2)
    assert np.array_equal(found["layers.0.recurrent_state"], turned)
    assert np.array_equal(found["cache.0.0"], keys)


@pytest.mark.parametrize("made", ["KV", "VK"])
@pytest.mark.parametrize("stated", ["KV", "VK"])
def test_check_tries_all_orders(rng, made, stated):
    """A step's states before and after it tell in which order it changed them."""
    given, before, after = step(rng, made)
    found = check(
        given | {"recurrent_state": before, "state_layout": np.array(stated)}, {"recurrent_state": after}
    )
    assert found.checked == ["W2"]
    assert [each.message for each in found] == [f"the step changed it as {made}, not as {stated}"] * (
        made != stated
    )
    assert not check(given | {"recurrent_state": before, "state_layout": np.array(stated)},
                     {"recurrent_state": rng.random(before.shape)}).checked  # fmt: skip
