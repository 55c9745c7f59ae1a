"""Tokens that are removed from a cache of a transformers model, which goes on with the others."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

from kvkit import KvkitError, Rope  # noqa: E402
from kvkit.integrations.transformers import KvkitCache  # noqa: E402


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="kvkit",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def step(model, cache, position, **options):
    options |= {"position_ids": torch.tensor([[position]]), "cache_position": torch.tensor([position])}
    with torch.inference_mode():
        return model(torch.tensor([[7]]), past_key_values=cache, **options).logits[0, -1]


def test_removed_tokens_are_as_hidden_ones_and_closing_the_hole_keeps_distances(model):
    caches = [KvkitCache(model.config) for _ in range(3)]
    for cache in caches:
        with torch.inference_mode():
            model(torch.arange(12)[None], past_key_values=cache)
    hidden, holed, closed = caches
    mask = torch.ones(1, 13, dtype=torch.bool)
    mask[:, :7] = False
    expected = step(model, hidden, 12, attention_mask=mask)
    holed.cache.remove(0, 7)
    torch.testing.assert_close(step(model, holed, 12), expected, atol=1e-5, rtol=0)
    closed.cache.remove(0, 7, close=True, rope=Rope.from_config(model.config))
    assert closed.get_seq_length() == 5
    torch.testing.assert_close(step(model, closed, 5), expected, atol=1e-5, rtol=0)
    with pytest.raises(KvkitError, match="attention_mask"):
        step(model, holed, 13, attention_mask=torch.arange(14)[None] > 9)


def test_attention_that_knows_no_positions_is_refused(model):
    config = transformers.LlamaConfig(**model.config.to_dict() | {"attn_implementation": "sdpa"})
    cache = KvkitCache(config)
    states = torch.ones(1, 2, 5, 16)
    cache.update(states, states, 0)
    cache.cache.remove(1, 2)
    with pytest.raises(KvkitError, match="attn_implementation"):
        cache.update(states[:, :, :1], states[:, :, :1], 0)
