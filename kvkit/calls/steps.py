"""Run operators over caches by steps of sequences, prepared once for calls of one form.

A call without a plan gets a step too: it takes the step of the latest call whose index tensors had the same
form, and brings it up to date.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np

from kvkit import checks, cpu
from kvkit.calls.prepared import (
    FollowedStep,
    Form,
    PreparedCall,
    PreparedCalls,
    Refit,
    attention_launches,
    form_of,
    is_pair,
    is_unaligned,
    store_of_operators,
    transfer_launches,
)
from kvkit.checks import index_tensors
from kvkit.checks.arguments import CacheAttention, CacheTransfer, StepArguments
from kvkit.checks.attention import checked_cache_attention
from kvkit.checks.index_tensors import (
    INT64_MAX,
    Packed,
    Sequences,
    Static,
    packed_in_cache,
    static_step,
)
from kvkit.checks.key_value_cache import checked_key_value_cache
from kvkit.checks.records import StepIndex
from kvkit.checks.values import integer
from kvkit.runtime import repeats
from kvkit.runtime.arrays import address, empty_result
from kvkit.typed import Array, Attended, Pair

LOADS, ATTENDS = 4, 3  # how many arrays loads and attention write: the cache, its scale, the outputs
MOST = 64  # forms of steps that are remembered, and of calls for each
FAR = 2**40  # no cache has so many positions


class PlannedStep(FollowedStep):
    """Checked sequences. Calls that differ only in the addresses of their arrays are checked once.

    `words` are the version, the rows that the step needs, and where sequences of one length begin.
    """

    __slots__ = ("_calls", "_sequences")

    def __init__(self, sequences: Sequences, *most: int, numbers: Sequence[Array] = ()) -> None:
        self._sequences, steps = sequences, sequences.steps
        self._calls: PreparedCalls[PreparedCall] = PreparedCalls(*most)
        self.numbers = numbers
        # Without steps, sequences are not checked yet.
        self.words = np.array([0, steps.rows, int(sequences.start_pos)] if steps else [0, 0, 0])

    def _become(self, sequences: Sequences, steps: StepIndex) -> None:
        """Take over checked sequences with these steps."""
        self._sequences = sequences
        self.words[1:] = steps.rows, int(sequences.start_pos)

    @property
    def sequences(self) -> Sequences:
        """Return the checked sequences."""
        return self._sequences

    def _check_numbers(self, tokens: int) -> bool:
        steps = self._sequences.steps
        if steps is None:
            return False
        read_by_kernels = steps.seqstarts, steps.kvstarts, steps.table, steps.start_pos
        for array, numbers in zip(read_by_kernels, self.numbers, strict=True):
            np.copyto(array.reshape(numbers.shape), numbers)
        if steps.seqstarts[0] or steps.kvstarts[0] or steps.seqstarts[-1] != tokens:
            return False
        steps = steps._replace(tokens=tokens, context=int(steps.kvstarts[-1]))
        rule, rows, _, _ = checks.scan.scan_step(steps, INT64_MAX)
        if not rule:
            steps = steps._replace(rows=rows)
            self._become(Packed(steps, self._sequences.decoding), steps)
        return not rule

    def begin_at(self, start: int) -> None:
        """Become the step whose sequences of one length begin at another position."""
        sequences, steps = self._sequences, self._sequences.steps
        if isinstance(sequences, Static) and steps is not None and start != sequences.start_pos:
            batch, rows = len(steps.start_pos), steps.rows + start - int(sequences.start_pos)
            version = self.begin_change()
            np.multiply(np.arange(batch + 1), rows, out=steps.kvstarts)
            steps.start_pos.fill(start)
            steps = steps._replace(context=batch * rows, rows=rows)
            self._become(Static(start, steps), steps)
            self.words[0] = version

    def load(self, call: CacheTransfer, out: Pair | None) -> Pair:
        """Run `key_value_cache`."""
        arrays = call.current_key, call.current_value, call.cache, call.scale
        form, steps = None, self._sequences.steps
        if steps is not None and (out is None or is_pair(out)):
            # A launch has as many workers as its first context needs, so longer contexts need another launch.
            context = steps.context.bit_length() if out is None else steps.context
            attributes = *call.place, call.num_repeat, context, is_unaligned(out)
            form = form_of((*arrays, *(out or ())), attributes)
        prepared = self._calls.find(form)
        if prepared and steps and prepared.room >= steps.rows:
            if out is None:
                *_, heads, dim = call.current_key.shape
                shape = *self._sequences.context_axes(steps), heads * call.num_repeat, dim
                dtype = call.current_key.dtype
                results = empty_result(shape, dtype), empty_result(shape, dtype)
            else:
                results = out
            if prepared.run((*arrays, *results)):
                return results[0], results[1]
        checked = checked_key_value_cache(call, self._sequences)
        key, value = checked.results.arrays(out)
        launches = transfer_launches(checked, key, value)
        cpu.launches.start(*launches)
        if form and checked.current_key is call.current_key and checked.current_value is call.current_value:
            names = "current_key", "current_value", "cache", "scale", "key", "value"
            repeated = dict(zip(names, (*arrays, key, value), strict=True))
            room = checked.layer.capacity[1]
            self._calls.keep(form, PreparedCall(launches, repeated, LOADS, room=room, step=self.words))
        return key, value

    def attend(self, call: CacheAttention, out: Array | Pair | None) -> Attended:
        """Run `multi_head_cache_attention`; calls with a mask or sinks are checked each time."""
        arrays = call.query, call.current_key, call.current_value, call.cache, call.scale
        form, steps, scoring = None, self._sequences.steps, call.scoring
        plain = scoring.attn_mask is None and scoring.sinks is None and call.return_lse is False
        if plain and steps is not None and type(scoring.window) is tuple:
            attributes = *call.place, *call.heads, *scoring, *scoring.window
            form = form_of((*arrays, out), attributes)
        prepared = self._calls.find(form)
        if prepared and steps and prepared.room >= steps.rows:
            result: Any = empty_result(call.query.shape, call.query.dtype) if out is None else out
            if prepared.run((*arrays, result), Refit(int(self.words[0]))):
                return result
        checked = checked_cache_attention(call, self._sequences)
        results = checked.results.arrays(out)
        launches = attention_launches(checked, results)
        cpu.launches.start(*launches)
        if form and checked.layer and all(map(operator.is_, arrays, (checked.query, *checked.current))):
            names = "query", "current_key", "current_value", "cache", "scale", "out"
            repeated, room = dict(zip(names, (*arrays, results[0]), strict=True)), checked.layer.capacity[1]
            attention = launches[-1]
            prepared = PreparedCall(
                launches, repeated, ATTENDS, room=room, step=self.words, attention=attention
            )
            self._calls.keep(form, prepared)
        return results if len(results) > 1 else results[0]


# A running call takes its step out, so that no other thread uses it.
planned_steps: PreparedCalls[PlannedStep] = store_of_operators(MOST)


def run_in_cache(where: SupportsIndex | StepArguments, call: CacheTransfer | CacheAttention, out: Any) -> Any:
    """Run `key_value_cache` or `multi_head_cache_attention` from a position on, or for packed sequences."""
    name, tokens = call._fields[0], call[0]  # the queries, or the keys
    if isinstance(where, StepArguments):
        tensors: Any = where.seqstarts, where.kvstarts, where.cachestarts, where.start_pos
        limits = where.max_seqlen, where.max_kvlen, where.cache_mode, where.page_size
        form, step = form_of(tensors, (name, where.decoding_batches, *limits)), None
        if isinstance(tokens, np.ndarray) and not index_tensors.VALIDATES:
            step = planned_steps.take(form)
        tensors = tensors if form else ()
        if step is None or not step.follow(tensors, len(tokens)):
            # What is checked is what later calls are compared with, even if the tensors change meanwhile;
            # the check refuses None.
            own: list[Any] = [tensor if tensor is None else tensor.copy() for tensor in tensors]
            where = where._replace(**dict(zip(StepArguments._fields, own, strict=False)))
            step = PlannedStep(packed_in_cache((name, tokens), where), MOST, numbers=own)
        repeats.note_tensors(tensors, step.numbers)
    else:
        step, form = take_static(where, tokens)
    results = step.attend(call, out) if isinstance(call, CacheAttention) else step.load(call, out)
    planned_steps.keep(form, step)
    return results


def take_static(start_pos: SupportsIndex, tokens: Array) -> tuple[PlannedStep, Form | None]:
    """Return the step of new tokens [B, S, ..] from position `start_pos` on, and its form."""
    if not isinstance(tokens, np.ndarray) or tokens.ndim != Static.axes:
        return PlannedStep(Static(start_pos), MOST), None
    start = integer("start_pos", start_pos, 0)
    if start >= FAR:
        return PlannedStep(Static(start), MOST), None
    batch, count, *_ = tokens.shape
    form = batch, count
    step = planned_steps.take(form)
    if step is None:
        return PlannedStep(Static(start, static_step(batch, count, start + count)), MOST), form
    step.begin_at(start)
    repeats.note_number("start_pos", address(step.words) + 16)
    return step, form
