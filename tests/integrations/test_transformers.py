"""Generation with `KvkitCache`: the tokens of transformers' own cache, whatever holds them."""

import copy
import inspect
import json
import pickle

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers import StaticCache as TheirStaticCache
from transformers_scenes import MODELS, SIZES, expected, generated, logits, model, prompt

import kvkit.cache
from examples import run_examples
from kvkit import KvkitError
from kvkit.cache.stores import allocation
from kvkit.integrations.transformers import KvkitCache, masks, pending
from kvkit.integrations.transformers.attention import attention_forward

pytestmark = pytest.mark.transformers

UNCODED = {"residual_length": 64, "format": "kivi4:g16"}  # a window that holds all
CODED = {
    "format": "uint8:g4:channel/uint8:g8", "residual_length": 2, "sink": 1,
}  # fmt: skip
KINDS = {
    "dynamic": ("dynamic", {}),
    "static": ("static", {"max_cache_len": 40}),
    "quantized": ("quantized", UNCODED),
    "paged": ("paged", {"num_blocks": 60, "page_size": 4}),
}
ATTENTIONS = "kvkit", "eager"


def made(net, kind):
    kind, options = KINDS[kind]
    return KvkitCache(net.config, kind, **options)


@pytest.fixture
def in_place(monkeypatch):
    """Fail if an array of a whole context is made."""

    def arrays(self):
        raise AssertionError("an array of the context")

    monkeypatch.setattr(pending.Stored, "arrays", arrays)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_of_a_padded_batch(name, attention, kind):
    net, inputs = model(name), prompt(9, 5, 2)
    wanted = expected(net, inputs)
    assert torch.equal(generated(net, attention, inputs, made(net, kind)), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_attention_reads_in_place(name, kind, in_place):
    net, inputs = model(name), prompt(9, 5)
    cache = made(net, kind)
    generated(net, "kvkit", inputs, cache)
    assert cache.get_seq_length() == 9 + 13
    assert all(stored.is_read for stored in cache._stored.values())


@pytest.mark.parametrize("name", MODELS)
def test_without_a_cache_of_ours(name):
    net, inputs = model(name), prompt(9, 5)
    wanted = expected(net, inputs)
    assert torch.equal(generated(net, "kvkit", inputs), wanted)
    assert torch.equal(generated(net, "kvkit", inputs, use_cache=False), wanted)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_their_static_cache(name):
    """Its keys go on after the last token: a mask has to hide them."""
    net, inputs = model(name), prompt(9, 5)
    cache = TheirStaticCache(config=net.config, max_cache_len=40)
    assert torch.equal(generated(net, "kvkit", inputs, cache), expected(net, inputs))


def test_without_a_config_layers_are_made_when_used():
    net, inputs = model("llama"), prompt(9, 5)
    cache = KvkitCache()
    assert cache.get_seq_length() == 0
    assert torch.equal(generated(net, "kvkit", inputs, cache), expected(net, inputs))
    assert len(cache.layers) == len(cache.cache) == 2


def test_offloaded(tmp_path):
    net, inputs = model("gemma2"), prompt(9, 5)
    cache = KvkitCache(net.config, offload=tmp_path)
    assert torch.equal(generated(net, "kvkit", inputs, cache), expected(net, inputs))
    kept = [allocation.mapping_of(layer.store.keys) is not None for layer in cache.cache.layers]
    assert kept == [layer.window is None for layer in cache.cache.layers]
    assert list(tmp_path.iterdir()) == []
    cache.cache.close()


@pytest.mark.parametrize("tokens", [0, 6])
def test_a_folder_knows_what_is_recorded(tmp_path, tokens):
    """Also where it is set as an attribute, as transformers does after drafts."""
    kinds = kvkit.cache
    layers = [kinds.SlidingWindowLayer(4), kinds.QuantizedLayer(**CODED), kinds.DynamicLayer()]
    cache = KvkitCache.of(kvkit.cache.Cache(layers))
    cache.cache.offload(tmp_path / "cache", only_non_sliding=False)
    for i in range(3 * bool(tokens)):
        cache.update(torch.ones(1, 2, tokens, 16), torch.ones(1, 2, tokens, 16), i)
    for recording in (True, False):
        for layer in cache.layers:
            layer.record_past = recording
        cache.cache.save(tmp_path / "cache" / "cache.npz")
        with kvkit.cache.Cache.open(tmp_path / "cache", keep=False) as again:
            assert [layer._record_past for layer in again.layers] == [recording, recording, False]
        assert [layer.record_past for layer in cache.layers] == [recording, recording, False]
    cache.cache.close()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_beams(attention, kind):
    net, inputs = model("llama"), prompt(9, 5)
    options = {"num_beams": 3, "num_return_sequences": 2}
    wanted = expected(net, inputs, **options)
    assert torch.equal(generated(net, attention, inputs, made(net, kind), **options), wanted)
    assert not torch.equal(wanted[::2], expected(net, inputs))  # beams matter


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_sampling(attention):
    net, inputs = model("mistral"), prompt(9, 5)
    options = {"do_sample": True, "num_return_sequences": 2, "temperature": 3.0}
    torch.manual_seed(1)
    wanted = expected(net, inputs, **options)
    torch.manual_seed(1)
    assert torch.equal(generated(net, attention, inputs, made(net, "dynamic"), **options), wanted)
    assert not torch.equal(wanted[::2], wanted[1::2])


@pytest.mark.parametrize("kind", ["dynamic", "static", "quantized", "paged"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_assisted_decoding(attention, kind, monkeypatch):
    """Drafts of another model are mostly wrong: the cache is cropped again and again."""
    net, inputs, crops = model("llama"), prompt(9), []
    wanted = expected(net, inputs)
    crop = KvkitCache.crop
    monkeypatch.setattr(KvkitCache, "crop", lambda self, n: (crops.append(int(n)), crop(self, n)))
    draft = copy.deepcopy(net)
    with torch.no_grad():
        draft.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    draft.generation_config.num_assistant_tokens = 4
    cache = made(net, kind)
    assert torch.equal(generated(net, attention, inputs, cache, assistant_model=draft), wanted)
    assert min(crops) < 0


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_prompt_lookup_past_a_window(name, attention, monkeypatch):
    net, inputs, crops = model(name), prompt(4), []
    inputs = {key: tensor.repeat(1, 5) for key, tensor in inputs.items()}
    wanted = expected(net, inputs)
    crop = KvkitCache.crop
    monkeypatch.setattr(KvkitCache, "crop", lambda self, n: (crops.append(int(n)), crop(self, n)))
    cache = made(net, "dynamic")
    assert torch.equal(generated(net, attention, inputs, cache, prompt_lookup_num_tokens=3), wanted)
    assert min(crops) < 0
    assert cache.layers[0].record_past


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_filled_prefix_is_used_again(name, attention):
    net, whole = model(name), prompt(12)
    cache = made(net, "dynamic")
    logits(net, attention, {"input_ids": whole["input_ids"][:, :8]}, cache)
    for seed in range(2):
        inputs = {"input_ids": torch.cat([whole["input_ids"][:, :8], prompt(4, seed=seed)["input_ids"]], 1)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        reused = copy.deepcopy(cache) if seed else pickle.loads(pickle.dumps(cache))
        assert torch.equal(generated(net, attention, inputs, reused), expected(net, inputs))
    assert cache.get_seq_length() == 8
    assert reused.config is cache.config


def test_a_conversation_goes_on():
    net, inputs = model("mistral"), prompt(9)
    cache, theirs = made(net, "dynamic"), DynamicCache(config=net.config)
    for turn in range(3):
        wanted = generated(net, "eager", inputs, theirs)
        assert torch.equal(generated(net, "kvkit", inputs, cache), wanted)
        ids = torch.cat([wanted, prompt(3, seed=turn)["input_ids"]], 1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_a_saved_cache_goes_on(tmp_path):
    net, inputs = model("gemma2"), prompt(9, 5)
    cache = made(net, "dynamic")
    wanted = expected(net, inputs)
    first = {"input_ids": inputs["input_ids"][:, :7], "attention_mask": inputs["attention_mask"][:, :7]}
    position_ids = (first["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits(net, "kvkit", first, cache, position_ids=position_ids)
    cache.cache.save(tmp_path / "cache.npz")
    loaded = KvkitCache.of(kvkit.cache.load(tmp_path / "cache.npz"), net.config)
    assert torch.equal(generated(net, "kvkit", inputs, loaded), wanted)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_codes_are_what_attention_reads(name):
    """Codes read in place give what their values give other attention, and not what the originals gave.

    Nothing is padded: what a model makes of padding depends on the attention, and shares scales with tokens.
    """
    net, inputs = model(name), prompt(12, 12)
    options = {"output_logits": True, "return_dict_in_generate": True}
    ours, theirs = (
        generated(net, attention, inputs, KvkitCache(net.config, "quantized", **CODED), **options)
        for attention in ("kvkit", "eager")
    )
    exact = expected(net, inputs, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    ours, theirs, exact = (torch.stack(found.logits[:3]) for found in (ours, theirs, exact))
    assert (theirs - exact).abs().max() > 1e-2
    assert (ours - theirs).abs().max() < 0.02 * (theirs - exact).abs().max()


@pytest.mark.parametrize("format", ["e4m3:g8", "e5m2:g8", "q8_0"])
def test_formats_are_attended_to_as_what_they_stand_for(format):
    """Where they lie, and as arrays of floats: the same but for rounding. Nothing is padded, as above."""
    torch.manual_seed(5)
    net = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=32)).eval()
    inputs = prompt(9, 9)
    caches = [KvkitCache(net.config, "quantized", format=format, residual_length=2, sink=1) for _ in range(2)]
    token = {"input_ids": torch.tensor([[7], [8]]), "attention_mask": torch.ones(2, 10, dtype=torch.long)}
    found = []
    for attention, cache in zip(ATTENTIONS, caches, strict=True):
        logits(net, attention, inputs, cache)
        found.append(logits(net, attention, token, cache))
    exact = DynamicCache(config=net.config)
    logits(net, "eager", inputs, exact)
    error = (found[1] - logits(net, "eager", token, exact)).abs().max()
    assert error > 1e-3
    assert (found[0] - found[1]).abs().max() < 0.02 * error


@pytest.mark.parametrize("read_back", [False, True])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_codes_of_a_prompt_that_is_read_back(attention, read_back):
    net, inputs = model("llama"), prompt(12, 12)
    coarse = {"format": "kivi2:g4/kivi2:g8", "residual_length": 2}
    cache = KvkitCache(net.config, "quantized", **coarse, read_back=read_back)
    error = (logits(net, attention, inputs, cache) - logits(net, "eager", inputs)).abs().max()
    assert error > 0.1 if read_back else error < 2e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_half_precision(name, dtype):
    """Under their attention the cache returns the very bits; ours is as near to float32 as theirs."""
    net, inputs = model(name, dtype), prompt(9, 5)
    wanted = expected(net, inputs)
    cache = made(net, "dynamic")
    assert torch.equal(generated(net, "eager", inputs, cache), wanted)
    assert cache.layers[0].keys.dtype is dtype
    truth = copy.deepcopy(net).float()
    ids = {"input_ids": wanted[:1]}
    right = logits(truth, "eager", ids)
    errors = {}
    for attention in ("eager", "kvkit"):
        cache = made(net, "dynamic")
        parts = [logits(net, attention, {"input_ids": part}, cache) for part in ids["input_ids"].split(8, 1)]
        errors[attention] = (torch.cat(parts, 1).float() - right).square().mean().sqrt()
    assert errors["kvkit"] < 1.1 * errors["eager"]
    assert errors["kvkit"] < 0.05 * right.std()


# Masks


def test_both_names_are_registered():
    assert AttentionInterface()["kvkit"] is attention_forward
    assert AttentionMaskInterface()["kvkit"] is masks.attention_mask


def test_without_our_mask_function_padding_is_seen(monkeypatch):
    """The trap that registering avoids, and so the proof that other tests would see it."""
    net, inputs = model("llama"), prompt(9, 5)
    wanted = expected(net, inputs)
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "kvkit")
    assert not torch.equal(generated(net, "kvkit", inputs, made(net, "dynamic")), wanted)


def test_layers_have_the_formats_of_a_mix(tmp_path):
    """A text, its file, and layers made by hand store the same bytes and generate the same tokens."""
    net, counts, path = model("llama"), {"residual_length": 2, "sink": 1}, tmp_path / "mix.json"
    path.write_text(json.dumps({"kvkit_mix": "K=int8:g16@0/uint4:g16,V=int4:g16", "num_layers": 2}))
    net.set_attn_implementation("kvkit")
    by_hand = kvkit.cache.Cache(
        kvkit.cache.QuantizedLayer(key=key, value="int4:g16", **counts) for key in ("int8:g16", "uint4:g16")
    )
    mixes = "K=int8:g16@0/uint4:g16,V=int4:g16", "K=int8:g16@-2/uint4:g16,V=int4:g16", str(path)
    caches = [KvkitCache(net.config, "quantized", format=each, **counts) for each in mixes]
    caches += [KvkitCache.of(kvkit.cache.QuantizedCache.from_file(path, **counts), net.config)]
    want = generated(net, "kvkit", prompt(9), KvkitCache.of(by_hand, net.config))
    for cache in caches:
        assert torch.equal(generated(net, "kvkit", prompt(9), cache), want)
        for got, own in zip(cache.cache.layers, by_hand.layers, strict=True):
            assert {name: x.tobytes() for name, x in got._arrays().items()} == {
                name: x.tobytes() for name, x in own._arrays().items()
            }
    with pytest.raises(KvkitError, match="layers from -2 to 1, got 2"):
        KvkitCache(net.config, "quantized", format="int8@2/int4")


@pytest.mark.parametrize("kind", ["dynamic", "static", "quantized"])
@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_whole_mask_given_by_the_user(kind, form):
    """The first 5 tokens see each other, a later one does not see the third; then two tokens more."""
    net, ids = model("llama"), prompt(9)["input_ids"]
    mask = torch.ones(9, 9).tril().bool()
    mask[:5, :5] = True
    mask[5:, 2] = False
    if form == "float":
        mask = torch.zeros(9, 9).masked_fill(~mask, torch.finfo(torch.float32).min)
    outputs = {}
    for attention, cache in (("sdpa", DynamicCache(config=net.config)), ("kvkit", made(net, kind))):
        parts = [
            logits(
                net,
                attention,
                {"input_ids": ids[:, a:b], "attention_mask": mask[None, None, a:b, :b]},
                cache,
                position_ids=torch.arange(a, b)[None],
            )
            for a, b in ((0, 7), (7, 8), (8, 9))
        ]
        outputs[attention] = torch.cat(parts, 1)
    torch.testing.assert_close(outputs["kvkit"], outputs["sdpa"], atol=2e-4, rtol=0)
    causal = logits(net, "sdpa", {"input_ids": ids})
    assert (causal - outputs["sdpa"]).abs().max() > 0.1


def test_packed_sequences_do_not_see_each_other():
    net, ids = model("mistral"), prompt(9)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    ours, theirs = (
        logits(net, name, {"input_ids": ids}, position_ids=positions, use_cache=False)
        for name in ("kvkit", "eager")
    )
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
    alone = logits(net, "eager", {"input_ids": ids[:, 4:]})
    torch.testing.assert_close(ours[:, 4:], alone, atol=2e-4, rtol=0)


# What transformers asks a cache for


def test_a_cache_of_theirs():
    net = model("gemma2")
    cache = made(net, "dynamic")
    assert isinstance(cache, Cache)
    assert cache.is_sliding == [True, False, True, False]
    assert not cache.is_compileable
    assert not cache.is_initialized
    assert cache.is_croppable
    assert cache.batch_size == -1
    assert not KvkitCache(net.config, "static", max_cache_len=9).is_croppable
    logits(net, "kvkit", prompt(9, 5), cache)
    assert cache.batch_size == 2
    assert cache.layers[1].keys.shape == cache.layers[1].values.shape == (2, 2, 9, 16)
    assert cache.layers[0].keys.shape == (2, 2, 5, 16)
    assert cache.get_max_length() == -1
    assert (cache.get_query_offset(), cache.get_mask_sizes(2, 0), cache.get_mask_sizes(2, 1)) == (
        9,
        (7, 4),
        (11, 0),
    )
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 3]))
    assert cache.batch_size == 3
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_are_those_of_tokens(kind):
    """Also of a static cache, whose memory is longer, and by whatever route."""
    net, inputs = model("llama"), prompt(9, 9)
    for name in ATTENTIONS:
        cache = made(net, kind)
        assert cache.get_mask_sizes(9, 1) == (9, 0)
        logits(net, name, inputs, cache)
        for length in (cache.get_seq_length(1), cache.get_query_offset(1), *cache.get_mask_sizes(0, 1)):
            assert type(length) is int
        assert cache.get_mask_sizes(3, 1) == (12, 0)
        assert cache.layers[1].keys.shape == (2, 2, 9, 16)


def test_layers_do_what_the_cache_does():
    net, inputs = model("mistral"), prompt(5, 3)
    one, other = made(net, "dynamic"), made(net, "dynamic")
    for cache in (one, other):
        logits(net, "kvkit", inputs, cache)
    one.reorder_cache(torch.tensor([1, 0]))
    one.crop(-2)
    one.activate_past_recording()
    for layer in other.layers:
        layer.reorder_cache(torch.tensor([1, 0]))
        layer.crop(-2)
        layer.activate_past_recording()
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert ours.get_mask_sizes(4) == theirs.get_mask_sizes(4) == (7, 0)
        assert ours.record_past
        assert theirs.record_past
    for layer in other.layers:
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(torch.tensor([3]))
    assert other.batch_size == 1
    for layer in other.layers:
        layer.reset()
    assert other.get_seq_length() == other.layers[1].get_seq_length() == 0


def test_no_copy_of_the_cache():
    """Under their attention an update returns the cache's own memory."""
    cache = KvkitCache()
    states = torch.ones(1, 2, 3, 4)
    keys, values = cache.update(states, states, 0)
    stored = cache.cache.layers[0]
    assert np.shares_memory(keys.numpy(), stored.keys)
    assert np.shares_memory(values.numpy(), stored.values)
    assert cache.layers[0].keys.data_ptr() == stored.keys.ctypes.data


@pytest.mark.parametrize("part", [KvkitCache, attention_forward, masks.attention_mask])
def test_examples(part):
    run_examples(inspect.getdoc(part), part.__name__)
