"""Keep the layers of a cache in the files of a folder. `kvkit.cache.opening` opens such a folder."""

import contextlib
import hashlib
import importlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvkit.cache.layers import kinds
from kvkit.cache.layers.layer import Layer, LayerState
from kvkit.cache.stores.mapped import VERSION, WAITING, File, Home, write_sidecar
from kvkit.errors import argument_error
from kvkit.files.replace import sync_folder
from kvkit.typed import FilePath

UNFINISHED = "layer-*.new", "cache-*.new"
NAMES = "layer-*.raw", "layer-*.json", f"layer-*{WAITING}*", *UNFINISHED, "cache.json"


class Folder:
    """Owns the folder with the files of a cache. Its `cache.json` counts the calls that change all layers."""

    def __init__(self, directory: FilePath, only_non_sliding: bool, keep: bool) -> None:
        self.path, self.only_non_sliding, self.keep = Path(directory), only_non_sliding, keep
        self.changes = 0  # how many calls that change all layers were committed
        # What layers must still do whose sidecar has a lower number of changes:
        self.due: list[int] | str | None = None  # crop to these lengths, one for each layer, or "reset"
        self.under_way = 0  # the number of the change in progress; 0 if none
        self.layers = 0  # how many layers have or will get a sidecar
        self.release: Callable[[], Any] = lambda: None  # unlocks the folder, once `hold` has locked it

    def hold(self, expected: str) -> None:
        """Lock the folder until `release` or the end of the process."""
        if os.name == "nt":  # Windows cannot replace a mapped file, nor open a folder
            raise argument_error("offload", "a system that can replace mapped files", "Windows")
        descriptor = os.open(self.path, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            locks = importlib.import_module("fcntl")
            locks.flock(descriptor, locks.LOCK_EX | locks.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise argument_error("directory", expected, f"{self.path}, which is open already") from None
        except (ImportError, OSError):
            pass  # a system, or a disk, without locks

    def adopt(self, layers: Sequence[Layer]) -> None:
        """Move the layers of a cache to the folder, which must hold no cache."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.hold("a folder that holds no cache")
        if (self.path / "cache.json").exists():
            self.release()
            raise argument_error("directory", "a folder that holds no cache", self.path)
        before, self.layers = [layer.state() for layer in layers], len(layers)
        try:
            self.write_index(closed=False)
            for number, layer in enumerate(layers):
                self.register(number, layer)
        except BaseException:
            self.delete(layers)
            for layer, state in zip(layers, before, strict=True):
                layer.restore(state)
            self.release()
            raise

    def write_index(self, closed: bool, **more: Any) -> None:
        """Write `cache.json`: whether the cache is closed, the numbers of layers and changes, and `due`."""
        about = {"version": VERSION, "closed": closed, "changes": self.changes, "due": self.due}
        about |= {"layers": self.layers, **more}
        os.close(write_sidecar(self.path / "cache.json", json.dumps(about) + "\n"))

    def assign_home(self, number: int, layer: Layer) -> None:
        """Give a layer its place in the folder, unless it stays in memory."""
        if layer.window is None or not self.only_non_sliding:
            layer.home = self.home(number, layer)

    def register(self, number: int, layer: Layer) -> None:
        """Write a sidecar for a layer, and move its tokens to a file unless they stay in memory."""
        if layer.home is None:
            self.assign_home(number, layer)
        if layer.home is None:
            self.home(number, layer).write_empty(in_memory=True)
        else:
            layer.rehome()
        if number == self.layers:
            self.layers += 1
            self.write_index(closed=False)

    def home(self, number: int, layer: Layer) -> Home:
        """Return the place of a layer's files."""
        return Home(self, number, kinds.describe_layer(layer))

    def at_once(self, layers: Sequence[Layer], change: Callable[[Layer], None]) -> None:
        """Change all layers at once: after a crash either all files are new, or all are old.

        New sidecars are written under temporary names. Then a higher number of changes in `cache.json`
        commits them all. They get their names afterwards: here, before a layer's next sidecar, or when the
        folder is next opened. Layers in memory change last, because a full disk cannot stop them.
        """
        mapped = [layer for layer in layers if is_mapped(layer)]
        before, files = [layer.state() for layer in mapped], [layer.store.file for layer in mapped]
        unused: list[File] = []  # the old files after a commit, the new ones after an error
        self.resolve_waiting(mapped)
        try:
            self.under_way = self.changes + 1
            for layer in mapped:
                change(layer)
            unused = replaced_files(files, mapped)
            self.commit_changes(self.under_way, due=None)
        except BaseException:
            unused = []
            for layer, state, file in zip(mapped, before, files, strict=True):
                if layer.store.file.path != file.path:
                    unused.append(layer.store.file)
                layer.restore(state)
                layer.home.current = file
            raise
        finally:
            self.under_way = 0
            self.resolve_waiting(mapped)
            for file in unused:
                file.path.unlink()
        for layer in layers:
            if not is_mapped(layer):
                change(layer)

    def resolve_waiting(self, layers: Iterable[Layer]) -> None:
        """Rename the waiting sidecars of layers if their change was committed; else delete them."""
        for layer in layers:
            layer.home.resolve_waiting()

    def announce(self, due: list[int] | str) -> None:
        """Record that all layers will now be cropped to the lengths `due`, or reset if it is "reset".

        A layer's next commit records that it has done so. After a crash, opening the folder changes the rest.
        """
        self.commit_changes(self.changes + 1, due)

    def commit_changes(self, changes: int, due: list[int] | str | None) -> None:
        """Write the number of changes and what is due to `cache.json`; on an error neither has changed."""
        before = self.changes, self.due
        try:
            self.changes, self.due = changes, due
            self.write_index(closed=False)
        except BaseException:
            self.changes, self.due = before
            with contextlib.suppress(OSError):
                self.write_index(closed=False)  # the failed write may have reached the disk
            raise

    def prefetch_after(self, layer_idx: int, layers: Sequence[Layer]) -> None:
        """Prefetch the next layer that is in a file."""
        for layer in (*layers[layer_idx + 1 :], *layers[:layer_idx]):
            if is_mapped(layer):
                prefetch_layer(layer)
                return

    def close(self, layers: Sequence[Layer]) -> None:
        """Complete the files if the folder is kept, otherwise delete them. The layers become empty."""
        if self.keep:
            for number, layer in enumerate(layers):
                if layer.home is None:
                    layer.home = self.home(number, layer)
                    layer.rehome()
            flush_layers(layers)
            self.write_index(closed=True, digests=[hash_layer(layer) for layer in layers])
        else:
            self.delete(layers)
        for layer in layers:
            layer.restore(LayerState())
        self.release()

    def delete(self, layers: Iterable[Layer]) -> None:
        """Close the stores of the layers, and delete all files of the cache."""
        for layer in layers:
            if is_mapped(layer):
                layer.store.close()
        for pattern in NAMES:
            for path in self.path.glob(pattern):
                path.unlink()


def replaced_files(files: Sequence[File], layers: Sequence[Layer]) -> list[File]:
    """Return the files that layers no longer use.

    A comprehension in `at_once` would not do: from Python 3.12 on an interrupt in it skips the handlers.
    """
    return [file for file, layer in zip(files, layers, strict=True) if file.path != layer.store.file.path]


def hash_layer(layer: Layer) -> str:
    """Return the hash of a layer's sidecar and data file."""
    total = hashlib.sha256(layer.home.sidecar.read_bytes())
    if is_mapped(layer):
        total.update(layer.store.file.memory)
    return total.hexdigest()


def is_mapped(layer: Layer) -> bool:
    return layer.store is not None and layer.store.file is not None


def prefetch_layer(layer: Layer) -> None:
    if is_mapped(layer):
        layer.store.prefetch(layer.span)


def flush_layers(layers: Iterable[Layer]) -> None:
    for layer in layers:
        if is_mapped(layer):
            layer.store.file.flush()
            sync_folder(layer.store.file.path.parent)
