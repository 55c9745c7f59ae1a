"""`KvkitCache` for DeepSeek V4: a tiny random model generates the tokens that it does with its own cache."""

import itertools

import pytest
import torch
import transformers

import kvkit
from kvkit import KvkitError
from kvkit.cache import load
from kvkit.integrations.transformers import KvkitCache

TYPES = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


@pytest.fixture(scope="module")
def model():
    config = transformers.AutoConfig.for_model(
        "deepseek_v4", vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=2, head_dim=16, partial_rotary_factor=0.5, q_lora_rank=8, sliding_window=6,
        o_groups=2, o_lora_rank=4, index_n_heads=2, index_head_dim=16, index_topk=2, n_routed_experts=4,
        num_experts_per_tok=2, hc_mult=2, layer_types=[*TYPES, TYPES[1]], max_position_embeddings=1024,
        mlp_layer_types=["moe"] * 4, compress_rates={TYPES[1]: 4, TYPES[2]: 8}, rope_theta=1e4,
        compress_rope_theta=16e4, eos_token_id=None, attn_implementation="eager", rope_parameters={
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompt(count, batch=1):
    return torch.randint(0, 64, (batch, count), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", [1, 8, 21])
@pytest.mark.parametrize("batch", [1, 2])
def test_generated_tokens_are_those_of_transformers(model, count, batch):
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    ids = prompt(count, batch)
    theirs = model.generate(ids, **options)
    ours = model.generate(ids, past_key_values=KvkitCache(model.config), **options)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-5, rtol=1e-5)


def test_drafts_are_taken_back(model):
    """After a crop the model continues as if it had never seen the drafts."""
    ids, cache, plain = prompt(25), KvkitCache(model.config, drafts=3), KvkitCache(model.config)
    with torch.no_grad():
        for part in (ids[:, :19], ids[:, 19:20]):
            model(part, past_key_values=plain)
        model(ids[:, :19], past_key_values=cache)
        model(torch.cat([ids[:, 19:20], 63 - ids[:, 20:23]], 1), past_key_values=cache)
        cache.crop(20)
        outputs = [model(ids[:, 20:], past_key_values=each).logits for each in (cache, plain)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    with pytest.raises(kvkit.KvkitError, match=r"^drafts: expected 0 for a model without"):
        KvkitCache(drafts=1)


def test_chunks_and_files(model, tmp_path):
    """A prompt in parts, saved and loaded between two of them."""
    ids = prompt(30)
    with torch.no_grad():
        theirs = transformers.DynamicCache(config=model.config)
        cache, parts, wanted = KvkitCache(model.config), [], []
        for begin, end in itertools.pairwise((0, 7, 8, 19, 23, 30)):
            wanted.append(model(ids[:, begin:end], past_key_values=theirs).logits)
            parts.append(model(ids[:, begin:end], past_key_values=cache).logits)
            if begin == 8:
                cache.cache.save(tmp_path / "a.npz")
                cache = KvkitCache.of(load(tmp_path / "a.npz"), model.config)
    torch.testing.assert_close(torch.cat(parts, 1), torch.cat(wanted, 1), atol=1e-5, rtol=1e-5)
    layers = [layer.layer for layer in cache.layers]
    assert [layer.get_seq_length() for layer in layers] == [30] * 4
    assert [layer.rows.shape[1] for layer in layers[1:]] == [7, 3, 7]


def test_batches_are_reordered(model):
    ids = prompt(11, 2)
    with torch.no_grad():
        cache = KvkitCache(model.config)
        model(ids, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 1]))
        more = prompt(3)
        got = model(more.expand(2, -1), past_key_values=cache).logits
        theirs = transformers.DynamicCache(config=model.config)
        model(ids[1:], past_key_values=theirs)
        wanted = model(more, past_key_values=theirs).logits
    torch.testing.assert_close(got, wanted.expand(2, -1, -1), atol=1e-5, rtol=1e-5)


def test_refusals(model):
    for kind in ("static", "quantized", "paged"):
        with pytest.raises(KvkitError, match="kind: expected 'dynamic' for a model with compressed rows"):
            KvkitCache(model.config, kind)
    cache = KvkitCache(model.config)
    model.generate(prompt(9), past_key_values=cache, max_new_tokens=3)
    assert "at least 11 tokens to stay" in cache.can("crop", 5)
    assert "moves no tokens" in cache.can("remove", 2, 5)
