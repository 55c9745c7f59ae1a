"""A cache: the layers of a model."""

from kvkit.cache import offload, saved
from kvkit.cache.layers import requests as layer_checks
from kvkit.cache.layers.layer import Layer
from kvkit.check import describe, integer, wrong


class Cache:
    """The keys and values of a model, layer by layer.

    Parameters
    ----------
    layers : iterable of layers
        One for each attention layer.
    offload : path, optional
        As `offload` called at once.

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

    _make_layer = None  # () -> a layer, where layers are made on first use

    def __init__(self, layers, *, offload=None):
        self.layers = list(layers)
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, Layer):
                raise wrong(f"layers[{i}]", "a layer", describe(layer))
            if any(layer is other for other in self.layers[:i]):
                raise wrong(f"layers[{i}]", "a layer of its own", "one that is there before")
            layer.name = f"layers[{i}]"
        self._latest = self._folder = None
        if offload is not None:
            self.offload(offload)

    def __len__(self):
        return len(self.layers)

    def __repr__(self):
        return f"<{type(self).__name__} of {len(self)} layers: {self.get_seq_length()} tokens>"

    # Tokens come

    def update(self, key_states, value_states, layer_idx, cache_position=None):
        """Append to layer ``layer_idx``, see `DynamicLayer.update`.

        A layer without room fails when others have had their tokens; `reserve` asks all of them first.
        """
        layer = self._layer(layer_idx)
        states = layer.update(key_states, value_states, cache_position)
        if layer is not self._latest:
            self._change(layer, layer_idx)
        return states

    def _change(self, layer, layer_idx):
        """Turn from the layer that was updated last to another one."""
        if layer_idx == len(self.layers):
            self.layers.append(layer)
            if self._folder is not None:
                self._folder.register(layer_idx, layer)
        if self._latest is not None:
            self._latest._settle()
        self._latest = layer
        if self._folder is not None:
            self._folder.prefetch_after(layer_idx, self.layers)

    def attend(self, query, layer_idx, attention_mask=None, **options):
        """Attend to layer ``layer_idx``, see `DynamicLayer.attend`.

        Of a call longer than its window a sliding layer gives the first tokens up as soon as another layer
        is updated; until then every query of the call can attend.
        """
        return self._layer(layer_idx).attend(query, attention_mask, **options)

    def reserve(self, query_length):
        """Check, and make, room for so many more tokens in every layer: their updates cannot fail for it."""
        new = integer("query_length", query_length, 0)
        for layer in self.layers:
            layer._check_room(layer._length, new)
        for layer in self.layers:
            layer.reserve(new)

    def _layer(self, layer_idx):
        """A layer by its number; a new one, which is not among the layers yet, where that is the next."""
        number = integer("layer_idx", layer_idx, 0)
        if number < len(self.layers):
            return self.layers[number]
        if self._make_layer is None or number > len(self.layers):
            raise wrong("layer_idx", f"a layer of {len(self.layers)}", number)
        layer = self._make_layer()
        layer.name = f"layers[{number}]"
        if self._folder is not None:
            self._folder.lead(number, layer)
        return layer

    # What is there

    def get_seq_length(self, layer_idx=0):
        """Tokens that a layer has seen; 0 if there is no such layer."""
        number = integer("layer_idx", layer_idx, 0)
        return self.layers[number].get_seq_length() if number < len(self.layers) else 0

    def get_max_length(self, layer_idx=None):
        """The most tokens that a layer holds, -1 for no limit; of the cache, that of its largest layer."""
        if layer_idx is not None:
            return self._layer(layer_idx).get_max_length()
        lengths = [layer.get_max_length() for layer in self.layers]
        return -1 if -1 in lengths else max(lengths, default=-1)

    def get_mask_sizes(self, query_length, layer_idx):
        """(kv_length, kv_offset) of what the next update of so many tokens returns; to be asked before it."""
        return self._layer(layer_idx).get_mask_sizes(query_length)

    # Tokens go, and the batch changes: every layer is checked before the first one changes, and a process
    # that ends leaves files in which all have changed, or none

    def crop(self, length):
        """Drop the last tokens of every layer, see `DynamicLayer.crop`."""
        lengths = [layer_checks.cropped(layer, length) for layer in self.layers]
        if self._folder is not None:
            self._folder.announce(lengths)
        for layer in self.layers:
            layer.crop(length)

    def reorder(self, indices):
        """Let row b of the batch become what row ``indices[b]`` was; there may be any number of indices."""
        for layer in self.layers:
            layer_checks.rows(layer, indices)
        self._change_batch(lambda layer: layer.reorder(indices))

    select = reorder_cache = batch_select_indices = reorder

    def repeat(self, repeats):
        """Repeat every row of the batch: rows A, B become A, A, B, B."""
        repeats = integer("repeats", repeats, 1)
        self._change_batch(lambda layer: layer.repeat(repeats))

    batch_repeat_interleave = repeat

    def _change_batch(self, change):
        """Change the batch of every layer; of those in files all together."""
        if self._folder is not None:
            self._folder.at_once(self.layers, change)
            return
        for layer in self.layers:
            change(layer)

    def reset(self):
        """Forget every token; see the layers for what stays."""
        if self._folder is not None:
            self._folder.announce("reset")
        for layer in self.layers:
            layer.reset()

    def activate_past_recording(self):
        """Let sliding layers keep what leaves their window until the next `crop`, which may then go back."""
        for layer in self.layers:
            layer.activate_past_recording()

    # To files and other forms

    def to_legacy_cache(self):
        """A tuple over layers of (keys, values), copies of shape [B, Hkv, n, D]."""
        for layer in self.layers:
            if layer._store is None or layer._oldest:
                raise wrong(layer.name, "all its tokens, for the legacy format", layer)
        return tuple((layer.keys.copy(), layer.values.copy()) for layer in self.layers)

    def save(self, path):
        """Write everything to a .npz file that `load` reads; the old file is whole until the new one is.

        Quantized layers attend to what they have stored from then on, as those of the loaded cache do.
        """
        saved.save(self, path)

    def offload(self, directory, only_non_sliding=True, keep=False):
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
        if self._folder is not None:
            raise wrong("directory", "a cache in memory", f"one that is in {self._folder.path}")
        folder = offload.Folder(directory, only_non_sliding, keep)
        folder.adopt(self.layers)
        self._folder = folder

    @classmethod
    def open(cls, directory, keep=True):
        """The cache in a folder, where it stays; if it was cut off in a step, as it was before that step.

        In a step every layer that the model uses gets tokens once. Layers whose lengths differ otherwise keep
        all, and layers without tokens take none from the others; but of a first step that did not reach the
        last layer nothing is left. Warnings say so.
        """
        folder, layers = offload.opened(directory, keep)
        cache = Cache(layers)
        cache._folder = folder
        return cache

    def prefetch(self, layer_idx):
        """Start to load an offloaded layer in the background; `update` does so for the next one."""
        offload.prefetch(self._layer(layer_idx))

    def flush(self):
        """Wait until all offloaded tokens are on the disk."""
        offload.flush(self.layers)

    def close(self):
        """End offloading: files are deleted, or completed if they are to be kept. Layers are empty then."""
        if self._folder is not None:
            self._folder.close(self.layers)
            self._folder = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
