"""The main job on real data: keys and values of a language model, from a tensor file to a tensor file.

Two paragraphs are in data/smollm2_kv.npz with the keys and values that SmolLM2-135M-Instruct computed for
them (make_smollm2_kv.py). Every prompt and then every decoded token is appended through the command line
to a paged cache in layout 3, once in float16, once as int8 and once as int4 codes. The table says what
that costs and what it does to the data.

    python examples/demo.py [FOLDER for the files, demo-out if not given]
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from rich.progress import track

import kvkit
from kvkit_cli import npz, show

DATA = Path(__file__).parent / "data" / "smollm2_kv.npz"
OPERATOR = "dynamic_batching.key_value_cache"
KVKIT = Path(sys.executable).with_name("kvkit")  # the console script of this Python
PAGE_SIZE, PAGES = 16, 8  # for each sequence
COPIES = 64  # of both texts, to measure a batch of the size that servers run
DECODE_STEPS = 2  # of the five in the file: each is a command line for each layer
KINDS = {  # format / elements that share a scale: (quant_bit, quant_group)
    "float16": (0, 8),
    "int8 / 8": (8, 8),
    "int8 / 64": (8, 64),
    "int4 / 8": (4, 8),
    "int4 / 32": (4, 32),
}


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out")
    folder.mkdir(exist_ok=True)
    data = npz.read(DATA).arrays
    layers, tokens, heads, dim = data["current_key"].shape
    print(f"{tokens} tokens of two texts; {layers} layers, {heads} heads of {dim}; float16")
    for text, more in zip(data["text"], data["continuation"], strict=True):
        print(f"  …{text[-60:]}{more.splitlines()[0]}")
    print(f"\nThe first of {layers * (1 + DECODE_STEPS) * len(KINDS)} command lines:")
    print(f"  kvkit {' '.join(arguments(folder / 'float16.npz', folder / 'out.npz', 0))}\n")

    table = show.table(None, "cache", "bytes a token", "share", "key error", "value error", "step", "GB/s")
    for name in track(KINDS, "running", transient=True):
        table.add_row(name, *measure(data, folder, name))
    show.console().print(table)
    print(
        "share: of a float16 cache. Errors: root mean square, relative to the data, after the last step.\n"
        f"step: one token for each of {2 * COPIES} sequences ({COPIES} copies of the texts), contexts read\n"
        f"back, one layer; median of 50 calls. The files are in {folder}/."
    )


def measure(data, folder, name):
    """Append everything by command line, then compare and time."""
    quant_bit, group = KINDS[name]
    path, out = folder / f"{name.replace(' / ', '-')}.npz", folder / "out.npz"
    arrays = empty_file(data, quant_bit, group)
    results = {}
    for step in range(1 + DECODE_STEPS):
        for layer in range(len(data["layers"])):
            arrays |= step_inputs(data, step, layer)
            npz.write(path, arrays, {})
            subprocess.run([KVKIT, *arguments(path, out, layer), "--quiet"], check=True)
            results[layer] = npz.read(out).arrays
            arrays |= {name: np.array(results[layer][name]) for name in ("cache", "scale") if name in arrays}
    errors = [error(data, results, side) for side in ("key", "value")]
    per_token = [arrays[name].nbytes / arrays[name].shape[3] for name in ("cache", "scale") if name in arrays]
    plain = 2 * np.prod(data["current_key"].shape) * 2 / data["current_key"].shape[1]
    seconds, moved = timing(arrays)
    return (
        f"{sum(per_token):.0f}",
        f"{sum(per_token) / plain:.0%}",
        *(f"{value:.2%}" for value in errors),
        f"{seconds * 1e6:.0f} µs",
        f"{moved / seconds / 1e9:.1f}",
    )


def arguments(path, out, layer):
    return ["run", OPERATOR, str(path), "-o", str(out), "--set", f"layer_idx={layer}"]


def empty_file(data, quant_bit, group):
    """The arrays and attributes that stay the same through all steps; pages lie in random order."""
    layers, _, heads, dim = data["current_key"].shape
    sequences = len(data["prompt_lens"])
    rows = sequences * PAGES * PAGE_SIZE
    pages = np.random.default_rng(0).permutation(sequences * PAGES).reshape(sequences, PAGES)
    arrays = {
        "cachestarts": pages * PAGE_SIZE,
        "cache": np.zeros((layers, 2, heads, rows, dim), np.float16),
        "num_layer": np.array(layers),
        "quant_bit": np.array(quant_bit),
        "quant_group": np.array(group),
        "cache_mode": np.array(1),
        "cache_layout": np.array(3),
        "page_size": np.array(PAGE_SIZE),
    }
    if quant_bit:
        arrays["cache"] = np.zeros((layers, 2, heads, rows, dim * quant_bit // 8), np.int8)
        arrays["scale"] = np.zeros((layers, 2, heads, rows, dim // group), np.float16)
    return arrays


def step_inputs(data, step, layer):
    """The prompts of both sequences at step 0, then one token of each."""
    prompts = data["prompt_lens"]
    first = prompts + step - 1 if step else np.zeros_like(prompts)
    last = prompts + step
    rows = packed(data, first, last)
    return {
        "current_key": data["current_key"][layer][rows],
        "current_value": data["current_value"][layer][rows],
        "seqstarts": np.concatenate([[0], np.cumsum(last - first)]),
        "kvstarts": np.concatenate([[0], np.cumsum(last)]),
        "start_pos": first,
    }


def packed(data, first, last):
    """Indices in the file's tokens of positions `first` to `last` of each sequence."""
    starts = data["seqstarts"][:-1]
    return np.concatenate([np.arange(s + a, s + b) for s, a, b in zip(starts, first, last, strict=True)])


