"""A step of packed sequences, checked and copied to the device once for all layers of a model."""

from dataclasses import dataclass, field

import numpy as np

from kvkit.checks import index_tensors
from kvkit.checks.arguments import StepArguments
from kvkit.checks.contexts import Contexts, checked_plan
from kvkit.checks.index_tensors import INT64_MAX, Packed
from kvkit.checks.pools import plain_pieces
from kvkit.checks.values import flag, integer
from kvkit.errors import argument_error
from kvkit_cuda.calls import arrays, scan
from kvkit_cuda.calls.prepared import PreparedCalls
from kvkit_cuda.calls.tables import DeviceTables, page_counts
from kvkit_cuda.device_runtime import host


@dataclass(slots=True)
class PlannedStep:
    """A checked step of packed sequences."""

    sequences: index_tensors.Packed
    by_device: dict[int, DeviceTables]  # a device gets its tables when it first needs them
    calls: PreparedCalls = field(default_factory=PreparedCalls)

    @property
    def tables(self):
        """Return the tables of the current device."""
        device = host.current()
        if device not in self.by_device:
            steps, lasting = self.sequences.steps, all(tables.lasting for tables in self.by_device.values())
            self.by_device[device] = DeviceTables(steps._replace(table=np.asarray(steps.table)), lasting)
        return self.by_device[device]

    def of(self, call):
        """Return this step, whose tables all calls read (`PlannedPages` has several)."""
        return self

    def room(self, call):
        """Return how many rows the cache of a call has."""
        return call.layer.capacity[1]

    @property
    def needed(self):
        """Return the rows that the step needs."""
        return self.sequences.steps.rows

    def follow(self, other, stream, named):
        """Become another step of the same form, in the same memory; `named` says that a stream was given."""
        self.check_same(other, named)
        here = host.current()
        for device, tables in self.by_device.items():
            with host.using(device):
                tables.fill(other.sequences.steps, stream if device == here else host.stream(None))
        self.sequences = other.sequences
        return self

    def check_same(self, other, named):
        """Raise unless another step has the form of this one."""
        for name, same in differences(self.sequences, other.sequences):
            if not same:
                raise argument_error("into", f"a plan of the same {name}", "another")
        pages, most = page_counts(other.sequences.steps)
        for tables in self.by_device.values():
            if tables.most_pages < most:
                expected = f"a plan with room for {most} pages a sequence"
                raise argument_error("into", expected, tables.most_pages)
            if tables.room < pages:
                raise argument_error("into", f"a plan with room for {pages} pages", tables.room)
        here = host.current()
        for device, tables in self.by_device.items():
            if tables.captured and device != here:
                wanted = f"a plan whose graph is of device {here}, the current one"
                raise argument_error("into", wanted, device)
            if tables.captured and not named:
                raise argument_error("stream", "the one that replays the plan's graph", None)


class PlannedPages:
    """Checked contexts in pages. Pools with the same distances of pages and rows share tables of row ids."""

    def __init__(self, contexts: Contexts):
        self.sequences, self.calls = contexts, PreparedCalls()
        self.steps: dict[object, PlannedStep] = {}  # by the distances of pages; None: slots of new tokens

    def of(self, call):
        """Return the step whose tables a call reads."""
        context = getattr(call, "context", None)
        distances = None if context is None else (context.pages, context.steps)
        if distances not in self.steps:
            self.steps[distances] = self.step_over(distances)
        return self.steps[distances]

    def step_over(self, distances):
        """Return the step over pools whose pages and rows have these distances."""
        pages, (step, value_step) = distances or ((1, 1), (1, 1))  # of keys and of values
        contexts = self.sequences._replace(table=self.sequences.table.astype(np.int64))
        return PlannedStep(Packed(contexts.steps(pages, 0, same_rows=step == value_step), 0), {})

    def room(self, call):
        """Return how many pages the pools of a call have."""
        return call.blocks

    @property
    def needed(self):
        """Return the pages that pools need."""
        return self.sequences.blocks

    def follow(self, other, stream, named):
        """Become other contexts of the same form, in the same memory; `named`: a stream was given."""
        if not np.array_equal(self.sequences.starts, other.sequences.starts):
            raise argument_error("into", "a plan of the same query_starts", "another")
        if None in self.steps:
            plain_pieces(int(other.sequences.starts[-1]), INT64_MAX, other.sequences.new_slots())
        others = {distances: other.step_over(distances) for distances in self.steps}
        for distances, step in self.steps.items():
            step.check_same(others[distances], named)
        for distances, step in self.steps.items():
            step.follow(others[distances], stream, named)
        self.sequences = other.sequences
        return self


def differences(one, other):
    """Yield (name, whether equal) for each property of two steps that captured launches depend on."""
    here, there = one.steps, other.steps
    yield "seqstarts", np.array_equal(here.seqstarts, there.seqstarts)
    yield "page_size and cache_mode", here.page_size == there.page_size
    yield "decoding_batches", one.decoding == other.decoding


def earlier_of(into, kind):
    """Return the step of an earlier plan, None without one."""
    earlier = getattr(into, "step", None)
    if into is not None and not isinstance(earlier, kind):
        expected = "a plan of kvkit_cuda, or None"
        raise argument_error("into", expected, type(into).__name__)
    return earlier


def planned_pages(block_tables, context_lens, query_starts, page_size, into, stream, *, named=False):
    """Return the checked `PlannedPages` of a plan; with `into`, an earlier plan takes them over."""
    earlier = earlier_of(into, PlannedPages)
    given = {"block_tables": block_tables, "context_lens": context_lens, "query_starts": query_starts}
    read = {name: arrays.on_host(name, tensor, stream) for name, tensor in given.items()}
    step = PlannedPages(checked_plan(**read, page_size=page_size))
    return step if earlier is None else earlier.follow(step, stream, named)


def planned(arguments: StepArguments, stream, *, named=False, check=True, into=None, tokens=None):
    """Return the `PlannedStep` of a plan or, with `tokens` (name, array), of one call.

    With `into`, an earlier plan takes the step over.
    """
    checked, lasting = flag("check", check), tokens is None
    earlier = earlier_of(into, PlannedStep)
    table = arrays.operand("cachestarts", arguments.cachestarts, stream)
    # A page table on the device is copied and checked there.
    stays = table.on_device and table.seen.ndim == 2 and table.seen.size > 0 and into is None
    arguments = arguments._replace(
        seqstarts=arrays.on_host("seqstarts", arguments.seqstarts, stream),
        kvstarts=arrays.on_host("kvstarts", arguments.kvstarts, stream),
        start_pos=arrays.on_host("start_pos", arguments.start_pos, stream),
        decoding_batches=arrays.on_host("decoding_batches", arguments.decoding_batches, stream),
        cachestarts=table.seen if stays else table.read(stream),
    )
    read_table = index_tensors.index_form if stays else index_tensors.index
    step = index_tensors.read_step(tokens, arguments, read_table)
    if stays:
        tables = scan.device_tables(step, checked, stream, lasting)
    else:
        tables = DeviceTables(index_tensors.check_step(step) if checked else step, lasting)
    decoding = integer("decoding_batches", arguments.decoding_batches, 0, len(step.start_pos))
    planned_step = PlannedStep(index_tensors.Packed(tables.steps, decoding), {host.current(): tables})
    return planned_step if earlier is None else earlier.follow(planned_step, stream, named)
