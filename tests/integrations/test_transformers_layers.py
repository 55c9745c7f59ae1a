"""Models with latent rows, recurrent states and shared layers: the tokens of transformers' own cache."""

import copy
import functools

import numpy as np
import pytest
import torch
import transformers
from transformers_scenes import SIZES, expected, generated, prompt

import kvkit.cache
from kvkit import KvkitError
from kvkit.cache import ChunkedLayer, GatedDeltaLayer, IndexedLayer, LatentLayer, SharedLayer, StateLayer
from kvkit.cache.paged.latent import PagedLatentLayer
from kvkit.integrations.transformers import KvkitCache, pending

pytestmark = pytest.mark.transformers

FOUR = {**SIZES, "hidden_size": 32, "num_hidden_layers": 4}
LATENT = {
    **SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 6}
SHARED = {
    **FOUR,
    "tie_word_embeddings": False, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "vocab_size_per_layer_input": 99,
    "hidden_size_per_layer_input": 8, "head_dim": 8,
}  # fmt: skip
MODELS = {
    "DeepseekV2": (LATENT, LatentLayer),
    "DeepseekV3": (LATENT, LatentLayer),
    "Glm4MoeLite": (LATENT, LatentLayer),
    "DeepseekV32": (INDEXED, IndexedLayer),
    "GlmMoeDsa": (INDEXED, IndexedLayer),
    "Qwen3Next": (
        {
            **FOUR, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        },
        GatedDeltaLayer,
    ),
    "Jamba": (
        {
            **FOUR, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "expert_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
        },
        StateLayer,
    ),
    "Bamba": (
        {
            **FOUR, "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
            "mamba_d_state": 8,
        },
        StateLayer,
    ),
    "Lfm2": ({**FOUR, "layer_types": ["conv", "full_attention", "conv", "conv"]}, StateLayer),
    "FalconH1": (
        {
            **SIZES, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
        StateLayer,
    ),
    "NemotronH": (
        {
            **FOUR, "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 4,
            "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
        },
        StateLayer,
    ),
    "Gemma3nText": (
        {
            **SHARED, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6,
        },
        SharedLayer,
    ),
    "Gemma4Text": ({**SHARED, "global_head_dim": 16}, SharedLayer),
    "Llama4Text": (
        {
            **FOUR, "head_dim": 8, "intermediate_size_mlp": 16, "num_local_experts": 2,
            "attention_chunk_size": 6, "no_rope_layers": [1, 0, 1, 1],
        },
        ChunkedLayer,
    ),
}  # fmt: skip
ATTENTIONS = "kvkit", "sdpa"


@functools.cache
def model(name, dtype=torch.float32):
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**MODELS[name][0])
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_of_a_padded_batch(name):
    net, inputs = model(name), prompt(9, 5, 2)
    wanted = expected(net, inputs)
    assert len(set(wanted[0, 9:].tolist())) > 4
    for attention in ATTENTIONS:
        cache = KvkitCache(net.config)
        assert torch.equal(generated(net, attention, inputs, cache), wanted)
        assert any(type(layer) is MODELS[name][1] for layer in cache.cache.layers)
        assert {layer.get_seq_length() for layer in cache.cache.layers} == {9 + 13}


@pytest.mark.parametrize(
    "name", ["DeepseekV3", "DeepseekV32", "Gemma4Text", "Jamba", "FalconH1", "Llama4Text"]
)
def test_attention_reads_in_place(name, monkeypatch):
    def arrays(self):
        raise AssertionError("an array of the context")

    net, inputs = model(name), prompt(9)
    wanted = expected(net, inputs)
    monkeypatch.setattr(pending.Stored, "arrays", arrays)
    assert torch.equal(generated(net, "kvkit", inputs, KvkitCache(net.config)), wanted)


