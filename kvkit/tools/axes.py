"""Find the axes of an array for `diff`, by the caller's letters, its name, or an operator's docstring."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import numpy as np

from kvkit.errors import argument_error, describe
from kvkit.tools.state_names import COMPRESSED, COMPRESSOR, CONV, RECURRENT, kind_of_state

AXIS_WORDS = {
    "l": "layer", "kv": "side", "s": "sequence", "b": "page", "n": "position", "t": "token", "h": "head",
    "g": "column group", "c": "element",
}  # fmt: skip
ROLES = {"s": "b", "t": "n", "g": "h", "row": "n", "column": "c"}  # {axis: axis that causes treat alike}
BY_NDIM = {1: "n", 2: "n c", 3: "n h c", 4: "b n h c", 5: "l b n h c"}
PMX = "n l kv h c", "l n kv h c", "l kv n h c", "l kv h n c", "s l kv n h c", "s l kv h n c"
INDEX_AXES = {  # {name of an index tensor: its axes}
    "block_tables": ("sequence", "entry"), "cachestarts": ("sequence", "entry"), "kv_indices": ("entry",),
    "context_lens": ("sequence",), "seq_lens": ("sequence",), "seqstarts": ("sequence",),
    "kvstarts": ("sequence",), "start_pos": ("sequence",), "kv_indptr": ("sequence",),
    "kv_last_page_len": ("sequence",), "query_starts": ("sequence",), "slot_mapping": ("token",),
    "slots": ("token",), "positions": ("token",),
}  # fmt: skip
DIMENSIONS = {  # {dimension in a docstring's shape: its axis}
    **dict.fromkeys(("B", "MaxB", "b"), "s"),
    **dict.fromkeys(("S", "M", "tokens", "num_tokens", "start_pos+S"), "t"),
    **dict.fromkeys(("page_size", "block_size", "MaxS", "MaxT"), "n"), "num_blocks": "b", "L": "l", "2": "kv",
    **dict.fromkeys(("H", "1"), "h"), **dict.fromkeys(("D", "n0"), "c"), "m": "row", "n": "column",
    "seqlen_q": "query", "seqlen_kv": "key", "parts": "part",
}  # fmt: skip
BY_NAME = {  # the last axes of arrays without a content axis, or with two axes of tokens
    "lse": "s t h", "slopes": "h", "alibi_slopes": "s h", "sinks": "h", "key_scale": "s h",
    "value_scale": "s h", "mask": "s h query key", "attn_mask": "s h query key",
}  # fmt: skip

STATE_AXES = {  # {(kind of a state, number of axes): its axes}
    (RECURRENT, 2): "s entry", (RECURRENT, 4): "s h row column", (RECURRENT, 5): "l s h row column",
    (CONV, 2): "s entry", (CONV, 3): "s channel column", (CONV, 4): "l s channel column",
    (COMPRESSED, 3): "s row c", (COMPRESSOR, 3): "s row c", (COMPRESSOR, 4): "s row entry c",
}  # fmt: skip


def axes_by_count(axes: str | None, counts: Collection[int]) -> dict[int, str]:
    """Return {number of axes: axes}, {} for None; raise if letters are wrong or no array has as many."""
    if not axes:
        return {}
    letters = axes.split()
    if not set(letters) <= {*AXIS_WORDS, *DIMENSIONS.values()} or len(set(letters)) != len(letters):
        raise argument_error("axes", "each of l b n h c at most once", describe(axes))
    if counts and len(letters) not in counts:
        wanted = " or ".join(map(str, sorted(set(counts)))) + " letters, as an array has axes"
        raise argument_error("axes", wanted, describe(axes))
    return {len(letters): axes}


def letters_of(name: str, array: np.ndarray, axes: Mapping[int, str]) -> tuple[str, ...]:
    """Return the axes of an array, those of `axes` by their number or the usual ones of its name."""
    return tuple(axes[array.ndim].split()) if array.ndim in axes else usual_axes(name, array)


def usual_axes(name: str, array: np.ndarray) -> tuple[str, ...]:
    """Return the axes that an array of this name and shape usually has."""
    shape = array.shape
    unknown = tuple(f"axis {i}" for i in range(array.ndim))
    if is_index(array):
        usual = INDEX_AXES.get(name, ("sequence", "entry") if array.ndim == 2 else ("entry",))
        usual = ("sequence",) if name == "cachestarts" and array.ndim == 1 else usual
        return usual if len(usual) == array.ndim else unknown
    if name in ("cache", "scale"):  # PMX's: of the layouts that fit, the one with most positions
        lines = [tuple(line.split()) for line in PMX]
        lines = [line for line in lines if len(line) == len(shape) and shape[line.index("kv")] == 2]
        if lines:
            return max(lines, key=lambda line: shape[line.index("n")])
    of_state = STATE_AXES.get((kind_of_state(name) or "", array.ndim))
    if of_state is not None:
        return tuple(of_state.split())
    if name in BY_NAME and 0 < array.ndim <= len(BY_NAME[name].split()):
        return tuple(BY_NAME[name].split()[-array.ndim :])
    return tuple(BY_NDIM.get(array.ndim, "").split()) or unknown


def is_index(array: np.ndarray) -> bool:
    """Return whether an array is an index tensor: one or two axes of integers too wide for codes."""
    return array.dtype.kind in "iu" and array.dtype.itemsize > 2 and array.ndim in (1, 2)


def axes_of_shape(shape: str, count: int) -> str | None:
    """Return the axes in a docstring's shape, for an array with `count` axes; None if one is unknown."""
    inside = re.search(r"\((.*?)\)", shape.replace("seqstarts[B]", "tokens").replace("kvstarts[B]", "tokens"))
    names = [part.strip() for part in inside[1].split(",")] if inside else []
    if "..." in names:
        at, more = names.index("..."), count - len(names) + 1
        names[at : at + 1] = ["B", "tokens"][-more:] if 0 < more < 3 else []
    letters = [letter_of(part) for part in names]
    right = len(letters) == count == len(set(letters)) and all(letters)
    return " ".join(letters) if right else None


def letter_of(dimension: str) -> str:
    """Return the axis that a dimension of a docstring's shape stands for; "" if it is unknown."""
    name = dimension.split(" ")[0]
    if name in DIMENSIONS:
        return DIMENSIONS[name]
    if name.endswith("/n0"):
        return "g"
    if re.fullmatch(r"D[hkv]?(/\w+)?|head_dim", name):
        return "c"
    return "h" if re.fullmatch(r"(num_)?(kv_)?heads?(\*D.)?|H\*num_repeat", name) else ""
