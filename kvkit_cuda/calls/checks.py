"""Check a call of each operator with the checks of `kvkit`, from its arguments by name.

The checks see device arrays as `calls.arrays` presents them.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kvkit.checks import arguments, compressed, index_tensors, latent, paged, positions, recurrent, slots
from kvkit.checks.ascend import blocks, matrices, tensors
from kvkit.checks.ascend.attention import checked_block_attention
from kvkit.checks.ascend.reshape import checked_reshape
from kvkit.checks.attention import AttentionCall, checked_attention, checked_cache_attention
from kvkit.checks.contexts import Contexts
from kvkit.checks.index_tensors import Packed
from kvkit.checks.indexer import checked_choice, checked_scores
from kvkit.checks.key_value_cache import TransferCall, checked_key_value_cache
from kvkit.checks.merge import MergeCall, checked_merge
from kvkit.checks.outputs import Results
from kvkit.operators import Operator
from kvkit.operators.arrays import INDEX
from kvkit.operators.operator import IN_PYTHON
from kvkit.rope import as_rope
from kvkit.typed import Array

ZEROS = -1  # a source row that stands for zeros
# Arguments that a call of a plan does not have, because the plan has them.
UNPLANNED = dict.fromkeys(("block_tables", "context_lens", "query_starts", "slot_mapping", "positions"))
Values = Mapping[str, Any]  # the arguments of an operator, by name
Record = TypeVar("Record", bound=tuple[Any, ...])


@dataclass(frozen=True, slots=True)
class Slopes:
    """A checked call of `alibi_slope`."""

    results: Results


@dataclass(frozen=True, slots=True)
class Moves:
    """A checked call that copies pieces of rows between arrays in blocks (see `copy.pieces`)."""

    sources: list[Array]  # [blocks, rows, heads or groups, dim] each
    targets: list[Array]  # arrays with these axes; empty if the results are the targets
    pieces: Array  # [.., 3]: source row, target row, count
    results: Results | None = None
    place: Callable[[Array, Array], Array] | None = None  # f(result, source) -> a view of it as a target
    means: Array | None = None  # [.., 3]: pieces whose mean is written to the target row
    averaged: str | None = None  # the format of rows that are averaged


@dataclass(frozen=True, slots=True)
class Computed:
    """Holds what the CPU has computed for an operator without a kernel for GPUs."""

    arrays: dict[str, Array]  # the results that are not arguments, by name
    changed: dict[str, Array]  # arguments that changed in place, on the host
    results: Results  # of the arrays that `out` may give


def fill(record: type[Record], values: Values, **others: object) -> Record:
    """Return a record whose fields are the arguments of the same names, or `others`."""
    fields: tuple[str, ...] = record._fields  # type: ignore[attr-defined]
    given = {name: values[name] for name in fields if name in values}
    return record(**(given | others))


def heads_of(values: Values) -> tuple[int, int, int]:
    """Return the arguments that count heads and their elements."""
    return values["num_heads"], values["head_dim"], values.get("num_kv_heads", 0)


def attention_to_keys(sequences: index_tensors.Sequences, values: Values) -> AttentionCall:
    """Check a call of `multi_head_attention`."""
    tokens = values["query"], values["key"], values["value"]
    scoring = fill(arguments.Scoring, values)
    wanted = values["return_lse"], values.get("return_key_weights", False)
    return checked_attention(sequences, arguments.KeyAttention(*tokens, heads_of(values), scoring, *wanted))


def static_attention(values: Values, step: Packed | None) -> AttentionCall:
    """Check a call of `multi_head_attention`, for sequences of one length."""
    return attention_to_keys(index_tensors.Static(), values)


def packed_attention(values: Values, step: Packed | None) -> AttentionCall:
    """Check a call of `dynamic_batching.multi_head_attention`."""
    return attention_to_keys(index_tensors.packed_with_keys(fill(arguments.ContextArguments, values)), values)


def cache_attention(values: Values, step: Packed | None) -> AttentionCall:
    """Check a call of `multi_head_cache_attention`; without a step, sequences have one length."""
    records = {"place": fill(arguments.CacheArguments, values), "heads": heads_of(values)}
    call = fill(arguments.CacheAttention, values, **records, scoring=fill(arguments.Scoring, values))
    return checked_cache_attention(step or index_tensors.Static(values["start_pos"]), call)


def key_value_cache(values: Values, step: Packed | None) -> TransferCall:
    """Check a call of `key_value_cache`; without a step, sequences have one length."""
    call = fill(arguments.CacheTransfer, values, place=fill(arguments.CacheArguments, values))
    return checked_key_value_cache(step or index_tensors.Static(values["start_pos"]), call)


def merge(values: Values, step: Packed | None) -> MergeCall:
    """Check a call of `merge_attention_states`."""
    return checked_merge(values["outputs"], values["lses"])


def pool_attention(values: Values, step: Contexts | None) -> AttentionCall:
    """Check a call of `paged_attention`."""
    given = UNPLANNED | dict(values) | {"scoring": fill(arguments.Scoring, values)}
    return paged.checked_paged_attention(fill(arguments.PoolAttention, given), step)


def pool_append(values: Values, step: Contexts | None) -> paged.PoolAppend:
    """Check a call of `paged_append`."""
    given = UNPLANNED | dict(values) | {"rope": as_rope(values.get("rope"))}
    return paged.checked_append(fill(arguments.PoolTransfer, given), step)


def delta_step(values: Values, step: Packed | None) -> recurrent.DeltaCall:
    """Check a call of `gated_delta_step` that a kernel runs."""
    return recurrent.checked_delta(fill(arguments.DeltaArguments, values, one_token=True))


def swap_blocks(values: Values, step: Packed | None) -> Moves:
    """Check a call of `swap_blocks`."""
    source, target = values["source"], values["target"]
    blocks_from, blocks_to = paged.checked_swap(source, target, values["pairs"])
    return Moves([source], [target], stack_pieces(blocks_from, blocks_to, 1))


def latent_attention(values: Values, step: Packed | None) -> latent.LatentCall:
    """Check a call of `mla_attention`."""
    call = latent.checked_latent_attention(fill(arguments.LatentArguments, values))
    if call.attention is None:
        return call
    weights = call.attention.weights._replace(sinks=call.sinks)
    return call._replace(attention=call.attention._replace(weights=weights))


def latent_append(values: Values, step: Packed | None) -> latent.LatentStore:
    """Check a call of `mla_append`."""
    return latent.checked_latent_append(fill(arguments.LatentAppend, values))


def static_rotation(values: Values, step: Packed | None) -> positions.RotationCall:
    """Check a call of `rotary_position_embedding`, for sequences of one length."""
    where = fill(arguments.StaticPositions, values)
    return positions.checked_rotation(
        values["query"], values["key"], where, fill(arguments.RotaryArguments, values)
    )


def packed_rotation(values: Values, step: Packed | None) -> positions.RotationCall:
    """Check a call of `dynamic_batching.rotary_position_embedding`."""
    where = fill(arguments.PackedPositions, values)
    return positions.checked_rotation(
        values["query"], values["key"], where, fill(arguments.RotaryArguments, values)
    )


def slopes(values: Values, step: Packed | None) -> Slopes:
    """Check a call of `alibi_slope`."""
    return Slopes(positions.slope_results(values["num_heads"]))


def static_alibi(values: Values, step: Packed | None) -> positions.AlibiCall:
    """Check a call of `alibi_mask`, for sequences of one length."""
    lengths = values["seqlen_q"], values["seqlen_kv"]
    return positions.checked_static_alibi(
        *lengths, values["attn_mask"], values["num_heads"], values["data_type"]
    )


def packed_alibi(values: Values, step: Packed | None) -> positions.AlibiCall:
    """Check a call of `dynamic_batching.alibi_mask`."""
    starts = values["seqstarts"], values["kvstarts"]
    return positions.checked_dynamic_alibi(
        *starts, values["attn_mask"], values["num_heads"], values["data_type"]
    )


def position_index(values: Values, step: Packed | None) -> positions.PositionCall:
    """Check a call of `position_index`."""
    sequences = values["sequences"]
    if isinstance(sequences, np.ndarray):  # its elements are not read
        sequences = np.broadcast_to(np.zeros((), sequences.dtype), sequences.shape)
    return positions.checked_position_index(sequences, fill(arguments.PackedPositions, values))


def reshape_and_cache(values: Values, step: Packed | None) -> Moves:
    """Check a call of `ascend.reshape_and_cache`."""
    call = checked_reshape(fill(arguments.BlockStore, values, windows=fill(arguments.Windows, values)))
    pieces = call.pieces
    source = pieces[:, slots.HEAD] * len(values["key"]) + pieces[:, slots.TOKEN]
    rows, mean = (
        stack_pieces(source, pieces[:, slots.SLOT], pieces[:, slots.COUNT]),
        pieces[:, slots.MEAN] == 1,
    )
    tokens = [  # one block, or in compressed modes a block for each head
        tokens.transpose(1, 0, 2)[:, :, None] if call.mode else tokens[None] for tokens in call.tokens
    ]
    return Moves(tokens, call.caches, rows[~mean], means=rows[mean], averaged=call.averaged)


def paged_cache_load(values: Values, step: Packed | None) -> Moves:
    """Check a call of `ascend.paged_cache_load`."""
    call = blocks.checked_load(fill(arguments.BlockLoad, values))
    pieces = blocks.pieces_of(call)
    token, count = pieces[:, slots.TOKEN], pieces[:, slots.COUNT]
    begins, ends = np.append(0, token + count), np.append(token, call.tokens)
    rows = [stack_pieces(pieces[:, slots.SLOT], token, count), stack_pieces(ZEROS, begins, ends - begins)]

    def place(array: Array, source: Array) -> Array:
        return array.reshape(1, call.tokens, *source.shape[2:])

    return Moves(call.caches, [], np.concatenate(rows), call.results, place)


def block_copy(values: Values, step: Packed | None) -> Moves:
    """Check a call of `ascend.block_copy`."""
    caches = blocks.named_caches(values["key_cache"], values["value_cache"])
    src, dst = blocks.checked_copy(caches, values["src"], values["dst"], values["cum_sum"])
    arrays = [cache for _, cache in caches]
    return Moves(arrays, arrays, stack_pieces(src, dst, 1))  # pieces of blocks, not of rows


def block_attention(values: Values, step: Packed | None) -> AttentionCall:
    """Check a call of `ascend.paged_attention`."""
    scoring = fill(arguments.Scoring, values, is_causal=False)
    return checked_block_attention(fill(arguments.BlockAttention, values, scoring=scoring))


def nd_to_nz(values: Values, step: Packed | None) -> Moves:
    """Check a call of `ascend.nd_to_nz`."""
    call = matrices.checked_nd(values["x"])
    each, rows, whole = np.arange(call.shape[0]), call.source.shape[1], call.shape[2]
    pieces = (
        stack_pieces(each * rows, each * whole, rows),
        stack_pieces(ZEROS, each * whole + rows, whole - rows),
    )

    def place(y: Array, _: Array) -> Array:
        return tensors.in_rows(y, "NZ")

    return Moves([call.source[:, :, None]], [], np.concatenate(pieces), call.results, place)


def nz_to_nd(values: Values, step: Packed | None) -> Moves:
    """Check a call of `ascend.nz_to_nd`."""
    y = values["y"]
    call = matrices.checked_nz(y, values["m"], values["n"])
    each = np.arange(call.shape[0])
    pieces = stack_pieces(each * y.shape[2], each * call.shape[1], call.shape[1])

    def place(x: Array, _: Array) -> Array:
        return x[:, :, None]

    return Moves([tensors.in_rows(y, "NZ")], [], pieces, call.results, place)


def new_tokens(values: Values) -> str | None:
    """Return the name of the array with a step's tokens; None without packed sequences in a cache."""
    return ("query" if "query" in values else "current_key") if "cachestarts" in values else None


