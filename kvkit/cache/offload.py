"""A cache's folder: which layers lie in files, and how they come back."""

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path

from kvkit.cache.layers import kinds
from kvkit.cache.layers.dynamic import StaticLayer
from kvkit.cache.stores.mapped import STATE, VERSION, WAITING, Home, follow, put
from kvkit.checks.words import wrong
from kvkit.files.replace import sync_folder

NAMES = "layer-*.raw", "layer-*.json", f"layer-*{WAITING}*", "layer-*.new", "cache.new", "cache.json"


class Folder:
    """A cache's folder, and which of its layers lie in it."""

    def __init__(self, directory, only_non_sliding, keep):
        self.path, self.only_non_sliding, self.keep = Path(directory), only_non_sliding, keep
        self.changes = 0  # in all layers at once, of which the latest is
        self.due: list | str | None = None  # for layers whose state is from before it
        self.under_way = 0  # the number of a change that does not count yet

    def adopt(self, layers):
        """Move the layers of a cache to the folder, new to caches."""
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / "cache.json").exists():
            raise wrong("directory", "a folder that holds no cache", self.path)
        self.say(closed=False)
        before = [dict(layer.__dict__) for layer in layers]
        try:
            for number, layer in enumerate(layers):
                self.lead(number, layer)
                self.register(number, layer)
        except BaseException:
            self.delete(layers)
            for layer, attributes in zip(layers, before, strict=True):
                layer.__dict__.update(attributes)
            raise

    def say(self, closed):
        """Whether no step was under way when the process ended."""
        about = {"version": VERSION, "closed": closed, "changes": self.changes, "due": self.due}
        os.close(put(self.path / "cache.json", json.dumps(about) + "\n"))

    def lead(self, number, layer):
        """Let new stores of a layer be files, unless it is to stay in memory."""
        if layer.window is None or not self.only_non_sliding:
            layer._new_store = home(self, number, layer)

    def register(self, number, layer):
        """Move a layer's tokens to where new stores are, and have a sidecar."""
        if layer._new_store is layer._in_memory:
            home(self, number, layer).say_empty(in_memory=True)
        elif layer._store is None:
            layer._commit()
        elif not mapped(layer):
            layer._before = layer._length  # no step is under way
            layer._move(layer._store.geometry, layer._store.capacity, min(layer._oldest, layer._begin))

    def at_once(self, layers, change):
        """Change all layers; new files, which those that lie here get, count together.

        Their sidecars wait until `cache.json` counts one more change, and are then renamed: here, or before
        the layer's next one is written, or by whoever opens the folder. Layers in memory come last: they do
        not fail for the disk.
        """
        moved = [layer for layer in layers if mapped(layer)]
        before, left = [dict(layer.__dict__) for layer in moved], []
        self.settle(moved)
        try:
            self.under_way = self.changes + 1
            for layer in moved:
                change(layer)
            left = [attributes["_store"].file for attributes in before]
            self.count(self.under_way, None)
        except BaseException:
            left = []
            for layer, attributes in zip(moved, before, strict=True):
                if layer._store is not attributes["_store"]:
                    left.append(layer._store.file)
                layer.__dict__.update(attributes)
                layer._new_store.current = layer._store.file
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
            layer._new_store.settle()

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
                if layer._new_store is layer._in_memory:
                    layer._new_store = home(self, number, layer)
                    self.register(number, layer)
            flush(layers)
            self.say(closed=True)
        else:
            self.delete(layers)
        for layer in layers:
            layer._new_store = layer._in_memory
            layer._empty()

    def delete(self, layers):
        """Delete all files; the layers can do nothing more with theirs."""
        for layer in layers:
            if mapped(layer):
                layer._store.close()
        for pattern in NAMES:
            for path in self.path.glob(pattern):
                path.unlink()


def home(folder, number, layer):
    return Home(folder, number, kinds.described(layer), layer._in_files)


