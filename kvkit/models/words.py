"""Read entries of a configuration with checks, and refuse those of a known kind that nothing used."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvkit.errors import KvkitError, argument_error, describe

MOST_NUMBER = 2**40  # of a number in a configuration
MOST_LAYERS = 1024

# Entries about layers, heads, states and windows. One of these that a model's reader did not use is an error.
LAYER_WORDS = frozenset(
    """
    layer_types layers_block_type full_attention_interval layer_group_size linear_attn_config
    attn_layer_indices full_attn_idxs local_layer_ids attn_layer_period attn_layer_offset attn_type_list
    hybrid_override_pattern hybrid_layer_pattern block_types _block_types block_configs hybrid_layer_ids
    num_mem_blocks compress_ratios compress_rates compress_rate_csa compress_rate_hca
    sparse_attention_config index_topk_pattern index_topk_freq index_skip_topk_offset indexer_types
    sliding_window_pattern _sliding_window_pattern global_attn_every_n_layers use_sliding_window
    max_window_layers attention_chunk_size num_kv_shared_layers kv_source_layers cross_attention_layers
    num_key_value_heads num_kv_heads n_head_kv multi_query num_attention_groups attention_head_dim
    kv_channels v_head_dim swa_num_key_value_heads swa_head_dim swa_v_head_dim num_global_key_value_heads
    global_head_dim attention_other_setting per_layer_config kv_lora_rank index_head_dim sliding_window
    attention_window_size sliding_window_size local_attention linear_num_key_heads linear_num_value_heads
    linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim linear_num_heads linear_head_dim
    short_conv_kernel_size mamba_n_heads mamba_num_heads n_mamba_heads mamba_d_head mamba_head_dim
    mamba_headdim mamba_d_state ssm_state_size mamba_n_groups mamba_ngroups mamba_d_conv mamba_d_ssm
    mamba_expand conv_L_cache lru_width conv1d_width state_size conv_kernel attn_config
    n_recurrent_loops recurrent_kv_cache_mode
    """.split()  # noqa: SIM905
)
# Entries about positions, which are needed only where rotations are read.
ROPE_WORDS = frozenset(
    """
    rope_theta layer_rope_theta rope_parameters rope_scaling rope_local_base_freq local_rope_theta
    global_rope_theta swa_rope_theta compress_rope_theta rotary_emb_base rotary_pct partial_rotary_factor
    rotary_dim partial_rotary_factors no_rope_layers no_rope_layer_interval rope_interleave
    qk_rope_head_dim mla_use_nope use_mem_rope rope_type rope_scaling_layers swa_partial_rotary_factor
    rope_ratio original_rope rope_interleaved rope_traditional
    """.split()  # noqa: SIM905
)
# Entries that say nothing about a cache, though their names are like those that do.
HARMLESS = frozenset(
    """
    attn_implementation attn_logit_softcapping attn_pdrop attn_scale attn_temperature_tuning attn_bias
    attn_qkv_bias attn_output_gate attn_logit_cap mamba_chunk_size mamba_dt_rank mamba_conv_bias
    mamba_proj_bias mamba_hidden_act mamba_norm_before_gate mamba_rms_norm mamba_ssm_cache_dtype
    mamba_ssm_dtype mamba_act use_mamba_kernels index_n_heads index_topk index_block_size
    index_topk_blocks index_local_blocks linear_allow_neg_eigval linear_lower_bound kda_lower_bound
    kda_safe_gate ssm_in_multiplier ssm_multipliers ssm_out_multiplier mtp_layer_types
    mtp_layers_block_type mlp_layer_types rope_interleave chunk_size chunk_size_feed_forward
    chunk_size_lm_head activation_sparsity_pattern query_pre_attn_scalar n_layers_per_attn_res_block
    scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn norm_after_attn
    full_attn_alpha_factor full_attn_beta_factor layernorm_full_attention_alpha
    layernorm_full_attention_beta layernorm_linear_attention_alpha layernorm_linear_attention_beta
    sparse_prediction sparse_pred_ignore_index global_padding mtp_hybrid_override_pattern
    num_attention_heads_per_layer swa_num_attention_heads num_nextn_predict_layers
    add_swa_attention_sink_bias mamba_dropout attn_dropout_prob
    """.split()  # noqa: SIM905
)
HARMLESS_FORMS = (
    "*_dropout", "*_dropout_prob", "linear_a_log_*", "linear_dt_*", "linear_attn_*_factor", "moe_*", "mtp_*",
    "dspark_*", "mlp_*",
)  # fmt: skip
FORMS = (
    "*layer*type*", "*block*type*", "*pattern*", "*interval*", "attn_*", "*_attn_*", "linear_*", "mamba*",
    "ssm*", "kda*", "swa_*", "sliding_*", "local_*", "global_*", "compress*", "index_*", "sparse_*",
    "*_kv_shared*", "*chunk_size*", "conv_L*", "layer_rope*",
)  # fmt: skip
matches_rope: Callable[[str], object] = re.compile(r"rope|rotary", re.IGNORECASE).search
matches_layer: Callable[[str], object] = re.compile("|".join(map(fnmatch.translate, FORMS))).match
is_harmless: Callable[[str], object] = re.compile("|".join(map(fnmatch.translate, HARMLESS_FORMS))).match
TEXT_PARTS = "text_config", "llm_config", "language_config"


class Words:
    """Reads the entries of a configuration by name, and remembers which were used.

    Parameters
    ----------
    entries : mapping
        A null entry is as good as absent.
    used : set of str, optional
        Where used names are kept; parts of a configuration share one with the whole.
    path : str
        What stands before names in errors.
    """

    def __init__(self, entries: Mapping[str, Any], used: set[str] | None = None, path: str = "") -> None:
        self.entries = {str(name): value for name, value in entries.items() if value is not None}
        self.stated = {str(name) for name in entries}
        self.used: set[str] = set() if used is None else used
        self.path = path

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def model_type(self) -> str:
        """Return the type of the model, "" if none is stated."""
        kind = self.value("model_type")
        return kind if isinstance(kind, str) else ""

    def error(self, name: str, expected: object, got: object) -> KvkitError:
        """Return an error about an entry."""
        return argument_error(f"{self.path}{name}", expected, got)

    def use(self, *names: str) -> None:
        """Count entries as used: the model at hand is known to do nothing more with them."""
        self.used.update(names)

    def value(self, *names: str) -> Any:
        """Return the value of an entry that models call by several names, or None; values must agree."""
        self.use(*names)
        stated = [name for name in names if name in self.entries]
        for name in stated[1:]:
            if self.entries[name] != self.entries[stated[0]]:
                wanted = f"{shown(self.entries[stated[0]])}, as {stated[0]} says"
                raise self.error(name, wanted, shown(self.entries[name]))
        return self.entries[stated[0]] if stated else None

    def count(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Return a whole number; an entry without a default is required."""
        value = self.value(*names)
        if value is None and default is not None:
            return default
        return self.whole(self.name_of(names), value, least)

    def name_of(self, names: Sequence[str]) -> str:
        """Return the first of the names that is in the configuration, or the first."""
        return next((name for name in names if name in self.entries), names[0])

    def whole(self, name: str, value: Any, least: int = 0) -> int:
        """Check a whole number of an entry."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_NUMBER:
            raise self.error(name, f"a whole number from {least} to 2**40", shown(value))
        return value

    def number(self, *names: str, default: float | None = None) -> float | None:
        """Return a positive finite number, or the default."""
        value = self.value(*names)
        if value is None:
            return default
        return self.positive(self.name_of(names), value)

    def positive(self, name: str, value: Any) -> float:
        """Check a positive finite number of an entry."""
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not real or not 0 < value < 2.0**64:
            raise self.error(name, "a positive number", shown(value))
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return whether an entry is true."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false", shown(value))
        return value

    def items(self, name: str, wanted: str = "a list") -> list[Any] | None:
        """Return the members of a list, or None."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.error(name, wanted, shown(value))
        return list(value)

    def indices(self, name: str, count: int, first: int = 0) -> set[int] | None:
        """Return the numbers of layers that a list has, from 0 on, or None."""
        members = self.items(name, "a list of layers")
        if members is None:
            return None
        numbers = {self.whole(f"{name}[{i}]", each, first) - first for i, each in enumerate(members)}
        if numbers and max(numbers) >= count:
            raise self.error(name, f"layers below {count + first}, as the model has", max(numbers) + first)
        return numbers

    def by_layer(self, name: str, count: int, drafts: int = 0) -> list[Any] | None:
        """Return a list with a member for each layer, or None; members of draft layers are cut off."""
        members = self.items(name, f"a list with {count} members, one for each layer")
        if members is None:
            return None
        if len(members) not in (count, count + drafts):
            raise self.error(name, f"{count} members, one for each layer", len(members))
        return members[:count]

    def part(self, name: str) -> Words:
        """Return the entries of a nested mapping."""
        value = self.value(name)
        if not isinstance(value, Mapping):
            raise self.error(name, "a mapping", shown(value))
        return Words(value, set(), f"{self.path}{name}.")

    def at(self, changes: Mapping[str, Any], name: str) -> Words:
        """Return the entries with some of them changed, as for one layer."""
        return Words({**self.entries, **changes}, self.used, f"{name}: ") if changes else self

    def check_unused(self, rotations: bool) -> None:
        """Refuse an entry of a known kind that was not used.

        Parameters
        ----------
        rotations : bool
            Whether rotations were read: then an entry about positions is not left over either.
        """
        for name in self.unused(rotations):
            wanted = "an entry that is used for this model"
            known = name in LAYER_WORDS or name in ROPE_WORDS
            raise self.error(
                name, wanted if known else "an entry that kvkit knows", shown(self.entries[name])
            )

    def unused(self, rotations: bool) -> Iterator[str]:
        """Yield the entries that were not used although they are of a known kind."""
        for name in self.entries:
            if name in self.used:
                continue
            if name in ROPE_WORDS:
                if rotations:
                    yield name
            elif name in LAYER_WORDS:
                if not rotations:
                    yield name
            elif name in HARMLESS or is_harmless(name):
                continue
            elif matches_layer(name) or matches_rope(name):
                yield name


def shown(value: Any) -> str:
    """Describe a value that a stranger wrote; some cannot be printed, as very long numbers."""
    try:
        return describe(value)
    except (ValueError, RecursionError):
        return type(value).__name__


def text_words(config: Mapping[str, Any]) -> Words:
    """Return the entries of a configuration, those of its language model before those of the whole."""
    merged = dict(config)
    for name in TEXT_PARTS:
        part = config.get(name)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise argument_error(name, "a mapping", shown(part))
        merged |= part
        break
    return Words(merged)
