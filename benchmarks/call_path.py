"""Count the files of the package that a call enters, and how often it moves from file to file.

python benchmarks/call_path.py prints both, as a measure of how hard it is to follow a call. A first call is
one that checks and prepares everything; its machine code is compiled before.
"""

import itertools
import sys
from pathlib import Path

import numpy as np

import kvkit

PACKAGE = str(Path(kvkit.__file__).parent)
HEADS, DIM, PAGES, PAGE_SIZE = 2, 64, 4, 16


def path_of(function):
    """Return the files that a call enters, in order, and how often it moves from one to another."""
    entered = []  # the file of each function that is called

    def note(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            entered.append(name.removeprefix(PACKAGE + "/"))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    moves = sum(file != next_file for file, next_file in itertools.pairwise(entered))
    return list(dict.fromkeys(entered)), moves


def attention(cache, new, heads=HEADS):
    """Return a call of attention over a paged cache, for one new token of each of two sequences."""
    query = np.ones((2, heads, DIM), np.float32)
    index = [0, 1, 2], [0, 4, 6], [[0], [PAGE_SIZE]], [3, 1]
    seqstarts, kvstarts, cachestarts, start_pos = map(np.array, index)
    sizes = {"num_heads": heads, "num_kv_heads": HEADS, "head_dim": DIM}
    place = {"cache_mode": 1, "page_size": PAGE_SIZE, "cache_layout": 3}

    def call():
        kvkit.dynamic_batching.multi_head_cache_attention(
            query, new, new, seqstarts, kvstarts, cachestarts, start_pos, 0, None, None, cache,
            **sizes, **place,
        )  # fmt: skip

    return call


def conversion():
    """Return a call that converts a cache of two layers from Transformers' layout to pages of vLLM's."""
    layers = [[np.zeros((1, HEADS, 5, DIM), np.float16) for _ in range(2)] for _ in range(2)]
    convert = kvkit.tools.convert
    lines = {"from_layout": "hf", "to_layout": "vllm-lbnhc"}
    return lambda: convert({"cache": layers}, None, page_size=4, **lines)


def main():
    cache = np.zeros((1, 2, HEADS, PAGES * PAGE_SIZE, DIM), np.float32)
    new = np.ones((2, HEADS, DIM), np.float32)
    attend, convert = attention(cache, new), conversion()
    for call in (attend, convert):
        call()  # compiles
    kvkit.calls.steps.planned_steps.clear()
    operator = "dynamic_batching.multi_head_cache_attention"
    for name, call in (
        (f"first call of {operator}", attend),
        (f"repeated call of {operator}", attend),
        ("tools.convert", convert),
    ):
        files, moves = path_of(call)
        print(f"{name}: {len(files)} files, {moves} moves")
        print("   ", " ".join(files))


if __name__ == "__main__":
    main()
