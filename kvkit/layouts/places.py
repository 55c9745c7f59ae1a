"""Addresses and strides of a layer's rows, which a layout and an array tell.

Kernels know nothing else of a layout. A static cache has an axis of sequences; the rows of a dynamic cache
are shared by all, a stride of 0.
"""

from dataclasses import dataclass

from kvkit.layouts.grammar import Layout
from kvkit.typed import Array

FRACTAL_BYTES = 32  # of a group of elements in Ascend's NZ
ENDLESS = 2**63 - 1  # the page size of offset mode: one page holds every position of a sequence


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A layer of an array: byte address of its keys, then byte strides."""

    address: int
    kv: int
    sequence: int
    row: int
    head: int


def layer_place(array: Array, layout: Layout, layer: int) -> LayerPlace:
    """Return where `layer` of a cache or of its scales lies."""
    strides, at = array.strides, layout.at
    return LayerPlace(
        array.ctypes.data + layer * strides[at["l"]],
        strides[at["kv"]],
        strides[at["b"]] if "b" in at else 0,
        strides[at["n"]],
        strides[at["h"]],
    )


def packed_strides(array: Array) -> tuple[int, int, int]:
    """Return the strides (sequence, token, head) of [tokens, heads, dim] or [batch, tokens, heads, dim].

    Tokens are counted through all sequences, so the first is what a batch stride adds to that.
    """
    if array.ndim == 3:
        return 0, array.strides[0], array.strides[1]
    return array.strides[0] - array.shape[1] * array.strides[1], array.strides[1], array.strides[2]
