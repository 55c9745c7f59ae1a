"""A cache of transformers that loses tokens after the prompt or while it generates."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers
torch.set_num_threads(1)  # for models so small more of them only wait for each other

from kvkit import KvkitError, eviction  # noqa: E402
from kvkit.cache import RaggedLayer  # noqa: E402
from kvkit.integrations.transformers import KvkitCache  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "attn_implementation": "kvkit",
}  # fmt: skip
IDS = torch.randint(1, 64, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def generated(model, cache, count=8, **options):
    """Return new tokens and their logits."""
    options |= {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    made = model.generate(IDS, past_key_values=cache, max_new_tokens=count, **options)
    return made.sequences[:, IDS.shape[1] :], torch.stack(made.logits)


class Hidden(KvkitCache):
    """Keeps all tokens; heads see only some positions of the prompt."""

    def hide(self, positions):
        self.kept = positions
        for i, layer in enumerate(self.cache.layers):
            layer.attend = self.masked(layer.attend, i)

    def masked(self, attend, number):
        def call(query, mask=None, **options):
            stored = self.cache.layers[number].get_seq_length()
            shown = np.zeros((*query.shape[:2], 1, stored), bool)
            shown[..., 40:] = True
            for b, head in np.ndindex(shown.shape[:2]):
                own = self.kept[number][b, head // 2]
                shown[b, head, 0, own[own >= 0]] = True
            return attend(query, shown, **options)

        return call


EVICT = {
    "snapkv(window=8)@0.5": None, "tova@0.25": None, "observed@0.5": None, "non_causal@0.5": None,
    "keydiff by heads": {"scorer": "keydiff", "keep": 0.5, "budget": "ada"},
    "snapkv by heads": {"scorer": "snapkv", "window": 8, "keep": 0.4, "per_head": True}, "a function": None,
}  # fmt: skip


@pytest.mark.parametrize("name", EVICT)
def test_tokens_are_those_under_a_mask_of_the_same_positions(model, name):
    """Queries of the prompt choose, in attention as it runs; the memory of the others is freed."""
    evict, seen = EVICT[name] or name, []

    def function(layer_idx, keys, values, queries):
        seen.append(queries.shape)
        return keys[..., 0]

    if name == "a function":
        evict = {"scorer": function, "keep": 0.5}
    cache = KvkitCache(model.config, evict=evict)
    tokens, logits = generated(model, cache)
    assert seen == ([(2, 4, 40, 16)] * 2 if name == "a function" else [])
    report = cache.report
    assert report.bytes_after <= 0.5 * report.bytes_before
    whole = Hidden(model.config)
    with torch.inference_mode():
        first = model(IDS, past_key_values=whole).logits[:, -1]
    positions = [layer.positions for layer in cache.cache.layers]
    if positions[0].ndim == 1:
        positions = [np.broadcast_to(own, (2, 2, len(own))) for own in positions]
    whole.hide([np.where(own < 40, own, -1) for own in positions])
    torch.testing.assert_close(logits[0], first, atol=1e-4, rtol=0)
    for i in range(7):
        with torch.inference_mode():
            after = model(tokens[:, i : i + 1], past_key_values=whole).logits[:, -1]
        torch.testing.assert_close(logits[i + 1], after, atol=1e-4, rtol=0)
    assert cache.get_seq_length() == 47


OFTEN = eviction.decoding("streaming", interval=1, target=3)


@pytest.mark.parametrize(
    ("evict", "tokens"), [("snapkv@0.5", 40), ("h2o(recent=40)@0.5", 40), ("streaming@0.5", 7), (OFTEN, 7)]
)
def test_a_prompt_too_short_for_a_scorer_stays_whole(model, evict, tokens):
    cache, plain = KvkitCache(model.config, evict=evict), KvkitCache(model.config)
    made = [
        model.generate(IDS[:, :tokens], past_key_values=each, max_new_tokens=4, do_sample=False)
        for each in (cache, plain)
    ]
    assert torch.equal(*made)
    assert cache.report is None
    assert cache.layers[0].stored_tokens == tokens + 3


def test_queries_that_attention_has_seen_are_those_of_a_study(model):
    """The positions that stay are those that scores of recorded queries choose."""
    import kvkit.integrations.transformers.attention as room

    recorded, real = [], room.attend_states

    def attend_states(stored, states, *rest):
        recorded.append(states[0].numpy().copy())
        return real(stored, states, *rest)

    room.attend_states = attend_states
    try:
        cache = KvkitCache(model.config, evict="snapkv(window=8,kernel=3)@0.5")
        with torch.inference_mode():
            model(IDS, past_key_values=cache)
    finally:
        room.attend_states = real
    whole = KvkitCache(model.config)
    with torch.inference_mode():
        model(IDS, past_key_values=whole)
    whole.cache.compress("snapkv", keep=0.5, queries=recorded, window=8, kernel=3)
    for one, two in zip(cache.cache.layers, whole.cache.layers, strict=True):
        assert one.positions.tolist() == two.positions.tolist()
        assert one.store.capacity == 36  # of 50, with room for 16 more


LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "qk_rope_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "topk_group": 1,
}  # fmt: skip
PAGES = {"num_blocks": 64, "page_size": 4}


@pytest.mark.parametrize("kind", ["paged", "latent", "latent paged"])
@pytest.mark.parametrize("scorer", ["snapkv(window=8)", "keydiff"])
def test_pages_and_latent_rows(kind, scorer, model):
    """Logits are those of a cache of another kind that loses the same tokens; pages share those of layers."""
    if "latent" in kind:
        torch.manual_seed(0)
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES | LATENT)).eval()
    options = ("paged", PAGES) if "paged" in kind else ("dynamic", {})
    cache = KvkitCache(model.config, options[0], evict=f"{scorer}@0.5", **options[1])
    tokens, logits = generated(model, cache)
    assert (cache.report.tokens_before, cache.report.tokens) == ([40, 40], [20, 20])
    whole = KvkitCache(model.config)
    with torch.inference_mode():
        model(IDS, past_key_values=whole)
        for own, layer in zip(whole.cache.layers, cache.cache.layers, strict=True):
            own.retain(layer._row_positions.positions[:20])
        for i in range(7):
            after = model(tokens[:, i : i + 1], past_key_values=whole).logits[:, -1]
            torch.testing.assert_close(logits[i + 1], after, atol=1e-4, rtol=0)


def test_absorbed_queries_give_the_weights_of_the_heads():
    """A scorer of latent rows divides by the root of their size; its weights are the model's."""
    config = transformers.DeepseekV3Config(**SIZES | LATENT)
    torch.manual_seed(0)
    model, seen = transformers.DeepseekV3ForCausalLM(config).eval(), []

    def function(layer_idx, keys, values, queries):
        scores = queries[:, :, -1:] @ keys.swapaxes(2, 3) * keys.shape[3] ** -0.5
        seen.append(np.exp(scores) / np.exp(scores).sum(-1, keepdims=True))
        return keys[..., 0]

    with torch.inference_mode():
        model(IDS, past_key_values=KvkitCache(config, evict={"scorer": function, "keep": 0.5}))
        model.set_attn_implementation("eager")
        expected = model(IDS, output_attentions=True).attentions
    for weights, wanted in zip(seen, expected, strict=True):
        np.testing.assert_allclose(weights[:, :, 0], wanted[:, :, -1], rtol=1e-4, atol=1e-6)


