"""Find what a layer keeps: heads, elements of keys and values, windows, and numbers of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvkit.models.description import DeltaShape, LayerShape
from kvkit.models.words import Words, shown

WINDOWED = "window", "both_window"
# Entries of states: a model without such layers may still have them, if its list says so.
STATE_WORDS = (
    "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_expand",
)  # fmt: skip
LIGHTNING = "minimax", "minimax_text_01"


def layer_shape(words: Words, kind: str, layer: int, count: int, own_index: bool) -> LayerShape:
    """Return what a layer of some kind keeps."""
    words = words.at(changes_of(words, kind, layer, count), f"layer {layer}")
    if kind in ("state", "conv"):
        delta = delta_shape(words) if kind == "state" else None
        return LayerShape(kind, state=delta.numbers if delta else state_of(words, kind), delta=delta)
    if kind == "none":
        return LayerShape("none")
    if kind in ("v4_window", "csa", "hca"):
        return compressed_shape(words, kind)
    index_dim = 0
    if kind == "indexed" or (kind == "full" and "index_head_dim" in words and "kv_lora_rank" in words):
        width = words.count("index_head_dim", least=1)
        index_dim = width if own_index else 0
    if words.value("kv_lora_rank"):
        if kind not in ("full", "indexed"):
            wanted = "latent rows in layers without a window"
            raise words.error("kv_lora_rank", wanted, f"a layer of kind {kind}")
        words.use("num_key_value_heads", "head_dim", "v_head_dim")
        latent, rotated = words.count("kv_lora_rank", least=1), words.count("qk_rope_head_dim")
        return LayerShape("latent", 1, latent + rotated, index_dim=index_dim, latent_dim=latent)
    heads, key_dim, value_dim = head_sizes(words, kind, layer, count)
    window = window_of(words, kind)
    if kind in ("both", "both_window"):
        if words.model_type.startswith("inkling"):  # convolutions of keys, values, and two of hidden states
            kernel = words.count("conv_kernel_size", "sconv_kernel_size", least=1)
            hidden = words.count("hidden_size", least=1)
            state = convolution(kernel, heads * (key_dim + value_dim) + 2 * hidden)
        else:
            state = mamba(words)
        return LayerShape("both", heads, key_dim, value_dim, window, state)
    kind = "full" if kind == "indexed" else kind
    return LayerShape(kind, heads, key_dim, value_dim, window, index_dim=index_dim)


def changes_of(words: Words, kind: str, layer: int, count: int) -> Mapping[str, Any]:
    """Return the entries that differ in a layer from those of the model."""
    changes: dict[str, Any] = {}
    if "attention_other_setting" in words:
        part = words.part("attention_other_setting")
        kind_there = part.value("attention_type")
        if kind_there not in ("sliding_attention", None):
            raise part.error("attention_type", "sliding_attention", shown(kind_there))
        if kind in WINDOWED:
            changes |= {name: part.entries[name] for name in part.entries if name in OTHER_SETTINGS}
    if "per_layer_config" in words:
        part = words.part("per_layer_config")
        for name in part.entries:
            if not name.isdecimal() or len(name) > 6 or int(name) >= count:
                raise part.error(name, f"the number of a layer below {count}", "another name")
            if int(name) == layer:
                changes |= part.part(name).entries
    if "block_configs" in words:
        blocks = words.by_layer("block_configs", count) or []
        group = blocks[layer].get("attention", {}).get("n_heads_in_group")
        if kind == "full":
            words.use("num_key_value_heads")
            group = words.whole(f"block_configs[{layer}].attention.n_heads_in_group", group, 1)
            heads = words.count(*QUERIES, least=1)
            if heads % group:
                wanted = f"a divisor of {heads}, the heads of queries"
                raise words.error(f"block_configs[{layer}].attention.n_heads_in_group", wanted, group)
            changes["num_key_value_heads"] = heads // group
    return changes


OTHER_SETTINGS = "num_attention_heads", "num_attention_groups", "num_key_value_heads", "head_dim"
QUERIES = "num_attention_heads", "n_head", "n_heads"
KEY_HEADS = "num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_groups"
HIDDEN = "hidden_size", "n_embd", "d_model"


def head_sizes(words: Words, kind: str, layer: int, count: int) -> tuple[int, int, int]:
    """Return the key heads of a layer, and the elements of a key and of a value."""
    queries = words.count(*QUERIES, least=1)
    if kind in WINDOWED:
        queries = words.count("swa_num_attention_heads", default=queries, least=1)
    if kind in WINDOWED and "swa_num_key_value_heads" in words:
        heads = words.count("swa_num_key_value_heads", least=1)
    else:
        heads = key_heads(words, kind, layer, count, queries)
    if kind in WINDOWED and "swa_head_dim" in words:
        key_dim = words.count("swa_head_dim", least=1)
        return heads, key_dim, words.count("swa_v_head_dim", default=key_dim, least=1)
    key_dim = head_dim(words, kind, queries)
    if kind == "full" and "global_head_dim" in words:
        words.use("v_head_dim")
        return heads, key_dim, key_dim
    return heads, key_dim, words.count("v_head_dim", default=key_dim, least=1)


def key_heads(words: Words, kind: str, layer: int, count: int, queries: int) -> int:
    """Return how many heads of keys a layer has."""
    if "attn_config" in words:  # DBRX, MPT
        part = words.part("attn_config")
        words.use("num_key_value_heads")
        return part.count("kv_n_heads", default=queries, least=1)
    if "num_global_key_value_heads" in words:
        shares = words.flag("attention_k_eq_v", True)
        heads = words.count("num_global_key_value_heads", least=1)
        words.use("num_key_value_heads")  # of layers with a window, which there may be none of
        if kind == "full" and shares:
            return heads
    if words.flag("multi_query", False):
        words.use("num_kv_heads", "num_key_value_heads", "n_head_kv")
        if not words.flag("new_decoder_architecture", False):
            return 1
        return words.count("num_kv_heads", "n_head_kv", least=1)
    value = words.value(*KEY_HEADS)
    if value is None:
        return queries
    name = words.name_of(KEY_HEADS)
    listed = words.by_layer(name, count) if isinstance(value, (list, tuple)) else None
    name, value = (name, value) if listed is None else (f"{name}[{layer}]", listed[layer])
    heads = words.whole(name, value, 1)
    if queries % heads and listed is None:
        raise words.error(name, f"a divisor of {queries}, the heads of queries", heads)
    return heads


def head_dim(words: Words, kind: str, queries: int) -> int:
    """Return how many elements a key has."""
    if kind == "full" and "global_head_dim" in words:
        words.use("head_dim", "attention_head_dim", "kv_channels")
        return words.count("global_head_dim", least=1)
    words.use("global_head_dim")
    own = next((n for n in ("attention_head_dim", "head_dim", "kv_channels") if words.entries.get(n)), None)
    words.use("attention_head_dim", "head_dim", "kv_channels")
    if own is not None:
        return words.count(own, least=1)
    hidden = words.count(*HIDDEN, least=1)
    if hidden % queries:
        wanted = f"elements of a head, because hidden_size {hidden} is no multiple of {queries} heads"
        raise words.error("head_dim", wanted, "none")
    return hidden // queries


def window_of(words: Words, kind: str) -> int | None:
    """Return how many tokens a layer with a window, or a chunk, attends to."""
    if kind == "chunk":
        return words.count("attention_chunk_size", least=1)
    if kind not in WINDOWED:
        return None
    if words.model_type.startswith("mimo"):  # its published configurations have all three
        return words.count("sliding_window", "sliding_window_size", "attention_chunk_size", least=1)
    if "local_attention" in words and words.model_type.startswith("modernbert"):
        half = words.count("local_attention", least=2) // 2
        return words.whole("sliding_window", words.value("sliding_window") or half, 1)
    return words.count("sliding_window", "attention_window_size", "sliding_window_size", least=1)


def compressed_shape(words: Words, kind: str) -> LayerShape:
    """Return the rows and states of a layer of DeepSeek V4."""
    ratio = {"v4_window": 0, "csa": 4, "hca": 128}[kind]
    check_rates(words)
    words.use("num_key_value_heads", "index_head_dim", "kv_lora_rank", "v_head_dim")
    dim, window = words.count("head_dim", least=1), words.count("sliding_window", least=1)
    index = words.count("index_head_dim", least=1) if kind == "csa" else 0
    overlap = 2 if kind == "csa" else 1
    ring = overlap * ratio  # tokens of a state, each with a value and a score for every channel
    state = ring * 2 * overlap * (dim + index)
    return LayerShape("compressed", 1, dim, 0, window, state, index, ratio=ratio)


def check_rates(words: Words) -> None:
    """Refuse rates of compression that are not DeepSeek V4's."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    if "compress_rates" in words:
        part = words.part("compress_rates")
        for name in part.entries:
            if part.entries[name] != rates.get(name):
                raise part.error(name, rates.get(name, "no such entry"), shown(part.entries[name]))
    for name, rate in (("compress_rate_csa", 4), ("compress_rate_hca", 128)):
        if words.count(name, default=rate) != rate:
            raise words.error(name, rate, shown(words.value(name)))


