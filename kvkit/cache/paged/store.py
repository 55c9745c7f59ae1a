"""Store the blocks of a paged cache in arrays: one cache with the axes of a PMX layout, and its scales."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from kvkit.cache.layers.quant_spec import code_spec
from kvkit.cache.stores.allocation import Allocate, copy_of, in_memory
from kvkit.checks import attention, caches
from kvkit.checks.arguments import CacheArguments
from kvkit.checks.records import Context
from kvkit.checks.values import choice, float_format, integer, text
from kvkit.errors import argument_error, describe
from kvkit.formats.elements import FLOATS, QUANTIZED, STORED
from kvkit.formats.known import ALIASES
from kvkit.layouts.pmx import DYNAMIC
from kvkit.rope import NO_ROTATION
from kvkit.typed import Array, Pair

BLOCK_AXES = ("l", "kv", "block", "n", "h", "c")  # of `PagedStore.blocks`
WANTED = "int8 or int4 (:g32), fp8 (:g32), e5m2, q8_0, q4_0 or the name of dtype, which blocks hold"


def stored_format(name: str, dtype: DTypeLike, head_dim: int) -> tuple[Any, int, str | None, Any, str]:
    """Return a format as quant_bit, quant_group, quant_format, scale and scale_dtype of PMX."""
    plain = ALIASES.get(name, name) if isinstance(name, str) else name
    if plain in map(str, FLOATS):
        if plain != str(float_format("dtype", dtype)):
            raise argument_error("format", f"{WANTED}, {float_format('dtype', dtype)}", repr(name))
        return 0, 8, None, None, "float16"
    specs = {code_spec(name, is_value) for is_value in (False, True)}
    spec = specs.pop().fitted(head_dim)
    is_pmx = spec.scheme == "sym" and spec.axis == "token" and spec.bits in (4, 8)
    if specs or spec.rotation or not (spec.format or is_pmx):
        raise argument_error("format", f"{WANTED} (a QuantizedCache takes it)", repr(name))
    if spec.format is None:
        return spec.bits, spec.group, None, None, spec.param_dtype
    computes = STORED[spec.format].minifloat and spec.scale is None
    return 0, spec.group, spec.format, "found" if computes else None, spec.param_dtype


class PagedStore:
    """Holds the arrays of a `PagedCache`, and where each layer begins. Arguments are as in `PagedCache`."""

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        *,
        quant_bit: int = 0,
        quant_group: int = 8,
        scale_dtype: DTypeLike = np.float16,
        cache_layout: int = 3,
        quant_format: str | None = None,
        scale: Any = None,
        latent_dim: int = 0,
        allocate: Allocate = in_memory,
    ) -> None:
        self.page_size, self.num_layers = page_size, integer("num_layers", num_layers, 1)
        self.scale_format = float_format("scale_dtype", scale_dtype)
        self.heads, self.dim = integer("num_kv_heads", num_kv_heads, 1), integer("head_dim", head_dim, 1)
        self.latent_dim = integer("latent_dim", latent_dim, 0, self.dim - 1)
        self.value_dim = self.latent_dim or self.dim
        self.rope_dim = self.dim - self.latent_dim if self.latent_dim else 0
        if latent_dim and (quant_bit or quant_format or num_kv_heads != 1):
            wanted = "0, because quant_bit, quant_format or several heads are given"
            raise argument_error("latent_dim", wanted, latent_dim)
        self.format = float_format("dtype", dtype)  # of new keys and values, and of queries
        bits = choice("quant_bit", quant_bit, (0, 4, 8))
        group = integer("quant_group", quant_group, 1)
        layout = integer("cache_layout", cache_layout, 0, len(DYNAMIC) - 1)
        stored = QUANTIZED.get(bits, self.format)  # what the blocks hold
        if quant_format is not None:
            stored = STORED[text("quant_format", quant_format, STORED)]

        sides = 1 if latent_dim else 2  # a latent row is a key and a value
        sizes = {"l": self.num_layers, "kv": sides, "n": num_blocks * page_size, "h": self.heads}
        shape = [sizes[axis] for axis in DYNAMIC[layout].axes[:-1]]
        element = np.dtype(np.uint8) if quant_format else stored.dtype  # bytes: .npz files hold no float8
        self.cache = allocate((*shape, stored.bytes(self.dim) // element.itemsize), element)
        # Whether appends find a scale for each group themselves. Scales then have the axes of the cache.
        self.computes_scales = bool(bits) or (isinstance(scale, str) and scale == "found")
        if scale is not None and not stored.minifloat:
            raise argument_error("scale", "None unless quant_format is 'e4m3' or 'e5m2'", describe(scale))
        self.scale: Array | None = None
        if self.computes_scales:
            self.scale = allocate((*shape, self.dim // group), self.scale_format.dtype)
        elif scale is not None:
            self.scale = check_scales(scale, self.num_layers, self.heads)
        # Arguments of operators on the cache; `_place` sets layer_idx.
        self.arguments = CacheArguments(self.num_layers, 0, bits, group, quant_format, layout)
        self._find_places()
        geometry = {
            "layers": self.num_layers,
            "heads": self.heads,
            "dims": [self.dim, self.dim],
            "dtype": self.format.name,
            "quantization": [bits, group, self.scale_format.name] if bits else quant_format,
        }
        if latent_dim:
            geometry["latent_dim"] = self.latent_dim
        if scale is not None:
            form = [group, self.scale_format.name]
            geometry["scale"] = form if self.computes_scales else np.asarray(self.scale).tolist()
        self.identity = json.dumps(geometry).encode()  # a part of every hash of a prefix

    def _find_places(self) -> None:
        """Compute where each layer's keys, values and scales lie, from the addresses of the arrays.

        Appends take `places`, attention `contexts`. A prepared call replaces `addresses` for another layer.
        """
        find_place = self._latent_place if self.latent_dim else self._place
        self.places = [find_place(layer_idx) for layer_idx in range(self.num_layers)]
        self.contexts = [attention.cache_context(place) for place in self.places]
        sides = [place.sides[0] for place in self.places]  # of keys; values move by the same distance
        self.addresses = [{"cache": side.address, "scale": side.scales} for side in sides]
        arrays: list[Any] = [self.cache, self.scale] if self.computes_scales else [self.cache]
        layout = DYNAMIC[self.arguments.cache_layout]
        row, self.blocks = layout.at["n"], []  # [layer, key|value, block, row, head, dim]
        axes = [*layout.axes[:row], "block", *layout.axes[row:]]
        for array in arrays:
            split = array.reshape(*array.shape[:row], -1, self.page_size, *array.shape[row + 1 :])
            self.blocks.append(split.transpose([axes.index(axis) for axis in BLOCK_AXES]))

    def _place(self, layer_idx: int) -> Context:
        """Return where the keys and values of a layer are in the arrays."""
        scale = self.scale_of(layer_idx)
        place = caches.cache_layer(
            self.format, self.heads, self.dim, self.cache, scale, DYNAMIC,
            self.arguments._replace(layer_idx=layer_idx),
        )  # fmt: skip
        caches.check_written(self.cache, scale, place, [])
        return place

    def _latent_place(self, layer_idx: int) -> Context:
        """Return where the latent rows of a layer are, as the place of its keys and of its values."""
        layout = DYNAMIC[self.arguments.cache_layout]
        rows, _ = caches.layer_sides(self.cache, layout, layer_idx)
        name = self.format.name
        return Context(
            data_dtype=name, cache_format=name, scale_format=None, group=0, heads=1, dim=self.dim,
            value_dim=self.value_dim, key_bytes=self.format.bytes(self.dim),
            value_bytes=self.format.bytes(self.value_dim), capacity=(1, self.cache.shape[layout.at["n"]]),
            heads_adjoin=True, sides=(rows, rows),
        )  # fmt: skip

    def rows_of(self, key: Array, value: Array) -> Pair:
        """Return the rows to store for new keys and values; for latent rows, both parts joined, twice."""
        if not self.latent_dim:
            return key, value
        rows = np.concatenate((key, value), axis=-1)
        return rows, rows

    def scale_of(self, layer_idx: int) -> Array | None:
        """Return the scales that an operator takes: computed ones of all layers, or constant ones of one."""
        return self.scale if self.scale is None or self.computes_scales else self.scale[layer_idx]

    def __getstate__(self) -> dict[str, Any]:
        of_arrays = "places", "contexts", "addresses", "blocks"  # what `_find_places` computes
        return {name: value for name, value in self.__dict__.items() if name not in of_arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._find_places()  # the arrays of a copy have other addresses

    def lie_in(self, allocate: Allocate) -> None:
        """Move the arrays to new ones from `allocate`."""
        scale = self.scale
        if scale is not None and self.computes_scales:
            scale = copy_of(scale, allocate)
        self.cache, self.scale = copy_of(self.cache, allocate), scale
        self._find_places()

    def copy(self, copies: Array) -> None:
        """Copy blocks, (source, destination) each, in all layers."""
        for source, destination in copies.tolist():
            for array in self.blocks:
                array[:, :, destination] = array[:, :, source]

    def copy_rows(self, sources: Array, targets: Array) -> None:
        """Copy rows byte by byte in all layers. In each layer all rows are read before one is written."""
        (block, row), (new_block, new_row) = divmod(sources, self.page_size), divmod(targets, self.page_size)
        for array in self.blocks:
            for side in (side for layer in array for side in layer):  # [block, row, head, dim]
                side[new_block, new_row] = side[block, row]

    def rotate(self, rows: Array, deltas: Array, ropes: list[Any]) -> None:
        """Rotate the keys in some rows by `deltas` positions; `ropes` has the rotation of each layer."""
        block, row = divmod(rows, self.page_size)
        for side, rope in zip(self.blocks[0][:, 0], ropes, strict=True):
            if rope != NO_ROTATION:
                keys = side[block, row].swapaxes(0, 1)  # [heads, tokens, dim]
                side[block, row] = rope.shift(keys, deltas).swapaxes(0, 1)

    def check_apart(self, layer_idx: int, inputs: Mapping[str, Array]) -> None:
        """Raise if an append to a layer would overwrite its inputs {name: array}."""
        place = self.places[layer_idx]
        caches.check_written(self.cache, self.scale_of(layer_idx), place, list(inputs.items()))

    def empty(self, *outer: int) -> Pair:
        """Return new arrays for rows of keys and of values; one array for latent rows."""
        shape = *outer, self.heads, self.dim
        keys = np.empty(shape, self.format.dtype)
        return keys, keys if self.latent_dim else np.empty_like(keys)


def check_scales(scale: Any, layers: int, heads: int) -> Array:
    """Check scales of shape (), [2], [2, heads] or [layers, 2, heads]; return them as [layers, 2, heads]."""
    try:
        numbers = np.array(scale, np.float32)  # also of text such as "2"
        # `broadcast_to` would spread numbers of a wrong first axis over heads.
        if isinstance(scale, str) or (numbers.ndim in (1, 2) and len(numbers) != 2):
            raise ValueError
        numbers = numbers[:, None] if numbers.shape == (2,) else numbers  # keys, values
        scales = np.ascontiguousarray(np.broadcast_to(numbers, (layers, 2, heads)))
    except (TypeError, ValueError):
        legal = f"'found', a number, or numbers [2], [2, {heads}] or [{layers}, 2, {heads}]"
        raise argument_error("scale", legal, describe(scale)) from None
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise argument_error("scale", "finite numbers above 0", describe(scale))
    return scales