def packed_step(values: Values) -> Packed | None:
    """Check the index tensors of packed sequences in a cache; return None if there are none."""
    name = new_tokens(values)
    if name is None:
        return None
    return index_tensors.packed_in_cache((name, values[name]), fill(arguments.StepArguments, values))


def stack_pieces(source: Any, target: Any, count: Any) -> Array:
    """Return pieces [pieces, 3] from source rows, target rows and counts."""
    return np.stack(np.broadcast_arrays(source, target, count), axis=1)


def compute_on_cpu(op: Operator, values: Values, step: Packed | None) -> Computed:
    """Call an operator on the CPU, which checks its arguments; arrays on the host change in place.

    With an `out`, which is checked later, copies change instead.
    """
    function = inspect.unwrap(op.function())
    changed = {each.name: values[each.name] for each in op.inputs if each.inout}
    changed = {name: array for name, array in changed.items() if array is not None}
    if changed and values.get("out") is not None:
        check(op, values)
        changed = {name: array.copy() for name, array in changed.items()}
    more = {name: values[name] for name in IN_PYTHON if name != "out" and name in values}
    found = function(**{each.name: values[each.name] for each in op.parameters} | more | changed)
    names = op.returned(values)
    named = dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))
    arrays = {name: array for name, array in named.items() if name not in changed}
    inputs = [(each.name, values[each.name]) for each in op.inputs if each.dtypes is not INDEX]
    usual = [each.name for each in op.outputs if not each.only_with and each.name not in values]
    forms = {name: (arrays[name].shape, arrays[name].dtype) for name in usual}
    results = Results(forms, [pair for pair in inputs if pair[1] is not None], alone=len(forms) == 1)
    return Computed(arrays, changed, results)


