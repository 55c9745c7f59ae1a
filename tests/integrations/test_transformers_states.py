"""Models whose recurrent states kvkit computes: the tokens and numbers of transformers' own functions."""

import contextlib
import functools
import sys

import pytest
import torch
import transformers
from transformers_scenes import SIZES, expected, generated, prompt

import kvkit
from kvkit.cache import GatedDeltaLayer
from kvkit.integrations.transformers import KvkitCache, compute_states, recurrent

pytestmark = pytest.mark.transformers

FOUR = {**SIZES, "hidden_size": 32, "num_hidden_layers": 4}
GDN = {
    **FOUR, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
KDA = {
    **FOUR, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_heads": 4,
    "linear_head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "num_experts": 4, "num_experts_per_token": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS = {"Qwen3Next": GDN, "Qwen3_5Text": GDN, "KimiLinear": KDA}


@functools.cache
def model(name):
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def ran(monkeypatch):
    """Return a list that gets the number of tokens of each call of the rule."""
    calls, rule = [], recurrent.gated_delta_rule

    def counted(q, *arguments, **options):
        calls.append(q.shape[1])
        return rule(q, *arguments, **options)

    monkeypatch.setattr(recurrent, "gated_delta_rule", counted)
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_a_padded_batch(name, ran):
    net, inputs = model(name), prompt(70, 5)
    wanted = expected(net, inputs)
    with compute_states(net):
        assert torch.equal(
            generated(net, "sdpa", inputs, transformers.DynamicCache(config=net.config)), wanted
        )
        assert set(ran) == {70, 1}
    before = len(ran)
    assert torch.equal(expected(net, inputs), wanted)
    assert len(ran) == before  # the functions are transformers' again


@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear"])
@pytest.mark.parametrize("tokens", [1, 20, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_transformers_functions(name, tokens, dtype):
    rng = torch.Generator().manual_seed(tokens)
    heads, channels = (2, ()) if name == "Qwen3Next" else (4, (8,))
    q, k = (torch.randn(2, tokens, heads, 8, generator=rng).to(dtype) for _ in range(2))
    v = torch.randn(2, tokens, 4, 6, generator=rng).to(dtype)
    g = -torch.rand(2, tokens, 4, *channels, generator=rng)
    beta, state = torch.rand(2, tokens, 4, generator=rng), torch.randn(2, 4, 8, 6, generator=rng)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    module, before = sys.modules[type(model(name)).__module__], state.clone()
    for function in (getattr(module, rule) for rule in recurrent.RULE_FUNCTIONS if hasattr(module, rule)):
        for start in (None, state):
            call = {"query": q, "key": k, "value": v, "g": g, "beta": beta, "initial_state": start, **options}
            wanted, found = function(**call), recurrent.rule_of(function)(**call)
            limit = 2e-5 if dtype == torch.float32 else 1e-2
            for got, right in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, right.to(got.dtype), atol=limit, rtol=limit)
    assert torch.equal(state, before)


@pytest.fixture
def steps(monkeypatch):
    """Return a list of the tokens of each step that a layer of kvkit computes."""
    counts, add = [], GatedDeltaLayer.add_tokens

    def counted(self, tokens, *arguments, **options):
        counts.append(tokens[0].shape[1])
        return add(self, tokens, *arguments, **options)

    monkeypatch.setattr(GatedDeltaLayer, "add_tokens", counted)
    return counts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("computes", [False, True])
def test_layers_of_a_cache_compute_rule_and_convolution(name, computes, steps, monkeypatch):
    net, inputs = model(name), prompt(70, 5)
    wanted = expected(net, inputs)
    assert not steps
    module = sys.modules[type(net).__module__]
    for convolution in recurrent.CONVOLUTIONS:
        found = getattr(module, convolution)
        monkeypatch.setattr(module, convolution, getattr(found, "of_transformers", found))
    KvkitCache(net.config)  # wraps them
    for convolution, wrap in recurrent.CONVOLUTIONS.items():
        own = getattr(module, convolution).of_transformers

        def refused(*arguments, **options):
            raise AssertionError("transformers' convolution")

        monkeypatch.setattr(module, convolution, wrap(refused))
        assert own is not None
    with compute_states(net) if computes else contextlib.nullcontext():
        cache = KvkitCache(net.config)
        assert any(isinstance(layer, GatedDeltaLayer) for layer in cache.cache.layers)
        assert torch.equal(generated(net, "sdpa", inputs, cache), wanted)
    assert set(steps) == {70, 1}
    assert {layer.get_seq_length() for layer in cache.cache.layers} == {70 + 13}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("drafts", ["lookup", "assistant"])
def test_drafts_are_taken_back(name, drafts, steps, monkeypatch):
    """transformers refuses drafts for such models, as its own cache cannot take tokens out of a state."""
    net, inputs = model(name), prompt(12)
    monkeypatch.setattr(type(net), "_is_stateful", False)
    wanted = expected(net, inputs, max_new_tokens=30)
    options = {"prompt_lookup_num_tokens": 3} if drafts == "lookup" else {"assistant_model": model(name)}
    with pytest.raises(ValueError, match="requires a cache that can be cropped"):
        generated(net, "sdpa", inputs, transformers.DynamicCache(config=net.config), **options)
    if drafts == "assistant":
        torch.manual_seed(6)  # other weights, whose drafts are mostly wrong
        other = transformers.AutoModelForCausalLM.from_config(net.config).eval()
        options = {"assistant_model": other}
    cache = KvkitCache(net.config)
    assert torch.equal(generated(net, "kvkit", inputs, cache, max_new_tokens=30, **options), wanted)
    assert max(steps[len(steps) // 2 :]) > 1  # several tokens in a step, some of them dropped
    assert cache.get_seq_length() == 12 + 29


def test_a_loaded_cache_goes_on(steps, tmp_path):
    net, inputs = model("Qwen3_5Text"), prompt(9)
    wanted = expected(net, inputs, max_new_tokens=12)
    cache = KvkitCache(net.config)
    first = generated(net, "kvkit", inputs, cache, max_new_tokens=5)
    cache.cache.save(tmp_path / "cache.npz")
    again = KvkitCache.of(kvkit.cache.load(tmp_path / "cache.npz"), net.config)
    later = {"input_ids": first, "attention_mask": torch.ones_like(first)}
    assert torch.equal(generated(net, "kvkit", later, again, max_new_tokens=7), wanted)


def test_two_models_in_turns(steps):
    """A layer is found by its own tensors, so another model's rule in between is not taken for it."""
    net, other = model("Qwen3Next"), model("Qwen3_5Text")
    wanted = expected(net, prompt(9))
    cache, theirs = KvkitCache(net.config), transformers.DynamicCache(config=other.config)
    ids = prompt(9)["input_ids"]
    with torch.no_grad():
        for _ in range(14):
            token = (
                net(input_ids=ids[:, cache.get_seq_length() :], past_key_values=cache)
                .logits[:, -1:]
                .argmax(-1)
            )
            other(input_ids=token, past_key_values=theirs)
            ids = torch.cat((ids, token), 1)
    assert torch.equal(ids, wanted)


def test_gradients_stay_with_transformers(ran):
    net, inputs = model("Qwen3Next"), prompt(9)
    with compute_states(net):
        net(**inputs).logits.sum().backward()
    assert not ran
    net.zero_grad()


def test_a_model_without_such_layers():
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 32, "num_hidden_layers": 1})
    net = transformers.AutoModelForCausalLM.from_config(config)
    with (
        pytest.raises(kvkit.KvkitError, match=r"^model: expected .* got LlamaForCausalLM"),
        compute_states(net),
    ):
        pass
