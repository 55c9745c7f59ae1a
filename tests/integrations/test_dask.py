"""Attention over chunks and shards, beside the same on one machine; shards that are lost, slow, or empty."""

import contextlib
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvkit
from kvkit.cache import PagedCache
from kvkit.errors import KvkitError

da = pytest.importorskip("dask.array")
distributed = pytest.importorskip("distributed")

from kvkit.integrations.dask import ShardedCache, ShardError, attend, partial_attention  # noqa: E402

pytestmark = pytest.mark.cpu

LAYERS, BATCH, HEADS, GROUP, DIM = 2, 2, 3, 2, 16
SIZES = LAYERS, HEADS, DIM


@pytest.fixture(scope="module")
def client():
    """Yield a client of three workers in threads of this process."""
    with distributed.Client(
        processes=False, n_workers=3, threads_per_worker=1, dashboard_address=":0"
    ) as client:
        yield client


@pytest.fixture
def cluster():
    """Yield a client of three worker processes that are not replaced when they end."""
    options = {"n_workers": 3, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        distributed.LocalCluster(processes=True, **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def states(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


CALLS = {
    "causal": {}, "all": {"is_causal": False}, "window": {"window": (5, 0)},
    "both sides": {"is_causal": False, "window": (3, 2)}, "alibi": {"is_alibi": True},
    "alibi in a window": {"is_alibi": True, "window": (6, -1)},
    "softcap and scale": {"softcap": 2.0, "softmax_scale": 0.7},
}  # fmt: skip
CHUNKS = {
    "tokens": (2, (10, 0, 1, 30), 3, 16),
    "all": (1, 7, 1, 16),
    "heads": (2, 41, (1, 2), 16),
    "none at first": (2, (0, 41), 3, 8),
}


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        *((name, "tokens") for name in CALLS),
        *(("alibi in a window", name) for name in CHUNKS if name != "tokens"),
    ],
)
def test_attention_over_chunks(rng, options, chunks):
    options, chunks = CALLS[options], CHUNKS[chunks]
    query = states(rng, BATCH, 7, HEADS * GROUP, DIM)
    key, value = (states(rng, BATCH, 41, HEADS, dim) for dim in (DIM, 24))
    sinks = states(rng, HEADS * GROUP)
    mask = rng.random((BATCH, 1, 7, 41)) > 0.2
    sizes = {"num_heads": HEADS * GROUP, "head_dim": DIM, "num_kv_heads": HEADS}
    expected = kvkit.multi_head_attention(
        query, key, value, mask, sinks=sinks, return_lse=True, **sizes, **options
    )
    chunked = da.from_array(query, chunks=(1, 3, -1, -1)), da.from_array(key, chunks=chunks)
    lazy = attend(*chunked, value, mask, sinks=sinks, return_lse=True, **options)
    found = [array.compute(scheduler="sync") for array in lazy]
    for one, other in zip(found, expected, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_queries_before_a_chunk_see_nothing_of_it(rng):
    """And are no NaN, which (-inf) - (-inf) would be."""
    query, key = states(rng, 1, 4, 1, 8), states(rng, 1, 3, 1, 8)
    out, lse = partial_attention.attend_part(query, key, key, query_start=0, key_start=9)
    assert not out.any()
    assert np.isneginf(lse).all()
    lonely = attend(query, da.from_array(key[:, :2], chunks=1), key[:, :2], return_lse=True)
    out, lse = (array.compute(scheduler="sync") for array in lonely)
    assert not out[:, :2].any()
    assert np.isneginf(lse[:, :2]).all()
    assert np.isfinite(lse[:, 2:]).all()


def test_chunks_give_the_same_bits_on_any_workers(rng, client):
    query, key = states(rng, 1, 5, 4, DIM), da.from_array(states(rng, 1, 300, 2, DIM), chunks=(1, 17, 2, DIM))
    lazy = attend(query, key, key)
    alone = lazy.compute(scheduler="sync")
    for _ in range(3):
        np.testing.assert_array_equal(lazy.compute(scheduler=client), alone)


UNFIT = [
    ("query", np.zeros((1, 1, 3, 8), np.float32)), ("query", np.zeros((1, 1, 4, 8))),
    ("value", np.zeros((1, 4, 2, 8), np.float32)), ("key", np.zeros((1, 5, 2, 8), np.float32)),
    ("attn_mask", np.zeros((1, 4), bool)), ("attn_mask", np.zeros((1, 5), np.int32)), ("window", 5),
    ("window", (-5, 0)), ("softcap", -1.0), ("sinks", np.zeros(3, np.float32)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), UNFIT)
def test_arrays_that_do_not_fit(name, change):
    key = da.zeros((1, 5, 2, 8), dtype=np.float32)
    given = {"query": np.zeros((1, 1, 4, 8), np.float32), "key": key, "value": key}
    with pytest.raises(KvkitError, match=f"^{name}: expected "):
        attend(**given | {name: change})


def test_chunks_of_unknown_sizes():
    key = da.zeros((1, 5, 2, 8), dtype=np.float32)
    some = key[:, key[0, :, 0, 0] > 0]
    with pytest.raises(KvkitError, match=r"^key: expected chunks of known sizes"):
        attend(np.zeros((1, 1, 4, 8), np.float32), some, some)


def steps(cache, other, rng, dtype, tokens=(1, 1, 7, 1, 20, 1), options=({},), atol=2e-6, batch=BATCH):
    """Run the same tokens through both caches, and compare their outputs."""
    for count in tokens:
        key, value = (states(rng, LAYERS, batch, HEADS, count, DIM, dtype=dtype) for _ in range(2))
        query = states(rng, LAYERS, batch, HEADS * GROUP, count, DIM, dtype=dtype)
        for i in range(LAYERS):
            cache.append(key[i], value[i], i)
            other.update(key[i], value[i], i)
            for each in options:
                found = cache.attend(query[i], i, return_lse=True, **each)
                expected = other.layers[i].attend(query[i], return_lse=True, **each)
                for one, another in zip(found, expected, strict=True):
                    np.testing.assert_allclose(one.astype("f4"), another.astype("f4"), atol=atol)
    assert cache.get_seq_length() == other.layers[0].get_seq_length()


FORMATS = {"float32": {}, "float16": {}, "int8": {"quant_bit": 8}, "e4m3": {"quant_format": "e4m3"}}


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("split", ["tokens", "heads"])
def test_a_sharded_cache_is_a_paged_cache(rng, client, split, stored):
    dtype = np.dtype("float16" if FORMATS[stored] else stored)
    other = PagedCache(64, 4, *SIZES, dtype, **FORMATS[stored])
    options = {}, {"window": (4, 0)}, {"sinks": np.ones(HEADS * GROUP, np.float32)}
    atol = 2e-6 if stored == "float32" else 4e-3
    with ShardedCache(
        client, *SIZES, format=stored, split=split, page_size=4, interleave=3, num_blocks=64
    ) as cache:
        steps(cache, other, rng, dtype, options=options, atol=atol)
        cache.crop(9)
        other.crop(9)
        cache.fork([1, 0])
        other.select([1, 0])
        steps(cache, other, rng, dtype, tokens=(1, 3), atol=atol)


def test_a_shard_that_has_no_tokens_any_more(rng, client):
    """Three rows go on as one; the shards that were emptied take the rows that there are then."""
    other = PagedCache(64, 4, *SIZES, np.float32)
    with ShardedCache(client, *SIZES, format="float32", page_size=4, num_blocks=16) as cache:
        steps(cache, other, rng, np.float32, tokens=(11,))
        for each in (cache, other):
            each.crop(3)
        cache.fork([1, 0, 1])
        other.select([1, 0, 1])
        assert [(each["tokens"], each["rows"]) for each in cache.about()] == [(3, 3), (0, 0), (0, 0)]
        steps(cache, other, rng, np.float32, tokens=(1, 7, 1), batch=3)
        cache.crop(0)
        steps(cache, PagedCache(64, 4, *SIZES, np.float32), rng, np.float32, tokens=(5,), batch=1)


def test_a_long_prompt_is_masked_in_pieces(rng, client, monkeypatch):
    monkeypatch.setattr(partial_attention, "MASK_BYTES", 512)
    other = PagedCache(64, 4, *SIZES, np.float32)
    with ShardedCache(client, *SIZES, format="float32", page_size=4, num_blocks=16) as cache:
        steps(cache, other, rng, np.float32, tokens=(23, 9), options=({}, {"window": (5, 0)}))


def test_masks_and_alibi_know_positions(rng, client):
    key, query = states(rng, BATCH, HEADS, 29, DIM), states(rng, BATCH, HEADS * GROUP, 5, DIM)
    sizes = {"num_heads": HEADS * GROUP, "head_dim": DIM, "num_kv_heads": HEADS}
    padding = rng.random((BATCH, 29)) > 0.3
    padding[1] = False  # so that a row sees nothing on any shard
    for split in ("tokens", "heads"):
        with ShardedCache(
            client, 1, HEADS, DIM, format="float32", split=split, page_size=2, num_blocks=32
        ) as cache:
            cache.append(key, key, 0)
            found = cache.attend(query, 0, padding, is_alibi=True)
            turned = [array.swapaxes(1, 2) for array in (query, key, key)]
            expected = kvkit.multi_head_attention(*turned, padding[:, None, None], is_alibi=True, **sizes)
            np.testing.assert_allclose(found, expected.swapaxes(1, 2), atol=2e-6)


def test_traffic_does_not_know_the_context(client):
    with ShardedCache(client, 1, HEADS, DIM, page_size=2, num_blocks=64) as cache:
        new, query = np.ones((1, HEADS, 1, DIM), np.float16), np.ones((1, HEADS * GROUP, 1, DIM), np.float16)
        sent = []
        for _ in range(40):
            before = cache.traffic
            cache.append(new, new, 0)
            cache.attend(query, 0)
            sent.append(cache.traffic - before)
        (steady,) = set(sent[9:])
        arrays = 2 * new.nbytes + 3 * (2 * query.nbytes + 4 * HEADS * GROUP)
        assert arrays < steady < arrays + 3 * 1000  # beside the forms of a call and of its result


@pytest.mark.parametrize(("stored", "kept"), [("float32", {}), ("int8", {"quant_bit": 8})])
def test_saved_and_loaded_on_other_workers(rng, client, tmp_path, stored, kept):
    sizes = {"page_size": 4, "num_blocks": 16, "dtype": np.float32}
    other = PagedCache(64, 4, *SIZES, np.float32, **kept)
    with ShardedCache(client, *SIZES, format=stored, **sizes, shards=4) as cache:
        steps(cache, other, rng, np.float32, tokens=(5,))
        cache.save(tmp_path)
        cache.save(tmp_path)
    assert len(list(tmp_path.glob("*/shard-*.npz"))) == 4
    with ShardedCache.load(client, tmp_path) as cache:
        assert cache.get_seq_length() == 5
        steps(cache, other, rng, np.float32, tokens=(1, 6))


def test_a_save_that_fails_leaves_the_last_one(rng, client, tmp_path, monkeypatch):
    """A shard that answers is not lost: the cache goes on, or back to what was saved."""
    other = PagedCache(64, 4, *SIZES, np.float32)
    with ShardedCache(client, *SIZES, format="float32", page_size=4, num_blocks=16) as cache:
        steps(cache, other, rng, np.float32, tokens=(5,))
        cache.save(tmp_path)
        saved = sorted(tmp_path.rglob("*"))
        with monkeypatch.context() as patch:
            patch.setattr(PagedCache, "save", lambda cache, path: path + 1)
            with pytest.raises(KvkitError, match=r"^shard 0: expected save to succeed, got TypeError"):
                cache.save(tmp_path)
        assert sorted(tmp_path.rglob("*")) == saved
        steps(cache, copy.deepcopy(other), rng, np.float32, tokens=(8,))
        cache.restore(tmp_path)
        steps(cache, other, rng, np.float32, tokens=(2, 1))
    expected = r": expected a cache of "
    with (
        ShardedCache(client, 1, HEADS, DIM, format="float32") as cache,
        pytest.raises(KvkitError, match=expected),
    ):
        cache.restore(tmp_path)


def test_no_room_leaves_the_cache_as_it_was(rng, client):
    other = PagedCache(64, 4, *SIZES, np.float32)
    with ShardedCache(client, *SIZES, format="float32", page_size=4, num_blocks=4) as cache:
        steps(cache, other, rng, np.float32, tokens=(12, 9))
        tokens = states(rng, BATCH, HEADS, 9, DIM)
        cache.append(tokens, tokens, 0)
        with pytest.raises(KvkitError, match="num_blocks: expected"):
            cache.attend(tokens, 0)
        assert cache.get_seq_length() == 21
        steps(cache, other, rng, np.float32, tokens=(1, 1))


def test_what_a_cache_refuses(client, tmp_path):
    with ShardedCache(client, *SIZES, format="float32") as cache:
        new = np.ones((1, HEADS, 1, DIM), np.float32)
        for name, call in {
            "layer_idx": lambda: cache.append(new, new, LAYERS),
            "key_states": lambda: cache.append(new[:, :1], new, 0),
            "value_states": lambda: cache.append(new, np.ones((1, HEADS, 2, DIM), np.float32), 0),
            "query": lambda: cache.attend(new, 0),
            "indices": lambda: cache.fork([3]),
            "length": lambda: cache.crop(1),
            "ShardedCache": lambda: pickle.dumps(cache),
        }.items():
            with pytest.raises(KvkitError, match=f"^{name}: expected"):
                call()
        with pytest.raises(KvkitError, match="ShardedCache: expected to stay with its client"):
            copy.copy(cache)
        cache.append(new, new, 0)
        for call in (lambda: cache.attend(new, 1), lambda: cache.append(new, new, 0)):
            with pytest.raises(KvkitError, match=r"^layer_idx: expected a layer that has"):
                call()
        with pytest.raises(KvkitError, match=r"^window: expected"):
            cache.attend(new, 0, window=5)
        assert cache.attend(new, 0).shape == new.shape  # the step is still open
        with pytest.raises(KvkitError, match=r"^save: expected all layers .* got layers \[1\]"):
            cache.save(tmp_path)
    wrong = {"format": "float8", "split": "pages", "shards": 0, "dtype": "float64"}
    for name, value in (wrong | {"timeout": -1}).items():
        with pytest.raises(KvkitError, match=f"^{name}: expected"):
            ShardedCache(client, *SIZES, **{name: value})
    for other in None, "tcp://scheduler:8786":
        with pytest.raises(KvkitError, match=r"^client: expected a distributed\.Client, got "):
            ShardedCache(other, *SIZES)


LIES = [
    {"length": "5"}, {"length": -1}, {"length": 6}, {"batch": 0}, {"batch": 3}, {"cache": []},
    {"cache": {"shards": 10**9}}, {"cache": {"shards": 1}},
    {"cache": {"head_dim": 32}}, {"cache": {"num_layers": LAYERS + 1}}, {"cache": {"format": ["x"]}},
    {"cache": {"dtype": 7}}, {"cache": {"quant_group": "x"}}, {"cache": {"client": 1}},
    {"cache": {"interleave": -4}}, {"save": 5}, {"save": "0" * 12}, {"shard": b""},
]  # fmt: skip


def test_a_save_that_lies(rng, client, tmp_path):
    """Each lie is refused in a line, whatever shard notices it."""
    with ShardedCache(client, *SIZES, format="float32", page_size=4, num_blocks=16, shards=2) as cache:
        steps(cache, PagedCache(64, 4, *SIZES, np.float32), rng, np.float32, tokens=(5,))
        cache.save(tmp_path)
    whole = json.loads((tmp_path / "sharded.json").read_text())
    for lie in LIES:
        said = whole | lie
        if isinstance(lie.get("cache"), dict):
            said["cache"] = whole["cache"] | lie["cache"]
        if "shard" in said:
            next(tmp_path.glob("*/shard-1.npz")).write_bytes(said.pop("shard"))
        (tmp_path / "sharded.json").write_text(json.dumps(said))
        with pytest.raises(KvkitError) as caught:
            ShardedCache.load(client, tmp_path, timeout=20)
        assert "\n" not in str(caught.value)


def test_a_folder_that_is_none(client, tmp_path):
    with pytest.raises(KvkitError, match=r"expected a folder with sharded\.json"):
        ShardedCache.load(client, tmp_path)
    said = {"format_version": 1, "save": "../elsewhere", "length": 0, "batch": 0, "cache": {}}
    (tmp_path / "sharded.json").write_text(json.dumps(said))
    with pytest.raises(KvkitError, match=r"expected a sharded.json that kvkit wrote"):
        ShardedCache.load(client, tmp_path)  # and another save would remove what it names
    (tmp_path / "sharded.json").write_text(json.dumps({"format_version": 9}))
    with pytest.raises(KvkitError, match=r"expected sharded.json of version 1, got 9"):
        ShardedCache.load(client, tmp_path)


def test_two_clients_have_caches_of_their_own(rng, client):
    with distributed.Client(client.cluster) as second:
        others = [PagedCache(64, 4, *SIZES, np.float32) for _ in range(2)]
        caches = [ShardedCache(each, *SIZES, format="float32", page_size=4) for each in (client, second)]
        errors = []

        def run(i):
            try:
                steps(caches[i], others[i], np.random.default_rng(i), np.float32)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for cache in caches:
            cache.close()
        assert not errors


def filled(cache, other, tmp_path):
    """Return a cache with tokens that are saved, and a new one."""
    rng = np.random.default_rng(0)
    steps(cache, other, rng, np.float32, tokens=(9, 1))
    cache.save(tmp_path)
    return states(rng, BATCH, HEADS, 1, DIM)


def lost(cache, call, *signals):
    """Stop a shard and send it signals while `call` waits; return the seconds until that is noticed."""
    process = cache.about()[1]["process"]
    os.kill(process, signal.SIGSTOP)  # so that all that follows is in the middle of the call
    timers = [threading.Timer(0.3, os.kill, (process, each)) for each in signals]
    for timer in timers:
        timer.start()
    begin = time.monotonic()
    expected = r"^shard 1 (on|in) .*: expected an answer within .*; load the last save"
    with pytest.raises(ShardError, match=expected):
        call()
    seconds = time.monotonic() - begin
    for timer in timers:
        timer.join()
    with pytest.raises(KvkitError, match=r"^cache: expected one whose shards all answer"):
        cache.crop(0)
    with contextlib.suppress(ProcessLookupError):  # a worker that was killed has been buried by its nanny
        os.kill(process, signal.SIGKILL)
    return seconds


def append(cache, new, folder):
    """Append more tokens than a socket takes from a worker that does not read."""
    long = np.repeat(new, 4000, 2)
    for layer_idx in range(LAYERS):
        cache.append(long, long, layer_idx)
    cache.save(folder)


CALLED = {
    "append": append,
    "append and step": lambda cache, new, folder: [
        cache.append(new, new, 0),
        cache.attend(np.repeat(new, GROUP, 1), 0),
    ],
    "step": lambda cache, new, folder: cache.attend(new, 1),
    "save": lambda cache, new, folder: cache.save(folder),
}
SMALL = {"format": "float32", "page_size": 4}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets of a lost worker
@pytest.mark.parametrize("called", ["append", "step"])
def test_a_worker_that_stops_answering(called, tmp_path, cluster):
    other = PagedCache(64, 4, *SIZES, np.float32)
    with ShardedCache(cluster, *SIZES, **SMALL, num_blocks=4096, timeout=20) as cache:
        new = filled(cache, other, tmp_path)
        given = np.repeat(new, GROUP, 1) if called == "step" else new
        assert 20 <= lost(cache, lambda: CALLED[called](cache, given, tmp_path)) < 40


@pytest.mark.slow
def test_an_interrupt_ends_a_call_at_once(rng, tmp_path, cluster):
    """Nobody knows what the shards have done then, so that the cache refuses all else."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have switched off
    here = threading.main_thread().ident, signal.SIGINT  # as Ctrl-C comes, not to the thread of a timer
    with ShardedCache(cluster, *SIZES, **SMALL, shards=2) as cache:
        new = filled(cache, PagedCache(64, 4, *SIZES, np.float32), tmp_path)
        process = cache.about()[1]["process"]
        os.kill(process, signal.SIGSTOP)
        threading.Timer(0.5, signal.pthread_kill, here).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            cache.attend(np.repeat(new, GROUP, 1), 0)
        assert time.monotonic() - begin < 30
        os.kill(process, signal.SIGCONT)
        with pytest.raises(KvkitError, match=r"got one that failed \(KeyboardInterrupt\)"):
            cache.crop(0)


@pytest.mark.slow
def test_a_slow_worker_is_waited_for(rng, tmp_path, cluster):
    other = PagedCache(64, 4, *SIZES, np.float32)
    with ShardedCache(cluster, *SIZES, **SMALL, shards=2) as cache:
        filled(cache, other, tmp_path)
        process = cache.about()[1]["process"]
        os.kill(process, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (process, signal.SIGCONT)).start()
        steps(cache, other, rng, np.float32, tokens=(1, 5))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets of a lost worker
@pytest.mark.parametrize(
    "called", ["step", *(pytest.param(name, marks=pytest.mark.slow) for name in CALLED if name != "step")]
)
def test_a_worker_that_dies(called, tmp_path, cluster):
    other = PagedCache(64, 4, *SIZES, np.float32)
    with ShardedCache(cluster, *SIZES, **SMALL, num_blocks=4096, timeout=60) as cache:
        new = filled(cache, other, tmp_path)
        given = np.repeat(new, GROUP, 1) if called == "step" else new
        assert lost(cache, lambda: CALLED[called](cache, given, tmp_path), signal.SIGKILL) < 61
    assert len(list(tmp_path.iterdir())) == 2  # the last save, and sharded.json
    with ShardedCache.load(cluster, tmp_path) as cache:
        steps(cache, other, np.random.default_rng(1), np.float32, tokens=(1, 4))


@pytest.mark.slow
def test_a_worker_that_has_just_died_gets_no_shard(tmp_path, cluster):
    other = PagedCache(64, 4, *SIZES, np.float32)
    with ShardedCache(cluster, *SIZES, **SMALL) as cache:
        filled(cache, other, tmp_path)
        os.kill(cache.about()[1]["process"], signal.SIGKILL)
        with ShardedCache.load(cluster, tmp_path, timeout=20) as again:
            steps(again, other, np.random.default_rng(1), np.float32, tokens=(1, 4))


@pytest.mark.model
def test_a_model_on_three_workers_one_of_which_is_killed():
    script = Path(__file__).parents[2] / "examples" / "smollm2_sharded.py"
    command = [sys.executable, str(script), "--tokens", "8"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "all 16 tokens are those of one process: True" in result.stdout
