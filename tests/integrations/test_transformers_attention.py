"""The attention function of the plug-in, called as models call it, beside loops; and what it refuses."""

import copy
import threading

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    CodeGenConfig,
    CodeGenForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
)
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function
from transformers.models.codegen import modeling_codegen as codegen
from transformers_scenes import SIZES, generated, logits, model, prompt

from kvkit import KvkitError, cpu
from kvkit.cache import CapacityError, DynamicCache, PagedCache, SlidingWindowLayer
from kvkit.integrations.transformers import KvkitCache, pending
from kvkit.integrations.transformers.attention import attention_forward as attention
from kvkit.integrations.transformers.masks import attention_mask
from kvkit.reference import attention as attention_reference

pytestmark = pytest.mark.transformers
FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16


class Module(torch.nn.Module):
    """Stands for an attention layer of a model."""

    def __init__(self, layer_idx=0, is_causal=True):
        super().__init__()
        self.layer_idx, self.is_causal = layer_idx, is_causal
        self.eval()


def config(kind=LlamaConfig, **more):
    return kind(**SIZES, attn_implementation="kvkit", **more)


def states(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wanted(query, key, value, mask=None, window=None, causal=True, **options):
    """Attend by loops over tensors [B, H, tokens, D], with a mask [B or 1, H or 1, q or 1, S]."""
    arrays = [tensor.float().numpy().transpose(0, 2, 1, 3) for tensor in (query, key, value)]
    batch, heads, new, _ = query.shape
    if mask is not None:
        mask = np.broadcast_to(mask.numpy(), (batch, heads, new, mask.shape[-1]))
    rows = [
        attention_reference.attend_sequence(
            *(array[b] for array in arrays),
            None if mask is None else mask[b],
            causal=causal,
            window=(-1, -1) if window is None else (window - 1, -1),
            **options,
        )[0]
        for b in range(batch)
    ]
    return torch.from_numpy(np.stack(rows))


def close(ours, theirs, dtype=torch.float32):
    tolerance = {torch.float32: 2e-6, FLOAT16: 1e-3, BFLOAT16: 8e-3}[dtype]
    assert ours.dtype is dtype
    torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)


# Of what it is given


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("tokens", [1, 5])
def test_queries_are_the_last_tokens(dtype, tokens):
    query, key = states(2, 6, tokens, 16, dtype=dtype), states(2, 2, 9, 16, seed=1, dtype=dtype)
    value = states(2, 2, 9, 8, seed=2, dtype=dtype)
    output, weights = attention(Module(), query, key, value, None, scaling=0.3)
    assert weights is None
    assert output.shape == (2, tokens, 6, 8)
    assert output.is_contiguous()
    close(output, wanted(query, key, value, softmax_scale=0.3), dtype)


def test_any_strides():
    """As models make them: heads cut out of [B, q, heads * dim], without a copy."""
    query, key = (states(2, 5, heads, 16, seed=heads).transpose(1, 2) for heads in (4, 2))
    value = states(2, 2, 16, 5).transpose(2, 3)
    close(attention(Module(), query, key, value, None)[0], wanted(query, key, value))


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 3}, {"softcap": 0.5}, {"s_aux": states(4, seed=7)},
        {"s_aux": states(4, seed=7, dtype=BFLOAT16)}, {"is_causal": False},
        {"sliding_window": 4, "softcap": 0.7, "s_aux": states(4, seed=8), "scaling": 0.2},
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
@pytest.mark.parametrize("padded", [False, True])
def test_what_models_ask_for(options, padded):
    query, key, value = states(2, 4, 5, 16), states(2, 2, 9, 16, seed=1), states(2, 2, 9, 16, seed=2)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :6] = False
    output, _ = attention(Module(), query, key, value, mask if padded else None, **options)
    sinks = options.get("s_aux")
    theirs = wanted(
        query, key, value, mask[:, None, None] if padded else None, options.get("sliding_window"),
        options.get("is_causal", True), softcap=options.get("softcap", 0.0),
        sinks=None if sinks is None else sinks.float().numpy(), softmax_scale=options.get("scaling"),
    )  # fmt: skip
    close(output, theirs)


def test_a_module_says_whether_it_is_causal():
    query, key, value = states(2, 4, 5, 16), states(2, 2, 5, 16, seed=1), states(2, 2, 5, 16, seed=2)
    output, _ = attention(Module(is_causal=False), query, key, value, None)
    close(output, wanted(query, key, value, causal=False))


