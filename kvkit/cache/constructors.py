"""Define the usual caches: `DynamicCache`, `StaticCache` and `QuantizedCache`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from kvkit.cache.caches import Cache
from kvkit.cache.layers.chunked import ChunkedLayer, StaticChunkedLayer
from kvkit.cache.layers.dynamic import DynamicLayer, StaticLayer
from kvkit.cache.layers.layer import Layer
from kvkit.cache.layers.quantized import QuantizedLayer, SideSpec
from kvkit.cache.layers.sliding import SlidingWindowLayer, StaticSlidingWindowLayer
from kvkit.cache.layers.state import StateLayer
from kvkit.checks.values import integer
from kvkit.errors import argument_error, brief, describe
from kvkit.files.paths import check_path
from kvkit.formats.mixes import Mix, mix_named
from kvkit.models.words import MOST_LAYERS
from kvkit.typed import FilePath, Pair

STATE_LAYERS = "linear_attention", "conv"  # the layer types of recurrent states


def layer_makers(
    num_layers: int | None,
    layer_types: Sequence[str] | None,
    window: int | None,
    full: Callable[[], Layer],
    local: Sequence[Callable[..., Layer]] = (SlidingWindowLayer, ChunkedLayer),
) -> tuple[Callable[[], Layer] | None, list[Callable[[], Layer]]]:
    """Return functions that make layers: (one for further layers, or None; a list of one for each layer).

    Without `layer_types` all layers are sliding if there is a window, otherwise full. A sliding layer
    without a window is an error.
    """
    if window is not None:
        integer("window", window, 1)
    if num_layers is not None:
        num_layers = integer("num_layers", num_layers, 0, MOST_LAYERS)
    sliding, chunked = (functools.partial(make, window) for make in local)
    if layer_types is None:
        kind = full if window is None else sliding
        return kind, [kind] * (num_layers or 0)
    if isinstance(layer_types, str) or not isinstance(layer_types, Iterable):
        raise argument_error("layer_types", "the type of each layer", describe(layer_types))
    layer_types = tuple(layer_types)
    with_window = {"sliding_attention": sliding, "chunked_attention": chunked}
    makers = {"full_attention": full} | with_window | dict.fromkeys(STATE_LAYERS, StateLayer)
    for i, name in enumerate(layer_types):
        if not isinstance(name, str) or name not in makers:
            raise argument_error(f"layer_types[{i}]", " or ".join(makers), describe(name))
    if num_layers not in (None, len(layer_types)):
        raise argument_error("layer_types", f"{num_layers} types (num_layers)", len(layer_types))
    if window is None and not with_window.keys().isdisjoint(layer_types):
        raise argument_error("window", "a window for the sliding layers, or the size of chunks", "None")
    return None, [makers[name] for name in layer_types]


class DynamicCache(Cache):
    """A cache whose layers grow with the context.

    Parameters
    ----------
    num_layers : int, optional
        The number of layers; if None, each is made when it is first used.
    layer_types : sequence of str, optional
        The type of each layer: "full_attention", "sliding_attention", "chunked_attention" for a
        `ChunkedLayer`, or "linear_attention" or "conv" for a `StateLayer`.
    window : int, optional
        Window W of the sliding layers, or the tokens of a chunk; without ``layer_types`` all layers are
        sliding.
    offload : path, optional
        A folder to keep the layers in, see `offload`.
    rope : Rope, "none" or list of them, optional
        How keys are rotated, in all layers or in each. `shift` needs it.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import DynamicCache
    >>> cache, tokens = DynamicCache(), np.ones((2, 4, 5, 8), np.float16)
    >>> keys, values = cache.update(tokens, tokens, layer_idx=0)
    >>> cache.attend(np.ones((2, 8, 1, 8), np.float16), 0).shape
    (2, 8, 1, 8)
    """

    def __init__(
        self,
        num_layers: int | None = None,
        layer_types: Sequence[str] | None = None,
        window: int | None = None,
        *,
        offload: FilePath | None = None,
        rope: Any = None,
    ) -> None:
        kind, layers = layer_makers(num_layers, layer_types, window, DynamicLayer)
        self._make_layer = kind if num_layers is None else None
        super().__init__((make() for make in layers), offload=offload, rope=rope)

    @classmethod
    def from_legacy_cache(cls, past_key_values: Iterable[Pair]) -> Self:
        """Make a cache from a tuple with the (keys, values) of each layer, which are copied."""
        cache = cls()
        if not isinstance(past_key_values, Iterable):
            raise argument_error("past_key_values", "(keys, values) of each layer", describe(past_key_values))
        for i, pair in enumerate(past_key_values):
            if not hasattr(pair, "__len__") or len(pair) != 2:
                raise argument_error(f"past_key_values[{i}]", "(keys, values)", describe(pair))
            cache.update(*pair, i)
        return cache


class StaticCache(Cache):
    """A cache of fixed size.

    Parameters
    ----------
    max_cache_len : int
        The most tokens it can hold.
    num_layers, layer_types, window, offload, rope
        As in `DynamicCache`.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import StaticCache
    >>> cache, tokens = StaticCache(8), np.ones((1, 1, 5, 4), np.float32)
    >>> keys, values = cache.update(tokens, tokens, layer_idx=0)
    >>> keys.shape, cache.reserve(4)
    Traceback (most recent call last):
        ...
    kvkit.errors.CapacityError: layers[0]: expected room for 4 new tokens after 5 (max_cache_len 8), got 3
    """

    def __init__(
        self,
        max_cache_len: int,
        num_layers: int | None = None,
        layer_types: Sequence[str] | None = None,
        window: int | None = None,
        *,
        offload: FilePath | None = None,
        rope: Any = None,
    ) -> None:
        full = functools.partial(StaticLayer, max_cache_len)
        local = [
            functools.partial(kind, max_cache_len) for kind in (StaticSlidingWindowLayer, StaticChunkedLayer)
        ]
        kind, layers = layer_makers(num_layers, layer_types, window, full, local)
        full()  # raises now if the size is wrong
        self._make_layer = kind if num_layers is None else None
        super().__init__((make() for make in layers), offload=offload, rope=rope)


class QuantizedCache(Cache):
    """A cache whose layers store old tokens as codes.

    Parameters
    ----------
    format : str
        The format of codes, such as ``"int4:g32"``, ``"kivi2"`` or ``"fp8"``; see `QuantSpec`. Or a mix,
        which names formats of layers: ``"int8@0,1,-1/int4:g32"`` stores layers 0, 1 and the last as int8, and
        the others as int4; ``"K=int8@0/int4:g32,V=int4:g32"`` does so for keys only. Or the name of a file
        that ``kvkit study -o mix.json`` wrote.
    key, value : str or QuantSpec, optional
        The formats, or mixes, of keys and of values, instead of `format`.
    residual_length, sink
        As in `QuantizedLayer`.
    num_layers : int, optional
        The number of layers; if None, each is made when it is first used. A mix needs the number.
    read_back : bool
        True: a step attends to the codes of its own tokens, which measures the error of a format. False: it
        attends to its own tokens unquantized, so that one step over a whole prompt has no error.
    layer_types, window, offload, rope
        As in `DynamicCache`. Sliding layers and recurrent states are small and not quantized.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import QuantizedCache
    >>> cache = QuantizedCache("kivi2", residual_length=16)
    >>> tokens = np.ones((1, 4, 1024, 64), np.float16)
    >>> keys, values = cache.update(tokens, tokens, layer_idx=0)
    >>> token = tokens[:, :, :1]
    >>> keys, values = cache.update(token, token, layer_idx=0)   # frees what an undo of the prompt needs
    >>> round(2 * tokens.nbytes / cache.nbytes, 1)
    4.8
    """

    def __init__(
        self,
        format: str = "kivi4",
        *,
        key: SideSpec = None,
        value: SideSpec = None,
        num_layers: int | None = None,
        residual_length: int = 128,
        sink: int = 4,
        layer_types: Sequence[str] | None = None,
        window: int | None = None,
        read_back: bool = False,
        offload: FilePath | None = None,
        rope: Any = None,
    ) -> None:
        if not isinstance(format, str):
            hint = f" (a number of layers is num_layers={format})" if type(format) is int else ""
            raise argument_error("format", "a format such as 'int4:g32' or 'kivi4'", describe(format) + hint)
        mix = mix_named(format)
        num_layers = mix.num_layers if num_layers is None and layer_types is None else num_layers
        full: Callable[..., Layer] = functools.partial(
            QuantizedLayer, residual_length=residual_length, sink=sink, read_back=read_back
        )
        kind, makers = layer_makers(num_layers, layer_types, window, full)
        if mix.by_layer or any(isinstance(side, str) and mix_named(side).by_layer for side in (key, value)):
            quantized = [each is full for each in makers] if num_layers is not None or layer_types else None
            sides = sides_of_layers(mix, key, value, quantized)
            makers = [
                functools.partial(full, key=pair[0], value=pair[1]) if make is full else make
                for make, pair in zip(makers, sides, strict=True)
            ]
        else:
            full = functools.partial(full, mix.text, key=key, value=value)
            kind, makers = layer_makers(num_layers, layer_types, window, full)
            full()  # raises now if an argument is wrong
        self._make_layer = kind if num_layers is None else None
        super().__init__((make() for make in makers), offload=offload, rope=rope)

    @classmethod
    def from_file(cls, path: FilePath, **options: Any) -> Self:
        """Make an empty cache with the formats in a file that ``kvkit study -o mix.json`` wrote.

        `options` are the other arguments of the class. The file has the number of layers, unless it was made
        from some of a model's layers.
        """
        check_path(path)
        return cls(os.fspath(path), **options)


def sides_of_layers(
    mix: Mix, key: SideSpec, value: SideSpec, quantized: list[bool] | None
) -> list[tuple[SideSpec, SideSpec]]:
    """Return the (formats of keys, formats of values) that a mix gives to layers, all of which it needs.

    `quantized` says for each layer whether it stores codes; None if the number of layers is not known.
    """
    if quantized is None:
        text = next(each for each in (key, value, mix.text) if isinstance(each, str) and "@" in each)
        raise argument_error("num_layers", f"the number of layers, for the mix {brief(text)}", "None")
    of_both = mix.of_layers(len(quantized)) if key is None or value is None else []
    sides: list[list[SideSpec]] = []
    for i, side in enumerate((key, value)):
        if isinstance(side, str):
            formats: list[SideSpec] = [pair[i] for pair in mix_named(side).of_layers(len(quantized))]
        else:
            formats = [pair[i] for pair in of_both] if side is None else [side] * len(quantized)
        used = [format for format, coded in zip(formats, quantized, strict=True) if coded]
        for number, format in enumerate(formats):
            if format not in used:
                wanted = f"a layer with full attention for {format}"
                raise argument_error("format", wanted, f"layer {number}, whose tokens stay unquantized")
        sides.append(formats)
    return list(zip(*sides, strict=True))
