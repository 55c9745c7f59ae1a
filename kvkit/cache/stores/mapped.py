"""Store a layer in a memory-mapped file, with a JSON sidecar that describes it.

The data file holds the layer's arrays (keys and values, or the parts of codes) in the order of the sidecar.
Each array begins at a multiple of `PAGE` bytes. The state is the numbers that say which rows hold which
tokens. A step writes rows first, then the state in one write::

    layer-000-2.raw    keys ... | values ... | mark: the name `layer-000-2`, and a random word
    layer-000.json     {"kind": ..., "word": ..., "keys": shape, ..., "state": {"length":           12, ...}}
                                                                  state_at ^ overwritten by each step

A store that grows moves to a new file (here generation 2), which is valid once its sidecar has replaced the
old one. So the files are valid whenever the process ends.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import json
import math
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from kvkit.cache.stores.memory import Geometry, Store
from kvkit.cache.stores.span import Span
from kvkit.files.paths import name_in_errors
from kvkit.formats import BY_NAME
from kvkit.typed import Array

VERSION = 1
PAGE = 4096  # bytes; every array begins at a multiple of it, and no file is smaller
MARK = 64  # bytes of a mark: a multiple of the size of every element
NUMBER = 20  # characters of each number in a state, so that any later number fits in its place
NEW, OWNER = os.O_CREAT | os.O_EXCL, 0o600  # a new file is never an existing one, or a link
WAITING = ".next-"  # ends the name of a waiting sidecar, with the number of the change that it waits for
ArrayForm = tuple[tuple[int, ...], np.dtype[Any]]  # shape, dtype


class File:
    """Maps a file with arrays of some shapes and dtypes, which are zeros until they are written."""

    def __init__(self, home: Home, forms: Sequence[ArrayForm], new: bool = True) -> None:
        self.home, self.path, self.word = home, home.path(new), home.word
        self.sidecar = -1  # its descriptor; -1 until it is written
        self.loading = False  # whether `prefetch` is at work
        self.moved = False  # whether the sidecar describes rows that were removed or shifted
        self.descriptor = os.open(self.path, os.O_RDWR | (NEW if new else 0), OWNER)
        weakref.finalize(self, os.close, self.descriptor)
        self.starts, end = [], 0
        for shape, dtype in forms:
            self.starts.append(-(-end // PAGE) * PAGE)
            end = self.starts[-1] + math.prod(shape) * dtype.itemsize
        size = max(end, PAGE)
        try:
            if new:
                self.word = secrets.token_hex(8)
                with name_in_errors(self.path):
                    allocate_file(self.descriptor, size)
                    os.lseek(self.descriptor, size, os.SEEK_SET)
                    os.write(self.descriptor, end_mark(self.path, self.word))
            else:
                check_mark(self.path, self.descriptor, size, home.word)
            memory = self.memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            if new:
                self.path.unlink()
            raise
        places = zip(forms, self.starts, strict=True)
        self.arrays = [np.ndarray(shape, dtype, memory, start) for (shape, dtype), start in places]
        if not new:
            home.current, text = self, home.sidecar.read_text()
            self.set_sidecar(os.open(home.sidecar, os.O_RDWR), text.rindex("{"))

    def commit(
        self, about: Callable[[], dict[str, Any]], layer: Any, more: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Write the state of a layer's rows, and `more` numbers, to the sidecar; at first also `about`."""
        moves = {} if self.sidecar >= 0 else layer.describe_moves()
        self.moved = self.moved or "moved" in moves
        numbers = layer.span._asdict() | {"record_past": layer.record_past, **more}
        numbers["changes"] = self.home.folder.changes
        if self.moved:
            numbers |= layer.count_moves()
        text = ", ".join(f'"{name}": {number:{NUMBER}d}' for name, number in numbers.items())
        text = f"{{{text}}}}}\n"  # the second brace ends the sidecar
        if self.sidecar < 0:
            self.home.accept(self, about() | moves, text)
        else:
            os.lseek(self.sidecar, self.state_at, os.SEEK_SET)
            os.write(self.sidecar, text.encode())

    def set_sidecar(self, sidecar: int, state_at: int) -> None:
        """Set the descriptor of the sidecar, and the byte where its state begins."""
        self.sidecar, self.state_at = sidecar, state_at
        weakref.finalize(self, os.close, sidecar)

    def with_new_sidecar(self) -> File:
        """Return the same file without a sidecar; the next commit writes a new one."""
        file = copy.copy(self)
        file.descriptor, file.sidecar = os.dup(self.descriptor), -1
        file.moved = file.loading = False
        weakref.finalize(file, os.close, file.descriptor)
        return file

    def close(self) -> None:
        """Delete the file, and record in the sidecar that the layer is empty."""
        if self.sidecar >= 0:
            self.home.write_empty()
        self.path.unlink()

    def flush(self) -> None:
        self.memory.flush()
        for descriptor in (self.descriptor, self.sidecar):
            os.fsync(descriptor)

    def prefetch(self, rows: Sequence[tuple[int, int]]) -> None:
        """Ask the system to load the rows (first, count) of each array in the background."""
        if not self.loading and hasattr(os, "posix_fadvise"):
            self.loading = True
            prefetch_thread().submit(self.load, rows)

    def load(self, rows: Iterable[tuple[int, int]]) -> None:
        with contextlib.suppress(OSError):
            for array, start, (first, count) in zip(self.arrays, self.starts, rows, strict=True):
                _, head, row, _ = array.strides
                for i in range(array.shape[0] * array.shape[1] if count else 0):
                    begin = start + i * head + first * row
                    os.posix_fadvise(self.descriptor, begin, count * row, os.POSIX_FADV_WILLNEED)
        self.loading = False


