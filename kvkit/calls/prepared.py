"""Turn checked calls into launches, and run prepared calls again for other arrays.

Calls of one form differ only in the addresses of their arrays: calls for the layers of a model in one step,
or for one layer in successive steps. The first call is checked and prepared in full; the others only replace
addresses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from kvkit import cpu
from kvkit.checks.arguments import KeyAttention
from kvkit.checks.attention import AttentionCall, checked_attention
from kvkit.checks.key_value_cache import TransferCall
from kvkit.checks.records import NO_MASK, MaskPlace, StepIndex
from kvkit.runtime import repeats
from kvkit.runtime.arrays import address, addresses_of, empty_result, overlap_distances
from kvkit.runtime.locks import BUSY
from kvkit.runtime.repeats import Program
from kvkit.typed import Array, Arrays, Attended

MOST_CALLS = 4096  # prepared calls of a `PreparedCalls`
MOST_ATTENTIONS = 64  # forms of attention to keys that are remembered
KEYS = "query", "key", "value", "out"  # the arrays of attention to keys
MOST_NOTES = 4  # times that a call says what runs it again
UNKNOWN = object()  # the version of a launch while its work is divided anew
Prepared = TypeVar("Prepared")
# Types whose values never change. A tensor of one integer can change, and stays equal to itself.
CONSTANT = frozenset({type(None), bool, int, float, str, tuple, *np.sctypeDict.values()})
Form = tuple[object, ...]  # all that calls must have in common to share a prepared call


def transfer_launches(call: TransferCall, key: Array, value: Array) -> tuple[Any, Any]:
    """Return the launches of a checked call of `key_value_cache`."""
    prepare, place = cpu.copy.transfer.prepare_transfer, (call.layer, call.steps)
    store = prepare("store", call.current_key, call.current_value, *place)
    return store, prepare("load", key, value, *place, call.repeat)


def attend(call: AttentionCall, out: Array | Arrays | None) -> Attended:
    """Attend, after an append if the call has a cache, and return the results as operators do."""
    results = call.results.arrays(out)
    cpu.launches.start(*attention_launches(call, results))
    return one_or_all(results)


def attention_launches(call: AttentionCall, results: Sequence[Array]) -> tuple[Any, ...]:
    """Return the launches of a checked call of attention."""
    named = dict(zip(call.results.forms, results, strict=True))
    attend = cpu.attention.prepare.prepare_attention(
        call.query, named["attn_output"], named.get("lse"), call.context, call.steps, call.decoding,
        call.weights, key_weights=named.get("key_weights"),
    )  # fmt: skip
    if call.layer is None:
        return (attend,)
    key, value = call.current
    store = cpu.copy.transfer.prepare_transfer("store", key, value, call.layer, call.steps)
    return store, attend


def one_or_all(results: tuple[Array, ...]) -> Attended:
    """Return the only result, or a tuple of several."""
    return results if len(results) > 1 else results[0]


def form_of(arrays: Iterable[Any], attributes: Iterable[object]) -> Form | None:
    """Return the form of a call: dtypes, shapes, strides, attributes; None if calls cannot be compared by it.

    They cannot if an argument is not an array, or if an attribute may change its value and stay equal, as a
    tensor does. A form has the types of attributes too, because True == 1 == 1.0 but not all three are legal.
    For the same reason callers also pass the members of tuples.
    """
    try:
        shapes = [
            None if array is None else (type(array), array.shape, array.strides, array.dtype)
            for array in arrays
        ]
    except AttributeError:
        return None
    types = [*map(type, attributes)]
    constant = CONSTANT.issuperset(types) or all(
        kind in CONSTANT or (is_dataclass(kind) and kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
        for kind in types
    )
    return (*shapes, *attributes, *types) if constant else None


def is_pair(out: object) -> bool:
    """Return whether outputs are two arrays."""
    return isinstance(out, (tuple, list)) and len(out) == 2 and all(isinstance(a, np.ndarray) for a in out)


def is_unaligned(out: Iterable[Array] | None) -> bool | None:
    """Return whether an address is no multiple of 16, so that code without non-temporal stores is needed."""
    return None if out is None else any(place % 16 for place in addresses_of(out))


class PreparedCalls(dict[Any, Prepared], Generic[Prepared]):
    """Prepared calls by form. When there are `most` of them, all are dropped."""

    def __init__(self, most: int = MOST_CALLS) -> None:
        super().__init__()
        self.most = most

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return PreparedCalls, (self.most,)  # a copy is empty, because prepared calls hold addresses

    def find(self, form: Form | None) -> Prepared | None:
        """Return the prepared call of a form, None if there is none."""
        try:
            return self.get(form)
        except TypeError:  # an attribute cannot be hashed
            return None

    def take(self, form: Form | None) -> Prepared | None:
        """Remove and return the prepared call of a form, so that no other thread runs it meanwhile."""
        try:
            return self.pop(form, None)
        except TypeError:
            return None

    def keep(self, form: Form | None, prepared: Prepared) -> None:
        """Keep a prepared call for the next call of its form, unless the form is None or cannot be hashed."""
        if form is None:
            return
        if len(self) >= self.most:
            self.clear()
        try:
            self[form] = prepared
        except TypeError:
            return


STORES: list[PreparedCalls[Any]] = []  # of operators' calls


def store_of_operators(most: int) -> PreparedCalls[Any]:
    """Return a store of operators' calls, which `forget_all` clears."""
    STORES.append(PreparedCalls(most))
    return STORES[-1]