@pytest.mark.parametrize("shape", [(2, 1, 5, 9), (1, 4, 5, 9)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_whole_mask_is_all_that_hides(shape, dtype):
    query, key, value = states(2, 4, 5, 16), states(2, 2, 9, 16, seed=1), states(2, 2, 9, 16, seed=2)
    mask = states(*shape, seed=3)
    mask = mask > 0 if dtype is torch.bool else mask
    output, _ = attention(Module(), query, key, value, mask, sliding_window=2)
    close(output, wanted(query, key, value, mask, causal=False))


# Of what is stored


def stored(cache, layer_idx=0, tokens=9, seed=1, dtype=torch.float32):
    """Return keys and values, all but the last in the cache, and the last ones as update returns them."""
    key, value = states(2, 2, tokens, 16, seed=seed, dtype=dtype), states(2, 2, tokens, 16, seed=seed + 1)
    value = value.to(dtype)
    first = key[:, :, :-3], value[:, :, :-3]
    attention(Module(layer_idx), first[0].repeat(1, 2, 1, 1), *cache.update(*first, layer_idx), None)
    return key, value, *cache.update(key[:, :, -3:], value[:, :, -3:], layer_idx)


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT16, BFLOAT16])
def test_new_keys_stand_for_all(dtype):
    cache, query = KvkitCache(config()), states(2, 4, 3, 16, dtype=dtype)
    key, value, *new = stored(cache, dtype=dtype)
    assert new[0].shape[2] == 3
    output, _ = attention(Module(), query, *new, None)
    close(output, wanted(query, key, value), dtype)


def test_each_layer_has_its_own():
    cache, query = KvkitCache(config()), states(2, 4, 3, 16)
    first, second = stored(cache, 0, seed=1), stored(cache, 1, seed=5)
    for layer_idx, (key, value, *new) in ((1, second), (0, first)):
        close(attention(Module(layer_idx), query, *new, None)[0], wanted(query, key, value))


@pytest.mark.parametrize("padded", [False, True])
def test_the_window_of_a_model_over_layers_that_keep_all(padded):
    """A cache made without the model's config: the window is the call's."""
    cache = KvkitCache.of(DynamicCache(), config(MistralConfig, sliding_window=4))
    query, (key, value, *new) = states(2, 4, 3, 16), stored(cache)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 2:8] = False
    output, _ = attention(Module(), query, *new, mask if padded else None, sliding_window=4)
    close(output, wanted(query, key, value, mask[:, None, None] if padded else None, window=4))


