"""The cache that is a list of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self, SupportsIndex

from numpy.typing import ArrayLike

from kvkit.cache import offload, opening, saving
from kvkit.cache.base import BaseCache, one_call_at_a_time
from kvkit.cache.layers import requests
from kvkit.cache.layers.layer import Layer
from kvkit.checks.values import integer
from kvkit.errors import argument_error, describe
from kvkit.typed import Array, FilePath, Pair, States


class Cache(BaseCache):
    """The keys and values of a model, layer by layer.

    Parameters
    ----------
    layers : iterable of layers
        One for each attention layer.
    offload : path, optional
        As `offload` called at once.

    Attributes
    ----------
    layers : list of layers
    folder : Folder
        Where layers lie in files; None if all are in memory.

    Examples
    --------
    A generation loop, for a model whose layers make queries, keys and values [B, heads, q, D]:

    >>> import numpy as np
    >>> from kvkit.cache import Cache, DynamicLayer, SlidingWindowLayer
    >>> cache, prompt = Cache([DynamicLayer(), SlidingWindowLayer(4)]), np.ones((1, 6, 8), np.float32)
    >>> hidden = prompt                                             # [B, q, width]
    >>> for _ in range(3):
    ...     for i in range(len(cache)):
    ...         query = key = value = hidden.reshape(1, -1, 2, 4).swapaxes(1, 2)
    ...         keys, values = cache.update(key, value, i)
    ...         hidden = cache.attend(query, i).swapaxes(1, 2).reshape(1, -1, 8)
    ...     hidden = hidden[:, -1:]                                 # the next token
    >>> cache.get_seq_length(), [layer.keys.shape[2] for layer in cache.layers]
    (8, [8, 3])
    """

    _make_layer: Callable[[], Layer] | None = None  # where layers are made on first use

    def __init__(self, layers: Iterable[Layer], *, offload: FilePath | None = None) -> None:
        super().__init__()
        self.layers = list(layers)
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, Layer):
                raise argument_error(f"layers[{i}]", "a layer", describe(layer))
            if any(layer is other for other in self.layers[:i]):
                raise argument_error(f"layers[{i}]", "a layer of its own", "one that is there before")
            layer.name = f"layers[{i}]"
        self._latest: Any = None
        self.folder: Any = None
        if offload is not None:
            self.offload(offload)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} layers: {self.get_seq_length()} tokens>"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"folder": None}  # a copy lies in memory

    # Tokens come

    def update(
        self, key_states: Array, value_states: Array, layer_idx: int, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        """Append to layer ``layer_idx``, see `DynamicLayer.update`.

        A layer without room fails when others have had their tokens; `reserve` asks all of them first.
        """
        with self._lock:
            layer = self._layer(layer_idx)
            states = layer.update(key_states, value_states, cache_position)
            if layer is not self._latest:
                self._change(layer, layer_idx)
            return states

    def _change(self, layer: Layer, layer_idx: int) -> None:
        """Settle the layer that was updated last, as another one follows."""
        if layer_idx == len(self.layers):
            self.layers.append(layer)
            if self.folder is not None:
                self.folder.register(layer_idx, layer)
        if self._latest is not None:
            self._latest.settle()
        self._latest = layer
        if self.folder is not None:
            self.folder.prefetch_after(layer_idx, self.layers)

    @one_call_at_a_time
    def reserve(self, query_length: SupportsIndex) -> None:
        new = integer("query_length", query_length, 0)
        for layer in self.layers:
            layer.check_room(layer.get_seq_length(), new)
        for layer in self.layers:
            layer.reserve(new)

    def _missing(self, number: int) -> Any:
        """Return the next layer, which is not among the layers yet, where they are made on first use."""
        if self._make_layer is None or number > len(self.layers):
            return super()._missing(number)
        layer = self._make_layer()
        layer.name = f"layers[{number}]"
        if self.folder is not None:
            self.folder.lead(number, layer)
        return layer

    # Tokens go, and the batch changes: every layer is checked before the first one changes, and a process
    # that ends leaves files in which all have changed, or none

    @one_call_at_a_time
    def crop(self, length: int) -> None:
        """Drop the last tokens of every layer, see `DynamicLayer.crop`."""
        lengths = [layer.left_by(length) for layer in self.layers]
        if self.folder is not None:
            self.folder.announce(lengths)
        for layer in self.layers:
            layer.crop(length)

    def _select(self, indices: ArrayLike) -> None:
        for layer in self.layers:
            requests.check_rows(indices, layer.batch_size)
        self._change_batch(lambda layer: layer.reorder(indices))

    def _repeat(self, repeats: int) -> None:
        self._change_batch(lambda layer: layer.repeat(repeats))

    def _change_batch(self, change: Callable[[Layer], None]) -> None:
        """Change the batch of every layer; of those in files all at once."""
        if self.folder is not None:
            self.folder.at_once(self.layers, change)
            return
        for layer in self.layers:
            change(layer)

    @one_call_at_a_time
    def reset(self) -> None:
        """Forget every token; see the layers for what stays."""
        if self.folder is not None:
            self.folder.announce("reset")
        for layer in self.layers:
            layer.reset()

    # To files and other forms

    @one_call_at_a_time
    def to_legacy_cache(self) -> tuple[Pair, ...]:
        for layer in self.layers:
            if layer.store is None or layer.span.oldest:
                raise argument_error(layer.name, "all its tokens, for the legacy format", layer)
        return tuple((layer.keys.copy(), layer.values.copy()) for layer in self.layers)

    @one_call_at_a_time
    def save(self, path: FilePath) -> None:
        """Write everything to a .npz file that `load` reads; the old file is whole until the new one is.

        Quantized layers attend to what they have stored from then on, as those of the loaded cache do.
        """
        saving.save(self, path)

    @one_call_at_a_time
    def offload(self, directory: FilePath, only_non_sliding: bool = True, keep: bool = False) -> None:
        """Move keys and values to memory-mapped files, where the system reads and evicts them as it needs.

        Results stay the same, bit for bit. A process that ends at any moment leaves files that `open` reads;
        call `flush` for what must outlive a power cut.

        Parameters
        ----------
        directory : path
            A folder that holds no cache; made if it is not there.
        only_non_sliding : bool
            Whether sliding layers stay in memory, as they are small; until `close` they are not in files.
        keep : bool
            Whether `close` leaves the files.
        """
        if self.folder is not None:
            raise argument_error("directory", "a cache in memory", f"one that is in {self.folder.path}")
        for layer in [*self.layers, *([self._make_layer()] if self._make_layer else [])]:
            layer.describe()  # which one that cannot lie in files refuses
        folder = offload.Folder(directory, only_non_sliding, keep)
        folder.adopt(self.layers)
        self.folder = folder

    @classmethod
    def open(cls, directory: FilePath, keep: bool = True) -> Cache:
        """Open the cache in a folder, where it stays; if a step was cut off, as it was before that step.

        In a step every layer that the model uses gets tokens once. Layers whose lengths differ otherwise keep
        all, and layers without tokens take none from the others; but of a first step that did not reach the
        last layer nothing is left. Warnings say so.

        Files that are cut short or of another layer, cache or time are refused, in a folder that was closed
        changed ones too.
        """
        folder, layers = opening.open_folder(directory, keep)
        cache = Cache(layers)
        cache.folder = folder
        return cache

    @one_call_at_a_time
    def prefetch(self, layer_idx: int) -> None:
        """Start to load an offloaded layer in the background; `update` does so for the next one."""
        offload.prefetch_layer(self._layer(layer_idx))

    @one_call_at_a_time
    def flush(self) -> None:
        """Wait until all offloaded tokens are on the disk."""
        offload.flush_layers(self.layers)

    @one_call_at_a_time
    def close(self) -> None:
        """End offloading: files are deleted, or completed if they are to be kept. Layers are empty then."""
        if self.folder is not None:
            self.folder.close(self.layers)
            self.folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
