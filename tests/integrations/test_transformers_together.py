"""Models in one process: the record of an update belongs to its cache, whatever runs before or in between."""

import itertools

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig
from transformers_scenes import SIZES, expected, generated, prompt

from kvkit import KvkitError
from kvkit.integrations.transformers import KvkitCache
from kvkit.integrations.transformers.attention import attention_forward as attention

pytestmark = pytest.mark.transformers
FOUR = {**SIZES, "num_hidden_layers": 4, "head_dim": 16}
SHARED = {
    **FOUR, "num_kv_shared_layers": 2, "layer_types": ["full_attention"] * 4,
    "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8,
}  # fmt: skip
MODELS = {
    "Gemma3nText": {
        **SHARED, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [64] * 4,
    },
    "Gemma4Text": {**SHARED, "global_head_dim": 16},
    "Llama": FOUR,
    "Phi": {**FOUR, "partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "DeepseekV3": {
        **FOUR, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "head_dim": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1,
    },
}  # fmt: skip
STEPS = (0, 11), (11, 12), (12, 13), (13, 17)


def model(name):
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**MODELS[name], attn_implementation="kvkit")
    return transformers.AutoModelForCausalLM.from_config(config).eval()


class Run:
    """Steps a model through tokens, with a kvkit cache ("kvkit"), one of transformers, or without one."""

    def __init__(self, net, how):
        self.net, self.how, self.ids = net, how, prompt(17)["input_ids"]
        self.cache = {"kvkit": KvkitCache, "sdpa": DynamicCache, "other cache": DynamicCache}.get(how)
        if self.cache is not None:
            config = net.config
            self.cache = self.cache(config) if how == "kvkit" else self.cache(config=config)

    def step(self, begin, end):
        """Return the logits of tokens [begin, end)."""
        self.net.set_attn_implementation("sdpa" if self.how == "sdpa" else "kvkit")
        ids = self.ids[:, begin:end] if self.cache is not None else self.ids[:, :end]
        with torch.no_grad():
            logits = self.net(ids, past_key_values=self.cache, use_cache=self.cache is not None).logits
        return logits[:, begin - end :]


def truth(net):
    run = Run(net, "sdpa")
    return [run.step(*step) for step in STEPS]


def check(found, wanted):
    for logits, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(logits, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("first", "second"), [*itertools.product(MODELS, MODELS)])
def test_two_models(first, second):
    """Step by step in turn, then one after the other, then the other way round, and where one has ended."""
    nets = [model(first), model(second)]
    wanted = [truth(net) for net in nets]
    for hows in (("kvkit", "kvkit"), ("kvkit", "no cache"), ("other cache", "kvkit")):
        runs = [Run(net, how) for net, how in zip(nets, hows, strict=True)]
        found = [[run.step(*step) for run in runs] for step in STEPS]
        for logits, want in zip(zip(*found, strict=True), wanted, strict=True):
            check(logits, want)
    for order in (0, 1), (1, 0):
        runs = [Run(net, "kvkit") for net in nets]
        for i in order:
            check([runs[i].step(*step) for step in STEPS], wanted[i])
    del runs
    run = Run(nets[1], "kvkit")
    check([run.step(*step) for step in STEPS], wanted[1])


@pytest.mark.parametrize("name", ["Gemma3nText", "Gemma4Text"])
def test_an_assistant_beside_a_model_with_shared_layers(name):
    net, assistant, inputs = model(name), model("Llama"), prompt(9)
    wanted = expected(net, inputs)
    for kind in "kvkit", "eager":
        assistant.set_attn_implementation(kind)
        more = {"assistant_model": assistant}
        assert torch.equal(generated(net, "kvkit", inputs, KvkitCache(net.config), **more), wanted)
    other = expected(assistant, inputs)
    net.set_attn_implementation("kvkit")
    cache = KvkitCache(assistant.config)
    assert torch.equal(generated(assistant, "kvkit", inputs, cache, assistant_model=net), other)


def states(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Module(torch.nn.Module):
    """Stands for an attention layer of a model."""

    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.eval()


def test_tensors_that_two_caches_get():
    """Each update is answered by tensors of its own."""
    config = LlamaConfig(**SIZES, attn_implementation="kvkit")
    caches, query = [KvkitCache(config), KvkitCache(config)], states(1, 4, 1, 16)
    outputs = []
    for i, cache in enumerate(caches):
        past = states(1, 2, 5, 16, seed=i)
        attention(Module(0), states(1, 4, 5, 16), *cache.update(past, past, 0))
    new = states(1, 2, 1, 16, seed=9)
    returned = [cache.update(new, new, 0) for cache in caches]
    outputs = [attention(Module(0), query, *tensors)[0] for tensors in returned]
    for cache, output in zip(caches, outputs, strict=True):
        keys, values = cache.layers[0].keys, cache.layers[0].values
        torch.testing.assert_close(attention(Module(7), query, keys, values)[0], output)


def test_a_view_of_the_keys_of_another_layer_is_refused():
    """It would be the new tokens alone."""
    cache, query = KvkitCache(LlamaConfig(**SIZES, attn_implementation="kvkit")), states(1, 4, 1, 16)
    for tokens in 5, 1:
        new = states(1, 2, tokens, 16)
        key, value = cache.update(new, new, 0)
        attention(Module(0), states(1, 4, tokens, 16), key, value)
    with pytest.raises(KvkitError, match=r"^key: expected the tensor that update"):
        attention(Module(3), query, key.view_as(key), value.view_as(value))
    attention(Module(3), query, key, value)
