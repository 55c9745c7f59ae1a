"""KV-cache operators for numpy arrays, exact to their specifications.

    key_value_cache               append keys and values; return the whole context
    multi_head_attention, multi_head_cache_attention    attend to keys and values; to a cache, after an append
    merge_attention_states        merge attention over parts of a context
    Rope, rotary_position_embedding, alibi_slope, alibi_mask    encode positions
    paged_attention, paged_append, swap_blocks, paged_plan    work on engines' pools; plans are PagedPlan
    mla_attention, mla_append, mla_absorb, mla_expand, mla_scale    work on latent caches (MLA)
    indexer_scores, topk_rows     choose the rows that sparse attention reads
    compress_tokens, compressed_slots, rope_back    pool tokens into the rows of DeepSeek V4
    gated_delta_step, gated_delta_rule, gated_delta_replay, delta_gates, causal_conv, causal_conv_update
                                  compute the recurrent states of GDN and KDA layers

    dynamic_batching    the operators for packed sequences that share a cache
    ascend              Ascend's operators, for caches in blocks
    layouts             say where the bytes of any engine's cache lie; view and convert them
    formats             say what the bytes of a cache mean; encode, decode and rotate them
    files               read and write caches in many kinds of files
    cache               caches: DynamicCache, StaticCache, QuantizedCache, PagedCache; load
    eviction            choose which tokens a cache can lose
    integrations        dask, onnx and transformers
    tools               inspect, convert, check, diff, draw, size and study caches
    kvkit_cuda          a package with the same operators on a GPU

Errors are KvkitError and DeviceError. In a shell: `kvkit list ops`, `kvkit describe NAME`, `kvkit --help`.
"""

from typing import TYPE_CHECKING

from kvkit import ascend, dynamic_batching
from kvkit.errors import DeviceError, KvkitError
from kvkit.merge import merge_attention_states
from kvkit.paged import paged_append, paged_attention, swap_blocks
from kvkit.planned_pages import PagedPlan, paged_plan
from kvkit.runtime import source_digest  # noqa: F401  (its import reads all sources)
from kvkit.runtime.lazy_imports import lazy_names
from kvkit.static.attention import multi_head_attention, multi_head_cache_attention
from kvkit.static.cache import key_value_cache
from kvkit.static.positions import alibi_mask, alibi_slope, rotary_position_embedding
from kvkit.version import __version__

if TYPE_CHECKING:
    from kvkit import cache as cache
    from kvkit import eviction as eviction
    from kvkit import files as files
    from kvkit import formats as formats
    from kvkit import integrations as integrations
    from kvkit import layouts as layouts
    from kvkit import tools as tools
    from kvkit.cache import DynamicCache, PagedCache, QuantizedCache, StaticCache, load
    from kvkit.compressed import compress_tokens, compressed_slots, rope_back
    from kvkit.indexer import indexer_scores, topk_rows
    from kvkit.mla import mla_absorb, mla_append, mla_attention, mla_expand, mla_scale
    from kvkit.recurrent import (
        causal_conv,
        causal_conv_update,
        delta_gates,
        gated_delta_replay,
        gated_delta_rule,
        gated_delta_step,
    )
    from kvkit.rope import Rope
    from kvkit.tools import draw as draw
    from kvkit.tools.checking import check
    from kvkit.tools.comparison import diff
    from kvkit.tools.conversion import convert
    from kvkit.tools.inspection import inspect
    from kvkit.tools.sizing import size
    from kvkit.tools.studies.study import study

__all__ = [
    "DeviceError", "DynamicCache", "KvkitError", "PagedCache", "PagedPlan", "QuantizedCache", "Rope",
    "StaticCache", "__version__", "alibi_mask", "alibi_slope", "ascend", "causal_conv", "causal_conv_update",
    "check", "compress_tokens", "compressed_slots", "convert", "delta_gates", "diff", "draw",
    "dynamic_batching", "gated_delta_replay", "gated_delta_rule", "gated_delta_step", "indexer_scores",
    "inspect", "key_value_cache", "load", "merge_attention_states", "mla_absorb", "mla_append",
    "mla_attention", "mla_expand", "mla_scale", "multi_head_attention", "multi_head_cache_attention",
    "paged_append", "paged_attention", "paged_plan", "rope_back", "rotary_position_embedding", "size",
    "study", "swap_blocks", "topk_rows",
]  # fmt: skip
# {name: the module that has it, or is it}; these are imported on first use
ROOMS = "cache", "eviction", "files", "formats", "integrations", "layouts", "tools"
MODULES = {"Rope": "kvkit.rope", "indexer_scores": "kvkit.indexer", "topk_rows": "kvkit.indexer"}
MODULES |= dict.fromkeys(("compress_tokens", "compressed_slots", "rope_back"), "kvkit.compressed")
MODULES |= {name: "kvkit.mla" for name in __all__ if name.startswith("mla_")}
MODULES |= {name: "kvkit.recurrent" for name in __all__ if name.split("_")[0] in ("causal", "delta", "gated")}
CACHES = "DynamicCache", "PagedCache", "QuantizedCache", "StaticCache", "load"
TOOLS = "check", "convert", "diff", "draw", "inspect", "size", "study"
MODULES |= dict.fromkeys(CACHES, "kvkit.cache") | dict.fromkeys(TOOLS, "kvkit.tools")
MODULES |= {name: f"kvkit.{name}" for name in ROOMS}
# {a name that users look for at the top: the module that has it}; an error says so
DEEPER = dict.fromkeys(
    (
        "Cache", "DynamicLayer", "PagedLayer", "QuantSpec", "QuantizedLayer", "SlidingWindowLayer",
        "StaticLayer", "StaticSlidingWindowLayer", "from_config",
    ), "kvkit.cache",
)  # fmt: skip
DEEPER |= {"KvkitCache": "kvkit.integrations.transformers", "reshape_and_cache": "kvkit.ascend"}
# What elsewhere has another name
RENAMED = dict.fromkeys(
    ("attention", "flash_attention", "scaled_dot_product_attention"), "multi_head_attention"
)
RENAMED |= {
    "KVCache": "DynamicCache",
    "dequantize": "kvkit.formats.decode",
    "quantize": "kvkit.formats.encode",
}
__getattr__, __dir__ = lazy_names(__name__, MODULES, __all__, DEEPER, RENAMED)
