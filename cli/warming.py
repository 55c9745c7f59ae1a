"""Compile code as a worker of `kvkit warm`: each line of stdin is a task [name, arguments of `CacheKind`].

A line of stdout answers each task: [text to print after its name, error], each may be "".
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvkit
from kvkit import formats
from kvkit.errors import KvkitError
from kvkit.tools import tuning

CODE_BITS = {fmt.name: bits for bits, fmt in formats.QUANTIZED.items()}  # quant_bit
PROMPT = 40  # tokens: enough for the kernels of prompts
CALL_TOKENS = 1, 8192  # of a call on one thread, and of a call on all threads
SCALE_FORMAT = "float16"


@dataclass(frozen=True)
class CacheKind:
    """Describes a cache to compile for."""

    cache: str  # the element of the cache
    group: int  # elements that share a scale
    data: str  # the element of keys and values before they become codes
    dim: int  # elements of a head
    queries: int  # query heads for each key head
    capability: tuple[int, int] | None = None  # the compute capability of a GPU that is not there


Task = Callable[[CacheKind], str | None]
TASKS: dict[str, Task] = {}


def task(compile: Task) -> Task:
    """Decorate a task; what it returns is printed after its name."""
    TASKS[compile.__name__] = compile
    return compile


def states_of(kind: CacheKind, tokens: int, heads: int = 1) -> np.ndarray:
    """Return queries, keys or values [1, tokens, heads, dim]."""
    return np.ones((1, tokens, heads, kind.dim), formats.BY_NAME[kind.data].dtype)


def empty_cache(kind: CacheKind, tokens: int) -> dict[str, Any]:
    """Return an empty cache and the attributes that describe it."""
    bits = CODE_BITS.get(kind.cache, 0)
    dtype, last = formats.BY_NAME[kind.cache].dtype, kind.dim * bits // 8 if bits else kind.dim
    scale = np.zeros((1, 1, 2, tokens, 1, kind.dim // kind.group), SCALE_FORMAT) if bits else None
    cache = np.zeros((1, 1, 2, tokens, 1, last), dtype)
    return {"cache": cache, "scale": scale, "quant_bit": bits, "quant_group": kind.group}


@task
def cache(kind: CacheKind) -> None:
    """Append and load, on one thread and on all."""
    for tokens in CALL_TOKENS:
        new = states_of(kind, tokens)
        kvkit.key_value_cache(new, new, 0, **empty_cache(kind, tokens))


@task
def attention(kind: CacheKind) -> None:
    """Attend with a prompt, then with a token. Caches of all formats share this code."""
    for tokens in PROMPT, 1:
        query, new = states_of(kind, tokens, kind.queries), states_of(kind, PROMPT)
        kvkit.multi_head_attention(query, new, new, **sizes_of(kind))


@task
def attention_to_cache(kind: CacheKind) -> None:
    """Attend over a cache with a prompt, then with a token."""
    arguments = empty_cache(kind, PROMPT + 1)
    for past, tokens in ((0, PROMPT), (PROMPT, 1)):
        query, new = states_of(kind, tokens, kind.queries), states_of(kind, tokens)
        kvkit.multi_head_cache_attention(query, new, new, past, **arguments, **sizes_of(kind))


def sizes_of(kind: CacheKind) -> dict[str, Any]:
    """Return the attributes of attention that describe heads."""
    return {"num_heads": kind.queries, "num_kv_heads": 1, "head_dim": kind.dim}


@task
def step(kind: CacheKind) -> None:
    """Plan a step over pages."""
    kvkit.dynamic_batching.plan([0, 1], [0, 1], [[0]], start_pos=[0], cache_mode=1, page_size=16)


@task
def tune(kind: CacheKind) -> str:
    """Measure the distances of prefetches on this machine; return them, or why not, as text."""
    return f": {tuning.tune()}"


@task
def kernels(kind: CacheKind) -> str:
    """Compile the kernels of a GPU; return how many were compiled, as text."""
    from kvkit_cuda import warm

    if kind.capability:
        warm.compile_for(tuple(kind.capability))
    before = dict(warm.compiled.counts)
    counts = warm.warm(kind.cache, kind.group, kind.data, kind.dim, kind.queries, SCALE_FORMAT)
    return ": " + ", ".join(f"{count - before[what]} {what}" for what, count in counts.items())


def main() -> None:
    """Run the tasks on stdin and print a line for each, until stdin or stdout is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits handles Ctrl-C and ends this one
    for line in sys.stdin:
        name, kind = json.loads(line)
        text, failure = "", ""
        try:
            text = TASKS[name](CacheKind(**kind)) or ""
        except (KvkitError, OSError, MemoryError) as error:
            failure = str(error) or "out of memory"
        try:
            print(json.dumps([text, failure]), flush=True)
        except BrokenPipeError:
            os._exit(1)  # the process that waits has been killed


if __name__ == "__main__":
    main()
