"""What every layer does: tokens come and go, the batch changes."""

from typing import Any

import numpy as np

from kvkit.cache.layers import requests as layer_checks
from kvkit.cache.layers.attention import attend
from kvkit.cache.stores.mapped import MappedStore
from kvkit.cache.stores.memory import Store, geometry
from kvkit.checks.values import integer
from kvkit.checks.words import wrong


class Layer:
    """Keys and values of one attention layer.

    `_length` tokens have been seen; those from position `_oldest` on are stored, and those from `_begin` on,
    which the last update returned, can be attended to. Position p lies in row ``p - _origin`` of the store.
    Before the last update there were `_before` tokens; that can still be taken back, unless these are all.
    """

    _store: Any
    window: int | None = None  # how many tokens a query sees, itself included
    record_past = False
    _in_memory: Any = Store
    _in_files: Any = MappedStore

    def __init__(self):
        self.name = type(self).__name__
        self._new_store = self._in_memory
        self._empty()

    def _empty(self):
        self._store = self._call = None
        self._length = self._oldest = self._begin = self._origin = self._before = 0

    def __repr__(self):
        held = "" if self._store is None else f", {self._store.geometry}"
        return f"<{self.name}: {self._length} tokens{held}>"

    def __getstate__(self):
        return self.__dict__ | {"_call": None}  # it knows addresses, which a copy does not have

    # What kinds differ in

    def _span(self, length, new):
        """The positions [begin, end) that an update of `new` tokens after `length` returns."""
        return 0, length + new

    def _stored_from(self, length):
        """The oldest position that is stored when `length` tokens have been seen."""
        return 0

    def _croppable_to(self, length):
        """The newest position that may be the oldest one when a crop leaves `length` tokens."""
        return 0

    def _check_room(self, length, new):
        """Raise if the layer can never hold so many tokens."""

    def _capacity(self, rows):
        """Rows of a new store that has to hold so many."""
        return max(rows, 2 * self._store.capacity if self._store else 0)

    # Tokens come

    def update(self, key_states, value_states, cache_position=None):
        """Append the keys and values of new tokens; return those that their attention needs.

        Parameters
        ----------
        key_states : ndarray, shape [B, Hkv, q, Dk]
            float32, float16 or bfloat16, of any strides. The first call decides on dtype, B, Hkv, Dk and Dv.
        value_states : ndarray, shape [B, Hkv, q, Dv]
            Of the same dtype.
        cache_position : array_like of int, shape [q], optional
            Consecutive positions of the new tokens; they follow the last token. Only a `StaticLayer` may
            also go back: then later tokens are dropped.

        Returns
        -------
        keys : ndarray, shape [B, Hkv, S, Dk]
        values : ndarray, shape [B, Hkv, S, Dv]
            Past and new tokens, see `get_mask_sizes`. Views of the cache: not to be written, and valid until
            the next call that changes the layer.

        Raises
        ------
        KvkitError
            If an argument is wrong.
        CapacityError
            If there is no room. After any error the layer is as it was.
        """
        frozen = None if self._store is None else self._store.geometry
        given, new = geometry(key_states, value_states, frozen), key_states.shape[2]
        start = self._length
        if cache_position is not None:
            start = layer_checks.first_position(self, cache_position, new)
        self._check_room(start, new)
        begin, end = self._span(start, new)
        self._make_room(given, max(end, start + new), self._oldest)
        if start < self._length:
            key_states, value_states = (self._apart(states) for states in (key_states, value_states))
            self._shorten(start)
        self._store.write(start - self._origin, key_states, value_states)
        self._length, self._begin, self._before = start + new, begin, start
        if not self.record_past:
            self._oldest = max(self._oldest, self._stored_from(self._length))
        self._commit()
        return self._store.rows(begin - self._origin, end - self._origin)

    def _may_start(self, start):
        """Whether new tokens may begin at another position than the next."""
        return False

    def _apart(self, states):
        """New tokens, copied if they are views of what they take the place of."""
        shared = any(np.may_share_memory(states, side) for side in (self._store.keys, self._store.values))
        return states.copy() if shared else states

    def _make_room(self, given, end, keep):
        """Have rows for all positions before `end`, and those from `keep` on in them."""
        if self._store is None or end - self._origin > self._store.capacity:
            self._move(given, self._capacity(end - keep), keep)

    def _move(self, given, capacity, keep, indices=None):
        """Take another store, for the same tokens from `keep` on; nothing has happened if this fails."""
        store = self._new_store(given, capacity)
        before = self._store, self._call, self._origin, self._begin, self._before
        try:
            if self._store is not None:
                indices = range(given.batch) if indices is None else indices
                store.fill(self._store, indices, keep - self._origin, self._length - self._origin)
            if keep > self._begin:
                self._begin, self._before = keep, self._length
            self._store, self._call, self._origin = store, None, keep
            self._commit()
        except BaseException:
            self._store, self._call, self._origin, self._begin, self._before = before
            store.close()
            raise

    def _commit(self):
        """Let the state count, also where it lies in a file."""
        if self._store is not None:
            self._store.commit(self)
        elif self._new_store is not self._in_memory:
            self._new_store.say_empty(record_past=self.record_past)

    def reserve(self, query_length):
        """Check, and make, room for so many more tokens, so that no update of them can fail for capacity."""
        new = integer("query_length", query_length, 0)
        self._check_room(self._length, new)
        if self._store is not None:
            end = max(self._length + new, self._span(self._length, new)[1])
            self._make_room(self._store.geometry, end, min(self._oldest, self._begin))

    def _settle(self):
        """Let go of memory that only the last update needed."""

    # What is there

    def get_seq_length(self):
        """Tokens seen."""
        return self._length

    def get_max_length(self):
        """The most tokens that the layer holds; -1 for no limit."""
        return -1

    def get_mask_sizes(self, query_length):
        """(kv_length, kv_offset): how many keys the next update returns, and the position of the first."""
        begin, end = self._span(self._length, integer("query_length", query_length, 0))
        return end - begin, begin

    @property
    def batch_size(self):
        """B, rows of the batch; 0 before the first update."""
        return 0 if self._store is None else self._store.geometry.batch

    @property
    def keys(self):
        """Stored keys, shape [B, Hkv, stored, Dk]: a view; None before the first update."""
        return None if self._store is None else self._stored()[0]

    @property
    def values(self):
        """Stored values, shape [B, Hkv, stored, Dv]: a view; None before the first update."""
        return None if self._store is None else self._stored()[1]

    def _stored(self):
        return self._store.rows(self._oldest - self._origin, self._length - self._origin)

    # To files, and back

    def _arrays(self):
        """What a file holds of it, by name."""
        return {} if self._store is None else {"keys": self.keys, "values": self.values}

    def _fill(self, arrays, length):
        """Hold what `_arrays` gave when so many tokens had been seen; a KvkitError if that cannot be."""
        keys, values = arrays["keys"], arrays["values"]
        self._check_room(0, length)
        stored = keys.shape[2]
        oldest = length - stored
        if not 0 <= oldest <= self._croppable_to(length):
            raise wrong(self.name, f"the last tokens of {length}, all that a next one sees", stored)
        store = self._new_store(geometry(keys, values, None), self._capacity(stored))
        store.write(0, keys, values)
        self._store, self._length, self._before = store, length, length
        self._oldest = self._begin = self._origin = oldest

    attend = attend

    # Tokens go, and the batch changes

    def crop(self, length):
        """Drop the last tokens.

        Parameters
        ----------
        length : int
            Positive: tokens to keep, nothing happens if there are no more. Negative: tokens to drop. 0 drops
            none; recorded past is trimmed in any case.

        Raises
        ------
        KvkitError
            If there are fewer tokens than are to be dropped.
        RuntimeError
            If a sliding window would need tokens that are no longer stored.
        """
        length = layer_checks.cropped(self, length)
        self._oldest = max(self._oldest, self._stored_from(length))
        self._begin = min(self._begin, self._oldest)
        self._shorten(length)

    def _shorten(self, length):
        """Forget the tokens from `length` on; the shorter state counts before any row changes."""
        self._length, self._begin, self._before = length, min(self._begin, length), length
        if self._store is not None:
            self._commit()

    def _take_back(self, length):
        """Be as before the latest update, when there were so many tokens."""
        self._oldest = min(self._oldest, self._begin)
        self.crop(length - self._length)

    def reorder(self, indices):
        """Let row b of the batch become what row ``indices[b]`` was; there may be any number of indices."""
        self._take(layer_checks.rows(self, indices))

    select = reorder_cache = batch_select_indices = reorder

    def repeat(self, repeats):
        """Repeat every row of the batch: rows A, B become A, A, B, B."""
        repeats = integer("repeats", repeats, 1)
        if self._store is not None:
            self._take(np.repeat(np.arange(self._store.geometry.batch), repeats))

    batch_repeat_interleave = repeat

    def _take(self, indices):
        if self._store is None:
            return
        first, given = min(self._oldest, self._begin), self._store.geometry
        if len(indices) == given.batch and self._store.in_place:
            self._store.take(indices, first - self._origin, self._length - self._origin)
        else:
            self._before = self._length
            self._move(given._replace(batch=len(indices)), self._store.capacity, first, indices)

    def reset(self):
        """Forget everything, geometry included."""
        self.record_past = False
        if self._store is None:
            self._commit()
        else:
            self._store.close()
        self._empty()

    def activate_past_recording(self):
        """From now on keep what a sliding window would drop, until the next `crop`; elsewhere nothing is."""

    def _record_past(self, recording=True):
        """What `activate_past_recording` does in a layer that drops something, or the opposite."""
        before, self.record_past = self.record_past, recording
        try:
            self._commit()
        except BaseException:
            self.record_past = before
            raise