def convolution(kernel: int, channels: int) -> int:
    """Return how many numbers a causal convolution keeps: the last inputs of every channel."""
    return max(kernel - 1, 0) * channels


def state_of(words: Words, kind: str) -> int:
    """Return how many numbers the state of a layer has."""
    if kind == "conv":
        kernel = words.count("conv_L_cache", least=1)
        return convolution(kernel, words.count("hidden_size", least=1))
    if "attn_type_list" in words or words.model_type in LIGHTNING:
        queries = words.count(*QUERIES, least=1)
        return queries * head_dim(words, "state", queries) ** 2
    if "lru_width" in words or "conv1d_width" in words:
        width = words.count("lru_width" if "lru_width" in words else "hidden_size", least=1)
        return width * words.count("conv1d_width", least=1)
    return mamba(words)


def delta_shape(words: Words) -> DeltaShape | None:
    """Return the state of a gated delta network or of Kimi Delta Attention; None if a model has neither."""
    if "linear_num_value_heads" in words or "linear_num_key_heads" in words:
        dk, dv = words.count("linear_key_head_dim", least=1), words.count("linear_value_head_dim", least=1)
        keys, values = (words.count(f"linear_num_{side}_heads", least=1) for side in ("key", "value"))
        if values % keys:
            wanted = f"a multiple of {keys}, as linear_num_key_heads says"
            raise words.error("linear_num_value_heads", wanted, values)
        kernel = words.count("linear_conv_kernel_dim", least=1)
        return DeltaShape(values, dk, dv, 2 * keys * dk + values * dv, kernel, "gdn")
    names = "linear_attn_config", "linear_num_heads", "linear_head_dim", "short_conv_kernel_size"
    if not any(name in words for name in names):
        return None
    if "linear_attn_config" in words:
        part = words.part("linear_attn_config")
        words.use("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "short_conv_kernel_size")
        heads, dim = part.count("num_heads", least=1), part.count("head_dim", least=1)
        kernel = part.count("short_conv_kernel_size", least=1)
    else:
        heads = words.count(
            "linear_num_heads" if "linear_num_heads" in words else "num_attention_heads", least=1
        )
        dim = words.count("linear_head_dim" if "linear_head_dim" in words else "head_dim", least=1)
        kernel = words.count("linear_conv_kernel_dim", "short_conv_kernel_size", least=1)
    return DeltaShape(heads, dim, dim, 3 * heads * dim, kernel, "kda")


def mamba(words: Words) -> int:
    """Return the numbers of a Mamba layer: convolution inputs, and a state for each channel."""
    pure = words.model_type in ("mamba", "mamba2", "falcon_mamba")
    depth = words.count(*(("state_size",) if pure else ("mamba_d_state", "ssm_state_size")), least=1)
    kernel = words.count(*(("conv_kernel",) if pure else ("mamba_d_conv", "conv_kernel")), least=1)
    grouped = "mamba_n_groups", "mamba_ngroups", "n_groups"
    expand = ("expand",) if pure else ("mamba_expand",)
    if any(name in words for name in grouped):
        words.use(*expand)
        groups = words.count(*grouped)
        inner = mamba2_channels(words, pure)
        return convolution(kernel, inner + 2 * groups * depth) + inner * depth
    words.use("n_mamba_heads")
    inner = words.count(*expand, least=1) * words.count("hidden_size", least=1)
    return convolution(kernel, inner) + inner * depth


def mamba2_channels(words: Words, pure: bool) -> int:
    """Return how many channels the heads of a Mamba 2 layer have."""
    names = ("num_heads",) if pure else ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    heads = words.count(*names, least=1)
    names = ("head_dim",) if pure else ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    value = words.value(*names)
    stated = words.count("mamba_d_ssm", default=0)
    if value in (None, "auto"):
        inner = stated or words.count("mamba_expand", "expand", least=1) * words.count("hidden_size", least=1)
        if inner % heads:
            raise words.error(words.name_of(names), f"elements of {heads} heads, {inner} in all", "auto")
        return inner
    inner = heads * words.whole(words.name_of(names), value, 1)
    if stated not in (0, inner):
        raise words.error("mamba_d_ssm", f"{inner}, as heads and their sizes say", stated)
    return inner
