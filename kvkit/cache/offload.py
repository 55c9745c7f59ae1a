"""A cache's folder: which of its layers lie in files. `opening` reads it."""

import contextlib
import hashlib
import importlib
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from kvkit.cache.layers import kinds
from kvkit.cache.layers.layer import EMPTY
from kvkit.cache.stores.mapped import VERSION, WAITING, Home, put
from kvkit.errors import argument_error
from kvkit.files.replace import sync_folder

UNFINISHED = "layer-*.new", "cache-*.new"
NAMES = "layer-*.raw", "layer-*.json", f"layer-*{WAITING}*", *UNFINISHED, "cache.json"


class Folder:
    """A cache's folder, and which of its layers lie in it."""

    def __init__(self, directory, only_non_sliding, keep):
        self.path, self.only_non_sliding, self.keep = Path(directory), only_non_sliding, keep
        self.changes = 0  # in all layers at once, of which the latest is
        self.due: list | str | None = None  # for layers whose state is from before it
        self.under_way = 0  # the number of a change that does not count yet
        self.layers = 0  # that have a sidecar, or are to have one
        self.release: Callable = int  # what ends `hold`

    def hold(self, expected):
        """Be the only one in the folder, until `release` or the end of the process."""
        if os.name == "nt":  # which replaces no file that is mapped, and opens no folder
            raise argument_error("offload", "a system that replaces mapped files", "Windows")
        descriptor = os.open(self.path, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            locks = importlib.import_module("fcntl")
            locks.flock(descriptor, locks.LOCK_EX | locks.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise argument_error("directory", expected, f"{self.path}, which another one has open") from None
        except (ImportError, OSError):
            pass  # a system, or a disk, without locks

    def adopt(self, layers):
        """Move the layers of a cache to the folder, new to caches."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.hold("a folder that holds no cache")
        if (self.path / "cache.json").exists():
            self.release()
            raise argument_error("directory", "a folder that holds no cache", self.path)
        before, self.layers = [layer.state() for layer in layers], len(layers)
        try:
            self.say(closed=False)
            for number, layer in enumerate(layers):
                self.register(number, layer)
        except BaseException:
            self.delete(layers)
            for layer, state in zip(layers, before, strict=True):
                layer.restore(state)
            self.release()
            raise

    def say(self, closed, **more):
        """Whether no step was under way when the process ended, and how many layers there are."""
        about = {"version": VERSION, "closed": closed, "changes": self.changes, "due": self.due}
        about |= {"layers": self.layers, **more}
        os.close(put(self.path / "cache.json", json.dumps(about) + "\n"))

    def lead(self, number, layer):
        """Let new stores of a layer be files, unless it is to stay in memory."""
        if layer.window is None or not self.only_non_sliding:
            layer.home = self.home(number, layer)

    def register(self, number, layer):
        """Move a layer's tokens here, unless they are to stay in memory, and have a sidecar."""
        if layer.home is None:
            self.lead(number, layer)
        if layer.home is None:
            self.home(number, layer).say_empty(in_memory=True)
        else:
            layer.move_in()
        if number == self.layers:
            self.layers += 1
            self.say(closed=False)

    def home(self, number, layer):
        return Home(self, number, kinds.described(layer))

    def at_once(self, layers, change):
        """Change all layers; new files, which those that lie here get, count together.

        Their sidecars wait until `cache.json` counts one more change, and are then renamed: here, or before
        the layer's next one is written, or by whoever opens the folder. Layers in memory come last: they do
        not fail for the disk.
        """
        moved = [layer for layer in layers if mapped(layer)]
        before, left = [(layer.state(), layer.store.file) for layer in moved], []
        self.settle(moved)
        try:
            self.under_way = self.changes + 1
            for layer in moved:
                change(layer)
            left = [file for _, file in before]
            self.count(self.under_way, None)
        except BaseException:
            left = []
            for layer, (state, file) in zip(moved, before, strict=True):
                if layer.store.file is not file:
                    left.append(layer.store.file)
                layer.restore(state)
                layer.home.current = file
            raise
        finally:
            self.under_way = 0
            self.settle(moved)
            for file in left:
                file.path.unlink()
        for layer in layers:
            if not mapped(layer):
                change(layer)

    def settle(self, layers):
        """Let what waited for a change take its place, or go."""
        for layer in layers:
            layer.home.settle()

    def announce(self, due):
        """Say what every layer is to do next, so that whoever opens the folder does what is left of it.

        It is to `crop` to one of a list of lengths, or to `reset`. What it then commits says that it has.
        """
        self.count(self.changes + 1, due)

    def count(self, changes, due):
        """Say that there has been one more change, or nothing."""
        before = self.changes, self.due
        try:
            self.changes, self.due = changes, due
            self.say(closed=False)
        except BaseException:
            self.changes, self.due = before
            with contextlib.suppress(OSError):
                self.say(closed=False)  # it may have been said
            raise

    def prefetch_after(self, layer_idx, layers):
        """Prefetch the next layer that lies here."""
        for layer in (*layers[layer_idx + 1 :], *layers[:layer_idx]):
            if mapped(layer):
                prefetch(layer)
                return

    def close(self, layers):
        """Complete the files, if they are to be kept, or delete them; the layers are empty then."""
        if self.keep:
            for number, layer in enumerate(layers):
                if layer.home is None:
                    layer.home = self.home(number, layer)
                    layer.move_in()
            flush(layers)
            self.say(closed=True, digests=[digest(layer) for layer in layers])
        else:
            self.delete(layers)
        for layer in layers:
            layer.restore(EMPTY)
        self.release()

    def delete(self, layers):
        """Delete all files; the layers can do nothing more with theirs."""
        for layer in layers:
            if mapped(layer):
                layer.store.close()
        for pattern in NAMES:
            for path in self.path.glob(pattern):
                path.unlink()


def digest(layer):
    """Of all that files say of a layer."""
    total = hashlib.sha256(layer.home.sidecar.read_bytes())
    if mapped(layer):
        total.update(layer.store.file.memory)
    return total.hexdigest()


def mapped(layer):
    return layer.store is not None and layer.store.file is not None


def prefetch(layer):
    if mapped(layer):
        layer.store.prefetch(layer.span)


def flush(layers):
    for layer in layers:
        if mapped(layer):
            layer.store.file.flush()
            sync_folder(layer.store.file.path.parent)
