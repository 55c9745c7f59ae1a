"""Sizes of caches by configuration, held to what engines print of public models."""

import json
import struct

import numpy as np
import pytest
from scenes import first_quick

from kvkit import KvkitError, Rope
from kvkit.cache import QuantizedCache
from kvkit.models.known import known_models
from kvkit.tools import size
from kvkit.tools.quantities import parse_bytes

MIB = 2**20
MODELS = known_models()


def transformer(layers, heads, dim, **more):
    """Return the configuration of a model whose layers are alike."""
    return {
        "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": heads,
        "head_dim": dim, "max_position_embeddings": 131072, **more,
    }  # fmt: skip


def hybrid(layers, heads, dim):
    """Return the configuration of a model with a full layer behind every three gated delta networks."""
    return transformer(
        layers, heads, dim, layer_types=[*["linear_attention"] * 3, "full_attention"] * (layers // 4),
        linear_num_key_heads=16, linear_key_head_dim=128, linear_num_value_heads=32,
        linear_value_head_dim=128, linear_conv_kernel_dim=4,
    )  # fmt: skip


GPT_OSS = transformer(24, 8, 64, model_type="gpt_oss", sliding_window=128)
LAGUNA = transformer(
    48, 8, 128, sliding_window=512,
    layer_types=["full_attention", *["sliding_attention"] * 3] * 12,
)  # fmt: skip
LATENT = transformer(6, 64, 128, kv_lora_rank=512, qk_rope_head_dim=64)
# What logs of engines print: (configuration, tokens, options, MiB of keys and values to two places).
PRINTED = {
    "llama.cpp, Llama 3.2 1B": (transformer(16, 8, 64), 4096, {}, 128.00),
    "llama.cpp, Llama 3.2 3B": (transformer(28, 8, 128), 4096, {}, 448.00),
    "llama.cpp, Llama 3.1 70B": (transformer(80, 8, 128), 4096, {}, 1280.00),
    "llama.cpp, Mistral 7B": (transformer(32, 8, 128), 4096, {}, 512.00),
    "llama.cpp, Phi 3 mini": (transformer(32, 32, 96), 4096, {}, 1536.00),
    "llama.cpp, Qwen3 8B": (transformer(36, 8, 128), 131072, {}, 18432.00),
    "llama.cpp, Qwen2.5 3B": (transformer(36, 2, 128), 16384, {}, 576.00),
    "llama.cpp, OLMoE 7B, q8_0": (transformer(16, 16, 128), 8192, {"formats": "q8_0"}, 544.00),
    "llama.cpp, Qwen3.5 9B, q4_0": (hybrid(32, 4, 256), 131072, {"formats": "q4_0"}, 1152.00),
    "llama.cpp, gpt-oss 20B": (GPT_OSS, 131072, {}, 3072.00 + 18.00),
    "llama.cpp, gpt-oss 20B, steps of 2048": (GPT_OSS, 131072, {"step": 2048}, 3072.00 + 54.00),
    "llama.cpp, gpt-oss 20B, steps of 128": (GPT_OSS, 8192, {"step": 128, "formats": "q8_0"}, 102.00 + 3.19),
    "llama.cpp, Laguna, q4_0": (LAGUNA, 2**20, {"formats": "q4_0"}, 13824.00 + 40.50),
    "llama.cpp, Ling 3.0 tiny": (LATENT, 4096, {"batch": 2}, 54.00),
    "vllm, Qwen3 8B": (transformer(36, 8, 128), 40960, {"formats": "bfloat16"}, 5.625 * 1024),
    "vllm, Qwen3 Coder 30B": (transformer(48, 4, 128), 262144, {"formats": "bfloat16"}, 24.00 * 1024),
}


@pytest.mark.parametrize("name", PRINTED)
def test_sizes_are_those_that_engines_print(name):
    config, tokens, options, printed = PRINTED[name]
    engine = name.partition(",")[0]
    (found,) = size(config, tokens=tokens, engine=engine, **options).caches
    assert abs((found.key_bytes + found.value_bytes) / MIB - printed) < 0.005


def test_states_are_counted_once_for_a_sequence():
    found = size(hybrid(32, 4, 256), tokens=[1, 131072], batch=[1, 3]).caches
    assert [each.state_bytes / MIB for each in found] == [50.25, 150.75] * 2  # llama.cpp prints 50 MiB


def test_kinds_of_layers():
    patterns = {
        "gemma2": (transformer(4, 8, 64, model_type="gemma2", sliding_window=9), "window full window full"),
        "qwen2": (
            transformer(3, 8, 64, sliding_window=9, use_sliding_window=True, max_window_layers=2),
            "full full window",
        ),
        "off": (transformer(2, 8, 64, sliding_window=9, use_sliding_window=False), "full full"),
        "gemma3n": (transformer(3, 8, 64, num_kv_shared_layers=1), "full full shared"),
        "sparse": (LATENT | {"num_hidden_layers": 1, "index_head_dim": 128}, "latent index"),
        "nemotron": (
            transformer(3, 8, 64, hybrid_override_pattern="M-*", mamba_num_heads=2, mamba_head_dim=4,
                        ssm_state_size=8, n_groups=1, conv_kernel=4, hidden_size=9),
            "state none full",
        ),
        "jamba": (
            transformer(3, 8, 64, attn_layer_period=3, attn_layer_offset=1, hidden_size=8, mamba_expand=2,
                        mamba_d_state=16, mamba_d_conv=4),
            "state full state",
        ),
    }  # fmt: skip
    for name, (config, kinds) in patterns.items():
        layers = size(config, tokens=1).layers
        assert sorted(" ".join([each.kind] * each.num_layers) for each in layers) == sorted(
            " ".join([kind] * kinds.split().count(kind)) for kind in set(kinds.split())
        ), name


def gguf(**fields):
    """Return the bytes of a GGUF file with metadata and no tensors."""

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    def value(x):
        if isinstance(x, str):
            return struct.pack("<I", 8) + text(x)
        if isinstance(x, list):
            return struct.pack("<IIQ", 9, 5, len(x)) + struct.pack(f"<{len(x)}i", *x)
        return struct.pack("<II", 4, x)

    pairs = {"general.architecture": "a"} | {f"a.{name.replace('__', '.')}": x for name, x in fields.items()}
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, len(pairs))
        + b"".join(text(k) + value(x) for k, x in pairs.items())
    )