@pytest.mark.parametrize(
    "name", ["DeepseekV3", "DeepseekV32", "Qwen3Next", "FalconH1", "Gemma3nText", "Lfm2", "Llama4Text"]
)
def test_beams_copies_and_files(name, tmp_path):
    net, inputs = model(name), prompt(9, 5)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    cache = KvkitCache(net.config, offload=tmp_path / "cache")
    assert torch.equal(generated(net, "kvkit", inputs, cache, **beams), expected(net, inputs, **beams))
    cache.cache.close()

    inputs = prompt(9)
    wanted = expected(net, inputs, max_new_tokens=12)
    cache = KvkitCache(net.config)
    first = generated(net, "kvkit", inputs, cache, max_new_tokens=5)
    cache.cache.save(tmp_path / "cache.npz")
    loaded = KvkitCache.of(kvkit.cache.load(tmp_path / "cache.npz"), net.config)
    for other in (copy.deepcopy(cache), loaded, cache):
        later = {"input_ids": first, "attention_mask": torch.ones_like(first)}
        assert torch.equal(generated(net, "kvkit", later, other, max_new_tokens=7), wanted)


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "Glm4MoeLite"])
def test_latent_rows_in_pages(name, tmp_path):
    net, inputs = model(name), prompt(9, 5, 2)
    beams, guesses = {"num_beams": 3, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}
    for attention in ATTENTIONS:
        for batch, options in ((inputs, {}), (inputs, beams), (prompt(12), guesses)):
            cache = KvkitCache(net.config, "paged", num_blocks=64, page_size=4)
            assert torch.equal(
                generated(net, attention, batch, cache, **options), expected(net, batch, **options)
            )
    assert all(isinstance(layer, PagedLatentLayer) for layer in cache.cache.layers)

    wanted = expected(net, prompt(9), max_new_tokens=12)
    cache = KvkitCache(net.config, "paged", num_blocks=64, page_size=4)
    first = generated(net, "kvkit", prompt(9), cache, max_new_tokens=5)
    cache.cache.save(tmp_path / "cache.npz")
    for other in (copy.deepcopy(cache), KvkitCache.of(kvkit.cache.load(tmp_path / "cache.npz"), net.config)):
        later = {"input_ids": first, "attention_mask": torch.ones_like(first)}
        assert torch.equal(generated(net, "kvkit", later, other, max_new_tokens=7), wanted)


@pytest.mark.parametrize("name", ["DeepseekV3", "Gemma4Text", "Llama4Text"])
def test_assisted_decoding(name):
    net, inputs = model(name), prompt(12)
    wanted = expected(net, inputs)
    for attention in ATTENTIONS:
        cache = KvkitCache(net.config)
        assert torch.equal(generated(net, attention, inputs, cache, prompt_lookup_num_tokens=3), wanted)


def test_a_prompt_in_chunks_and_half_precision():
    net, inputs = model("DeepseekV3", torch.bfloat16), prompt(20)
    logits = []
    for attention in ATTENTIONS:
        net.set_attn_implementation(attention)
        cache = KvkitCache(net.config)
        with torch.no_grad():
            for ids in inputs["input_ids"].split(7, dim=1):
                last = net(input_ids=ids, past_key_values=cache).logits
        logits.append(last)
    torch.testing.assert_close(*logits, atol=0.15, rtol=0.05)


# What transformers' own tests ask of a cache (facts of `tests/utils/test_cache_utils.py`, of which its
# distributions have none)


CACHES = {
    "latent": ("DeepseekV3", {}),
    "latent pages": ("DeepseekV3", {"kind": "paged", "num_blocks": 64, "page_size": 4}),
    "indexed": ("DeepseekV32", {}),
    "shared": ("Gemma4Text", {}),
    "chunks": ("Llama4Text", {}),
    "static chunks": ("Llama4Text", {"kind": "static", "max_cache_len": 40}),
    "states": ("Qwen3Next", {}),
    "states beside": ("FalconH1", {}),
    "pages and states": ("Qwen3Next", {"kind": "paged", "num_blocks": 64, "page_size": 4}),
    "pages, states beside": ("FalconH1", {"kind": "paged", "num_blocks": 64, "page_size": 4}),
    "shared pages": ("Gemma3nText", {"kind": "paged", "num_blocks": 64, "page_size": 4}),
}


