"""The records that attention's kernels read: the params of a launch, a worker's block and its tiles.

Fields are numbers and addresses; strides are in bytes. Kernels are C functions of addresses of records.
"""

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.launches import Record
from kvkit.cpu.simd.attention import WIDE
from kvkit.cpu.simd.lanes import LANES
from kvkit.runtime.jit import callback, helper

WIDE_BLOCK = 128  # most tokens of a block
# Entries after the lists of a block: row ids, of which 16 repeat the last one; both are whole vectors of 8.
EXTRA_IDS, EXTRA_ADDRESSES = 24, 16

# Keys or values. The first eight fields are those of `checks.records.Side`. In a page, consecutive tokens are
# `step` row ids apart, and the scales of `scale_tokens` tokens take half a cache line. `element` is the byte
# stride of elements, 0 if they are adjacent; `to_float` and `to_bfloat16` are code that converts rows.
SIDE = Record(
    "address sequence row head scales scale_sequence scale_row scale_head",
    "table step element bytes scale_tokens dim padded_dim to_float to_bfloat16",
)
# The machine code (params, block, tile) of each step for one kind of tile, or 0. `queries` converts queries
# to the engine's form, from those of the call if `reads_queries`, else from float32; `load` converts the
# block's keys and values. `scores` computes S = K Q^T; `scales_scores` says that it also multiplies with the
# scale, which otherwise queries contain. `sums` computes O = O alpha + P V; `softmax` says that it computes
# the softmax before, and `interleaves` that O is [rows, dim] with its elements in the order of
# `pairs.interleave`. `finish` releases what `queries` took, where a work item ends, and converts m.
ENGINE = Record("queries load scores sums finish softmax scales_scores reads_queries interleaves")
ENGINE_BYTES = ENGINE.dtype.itemsize
# Byte offsets of a worker's buffers in its workspace.
WORKSPACE = Record(
    "block tiles number row_ids scores alpha m l queries engine_queries o wide_keys wide_values lines"
)
ATTENTION_PARAMS = Record(
    "counters batch seqstarts kvstarts table_row table_starts table_entry page_size decoding",
    "query query_sequence query_token query_head query_to_float",
    "out out_sequence out_token out_head float_to_out lse lse_sequence lse_token lse_head",
    "causal alibi left right cap cap_at slopes slopes_sequence sinks sink_sequences",
    "key_factors value_factors factor_sequence factor_head",
    "mask mask_kind mask_sequence mask_head mask_row mask_column mask_packed",
    "heads group scale_bytes scale_format orders rounds integers most_value pairs most_paired",
    "heads_interleaved widens values_have_own_table most_narrow least_in_tiles",
    "block wide_block run_block leads counting least_split least_wide_split most_splits",
    "long_run long_run_lead short_run scaled_run touched_run",
    "engines group_tiles groups_are_split split_tokens tile_groups work_items splits tiles products",
    "partials tile_state_bytes workspace_at workspace_bytes engine_query_bytes",
    "key_sums key_sums_sequence key_sums_head weights_at weights_bytes",
    "add_biases keep_weights add_key_weights merge_splits",
    keys=SIDE, values=SIDE, workspace=WORKSPACE,
)  # fmt: skip
FIELD = ATTENTION_PARAMS.at
# The last line of the params is machine code that few calls need; it is 0 in others. LATE_FIELDS are set by
# `schedule`, then `engines` and `to_bfloat16` by `fill_engines`, and the rest by `launch`.
LATE_FIELDS = (
    "group_tiles", "groups_are_split", "split_tokens", "tile_groups", "work_items", "splits", "tiles",
    "products", "engines", "keys.to_bfloat16", "values.to_bfloat16",
    "counters", "partials", "merge_splits", "workspace_at", "weights_at",
)  # fmt: skip
# The array that an address points into, by its index: of attention to a cache, to keys, and to pools.
RESULT_OWNERS = {"query": "query", "out": "out", "lse": "lse"}
CACHE_OWNERS, KEY_OWNERS, POOL_OWNERS = (
    {FIELD[field]: owner for field, owner in (RESULT_OWNERS | owners).items()}
    for owners in (
        dict.fromkeys(("keys.address", "values.address"), "cache")
        | dict.fromkeys(("keys.scales", "values.scales"), "scale"),
        {"keys.address": "key", "values.address": "value"},
        {
            "keys.address": "key_cache", "values.address": "value_cache",
            "keys.scales": "key_scale", "values.scales": "value_scale",
        },
    )
)  # fmt: skip
COUNTING = np.arange(WIDE_BLOCK + LANES)  # row ids of widened rows
# A launch has one engine for tiles of each number of rows, and for some formats a second one for 32 rows.
ENGINE_ROWS = (1, 2, 4, 8, 16, WIDE)
WIDE_ENGINE, SPECIAL_ENGINE = 5, 6