HEAD = {"block_count": 4, "attention__head_count": 16, "embedding_length": 1024}
HEADERS = {
    "heads of each layer": (HEAD | {"attention__head_count_kv": [2, 0, 2, 2]}, "full", 3),
    "a window in some": (
        HEAD | {"attention__sliding_window": 8, "attention__sliding_window_pattern": [1, 1, 1, 0]}, "full", 1,
    ),
    "latent": (HEAD | {"attention__key_length": 576, "attention__key_length_mla": 192}, "latent", 4),
    "states": (
        HEAD
        | {"full_attention_interval": 2, "ssm__inner_size": 8, "ssm__state_size": 2, "ssm__conv_kernel": 4},
        "state", 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_gguf(name, tmp_path):
    fields, kind, count = HEADERS[name]
    (tmp_path / "model.gguf").write_bytes(gguf(**fields))
    assert (
        next(each.num_layers for each in size(tmp_path / "model.gguf").layers if each.kind == kind) == count
    )


@pytest.mark.parametrize("fit", ["1GiB", 3 * 10**9, "2.5 GB"])
def test_the_longest_context_that_fits(fit):
    found = size(GPT_OSS, fit=fit, formats="float16,q8_0", batch=[1, 2])
    for each in found.caches:
        (more,) = size(GPT_OSS, tokens=each.tokens + 1, batch=each.batch, formats=each.format).caches
        assert each.bytes <= found.fit < more.bytes


REFUSED = {
    "num_hidden_layers: expected a whole number from 1": {},
    "layer_types[0]: expected a type of": transformer(1, 1, 8, layer_types=["moon"]),
    "layer_types: expected 3 members": transformer(3, 1, 8, layer_types=["full_attention"]),
    "num_key_value_heads: expected 2 members": transformer(2, [1, 2, 3], 8),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    with pytest.raises(KvkitError) as error:
        size(REFUSED[message])
    assert message in str(error.value)


def test_files_that_are_no_model(tmp_path):
    (tmp_path / "short").write_bytes(gguf()[:-3])
    with pytest.raises(KvkitError, match="short: "):
        size(tmp_path / "short")
    np.savez(tmp_path / "cache.npz", cache=np.zeros(3))
    with pytest.raises(KvkitError, match=r"cache\.npz: neither .* it is a \.npz file .*kvkit inspect"):
        size(tmp_path / "cache.npz")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("128k", [131072]), ("4096,1M", [4096, 2**20]), ("1.5K, 8 k", [1536, 8192]), ([7, "2k"], [7, 2048])],
)
def test_lengths_as_people_write_them(text, tokens):
    assert [each.tokens for each in size(GPT_OSS, tokens=text).caches] == tokens


@pytest.mark.parametrize(
    ("text", "found"),
    [("24GiB", 24 * 2**30), ("24gb", 24 * 10**9), ("24 G", 24 * 2**30), ("1.5T", 3 * 2**39), ("512B", 512)],
)
def test_bytes_as_people_write_them(text, found):
    assert parse_bytes("fit", text) == found


@pytest.mark.parametrize("name", MODELS)
def test_public_models_are_known_by_name(name):
    """Their configurations are read as any other; sizes of some are what logs of engines print."""
    found = size(name, tokens=4096)
    assert found.model == name
    assert found.caches[0].bytes > 2**20
    ropes = Rope.from_config(MODELS[name])
    assert len(ropes) == found.num_layers
    printed = {
        "llama-3.2-1b": 128,
        "llama-3.2-3b": 448,
        "llama-3.1-70b": 1280,
        "mistral-7b": 512,
        "qwen3-8b": 576,
    }
    if name in printed:
        assert found.caches[0].bytes == printed[name] * MIB


def test_names_of_models_are_read_as_people_write_them(tmp_path, monkeypatch):
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "LLAMA-3.1-8B", "llama-3.1-8b"):
        assert size(name).caches[-1].tokens == 131072
    monkeypatch.chdir(tmp_path)  # a file of that name comes first
    (tmp_path / "llama-3.1-8b").write_text(json.dumps(transformer(1, 2, 8)))
    assert size("llama-3.1-8b").num_layers == 1