def forget_all() -> None:
    """Forget every call of an operator, so that the next one is checked and prepared."""
    for store in STORES:
        store.clear()
    for remembered in [*repeats.KNOWN]:
        remembered.forget()


class FollowedStep:
    """Keeps the index tensors of a call and what was checked of them, and follows later calls of its form.

    `numbers` are copies of the tensors. `words` are int64: the version, -1 while the step changes, so that
    nothing that was remembered for it runs, and what else `run_again` compares.
    """

    __slots__ = ("numbers", "words")
    numbers: Sequence[Array]
    words: Array

    def follow(self, tensors: Sequence[Array], *call: Any) -> bool:
        """Become the step of other index tensors of the same form; return False if they may break a rule."""
        if all(map(same_bytes, self.numbers, tensors)):  # layers of a model have the same tensors
            return True
        version = self.begin_change()
        for numbers, tensor in zip(self.numbers, tensors, strict=True):
            np.copyto(numbers, tensor)  # another thread may change the caller's tensors after the check
        if not self._check_numbers(*call):
            return False
        self.words[0] = version
        return True

    def begin_change(self) -> int:
        """Stop the calls that were remembered for the step, and return its next version."""
        version = int(self.words[0]) + 1
        self.words[0] = -1
        return version

    def _check_numbers(self, *call: Any) -> bool:
        """Check `numbers`, and write what kernels read of them; return False if they may break a rule."""
        raise NotImplementedError


def same_bytes(one: Array, other: Array) -> bool:
    """Return whether two arrays of one form have equal bytes."""
    return one.tobytes() == other.tobytes()


class Refit(NamedTuple):
    """Lists all that changes between runs of prepared attention, but for the addresses of its arrays."""

    version: object = None  # of the lengths; another one divides the work anew
    lengths: Any = None  # of each of the `growing` contexts; or an array, where all contexts begin
    pages: Array | None = None  # the page tables [contexts, pages]
    row: int | None = None  # the first row, for `begin_at`
    query: Array | None = None  # for `load_query`
    mask: MaskPlace = NO_MASK