class MappedStore(Store):
    """Stores keys and values in a mapped file. Committed rows are never overwritten."""

    __slots__ = ("file",)
    in_place = False

    def __init__(self, geometry: Geometry, capacity: int, home: Home, new: bool = True) -> None:
        self.file = File(home, geometry.forms(capacity), new)
        super().__init__(geometry, capacity)

    def _arrays(self) -> Sequence[Array]:
        return self.file.arrays

    @classmethod
    def opened(cls, about: dict[str, Any], span: Span, home: Home) -> MappedStore:
        """Open the store that a sidecar describes."""
        batch, heads, capacity, key_dim = about["keys"]
        fmt, joined = BY_NAME[about["dtype"]], about.get("joined", 0)
        geometry = Geometry(batch, heads, key_dim, about["values"][3], fmt, joined)
        if not span.origin <= span.oldest <= span.length <= span.origin + capacity:
            raise ValueError(f"a state that cannot be: {about['state']}")
        return cls(geometry, capacity, home, new=False)

    def with_new_sidecar(self) -> MappedStore:
        """Return a store of the same file without a sidecar; the next commit writes a new one."""
        store = MappedStore.__new__(MappedStore)
        store.geometry, store.capacity = self.geometry, self.capacity
        store.file = self.file.with_new_sidecar()
        store.sides, store.keys, store.values = self.sides, self.keys, self.values
        return store

    def fill_rows(self, store: MappedStore, rows: Array, rope: Any, rotated: Array | None) -> None:
        """Copy rows of another store to the first rows; rotate their keys by `rotated` positions."""
        self.copy_from(store, rows, 0, rope, rotated)

    def commit(self, layer: Any) -> None:
        self.file.commit(self.about, layer)

    def about(self) -> dict[str, Any]:
        """Describe the arrays for a sidecar."""
        arrays = {"keys": list(self.keys.shape), "values": list(self.values.shape)}
        joined = {"joined": self.geometry.joined} if self.geometry.joined else {}
        return {"dtype": self.geometry.fmt.name} | joined | arrays

    def close(self) -> None:
        self.file.close()

    def prefetch(self, span: Span) -> None:
        self.file.prefetch([(0, span.length - span.origin)] * len(self.sides))


@functools.cache
def prefetch_thread() -> concurrent.futures.ThreadPoolExecutor:
    """Return the thread that prefetches."""
    return concurrent.futures.ThreadPoolExecutor(1, "kvkit-prefetch")