# A work item, which attends to positions `first` to `end`, and the current block of its context. Row ids are
# known for the block's `count` tokens and for those that are prefetched, `known` in all. Engines read rows
# `key_ids`, which are 0, 1 .. if rows are widened first. `together` tiles do each step of a block.
# `unscaled` says that the scale is multiplied where a mask is added to the scores of wide tiles.
# `in_states` says that wide tiles sum up O in the state of their split; `ready`, that the block holds the
# whole context of a sequence, for one narrow tile of each head: then only the head changes.
BLOCK = Record(
    "workspace number sequence table_row seqlen kvlen query_rows",
    "rows tiles row head wide widens nan_safe together in_states ready",
    "first begin end size count known lead value_lead uneven scored unscaled values_in_keys",
    "key_row_ids value_row_ids key_addresses value_addresses",
    "prefetch_in_scores prefetch_in_sums prefetch_shift prefetch_twice prefetch_scales touches_pages",
    "key_ids value_ids key_row value_row wide_keys wide_values weights",
)
# `live` query rows from `first` on, which see a block's first `count` tokens, and addresses of their data.
# All rows see positions `seen_from` .. `seen_to`, and none sees `unseen_from` or later ones, or any before
# `unseen_to`.
TILE = Record(
    "index head first live count seen_from seen_to unseen_from unseen_to keys values key_scales value_scales",
    "factor queries engine_queries rest scores alpha m l o",
)

params_at, engine_at = memory.record(ATTENTION_PARAMS), memory.record(ENGINE)
block_at, tile_at = memory.record(BLOCK), memory.record(TILE)


STEP = types.void(*[types.int64] * 3)  # a step (addresses of params, block, tile)


def step_code(function, key, *, in_memory=False):
    """Compile a step; `key` has the values that it closes over. Tiles may be emulated `in_memory`."""
    return callback(function, STEP, key, passes="none" if in_memory else "all")


@memory.machine_code
def call_engine(code, params, block, tile):
    """Call a step of an engine."""


@memory.machine_code
def call_merge(code, params, block, splits, states):
    """Call `epilogue.merge_splits`."""


@helper
def whole_tiles(count):
    """Round a number of tokens up to a multiple of 8, for which scores are computed."""
    return -(-count // 8) * 8


@helper
def kind_of(rows):
    """Return the index of a number of rows in `ENGINE_ROWS`."""
    kind, kind_rows = 0, 1
    while kind_rows < rows:
        kind, kind_rows = kind + 1, 2 * kind_rows
    return kind


@helper
def whole_steps(count):
    """Round a number of tokens up to a multiple of 32, which products of tiles take at a time."""
    return -(-count // 32) * 32


@helper
def rows_computed(params, block, tile):
    """Return how many rows of a tile are computed: 16 of a wide tile if no more are live, else all."""
    return LANES if block.wide and tile.live <= LANES and not params.key_sums else block.rows


@helper
def prefetched(addresses, block, tile):
    """Return the address of a tile's part of a list of addresses to prefetch."""
    return addresses + 8 * tile.index * block.count


@helper
def engine_of_kind(params, kind):
    """Return the record of a launch's engine at index `kind`."""
    return engine_at(params.engines + ENGINE_BYTES * kind)
