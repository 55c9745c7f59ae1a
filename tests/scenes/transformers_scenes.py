"""Make tiny models of transformers with random weights, and generate with them."""

import functools

import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

torch.set_num_threads(1)  # for models so small more of them only wait for each other

VOCAB, PAD = 99, 0
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,  # so large that tokens depend on the context, and no two are as good
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
}
HYBRID = {**SIZES, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 6}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**HYBRID, attn_logit_softcapping=2.0, query_pre_attn_scalar=20)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **HYBRID,
            num_local_experts=2,
            num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
}


@functools.cache
def model(name, dtype=torch.float32):
    """Return a model whose weights are the same in every run."""
    torch.manual_seed(5)
    return MODELS[name]().to(dtype).eval()


def prompt(*lengths, seed=0):
    """Return rows of random tokens, padded on the left to the longest, and their mask."""
    generator, longest = torch.Generator().manual_seed(seed), max(lengths)
    ids = torch.randint(1, VOCAB, (len(lengths), longest), generator=generator)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(net, attention, inputs, cache=None, **options):
    """Return the tokens of `generate` under an attention function: 14, greedily by default."""
    net.set_attn_implementation(attention)
    options = {"max_new_tokens": 14, "do_sample": False, **options}
    return net.generate(**inputs, past_key_values=cache, **options)


def expected(net, inputs, **options):
    """Return the tokens by transformers' own cache and plain attention."""
    return generated(net, "eager", inputs, DynamicCache(config=net.config), **options)


def logits(net, attention, inputs, cache=None, **options):
    """Return the logits of a forward pass under an attention function."""
    net.set_attn_implementation(attention)
    with torch.no_grad():
        return net(**inputs, past_key_values=cache, **options).logits
