"""Find the arrays of a cache by their names: kvkit's own names, and those that engines use."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvkit.errors import argument_error, brief, describe, nearest
from kvkit.files import Contents
from kvkit.files.contents import BESIDE, CACHE, nested
from kvkit.tools.saved_pages import order_cells

NAMINGS = (  # names of separate keys and values: the first pair are pools of pages, the others packed tokens
    ("key_cache", "value_cache"), ("key", "value"), ("keys", "values"), ("current_key", "current_value"),
    ("key_states", "value_states"),
)  # fmt: skip
PAGED_NAMES = NAMINGS[0]
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
CONTRACTS = "past_key_values.", "present.", "current_"  # such names have one layout, that of ONNX or PMX
TOKENS_FIRST = (  # patterns whose arrays are [blocks, rows, heads, content]
    ("layers.{l}.k_cache", "layers.{l}.v_cache"), ("layers.{l}.key_cache", "layers.{l}.value_cache"),
    ("key_cache_{l}", "value_cache_{l}"), ("k_cache_{l}", "v_cache_{l}"),
    ("layer_{l}.key", "layer_{l}.value"), ("layer_{l}_key", "layer_{l}_value"),
)  # fmt: skip
ENGINE_NAMES = {  # {kvkit's name of a table: its names in vLLM, FlashAttention and FlashInfer}
    "block_tables": ("block_table", "page_table"), "context_lens": ("seq_lens", "cache_seqlens"),
    "page_size": ("block_size",), "kv_indptr": ("paged_kv_indptr",), "kv_indices": ("paged_kv_indices",),
    "kv_last_page_len": ("paged_kv_last_page_len",), "compressed_slot_mapping": ("cmp_slot_mapping",),
}  # fmt: skip
BESIDE_TABLE = {  # {array of a page table: other arrays that it needs}
    "block_tables": ("context_lens",), "kv_indices": ("kv_indptr", "kv_last_page_len"),
    "cachestarts": ("kvstarts",), "context_lens": ("block_tables",),
}  # fmt: skip
WORDS_OF_SIDES = {"key": ("value", "query"), "keys": ("values", "queries"), "k": ("v", "q")}
KEY_WORD = re.compile("(?<![A-Za-z])(keys?|k)(?![A-Za-z])", re.IGNORECASE)
LIKELY_WORDS = "cache", "key", "value", "keys", "values", "kv"  # errors list names with these words first


class CacheArrays:
    """Finds the cache among the arrays of a file, by names alone; their layout is not known here.

    A cache has one of three forms::

        form               names of its arrays                         `cache`
        -----------------  ------------------------------------------  -----------------------
        one array          cache                                       that array
                           cache.0, cache.1 or cache.0.0, ...          nested lists of arrays
        keys and values    key_cache, value_cache, or another pair     [keys, values]
                           of `NAMINGS`
        keys and values    past_key_values.0.key, ... (`HEADS_FIRST`,  [[keys of layer 0, ...],
        of each layer      `TOKENS_FIRST`)                              [values of layer 0, ...]]

    Scales lie beside the first form as ``scale``, beside the others as ``key_scale`` and ``value_scale``.
    """

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.arrays = contents.arrays

    def text(self, name: str) -> str | None:
        """Return the text in the array of a name; None if there is no such array."""
        array = self.arrays.get(name)
        if array is None:
            return None
        if array.ndim or not isinstance(array.item(), str):
            raise argument_error(name, "a text", describe(array))
        return str(array.item())

    def integer(self, name: str) -> int | None:
        """Return the integer in the array of a name; None if there is none."""
        array = self.arrays.get(name)
        return int(array) if array is not None and array.ndim == 0 and array.dtype.kind in "iu" else None

    @property
    def saved(self) -> dict[str, Any]:
        """Return the metadata of a cache that kvkit saved; {} for other files."""
        metadata = self.contents.metadata.get("cache")
        return metadata if isinstance(metadata, dict) else {}

    @property
    def paged(self) -> Mapping[str, Any]:
        """Return the metadata of a saved `PagedCache`; {} for other files."""
        metadata = self.saved.get("paged")
        return metadata if isinstance(metadata, dict) else {}

    @cached_property
    def cache(self) -> Any:
        """Return the cache as in the table above; None without one, or if keys or values are missing."""
        whole = self.contents.cache
        return list(self.separate.values()) if whole is None and len(self.separate) == 2 else whole

    @cached_property
    def separate(self) -> dict[str, Any]:
        """Return {"key": arrays, "value": arrays} if they are separate; one of them may be missing."""
        if self.layer_names is not None:
            sides = [list(layers.values()) or None for layers in self.layer_names.sides]
        else:
            sides = [nested(self.arrays, name) for name in self.side_names or ()]
        return {side: arrays for side, arrays in zip(SIDES, sides, strict=False) if arrays is not None}

    @cached_property
    def side_names(self) -> tuple[str, str] | None:
        """Return the names of keys and of values: a pair of `NAMINGS`, or patterns; None with a ``cache``."""
        if self.contents.cache is not None:
            return None
        exist = {pair: [nested(self.arrays, name) is not None for name in pair] for pair in NAMINGS}
        for enough in (all, any):  # a pair with both arrays, or else one with a single array
            for pair, found in exist.items():
                if enough(found):
                    return pair
        return None if self.layer_names is None else self.layer_names.patterns

    @cached_property
    def layer_names(self) -> LayerNames | None:
        """Return the arrays whose names have layer numbers; None with arrays of `NAMINGS` or a ``cache``."""
        known = any(nested(self.arrays, name) is not None for pair in NAMINGS for name in pair)
        return None if known or self.contents.cache is not None else find_layers(self.arrays)

    @property
    def layer_numbers(self) -> list[int] | None:
        """Return the numbers of the layers in their model; None if they count from 0."""
        if self.layer_names is not None:
            return self.layer_names.numbers
        numbers = self.arrays.get("layers")
        return numbers.tolist() if numbers is not None and numbers.ndim == 1 else None

    @property
    def numbers_to_write(self) -> dict[str, np.ndarray]:
        """Return {"layers": numbers} to write to a file; {} if layers count from 0."""
        numbers = self.layer_numbers
        known = numbers is not None and numbers != list(range(len(numbers)))
        return {"layers": np.array(numbers)} if known else {}

    @cached_property
    def scales(self) -> dict[str, Any]:
        """Return {name of `BESIDE`: arrays} of scales, minima and zeros."""
        if len(self.separate) == 1:
            return {}
        found = {name: nested(self.arrays, name) for name in BESIDE}
        if self.separate:
            pairs = {part: [self.side_scale(side, part) for side in SIDES] for part in BESIDE.values()}
            found = {part: None if any(x is None for x in pair) else pair for part, pair in pairs.items()}
        return {name: arrays for name, arrays in found.items() if arrays is not None}

    def side_scale(self, side: str, part: str) -> Any:
        """Return the scales (or minima or zeros, by `part`) of keys or values; None without any."""
        names = f"{side}_{part}", f"{(self.side_names or SIDES)[side == 'value']}_{part}"
        return next((found for name in names if (found := nested(self.arrays, name)) is not None), None)

    @property
    def own_arrays(self) -> dict[str, Any]:
        """Return {name: arrays or nested lists} of the cache and its scales."""
        return {CACHE: self.cache} | self.scales

    @cached_property
    def places_of_tokens(self) -> dict[str, np.ndarray]:
        """Return the packed positions of tokens and their places in images; {} if they count from 0."""
        if {"cache_cells.positions", "cache_cells.sequences"} <= self.arrays.keys():
            cells, owners = order_cells(self.arrays)
            names = {"": "cache_cells.positions", "_x": "cache_cells.x", "_y": "cache_cells.y"}
            found = {f"positions{end}": self.arrays[name][cells] for end, name in names.items()
                     if name in self.arrays}  # fmt: skip
            begins = np.flatnonzero(np.diff(owners, prepend=-1))
            counted = np.arange(len(cells)) - np.repeat(begins, np.diff([*begins, len(cells)]))
            return {} if all(np.array_equal(each, counted) for each in found.values()) else found
        found = {name: array for name, array in self.arrays.items() if name.partition("_")[0] == "positions"}
        return {name: array for name, array in found.items() if array.ndim == 1 and array.dtype.kind in "iu"}

    @property
    def positions(self) -> np.ndarray | None:
        """Return the packed positions of the sequences' tokens; None if they count from 0."""
        return self.places_of_tokens.get("positions")


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
    for name, others in ENGINE_NAMES.items():
        other = next((other for other in others if other in found), None)
        ours = name != "context_lens" or "block_tables" in found  # Ascend's windows have seq_lens, too
        if other is not None and name not in found and ours:
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