Check = Callable[[Values, Any], Any]  # f(arguments, step): packed sequences in a cache, or contexts in pages
CHECKED: dict[str, Check] = {  # other operators are `compute_on_cpu`
    "key_value_cache": key_value_cache, "multi_head_attention": static_attention,
    "multi_head_cache_attention": cache_attention, "merge_attention_states": merge,
    "paged_attention": pool_attention, "paged_append": pool_append, "swap_blocks": swap_blocks,
    "mla_attention": latent_attention, "mla_append": latent_append,
    "rotary_position_embedding": static_rotation, "alibi_slope": slopes, "alibi_mask": static_alibi,
    "dynamic_batching.key_value_cache": key_value_cache,
    "dynamic_batching.multi_head_attention": packed_attention,
    "dynamic_batching.multi_head_cache_attention": cache_attention,
    "dynamic_batching.position_index": position_index,
    "dynamic_batching.rotary_position_embedding": packed_rotation,
    "dynamic_batching.alibi_mask": packed_alibi, "ascend.reshape_and_cache": reshape_and_cache,
    "ascend.paged_cache_load": paged_cache_load, "ascend.block_copy": block_copy,
    "ascend.paged_attention": block_attention, "ascend.nd_to_nz": nd_to_nz, "ascend.nz_to_nd": nz_to_nd,
}  # fmt: skip
# the checks of operators that are `compute_on_cpu`
CHECKED_BY_THE_CPU: dict[str, Callable[[Values], object]] = {
    "mla_absorb": lambda values: latent.checked_absorb(values["query"], values["w_uk"]),
    "mla_expand": lambda values: latent.checked_expand(values["latent_output"], values["w_uv"]),
    "indexer_scores": lambda values: checked_scores(fill(arguments.IndexerArguments, values)),
    "topk_rows": lambda values: checked_choice(fill(arguments.ChoiceArguments, values)),
    "compress_tokens": lambda values: compressed.checked_compress(
        fill(arguments.CompressArguments, values, rope=as_rope(values["rope"]))
    ),
    "compressed_slots": lambda values: compressed.checked_compressed_slots(
        fill(arguments.SlotArguments, values)
    ),
    "rope_back": lambda values: compressed.checked_rotation_back(
        values["output"], values["positions"], as_rope(values["rope"])
    ),
    "gated_delta_step": lambda values: delta_step(values, None),
    "gated_delta_rule": lambda values: recurrent.checked_prompt(
        fill(arguments.DeltaArguments, values), fill(arguments.PromptArguments, values)
    ),
    "gated_delta_replay": lambda values: recurrent.checked_replay(fill(arguments.ReplayArguments, values)),
    "delta_gates": lambda values: recurrent.checked_delta_gates(fill(arguments.GateArguments, values)),
    "causal_conv": lambda values: recurrent.checked_conv(fill(arguments.ConvArguments, values)),
    "causal_conv_update": lambda values: recurrent.checked_conv(
        fill(arguments.ConvArguments, values, one_token=True)
    ),
}


def check(op: Operator, values: Values) -> None:
    """Check a call of an operator without running it."""
    checked, values = CHECKED.get(op.name), dict.fromkeys(IN_PYTHON) | dict(values)
    if checked:
        checked(values, packed_step(values))
    else:
        CHECKED_BY_THE_CPU[op.name](values)