def allocate_file(file: int, size: int) -> None:
    """Allocate a file's disk space now, because writing to a mapping on a full disk kills the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    zeros = memoryview(bytes(2**20))
    while size:
        size -= os.write(file, zeros[:size])


def end_mark(path: Path, word: str) -> bytes:
    """Return the mark that ends a file; b"" for a file of an older version, whose sidecar has no word."""
    return f"kvkit {path.stem} {word}\n".rjust(MARK).encode() if word else b""


def check_mark(path: Path, file: int, size: int, word: str) -> None:
    """Raise ValueError unless a file's mark follows its first `size` bytes."""
    expected = end_mark(path, word)
    os.lseek(file, size, os.SEEK_SET)
    if os.fstat(file).st_size < size or os.read(file, len(expected)) != expected:
        raise ValueError(f"{path.name} is cut short, or of another layer or generation")


class Home:
    """Names and replaces the files of one layer in a folder. `about` describes the layer's kind."""

    def __init__(self, folder: Any, number: int, about: dict[str, Any]) -> None:
        self.folder, self.number, self.about = folder, number, about
        self.sidecar = folder.path / f"layer-{number:03}.json"
        self.generation = 0
        self.current: File | None = None
        self.word = ""  # the random word in the mark of an opened file
        self.waiting = 0  # the number of the change that a new sidecar waits for; 0 for none

    def path(self, new: bool) -> Path:
        """Return the path of the current data file, or of a new one."""
        self.generation += new
        return self.folder.path / f"layer-{self.number:03}-{self.generation}.raw"

    def opened_state(self, about: dict[str, Any]) -> tuple[Span, bool]:
        """Return (span, whether past tokens are recorded) from a sidecar."""
        if about["byteorder"] != sys.byteorder:
            raise ValueError(f"numbers of a {about['byteorder']}-endian machine")
        self.generation, self.word, state = about["generation"], about.get("word", ""), about["state"]
        return Span(*(state[name] for name in Span._fields)), bool(state["record_past"])

    def accept(self, file: File, about: dict[str, Any], state: str) -> None:
        """Make a file the layer's data file. Delete the old one, unless the new sidecar has to wait."""
        self.resolve_waiting()
        text = self.text(generation=self.generation, word=file.word, byteorder=sys.byteorder, **about)
        text = text.removesuffix("}") + ', "state": '  # the last member; it ends the sidecar
        self.waiting = self.folder.under_way
        write, path = (write_new, self.waiting_path()) if self.waiting else (write_sidecar, self.sidecar)
        file.set_sidecar(write(path, text + state), len(text))
        before, self.current = self.current, file
        if before is not None and before.path != file.path and not self.waiting:
            before.path.unlink()

    def waiting_path(self) -> Path:
        return self.sidecar.with_suffix(f"{WAITING}{self.waiting}")

    def resolve_waiting(self) -> None:
        """Rename the waiting sidecar if its change was committed; else delete it."""
        if self.waiting:
            with contextlib.suppress(FileNotFoundError):  # an interrupted call has renamed it already
                follow_change(self.waiting_path(), self.folder.changes)
            self.waiting = 0

    def text(self, **more: Any) -> str:
        return json.dumps({"version": VERSION, **self.about, **more})

    def write_empty(self, **more: Any) -> None:
        """Write the sidecar of a layer without tokens, which has no data file."""
        self.resolve_waiting()
        os.close(write_sidecar(self.sidecar, self.text(changes=self.folder.changes, **more) + "\n"))
        self.current = None


def follow_change(path: Path, changes: int) -> None:
    """Make a waiting sidecar the sidecar of its layer if its change was committed; else delete it."""
    if int(path.suffix.removeprefix(WAITING)) <= changes:
        os.replace(path, path.with_suffix(".json"))
    else:
        path.unlink()


def write_sidecar(path: Path, text: str) -> int:
    """Write a sidecar, or replace it in one step; return its descriptor."""
    temporary = path.with_name(f"{path.stem}-{secrets.token_hex(8)}.new")
    file = write_new(temporary, text)
    try:
        os.replace(temporary, path)
    except BaseException:
        os.close(file)
        temporary.unlink(missing_ok=True)
        raise
    return file


def write_new(path: Path, text: str) -> int:
    """Write a new small file; return its descriptor."""
    file = os.open(path, os.O_RDWR | NEW, OWNER)
    try:
        os.write(file, text.encode())
    except BaseException:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file
