"""`inspect` says what the states of engines are, and no longer calls them arrays that nobody knows."""

import numpy as np
import pytest

from kvkit.tools import inspect
from kvkit.tools.state_names import STATES, kind_of_state


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("recurrent_states", "recurrent"), ("ssm_state", "recurrent"), ("conv_states", "conv"),
        ("recurrent_states.3", "recurrent"), ("layers.3.conv_state", "conv"),
        ("layer_3_ssm_states", "recurrent"),
        ("past_key_values.11.recurrent_state", "recurrent"), ("conv_state_7", "conv"),
        ("cache_r_l0", "conv"), ("cache_s_l11", "recurrent"), ("cache_k_l0", None), ("cache_s", None),
        ("key_states", None), ("conv_statement", None), ("deconv_state", None), ("states.conv", None),
        ("recurrent_state_indices", None),
    ],
)  # fmt: skip
def test_kinds(name, kind):
    assert kind_of_state(name) == kind


def test_every_name_of_check_is_known():
    assert all(kind_of_state(name) for name in STATES)


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


def test_states_beside_keys():
    """A hybrid model: states are named, other arrays are still those that nobody reads."""
    keys = {f"past_key_values.3.{side}": np.ones((1, 2, 5, 8), np.float32) for side in ("key", "value")}
    arrays = states((0, 1)) | keys
    assert inspect(arrays).sizes == {"l": 1, "b": 1, "n": 5, "h": 2, "c": 8}
    assert not any("not read" in note for note in inspect(arrays).notes)
    notes = inspect(arrays | {"router": np.zeros((2, 2), np.float32)}).notes
    assert [note for note in notes if "not read" in note] == ["not read: router"]


def test_rows_of_llama():
    """llama.cpp has the states of all heads in a row."""
    rows = {f"cache_s_l{layer}": np.zeros((2, 512), np.float32) for layer in (0, 2)}
    (found,) = inspect(rows | {"other": np.zeros(3)}).states
    assert str(found) == "recurrent states, 2 arrays cache_s_l{l}: a row has the states of all heads"
    assert not inspect({"other": np.zeros(3)}).states


def test_pattern_to_give_is_of_another_array():
    arrays = states((0, 1)) | {"blocks.0.kv": np.zeros((1, 2, 5, 8), np.float32)}
    (note,) = inspect(arrays).notes
    assert "fused=blocks.{l}.kv" in note
