"""Bring recurrent states into another order: of their axes, and of their value heads.

No shape tells the orders apart, as dk = dv in all of today's models::

    KV          [dk, dv]  transformers, fla, ONNX
    VK          [dv, dk]  FlashInfer, vLLM, SGLang, onnxruntime
    VK:tiled    [dv, dk]  llama.cpp: value head j reads key head j mod Hk, not j // (Hv // Hk)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvkit.errors import argument_error, brief, describe
from kvkit.files import Contents, llama
from kvkit.tools.state_names import CONV, RECURRENT, kind_of_state

ORDERS = "KV", "VK", "KV:tiled", "VK:tiled"
OF_LLAMA = re.compile(rf"{llama.RECURRENT}\.[0-9]+\.([01])")  # inputs of a layer's convolution, and its state
HEAD_COUNTS = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")


@dataclass(frozen=True)
class StateOrder:
    """Describes a change of the order of states; heads are (key heads, value heads), if they are needed."""

    before: str
    target: str
    heads: tuple[int, int] | None = None

    def moved(self, contents: Contents) -> tuple[Contents, int]:
        """Return (contents with their states in the new order, bytes of the states)."""
        kinds = {}
        for name in contents.arrays:  # as in a dump, or in a file of llama.cpp
            numbered = OF_LLAMA.fullmatch(name)
            kinds[name] = (CONV, RECURRENT)[int(numbered[1])] if numbered else kind_of_state(name)
        states = {name: self.as_matrices(name, contents.arrays[name])
                  for name, kind in kinds.items() if kind == RECURRENT}  # fmt: skip
        if not states:
            wanted = "arrays of states by name (recurrent_state, ssm_state, cache_s_l0 and so on)"
            raise argument_error("states", wanted, "none")
        shapes = {array.shape[-3:] for array in states.values()}
        found = {name: self.reordered(array) for name, array in states.items()}
        if self.places is not None:
            for name in [name for name, kind in kinds.items() if kind == CONV]:
                found[name] = self.inputs(name, contents.arrays[name], shapes)
        arrays = dict(contents.arrays) | found
        return replace(contents, arrays=arrays), sum(array.nbytes for array in found.values())

    @property
    def places(self) -> np.ndarray | None:
        """Return for each value head in the new order its old index; None if heads stay."""
        if self.before.endswith("tiled") == self.target.endswith("tiled"):
            return None
        if self.heads is None:
            wanted = "KEY/VALUE, the heads of keys and of values (16/32), as the order of heads changes"
            raise argument_error("state_heads", wanted, "None")
        keys, values = self.heads
        tiled = np.arange(values).reshape(-1, keys).T  # [key heads, value heads of each]
        return tiled.ravel() if self.before.endswith("tiled") else np.argsort(tiled.ravel())

    def as_matrices(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return states [..., heads, rows, columns]; a row of llama.cpp has the states of all heads."""
        if array.ndim < 4 and self.heads is not None:
            size = math.isqrt(array.shape[-1] // self.heads[1])
            if size * size * self.heads[1] == array.shape[-1]:
                return array.reshape(*array.shape[:-1], self.heads[1], size, size)
        if array.ndim < 4:
            wanted = "states [..., heads, rows, columns], or rows of square states and state_heads"
            raise argument_error(name, wanted, describe(array))
        if self.heads is not None and array.shape[-3] != self.heads[1]:
            raise argument_error(
                "state_heads", f"{array.shape[-3]} heads of values, as {name}", self.heads[1]
            )
        return array

    def reordered(self, array: np.ndarray) -> np.ndarray:
        """Return states [..., heads, rows, columns] in the new order."""
        array = array if self.places is None else array[..., self.places, :, :]
        turned = self.before[:2] != self.target[:2]
        return np.ascontiguousarray(array.swapaxes(-1, -2) if turned else array)

    def inputs(self, name: str, array: np.ndarray, shapes: set[tuple[int, ...]]) -> np.ndarray:
        """Return the last inputs of a convolution: channels of queries, of keys, of values, which move."""
        (keys, values), shape = self.heads or (1, 1), next(iter(shapes))
        dk, dv = shape[-2:] if self.before.startswith("KV") else shape[:-3:-1]
        first, channels = 2 * keys * dk, 2 * keys * dk + values * dv
        axes = [axis for axis in range(array.ndim) if array.shape[axis] == channels]
        rows = array
        if not axes and array.ndim == 2 and not array.shape[1] % channels:  # rows of llama.cpp
            rows, axes = array.reshape(len(array), -1, channels), [2]
        if len(shapes) > 1 or len(axes) != 1:
            wanted = f"{channels} channels, as states {list(shape)} have, in one axis"
            raise argument_error(name, wanted, describe(array))
        of_values = (first + np.arange(values * dv).reshape(values, dv)[self.places]).ravel()
        order = np.concatenate([np.arange(first), of_values])
        return np.ascontiguousarray(rows.take(order, axes[0]).reshape(array.shape))


def state_order(states: Any, from_states: Any, state_heads: Any) -> StateOrder | None:
    """Return the change of the order of states; None if none is wanted."""
    given = {"states": states, "from_states": from_states, "state_heads": state_heads}
    if states is None and from_states is None:
        if state_heads is not None:
            raise argument_error("states", "the order that states are to have, with state_heads", "None")
        return None
    for name, order in list(given.items())[:2]:
        if order not in ORDERS:
            wanted = f"the order of states, {', '.join(ORDERS)}, as no shape tells it"
            raise argument_error(name, wanted, brief(order))
    if isinstance(state_heads, str):
        found = HEAD_COUNTS.fullmatch(state_heads)
        state_heads = None if found is None else (int(found[1]), int(found[2]))
        if found is None:
            raise argument_error("state_heads", "KEY/VALUE heads, as 16/32", brief(given["state_heads"]))
    if state_heads is not None and (min(state_heads) < 1 or state_heads[1] % state_heads[0]):
        raise argument_error("state_heads", "a multiple of the key heads as value heads", state_heads)
    return StateOrder(from_states, states, state_heads)
