"""The main job on real data: keys and values of a language model, from a tensor file to a tensor file.

Two paragraphs are in data/smollm2_kv.npz with the keys, values and queries that SmolLM2-135M-Instruct
computed for them (make_smollm2_kv.py). Through the command line both prompts are appended to a paged cache in
layout 3, in float16, as int8 and as int4 codes; then a token of each is appended and attends
to its context. Two tables say what that costs and what it does to the data, and how fast and how exact
attention to it is; a sentence under each says what it shows.

    python examples/demo.py [FOLDER for the files, demo-out if not given]
"""

import shlex
import sys
import time
from pathlib import Path

import numpy as np

import kvkit
from kvkit_cli import npz, show
from kvkit_cli.main import main as kvkit_main

DATA = Path(__file__).parent / "data" / "smollm2_kv.npz"
APPEND = "dynamic_batching.key_value_cache"
ATTEND = "dynamic_batching.multi_head_cache_attention"
STEPS = {APPEND: "prompts", ATTEND: "token"}  # {operator: tokens that it appends}, a command line a layer
PAGE_SIZE, PAGES = 16, 8  # for each sequence
BATCH, COPIES = 8, 64  # to measure: sequences, and copies of both texts that are their contexts
CALLS = 50
KINDS = {  # format: (quant_bit, quant_group)
    "float16": (0, 8),
    "int8:g8": (8, 8),
    "int4:g32": (4, 32),
}


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out")
    folder.mkdir(exist_ok=True)
    data = npz.read(DATA).arrays
    layers, tokens, heads, dim = data["current_key"].shape
    shared = data["query"].shape[-2] // heads
    say(
        f"{tokens} tokens of two texts; {layers} layers of {heads} heads, each for {shared} queries; Dh {dim}"
    )
    for text, more in zip(data["text"], data["continuation"], strict=True):
        say(f"  …{text[-60:]}{more.splitlines()[0]}")

    warm = ["warm", "--formats", ",".join(KINDS), "--head-dim", str(dim), "--queries", str(shared)]
    say(f"\nFirst what calls would wait for is compiled, once on this machine:\n  {command(warm)}")
    type_in(warm)

    say("\nThen command lines append the prompts to each layer of a cache, and a token that attends:")
    appends = show.table(
        "Append and read back", "cache", "bytes a token", "share", "key error", "value error", "step", "GB/s"
    )
    attends = show.table("Attend", "cache", "error", "largest error", "step", "GB/s")
    exact, largest_size = None, 0
    for name in KINDS:
        begin = time.perf_counter()
        arrays, contexts, outputs = run(data, folder, name)
        exact = outputs if exact is None else exact
        inputs = long_contexts(arrays)
        largest_size = max(context_bytes(inputs), largest_size)
        appends.add_row(name, *cost(data, arrays), *context_errors(data, contexts), *appending(inputs))
        attends.add_row(name, rms(outputs, exact), largest(outputs, exact), *attending(inputs))
        count = layers * len(STEPS)
        say(f"  {name}: {count} command lines, and timing, {time.perf_counter() - begin:.1f} s")
    length = inputs["start_pos"][0] + 1
    say("")
    show.out(appends)
    say(
        "int8 takes 62 % of the bytes, and its errors are below 1 %. int4 with a scale for 32 takes 28 %,\n"
        "and its errors are 10 to 15 %: docs/tools/study.md shows the same errors, and schemes of 4 bits\n"
        "that do better.\n"
        "share: of a float16 cache. Errors: root mean square, relative to the data.\n"
    )
    show.out(attends)
    say(
        "Attention over int8 is within 1 % of that over float16; over int4 it is not. A step reads at most\n"
        f"{largest_size / 2**20:.1f} MiB again and again, which the processor's caches hold.\n"
        "The speeds are theirs; README's are those of memory, 268 MB a step.\n"
        "Errors: of one query for each text, relative to attention over float16, and the largest relative\n"
        "to the largest number; the study averages five queries. step: a token for each of\n"
        f"{BATCH} sequences with contexts of {length} tokens, one layer, quickest of {CALLS} calls.\n"
        "GB/s: of cache read, and of contexts where they are written.\n"
        f"\nThe files are in {folder}/. To try next, each a line to paste:\n"
    )
    for operator in STEPS:
        say(f"  {command(arguments(operator, layers - 1, folder, 'int8:g8'))}")
    say(f"  {command(['describe', APPEND])}")
    say(f"  {command(['bench', '--only', 'attention decode int8'])}")
    say(f"  {shlex.join([here(sys.executable), here(DATA.parents[1] / 'razor_attention.py')])}")


def say(text):
    """Print a line that is seen at once, through a pipe too."""
    print(text, flush=True)


def type_in(words):
    """Run a command line in this process."""
    try:
        kvkit_main(words, prog_name="kvkit")
    except SystemExit as ended:
        if ended.code:
            raise


def command(words):
    """Return the words of a command line as a line to paste."""
    script = Path(sys.executable).with_name("kvkit")
    program = [here(script)] if script.exists() else [here(sys.executable), "-m", "kvkit_cli"]
    return shlex.join([*program, *words])


