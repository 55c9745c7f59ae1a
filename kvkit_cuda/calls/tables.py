"""Keep the int64 tables of a step on the device: its index tensors, and tables derived for attention."""

from typing import Any, NamedTuple

import numpy as np

from kvkit.checks.contexts import Contexts
from kvkit.checks.records import StepIndex
from kvkit.errors import argument_error
from kvkit.formulas.index import visible_range
from kvkit.runtime import locks
from kvkit_cuda.device_runtime import host
from kvkit_cuda.positions.alibi import slope_bits

STEP_TENSORS = ("seqstarts", "kvstarts", "start_pos", "load_starts", "table")
ITEM = 4  # words of a work item in `Work.placed`
SEQUENCE_BITS = 27  # bits of half a word that hold a sequence; the bits above hold its last row
MOST_SPLITS = 1024  # of a call, if its kernel takes as many
LEAST_SPLIT = 256  # tokens of the shortest split


class DeviceTables:
    """The tables of a step by name, which are copied to a device once, in one transfer.

    Lasting tables serve calls on any stream, others only the stream that they were copied on. Another step of
    the same form can overwrite them. Several threads may use them.
    """

    def __init__(self, steps, lasting, **given: object):
        self.steps, self.lasting = steps, lasting
        self.given = frozenset(given)  # names of tables that the caller has on the device
        names = STEP_TENSORS if steps.value_table is None else (*STEP_TENSORS, "value_table")
        self.waiting: list = [name for name in names if name not in given]  # for the next copy
        self.on_device: dict[Any, object] = dict(given)
        self.copies: list[tuple[object, list]] = []  # (memory, names of the tables in it)
        self.works: dict[object, Any] = {}  # objects that compute tables, by key
        # pages in all, and of a sequence, that tables may have
        self.room, self.most_pages = page_counts(steps)
        if lasting and steps.table_starts is not None:
            self.room = self.most_pages = 2 * self.room + len(steps.kvstarts)  # later steps have longer lists
        self.written: Any = None  # the stream that wrote the tables, by key
        self.ready: set[int] = set()  # streams that have waited for that stream, by key
        self.users: dict[int, object] = {}  # streams that may read the present tables, by key
        self.captured = False  # whether a graph may read them
        self.lock = locks.CallLock()

    def contents(self, name):
        """Return a table on the host, by its name, or by (attribute, key) of an object in `works`."""
        if isinstance(name, str):
            table = getattr(self.steps, name)
            if name not in ("table", "value_table"):
                return table
            begins, (count, _) = page_begins(self.steps), page_counts(self.steps)
            return np.concatenate([begins, table.reshape(-1)[:count], np.zeros(self.room - count, np.int64)])
        kind, key = name
        return slope_bits(key) if kind == "slopes" else getattr(self.works[key], kind)

    def of(self, names, stream):
        """Return tables on the device; tables that are not there yet are copied together."""
        with self.lock:
            self.follow(stream)
            if not all(name in self.on_device for name in names):
                if host.capturing(stream):
                    raise unprepared()
                arrays = [self.contents(name) for name in self.waiting]
                memory = host.upload(host.concatenate(arrays), stream)
                self.copies.append((memory, self.waiting))
                self.on_device |= dict(zip(self.waiting, host.split(memory, arrays), strict=True))
                self.waiting = []
                self.write(stream)
            return [self.on_device[name] for name in names]

    def follow(self, stream):
        """Let a stream wait for the copies. A captured stream does so when its graph is replayed."""
        if host.capturing(stream):
            self.captured = True
            return
        key = host.stream_key(host.stream_address(stream))
        if key not in self.ready:
            if self.written is not None:
                host.wait_for(self.written, stream)
            self.ready.add(key)
            self.users[key] = stream  # keeps the stream alive

    def write(self, stream):
        """Note that a stream has written tables."""
        self.written = host.stream_key(host.stream_address(stream))
        self.ready = {self.written}
        self.users[self.written] = stream

    def fill(self, steps, stream):
        """Overwrite the tables with another step, after the streams that read them."""
        with self.lock:
            for user in self.users:
                host.wait_for(user, stream)
            self.steps = steps
            for key, work in self.works.items():
                work.split_work(steps, key)
            given = [(self.on_device[name], [name]) for name in self.given]
            for memory, names in (*self.copies, *given):
                host.fill(memory, [self.contents(name) for name in names], stream)
            self.users = {}
            self.write(stream)

    def work(self, record, rows, most=0, placed=False):
        """Return (the `Work` of an attention call in tiles of `rows` rows, its key).

        With `placed`, a sequence has one tile, and the kernel reads `Work.placed`.
        """
        key = WorkKey(rows, most or MOST_SPLITS, *(getattr(record, name) for name in WorkKey._fields[2:]))
        with self.lock:
            if key not in self.works:
                self.works[key] = Work(self.steps, key, self.most_pages)
            names = key.names() if not placed else (*key.names(), ("placed", key))
            self.waiting += [
                name for name in names if name not in self.on_device and name not in self.waiting
            ]
            return self.works[key], key

    def new_tokens(self, rope, stream):
        """Return the starts of the new tokens' pieces, the pieces, one for each token, and the keys' angles.

        Without `rope` the angles are None.
        """
        names = [("starts", NEW_TOKENS), ("pieces", NEW_TOKENS)]
        with self.lock:
            if NEW_TOKENS not in self.works:
                self.works[NEW_TOKENS] = NewTokens(self.steps)
                self.waiting += names
            if rope is not None:
                names.append(("angles", rope))
                if rope not in self.works:
                    self.works[rope] = NewAngles(self.steps, rope)
                    self.waiting.append(names[-1])
        found = self.of(names, stream)
        return found if rope is not None else [*found, None]