def patterns_beside(keys: str) -> tuple[str, str] | None:
    """Return the patterns of values and of queries beside one of keys; None if no word in it says key.

    Examples
    --------
    >>> from kvkit.tools.names import patterns_beside
    >>> patterns_beside("layer_{l}/K"), patterns_beside("k_proj.{l}.keys")
    (('layer_{l}/V', 'layer_{l}/Q'), ('k_proj.{l}.values', 'k_proj.{l}.queries'))
    """
    found = list(KEY_WORD.finditer(keys))
    if not found:
        return None
    word, (begin, end) = found[-1][0], found[-1].span()
    spelled = str.upper if word.isupper() else str.title if word.istitle() else str
    values, queries = (keys[:begin] + spelled(each) + keys[end:] for each in WORDS_OF_SIDES[word.lower()])
    return values, queries


def paired_patterns(names: Collection[str]) -> tuple[str, str] | None:
    """Return the first patterns of keys and of values whose names differ in one word; None without any."""
    for keys in dict.fromkeys(re.sub("[0-9]+", LAYER, name, count=1) for name in names):
        values = (patterns_beside(keys) or ("",))[0]
        same = by_layer(names, keys).keys() == by_layer(names, values).keys() if LAYER in keys else True
        if values and same and (LAYER in keys or values in names):
            return keys, values
    return None


def common_pattern(names: Iterable[str]) -> str | None:
    """Return the pattern that most names with a number share, as layer{l} for layer0; None without any."""
    counts = Counter(re.sub("[0-9]+", LAYER, name, count=1) for name in names if re.search("[0-9]", name))
    return counts.most_common(1)[0][0] if counts else None


def some_names(names: Collection[str]) -> str:
    """Return a text with the five names that most resemble a cache's, and the number of the others."""
    likely = dict.fromkeys(name for word in LIKELY_WORDS for name in nearest(word, names, 5))
    shown = [*likely, *(name for name in names if name not in likely)][:5]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(map(brief, shown)) + more if shown else "none"
