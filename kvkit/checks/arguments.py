"""Records of the operators' arguments, as callers give them and before any check."""

from typing import Any, NamedTuple, SupportsIndex

from numpy.typing import ArrayLike

from kvkit.typed import Array, Pair


class StepArguments(NamedTuple):
    """The index tensors of a step of packed sequences in a cache."""

    seqstarts: ArrayLike
    kvstarts: ArrayLike
    cachestarts: ArrayLike
    start_pos: ArrayLike
    decoding_batches: SupportsIndex = 0
    max_seqlen: SupportsIndex | None = None
    max_kvlen: SupportsIndex | None = None
    cache_mode: int = 0
    page_size: int = 128


class ContextArguments(NamedTuple):
    """The index tensors of packed sequences whose keys are packed too."""

    seqstarts: ArrayLike
    kvstarts: ArrayLike
    decoding_batches: SupportsIndex
    max_seqlen: SupportsIndex | None
    max_kvlen: SupportsIndex | None


class CacheArguments(NamedTuple):
    """The layer of a cache to use, the format of the cache, and the order of its axes."""

    num_layer: int = 1
    layer_idx: int = 0
    quant_bit: int = 0
    quant_group: int = 8
    quant_format: str | None = None
    cache_layout: int = 0


class Scoring(NamedTuple):
    """How scores become weights: masks, biases, scale, softcap, sinks."""

    attn_mask: Array | None = None
    is_causal: bool = True
    is_alibi: bool = False
    softmax_scale: float | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: Array | None = None


class RotaryArguments(NamedTuple):
    """The angles by which heads are rotated at a position."""

    rotary_dim: int
    interleaved: bool | None
    cos: Array | None
    sin: Array | None
    theta: float
    bypass_key: bool
    max_position_embeddings: int
    scaling_type: str
    scaling_factor: float


class StaticPositions(NamedTuple):
    """Where sequences of one length begin."""

    start_pos: SupportsIndex
    pad_len: ArrayLike | None


class PackedPositions(NamedTuple):
    """Where packed sequences begin."""

    seqstarts: ArrayLike
    start_pos: ArrayLike
    max_seqlen: SupportsIndex | None


class PoolAttention(NamedTuple):
    """The arguments of `paged_attention`, but for its outputs."""

    query: Array
    key_cache: Array
    value_cache: Array | None
    block_tables: ArrayLike | tuple[ArrayLike, ArrayLike]
    context_lens: ArrayLike
    query_starts: ArrayLike | None
    layout: str
    key_scale: float | Array | None
    value_scale: float | Array | None
    alibi_slopes: Array | None
    scoring: Scoring
    return_lse: bool
    return_key_weights: bool = False
    quant_format: str | None = None


class PoolTransfer(NamedTuple):
    """The arguments of `paged_append`."""

    key: Array | None
    value: Array | None
    key_cache: Array | None
    value_cache: Array | None
    slot_mapping: ArrayLike
    layout: str
    key_scale: float | Array | None
    value_scale: float | Array | None
    positions: ArrayLike | None = None
    rope: Any = None  # a `Rope`, or "none"


class BlockAttention(NamedTuple):
    """The arguments of `ascend.paged_attention`, but for its outputs."""

    query: Array
    key_cache: Array
    value_cache: Array
    block_tables: ArrayLike
    context_lens: ArrayLike
    razor_offset: Array | None
    scoring: Scoring
    return_lse: bool


class BlockLoad(NamedTuple):
    """The arguments of `ascend.paged_cache_load`, but for its outputs."""

    key_cache: Array
    value_cache: Array | None
    block_tables: ArrayLike
    seq_lens: ArrayLike
    seq_starts: ArrayLike | None
    cache_format: str


class Windows(NamedTuple):
    """The arguments of `ascend.reshape_and_cache` for compressed modes."""

    wins: ArrayLike | Any  # None where a mode has no such argument
    seq_lens: ArrayLike | Any
    offset_index: ArrayLike | Any


class BlockStore(NamedTuple):
    """The arguments of `ascend.reshape_and_cache`."""

    key: Array
    value: Array | None
    key_cache: Array
    value_cache: Array | None
    slot_mapping: ArrayLike
    compress_type: int | str
    windows: Windows
    cache_format: str
    empty_window: str


