"""A step of packed sequences in a cache, and the operators over it, prepared once for calls of one form.

Calls that bring their own index tensors have such a step too: each takes the place of the last of its form.
"""

from dataclasses import replace

import numpy as np

from kvkit import checks, cpu, launch
from kvkit.checks import validation
from kvkit.checks.attention import checked_cache_attention
from kvkit.checks.index_tensors import INT64_MAX
from kvkit.checks.key_value_cache import checked_key_value_cache
from kvkit.checks.sequences import INDEX, in_cache
from kvkit.repeats import Guarded, Repeats, form

# The arrays of calls that repeat, by the names that launches have for them; what is written comes last.
LOADED = "current_key", "current_value", "cache", "scale", "key", "value"
ATTENDED = "query", "current_key", "current_value", "cache", "scale", "out"
TENSORS = "seqstarts", "kvstarts", "cachestarts", "start_pos"
OTHERS = (*(name for name in INDEX if name not in TENSORS), "decoding_batches")
FEW = 64  # forms of steps that are remembered, and of calls for each


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
        for ours, given in zip(kept, tensors, strict=True):
            np.copyto(ours.reshape(given.shape), given)
        if steps.seqstarts[0] or steps.kvstarts[0] or steps.seqstarts[-1] != tokens:
            return False
        steps = steps._replace(tokens=tokens, context=int(steps.kvstarts[-1]))
        rule, rows, _, _ = checks.scan.scan(steps, INT64_MAX)
        if rule:
            return False
        if steps.context != self._sequences.steps.context:  # of which a load's launch is made
            self._loaded.clear()
        self._sequences = replace(self._sequences, steps=steps._replace(rows=rows))
        self._number += 1
        return True

    def load(self, given, out):
        """`key_value_cache` of arguments by name."""
        arrays, known = tuple([given[name] for name in LOADED[:4]]), None
        if out is None or is_pair(out):
            known = form((*arrays, *(out or ())), (*given.values(), unaligned(out))[len(arrays) :])
        prepared = self._loaded.get(known)
        if prepared and prepared.room >= self._sequences.steps.rows:
            made = out
            if out is None:
                key, tokens = arrays[0], self._sequences.steps.context
                shape = tokens, key.shape[1] * given["num_repeat"], key.shape[2]
                made = np.empty(shape, key.dtype), np.empty(shape, key.dtype)
            if prepared.run(dict(zip(LOADED, (*arrays, *made), strict=True))):
                return made[0], made[1]
        call = checked_key_value_cache(self._sequences, **given)
        made = call.results.taken(out)
        launches = launch.transfers(call, made, new=out is None)
        cpu.launches.start(*launches)
        if known and call.current_key is arrays[0] and call.current_value is arrays[1]:
            repeated = dict(zip(LOADED, (*arrays, *made), strict=True))
            self._loaded.keep(known, Guarded(launches, repeated, LOADED[2:], call.layer.capacity[1]))
        return made

    def attend(self, given, out):
        """`multi_head_cache_attention`, likewise; calls with a mask or sinks are checked each time."""
        arrays, known = tuple([given[name] for name in ATTENDED[:5]]), None
        if given["attn_mask"] is None and given["sinks"] is None and given["return_lse"] is False:
            known = form((*arrays, out), tuple(given.values())[len(arrays) :])
        prepared = self._attended.get(known)
        if prepared and prepared.room >= self._sequences.steps.rows:
            made = np.empty(arrays[0].shape, arrays[0].dtype) if out is None else out
            if prepared.run(dict(zip(ATTENDED, (*arrays, made), strict=True)), self._number):
                return made
        call = checked_cache_attention(self._sequences, **given)
        made = call.results.taken(out)
        launches = launch.attention(call, made)
        cpu.launches.start(*launches)
        if known and all(a is b for a, b in zip(arrays, (call.query, *call.current), strict=False)):
            repeated = dict(zip(ATTENDED, (*arrays, made[0]), strict=True))
            room, attention = call.layer.capacity[1], launches[-1].numbers
            guarded = Guarded(launches, repeated, ATTENDED[3:], room, attention, self._number)
            self._attended.keep(known, guarded)
        return launch.returned(made)


def is_pair(out):
    """Whether outputs are two arrays."""
    return isinstance(out, (tuple, list)) and len(out) == 2 and all(isinstance(a, np.ndarray) for a in out)


def unaligned(out):
    """Whether given outputs lie where a load may not write around the caches, which takes other code."""
    return None if out is None else any(cpu.launches.address(array) % 16 for array in out)


steps = Repeats(FEW)  # by their form; a call takes its own away as long as it lasts


def key_value_cache(given, out):
    return over_own_step("current_key", given, out, Step.load)


def multi_head_cache_attention(given, out):
    return over_own_step("query", given, out, Step.attend)


def over_own_step(name, given, out, operator):
    """An operator whose arguments have index tensors among them; `name` has the tokens."""
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