def test_chunks():
    """Their mask is whole; a window of the chunk's size holds all that it shows."""
    cache = KvkitCache.of(DynamicCache(1, window=4), config())
    key, value = states(2, 2, 11, 16, seed=1), states(2, 2, 11, 16, seed=2)
    whole = torch.tensor([[j <= i and i // 4 == j // 4 for j in range(11)] for i in range(11)])
    chunked, position = chunked_causal_mask_function(4, torch.zeros(2, dtype=int)), 0
    for tokens in (5, 1, 1, 3, 1):
        kv_length, offset = cache.get_mask_sizes(tokens, 0)
        more = LlamaConfig(attention_chunk_size=4)
        mask = attention_mask(
            2, tokens, kv_length, position, offset, chunked, None, local_size=4, config=more
        )
        query, end = states(2, 4, tokens, 16, seed=9), position + tokens
        new = cache.update(key[:, :, position:end], value[:, :, position:end], 0)
        output, _ = attention(Module(), query, *new, mask)
        rows = whole[None, None, position:end, :end]
        close(output, wanted(query, key[:, :, :end], value[:, :, :end], rows, causal=False))
        position = end


def test_threads_do_not_meet():
    """What one thread has stored, another one's attention does not find."""
    cache, query, found = KvkitCache(config()), states(2, 4, 3, 16), []
    _, _, *new = stored(cache)
    other = states(2, 2, 3, 16, seed=11)
    thread = threading.Thread(target=lambda: found.append(attention(Module(), query, other, other, None)[0]))
    thread.start()
    thread.join()
    close(found[0], wanted(query, other, other))
    assert pending.record_of(new[0]) is not None
    attention(Module(), query, *new, None)


# Masks


def test_masks_are_as_small_as_may_be():
    padded = torch.tensor([[False, True, True, True, True], [True] * 5])
    sizes = {"batch_size": 2, "q_length": 1, "kv_length": 5, "q_offset": 4}
    assert attention_mask(**sizes) is None
    assert attention_mask(**sizes, attention_mask=torch.ones_like(padded)) is None
    assert torch.equal(attention_mask(**sizes, attention_mask=padded), padded)
    sizes |= {"kv_length": 3, "kv_offset": 2}
    assert attention_mask(**sizes, attention_mask=padded, local_size=3) is None
    assert attention_mask(**sizes, attention_mask=padded) is padded  # keys are fewer where some were removed
    padded[0, 2] = False
    for longer in (padded, torch.cat([padded, padded], 1)):  # the columns are positions, however many
        assert torch.equal(attention_mask(**sizes, attention_mask=longer, local_size=3), padded[:, 2:])


def test_a_mask_of_the_new_tokens_alone_is_refused():
    net, inputs = model("llama"), prompt(9)
    cache = KvkitCache(net.config)
    logits(net, "kvkit", inputs, cache)
    with pytest.raises(KvkitError, match=r"^attention_mask: expected"):
        logits(net, "kvkit", prompt(2), cache)


def test_a_mask_of_its_own_is_made_whole():
    def not_the_first(batch_idx, head_idx, q_idx, kv_idx):
        return causal_mask_function(batch_idx, head_idx, q_idx, kv_idx) & (kv_idx != 1)

    padded = torch.tensor([[False, True, True, True, True], [True] * 5])
    sizes = {"batch_size": 2, "q_length": 2, "kv_length": 5, "q_offset": 3}
    mask = attention_mask(
        **sizes, mask_function=not_the_first, attention_mask=padded, allow_is_causal_skip=False
    )
    both = [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]], [[1, 0, 1, 1, 0], [1, 0, 1, 1, 1]]
    assert torch.equal(mask, torch.tensor(both, dtype=torch.bool)[:, None])
    longer = attention_mask(batch_size=1, q_length=1, kv_length=5, q_offset=2)
    assert torch.equal(longer, torch.tensor([[[[1, 1, 1, 0, 0]]]], dtype=torch.bool))


# Refused


def test_another_tensor_than_that_of_update():
    cache, query = KvkitCache(config()), states(2, 4, 3, 16)
    _, _, key, value = stored(cache)
    with pytest.raises(KvkitError, match="key: expected the tensor that update of layer 0 returned"):
        attention(Module(), query, key.clone(), value, None)
    attention(Module(), query, key.clone(), value, None)  # once said, it is over


def test_a_copy_that_outlives_the_tensor_of_update():
    """All that is left of the new keys is not all that is stored."""
    cache, query = KvkitCache(config()), states(2, 4, 3, 16)
    *_, new = stored(cache)
    copy = new.clone()
    with pytest.raises(KvkitError, match="key: expected the tensor"):
        attention(Module(), query, copy, copy, None)


def test_keys_of_a_pass_that_was_cut_off_are_forgotten():
    cache, query, key = KvkitCache(config()), states(2, 4, 5, 16), states(2, 2, 5, 16)
    stored(cache)
    close(attention(Module(), query, key, key, None)[0], wanted(query, key, key))
    assert 0 not in pending.LATEST.get()


@pytest.mark.parametrize("first", [True, False])
def test_another_value_than_that_of_update(first):
    """DiffLlama attends twice, with one key and each half of the values: neither half is what is stored."""
    cache, query = KvkitCache(config()), states(2, 4, 3, 16)
    _, _, key, value = stored(cache)
    if first:
        attention(Module(), query, key, value, None)
    with pytest.raises(KvkitError, match=r"^value: expected the tensor that update of layer 0 returned"):
        attention(Module(), query, key, value.flip(1), None)


def test_attention_twice():
    """What was read is remembered until the layer's next update, and read again."""
    cache, query = KvkitCache(config()), states(2, 4, 3, 16)
    key, value, *new = stored(cache)
    first, _ = attention(Module(), query, *new, None)
    second, _ = attention(Module(), 2 * query, *new, None)
    close(first, wanted(query, key, value))
    close(second, wanted(2 * query, key, value))
    other = states(2, 2, 5, 16, seed=9)  # keys of no cache, as those of cross-attention
    close(attention(Module(), query, other, other, None)[0], wanted(query, other, other))


@pytest.mark.parametrize("crop", [0, -1, -2])
def test_keys_that_no_attention_read(crop):
    """The next update says so, and writes nothing, unless they are gone; cropped drafts are not enough."""
    cache, query = KvkitCache(config()), states(2, 4, 3, 16)
    stored(cache)
    if crop:
        cache.layers[0].crop(crop)
    new = states(2, 2, 1, 16)
    for _ in range(2):
        with pytest.raises(KvkitError, match=r"^attn_implementation: expected 'kvkit'.* layer 0"):
            cache.update(new, new, 0)
    assert cache.get_seq_length() == 9 + crop
    cache.crop(6)
    key, value = cache.layers[0].keys, cache.layers[0].values
    new = cache.update(states(2, 2, 3, 16, seed=5), states(2, 2, 3, 16, seed=6), 0)
    output, _ = attention(Module(), query, *new, None)
    close(output, wanted(query, torch.cat([key, new[0]], 2), torch.cat([value, new[1]], 2)))
    cache.update(states(2, 2, 3, 16), states(2, 2, 3, 16), 0)
    cache.reset()
    cache.update(states(2, 2, 3, 16), states(2, 2, 3, 16), 0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_cache_of_another_model(implementation):
    """A copy of the model has a config of its own, whose attention reads what it is given and no cache."""
    net, inputs = model("llama"), prompt(9)
    net.set_attn_implementation("kvkit")
    cache, other = KvkitCache(net.config), copy.deepcopy(net)
    with pytest.raises(KvkitError, match=r"^attn_implementation: expected 'kvkit'"):
        generated(other, implementation, inputs, cache)
    assert cache.get_seq_length() == 9


def test_a_model_whose_attention_is_its_own(monkeypatch):
    """CodeGen's, as it was before transformers 5.24: it takes what update returns for all tokens."""
    net = CodeGenForCausalLM(CodeGenConfig(vocab_size=99, n_embd=64, n_head=4, n_layer=2, rotary_dim=8))
    inputs = prompt(9)
    for name in ("kvkit", "eager"):
        net.config._attn_implementation = name
        cache = KvkitCache(net.config)
        if name == "kvkit":
            monkeypatch.setattr(codegen, "ALL_ATTENTION_FUNCTIONS", Eager(), raising=False)
            with pytest.raises(KvkitError, match=r"^attn_implementation: expected 'kvkit'"):
                net.eval().generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
        else:
            ours = net.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
            assert torch.equal(ours, net.generate(**inputs, max_new_tokens=4, do_sample=False))


class Eager:
    """Stands for transformers' table of attention functions in a model that asks for none by name."""

    def get_interface(self, name, default):
        return default


def test_a_model_that_attends_twice():
    config = DiffLlamaConfig(**SIZES, attn_implementation="kvkit")
    net, inputs = DiffLlamaForCausalLM(config).eval(), prompt(9)
    with pytest.raises(KvkitError, match=r"^value: expected the tensor that update of layer 0 returned"):
        generated(net, "kvkit", inputs, KvkitCache(config))
    wanted = generated(net, "eager", inputs)
    assert torch.equal(generated(net, "eager", inputs, KvkitCache(config)), wanted)


def test_compiled():
    """What is ours stays out of the graph, and a compiled model gives what it gave."""
    net, inputs = copy.deepcopy(model("gemma2")), prompt(9, 5)
    steps = [inputs] + [{"input_ids": torch.full((2, 1), i + 1)} for i in range(3)]
    found = []
    for compiled in (False, True):
        if compiled:
            net.forward = torch.compile(net.forward, backend="eager")
        cache, mask = KvkitCache(net.config), inputs["attention_mask"]
        for i, step in enumerate(steps):
            more = torch.cat([mask, torch.ones(2, i, dtype=mask.dtype)], 1)
            found.append(logits(net, "kvkit", step | {"attention_mask": more}, cache))
    for plain, made in zip(found[:4], found[4:], strict=True):
        torch.testing.assert_close(made, plain, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout: expected 0"),
        ({"position_bias": states(1)}, "position_bias: expected None"),
        ({"sliding_window": 5}, "sliding_window: expected 4, as the cache has it, got 5"),
        ({"attention_mask": torch.ones(2, 1, 3, 9, dtype=torch.bool)}, "attention_mask: expected 6 columns"),
        ({"attention_mask": torch.ones(2, 5, dtype=torch.bool)}, "attention_mask: expected"),
        ({"query": states(2, 4, 3, 8)}, "query: expected"),
        ({"query": states(2, 4, 3, 16, dtype=torch.float64)}, "query: expected dtype"),
        ({"query": states(2, 4, 3, 16).to("meta")}, "query: expected a tensor on the CPU, got one on meta"),
    ],
)
def test_wrong_arguments(options, message):
    cache = KvkitCache(config(MistralConfig, sliding_window=4))
    _, _, *new = stored(cache)
    given = {"query": states(2, 4, 3, 16), "attention_mask": None, **options}
    with pytest.raises(KvkitError, match=f"^{message}"):
        attention(Module(), key=new[0], value=new[1], **given)


def test_training():
    net = LlamaForCausalLM(config()).train()
    with pytest.raises(KvkitError, match="module: expected one that is not trained"):
        net(prompt(5)["input_ids"])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_nothing_is_written_where_an_update_is_wrong(kind):
    cache = KvkitCache(config(), kind, **({"max_cache_len": 10} if kind == "static" else {}))
    _, _, key, value = stored(cache)
    attention(Module(), states(2, 4, 3, 16), key, value, None)
    before = [side.clone() for side in (cache.layers[0].keys, cache.layers[0].values)]
    wrong = [
        (states(2, 2, 1, 16, dtype=FLOAT16),) * 2,
        (states(3, 2, 1, 16),) * 2,
        (states(2, 2, 1, 16), states(2, 2, 2, 16)),
        (states(2, 2, 1, 16).to("meta"),) * 2,
    ]
    for states_ in wrong:
        with pytest.raises(KvkitError):
            cache.update(*states_, 0)
    if kind == "static":
        with pytest.raises(CapacityError):
            cache.update(*(states(2, 2, 2, 16),) * 2, 0)
    assert pending.record_of(key).is_read
    assert cache.get_seq_length() == 9
    assert torch.equal(cache.layers[0].keys, before[0])
    assert torch.equal(cache.layers[0].values, before[1])


def test_a_full_static_cache_stays_as_it_was():
    net, inputs = model("llama"), prompt(9)
    cache = KvkitCache(net.config, "static", max_cache_len=10)
    logits(net, "kvkit", inputs, cache)
    with pytest.raises(CapacityError):
        logits(net, "kvkit", {"input_ids": inputs["input_ids"][:, :2]}, cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9]


OTHER_WORDS = {
    "GPT2": {"n_embd": 64, "n_head": 4, "n_layer": 2},
    "GPTNeoX": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
    "Phi": {"hidden_size": 320, "num_attention_heads": 4, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("kind", ["paged", "quantized"])
@pytest.mark.parametrize("dtype", [torch.float32, FLOAT16, BFLOAT16, "autocast"], ids=str)
@pytest.mark.parametrize("name", OTHER_WORDS)
def test_geometry_is_that_of_the_first_tokens(name, dtype, kind):
    """No config says heads in the same words, nor what `half` or autocast have made of the dtype."""
    torch.manual_seed(2)
    made = getattr(transformers, f"{name}Config")(vocab_size=99, initializer_range=0.3, **OTHER_WORDS[name])
    net = transformers.AutoModelForCausalLM.from_config(made).eval()
    net.to(torch.float32 if dtype == "autocast" else dtype)
    ids, options = prompt(9)["input_ids"], {"num_blocks": 8, "page_size": 4} if kind == "paged" else {}
    found = {}
    for attention_name in ("kvkit", "eager"):
        net.set_attn_implementation(attention_name)
        cache = KvkitCache(net.config, kind, **options)
        assert (cache.get_seq_length(), cache.get_mask_sizes(9, 0)) == (0, (9, 0))
        cache = copy.deepcopy(cache)  # stays of its kind, though nothing is stored yet
        with torch.no_grad(), torch.autocast("cpu", BFLOAT16, enabled=dtype == "autocast"):
            parts = [net(part, past_key_values=cache).logits for part in (ids[:, :8], ids[:, 8:])]
        found[attention_name] = torch.cat(parts, 1).float()
    assert cache.get_seq_length() == 9
    assert isinstance(cache.cache, PagedCache) == (kind == "paged")
    error = (found["kvkit"] - found["eager"]).abs().max() / found["eager"].abs().max()
    assert error < (1e-4 if dtype is torch.float32 else 0.05)


def test_wrong_options_of_a_paged_cache_are_said_at_once():
    with pytest.raises(KvkitError, match="for kind 'paged', got an unexpected keyword argument 'num_pages'"):
        KvkitCache(config(), "paged", num_blocks=3, page_size=4, num_pages=3)
    with pytest.raises(KvkitError, match=r"of StaticCache .* got no 'max_cache_len'$"):
        KvkitCache(config(), "static")
    with pytest.raises(KvkitError, match=r"keyword argument 'nbits' \(did you mean format\?\)$"):
        KvkitCache(config(), "quantized", nbits=4)
    with pytest.raises(KvkitError, match=r"kind: .* got str 'offloaded' \(offload=FOLDER "):
        KvkitCache(config(), "offloaded")
    with pytest.raises(KvkitError, match=r"config: expected a model's configuration, as model\.config, got "):
        KvkitCache(model("llama"))
    with pytest.raises(AttributeError, match=r"no attribute 'save': it is cache\.cache\.save here$"):
        KvkitCache(config()).save("cache.npz")
    assert not hasattr(KvkitCache(config()), "key_cash")


@pytest.mark.parametrize("implementation", ["kvkit", "sdpa"])
def test_gradients_are_not_silently_missing(implementation):
    net, ids = copy.deepcopy(model("llama")), prompt(5)["input_ids"]
    net.set_attn_implementation(implementation)
    logits_ = net(ids, past_key_values=KvkitCache(net.config)).logits
    with pytest.raises(KvkitError, match=r"^backward: expected"):
        logits_.sum().backward()
    with torch.no_grad():
        net(ids, past_key_values=KvkitCache(net.config))


@pytest.mark.parametrize("kind", ["static", "quantized"])
def test_keys_that_a_model_makes_anew(kind):
    """JetMoe repeats them; MLA makes them of what it stores, which only some kinds take as latent rows."""
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2}
    options = {"max_cache_len": 40} if kind == "static" else {"residual_length": 64}
    jet = transformers.JetMoeConfig(
        **sizes, kv_channels=16, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2
    )
    latent = transformers.DeepseekV3Config(
        **sizes | {"num_key_value_heads": 4}, intermediate_size=64, moe_intermediate_size=32,
        num_attention_heads=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16, v_head_dim=32,
        qk_nope_head_dim=32,
    )  # fmt: skip
    for net in (transformers.JetMoeForCausalLM(jet), transformers.DeepseekV3ForCausalLM(latent)):
        with pytest.raises(KvkitError, match=r"use .*attn_implementation 'sdpa' or 'eager'"):
            generated(net.eval(), "kvkit", prompt(9), KvkitCache(net.config, kind, **options))


def test_kinds_and_models():
    with pytest.raises(KvkitError, match="kind: expected 'dynamic' or 'static'"):
        KvkitCache(config(), "fluid")
    other = LlamaConfig(**SIZES)
    for name, kind, message in (
        ("compressed_sparse_attention", "dynamic", "config: expected layers of .*, got compressed_sparse"),
        ("indexed_attention", "dynamic", "kind: expected 'dynamic' for a model with indexed attention, over"),
        ("indexed_attention", "paged", "kind: expected 'dynamic' for a model with indexed attention, over"),
    ):
        other.layer_types = ["full_attention", name]
        options = {"num_blocks": 8, "page_size": 4} if kind == "paged" else {}
        with pytest.raises(KvkitError, match=message):
            KvkitCache(other, kind, **options)
    other.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(KvkitError, match="kind: expected 'dynamic' with evict, for a model with states or"):
        KvkitCache(other, "paged", num_blocks=8, page_size=4, evict="knorm@0.5")
    hybrid = KvkitCache(Gemma2Config(**SIZES, sliding_window=4))
    assert [type(layer) is SlidingWindowLayer for layer in hybrid.cache.layers] == [True, False]


@pytest.mark.skipif(not cpu.launches.parallel, reason="torch has no GOMP_parallel")
@pytest.mark.parametrize("tokens", [200, 700, 5000])  # one thread, and several with and without Python
def test_threads_of_torch(tokens, monkeypatch):
    """Kernels give the same bits in Numba's threads and in torch's, of any number."""
    rng, step = np.random.default_rng(0), (1, 2, 1, 64)
    states = rng.standard_normal((2, 1, 2, tokens, 64), np.float32)
    queries = rng.standard_normal((6, 1, 8, 1, 64), np.float32)

    def outputs(counts):
        cache = DynamicCache()
        cache.update(*states, 0)
        for query, count in zip(queries, counts, strict=True):  # the third call is repeated without Python
            torch.set_num_threads(count)
            cache.update(np.ones(step, np.float32), np.ones(step, np.float32), 0)
            yield cache.layers[0].attend(query)

    before = torch.get_num_threads()
    try:
        found = [*outputs((2, 2, 1, 3, 2, 2))]
        monkeypatch.setattr(cpu.launches, "parallel", 0)
        np.testing.assert_array_equal(found, [*outputs((before,) * 6)])
    finally:
        torch.set_num_threads(before)