class CacheTransfer(NamedTuple):
    """The arguments of `key_value_cache`, but for its index tensors."""

    current_key: Array
    current_value: Array
    cache: Array
    scale: Array | None
    place: CacheArguments
    num_repeat: int


class KeyAttention(NamedTuple):
    """The arguments of `multi_head_attention`, but for its index tensors."""

    query: Array
    key: Array
    value: Array
    heads: tuple[int, int, int]  # num_heads, head_dim, num_kv_heads
    scoring: Scoring
    return_lse: bool
    return_key_weights: bool = False


class CacheAttention(NamedTuple):
    """The arguments of `multi_head_cache_attention`, but for its index tensors."""

    query: Array
    current_key: Array
    current_value: Array
    cache: Array
    scale: Array | None
    place: CacheArguments
    heads: tuple[int, int, int]  # num_heads, head_dim, num_kv_heads
    scoring: Scoring
    return_lse: bool


class LatentArguments(NamedTuple):
    """The arguments of `mla_attention`."""

    query: Array | Pair
    latent: Array
    block_tables: Any  # as of `PoolAttention`, or None
    context_lens: ArrayLike | Any
    query_starts: ArrayLike | Any
    softmax_scale: float
    rope_cache: Array | None
    value_dim: int
    indices: ArrayLike | Any
    index_lens: ArrayLike | Any
    extra: tuple[Array, ArrayLike, ArrayLike | Any] | None
    format: str | None
    is_causal: bool
    sinks: Array | None
    lse_of_sinks: bool
    return_lse: bool


class LatentAppend(NamedTuple):
    """The arguments of `mla_append`."""

    latent: Array
    rope: Array
    cache: Array
    slot_mapping: ArrayLike
    rope_cache: Array | None
    format: str | None


class IndexerArguments(NamedTuple):
    """The arguments of `indexer_scores`."""

    query: Array
    keys: Array
    weights: Array
    block_tables: Any
    context_lens: ArrayLike
    query_starts: ArrayLike | Any
    key_scale: Array | None
    softmax_scale: float | None


class ChoiceArguments(NamedTuple):
    """The arguments of `topk_rows`."""

    scores: Array
    k: int
    block_tables: Any
    page_size: int
    query_starts: ArrayLike | Any


class DeltaArguments(NamedTuple):
    """The arguments of `gated_delta_step` and `gated_delta_rule`, but for what they return."""

    q: Array
    k: Array
    v: Array
    g: Array | None
    beta: Array | None
    state: Array | None
    norm: bool
    norm_eps: float
    scale: float | None
    state_layout: str
    gates: Pair | None
    rule: str | None
    state_indices: ArrayLike | None
    out_state_indices: ArrayLike | None = None
    starts: ArrayLike | None = None
    lengths: ArrayLike | None = None
    one_token: bool = False  # of each sequence
    out: Any = None


class PromptArguments(NamedTuple):
    """Say how `gated_delta_rule` runs prompts, and which further results it returns."""

    chunk: SupportsIndex
    return_states: bool
    return_capsule: SupportsIndex


class GateArguments(NamedTuple):
    """The arguments of `delta_gates`."""

    a: Array
    b: Array
    a_log: Array
    dt_bias: Array
    kind: str
    lower_bound: float | None
    double_beta: bool


class ReplayArguments(NamedTuple):
    """The arguments of `gated_delta_replay`."""

    state: Array
    capsule: Any
    accepted: ArrayLike
    state_indices: ArrayLike | None
    state_layout: str


class CompressArguments(NamedTuple):
    """The arguments of `compress_tokens`."""

    kv: Array
    gate: Array
    ape: Array
    state: Array
    ratio: SupportsIndex
    overlap: bool
    norm_weight: Array
    positions: ArrayLike | None
    starts: ArrayLike | None
    state_indices: ArrayLike | None
    rope: Any  # a `Rope` or None
    eps: float


class SlotArguments(NamedTuple):
    """The arguments of `compressed_slots`."""

    positions: ArrayLike
    block_tables: ArrayLike
    page_size: SupportsIndex
    ratio: SupportsIndex
    sequence_of_token: ArrayLike | None


class ConvArguments(NamedTuple):
    """The arguments of `causal_conv` and `causal_conv_update`."""

    x: Array
    weight: Array
    bias: Array | None
    state: Array | None
    state_indices: ArrayLike | None
    activation: str | None
    starts: ArrayLike | None = None
    one_token: bool = False
    out: Any = None
