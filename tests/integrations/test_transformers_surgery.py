"""Tokens that are removed from a cache of a transformers model, which goes on with the others."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers
torch.set_num_threads(1)  # for models so small more of them only wait for each other

from transformers import StoppingCriteria  # noqa: E402

from kvkit import KvkitError, Rope  # noqa: E402
from kvkit.integrations.transformers import KvkitCache  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "attn_implementation": "kvkit",
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
ROTATIONS = {  # halves; neighbours; neighbours of a part; halves of a part; a layer without; a factor of keys
    "Llama": {},
    "Cohere": {},
    "Glm": {"partial_rotary_factor": 0.5},
    "Phi": {},
    "GPTNeoX": {"rotary_pct": 0.25},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Qwen3": {"rope_parameters": YARN},
}


def make_model(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | ROTATIONS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def model():
    return make_model("Llama")


def read(model, count=12, **options):
    """Return a cache of so many tokens."""
    cache = KvkitCache(model.config)
    with torch.inference_mode():
        model(torch.arange(count)[None], past_key_values=cache, **options)
    return cache


def step(model, cache, position, token=7, **options):
    options |= {"position_ids": torch.tensor([[position]]), "cache_position": torch.tensor([position])}
    with torch.inference_mode():
        return model(torch.tensor([[token]]), past_key_values=cache, **options).logits[:, -1]


@pytest.mark.parametrize("name", ROTATIONS)
def test_removed_tokens_are_as_hidden_ones_and_closing_the_hole_keeps_distances(name):
    """A wrong pair, frequency or part of the keys would change the last logits."""
    model = make_model(name)
    holed, closed = read(model), read(model)
    mask = torch.ones(1, 13, dtype=torch.bool)
    mask[:, 2:7] = False
    holed.remove(2, 7)
    assert holed.positions.tolist() == [0, 1, 7, 8, 9, 10, 11]
    expected = step(model, read(model), 12, attention_mask=mask)
    torch.testing.assert_close(step(model, holed, 12), expected, atol=1e-5, rtol=0)
    mask[:, :7] = False
    closed.remove(0, 7, close=True)
    moved = [[0, 5, -7]], [[0, 5, 0]] if name == "SmolLM3" else [[0, 5, -7]]
    assert [layer.rope_shifts.tolist() for layer in closed.layers] == list(moved)
    whole = read(model)
    for i, token in enumerate((7, 9, 3)):  # each with a query of its own
        expected = step(model, whole, 12 + i, token, attention_mask=mask)
        torch.testing.assert_close(step(model, closed, 5 + i, token), expected, atol=1e-5, rtol=0)
        mask = torch.cat((mask, mask[:, -1:]), 1)


GPT_J = {"n_layer": 2, "n_embd": 64, "n_head": 4, "rotary_dim": 8, "vocab_size": 64}
ALONE = {  # neighbours, not in layers without a window; halves so; neighbours of a part; no rotation
    "cohere2": SIZES | {"num_hidden_layers": 4},
    "exaone4": SIZES | {"num_hidden_layers": 4},
    "gptj": GPT_J,
    "bloom": GPT_J,
    "falcon": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "alibi": True},
}


@pytest.mark.parametrize("kind", ALONE)
def test_a_shift_by_the_config_gives_the_keys_that_the_model_makes_at_the_other_position(kind):
    """A token alone attends to itself only, so its keys in all layers differ by their rotation only."""
    sizes = {name: size for name, size in ALONE[kind].items() if name != "attn_implementation"}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    keys = []
    for position in (0, 5):
        cache = transformers.DynamicCache()
        with torch.inference_mode():
            model(torch.tensor([[7]]), position_ids=torch.tensor([[position]]), past_key_values=cache)
        keys.append([layer.keys for layer in cache.layers])
    for rope, at_0, at_5 in zip(Rope.from_config(config), *keys, strict=True):
        torch.testing.assert_close(at_0 if rope == "none" else rope.shift(at_0, 5), at_5, atol=1e-5, rtol=0)


def test_padding_goes_by_position(model):
    padding = torch.arange(12)[None] > torch.tensor([[-1], [2]])
    whole, holed = (KvkitCache(model.config) for _ in range(2))
    ids = torch.arange(24).reshape(2, 12)
    for cache in whole, holed:
        with torch.inference_mode():
            model(ids, past_key_values=cache, attention_mask=padding.long())
    holed.remove(5, 9)
    mask = torch.cat((padding, torch.ones(2, 1, dtype=torch.bool)), 1)
    removed = mask & ~((torch.arange(13) > 4) & (torch.arange(13) < 9))
    new = {"input_ids": torch.tensor([[7], [8]]), "position_ids": torch.tensor([[12], [9]])}
    with torch.inference_mode():
        expected = model(**new, past_key_values=whole, attention_mask=removed).logits
        logits = model(**new, past_key_values=holed, attention_mask=mask).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    with pytest.raises(KvkitError, match=r"attention_mask: expected 14 columns, .* got 10"):
        model(**new, past_key_values=holed, attention_mask=mask[:, :10])


def test_a_closed_cache_refuses_positions_that_went_on(model):
    cache = read(model)
    cache.remove(2, 7, close=True)
    with pytest.raises(KvkitError, match=r"position_ids: expected 7 for the last new token, .* got 12"):
        step(model, cache, 12)


def test_generate_slides_without_end(model):
    """Sinks move up to the recent tokens, so that positions go on as `generate` counts them."""

    class Slide(StoppingCriteria):
        def __call__(self, input_ids, scores, **options):
            over = cache.layers[0].stored_tokens - 12
            if over > 0:
                first = int(cache.positions[0])
                cache.remove(first + 2, first + 2 + over)
                cache.shift(first, first + 2, over)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    cache = KvkitCache(model.config)
    options = {
        "do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    made = model.generate(
        torch.arange(10)[None], past_key_values=cache, stopping_criteria=[Slide()], **options
    )
    assert cache.positions.tolist() == list(range(37, 49))
    assert cache.rope_shifts.tolist() == [[0, 2, 37], [2, 12, 0]]
    assert torch.isfinite(torch.stack(made.logits)).all()


def test_the_config_says_how_keys_are_rotated_and_what_it_does_not_say_is_refused(model):
    cache = read(model)
    assert cache.can("shift", 0, None, 3) is None
    sentence = "positions: expected positions that stay ascending, each once, got 12 before 3"
    assert cache.can("shift", 0, 3, 10) == sentence
    states = torch.ones(1, 2, 5, 16)
    for name, told in {
        "GptOss": "GptOssConfig, whose model does not say which elements are pairs",
        "DeepseekV3": "DeepseekV3Config, whose keys are rotated after their first elements",
    }.items():
        sizes = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        cache = KvkitCache(getattr(transformers, f"{name}Config")(**sizes))
        latent = torch.ones(1, 1, 5, 512), torch.ones(1, 1, 5, 64)
        cache.update(*(latent if name == "DeepseekV3" else (states, states)), 0)
        sentence = f"rope: expected how keys were rotated, a kvkit.Rope or 'none', got {told}"
        assert cache.can("remove", 1, 3, close=True) == cache.can("flatten") == sentence
        with pytest.raises(KvkitError) as error:
            cache.divide(1, None, 2)
        assert str(error.value) == sentence
        cache.remove(1, 3)
        assert cache.can("shift", 3, None, -2, rope=Rope(8)) is None
    dynamic = {"rope_parameters": YARN | {"rope_type": "dynamic"}, "attn_implementation": "sdpa"}
    cache = KvkitCache(transformers.LlamaConfig(**SIZES | dynamic))
    cache.update(states, states, 0)
    assert "dynamic NTK" in cache.can("shift", 0, None, 1)


def test_the_batch_of_a_paged_cache_moves_as_that_of_a_dynamic_one(model):
    paged, dynamic = KvkitCache(model.config, "paged", num_blocks=40, page_size=4), KvkitCache(model.config)
    told = "cache: expected tokens, because it is paged, got none yet"
    assert paged.can("remove", 0, 1) == paged.can("retain", [0]) == told
    with pytest.raises(KvkitError, match="none yet"):
        paged.shift(0, None, 1)
    ids, results = torch.arange(40).reshape(2, 20) % 60, []
    for cache in (paged, dynamic):
        with torch.no_grad():
            model(ids, past_key_values=cache)
            cache.remove(3, 9, close=True)
            cache.retain([0, 1, *range(4, 14)])
            places = torch.arange(14, 18)[None]
            results.append(model(ids[:, :4], past_key_values=cache, position_ids=places).logits)
    assert paged.positions.tolist() == dynamic.positions.tolist()
    assert paged.rope_shifts.tolist() == dynamic.rope_shifts.tolist() == [[0, 2, 0], [2, 12, -6], [12, 16, 0]]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert paged.can("remove", -1) == dynamic.can("remove", -1) is not None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_knows_no_positions_is_refused(attention):
    cache = KvkitCache(transformers.LlamaConfig(**SIZES | {"attn_implementation": attention}))
    states = torch.ones(1, 2, 5, 16)
    cache.update(states, states, 0)
    cache.remove(1, 2)
    with pytest.raises(KvkitError, match="expected 'kvkit', because tokens .* got '" + attention):
        cache.update(states[:, :, :1], states[:, :, :1], 0)
    assert cache.layers[0].keys.shape[2] == 4  # nothing was written