class PreparedCall:
    """A checked call whose launches can run again with arrays at other addresses.

    `arrays` has arrays, or their addresses, by their names in launches; `run` takes arrays in the same order.
    `run` checks that the last `written` arrays are writeable and do not overlap others, unless their distance
    is that of the first call, as for views of one pool. If this is not certain, it returns False, and the
    call needs the full checks. A cache has `room` rows, and `step` has the version and the rows of its step.

    `attention` is a launch that follows a `Refit`. It was prepared for the `first` one, by default for the
    version of `step`, and for index tensors `steps`, whose last `growing` contexts have one length.
    `begin_at` makes the params read from another row, and `load_query` writes a query to where the launch
    reads it.
    """

    __slots__ = (
        "_addresses", "_attention", "_begin_at", "_distances", "_ends", "_first", "_launches", "_load_query",
        "_mask", "_notes", "_row", "_step", "_steps", "_version", "_written", "names", "room",
    )  # fmt: skip

    def __init__(
        self,
        launches: Sequence[Any],
        arrays: Mapping[str, Array | int | None],
        written: int = 0,
        *,
        room: int = 0,
        step: Array | None = None,
        attention: Any = None,
        first: Refit | None = None,
        steps: StepIndex | None = None,
        growing: int = 0,
        begin_at: Callable[[Array, int], None] | None = None,
        load_query: Callable[[Array], object] | None = None,
    ) -> None:
        self._launches, self._attention, self._steps = launches, attention, steps
        self._begin_at, self._load_query, self._step, self._notes = begin_at, load_query, step, 0
        self.room, self._mask, self._row = room, NO_MASK, None
        self._version: object = None if step is None else int(step[0])
        if first is not None:
            self._version, self._mask, self._row = first.version, first.mask, first.row
        # Where the growing contexts end, behind their begin
        self._ends = steps.kvstarts[-growing - 1 :].data if steps and growing else memoryview(b"")
        # The present arrays, by name: their numbers; and their addresses, for which the call was checked
        self.names = {name: i for i, name in enumerate(arrays) if arrays[name] is not None}
        self._first = [
            address(each) if isinstance(each, np.ndarray) else each or 0 for each in arrays.values()
        ]
        self._written = [i for i in self.names.values() if i >= len(arrays) - written]
        # Most forms never come a second time, so `run` finds what `overlap_distances` says of the arrays, and
        # `run_at` where launches hold an address: (params, index, the number of its array, the offset in it).
        self._distances: list[tuple[int, int, int, int, int]] | None = None if written else []
        self._addresses: list[tuple[Any, int, int, int]] | None = None

    def run(self, arrays: Sequence[Any], refit: Refit | None = None) -> bool:
        """Run the call for other arrays of its form; return False if it needs the full checks."""
        places = addresses_of(arrays)
        for i in self._written:
            if not arrays[i].flags.writeable:
                return False
        if self._distances is None:
            present = {i: array for i, array in enumerate(arrays) if array is not None}
            self._distances = overlap_distances(present, self._first, self._written)
        for one, other, least, most, checked in self._distances:
            distance = places[other] - places[one]
            if least < distance < most and distance != checked:
                return False
        if not self.run_at(places, refit):
            return False
        if repeats.notes.programs is not None and self._notes < MOST_NOTES and not self._begin_at:
            self._notes += 1
            program = self.program()
            if program is not None:
                repeats.note(program, arrays)
        return True

    def program(self) -> Program | None:
        """Return what runs the call again without Python; None if several threads or Python have a part."""
        if self._load_query or self._mask.address:
            return None
        kernels = [launch.single and launch.single() for launch in self._launches]
        if None in kernels:
            return None
        addresses = [(address(params) + 8 * at, i, offset) for params, at, i, offset in self._addresses or []]
        version, room = 0 if self._step is None else int(self._step[0]), self.room if self._attention else -1
        return Program(kernels, addresses, self._distances or [], self._step, version, room, self._launches)

    def run_at(self, places: Sequence[int], refit: Refit | None = None) -> bool:
        """Run the call for arrays at these addresses, which are not checked.

        If attention needs another launch for `refit`, nothing runs and the result is False.
        """
        with cpu.launches.running:
            try:
                BUSY[0] = 1
                if self._addresses is None:
                    self._addresses = self._find_addresses()
                if refit is not None and not self._fits(refit):
                    return False
                for params, at, i, offset in self._addresses:
                    params[at] = places[i] + offset
                for launch in self._launches:
                    launch.run()
            finally:
                BUSY[0] = 0
        return True

    def _find_addresses(self) -> list[tuple[Any, int, int, int]]:
        """Return where launches, as they were prepared, hold addresses of the arrays."""
        return [
            (launch.params, at, self.names[owner], launch.params.item(at) - self._first[self.names[owner]])
            for launch in self._launches
            for at, owner in launch.owners.items()
            if owner in self.names and launch.params.item(at)
        ]

    @property
    def has_mask(self) -> bool:
        """Return whether the launch has a mask."""
        return bool(self._mask.address)

    def move(self, length: int, row: int) -> None:
        """Write the contexts' length and first row into the launch, whose work must be divided anew."""
        self._version = UNKNOWN
        self._grow(length)
        if row != self._row and self._begin_at:
            self._begin_at(self._attention.params, row)
            self._row = row

    def _fits(self, refit: Refit) -> bool:
        """Write what is new into the launch of attention; return False if it needs another launch."""
        launch = self._attention
        if refit.version != self._version:
            self._version = UNKNOWN
            if not self._set_lengths(refit) or not launch.reschedule():
                return False
            self._version = refit.version
        if refit.row is not None and self._begin_at:
            self._begin_at(launch.params, refit.row)
            self._row = refit.row
        if refit.query is not None and self._load_query:
            self._load_query(refit.query)
        if refit.mask != self._mask:
            cpu.attention.prepare.set_mask(launch.params, refit.mask)
            self._mask = refit.mask
        return True

    def _set_lengths(self, refit: Refit) -> bool:
        """Write lengths and page tables into the index tensors; return False if the tables have no room."""
        if self._steps is None:  # the step has written them
            return True
        table, kvstarts = self._steps.table, self._steps.kvstarts
        if refit.pages is not None:
            if refit.pages.shape[1] > table.shape[1]:
                return False
            table[:, : refit.pages.shape[1]] = refit.pages
        if isinstance(refit.lengths, int):
            self._grow(refit.lengths)
        else:
            np.copyto(kvstarts, refit.lengths)
        return True

    def _grow(self, length: int) -> None:
        """Write the length of the growing contexts into the index tensors."""
        ends = self._ends  # numpy's own operations take longer for few
        for i in range(1, len(ends)):
            ends[i] = ends[0] + i * length


