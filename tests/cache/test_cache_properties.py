"""Random sequences of operations on every kind of layer, in memory and in files, against a list of tokens.

Between operations a cache is copied, or saved and loaded; its folder is closed and opened, or left by a
process that ends; its disk has no room.
"""

import copy
import pickle
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from attention_scenes import TOLERANCE, assert_near
from cache_model import KINDS, WINDOWS, Model, arrays_of, tokens_of
from folder_scenes import full_disk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvkit.cache import (
    Cache,
    CapacityError,
    ChunkedLayer,
    DynamicLayer,
    PagedCache,
    SlidingWindowLayer,
    StaticChunkedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    load,
)
from kvkit.cache.stores import allocation

DTYPES = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
HEADS, GROUP, DIMS = 2, 2, (5, 3)
MAX = 24
COPIES = {"copy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}


def cache_of(kind, window, dtype):
    layers = {
        "dynamic": DynamicLayer,
        "sliding": lambda: SlidingWindowLayer(window),
        "static": lambda: StaticLayer(MAX),
        "static sliding": lambda: StaticSlidingWindowLayer(MAX, window),
        "chunked": lambda: ChunkedLayer(window),
        "static chunked": lambda: StaticChunkedLayer(MAX, window),
    }
    return (
        PagedCache(1500, 4, 1, HEADS, DIMS[1], dtype, cache_layout=window % 4)
        if kind == "paged"
        else Cache([layers[kind]()])
    )


class Operations(RuleBasedStateMachine):
    """Runs random operations on a layer, in memory or in files, and on its model."""

    kind: str
    offloaded = False

    @initialize(window=st.integers(1, 9), dtype=st.sampled_from(DTYPES), batch=st.integers(1, 3))
    def begin(self, window, dtype, batch):
        kind = "dynamic" if self.kind == "paged" else self.kind
        self.window = window
        self.model = Model(kind, window if kind in WINDOWS else None, MAX)
        self.dims = DIMS if kind == self.kind else DIMS[1:] * 2
        self.room = Path(tempfile.mkdtemp())
        self.folder, self.folders = self.room / "0", 0
        self.go_on_with(cache_of(self.kind, window, dtype))
        self.dtype, self.batch, self.rng = dtype, batch, np.random.default_rng(window)
        self.queries = 0  # of the last tokens, whose windows are there

    def go_on_with(self, cache):
        """Take a cache in memory, or move it to files."""
        if self.offloaded:
            cache.offload(self.folder, only_non_sliding=False)
        self.cache, (self.layer,) = cache, cache.layers

    def teardown(self):
        if getattr(self, "room", None):
            self.cache.close()
            shutil.rmtree(self.room)

    def new(self, count):
        """Return new tokens: contiguous, a slice of fused ones, or the layer's own last ones."""
        how = self.rng.random()
        if how < 0.1 and 0 < count <= self.model.stored:
            return [side[:, :, -count:] for side in (self.layer.keys, self.layer.values)]
        if how < 0.5:
            shape = self.batch, HEADS, count
            return [self.rng.standard_normal((*shape, dim)).astype(self.dtype) for dim in self.dims]
        fused = self.rng.standard_normal((self.batch, count, 3, HEADS, 2 * self.dims[0])).astype(self.dtype)
        return [fused[:, ::-1, 1, :, ::-2].swapaxes(1, 2), fused[:, :, 2, :, : self.dims[1]].swapaxes(1, 2)]

    def append(self, count, start=None):
        """Update both; what is returned has the model's tokens, and zeros after them."""
        keys, values = self.new(count)
        tokens = tokens_of(keys, values)
        length, offset = self.model.sizes(count)
        if start is None:
            assert self.layer.get_mask_sizes(count) == (length, offset)
        position = None if start is None else np.arange(start, start + count)
        returned = self.cache.update(keys, values, 0, position)
        like = [np.zeros((self.batch, HEADS, dim), self.dtype) for dim in self.dims]
        expected = arrays_of(self.model.update(tokens), like)
        if not any(np.may_share_memory(keys, got) for got in returned):
            keys[...] = values[...] = 99  # they were copied
        for got, side in zip(map(np.asarray, returned), expected, strict=True):
            whole = np.zeros((*side.shape[:2], length, side.shape[3]), side.dtype)
            whole[:, :, : side.shape[2]] = side
            assert got.dtype == side.dtype
            assert got.shape == whole.shape
            assert got.tobytes() == whole.tobytes()
            assert not got.size or got[0, 0].flags.c_contiguous
        self.same(like)
        self.queries = count
        if count:
            self.attend(self.rng.choice([1, count]))

    def attend(self, count):
        query = self.rng.standard_normal((self.batch, HEADS * GROUP, count, self.dims[0])).astype(self.dtype)
        mask = self.rng.random((self.batch, len(self.model))) < 0.8
        sinks = self.rng.standard_normal(HEADS * GROUP).astype(np.float32)
        for columns, options in (
            (None, {"softmax_scale": 0.4, "softcap": 3.0}),
            (mask, {}),
            (None, {"sinks": sinks}),
        ):
            got, lse = self.cache.attend(query, 0, columns, return_lse=True, **options)
            seen = None
            if columns is not None:
                seen = np.broadcast_to(mask[:, None, None], (self.batch, HEADS * GROUP, count, mask.shape[1]))
            expected, expected_lse = self.model.attend(query, seen, **options)
            assert_near(got, expected, TOLERANCE[str(self.dtype)])
            assert_near(lse, expected_lse, TOLERANCE["float32"], "lse")

    def same(self, like=None):
        """Check that everything that can be seen is as in the model."""
        assert self.layer.get_seq_length() == len(self.model)
        assert self.layer._record_past == self.model.recording
        for count in (0, 1, 3, 12):
            assert self.layer.get_mask_sizes(count) == self.model.sizes(count)
        if self.model.stored:
            like = self.model.seen[0]
        if like is not None and self.layer.keys is not None:
            for got, side in zip(
                (self.layer.keys, self.layer.values),
                arrays_of(self.model.last(self.model.stored), like),
                strict=True,
            ):
                assert got.shape == side.shape
                assert got.tobytes() == side.tobytes()

    @rule(count=st.sampled_from([0, 1, 1, 1, 2, 3, 7]))
    def update(self, count):
        if self.kind == "static" and len(self.model) + count > MAX:
            with pytest.raises(CapacityError):
                self.cache.update(*self.new(count), 0)
            self.same()
        else:
            self.append(count)

    @rule(count=st.integers(1, 3), back=st.integers(1, 5))
    def write_again(self, count, back):
        start = len(self.model) - back
        if start < 0 or (self.kind == "static" and start + count > MAX):
            return
        if self.kind == "static":
            self.model.rewind(start)
            self.append(count, start)
        else:
            with pytest.raises(ValueError, match="cache_position"):
                self.cache.update(*self.new(count), 0, np.arange(start, start + count))
            self.same()

    @rule(x=st.integers(-6, 30))
    def crop(self, x):
        self.queries = 0
        error = self.model.crop(x)
        if error is None:
            self.cache.crop(x)
        else:
            with pytest.raises(error):
                self.cache.crop(x)
        self.same()
        if self.model.window is None and len(self.model):
            self.attend(1)

    @precondition(lambda self: self.kind != "paged" and not self.model.recording)
    @rule(begin=st.integers(0, 20), count=st.integers(1, 8))
    def remove(self, begin, count):
        """Remove tokens; later ones move up, because their keys are not rotated."""
        end, length = begin + count, len(self.model)
        if end >= length:
            return
        if self.model.window is not None and end > length - self.model.stored:
            if self.model.window > 2 and length > 1:
                with pytest.raises(ValueError, match="no hole in its window"):
                    self.cache.remove(length - 2, length - 1)
        else:
            self.cache.remove(begin, end, close=True, rope="none")
            self.model.remove(begin, end)
            self.queries = min(self.queries, 1 if self.model.window is None else 0)
        self.same()
        if self.queries:
            self.attend(1)

    @precondition(lambda self: self.kind != "paged" and not self.model.recording)
    @rule(count=st.integers(0, 5), back=st.integers(0, 4))
    def join(self, count, back):
        """Put another layer's tokens behind, or where no window forbids it before the last ones."""
        other, new = cache_of(self.kind, self.window, self.dtype), self.new(count)
        other.update(*new, 0)
        at = max(0, len(self.model) - back)
        slid = self.model.window is not None and count > self.model.keeps()
        if slid or (self.model.window is not None and at < len(self.model)):
            with pytest.raises(ValueError, match="have left it" if slid else "at: expected"):
                self.cache.append(other, at, rope="none")
        elif self.kind == "static" and len(self.model) + count > MAX:
            with pytest.raises(CapacityError):
                self.cache.append(other, at, rope="none")
        else:
            tokens = tokens_of(*new)
            self.cache.append(other, at, rope="none")
            self.model.join(tokens, at)
            self.queries = min(1, len(self.model))
        self.same()
        if self.queries:
            self.attend(1)

    @precondition(lambda self: self.kind in ("sliding", "chunked", "paged"))
    @rule()
    def record(self):
        self.model.recording = self.kind != "paged"  # blocks keep the past anyhow
        self.cache.activate_past_recording()

    @precondition(lambda self: len(self.model) and self.layer.keys is not None)
    @rule(data=st.data())
    def take(self, data):
        count = data.draw(st.sampled_from([self.batch, self.batch, 1, 3]))
        indices = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=count, max_size=count))
        data.draw(st.sampled_from([self.cache.reorder, self.cache.reorder]))(indices)
        self.model.take(indices)
        self.batch = len(indices)
        self.same()
        if self.queries:
            self.attend(self.queries)

    @precondition(lambda self: len(self.model) and self.batch < 4)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats):
        self.cache.repeat(repeats)
        self.model.take([b for b in range(self.batch) for _ in range(repeats)])
        self.batch *= repeats
        self.same()

    @rule(count=st.integers(0, 20))
    def reserve(self, count):
        if self.kind == "static" and len(self.model) + count > MAX:
            with pytest.raises(CapacityError):
                self.cache.reserve(count)
        else:
            self.cache.reserve(count)
        self.same()
        if self.queries:
            self.attend(self.queries)

    @precondition(lambda self: self.kind != "paged")
    @rule()
    def release_undo(self):
        """Release what only an undo needs, as an update of another layer does."""
        self.layer._release_undo()
        self.last_query()

    def last_query(self):
        """Attend with the last token, which needs only its window."""
        self.same()
        self.queries = min(self.queries, 1)
        if self.queries:
            self.attend(1)

    @rule(how=st.sampled_from([*COPIES, "file"]))
    def come_back(self, how):
        """Go on with a copy, or with a layer loaded from a file; it is in memory and shares nothing."""
        before, path = self.cache, self.room / "cache.npz"
        if how == "file":
            before.save(path)
        again = load(path) if how == "file" else COPIES[how](before)
        for layer in () if self.layer.keys is None else before.layers:
            (before.cache if self.kind == "paged" else layer.keys)[...] = 7
        before.close()
        self.go_on_with(again)
        self.last_query()

    @precondition(lambda self: self.offloaded and not self.model.recording)
    @rule()
    def open_again(self):
        """Close the cache and open it again."""
        self.cache.close(keep=True)
        open_folder = PagedCache.open if self.kind == "paged" else Cache.open
        self.go_on_with(open_folder(self.folder, keep=False))
        self.last_query()

    @precondition(lambda self: self.offloaded and self.model.stored and self.layer.keys is not None)
    @precondition(lambda self: self.kind != "paged")  # its arrays never grow
    @rule()
    def lack_room(self):
        calls = [lambda: self.cache.repeat(2), lambda: self.cache.reorder([0] * (self.batch + 1))]
        if self.kind in ("dynamic", "sliding", "chunked"):
            calls.append(lambda: self.cache.update(*self.new(80), 0))
        for call in calls:
            with (
                mock.patch.object(allocation.os, "posix_fallocate", full_disk),
                pytest.raises(OSError, match="No space"),
            ):
                call()
        self.last_query()

    @precondition(lambda self: len(self.model) > 6)
    @rule()
    def reset(self):
        self.cache.reset()
        self.model.reset()
        self.queries = 0
        assert "static" in self.kind or self.layer.keys is None
        self.same()


def machine(of, files, examples, steps):
    chosen = type("Chosen", (Operations,), {"kind": of, "offloaded": files})
    case = chosen.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=steps)
    return case


PLACES = [(kind, files) for kind in (*KINDS, "paged") for files in (False, True)]
places = pytest.mark.parametrize(("kind", "files"), PLACES)


@places
def test_operations(kind, files):
    machine(kind, files, 4 if files else 8, 40)("runTest").runTest()


@pytest.mark.slow
@places
def test_many_operations(kind, files):
    machine(kind, files, 40 if files else 120, 80)("runTest").runTest()
