"""What configurations say of layers and ropes, as the classes of transformers understand them."""

import importlib
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

import kvkit
from kvkit import KvkitError, Rope
from kvkit.cache import (
    CompressedLayer,
    DynamicLayer,
    GatedDeltaLayer,
    IndexedLayer,
    LatentLayer,
    StateLayer,
    from_config,
)
from kvkit.cache.layers.pooled import PooledLayer
from kvkit.models.configuration import read_layers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from kvkit.integrations.transformers import KvkitCache  # noqa: E402

pytestmark = pytest.mark.transformers

CASES = json.loads((Path(__file__).parents[1] / "models" / "sizes.json").read_text())
NAMES = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
KINDS = {  # {type of a layer in transformers: kinds in kvkit}
    "full_attention": {"full", "latent"}, "indexed_attention": {"full", "latent"},
    "minimax_m3_sparse": {"full"}, "sliding_attention": {"window", "compressed"},
    "chunked_attention": {"chunk"}, "linear_attention": {"state"}, "conv": {"conv"}, "hybrid": {"both"},
    "hybrid_sliding": {"both"}, "dummy": {"shared", "none"}, "compressed_sparse_attention": {"compressed"},
    "heavily_compressed_attention": {"compressed"}, "moe": {"none"}, "mlp": {"none"},
}  # fmt: skip
# Whose default configuration is refused, and why. Others are read.
REFUSED = {
    "encoders with decoders": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus "
    "plbart prophetnet trocr whisper",
    "names that only they use": "gpt_neo xglm xlm blt roformer",
    "other states or rows": "reformer rwkv xlnet xlstm zaya mllama qwen4_exp qwen4_exp_text dots3_note "
    "dots3_note_text dory",
    "defaults with a word that is not used": "cohere_compass_text laguna lfm2 mellum minimax_m3_vl_text",
    "defaults without a list, or with heads that do not divide": "lfm2_moe glm4_moe gemma4_unified_assistant",
}  # fmt: skip
REFUSED_KINDS = {name for names in REFUSED.values() for name in names.split()}
ROPE_REFUSED = {"cohere2_moe", "nanochat", "axk2", "hy_v4"}
# Whose states of the delta rule the plug-in computes
COMPUTED = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear"}
# Whose class overlooks `rotary_dim`, cannot be made of its own defaults, or (since 5.24) has angles in place
# of frequencies, which `test_transformers_surgery` compares
ROPE_OTHERWISE = {"minimax_m3_vl_text", "cohere_compass_text", "gptj", "codegen"}


def default(kind):
    """Return the default configuration of a type of models."""
    try:
        return transformers.AutoConfig.for_model(kind)
    except Exception:  # some need others
        pytest.skip("has no default configuration")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["layers"]])
def test_published_words_mean_what_transformers_understands(name):
    words = dict(CASES[name]["config"])
    words = dict(words.get("text_config", words))
    config = transformers.AutoConfig.for_model(words.pop("model_type"), **words).get_text_config()
    layers = read_layers(CASES[name]["config"]).layers
    for kind, layer in zip(config.layer_types, layers, strict=True):
        assert layer.kind in KINDS[kind] or layer.kind == "shared"


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("kind", NAMES)
def test_layers_of_every_model_are_those_of_its_class_or_refused(kind, listed):
    """Also where the list of layers is left out, which the class then makes itself."""
    config = default(kind).get_text_config(decoder=True)
    words = config
    if not listed:
        lists = "layer_types", "layers_block_type"
        words = {name: value for name, value in config.to_dict().items() if name not in lists}
    try:
        layers = read_layers(words).layers
    except KvkitError:
        assert not listed or kind in REFUSED_KINDS
        return
    types, arguments = transformers.cache_utils.get_layer_types_and_kwargs(config)
    assert len(types) == len(layers)
    for name, options, layer in zip(types, arguments, layers, strict=True):
        assert layer.kind in KINDS[name]
        assert layer.window == options.get("sliding_window", layer.window)


@pytest.mark.parametrize("kind", NAMES)
def test_caches_of_the_plug_in_are_those_of_the_one_reader(kind):
    config = default(kind).get_text_config(decoder=True)
    try:
        wanted = from_config(config, rope="none").layers
    except KvkitError:  # the reader refuses it, or kvkit has no such layers
        pytest.skip("has no cache by the one reader")
    for own, theirs in zip(wanted, KvkitCache(config).cache.layers, strict=True):
        # Some models expand latent rows before they store them; layers that share the choice of another
        # layer's index keys have room for such keys in the plug-in, as in transformers.
        # Models of DeepSeek V4 pool rows themselves, and some with the delta rule compute their states, too.
        others = (DynamicLayer, IndexedLayer) if isinstance(own, (LatentLayer, IndexedLayer)) else ()
        others = (PooledLayer,) if isinstance(own, CompressedLayer) else others
        if isinstance(own, GatedDeltaLayer) and kind not in COMPUTED:
            others = (StateLayer,)
        assert type(theirs) in (type(own), *others)
        assert not isinstance(theirs, GatedDeltaLayer) or theirs._describe() == own._describe()
        assert getattr(theirs, "window", None) == getattr(own, "window", None)


def rotary_class(config):
    """Return the class that computes a model's frequencies, or None."""
    try:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:  # it has another model's
        return None
    classes = [
        each
        for name, each in vars(module).items()
        if inspect.isclass(each) and name.endswith("RotaryEmbedding")
        if "Vision" not in name and "Audio" not in name
    ]
    return next((each for each in classes if "Text" in each.__name__), classes[0] if classes else None)


