"""A step of packed sequences, checked and copied to the device once for all layers of a model."""

from dataclasses import dataclass, field

import numpy as np

from kvkit.checks import index_tensors
from kvkit.checks.arguments import StepArguments
from kvkit.checks.values import flag, packed_tokens
from kvkit.errors import argument_error
from kvkit_cuda.calls import arrays, scan
from kvkit_cuda.calls.prepared import PreparedCalls
from kvkit_cuda.calls.tables import Tables
from kvkit_cuda.device_runtime import host


@dataclass(slots=True)
class PlannedStep:
    """A checked step with its tables by device. A device gets them when they are first needed there."""

    sequences: index_tensors.Packed
    on: dict[int, Tables]
    calls: PreparedCalls = field(default_factory=PreparedCalls)

    @property
    def tables(self):
        """Return the tables of the current device."""
        device = host.current()
        if device not in self.on:
            steps, lasting = self.sequences.steps, next(iter(self.on.values())).lasting
            self.on[device] = Tables(steps._replace(table=np.asarray(steps.table)), lasting)
        return self.on[device]

    def follow(self, other, stream, named):
        """Become another step of the same form, in the same memory. `named` tells that a stream was given."""
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
    """Yield (name, whether equal) for everything that captured launches depend on."""
    here, there = one.steps, other.steps
    yield "seqstarts", np.array_equal(here.seqstarts, there.seqstarts)
    yield "page_size and cache_mode", here.page_size == there.page_size
    yield "decoding_batches", one.decoding == other.decoding


def planned(arguments: StepArguments, stream, *, named=False, check=True, into=None, tokens=None):
    """Return a `PlannedStep` for a plan, or, with `tokens` (name, array), for one call.

    With `into`, an earlier plan, the step takes the place of the earlier one.
    """
    wanted, lasting = flag("check", check), tokens is None
    earlier = getattr(into, "step", None)
    if into is not None and not isinstance(earlier, PlannedStep):
        raise argument_error("into", "a plan of kvkit_cuda, or None", type(into).__name__)
    table = arrays.operand("cachestarts", arguments.cachestarts, stream)
    stays = table.on_device and table.seen.ndim == 2 and table.seen.size > 0 and into is None
    arguments = arguments._replace(
        seqstarts=arrays.on_host("seqstarts", arguments.seqstarts, stream),
        kvstarts=arrays.on_host("kvstarts", arguments.kvstarts, stream),
        start_pos=arrays.on_host("start_pos", arguments.start_pos, stream),
        decoding_batches=arrays.on_host("decoding_batches", arguments.decoding_batches, stream),
        cachestarts=table.seen if stays else table.read(stream),
    )
    read_table = index_tensors.index_form if stays else index_tensors.index
    step = index_tensors.read_step(tokens and packed_tokens(*tokens), arguments, read_table)
    if stays:
        tables = scan.device_tables(step, wanted, stream, lasting)
    else:
        tables = Tables(index_tensors.check_step(step) if wanted else step, lasting)
    decoding = index_tensors.decoding_count(arguments.decoding_batches, step)
    made = PlannedStep(index_tensors.Packed(tables.steps, decoding), {host.current(): tables})
    return made if earlier is None else earlier.follow(made, stream, named)