STORED = (
    "kivi4", "int4:g16", "q8_0/q4_0", "e4m3:g32",  # by channel, by group, in blocks, of 8 bits
    "kivi2:g64", "int8:g32", "int8", "uint4:g32", "q8_0", "fp8", "int4:g32+hadamard",
    "uint8:g16:channel/int4:float32", "K=int8:g32+hadamard,V=kivi2", "K=int8:g32@0/q8_0,V=kivi2@2/q4_0",
)  # fmt: skip


@pytest.mark.parametrize("name", first_quick(STORED, 4))
@pytest.mark.parametrize(("residual", "sink"), [(128, 4), (0, 0), (17, 9)])
def test_a_quantized_cache_takes_so_much(name, residual, sink):
    """Sinks, recent tokens and windows are counted as the floats that they stay."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = transformer(3, 2, 64, layer_types=kinds, sliding_window=50)
    for tokens in (1, 4, 60, 131, 300, 517):
        cache = QuantizedCache(
            name, residual_length=residual, sink=sink, layer_types=config["layer_types"], window=50
        )
        states = np.zeros((3, 2, tokens, 64), np.float16)
        for i in range(3):
            for part in (states[:, :, :-1], states[:, :, -1:]):
                if part.shape[2]:
                    cache.update(part, part, i)
            cache.layers[i]._release_undo()
        for i in (0, 2):
            cache.layers[i].store.release_undo()  # copies of what the last step coded
        options = {"residual_length": residual, "sink": sink, "engine": "kvkit"}
        (found,) = size(config, tokens=tokens, batch=3, formats=name, **options).caches
        assert found.bytes == cache.nbytes


@pytest.mark.transformers
@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "gemma3"])
def test_a_cache_of_transformers_takes_so_much(kind):
    import torch
    from transformers import DynamicCache, Gemma3TextConfig, GptOssConfig, LlamaConfig

    made = {"llama": LlamaConfig, "gpt_oss": GptOssConfig, "gemma3": Gemma3TextConfig}[kind](
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_size=32
    )
    cache, tokens = DynamicCache(config=made), 5000
    for i in range(6):
        for part in (tokens - 1, 1):
            cache.update(*torch.zeros(2, 1, 2, part, 8, dtype=torch.float16), i)
    stored = sum(2 * layer.keys.nbytes for layer in cache.layers)
    assert size(made, tokens=tokens, engine="transformers").caches[0].bytes == stored


def test_what_fits_beside_weights_and_before_the_last_position():
    alone, beside = (size("gpt-oss-20b", fit="24GiB", weights=weights) for weights in (None, "13GB"))
    assert beside.fit == alone.fit - 13 * 10**9
    assert beside.caches[0].bytes <= beside.fit < alone.caches[0].bytes
    assert [len(each.notes) for each in (alone, beside)] == [2, 1]
    assert "weights=16GB" in str(alone)
    assert "ends at 131072 tokens" in beside.notes[0]
    assert size("gpt-oss-20b", fit="3GiB").notes[1:] == []
    assert size("gpt-oss-20b", tokens="128k").notes == []
    assert "131072" in size("gpt-oss-20b", tokens=131073).notes[0]


def test_notes_say_which_of_the_named_contexts_fit():
    found = size("llama-3.1-8b", tokens="128k", formats="bf16,int4:g32", fit="24GB", weights="16GB")
    assert [each.tokens for each in found.wanted] == [131072] * 2
    assert [note.rpartition(" in ")[2] for note in found.notes[:2]] == [
        "bf16 take 16.0 GiB: they do not fit", "int4:g32 take 4.5 GiB: they fit",
    ]  # fmt: skip
    assert "tokens, batch 2, in float16" in size("llama-3.1-8b", tokens=1, batch=2, fit="1GB").notes[0]


@pytest.mark.parametrize("name", ["fp16", "f16", "bf16", "fp32", "f32"])
@pytest.mark.parametrize("engine", ["exact", "kvkit"])
def test_floats_have_the_names_of_others(name, engine):
    meant = {"b": "bfloat16", "f": f"float{name[-2:]}"}[name[0]]
    one, two = size("llama-3.1-8b", tokens=4096, formats=[name, meant], engine=engine).caches
    assert one.bytes == two.bytes