def error(data, results, side):
    """Relative root mean square difference between what came back and what went in, over all layers."""
    tokens = packed(data, np.zeros(2, np.int64), data["prompt_lens"] + DECODE_STEPS)
    given = np.stack([data[f"current_{side}"][layer][tokens] for layer in results]).astype(np.float64)
    got = np.stack([results[layer][side] for layer in results]).astype(np.float64)
    return np.sqrt(((got - given) ** 2).mean() / (given**2).mean())


def timing(arrays):
    """Median seconds of the last step of one layer, for COPIES of both texts at once, and bytes moved."""
    inputs = copies(arrays)
    attributes = {name: int(array) for name, array in arrays.items() if not array.ndim}
    call = kvkit.dynamic_batching.key_value_cache
    out = call(max_seqlen=None, max_kvlen=None, **inputs, **attributes)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        call(max_seqlen=None, max_kvlen=None, **inputs, **attributes, out=out)
        times.append(time.perf_counter() - begin)
    stored = [inputs[name] for name in ("cache", "scale") if name in inputs]
    token = sum(array.nbytes / array.shape[0] / array.shape[3] for array in stored)
    return statistics.median(times), int(inputs["kvstarts"][-1]) * token + sum(array.nbytes for array in out)


def copies(arrays):
    """The inputs of a step for many times the same sequences, each copy with rows of its own."""
    rows, sequences = arrays["cache"].shape[3], len(arrays["start_pos"])
    made = {
        name: np.concatenate([arrays[name]] * COPIES, axis=3) for name in ("cache", "scale") if name in arrays
    }
    for name in ("current_key", "current_value", "start_pos", "cachestarts"):
        made[name] = np.concatenate([arrays[name]] * COPIES)
    made["cachestarts"] += np.repeat(np.arange(COPIES) * rows, sequences)[:, None]
    for name in ("seqstarts", "kvstarts"):
        made[name] = np.concatenate([[0], np.cumsum(np.tile(np.diff(arrays[name]), COPIES))])
    return made


if __name__ == "__main__":
    main()
