"""Check DeepSeek V4's caches, whose rows pool windows of tokens: rules C1 to C5."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvkit.errors import argument_error, describe
from kvkit.interop import integers
from kvkit.tools.case import Case
from kvkit.tools.findings import Seen, rule
from kvkit.tools.state_names import COMPRESSOR, kind_of_state

V4_WINDOW = 128  # tokens that a query of DeepSeek V4 attends to by their own rows


def ratio_of(case: Case, name: str, layer: int | None) -> int:
    """Return how many tokens a row of a layer pools; 0 if it has no such rows."""
    ratios = case.index("compress_ratios").reshape(-1)
    place = 0 if len(ratios) == 1 else layer
    if place is None or place >= len(ratios):
        wanted = f"the ratio of {name}: one of all layers, or one for each beside layers.NUMBER.NAME"
        raise argument_error("compress_ratios", wanted, f"{len(ratios)} ratios")
    if ratios[place] < 0 or ratios[place] == 1:
        raise argument_error("compress_ratios", "0, or at least 2 tokens of a row", int(ratios[place]))
    return int(ratios[place])


def tokens_of_slots(case: Case, wrong: Callable[[Any, Any], Any]) -> Any:
    """Return (name, entry, slot, position, ratio) of each token for which `wrong(slots, ends)` holds.

    `ends` is a mask of the tokens that end a window. Return None if slots, positions or ratios are missing.
    """
    positions, slots_of = (
        case.index("slot_positions", 1),
        [*case.of_layers("compressed_slot_mapping")],
    )
    if positions is None or not slots_of or "compress_ratios" not in case.given:
        return None
    hits = []
    for name, layer, array in slots_of:
        slots, ratio = integers(name, array, 1), ratio_of(case, name, layer)
        if len(slots) != len(positions):
            raise argument_error(name, f"{len(positions)} entries, as slot_positions", len(slots))
        ends = (positions >= 0) & bool(ratio) & ((positions + 1) % max(ratio, 1) == 0)
        hits += [(name, i, slots[i], positions[i], ratio) for i in np.flatnonzero(wrong(slots >= 0, ends))]
    return hits


@rule(
    "C1",
    "A row of half a window overwrites a finished one. Write -1 where (position + 1) % ratio is not 0: "
    "kvkit.compressed_slots computes the slots of a step.",
    needs="compressed_slot_mapping, slot_positions, compress_ratios",
)
def row_before_its_end(case: Case) -> Seen:
    """Report slots of tokens that end no window. pypto-lib#511: only the last token writes a row."""

    def words(hit: Any) -> tuple[str, str]:
        name, i, slot, position, ratio = hit
        of = f"of {ratio} tokens" if ratio else "as the layer has none"
        token = f"position {position}, which ends no window {of}" if position >= 0 else "padding"
        return f"{name}[{i}]", f"slot {slot} for {token}"

    hits = tokens_of_slots(case, lambda stored, ends: stored & ~ends)
    return None if hits is None else (hits, words)


@rule(
    "C2",
    "The row is never written, and queries read what its slot had before. Give the last token of each window "
    "a slot: kvkit.compressed_slots computes the slots of a step.",
    needs="compressed_slot_mapping, slot_positions, compress_ratios",
)
def row_not_written(case: Case) -> Seen:
    """Report tokens that end a window and have no slot. atlas#275: generated tokens made no rows."""

    def words(hit: Any) -> tuple[str, str]:
        name, i, slot, position, ratio = hit
        return f"{name}[{i}]", f"{slot} for position {position}, which ends row {position // ratio}"

    hits = tokens_of_slots(case, lambda stored, ends: ends & ~stored)
    return None if hits is None else (hits, words)


@rule(
    "C3",
    "New rows overwrite rows that queries attend to. A ring needs a row for each token of a window, and "
    "more if drafts may be taken back.",
    needs="window_ring",
)
def ring_too_short(case: Case) -> Seen:
    """Report rings with fewer rows than a window. pypto-lib#459: slots modulo a window wrapped around."""
    rings = [*case.of_layers("window_ring")]
    if not rings:
        return None
    stated, lengths, hits = case.number("window", 1), case.index("context_lens", 1), []
    window = V4_WINDOW if stated is None else stated
    needed = window if lengths is None else min(window, int(lengths.max(initial=0)))
    for name, _, array in rings:
        if array.ndim != 3:
            raise argument_error(name, "shape [sequences, rows, dim]", describe(array))
        if array.shape[1] < needed:
            hits.append((name, f"{array.shape[1]} rows for a window of {window} tokens"))
    return hits


@rule(
    "C4",
    "Rows then depend on where a prompt is cut, as what waits for its window is rounded. Allocate states in "
    "float32; bfloat16 is an option of SGLang, which saves memory.",
    "warning",
    needs="compressor_state",
)
def state_not_float32(case: Case) -> Seen:
    """Report compressors' states of other types. vllm-ascend#9270, as vLLM: they have to be float32."""
    states = {x: array for x, array in case.given.items() if kind_of_state(x) == COMPRESSOR}
    if not states:
        return None
    return [(x, f"a state of {array.dtype}") for x, array in states.items() if array.dtype != np.float32]


@rule(
    "C5",
    "Fewer rows hide tokens behind the window from all queries, more are of tokens that are gone. Add a row "
    "when its last token comes, and drop it when that is taken back.",
    needs="entry_count, context_lens, compress_ratios",
)
def rows_unlike_tokens(case: Case) -> Seen:
    """Report counts of rows other than tokens // ratio. atlas#275: decoding added none to a prompt's."""
    lengths, found = case.index("context_lens", 1), [*case.of_layers("entry_count", "compressed_kv")]
    if lengths is None or not found or "compress_ratios" not in case.given:
        return None
    hits = []
    for name, layer, array in found:
        ratio, tokens = ratio_of(case, name, layer), lengths
        if "compressed_kv" in name:
            if array.ndim != 3:
                raise argument_error(name, "shape [sequences, rows, dim]", describe(array))
            counts, tokens = np.array([array.shape[1]]), lengths.max(initial=0, keepdims=True)
        else:
            counts = integers(name, array).reshape(-1)
            if len(counts) not in (1, len(lengths)):
                raise argument_error(name, f"{len(lengths)} counts, as context_lens", len(counts))
            counts = np.broadcast_to(counts, len(lengths))
        for i, (count, length) in enumerate(zip(counts, tokens, strict=True)):
            made = length // ratio if ratio else 0
            if count != made:
                place = f"{name}[{i}]" if array.ndim == 1 else name
                hits.append((place, f"{count} rows; {length} tokens make {made}"))
    return hits
