"""Translate the metadata of a GGUF file to the entries of a config.json, which has one reader."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvkit.models.kinds import EVERY, TYPE_OF_KIND
from kvkit.models.words import MOST_LAYERS, Words, shown

# Architectures of GGUF files (llama.cpp's rope types) by the pairs that rotary embedding rotates: neighbours,
# or elements at the same place of the two halves of a head.
NEIGHBOURS = frozenset(
    """
    llama llama4 mllama deci baichuan starcoder internlm2 minicpm xverse command-r cohere2 olmo arctic
    deepseek deepseek2 deepseek32 plm chatglm granite granitemoe granitehybrid chameleon bailingmoe neo-
    bert smollm3 arcee ernie4_5 ernie4_5-moe mistral3 mistral4 maincoder glm-dsa
    """.split()  # noqa: SIM905
)
HALVES = frozenset(
    """
    falcon falcon-h1 grok dbrx stablelm bitnet qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3next
    qwen3vl qwen3vlmoe qwen35 qwen35moe olmo2 olmoe phi2 phi3 phimoe gemma gemma2 gemma3 gemma3n gemma4
    starcoder2 openelm gptneox codeshell nemotron exaone exaone4 minicpm3 gpt-oss lfm2 lfm2moe
    smallthinker seed_oss hunyuan-dense hunyuan-moe dots1 bailingmoe2 apertus minimax-m2 glm4moe
    """.split()  # noqa: SIM905
)
# {architecture: model_type}, where the reader of configurations has a rule for the type
TYPES = {
    "gpt-oss": "gpt_oss", "falcon-h1": "falcon_h1", "deepseek4": "deepseek_v4",
    "granitehybrid": "granitemoehybrid",
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "kimi-linear": "kimi_linear",
    "nemotron_h_moe": "nemotron_h", "rwkv6": "rwkv", "rwkv7": "rwkv", "arwkv7": "rwkv", "rwkv6qwen2": "rwkv",
}  # fmt: skip
GATED_DELTA = "qwen3next", "qwen35", "qwen35moe"
WITHOUT_STATES = {"deci", "openelm"}  # a layer with 0 key heads stores nothing
HARMLESS_FORMS = (
    "attention.*norm*", "attention.*_lora_rank", "attention.*scale*", "attention.causal",
    "attention.max_alibi_bias", "attention.clamp_kqv", "attention.temperature_length",
    "attention.relative_buckets_count", "attention.gate*", "attention.indexer.head_count",
    "attention.indexer.top_k", "kda.gate_lower_bound", "ssm.dt_b_c_rms", "rope.scaling.finetuned",
    "rope.scaling.yarn_ext_factor", "attn_logit_softcapping", "interleave_moe_layer_step",
)  # fmt: skip
HARMLESS: Callable[[str], object] = re.compile("|".join(map(fnmatch.translate, HARMLESS_FORMS))).match
FAMILIES: Callable[[str], object] = re.compile(
    r"(attention|ssm|kda|shortconv|wkv|rope)\.|.*(pattern|interval|recurrent|attn_|window|shared_kv)"
).match
OF_ROPE = (
    "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier", "rope.dimension_sections", "rope.dimension_count_swa",
    "rope.scaling.factor", "rope.scaling.original_context_length", "attention.compress_rope_freq_base",
)  # fmt: skip
SCALINGS = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}


def entries_of_header(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the metadata of a GGUF file says, in the words of a config.json.

    Raises
    ------
    KvkitError
        With the name of a field that is missing, wrong, or of a known kind and not used.
    """
    architecture = fields.get("general.architecture")
    architecture = architecture if isinstance(architecture, str) else "None"
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): x for name, x in fields.items() if name.startswith(prefix)}
    words = Words(own, path=prefix)
    header = Header(words, architecture)
    entries = {
        "model_type": TYPES.get(architecture, architecture),
        "_name_or_path": str(fields.get("general.name", architecture)),
        "num_hidden_layers": header.count,
        "max_position_embeddings": words.count("context_length", default=0),
        **header.heads(), **header.states(), **header.rotation(),
    }  # fmt: skip
    entries["layer_types"] = header.types()
    words.use("nextn_predict_layers", "context_length", "embedding_length", "feed_forward_length")
    for name in words.entries:
        if name not in words.used and not HARMLESS(name) and FAMILIES(name):
            raise words.error(name, "a field that kvkit knows", shown(words.entries[name]))
    return {name: value for name, value in entries.items() if value is not None}


