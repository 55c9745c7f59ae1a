"""Configurations of public models by name: the numbers that they publish, in the words that are read."""

from __future__ import annotations

from typing import Any

from kvkit.errors import nearest

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def plain(
    model_type: str, layers: int, queries: int, heads: int, hidden: int, longest: int, **words: Any
) -> dict[str, Any]:
    """Return a configuration by the numbers that all have."""
    return {
        "model_type": model_type, "num_hidden_layers": layers, "num_attention_heads": queries,
        "num_key_value_heads": heads, "hidden_size": hidden, "max_position_embeddings": longest, **words,
    }  # fmt: skip


def llama(layers: int, queries: int, heads: int, hidden: int, **words: Any) -> dict[str, Any]:
    """Return the configuration of a Llama 3.1, 3.2 or 3.3."""
    words = {"rope_theta": 5e5, "rope_scaling": LLAMA3, **words}
    return plain("llama", layers, queries, heads, hidden, 131072, **words)


def latent(
    model_type: str, layers: int, queries: int, hidden: int, longest: int, **words: Any
) -> dict[str, Any]:
    """Return the configuration of a model with DeepSeek's latent rows."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    return plain(model_type, layers, queries, queries, hidden, longest, **sizes, **words)


def deltas(
    layers: int, queries: int, heads: int, hidden: int, value_heads: int, **words: Any
) -> dict[str, Any]:
    """Return the configuration of a Qwen with gated delta networks and a full layer behind each three."""
    sizes = {
        "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_num_value_heads": value_heads, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25, "rope_theta": 1e7,
    }  # fmt: skip
    return plain("qwen3_next", layers, queries, heads, hidden, 262144, **sizes, **words)


YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
OFF = {"use_sliding_window": False, "rope_theta": 1e6}
GEMMA3 = {"sliding_window": 1024, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
GPT_OSS = {"head_dim": 64, "sliding_window": 128, "rope_theta": 15e4, "rope_scaling": {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False,
}}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama-2-7b": plain("llama", 32, 32, 32, 4096, 4096, rope_theta=1e4),
    "llama-3.1-8b": llama(32, 32, 8, 4096),
    "llama-3.1-70b": llama(80, 64, 8, 8192),
    "llama-3.1-405b": llama(126, 128, 8, 16384),
    "llama-3.2-1b": llama(16, 32, 8, 2048, rope_scaling=LLAMA3 | {"factor": 32.0}),
    "llama-3.2-3b": llama(28, 24, 8, 3072, rope_scaling=LLAMA3 | {"factor": 32.0}),
    "llama-3.3-70b": llama(80, 64, 8, 8192),
    "llama-4-scout": plain(
        "llama4_text", 48, 40, 8, 5120, 10485760, head_dim=128, attention_chunk_size=8192, no_rope_layers=[],
        no_rope_layer_interval=4, rope_theta=5e5,
    ),
    "mistral-7b": plain("mistral", 32, 32, 8, 4096, 32768, rope_theta=1e6),
    "mixtral-8x7b": plain("mixtral", 32, 32, 8, 4096, 32768, rope_theta=1e6),
    "qwen2.5-7b": plain("qwen2", 28, 28, 4, 3584, 32768, **OFF),
    "qwen3-8b": plain("qwen3", 36, 32, 8, 4096, 40960, head_dim=128, **OFF),
    "qwen3-32b": plain("qwen3", 64, 64, 8, 5120, 40960, head_dim=128, **OFF),
    "qwen3-30b-a3b": plain("qwen3_moe", 48, 32, 4, 2048, 40960, head_dim=128, **OFF),
    "qwen3-235b-a22b": plain("qwen3_moe", 94, 64, 4, 4096, 40960, head_dim=128, **OFF),
    "qwen3-next-80b-a3b": deltas(48, 16, 2, 2048, 32),
    "gpt-oss-20b": plain("gpt_oss", 24, 64, 8, 2880, 131072, **GPT_OSS),
    "gpt-oss-120b": plain("gpt_oss", 36, 64, 8, 2880, 131072, **GPT_OSS),
    "gemma-2-9b": plain("gemma2", 42, 16, 8, 3584, 8192, head_dim=256, sliding_window=4096, rope_theta=1e4),
    "gemma-3-4b": plain("gemma3_text", 34, 8, 4, 2560, 131072, head_dim=256, **GEMMA3),
    "gemma-3-12b": plain("gemma3_text", 48, 16, 8, 3840, 131072, head_dim=256, **GEMMA3),
    "gemma-3-27b": plain("gemma3_text", 62, 32, 16, 5376, 131072, head_dim=128, **GEMMA3),
    "phi-4": plain("phi3", 40, 40, 10, 5120, 16384, rope_theta=25e4),
    "smollm2-135m": plain("llama", 30, 9, 3, 576, 8192, rope_theta=1e5),
    "deepseek-v2-lite": latent(
        "deepseek_v2", 27, 16, 2048, 163840, rope_theta=1e4,
        rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek-v3": latent(
        "deepseek_v3", 61, 128, 7168, 163840, rope_theta=1e4,
        rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
}  # fmt: skip
ENDINGS = "-instruct", "-it", "-chat", "-base", "-hf"


def plain_name(name: str) -> str:
    """Return llama-3.1-8b for meta-llama/Llama-3.1-8B-Instruct: a name without owner and endings."""
    name = name.rpartition("/")[2].lower().replace("_", "-").removeprefix("meta-")
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    return name


def known_model(name: str) -> dict[str, Any] | None:
    """Return the configuration of a public model by its name, or None."""
    found = MODELS.get(plain_name(name))
    return None if found is None else {"_name_or_path": plain_name(name), **found}


def like_known(name: str) -> list[str]:
    """Return the names of known models that are like a name."""
    return nearest(plain_name(name), MODELS, 3)
