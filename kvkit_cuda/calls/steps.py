"""A step of packed sequences on the device, checked and copied there once for all layers of a model."""

from dataclasses import dataclass, field

import numpy as np

from kvkit.checks import index_tensors, sequences
from kvkit.checks.tensors import packed_tokens
from kvkit.checks.values import flag
from kvkit.errors import argument_error
from kvkit_cuda.calls import arrays, scan
from kvkit_cuda.calls.repeats import Repeats
from kvkit_cuda.calls.tables import Tables
from kvkit_cuda.device_runtime import host


@dataclass(slots=True)
class Step:
    """A checked step, whose tables are on a device, or wait to go there; others get them when they ask."""

    sequences: sequences.Packed
    on: dict[int, Tables]
    repeats: Repeats = field(default_factory=Repeats)

    @property
    def tables(self):
        """Those of the current device."""
        device = host.current()
        if device not in self.on:
            steps, lasting = self.sequences.steps, next(iter(self.on.values())).lasting
            self.on[device] = Tables(steps._replace(table=np.asarray(steps.table)), lasting)
        return self.on[device]

    def follow(self, other, stream, named):
        """Become another step of the same form, in the same places, on a stream that was `named` or not."""
        for name, same in differences(self.sequences, other.sequences):
            if not same:
                raise argument_error("into", f"a plan of the same {name}", "another")
        room, wanted = (step.sequences.steps.table.shape for step in (self, other))
        if room[1] < wanted[1]:
            raise argument_error("into", f"a plan with room for {wanted[1]} pages a sequence", room[1])
        here = host.current()
        for device, tables in self.on.items():
            if tables.captured and device != here:
                raise argument_error(
                    "into", f"a plan whose graph is of device {here}, the current one", device
                )
            if tables.captured and not named:
                raise argument_error("stream", "the one that replays the plan's graph", None)
        for device, tables in self.on.items():
            with host.using(device):
                tables.fill(other.sequences.steps, stream if device == here else host.stream(None))
        self.sequences = other.sequences
        return self


def differences(one, other):
    """(what it is, whether it is the same) of all that launches may have been captured with."""
    here, there = one.steps, other.steps
    yield "seqstarts", np.array_equal(here.seqstarts, there.seqstarts)
    yield "page_size and cache_mode", here.page_size == there.page_size
    yield "decoding_batches", one.decoding == other.decoding


def planned(
    seqstarts,
    kvstarts,
    cachestarts,
    start_pos,
    decoding_batches=0,
    *,
    max_seqlen,
    max_kvlen,
    cache_mode,
    page_size,
    stream,
    named=False,
    check=True,
    into=None,
    tokens=None,
):
    """A `Step` that lasts, or one for (name, array) of packed tokens; checked if `check` says so.

    One that goes `into` another, given as its plan, takes the place of that.
    """
    wanted, lasting = flag("check", check), tokens is None
    earlier = getattr(into, "step", None)
    if into is not None and not isinstance(earlier, Step):
        raise argument_error("into", "a plan of kvkit_cuda, or None", type(into).__name__)
    table = arrays.operand("cachestarts", cachestarts, stream)
    stays = table.on_device and table.seen.ndim == 2 and table.seen.size > 0 and into is None
    vectors = {"seqstarts": seqstarts, "kvstarts": kvstarts, "start_pos": start_pos}
    step = index_tensors.unchecked(
        tokens and packed_tokens(*tokens),
        **{name: arrays.on_host(name, index, stream) for name, index in vectors.items()},
        cachestarts=table.seen if stays else table.read(stream),
        max_seqlen=max_seqlen,
        max_kvlen=max_kvlen,
        cache_mode=cache_mode,
        page_size=page_size,
        take=index_tensors.of_form if stays else index_tensors.index,
    )
    if stays:
        tables = scan.taken(step, wanted, stream, lasting)
    else:
        tables = Tables(index_tensors.checked(step) if wanted else step, lasting)
    decoding = arrays.on_host("decoding_batches", decoding_batches, stream)
    packed = sequences.Packed(tables.steps, sequences.decoding(decoding, step))
    made = Step(packed, {host.current(): tables})
    return made if earlier is None else earlier.follow(made, stream, named)
