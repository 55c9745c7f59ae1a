"""Time `kvkit study` on a dump of a GB, in processor seconds: thirty policies, formats, and a mix.

    python -m benchmarks.study [LAYERS] [--profile]

The dump is that of a model with 8 key heads and 32 query heads of 128 elements, for 8,192 tokens, in float16:
32 layers have 1.07 GB. It has the queries of the last 64 tokens. As `--evict` and `--bits` divide them by
default, the first 48 are for scorers and for the search, and the last 16 judge: 16,384 outputs over all
layers and heads. Layers share nothing, so LAYERS (2) are measured, and seconds are scaled to 32. Numbers are
random, with channels of keys of different sizes.

    policies    8 scorers, random (three seeds) and oracle, each keeping 25, 50 and 75 %: 30 columns
    coded       the same 24 with codes of int4:g32, and random and oracle: 30 columns
    formats     the 10 formats below, judged by the same 16 queries
    mix         a search of the 7 default formats for 4.5 bits, and the mix

On a shared Emerald Rapids of two hardware threads, in alternation with the version before (2026-11-28), a GB
took 48 and 61 CPU s with policies (145 and 181 before), 87 with codes (123) and 241 with formats (540).
"""

import cProfile
import importlib
import pstats
import sys
import time
from concurrent.futures import Future

import numpy as np

from kvkit import tools

TOKENS, KEY_HEADS, QUERY_HEADS, DIM, QUERIES, WHOLE = 8192, 8, 32, 128, 64, 32
SCORERS = "knorm", "keydiff", "snapkv", "tova", "cur", "streaming", "rkv", "lagkv"
FORMATS = "fp8,int8:g8,int4:g32,int4:g32+hadamard,q8_0,q4_0,iq4_nl,nvfp4,kivi4,kivi2"


def dump(layers):
    """Return the arrays of a dump of so many layers."""
    rng = np.random.default_rng(0)

    def numbers(*shape):
        return rng.standard_normal(shape, np.float32)

    keys = numbers(layers, TOKENS, KEY_HEADS, DIM) * rng.gamma(1, 1, (layers, 1, KEY_HEADS, DIM))
    query = numbers(layers, 1, QUERIES, QUERY_HEADS, DIM)
    arrays = {"key": keys, "value": numbers(layers, TOKENS, KEY_HEADS, DIM), "query": query}
    return {name: array.astype(np.float16) for name, array in arrays.items()}


class OneThread:
    """Runs jobs at once, in the caller's thread, where a profiler sees them."""

    def __init__(self, _):
        self.map = map

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *arguments, **options):
        """Return a job that has run."""
        job = Future()
        job.set_result(function(*arguments, **options))
        return job


def main():
    """Print the seconds of each study."""
    profile = "--profile" in sys.argv
    if profile:
        importlib.import_module("kvkit.tools.studies.study").ThreadPoolExecutor = OneThread
    layers = int(next((word for word in sys.argv[1:] if word.isdecimal()), 2))
    policies = [f"{scorer}@{share}" for scorer in SCORERS for share in (0.25, 0.5, 0.75)]
    studies = {
        "policies": {"evict": ",".join(policies)},
        "coded": {"evict": ",".join(f"{each}+int4:g32" for each in policies)},
        "formats": {"schemes": FORMATS, "judge": 16},
        "mix": {"bits": 4.5},
    }
    arrays = dump(layers)
    wanted = [name for name in studies if name in sys.argv] or list(studies)
    for name in wanted:
        small = {side: arrays[side][:1, -512:] for side in ("key", "value")} | {"query": arrays["query"][:1]}
        tools.study(small, **studies[name])  # compiles and imports
        profiler = cProfile.Profile() if profile else None
        begin, clock = time.process_time(), time.perf_counter()
        if profiler:
            profiler.enable()
        found = tools.study(arrays, **studies[name])
        if profiler:
            profiler.disable()
        seconds = (time.process_time() - begin) * WHOLE / layers
        elapsed = (time.perf_counter() - clock) * WHOLE / layers
        print(f"{name:9} {len(found.summary):2} columns: {seconds:6.1f} CPU s a GB, {elapsed:6.1f} s")
        if profiler:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
