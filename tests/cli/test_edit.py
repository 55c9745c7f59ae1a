"""`kvkit edit` does to a saved cache what its calls do."""

import json

import numpy as np
import pytest
from verbs import kvkit

from kvkit import Rope
from kvkit.cache import Cache, DynamicCache, PagedCache, QuantizedLayer, SlidingWindowLayer, StateLayer, load

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "rope_theta": 500.0}
EDITS = {  # the options; the same in Python, with rotation r
    "--remove 10:20": lambda cache, r: cache.remove(10, 20),
    "--remove=15:": lambda cache, r: cache.remove(15),
    "--remove 4:10 --close --rope config.json": lambda cache, r: cache.remove(4, 10, close=True, rope=r),
    "--retain 0:4,18: --shift 18::-14 --rope rotary_dim=8,theta=500": lambda cache, r: (
        cache.retain([0, 1, 2, 3, 18, 19, 20]), cache.shift(18, None, -14, r)
    ),
    "--shift 0::5 --remove 0:7 --divide 7::2 --rope rotary_dim=8,theta=500.0": lambda cache, r: (
        cache.shift(0, None, 5, r), cache.remove(0, 7), cache.divide(7, None, 2, r)
    ),
    "--shift 0::5 --rope none": lambda cache, r: cache.shift(0, None, 5, "none"),
    "--append chat.npz --remove 3:9 --rope config.json": lambda cache, r: (
        cache.append(load("chat.npz"), rope=r), cache.remove(3, 9)
    ),
}  # fmt: skip

MIXED = ("mixed", "--remove 4:10 --close --rope config.json"), ("mixed", "--shift 0::5 --rope none")


@pytest.fixture
def folder(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    cache = DynamicCache(2)
    for layer in range(2):
        cache.update(*rng.standard_normal((2, 1, 2, 21, 8)).astype(np.float32), layer)
    cache.save("chat.npz")
    mixed = Cache([SlidingWindowLayer(4), QuantizedLayer(residual_length=8, sink=2)])
    for layer in range(2):
        mixed.update(*rng.standard_normal((2, 1, 2, 21, 8)).astype(np.float32), layer)
    mixed.save("mixed.npz")
    PagedCache(4, 2, 1, 1, 1, np.float32).save("pages.npz")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "gpt2.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))
    np.savez("other.npz", x=np.zeros(3))
    return tmp_path


@pytest.mark.parametrize(("name", "options"), [*(("chat", options) for options in EDITS), *MIXED])
def test_changes_are_done_in_order(name, options, folder, rng):
    code, out, err = kvkit(f"edit {name}.npz {options} -o out.npz")
    assert (code, err) == (0, "")
    edited, wanted = load("out.npz"), load(f"{name}.npz")
    EDITS[options](wanted, Rope(8, 500.0))
    for one, other in zip(edited.layers, wanted.layers, strict=True):
        np.testing.assert_array_equal(one.keys, other.keys)
        np.testing.assert_array_equal(one.values, other.values)
        np.testing.assert_array_equal(one.positions, other.positions)
        np.testing.assert_array_equal(one.rope_shifts, other.rope_shifts)
    assert edited.get_seq_length() == wanted.get_seq_length()
    assert out.startswith(f"{wanted.layers[-1].stored_tokens} tokens at ")
    assert out.endswith(f"the next at {wanted.get_seq_length()}\n")
    found = json.loads(kvkit(f"edit {name}.npz {options} -o out.npz --json")[1])
    ranges = [np.arange(begin, end) for begin, end in found["positions"]]
    np.testing.assert_array_equal(np.concatenate(ranges), wanted.layers[-1].positions)


REFUSED = {
    "chat.npz -o out.npz": "expected a change",
    "chat.npz --remove 1:2": "and -o OUT",
    "chat.npz --append chat.npz -o out.npz": "--rope: expected how keys were rotated",
    "chat.npz --append mixed.npz --rope none -o out.npz": "other: expected a layer of one kind and format",
    "chat.npz --append other.npz -o out.npz": "kvkit edit takes files of Cache.save",
    "chat.npz --append pages.npz -o out.npz": "got sequences in blocks",
    "chat.npz --append none.npz -o out.npz": "none.npz",
    "chat.npz --remove 1:2 -o out.safetensors": "saved as .npz",
    "chat.npz --remove x -o out.npz": "--remove x: expected BEGIN:END",
    "chat.npz --remove 1:2:3 -o out.npz": "--remove 1:2:3: expected BEGIN:END",
    "chat.npz --shift 1:2 -o out.npz": "--shift 1:2: expected BEGIN:END:DELTA",
    "chat.npz --shift 3:9:5 --rope none -o out.npz": "positions that stay ascending",
    "chat.npz --remove 0:2 --shift 3::5 -o out.npz": "--rope: expected how keys were rotated",
    "chat.npz --shift 3::5 --rope rotary_dim=3 -o out.npz": "--rope rotary_dim=3: rotary_dim: expected",
    "chat.npz --shift 3::5 --rope spin=3 -o out.npz": "--rope spin=3: expected",
    "chat.npz --shift 3::5 --rope chat.npz -o out.npz": "--rope chat.npz: chat.npz: neither a config.json",
    "chat.npz --shift 3::5 --rope gpt2.json -o out.npz": "--rope gpt2.json: config: expected a config",
    "other.npz --remove 1:2 -o out.npz": "kvkit edit takes files of Cache.save",
    "pages.npz --remove 1:2 -o out.npz": "got sequences in blocks",
}


@pytest.mark.parametrize("command", REFUSED)
def test_nothing_is_written_where_a_change_is_refused(command, folder):
    before = sorted(path.name for path in folder.iterdir())
    code, out, err = kvkit(f"edit {command}")
    assert (code, out) == (2, "")
    assert REFUSED[command] in err
    assert sorted(path.name for path in folder.iterdir()) == before


def test_heads_that_keep_different_tokens(folder):
    cache = load("chat.npz")
    cache.compress("knorm", keep=0.5, budget="ada")
    cache.save("heads.npz")
    assert "tokens in a head, the next at 21" in kvkit("edit heads.npz --remove 3:6 -o out.npz")[1]
    assert kvkit("edit heads.npz --retain 0:4 -o no.npz")[0] == 2


def test_ranges_without_tokens_are_told(folder):
    code, out, err = kvkit("edit chat.npz --remove 30:40 --retain 40: -o out.npz")
    assert (code, out) == (0, "0 tokens at none, the next at 21\n")
    said = "no token has such a position (they end with 20)\n"
    assert err == f"kvkit: --remove 30:40: {said}kvkit: --retain 40:: {said}"


def test_a_refused_change_prints_its_error_alone(folder):
    """Notes would add lines; and the tokens of a state have no rows to count."""
    cache = Cache([StateLayer()])
    cache.update({"sum": np.ones((1, 2), np.float32)}, 5, 0)
    cache.save("state.npz")
    for command in ("state.npz --retain 0:4", "chat.npz --remove 30:40 --remove 3:1"):
        code, out, err = kvkit(f"edit {command} -o no.npz")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "no token" not in err