class Header:
    """Reads the fields of one architecture, whose names have lost its prefix."""

    def __init__(self, words: Words, architecture: str) -> None:
        self.words, self.architecture = words, architecture
        blocks = words.count("block_count", least=1)
        drafts = words.count("nextn_predict_layers", default=0)
        if not 0 < blocks - drafts <= MOST_LAYERS:
            raise words.error(
                "block_count", f"at most {MOST_LAYERS} layers, and more than those of drafts", blocks
            )
        self.count, self.blocks = blocks - drafts, blocks
        queries = words.value("attention.head_count")
        self.queries = self.numbers("attention.head_count", 1 if queries is None else queries)
        num_kv_heads = words.value("attention.head_count_kv")
        self.num_kv_heads = (
            self.queries if num_kv_heads is None else self.numbers("attention.head_count_kv", num_kv_heads)
        )

    def numbers(self, name: str, value: Any) -> list[int]:
        """Return a number for each layer; a field has one for all, or a list."""
        if not isinstance(value, list):
            return [self.words.whole(name, value)] * self.count
        if len(value) not in (self.count, self.blocks):
            raise self.words.error(name, f"{self.count} numbers, one for each layer", len(value))
        return [self.words.whole(f"{name}[{i}]", each) for i, each in enumerate(value[: self.count])]

    def heads(self) -> dict[str, Any]:
        """Return heads, and elements of keys and values."""
        words, queries = self.words, max(self.queries)
        hidden = words.count("embedding_length", default=0)
        dim = words.count("attention.key_length", default=0)
        if not dim:
            if not hidden or not queries or hidden % queries:
                raise words.error("attention.key_length", "elements of a key", "none")
            dim = hidden // queries
        entries: dict[str, Any] = {
            "hidden_size": hidden or None, "num_attention_heads": queries,
            "num_key_value_heads": self.num_kv_heads, "head_dim": dim,
            "v_head_dim": words.count("attention.value_length", default=dim),
            "sliding_window": words.value("attention.sliding_window") or None,
            "swa_head_dim": words.value("attention.key_length_swa"),
            "swa_v_head_dim": words.value("attention.value_length_swa"),
            "num_kv_shared_layers": words.value("attention.shared_kv_layers"),
            "index_head_dim": words.value("attention.indexer.key_length"),
        }  # fmt: skip
        words.use("attention.kv_lora_rank", "attention.value_length_mla")
        if words.value("attention.key_length_mla") is not None:
            rotated = words.count("rope.dimension_count", default=0)
            latent = words.count("attention.kv_lora_rank", default=dim - rotated)
            if not 0 < latent <= dim:
                raise words.error(
                    "attention.kv_lora_rank", f"a number up to attention.key_length, {dim}", latent
                )
            entries |= {"kv_lora_rank": latent, "qk_rope_head_dim": dim - latent}
        if (ratios := words.value("attention.compress_ratios")) is not None:
            entries["compress_ratios"] = ratios
        return entries

    def types(self) -> list[str] | None:
        """Return the type of each layer; None where the model's type says it."""
        kinds = self.kinds()
        if self.architecture in ("falcon-h1", "mamba", "mamba2") or "attention.compress_ratios" in self.words:
            return None
        return [TYPE_OF_KIND[kind] for kind in kinds]

    def kinds(self) -> list[str]:
        """Return the kind of each layer."""
        words, kinds = self.words, self.kinds_of_rows()
        recurrent = words.items("attention.recurrent_layers")
        interval = words.count(
            "full_attention_interval", default=4 if self.architecture in GATED_DELTA else 0
        )
        if recurrent is not None:
            flags = self.numbers(
                "attention.recurrent_layers", [int(each is True or each == 1) for each in recurrent]
            )
            return ["state" if flag else kind for flag, kind in zip(flags, kinds, strict=True)]
        if interval:
            return ["state" if (i + 1) % interval else kind for i, kind in enumerate(kinds)]
        widths = words.value("feed_forward_length")
        for i, heads in enumerate(self.num_kv_heads):
            if not heads:
                mlp = (
                    isinstance(widths, list)
                    and "nemotron" in self.architecture
                    and widths[i : i + 1] not in ([0], [])
                )
                kinds[i] = "none" if mlp or self.architecture in WITHOUT_STATES else self.stateful()
        return kinds

    def stateful(self) -> str:
        """Return the kind of a layer without keys."""
        if "shortconv.l_cache" in self.words:
            return "conv"
        return "state" if any(name.startswith(("ssm.", "kda.")) for name in self.words.entries) else "none"

    def kinds_of_rows(self) -> list[str]:
        """Return which layers have a window, as if all had rows."""
        words, kind = self.words, "indexed" if "attention.indexer.key_length" in self.words else "full"
        pattern = words.value("attention.sliding_window_pattern")
        if not words.value("attention.sliding_window"):
            return [kind] * self.count
        if isinstance(pattern, list):
            flags = self.numbers(
                "attention.sliding_window_pattern", [int(each is True or each == 1) for each in pattern]
            )
            return ["window" if flag else kind for flag in flags]
        step = EVERY.get(TYPES.get(self.architecture, self.architecture), 0)
        if pattern is not None:
            step = words.whole("attention.sliding_window_pattern", pattern)
        return ["window" if not step or (i + 1) % step else kind for i in range(self.count)]

    def states(self) -> dict[str, Any]:
        """Return the sizes of recurrent states."""
        words = self.words
        if "shortconv.l_cache" in words:
            return {"conv_L_cache": words.value("shortconv.l_cache")}
        kernel = words.value("ssm.conv_kernel")
        if "kda.head_dim" in words:
            heads = words.count("ssm.time_step_rank", default=max(self.queries))
            dim = words.value("kda.head_dim")
            return {"linear_num_heads": heads, "linear_head_dim": dim, "linear_conv_kernel_dim": kernel}
        if not any(name.startswith("ssm.") for name in words.entries):
            return {}
        if self.architecture == "falcon-h1" or self.architecture not in GATED_DELTA:
            return self.mamba(kernel)
        depth = words.value("ssm.state_size")
        words.use("ssm.inner_size")
        return {
            "linear_num_key_heads": words.value("ssm.group_count"), "linear_key_head_dim": depth,
            "linear_num_value_heads": words.value("ssm.time_step_rank"), "linear_value_head_dim": depth,
            "linear_conv_kernel_dim": kernel,
        }  # fmt: skip

    def mamba(self, kernel: Any) -> dict[str, Any]:
        """Return the sizes of Mamba layers, as one head of all channels; Mamba 1 has no groups."""
        self.words.use("ssm.time_step_rank")
        groups = self.words.count("ssm.group_count", default=0)
        inner = self.words.value("ssm.inner_size")
        entries = {"mamba_n_heads": 1, "mamba_d_head": inner, "mamba_n_groups": groups,
                   "mamba_d_state": self.words.value("ssm.state_size"), "mamba_d_conv": kernel}  # fmt: skip
        if self.architecture in ("mamba", "mamba2"):
            names = {"mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_n_groups": "n_groups",
                     "mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel"}  # fmt: skip
            return {names[name]: value for name, value in entries.items()}
        return entries

    def rotation(self) -> dict[str, Any]:
        """Return what the fields say of rotary embedding."""
        words, architecture = self.words, self.architecture
        pairs = True if architecture in NEIGHBOURS else False if architecture in HALVES else None
        scaling: dict[str, Any] = {}
        if (kind := words.value("rope.scaling.type")) is not None:
            if not isinstance(kind, str) or kind not in SCALINGS:
                raise words.error("rope.scaling.type", ", ".join(SCALINGS), shown(kind))
            names = {"factor": "factor", "original_context_length": "original_max_position_embeddings",
                     "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}  # fmt: skip
            scaling = {name: words.value(f"rope.scaling.{field}") for field, name in names.items()}
            scaling = {"rope_type": SCALINGS[kind]} | {
                name: x for name, x in scaling.items() if x is not None
            }
        words.use(*OF_ROPE)
        local = words.value("rope.freq_base_swa")
        return {
            "rope_theta": words.value("rope.freq_base"), "rope_local_base_freq": local,
            "rotary_dim": words.value("rope.dimension_count"), "rope_scaling": scaling or None,
            "rope_interleaved": pairs,
        }  # fmt: skip