def page_begins(steps: StepIndex) -> np.ndarray:
    """Return the indices of sequences' first pages in a device table, which begins with these indices."""
    sequences = len(steps.kvstarts) - 1
    starts = steps.table_starts
    return sequences + (np.arange(sequences) * steps.table.shape[1] if starts is None else starts[:-1])


def page_counts(steps: StepIndex) -> tuple[int, int]:
    """Return how many pages a step's table has in all, and for the longest sequence."""
    starts = steps.table_starts
    if starts is None:
        return int(np.prod(steps.table.shape)), steps.table.shape[1]
    return int(starts[-1]), int(np.diff(starts).max(initial=0))


NEW_TOKENS = "new tokens"


class NewTokens:
    """Pieces (token, slot, 1) that store the new tokens of contexts; `starts` counts tokens before each."""

    def __init__(self, steps):
        self.split_work(steps, NEW_TOKENS)

    def split_work(self, steps, key):
        """Find the slots of the new tokens. `steps` has page ids as its table."""
        slots = contexts_of(steps).new_slots()
        self.starts = np.arange(len(slots) + 1)
        self.pieces = np.stack([self.starts[:-1], slots, np.ones_like(slots)], 1)


class NewAngles:
    """The angles [tokens, pairs] by which a rope rotates the keys of the new tokens of contexts."""

    def __init__(self, steps, rope):
        self.split_work(steps, rope)

    def split_work(self, steps, rope):
        """Compute the angles of the new tokens' positions."""
        self.angles = angle_bits(rope, contexts_of(steps).new_positions())


def contexts_of(steps):
    """Return the contexts of steps that have page ids as their table."""
    lengths = np.diff(steps.kvstarts)
    places = steps.table, steps.table_starts
    return Contexts(*places, lengths, steps.seqstarts, steps.page_size, 0, steps.kvstarts)


def angle_bits(rope, positions):
    """Return the angles [tokens, pairs] of positions: bits of a cosine, then of a sine, in an int64."""
    return np.ascontiguousarray(rope.angles(positions)).view(np.int64)[..., 0]


class WorkKey(NamedTuple):
    """All that the `Work` of a step depends on; from `heads` on, fields of `AttentionParams`."""

    rows: int  # of a tile
    most_splits: int
    heads: int
    group: int
    decoding: int
    causal: int
    alibi: int
    left: int
    right: int

    def names(self):
        """Return the names of the tables of work items, of slots and of slopes."""
        return ("items", self), ("slots", self), ("slopes", self.heads * self.group)


