"""KV-cache operators for numpy arrays, exact to their specifications.

Over sequences of one length, each with its own part of a cache, and beside caches:

    key_value_cache               append keys and values, read the whole context back
    multi_head_attention          of queries to keys and values; merge_attention_states joins parts
    multi_head_cache_attention    append, and attend to the context where it lies
    rotary_position_embedding, alibi_slope, alibi_mask    positions
    paged_attention, paged_append, swap_blocks    over any engine's pools of pages, in place
    mla_attention, mla_append, mla_absorb, mla_expand    latent caches
    indexer_scores, topk_rows    which of their rows to read; Rope, KvkitError, DeviceError

Rooms:

    dynamic_batching    the operators over packed sequences that share a cache; a step planned once
    ascend              caches in blocks, as Ascend's operators have them
    layouts             where the bytes of any engine's cache lie: lines, views, conversion
    formats             what the bytes of a cache mean: encode, decode, rotate
    files               caches in files of many kinds, with what they mean
    cache, eviction     caches for a generation loop, growing to paged, in files; which tokens they can lose
    integrations        dask, onnx and transformers
    tools               what is in a file, can it be right, where do two differ, what do schemes cost
    kvkit_cuda          a package of the same names, on a GPU

In a shell: `kvkit ops`, `kvkit describe OPERATOR`, `kvkit run` on a file; `kvkit --help` has all verbs.
"""

import importlib
from typing import TYPE_CHECKING

from kvkit import ascend, dynamic_batching
from kvkit.errors import DeviceError, KvkitError
from kvkit.merge import merge_attention_states
from kvkit.paged import paged_append, paged_attention, swap_blocks
from kvkit.runtime import source_digest  # noqa: F401  (sources: at import, see there)
from kvkit.static import (
    alibi_mask,
    alibi_slope,
    key_value_cache,
    multi_head_attention,
    multi_head_cache_attention,
    rotary_position_embedding,
)
from kvkit.version import __version__

if TYPE_CHECKING:
    from kvkit import cache as cache
    from kvkit import eviction as eviction
    from kvkit import files as files
    from kvkit import formats as formats
    from kvkit import integrations as integrations
    from kvkit import layouts as layouts
    from kvkit import tools as tools
    from kvkit.indexer import indexer_scores as indexer_scores
    from kvkit.indexer import topk_rows as topk_rows
    from kvkit.mla import mla_absorb as mla_absorb
    from kvkit.mla import mla_append as mla_append
    from kvkit.mla import mla_attention as mla_attention
    from kvkit.mla import mla_expand as mla_expand
    from kvkit.rope import Rope as Rope

__all__ = [
    "DeviceError",
    "KvkitError",
    "Rope",
    "__version__",
    "alibi_mask",
    "alibi_slope",
    "ascend",
    "dynamic_batching",
    "indexer_scores",
    "key_value_cache",
    "merge_attention_states",
    "mla_absorb",
    "mla_append",
    "mla_attention",
    "mla_expand",
    "multi_head_attention",
    "multi_head_cache_attention",
    "paged_append",
    "paged_attention",
    "rotary_position_embedding",
    "swap_blocks",
    "topk_rows",
]
LATER = {"Rope": "kvkit.rope", "indexer_scores": "kvkit.indexer", "topk_rows": "kvkit.indexer"}
LATER |= {name: "kvkit.mla" for name in __all__ if name.startswith("mla_")}
# Loaded when they are first used.
ROOMS = ("cache", "eviction", "files", "formats", "integrations", "layouts", "tools")


def __getattr__(name):
    if name in ROOMS:
        return importlib.import_module(f"kvkit.{name}")
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module 'kvkit' has no attribute {name!r}")


def __dir__():
    return [*__all__, *ROOMS]
