"""Steps of sequences in a cache, and the operators over them, prepared once for calls of one form.

Calls that bring their own index tensors, or none, have such a step too: each takes the place of the last of
its form.
"""

import numpy as np

from kvkit import checks, cpu
from kvkit.calls import launch
from kvkit.calls.repeats import Guarded, Repeats, form, is_pair, members, unaligned
from kvkit.checks import validation
from kvkit.checks.attention import checked_cache_attention
from kvkit.checks.index_tensors import INT64_MAX, equal
from kvkit.checks.key_value_cache import checked_key_value_cache
from kvkit.checks.sequences import INDEX, Packed, Static, in_cache
from kvkit.checks.values import integer
from kvkit.runtime import result_pool

# The arrays of calls that repeat, by the names that launches have for them; what is written comes last.
LOADED = "current_key", "current_value", "cache", "scale", "key", "value"
ATTENDED = "query", "current_key", "current_value", "cache", "scale", "out"
LOADS, ATTENDS = 4, 3  # arrays that are written
TENSORS = "seqstarts", "kvstarts", "cachestarts", "start_pos"
OTHERS = (*(name for name in INDEX if name not in TENSORS), "decoding_batches")
FEW = 64  # forms of steps that are remembered, and of calls for each
FAR = 2**40  # positions that no cache has


class Step:
    """Checked sequences. Calls that differ only in the addresses of their arrays are checked once."""

    __slots__ = ("_attended", "_loaded", "_number", "_sequences")

    def __init__(self, sequences, *most):
        self._sequences, self._number = sequences, 0
        self._loaded, self._attended = Repeats(*most), Repeats(*most)

    @property
    def sequences(self):
        """What was checked."""
        return self._sequences

    def follows(self, tokens, tensors):
        """Take the place of the last step, for index tensors of its form; False if they break a rule."""
        steps = self._sequences.steps
        kept = steps.seqstarts, steps.kvstarts, steps.table, steps.start_pos
        pairs = [*zip(kept, tensors, strict=True)]
        # Layers of a model come with the same tensors.
        if tokens == steps.tokens and all(ours.tobytes() == given.tobytes() for ours, given in pairs):
            return True
        for ours, given in pairs:
            np.copyto(ours.reshape(given.shape), given)
        if steps.seqstarts[0] or steps.kvstarts[0] or steps.seqstarts[-1] != tokens:
            return False
        steps = steps._replace(tokens=tokens, context=int(steps.kvstarts[-1]))
        rule, rows, _, _ = checks.scan.scan(steps, INT64_MAX)
        if rule:
            return False
        self._sequences = Packed(steps._replace(rows=rows), self._sequences.decoding)
        self._number += 1
        return True

    def begins_at(self, start):
        """Likewise, for sequences of one length from another position on."""
        last, steps = self._sequences.start_pos, self._sequences.steps
        if start != last:
            batch, rows = len(steps.start_pos), steps.rows + start - last
            np.multiply(np.arange(batch + 1), rows, out=steps.kvstarts)
            steps.start_pos.fill(start)
            self._sequences = Static(start, steps._replace(context=batch * rows, rows=rows))
            self._number += 1

    def load(self, given, out):
        """`key_value_cache` of arguments by name."""
        arrays, known, steps = tuple([given[name] for name in LOADED[:4]]), None, self._sequences.steps
        if steps is not None and (out is None or is_pair(out)):
            # A launch has as many workers as its first context needs: longer ones have others.
            context = steps.context.bit_length() if out is None else steps.context
            attributes = *tuple(given.values())[len(arrays) :], context, unaligned(out)
            known = form((*arrays, *(out or ())), attributes)
        prepared = self._loaded.get(known)
        if prepared and prepared.room >= steps.rows:
            made = out
            if out is None:
                *_, heads, dim = arrays[0].shape
                shape = *self._sequences.contexts(steps), heads * given["num_repeat"], dim
                made = result_pool.empty(shape, arrays[0].dtype), result_pool.empty(shape, arrays[0].dtype)
            if prepared.run((*arrays, *made)):
                return made[0], made[1]
        call = checked_key_value_cache(self._sequences, **given)
        made = call.results.taken(out)
        launches = launch.transfers(call, made)
        cpu.launches.start(*launches)
        if known and call.current_key is arrays[0] and call.current_value is arrays[1]:
            repeated = dict(zip(LOADED, (*arrays, *made), strict=True))
            self._loaded.keep(known, Guarded(launches, repeated, LOADS, call.layer.capacity[1]))
        return made

    def attend(self, given, out):
        """`multi_head_cache_attention`, likewise; calls with a mask or sinks are checked each time."""
        arrays, known, steps = tuple([given[name] for name in ATTENDED[:5]]), None, self._sequences.steps
        plain = given["attn_mask"] is None and given["sinks"] is None and given["return_lse"] is False
        if plain and steps is not None:
            attributes = *tuple(given.values())[len(arrays) :], *members(given["window"])
            known = form((*arrays, out), attributes)
        prepared = self._attended.get(known)
        if prepared and prepared.room >= steps.rows:
            made = result_pool.empty(arrays[0].shape, arrays[0].dtype) if out is None else out
            if prepared.run((*arrays, made), self._number):
                return made
        call = checked_cache_attention(self._sequences, **given)
        made = call.results.taken(out)
        launches = launch.attention(call, made)
        cpu.launches.start(*launches)
        if known and all(a is b for a, b in zip(arrays, (call.query, *call.current), strict=False)):
            repeated = dict(zip(ATTENDED, (*arrays, made[0]), strict=True))
            room, attention = call.layer.capacity[1], launches[-1].numbers
            guarded = Guarded(launches, repeated, ATTENDS, room, attention, self._number)
            self._attended.keep(known, guarded)
        return launch.returned(made)


steps = Repeats(FEW)  # by their form; a call takes its own away as long as it lasts


def over_packed(name, given, out, operator):
    """An operator of `Step` whose arguments have index tensors among them; `name` has the tokens."""
    tensors, tokens = [given[each] for each in TENSORS], given[name]
    known = form(tensors, (name, *[given.get(each) for each in OTHERS]))
    step = steps.pop(known, None)
    fresh = step is None or validation.asked() or not isinstance(tokens, np.ndarray)
    if fresh or not step.follows(len(tokens), tensors):
        step = Step(in_cache(name, given), FEW)
    else:
        for each in (*TENSORS, *OTHERS):
            given.pop(each, None)
    made = operator(step, given, out)
    if known is not None:
        steps.keep(known, step)
    return made


def over_static(name, given, out, operator):
    """Likewise of sequences of one length, from a position on."""
    tokens, start, known = given[name], given.pop("start_pos"), None
    if isinstance(tokens, np.ndarray) and tokens.ndim == Static.axes:
        start = integer("start_pos", start, 0)
        known = tokens.shape[:2] if start < FAR else None
    step = steps.pop(known, None)
    if step is not None:
        step.begins_at(start)
    else:
        made = None if known is None else equal(known[0], known[1], start + known[1])
        step = Step(Static(start, made), FEW)
    made = operator(step, given, out)
    if known is not None:
        steps.keep(known, step)
    return made