class Work:
    """The split of attention over a step into work items.

    A tile has query rows of one sequence and key head. Its context is divided into splits, which are work
    items. If a tile has several splits, a slot holds the result of each. `items` and `slots` [B + 1] count
    both before each sequence; after them `slots` has the number of tokens of a split.

    `placed` has four words of 64 bits for each item:

        low half                                           high half
        last row << SEQUENCE_BITS | sequence               slot + 1 << 16 | key head
        index of the sequence's first page in the table    query tokens before the sequence
        first position of the item                         its last position + 1
        first position that all rows see                   the last such position + 1

    Words after the last item are -1.
    """

    def __init__(self, steps, key, most_pages):
        self.split_work(steps, key)
        tiles = int(tiles_of(steps, key).sum())
        longest = most_pages * steps.page_size  # tokens that the table has room for
        self.most_items = min(tiles + key.most_splits, tiles * max(1, -(-longest // LEAST_SPLIT)))
        self.most_slots = min(self.most_items, 2 * key.most_splits)

    def split_work(self, steps, key):
        """Split the work by shapes only, so that results do not depend on the device."""
        seqlens, kvlens = np.diff(steps.seqstarts), np.diff(steps.kvstarts)
        tiles = tiles_of(steps, key)
        lengths = enumerate(zip(seqlens.tolist(), kvlens.tolist(), strict=True))
        self.seen = np.array([seen_by(key, b, *both) for b, both in lengths], np.int64).reshape(-1, 4)
        seen = np.maximum(self.seen[:, 1] - self.seen[:, 0], 0)
        tokens = max(LEAST_SPLIT, -(-int(np.dot(tiles, seen)) // key.most_splits))  # of a split
        splits = np.maximum(1, -(-seen // tokens))
        items, slots = tiles * splits, np.where(splits > 1, tiles * splits, 0)
        self.items, slots = (np.r_[0, np.cumsum(counts)] for counts in (items, slots))
        self.slots = np.r_[slots, tokens]
        self.count, self.slot_count = int(self.items[-1]), int(slots[-1])
        self.splits, self.last, self.before = splits, seqlens * key.group - 1, steps.seqstarts[:-1]
        self.pages = page_begins(steps)

    @property
    def placed(self):
        """Return the words of all items, in the order of blocks: [sequences, key heads, splits]."""
        b = np.repeat(np.arange(len(self.splits)), np.diff(self.items))
        item, splits, tokens = np.arange(self.count) - self.items[b], self.splits[b], self.slots[-1]
        head, split = np.divmod(item, splits)
        begin, end, common_begin, common_end = self.seen[b].T
        begin = np.minimum(begin + split * tokens, end)
        end = np.minimum(begin + tokens, end)
        slot = np.where(splits > 1, self.slots[b] + item, -1)
        low = np.stack([b | self.last[b] << SEQUENCE_BITS, self.pages[b], begin, common_begin], 1)
        high = np.stack([head | slot + 1 << 16, self.before[b], end, np.minimum(common_end, end)], 1)
        words = np.full((self.most_items, ITEM), -1, np.int64)
        words[: self.count] = low | high << 32
        return words.reshape(-1)


def tiles_of(steps, key):
    """Return the number of tiles of each sequence, over all key heads."""
    return -(-np.diff(steps.seqstarts) * key.group // key.rows) * key.heads


def seen_by(key, b, seqlen, kvlen):
    """Return begin and end of the positions that some query sees, then of those that all queries see."""
    if not seqlen:
        return 0, 0, 0, 0
    rule = key.left, key.right, key.alibi or (key.causal and b >= key.decoding)
    begin, common_end = visible_range.py_func(seqlen, kvlen, 0, *rule)
    common_begin, end = visible_range.py_func(seqlen, kvlen, seqlen - 1, *rule)
    return begin, end, common_begin, common_end


class ScratchKey(NamedTuple):
    """The calls that share scratch memory: those of a stream, before or while it is captured."""

    device: int
    stream: int
    captured: bool


class Scratch(dict):
    """Scratch memory, (bytes, address) by `ScratchKey`.

    A captured stream takes memory away from other calls and keeps it, because its graph may be replayed on
    another stream.
    """

    def __init__(self):
        self.owners: list = []  # keep all memory alive

    def of(self, size, device, stream, captured):
        """Return the address of `size` bytes for a device and the address of a stream."""
        if not size:
            return 0
        key = ScratchKey(device, host.stream_key(stream), captured)
        room, place = self.get(key, (0, 0))
        if room >= size:
            return place
        if captured:
            own = key._replace(captured=False)
            uncaptured = [each for each in self if each.device == device and not each.captured]
            large = [each for each in uncaptured if self[each][0] >= size]
            if not large:
                raise unprepared()
            self[key] = self.pop(own if own in large else large[-1])
        else:
            room = max(1 << 16, 1 << (size - 1).bit_length())
            self.owners.append(host.empty(room, np.uint8, 0))
            self[key] = room, host.address(self.owners[-1])
        return self[key][1]


SCRATCH = Scratch()


def unprepared():
    """Return the error for a captured call that needs new memory, which captures cannot allocate."""
    return argument_error(
        "stream", "a call of this form on this device before each capture", "one that is captured"
    )