def mapped(layer):
    return isinstance(layer._store, layer._in_files)


def prefetch(layer):
    if mapped(layer):
        layer._store.prefetch(layer)


def flush(layers):
    for layer in layers:
        if mapped(layer):
            layer._store.file.flush()
            sync_folder(layer._store.file.path.parent)


# Opening


def opened(directory, keep):
    """The folder and the layers of a cache that was kept, or whose process ended."""
    folder = Folder(directory, True, keep)
    about = read(folder.path / "cache.json")
    with explained(folder.path / "cache.json"):
        closed, folder.changes, due = about["closed"], about["changes"], about["due"]
    for path in folder.path.glob(f"layer-*{WAITING}*"):
        follow(path, folder.changes)
    paths = sorted(folder.path.glob("layer-*.json"))
    layers = [opened_layer(folder, number, None if closed else due) for number in range(len(paths))]
    for path in set(folder.path.glob("layer-*.raw")) - {
        layer._store.file.path for layer in layers if layer._store
    }:
        path.unlink()  # it was still being filled
    if not closed:
        take_back(layers, folder.path)
    for layer in layers:
        if layer._store is not None:
            layer._before = layer._length
            layer._commit()
    folder.say(closed=False)
    return folder, layers


def take_back(layers, folder):
    """Take back what some layers have of a step that not all have had.

    Such a layer had as many tokens before as another one has now. A layer without tokens is one that the
    model does not use, unless the others have had their first tokens and it comes after them.
    """
    used = [layer for layer in layers if layer._length]
    held = {layer._length for layer in used}
    if used and used[-1] is not layers[-1] and not any(layer._before for layer in used):
        held.add(0)
        message = (
            f"{folder}: the first step was cut off, or the last layers are not used: give its tokens again"
        )
        warnings.warn(message, stacklevel=4)
    for layer in used:
        if layer._before < layer._length and layer._before in held:
            layer._take_back(layer._before)
    left = [layer._length for layer in used]
    if len(set(left)) > 1:
        message = f"{folder}: layers hold {left} tokens, which no step explains: crop them to what is alike"
        warnings.warn(message, stacklevel=4)


def opened_layer(folder, number, due):
    path = folder.path / f"layer-{number:03}.json"
    about = read(path)
    if about.get("in_memory"):
        raise wrong("directory", f"layer {number} in a file", "a process that ended while it was in memory")
    with explained(path):
        layer = kinds.made(about)
        layer._new_store = place = home(folder, number, layer)
        layer.record_past = about.get("record_past", False)
        if "generation" in about:
            if about["byteorder"] != sys.byteorder:
                raise ValueError(f"numbers of a {about['byteorder']}-endian machine")
            place.generation = about["generation"]
            *numbers, record_past = (about["state"][name] for name in STATE)
            layer._length, layer._oldest, layer._begin, layer._origin, layer._before = numbers
            layer.record_past = bool(record_past)
            layer._store = place.kind.opened(layer, about, place)
            file = place.current = layer._store.file
            file.know_sidecar(os.open(path, os.O_RDWR), path.read_text().rindex("{"))
            if isinstance(layer, StaticLayer):  # rows may have been written that no state came to mean
                layer._store.clear(layer._length - layer._origin, layer._store.capacity)
        if due is not None and about.get("state", about)["changes"] < folder.changes:
            layer.reset() if due == "reset" else layer.crop(due[number] - layer._length)
    return layer


def read(path):
    """What a JSON file of this version says."""
    with explained(path):
        about = json.loads(path.read_text())
        if about["version"] != VERSION:
            raise ValueError(f"version {about['version']}, not {VERSION}")
    return about


@contextlib.contextmanager
def explained(path):
    """Say in our words that a file is not what it should be."""
    try:
        yield
    except (FileNotFoundError, LookupError, TypeError, ValueError) as error:
        raise wrong("directory", "a cache that kvkit has written", f"{path}: {error!r}") from error