attentions: PreparedCalls[PreparedCall] = store_of_operators(MOST_ATTENTIONS)


def attend_to_keys(call: KeyAttention, out: Array | Arrays | None) -> Attended:
    """Run `multi_head_attention` for sequences of one length; calls of one form are checked once.

    Calls with a mask or sinks, or that return more than the output, are checked each time.
    """
    arrays, scoring, form = (call.query, call.key, call.value), call.scoring, None
    if (
        scoring.attn_mask is None
        and scoring.sinks is None
        and call.return_lse is call.return_key_weights is False
        and type(scoring.window) is tuple
    ):
        attributes = *call.heads, *scoring, *scoring.window
        form = form_of((*arrays, out), attributes)
    prepared = attentions.take(form)  # no other call finds it while this one lasts
    if prepared:
        shape = *call.query.shape[:-1], call.value.shape[-1]
        result: Any = empty_result(shape, call.query.dtype) if out is None else out
        if prepared.run((*arrays, result)):
            attentions.keep(form, prepared)
            return result
    checked = checked_attention(call)
    results = checked.results.arrays(out)
    launches = attention_launches(checked, results)
    cpu.launches.start(*launches)
    if form and all(map(operator.is_, arrays, dict(checked.results.inputs).values())):
        launches[0].owners = cpu.attention.params.KEY_OWNERS
        named = dict(zip(KEYS, (*arrays, results[0]), strict=True))
        attentions.keep(form, PreparedCall(launches, named, 1))
    return one_or_all(results)