def test_pages_while_tokens_are_generated(model):
    often = eviction.decoding("keydiff", interval=4, target=24)
    cache = KvkitCache(model.config, "paged", evict=often, **PAGES)
    generated(model, cache, 20)
    assert cache.cache.layers[0].stored_tokens <= 24 + 4


def test_generation_stays_within_its_target(model):
    evict = eviction.decoding("snapkv", interval=4, target=24, window=4)
    cache = KvkitCache(model.config, evict=evict)
    _, logits = generated(model, cache, 40)
    assert torch.isfinite(logits).all()
    assert cache.get_seq_length() == 79
    assert max(layer.stored_tokens for layer in cache.layers) <= 24 + 4
    heads = KvkitCache(model.config, evict=eviction.decoding("keydiff", interval=4, target=24, budget="ada"))
    generated(model, heads, 20)
    assert isinstance(heads.cache.layers[0], RaggedLayer)
    assert heads.cache.layers[0].lengths.mean() <= 24 + 4


def test_beams_copies_and_padding(model):
    """Rows move with their queries; a copy goes on by itself; padding is by position."""
    evict = {"scorer": "keydiff", "keep": 0.5, "budget": "ada"}
    cache = KvkitCache(model.config, evict=eviction.decoding("tova", interval=3, target=20))
    made = model.generate(IDS, past_key_values=cache, max_new_tokens=6, num_beams=2, do_sample=False)
    assert made.shape == (2, 46)
    padding = torch.ones(2, 40, dtype=torch.long)
    padding[1, :7] = 0
    cache = KvkitCache(model.config, evict=evict)
    tokens, _ = generated(model, cache, 4, attention_mask=padding)
    again = copy.deepcopy(cache)
    with torch.inference_mode():
        one, two = (model(tokens[:, -1:], past_key_values=each).logits for each in (cache, again))
    torch.testing.assert_close(one, two, atol=0, rtol=0)
    assert (again.report, again.get_seq_length()) == (cache.report, 44)