def here(path):
    """Return a path relative to this folder if it is below it."""
    path, folder = Path(path).absolute(), Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def run(data, folder, name):
    """Run every step by command line.

    Return the arrays of the last file, the contexts of each layer, and attention's outputs [layers, ...].
    """
    arrays = empty_file(data, *KINDS[name])
    results = {}
    for step, operator in enumerate(STEPS):
        for layer in range(len(data["layers"])):
            arrays |= step_inputs(data, step, layer)
            words = arguments(operator, layer, folder, name)
            npz.write(words[2], arrays, {})
            type_in([*words, "--quiet"])
            out = npz.read(words[4]).arrays
            results[operator, layer] = out
            arrays |= {x: np.array(out[x]) for x in ("cache", "scale") if x in arrays}
    contexts = [results[APPEND, layer] for layer in range(len(data["layers"]))]
    return arrays, contexts, np.stack([results[ATTEND, i]["attn_output"] for i in range(len(contexts))])


def arguments(operator, layer, folder, name):
    source = folder / f"{name.replace(':', '-')}-{STEPS[operator]}.npz"
    return ["run", operator, str(source), "-o", str(folder / "out.npz"), "--set", f"layer_idx={layer}"]


def empty_file(data, quant_bit, group):
    """Return the arrays and attributes that stay the same through all steps; pages lie in random order."""
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
    """Return the inputs of a step: the prompts of both sequences at step 0, then one token of each."""
    prompts, queries = data["prompt_lens"], data["query"][layer]
    first = prompts + step - 1 if step else np.zeros_like(prompts)
    last = prompts + step
    rows = packed(data, first, last)
    inputs = {
        "current_key": data["current_key"][layer][rows],
        "current_value": data["current_value"][layer][rows],
        "seqstarts": np.concatenate([[0], np.cumsum(last - first)]),
        "kvstarts": np.concatenate([[0], np.cumsum(last)]),
        "start_pos": first,
    }
    if step:
        inputs |= {
            "query": queries[:, step - 1],
            "decoding_batches": np.array(len(prompts)),
            "num_heads": np.array(queries.shape[-2]),
            "num_kv_heads": np.array(data["current_key"].shape[-2]),
            "head_dim": np.array(queries.shape[-1]),
        }
    return inputs


def packed(data, first, last):
    """Return the indices in the file's tokens of the positions [first, last) of each sequence."""
    starts = data["seqstarts"][:-1]
    return np.concatenate([np.arange(s + a, s + b) for s, a, b in zip(starts, first, last, strict=True)])


def stored(arrays):
    """Return the cache and, if there is one, its scale."""
    return [arrays[name] for name in ("cache", "scale") if name in arrays]


def cost(data, arrays):
    """Return the bytes of a token in all layers, and their share of a float16 cache's, as texts."""
    token = sum(array.nbytes / array.shape[3] for array in stored(arrays))
    plain = 2 * data["current_key"].nbytes / data["current_key"].shape[1]
    return f"{token:.0f}", f"{token / plain:.0%}"


def context_errors(data, contexts):
    """Yield the errors of keys and of values that were read back, relative to those that were appended."""
    appended = data["prompt_lens"]
    tokens = packed(data, np.zeros_like(appended), appended)
    for side in ("key", "value"):
        yield rms(np.stack([context[side] for context in contexts]), data[f"current_{side}"][:, tokens])


def rms(got, expected):
    """Return the root mean square of the difference, relative to that of what is expected, as text."""
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    return f"{np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()):.1%}"


def largest(got, expected):
    """Return the largest difference, relative to the largest number that is expected, as text."""
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    return f"{np.abs(got - expected).max() / np.abs(expected).max():.1%}"


def long_contexts(arrays):
    """Return the last step's inputs for longer sequences, made of copies of the pages of both texts."""
    rows, lengths = arrays["cache"].shape[3], np.diff(arrays["kvstarts"])
    full = np.arange(PAGES) < (lengths // PAGE_SIZE)[:, None]
    pages = np.arange(COPIES)[:, None] * rows + arrays["cachestarts"][full]
    kvlen = pages.size * PAGE_SIZE // BATCH
    inputs = {name: array if array.ndim else int(array) for name, array in arrays.items()}
    for name in ("query", "current_key", "current_value"):
        inputs[name] = np.resize(arrays[name], (BATCH, *arrays[name].shape[1:]))
    for name in ("cache", "scale"):
        if name in arrays:
            inputs[name] = np.concatenate([arrays[name]] * COPIES, axis=3)
    return inputs | {
        "seqstarts": np.arange(BATCH + 1),
        "kvstarts": np.arange(BATCH + 1) * kvlen,
        "cachestarts": pages.reshape(BATCH, -1),
        "start_pos": np.full(BATCH, kvlen - 1),
        "max_seqlen": None,
        "max_kvlen": None,
    }


def appending(inputs):
    """Return the speed of a step that reads contexts back instead of attending to them."""
    attends = ("query", "decoding_batches", "num_heads", "num_kv_heads", "head_dim")
    inputs = {name: value for name, value in inputs.items() if name not in attends}
    call = kvkit.dynamic_batching.key_value_cache
    out = call(**inputs)
    return speed(lambda: call(**inputs, out=out), context_bytes(inputs) + sum(array.nbytes for array in out))


def attending(inputs):
    """Return the speed of a step that attends."""
    call = kvkit.dynamic_batching.multi_head_cache_attention
    out = call(**inputs)
    return speed(lambda: call(**inputs, out=out), context_bytes(inputs))


def context_bytes(inputs):
    """Return the bytes of all contexts in one layer of the cache."""
    token = sum(array.nbytes / array.shape[0] / array.shape[3] for array in stored(inputs))
    return int(inputs["kvstarts"][-1] * token)


def speed(function, size):
    """Return the least time of a call, and the speed at which it moves `size` bytes, as texts."""
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return f"{min(times) * 1e6:.0f} µs", f"{size / min(times) / 1e9:.1f}"


if __name__ == "__main__":
    main()
