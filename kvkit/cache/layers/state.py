"""Define `StateLayer`, whose arrays every token updates: a recurrent state has no rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit.cache.base import one_call_at_a_time
from kvkit.cache.layers import requests
from kvkit.cache.layers.changes import whole
from kvkit.cache.layers.layer import Layer
from kvkit.cache.layers.positions import RopeLike, RowPositions, planner, rotation_of
from kvkit.cache.stores.span import Span
from kvkit.cache.stores.states import NO_STATE, StateForms, StateStore
from kvkit.checks.values import checked_format, integer
from kvkit.errors import argument_error, check_shape, describe
from kvkit.formats import FLOATS
from kvkit.typed import Array, Attended, States

NO_ROWS = np.zeros(0, np.int64)


class StatePlan(NamedTuple):
    """Plans a change of a state, which is checked and not yet done."""

    after: RowPositions  # without rows; its length is the position of the next token
    current: int  # the version that will be the state
    checkpoints: dict[int, int]  # {position of the next token: version}
    crops: bool


class StateLayer(Layer):
    """A layer with a recurrent state, as Mamba, linear attention and convolutions have it.

    The state is a set of arrays [B, ...], which the model names and computes; kvkit only stores them. A state
    cannot lose tokens. It can return to a checkpoint: a copy from the end of an earlier update.

    Parameters
    ----------
    checkpoint_every : int
        The fewest tokens between two checkpoints; 0 keeps none.
    max_checkpoints : int
        How many checkpoints are kept; the oldest is dropped first.

    Attributes
    ----------
    states : dict of str to ndarray
    checkpoints : list of int

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import StateLayer
    >>> layer, total = StateLayer(checkpoint_every=4), np.zeros((1, 2), np.float32)
    >>> for tokens in (4, 4, 3):
    ...     total = total + tokens                                    # a model computes the new state
    ...     states = layer.update({"sum": total}, tokens)
    >>> layer.get_seq_length(), layer.checkpoints
    (11, [4, 8])
    >>> layer.can("remove", 6)
    'StateLayer: expected 0, 4, 8 or 11 tokens to stay, which it has states of, got 6'
    >>> layer.crop(8)
    >>> layer.states["sum"]
    array([[8., 8.]], dtype=float32)
    """

    _has_rows = False
    _an_array = "[*layer.states.values()][0]"
    _reorders_in_place = False
    _why_kept = "a recurrent state holds all tokens"
    _why_not_joined = "a recurrent state, which has no rows (let the model read the tokens after it)"

    def __init__(self, checkpoint_every: int = 0, max_checkpoints: int = 4) -> None:
        self.checkpoint_every = integer("checkpoint_every", checkpoint_every, 0)
        self.max_checkpoints = integer("max_checkpoints", max_checkpoints, 1)
        super().__init__()

    def _describe(self) -> dict[str, Any]:
        return {"checkpoint_every": self.checkpoint_every, "max_checkpoints": self.max_checkpoints}

    # Adding tokens

    @one_call_at_a_time
    @whole
    def update(  # type: ignore[override]  # a state in place of keys and values
        self, states: Mapping[str, Array], tokens: SupportsIndex, cache_position: ArrayLike | None = None
    ) -> dict[str, Array]:
        """Store the state after `tokens` more tokens, and return it.

        Parameters
        ----------
        states : mapping of str to ndarray, shape [B, ...]
            float32, float16 or bfloat16. The first array of a name fixes its dtype and shape. Stored arrays
            that are missing here do not change.
        tokens : int
            How many tokens have updated the state since the last call; 0 replaces the state of the last call.
        cache_position : array_like of int, shape [tokens], optional
            Consecutive positions of the tokens, after the last one.

        Returns
        -------
        dict of str to ndarray
            All stored arrays, see `StateLayer.states`.
        """
        new = integer("tokens", tokens, 0)
        if cache_position is not None:
            self._first_new(cache_position, new)
        forms = self._checked(states)
        if self.store is None or forms != self.store.geometry:
            self._change_store(forms)
        return self._advance(new, states)

    def _checked(self, states: Mapping[str, Array]) -> StateForms:
        """Check new arrays of the state; return the names, shapes and dtypes of all arrays."""
        if not isinstance(states, Mapping) or not states:
            raise argument_error("states", "a dict of arrays by name", describe(states))
        known: dict[str, Any] = {} if self.store is None else dict(self.store.geometry.forms)
        batch = self.batch_size
        for name, array in states.items():
            label = f"states[{name!r}]"
            if not isinstance(name, str) or not name.replace("_", "").replace(".", "").isalnum():
                raise argument_error("states", "names of letters, digits, '_' and '.'", repr(name))
            fmt = checked_format(label, array, FLOATS, np.ndim(array))
            if not array.ndim or not len(array):
                raise argument_error(label, f"shape [{batch or 'B'}, ...]", f"shape {array.shape}")
            batch = batch or len(array)
            shape, dtype = known.setdefault(name, (array.shape[1:], fmt.dtype))
            check_shape(
                label, array, (batch, *shape), ("batch", *(f"axis {i}" for i in range(1, array.ndim)))
            )
            if fmt.dtype != dtype:
                raise argument_error(label, f"an array of {dtype}, as before", describe(array))
        return StateForms(batch, known)

    @one_call_at_a_time
    @whole
    def advance(self, tokens: SupportsIndex) -> dict[str, Array]:
        """Count `tokens`, and return the arrays of the state, which the caller then updates in place.

        If the state is a checkpoint, its arrays are copied first.
        """
        return {} if self.store is None else self._advance(integer("tokens", tokens, 0), {})

    def _advance(self, new: int, states: Mapping[str, Array]) -> dict[str, Array]:
        """Write checked arrays of the state, and count its tokens."""
        store, before = self.store, self.span.length
        version = store.current
        # The present version is overwritten, but no checkpoint of another length.
        kept = {own for position, own in store.checkpoints.items() if position != before + new}
        if version == NO_STATE or version in kept:
            version = store.free()
            if version == NO_STATE:
                self._change_store(store.geometry)
                store = self.store
                version = store.free()
        if version == store.current and states:
            self._overwrites()
        for name, array in store.arrays.items():
            if name in states:
                array[version] = states[name]
            elif version != store.current:
                array[version] = 0 if store.current == NO_STATE else array[store.current]
        length, checkpoints = before + new, dict(store.checkpoints)
        every = 1 if self._record_past else self.checkpoint_every
        if length in checkpoints or (every and length - max(checkpoints, default=0) >= every):
            checkpoints[length] = version
        self._commit_version(state_span(length, before), version, self._trimmed(checkpoints))
        return self.store.arrays_of(version)

    def _trimmed(self, checkpoints: dict[int, int]) -> dict[int, int]:
        """Return the checkpoints that stay: all while the past is recorded, otherwise the latest."""
        if self._record_past or len(checkpoints) <= self.max_checkpoints:
            return checkpoints
        return {position: checkpoints[position] for position in sorted(checkpoints)[-self.max_checkpoints :]}

    def _commit_version(self, span: Span, current: int, checkpoints: dict[int, int]) -> None:
        """Make a version the state."""
        store = self.store
        store.current, store.previous, store.checkpoints = current, store.current, checkpoints
        self.span = span

    def _change_store(self, forms: StateForms, indices: Any = slice(None)) -> None:
        """Move to a store with other arrays, batch rows or room; on an error nothing has changed."""
        before = self.store
        count = 0 if before is None else len(before.checkpoints)
        room = max(count, self.max_checkpoints if self.checkpoint_every else 0)
        room += count if self._record_past else 0  # every update makes a checkpoint: grow as by doubling
        store = StateStore(forms, room + 1, self.allocate)
        if before is not None:
            store.fill(before, indices)
        self._set_store(store, self.span.without_undo() if before else self.span)

    def reserve(self, query_length: SupportsIndex) -> None:
        """Do nothing: a state has no room to run out of."""

    _check_reserve = reserve

    # Sizes and positions

    @property
    def states(self) -> dict[str, Array]:
        """Return the arrays of the state, [B, ...] each; {} before the first token. Do not write to them."""
        return {} if self.store is None else self.store.arrays_of(self.store.current)

    @property
    def checkpoints(self) -> list[int]:
        """Return the lengths that a `crop` can return to, besides 0 and the present one."""
        return [] if self.store is None else sorted(self.store.checkpoints)

    @property
    def keys(self) -> States:
        return None

    values = keys

    @property
    def nbytes(self) -> int:
        return 0 if self.store is None else int(self.store.nbytes)

    def _stored(self) -> tuple[States, States]:
        raise argument_error(self.name, "a layer with keys and values", "a recurrent state")

    def attend(  # type: ignore[override]  # raises: there is nothing to attend to
        self, query: Array, attn_mask: Array | None = None, **options: Any
    ) -> Attended:
        return self._stored()

    # Removing tokens and changing the batch

    @one_call_at_a_time
    @whole
    def crop(self, length: int) -> None:
        """Drop the last tokens. A checkpoint, all tokens or none must remain."""
        left = self._length_after_crop(length)
        if self.store is not None:
            self._return_to(left)

    def _length_after_crop(self, length: int, call: str = "crop") -> int:
        return self._checked_length(requests.length_after_crop(length, self.span.length))

    def _checked_length(self, left: int) -> int:
        """Return a number of tokens to keep; raise unless the layer has the state after them."""
        legal = sorted({0, *self.checkpoints, self.span.length})
        if left not in legal:
            lengths = [str(length) for length in legal]
            wanted = " or ".join([", ".join(lengths[:-1]), lengths[-1]])
            raise argument_error(self.name, f"{wanted} tokens to stay, which it has states of", left)
        return left

    def _return_to(self, left: int) -> None:
        """Return to the state after `left` tokens."""
        store, now = self.store, self.span.length
        current = store.current if left == now else store.checkpoints.get(left, NO_STATE)
        checkpoints = up_to(left, store.checkpoints)
        if self._record_past:  # checkpoints that only the recording has made go
            latest = sorted(checkpoints.items())[-self.max_checkpoints :]
            checkpoints = dict(latest) if self.checkpoint_every else {}
        self._commit_version(state_span(left), current, checkpoints)

    def _plan(  # type: ignore[override]  # a plan without rows
        self, call: str, *arguments: Any, rope: RopeLike = None, **options: Any
    ) -> StatePlan:
        now, store = self.span.length, self.store
        if call == "retain":
            raise argument_error(self.name, "a layer with rows", f"{call} of a recurrent state")
        rows = RowPositions(NO_ROWS, NO_ROWS, now)
        plan = planner(call)(rows, rotation_of(rope, self.rope, None, False), *arguments, **options)
        begin = 0 if call == "flatten" else integer("begin", arguments[0], 0)
        current = NO_STATE if store is None else store.current
        checkpoints = {} if store is None else dict(store.checkpoints)
        if call == "remove" and begin < now:
            end = arguments[1] if len(arguments) > 1 else options.get("end")
            if not plan.crops and (end is None or begin < integer("end", end)):
                wanted = f"the last tokens to go, back to one of {[0, *self.checkpoints]}"
                raise argument_error(self.name, wanted, f"remove of tokens from {begin} on, in the middle")
            left = self._checked_length(plan.after.length)
            current = current if left == now else checkpoints.get(left, NO_STATE)
            checkpoints = up_to(left, checkpoints)
        elif plan.after.length != now:
            if store is None and not now:
                raise argument_error(self.name, "a state", f"{call} of none")
            earlier, delta = up_to(begin, checkpoints), plan.after.length - now
            # Later checkpoints move by `delta`. `divide` drops them: it could give two of them one position.
            later = {} if call == "divide" else {at + delta: v for at, v in checkpoints.items() if at > begin}
            checkpoints = earlier | {at: version for at, version in later.items() if at > begin}
        return StatePlan(plan.after, current, checkpoints, plan.crops)

    @whole
    def _rearrange(self, plan: Any) -> None:
        """Carry out a plan, see `Layer.rearrange`."""
        length = plan.after.length
        if self.store is None:
            self.span = state_span(length)
            return
        if length == self.span.length and plan.current == self.store.current:
            return
        self._commit_version(state_span(length), plan.current, plan.checkpoints)

    def _take_rows(self, indices: Array) -> None:
        if self.store is not None:
            self._change_store(self.store.geometry._replace(batch=len(indices)), indices)

    activate_past_recording = Layer._set_past_recording  # keeps the state after every update as a checkpoint

    # Files

    def _arrays(self) -> dict[str, Array]:
        if not self.states:
            return {}
        versions = [self.store.checkpoints[position] for position in self.checkpoints] + [self.store.current]
        states = {f"states.{name}": array[versions] for name, array in self.store.arrays.items()}
        return {"checkpoints": np.array(self.checkpoints, np.int64)} | states

    def _fill(self, arrays: Mapping[str, Array], length: int) -> None:
        if not arrays:  # all tokens were removed, and the position of the next one was moved
            self.span = state_span(length)
            return
        positions = [int(position) for position in arrays["checkpoints"]]
        states = {name.removeprefix("states."): x for name, x in arrays.items() if name != "checkpoints"}
        ascend = sorted(set(positions)) == positions
        if not ascend or (positions and not 0 <= positions[0] <= positions[-1] <= length):
            raise argument_error("checkpoints", f"ascending positions up to {length}", positions)
        count = len(positions)
        if {len(array) for array in states.values()} != {count + 1}:
            raise argument_error("states", f"{count + 1} versions of each array", describe(states))
        room = 1 + max(count, self.max_checkpoints if self.checkpoint_every else 0)
        forms = self._checked({name: array[0] for name, array in states.items()})
        store = StateStore(forms, room, self.allocate)
        for name, array in states.items():
            store.arrays[name][: len(array)] = array
        store.current = store.previous = count  # `arrays` lists the state after the checkpoints
        store.checkpoints = {position: i for i, position in enumerate(positions)}
        self._set_store(store, state_span(length))

    def _copy_store(self) -> None:
        if self.store is not None:
            self._change_store(self.store.geometry)

    def _large_arrays(self) -> Iterable[Array]:
        return () if self.store is None else self.store.arrays.values()


def state_span(length: int, before: int | None = None) -> Span:
    """Return the span of a state after `length` tokens, which stores no rows."""
    before = length if before is None else before
    return Span(length, oldest=length, begin=length, origin=length, before=before)


def up_to(length: int, checkpoints: Mapping[int, int]) -> dict[int, int]:
    """Return the checkpoints {position of the next token: version} at positions up to `length`."""
    return {position: version for position, version in checkpoints.items() if position <= length}
