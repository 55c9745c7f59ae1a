"""Kills processes that change caches in files: `python offload_kill_fuzz.py FOLDER COUNT SEED`.

What opens after each kill is the cache as the last call that was said to be done has left it, or as the next
one does, in all three layers, and goes on like that. Prints how many kills came amid a call: layers held
different tokens, or a file was left behind. `PYTHONPATH` has the rooms of the tests.
"""

import copy
import itertools
import json
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
from quantized_cache_scenes import OPTIONS, states

from kvkit.cache import Cache, DynamicLayer, QuantizedLayer, SlidingWindowLayer, StaticLayer

LONGEST = 200  # tokens
DRAFT = 9


def cache_of(seed):
    """Return a cache of three layers; every fourth has codes, and every fourth can lose any tokens."""
    if seed % 4 == 1:
        return Cache([DynamicLayer(), QuantizedLayer(**OPTIONS), DynamicLayer()])
    if seed % 4 == 0:
        return Cache([DynamicLayer(), StaticLayer(LONGEST), QuantizedLayer(**OPTIONS)])
    return Cache([DynamicLayer(), SlidingWindowLayer(4), StaticLayer(LONGEST)])


def calls(seed):
    """Yield (name, argument) of calls without end: steps, cropped drafts, other orders, resets."""
    rng, length = np.random.default_rng(seed), 0
    while True:
        name = str(rng.choice(["update", "update", "update", "draft", "reorder", "reset"],
                              p=[0.3, 0.2, 0.2, 0.2, 0.08, 0.02]))  # fmt: skip
        if length + 60 > LONGEST:
            name = "reset"
        elif name in ("reorder", "draft") and seed % 4 == 1:
            name = "compress"
        if name == "update":
            count = int(rng.choice([1, 1, 1, 2, 7, 40]))
            length += count
            yield "update", count
        elif name == "draft":
            yield "activate_past_recording", None
            yield "update", DRAFT
            dropped = int(rng.integers(1, DRAFT + 1))
            length += DRAFT - dropped
            yield "crop", -dropped
        elif name == "compress":
            if length:
                yield "compress", float(rng.uniform(0.2, 1))
        elif name == "reorder":
            if length:
                yield "reorder", rng.integers(0, 2, 2)
        else:
            length = 0
            yield "reset", None


def do(cache, number, name, argument):
    """Make a call; what a step returns, as bytes."""
    if name == "compress":
        cache.compress("streaming", keep=argument, sinks=1)
        return None
    if name != "update":
        getattr(cache, name)(*(() if argument is None else (argument,)))
        return None
    new = [states(argument, seed=[number, i], dims=(16, 24)) for i in range(len(cache))]
    return [np.asarray(x).tobytes() for i in range(len(cache)) for x in cache.update(*new[i], i)]


def seen(cache):
    """Return what tells caches apart: the number of tokens, and the results of the next steps."""
    cache = copy.deepcopy(cache)
    lengths = [layer.get_seq_length() for layer in cache.layers]
    results = [do(cache, number, "update", count) for number, count in enumerate((1, 6))]
    query = states(1, 2, 4, dims=(16,), seed=9)[0]
    return lengths, results, [cache.attend(query, i).tobytes() for i in range(len(cache))]


def work(folder, seed):
    """Be the process that is killed: say of each call that it is done."""
    cache = cache_of(seed)
    cache.offload(folder, only_non_sliding=False)
    for number, call in enumerate(calls(seed)):
        do(cache, number, *call)
        print(number + 1, flush=True)


def torn(folder):
    """Return whether a folder shows that a call was interrupted."""
    about = [json.loads(path.read_text()) for path in folder.glob("layer-*.json")]
    lengths = {each["state"]["length"] if "state" in each else 0 for each in about}
    return len(lengths) > 1 or any(".new" in path.name or ".next" in path.name for path in folder.iterdir())


def kill(folder, count, seed):
    rng, amid, made = np.random.default_rng(seed), 0, 0
    for number in range(seed * count, (seed + 1) * count):
        command = [sys.executable, __file__, str(folder / "cache"), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.2))
            process.kill()
            whole = process.stdout.read().decode().rpartition("\n")[0].split()
        assert process.returncode == -9
        done = max(map(int, whole), default=1)
        made += done
        amid += torn(folder / "cache")
        expected = cache_of(number)
        before = list(itertools.islice(calls(number), done + 1))
        for i, call in enumerate(before[:-1]):
            do(expected, i, *call)
        legal = [seen(expected)]
        do(expected, done, *before[-1])
        legal.append(seen(expected))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*the first step is undone", UserWarning)
            again = Cache.open(folder / "cache", keep=False)
        found = seen(again)
        assert found in legal, (number, done, before[-1], found[0], [each[0] for each in legal])
        again.close()
        assert list((folder / "cache").iterdir()) == []
        shutil.rmtree(folder / "cache")
    return {"kills": count, "amid a call": amid, "calls": made}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        work(Path(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps(kill(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
