"""Cases of key heads that grow in number and of pages that grow in size, over one context, on one thread.

Seconds are those of the CPU, so that other programs on the machine count less.
"""

import time
from dataclasses import replace

from benchmarks.suites.growth import HEADS, decode
from benchmarks.suites.measuring import Case

TOKENS = 2**16
KEY_HEADS = 1, 2, 4, 8, 16, 32  # for 32 query heads
PAGES = 16, 32, 64, 256, 1024  # tokens of a page; pages lie in random order
KINDS = "float16", "int8"


def step(kind, heads=HEADS, page=0):
    """Prepare a step of decoding beside a read, both timed by the CPU."""

    def prepare():
        work = decode(kind, 1, TOKENS, (1, TOKENS), 1, heads, page)()
        beside = {name: cpu_seconds(function) for name, function in work.beside.items()}
        return replace(work, run=cpu_seconds(work.run), beside=beside, timed=True)

    return prepare


def cpu_seconds(function):
    """Return a function of the round that returns how many CPU seconds `function` takes."""

    def run(i):
        begin = time.process_time()
        function(i)
        return time.process_time() - begin

    return run


CASES = [
    *(Case(f"decode {kind}, {heads} kv heads", step(kind, heads)) for kind in KINDS for heads in KEY_HEADS),
    *(Case(f"pages of {page}, {kind}", step(kind, page=page)) for kind in KINDS for page in PAGES),
]