@pytest.mark.parametrize("kind", CACHES)
def test_padding_beams_and_crop(kind):
    """More padding changes nothing, beams are reordered, and a cropped or repeated cache goes on."""
    name, options = CACHES[kind]
    net, inputs = model(name), prompt(7)
    wanted = expected(net, inputs)
    wider = {side: torch.nn.functional.pad(tensor, (5, 0)) for side, tensor in inputs.items()}
    found = generated(net, "kvkit", wider, KvkitCache(net.config, **options))
    assert torch.equal(found[:, 5:], wanted)

    beams = {"num_beams": 2, "num_return_sequences": 2, "return_dict_in_generate": True}
    found = generated(net, "kvkit", inputs, KvkitCache(net.config, **options), **beams)
    assert any(len({b for b in row if b >= 0}) > 1 for row in found.beam_indices.tolist())
    assert torch.equal(found.sequences, expected(net, inputs, **beams).sequences)

    cache = KvkitCache(net.config, **options)
    if kind in ("shared", "chunks", "states"):
        cache.activate_past_recording()  # so that windows can go back
    generated(net, "kvkit", inputs, cache)
    if cache.is_croppable:
        cache.crop(-6)
        assert cache.get_seq_length() == 14
        some = {"input_ids": wanted[:, :15], "attention_mask": torch.ones(1, 15, dtype=torch.long)}
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        some = {side: tensor.repeat(3, 1) for side, tensor in some.items()}
        assert torch.equal(generated(net, "kvkit", some, cache, max_new_tokens=6), wanted.repeat(3, 1))
    cache.reset()
    assert torch.equal(generated(net, "kvkit", inputs, cache), wanted)


@pytest.mark.parametrize("name", ["Qwen3Next", "FalconH1"])
def test_calls_of_a_cache_with_states(name):
    net, inputs = model(name), prompt(9, 5)
    cache = KvkitCache(net.config)
    assert not cache.has_previous_state(0)
    assert (cache.get_seq_length(), cache.get_max_length()) == (0, -1)
    assert cache.get_conv_state(0) is None
    assert cache.get_recurrent_state(0) is None
    generated(net, "kvkit", inputs, cache)
    theirs = transformers.DynamicCache(config=net.config)
    generated(net, "sdpa", inputs, theirs)
    for ours, own in zip(cache.layers, theirs.layers, strict=True):
        for kind in ("conv_states", "recurrent_states"):
            for i, state in getattr(own, kind, {}).items():
                found = getattr(ours, kind)[i]
                if kind == "conv_states":  # kvkit's convolution needs one past input fewer
                    state = state[..., -found.shape[-1] :]
                torch.testing.assert_close(found, state, atol=1e-4, rtol=1e-4)
    assert cache.has_previous_state(0)
    assert (cache.is_croppable, cache.is_compileable, cache.batch_size) == (False, False, 2)
    before = cache.layers[0].recurrent_states[0].clone()
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert torch.equal(cache.layers[0].recurrent_states[0], before[[1, 0]])
    with pytest.raises(KvkitError, match="tokens to stay, which it has states of"):
        cache.crop(-2)
    assert cache.get_seq_length() == 22
    cache.reset()
    assert not cache.has_previous_state(0)
    assert torch.equal(generated(net, "kvkit", inputs, cache), expected(net, inputs))


def test_what_is_refused():
    net = model("DeepseekV3")
    cache = KvkitCache(net.config)
    with pytest.raises(KvkitError, match="a layer with a recurrent state"):
        cache.get_conv_state(0)
    with pytest.raises(KvkitError, match="a layer with index keys"):
        cache.update_indexer(torch.ones(1, 1, 4), 0)
    mask = torch.ones(1, 1, 9, 18, dtype=torch.bool)
    inputs = prompt(9)
    with torch.no_grad():
        net.set_attn_implementation("kvkit")
        net(**inputs, past_key_values=cache)
        with pytest.raises(KvkitError, match="attention_mask: expected one that hides later tokens"):
            net(inputs["input_ids"], attention_mask=mask, past_key_values=cache)
    assert np.asarray(cache.layers[0].keys).shape == (1, 1, 18, 32)