def assert_ropes(config, ropes):
    """Assert that each layer rotates with the frequencies of the model's class."""
    module = rotary_class(config)(config)
    types, _ = transformers.cache_utils.get_layer_types_and_kwargs(config)
    types = getattr(config, "layer_types", None) or types
    for name, rope in zip(types, ropes, strict=True):
        if rope == "none":
            continue
        prefix = next(
            (each for each in (f"{name}_", aliases(name)) if hasattr(module, f"{each}inv_freq")), ""
        )
        theirs = getattr(module, f"{prefix}inv_freq").numpy()
        np.testing.assert_allclose(rope.frequencies, theirs, rtol=2e-6)
        factor = getattr(module, f"{prefix}attention_scaling", 1.0)
        assert rope.attention_factor == pytest.approx(factor, rel=1e-6)


def aliases(name):
    """Return how DeepSeek V4 calls the frequencies of a type of layers."""
    return "main_" if name == "sliding_attention" else "compress_"


@pytest.mark.parametrize("kind", NAMES)
def test_ropes_of_every_model_are_those_of_its_class_or_refused(kind):
    config = default(kind).get_text_config(decoder=True)
    try:
        ropes = Rope.from_config(config, interleaved=False)
    except KvkitError:
        assert rotary_class(config) is None or kind in REFUSED_KINDS | ROPE_REFUSED
        return
    if rotary_class(config) is None or kind in ROPE_OTHERWISE:
        return
    assert_ropes(config, ropes)


SIZES = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 64, "max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 1024}  # fmt: skip
OLDER = {  # words of configurations before `rope_parameters`
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR,
                    "sliding_window": 8},
    "gemma3n_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 8,
                     "num_kv_shared_layers": 0},
    "olmo3": {"rope_theta": 5e5, "rope_scaling": YARN, "sliding_window": 8},
    "modernbert-decoder": {"global_rope_theta": 16e4, "local_rope_theta": 1e4, "local_attention": 8},
    "llama": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "qwen3": {"rope_theta": 1e6, "rope_scaling": YARN, "use_sliding_window": False},
    "qwen3_next": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "full_attention_interval": 3},
    "gpt_oss": {"rope_theta": 15e4, "rope_scaling": YARN | {"truncate": False}, "sliding_window": 8},
    "glm4": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "phi": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "smollm3": {"rope_theta": 2e6, "no_rope_layers": [1, 1, 1, 0, 1, 1]},
    "cohere2": {"rope_theta": 5e4, "sliding_window": 8, "sliding_window_pattern": 3},
    "exaone4": {"rope_theta": 1e6, "sliding_window": 8, "sliding_window_pattern": 3,
                "rope_scaling": LLAMA3},
    "minimax_m2": {"rope_theta": 5e6, "rotary_dim": 32},
    "llama4_text": {"rope_theta": 5e5, "attention_chunk_size": 8, "no_rope_layers": [],
                    "rope_scaling": LLAMA3},
    "step3p5": {"rope_theta": [5e6, 1e4] * 3, "partial_rotary_factors": [0.5, 1.0] * 3,
                "rope_scaling": LLAMA3, "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"] * 3},
    "gemma4_text": {"rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }, "per_layer_config": {5: {"head_dim": 128}}, "sliding_window": 8},
    "lfm3": {"rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6,
                           "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }, "layer_types": ["conv", "full_attention", "sliding_attention"] * 2, "conv_L_cache": 3,
       "sliding_window": 8},
    "deepseek_v4": {"rope_theta": 1e4, "compress_rope_theta": 16e4, "rope_scaling": YARN | {"factor": 16.0},
                    "compress_ratios": [0, 0, 4, 128, 4, 128], "qk_rope_head_dim": 16, "sliding_window": 8,
                    "index_head_dim": 32},
    "deepseek_v3": {"rope_theta": 1e4, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
                    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
                    "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", OLDER)
def test_older_words_of_rotation_are_those_of_the_class(kind):
    words = SIZES | OLDER[kind]
    config = transformers.AutoConfig.for_model(kind, **json.loads(json.dumps(words)))
    if "per_layer_config" in words:
        words["per_layer_config"] = {"5": {"head_dim": 128}}
    assert_ropes(config.get_text_config(decoder=True), Rope.from_config(words | {"model_type": kind}))


def test_proportional_keys_are_rotated_as_by_the_model():
    """The pairs of a head that rotate are a share of all; the others have frequency 0."""
    config = transformers.AutoConfig.for_model("gemma4_text")
    rope = Rope.from_config(config)[5]
    states = torch.randn(1, 3, 2, 512, generator=torch.Generator().manual_seed(0))
    at = torch.tensor([[0, 7, 90]])
    module = importlib.import_module("transformers.models.gemma4.modeling_gemma4")
    cos, sin = module.Gemma4TextRotaryEmbedding(config)(states, at, "full_attention")
    theirs = module.apply_rotary_pos_emb(states, cos, sin, unsqueeze_dim=2)
    ours = rope.rotate(states.transpose(1, 2), at[0].numpy())
    torch.testing.assert_close(ours, theirs.transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "longcat_flash", "minicpm3", "glm4_moe_lite"])
@pytest.mark.parametrize("yarn", [{}, YARN, YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}])
def test_the_scale_of_latent_models_is_that_of_the_class(kind, yarn):
    words = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    config = transformers.AutoConfig.for_model(kind, **words, rope_parameters=yarn | {"rope_theta": 1e4})
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    attention = next(
        each
        for name, each in vars(module).items()
        if name.endswith(("Attention", "MLA")) and inspect.isclass(each)
    )
    with torch.device("meta"):
        assert kvkit.mla_scale(config) == pytest.approx(attention(config, 0).scaling, rel=1e-9)
