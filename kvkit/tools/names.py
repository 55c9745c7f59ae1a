"""Find the keys and values of each layer by the names that engines use."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvkit.errors import argument_error, brief, nearest

NAMES = (  # names of separate keys and values: the first pair are pools of pages, the others packed tokens
    ("key_cache", "value_cache"), ("key", "value"), ("keys", "values"), ("current_key", "current_value"),
    ("key_states", "value_states"),
)  # fmt: skip
PAGED_NAMES = NAMES[0]
SIDES = "key", "value"
LAYER = "{l}"  # the number of a layer in a pattern
HEADS_FIRST = (  # patterns of keys and of values whose arrays are [sequences, heads, tokens, content]
    ("past_key_values.{l}.key", "past_key_values.{l}.value"),
    ("past_key_values.{l}.decoder.key", "past_key_values.{l}.decoder.value"),
    ("past_key_values.{l}.0", "past_key_values.{l}.1"),
    ("present.{l}.key", "present.{l}.value"),
    ("model.layers.{l}.self_attn.key", "model.layers.{l}.self_attn.value"),
    ("model.layers.{l}.self_attn.k", "model.layers.{l}.self_attn.v"),
)
TOKENS_FIRST = (  # patterns whose arrays are [blocks, rows, heads, content]
    ("layers.{l}.k_cache", "layers.{l}.v_cache"), ("layers.{l}.key_cache", "layers.{l}.value_cache"),
    ("key_cache_{l}", "value_cache_{l}"), ("k_cache_{l}", "v_cache_{l}"),
    ("layer_{l}.key", "layer_{l}.value"), ("layer_{l}_key", "layer_{l}_value"),
)  # fmt: skip
OF_ENGINES = {  # {name: names of such tables in vLLM, FlashAttention and FlashInfer}
    "block_tables": ("block_table", "page_table"), "context_lens": ("seq_lens", "cache_seqlens"),
    "page_size": ("block_size",), "kv_indptr": ("paged_kv_indptr",), "kv_indices": ("paged_kv_indices",),
    "kv_last_page_len": ("paged_kv_last_page_len",),
}  # fmt: skip
BESIDE_TABLE = {  # {array of a page table: other arrays that it needs}
    "block_tables": ("context_lens",), "kv_indices": ("kv_indptr", "kv_last_page_len"),
    "cachestarts": ("kvstarts",), "context_lens": ("block_tables",),
}  # fmt: skip
WORDS = "cache", "key", "value", "keys", "values", "kv"  # in names that errors list first


@dataclass(frozen=True)
class LayerNames:
    """Holds arrays of keys and values whose names match a pair of patterns."""

    patterns: tuple[str, str]
    sides: tuple[dict[int, Any], dict[int, Any]]  # {layer number: array} of keys, and of values
    heads_first: bool

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the layers, in order."""
        return sorted(self.sides[0] or self.sides[1])


def rename_tables(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename tables with the names of engines to the names that tools use."""
    found = dict(arrays)
    for name, others in OF_ENGINES.items():
        other = next((other for other in others if other in found), None)
        of_table = name != "context_lens" or "block_tables" in found  # Ascend's windows have seq_lens, too
        if other is not None and name not in found and of_table:
            found[name] = found.pop(other)
    return arrays if found.keys() == arrays.keys() else found


def by_layer(names: Iterable[str], pattern: str) -> dict[int, str]:
    """Return {layer number: name} of the names that match a pattern with {l}."""
    before, _, after = pattern.partition(LAYER)
    form = re.compile(f"{re.escape(before)}([0-9]{{1,6}}){re.escape(after)}")
    return {int(match[1]): name for name in names if (match := form.fullmatch(name))}


def find_layers(arrays: Mapping[str, Any]) -> LayerNames | None:
    """Return the arrays that match the first pair of patterns with a match; None without any."""
    for heads_first, pairs in ((True, HEADS_FIRST), (False, TOKENS_FIRST)):
        for patterns in pairs:
            key, value = (by_layer(arrays, pattern) for pattern in patterns)
            if not key and not value:
                continue
            if key and value and key.keys() != value.keys():
                missing = min(key.keys() ^ value.keys())
                side = missing in key
                name, other = (patterns[i].replace(LAYER, str(missing)) for i in (side, not side))
                raise argument_error(name, f"an array, as there is {other}", "None")
            sides = tuple({layer: arrays[each[layer]] for layer in sorted(each)} for each in (key, value))
            return LayerNames(patterns, (sides[0], sides[1]), heads_first)
    return None


def matching(arrays: Mapping[str, Any], pattern: str, argument: str) -> dict[int, str]:
    """Return {layer number: name} for a pattern, which without {l} is the name of one array."""
    alone = {0: pattern} if pattern in arrays else {}
    found = by_layer(arrays, pattern) if LAYER in pattern else alone
    if not found:
        wanted = f"the name of an array, with {LAYER} for the number of a layer"
        near = nearest(pattern.replace(LAYER, "0"), arrays) or list(arrays)[:5]
        got = f"{brief(pattern)}; names like it: {', '.join(near) or 'none'}"
        raise argument_error(argument, wanted, got)
    return found


def some_names(names: Collection[str], count: int = 5) -> str:
    """Return a text with the names that most resemble a cache's, and the number of the others."""
    likely = dict.fromkeys(name for word in WORDS for name in nearest(word, names, count))
    shown = [*likely, *(name for name in names if name not in likely)][:count]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(map(brief, shown)) + more if shown else "none"