def test_windows_stay_as_they_are():
    sizes = SIZES | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    config = transformers.Qwen2Config(**sizes | {"use_sliding_window": True})
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).eval()
    with pytest.raises(KvkitError, match="evict: expected full attention in all layers of a paged cache"):
        KvkitCache(model.config, "paged", num_blocks=9, page_size=4, evict="knorm@0.5")
    cache = KvkitCache(model.config, evict="snapkv(window=8)@0.5")
    generated(model, cache, 4)
    assert cache.report.skipped == {0: "a window evicts already"}
    assert cache.report.tokens[1] == 20


WRONG = {
    "no share": ("snapkv", "evict: expected 'SCORER@SHARE'"),
    "a share": ("snapkv@2", "evict: expected a share above 0 and at most 1"),
    "a scheme": ("snapkv@0.5+int4:g32", "evict: expected 'SCORER@SHARE'"),
    "no scorer": ("snap@0.5", "evict: expected a scorer of tokens"),
    "not seen": ("expected@0.5", "evict: expected a scorer that reads keys, values, or the queries"),
    "an option": ("finch@0.5", "window: expected a value, which finch needs"),
    "oracle": ("oracle@0.5", "evict: expected 'SCORER@SHARE'"),
    "a number": (3, "evict: expected 'SCORER@SHARE'"),
    "weights": (eviction.decoding("h2o"), "evict: expected a scorer of keys or of the last queries"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_evicted_by_is_refused(case):
    evict, message = WRONG[case]
    with pytest.raises(KvkitError) as caught:
        KvkitCache(transformers.LlamaConfig(**SIZES), evict=evict)
    assert str(caught.value).startswith(message)


def test_other_attention_and_other_kinds_are_refused():
    cache = KvkitCache(transformers.LlamaConfig(**SIZES | {"attn_implementation": "sdpa"}), evict="knorm@0.5")
    states = torch.ones(1, 2, 5, 16)
    with pytest.raises(KvkitError, match="attn_implementation: expected 'kvkit', because the cache evicts"):
        cache.update(states, states, 0)
    assert cache.get_seq_length() == 0
    latent = transformers.DeepseekV3Config(**SIZES | LATENT)
    with pytest.raises(
        KvkitError, match="evict: expected a scorer of keys or of the last queries, for a model"
    ):
        KvkitCache(latent, evict="observed@0.5")
    indexed = transformers.DeepseekV32Config(
        **SIZES | LATENT, index_n_heads=2, index_head_dim=16, index_topk=6
    )
    with pytest.raises(KvkitError, match="evict: expected a model without an indexer"):
        KvkitCache(indexed, evict="knorm@0.5")
    with pytest.raises(KvkitError, match="kind: expected another kind with evict, because a static cache"):
        KvkitCache(transformers.LlamaConfig(**SIZES), "static", max_cache_len=50, evict="knorm@0.5")


PADDED = torch.arange(40) >= torch.tensor([[25], [0]])


@pytest.mark.parametrize("scorer", ["snapkv(window=8)", "keydiff", "observed", "tova"])
@pytest.mark.parametrize("name", ["Llama", "DeepseekV3"])
def test_a_row_beside_padding_keeps_what_it_keeps_alone(name, scorer, model):
    """Padding never stays, and the tokens that are generated are those of the row alone."""
    if name == "DeepseekV3":
        torch.manual_seed(0)
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES | LATENT)).eval()
        if scorer == "observed":
            pytest.skip("weights are not those of latent rows")
    evict = scorer + "@0.4"
    if name == "Llama":
        evict = eviction_by_heads(scorer)
    more = {"max_new_tokens": 6, "do_sample": False}
    cache = KvkitCache(model.config, evict=evict)
    ids = IDS * PADDED
    found = model.generate(ids, attention_mask=PADDED.long(), past_key_values=cache, **more)
    layer = cache.cache.layers[0]
    if name == "DeepseekV3":  # rows share the choice: 16 of 40 columns, and no token of row 0 goes
        assert (layer.positions[:16] >= 25).sum() == 15
        return
    for b in range(2):
        alone = KvkitCache(model.config, evict=evict)
        row = ids[b : b + 1, PADDED[b]]
        assert torch.equal(
            model.generate(row, past_key_values=alone, **more)[0, row.shape[1] :], found[b, 40:]
        )
        for one, two in zip(cache.cache.layers, alone.cache.layers, strict=True):
            here, there = one.positions[b], two.positions[0]
            for head in range(2):
                own, other = (each[head][each[head] >= 0] for each in (here, there))
                assert own.tolist() == (other + 40 - row.shape[1]).tolist()


