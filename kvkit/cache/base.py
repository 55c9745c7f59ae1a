"""What every layer and every cache does, wherever its tokens lie: all that a caller needs to know of them."""

from abc import ABC, abstractmethod

from kvkit.check import integer, wrong


class BaseLayer(ABC):
    """Keys and values of one attention layer.

    Attributes
    ----------
    window : int or None
        How many tokens a query sees, itself included; None for all.
    takes_window : bool
        Whether `attend` takes the window of a call.
    croppable : bool
        Whether tokens can be dropped one after the other, down to the first that is recorded.
    record_past : bool
        Whether what would be dropped, or coded, is kept until the next crop.
    """

    window: int | None = None
    takes_window = False
    croppable = True
    record_past = False

    @abstractmethod
    def update(self, key_states, value_states, cache_position=None):
        """Append the keys and values of new tokens; return those that their attention needs."""

    @abstractmethod
    def attend(self, query, attention_mask=None, **options):
        """Attend with the queries of the last tokens."""

    @abstractmethod
    def get_seq_length(self):
        """Tokens seen."""

    def get_max_length(self):
        """The most tokens that the layer holds; -1 for no limit."""
        return -1

    def get_mask_sizes(self, query_length):
        """(kv_length, kv_offset): how many keys the next update returns, and the position of the first."""
        begin, end = self._returned(self.get_seq_length(), integer("query_length", query_length, 0))
        return end - begin, begin

    def _returned(self, length, new):
        """The positions [begin, end) that an update of `new` tokens after `length` returns."""
        return 0, length + new

    @property
    @abstractmethod
    def batch_size(self):
        """B, rows of the batch; 0 before the first update."""

    @property
    def keys(self):
        """Stored keys, shape [B, Hkv, stored, Dk]; None before the first update."""
        return self._stored()[0] if self.batch_size else None

    @property
    def values(self):
        """Stored values, shape [B, Hkv, stored, Dv]; None before the first update."""
        return self._stored()[1] if self.batch_size else None

    @abstractmethod
    def _stored(self):
        """Stored keys and values."""

    @property
    def nbytes(self):
        """Bytes of what is stored, without room to grow."""
        return sum(side.nbytes for side in self._stored()) if self.batch_size else 0

    def activate_past_recording(self):  # noqa: B027  most layers have nothing to do
        """From now on keep what would be dropped or coded until the next crop; elsewhere nothing is."""


class BaseCache(ABC):
    """The keys and values of a model: `layers`, each a `BaseLayer`."""

    layers: list

    def __len__(self):
        return len(self.layers)

    # Tokens come

    @abstractmethod
    def update(self, key_states, value_states, layer_idx, cache_position=None):
        """Append to layer ``layer_idx``."""

    def attend(self, query, layer_idx, attention_mask=None, **options):
        """Attend to layer ``layer_idx``, see the ``attend`` of layers.

        Of a call longer than its window a sliding layer gives the first tokens up as soon as another layer
        is updated; until then every query of the call can attend.
        """
        return self._layer(layer_idx).attend(query, attention_mask, **options)

    @abstractmethod
    def reserve(self, query_length):
        """Check, and make, room for so many more tokens in every layer: their updates cannot fail for it."""

    def _layer(self, layer_idx):
        """A layer by its number."""
        number = integer("layer_idx", layer_idx, 0)
        return self.layers[number] if number < len(self.layers) else self._missing(number)

    def _missing(self, number):
        """The layer of a number that there is not."""
        raise wrong("layer_idx", f"a layer of {len(self.layers)}", number)

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

    # Tokens go, and the batch changes

    @abstractmethod
    def crop(self, length):
        """Drop the last tokens of every layer: keep ``length``, or if negative drop so many; 0 drops none."""

    def reorder(self, indices):
        """Let row b of the batch become what row ``indices[b]`` was; there may be any number of indices."""
        self._select(indices)

    select = reorder_cache = batch_select_indices = reorder

    @abstractmethod
    def _select(self, indices):
        """What `reorder` does."""

    def repeat(self, repeats):
        """Repeat every row of the batch: rows A, B become A, A, B, B."""
        self._repeat(integer("repeats", repeats, 1))

    batch_repeat_interleave = repeat

    @abstractmethod
    def _repeat(self, repeats):
        """What `repeat` does."""

    @abstractmethod
    def reset(self):
        """Forget every token."""

    def activate_past_recording(self):
        """Let layers keep what would leave their window until the next `crop`, which may then go back."""
        for layer in self.layers:
            layer.activate_past_recording()

    # To other forms

    @abstractmethod
    def to_legacy_cache(self):
        """A tuple over layers of (keys, values), copies of shape [B, Hkv, n, D]."""
