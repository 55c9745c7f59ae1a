"""Run the command line in this process, and write small files for its verbs."""

import shlex

import numpy as np
import safetensors.numpy
import scenes
from calls import CALLS
from click.testing import CliRunner

from kvkit import files
from kvkit.files import npz
from kvkit_cli.main import main

COLUMNS = "80"
HF = files.Description("hf", rope_applied=True, rope_base=1e5)
NO_TABLES = [  # arrays and what is said of them, none of which is a page table
    ({}, {"cache": {"paged": {}}}),
    ({}, {"cache": {"paged": 5}}),
    ({}, {"cache": {"paged": {"sequences": [{}], "arguments": {}}}}),
    ({"cache_cells.positions": np.zeros((2, 2)), "cache_cells.sequences": np.zeros(3)}, {}),
    ({"cache_cells.positions": np.zeros((2, 2)), "cache_cells.sequences": np.zeros(3, int),
      "cache_cells.sequence_starts": np.zeros(9, int)}, {}),
    ({"block_tables": np.zeros(3), "context_lens": np.zeros((2, 2)), "page_size": np.array(4)}, {}),
]  # fmt: skip


def kvkit(*words):
    """Run a command, a text or words; return its exit code, stdout and stderr."""
    words = shlex.split(words[0]) if len(words) == 1 else [*map(str, words)]
    done = CliRunner(env={"COLUMNS": COLUMNS}).invoke(main, words, prog_name="kvkit")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def static_call(**changes):
    """Return a small call of key_value_cache."""
    return scenes.static(np.random.default_rng(0), scenes.MOVED[0], dim=6, **changes)


def arrays_of(call):
    return {name: np.asarray(value) for name, value in call.inputs.items() if value is not None}


def split(call):
    """Return (operator, arrays as a file has them, attributes) of a call."""
    inputs = [array.name for array in call.operator.inputs]
    arrays = {n: np.asarray(call.inputs[n]) for n in inputs if call.inputs.get(n) is not None}
    return call.name, arrays, {n: value for n, value in call.inputs.items() if n not in inputs}


def whole(call):
    """Return the arrays of a call with its attributes beside them."""
    return arrays_of(call) | {name: np.array(value) for name, value in call.attributes.items()}


def save(path, **arrays):
    npz.write(path, arrays)


def written(*rows):
    """Return blocks of zeros, with ones in some rows."""
    blocks = np.zeros((4, 4, 2, 8), np.float16)
    blocks.reshape(16, 2, 8)[[*rows]] = 1
    return blocks


def fill(folder):
    """Write every file that a row of the verbs' tables names, and return the folder."""
    rng = np.random.default_rng(0)
    call = whole(static_call())
    wrong = {
        "no-cache": {"cache": None, "current_key": None}, "no-start": {"start_pos": None},
        "more": {"cach": np.zeros(3), "other": np.zeros(3)}, "output": {"key": np.zeros(3)},
        "one-layer": {"num_layer": np.zeros(1, int)}, "half-a-layer": {"num_layer": np.array(1.5)},
        "text-layer": {"num_layer": np.array("x")}, "small-cache": {"cache": np.zeros(3)},
        "odd-cache": {"cache": np.zeros((1, 1, 2, 9, 2), np.float32)},
        "wide-cache": {"cache": np.zeros((1, 1, 2, 9, 2, 6))}, "list-start": {"start_pos": np.zeros(1)},
        "many-layers": {"num_layer": np.zeros((1000, 1000), np.int64)},
    }  # fmt: skip
    made = {name: call | change for name, change in wrong.items()}
    made = {name: {n: a for n, a in arrays.items() if a is not None} for name, arrays in made.items()}
    _, attention, attrs = split(CALLS["static attention"]())
    _, modes, _ = split(CALLS["blocks rope"]())
    attrs = {name: np.array(attrs[name]) for name in ("num_heads", "head_dim", "num_kv_heads")}
    tables = {"block_tables": np.array([[1, 2], [3, 0]]), "context_lens": np.array([8, 4])}
    tables |= {"num_blocks": np.array(4), "page_size": np.array(4)}
    blocks = {"key_cache": written(), "value_cache": written(), "slot_mapping": np.array([5])}
    key = np.arange(1, 65, dtype=np.float16).reshape(4, 2, 8)
    made |= {
        "in": call, "renamed": {{"current_key": "k", "cache": "kv"}.get(n, n): a for n, a in call.items()},
        "attention": attention, "whole-attention": attention | attrs,
        "window": attention | attrs | {"window": np.array([1, 2, 3])},
        "modes": modes, "mode": modes | {"compress_type": np.array("ROPE")},
        "fine": tables, "wrong": tables | {"block_tables": np.array([[1, 2], [2, 0]])},
        "before": blocks, "roomy": tables | {"num_blocks": np.array(6)},
        "after": blocks | {"key_cache": written(5)}, "beside": blocks | {"key_cache": written(6)},
        "a": {"key": key}, "b": {"key": np.roll(key, 1, axis=0)}, "x": {"x": key},
        "steps": {"sequences": np.arange(3), "seqstarts": np.array([0, 3]), "start_pos": np.array([2])},
        "some-more": call | dict.fromkeys("abcde", np.zeros(3)),
        "pool": {"cache": np.zeros((6, 4, 2, 16), np.float16)}, "odd": {"cache": np.zeros((2, 3))},
    }  # fmt: skip
    compressed = "odd-cache", "wide-cache", "list-start", "many-layers", "more"
    for name, arrays in made.items():
        (np.savez_compressed if name in compressed else save)(folder / f"{name}.npz", **arrays)
    for i, (arrays, said) in enumerate(NO_TABLES):
        files.write(folder / f"no-tables-{i}.npz", {"a": np.zeros(3), **arrays}, metadata=said)
    pool, shared = np.ones((4, 16, 2, 128), np.float32), np.zeros((4, 2, 4, 1, 2), np.float32)
    pool[3], pool[0, 5], pool[1, 0, 0, 0], shared[3, 0, 2] = np.nan, 0, np.inf, 1
    tables = {"block_tables": np.array([[2, 0], [2, -1]])}
    np.savez(folder / "pool-of-nan.npz", **tables, **{"cache.0": pool, "context_lens": [20, 9]})
    arrays = {"cache": shared, "context_lens": np.array([6, 4]), **tables}
    files.write(folder / "shared.npz", arrays, files.Description("flashinfer-nhd", {"n": 4}))
    cache = [[rng.standard_normal((1, 3, 21, 8)).astype(np.float16) for _ in "kv"] for _ in range(2)]
    files.write(folder / "hf.safetensors", cache, HF)
    safetensors.numpy.save_file({"a": np.zeros(3)}, folder / "plain.safetensors")
    np.save(folder / "x.npy", np.zeros(3))
    (folder / "broken.npz").write_bytes(b"PK no archive")
    (folder / "short.npz").write_bytes((folder / "in.npz").read_bytes()[:-40])
    (folder / "old.npz").write_bytes(b"old")
    (folder / "x.pt").write_bytes(b"\x80\2}q\0.".ljust(100, b"\0"))
    return folder


def savez(path, arrays):
    np.savez(path, **arrays)


def savez_compressed(path, arrays):
    np.savez_compressed(path, **arrays)