def eviction_by_heads(scorer):
    """Return arguments of compress, by which heads and rows choose their own tokens."""
    from kvkit.integrations.transformers.evicting import compress_arguments

    return compress_arguments(scorer + "@0.4") | {"per_head": True}


def test_padding_while_tokens_are_generated(model):
    """No column of padding stays in pages either, once there are more tokens than the target."""
    often = eviction.decoding("keydiff", interval=4, target=20)
    cache = KvkitCache(model.config, "paged", evict=often, **PAGES)
    model.generate(IDS * PADDED, attention_mask=PADDED.long(), past_key_values=cache, max_new_tokens=12)
    assert (cache.cache.layers[0].positions >= 25).all()


SHARED = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["full_attention"] * 4,
    "laurel_rank": 4, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [64] * 4,
}  # fmt: skip


@pytest.mark.parametrize("scorer", ["knorm", "snapkv(window=8)", "observed"])
def test_layers_that_share_rows_read_the_prompt_before_it_is_evicted(scorer):
    """The logits of the prompt are those of the whole cache, and later layers read what stays."""
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(**SIZES | SHARED)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache, whole = KvkitCache(config, evict=f"{scorer}@0.5"), KvkitCache(config)
    with torch.inference_mode():
        logits = [model(IDS, past_key_values=each).logits for each in (cache, whole)]
        torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
        assert cache.report.tokens[:2] == [20, 20]
        for i in range(2):
            whole.cache.layers[i].retain(cache.cache.layers[i].positions)
        for token in ([[5], [6]], [[7], [8]]):
            logits = [model(torch.tensor(token), past_key_values=each).logits for each in (cache, whole)]
            torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
