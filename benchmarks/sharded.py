"""Measure a cache on many workers: steps beside one process, bytes that are sent, a model of more workers.

    python benchmarks/sharded.py [--tokens 10000,100000] [--workers 1,2,4] [--json FILE]

A step is one layer of one sequence, with 32 query heads and 8 key heads of 128 float16 elements: 4 KiB for a
token. Steps alternate with those of one process over as many tokens; rows show medians. The overhead is the
time of a step beyond the slowest shard's attention, which shards measure. Rows are added to those of FILE,
and tables show all of them.
"""

import contextlib
import json
import os
import platform
import statistics
import time
from pathlib import Path

import click
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster
from rich.console import Console
from rich.table import Table

import kvkit
from kvkit.cache import PagedCache
from kvkit.integrations.dask import ShardedCache, attend

HEADS, KEY_HEADS, DIM, PAGE = 32, 8, 128, 64
TOKEN_BYTES = 2 * KEY_HEADS * DIM * 2  # key and value of all heads, in float16
PIECE = 8192  # tokens appended at a time
CHUNKS = 8  # of a dask array
KEYS = "workers", "tokens a worker"


def filled(cache, append, tokens):
    """Append tokens to a cache by calls `append(cache, new)`; return the cache."""
    shape = 1, KEY_HEADS, min(PIECE, tokens), DIM
    piece = np.random.default_rng(1).standard_normal(shape, np.float32).astype(np.float16)
    for begin in range(0, tokens, PIECE):
        new = piece[:, :, : min(PIECE, tokens - begin)]
        append(cache, new)
    return cache


def timed(call):
    """Return the microseconds of a call."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def medians(seconds=3.0, least=2, **calls):
    """Return the median microseconds of each call; calls alternate, with pauses for spinning threads."""
    found, end = {name: [] for name in calls}, time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(found.values()))) < 5 * least:
        for name, call in calls.items():
            time.sleep(0.02)
            call()
            found[name] += [timed(call) for _ in range(5)]
    return {name: statistics.median(times) for name, times in found.items()}


def one_process(tokens):
    blocks = -(-tokens // PAGE)
    cache = PagedCache(blocks, PAGE, 1, KEY_HEADS, DIM, np.float16)
    return filled(cache, lambda cache, new: cache.update(new, new, 0), tokens)


def steps(workers, tokens, client, rng):
    """Return a row of the table, for this many tokens on each worker."""
    blocks = -(-tokens // PAGE) + 1
    query = rng.standard_normal((1, HEADS, 1, DIM), np.float32).astype(np.float16)
    options = {"shards": workers, "num_blocks": blocks, "page_size": PAGE}
    with ShardedCache(client, 1, KEY_HEADS, DIM, **options) as cache:
        filled(cache, lambda cache, new: cache.append(new, new, 0), workers * tokens)
        cache.attend(query, 0)  # sends what is pending
        alone = one_process(workers * tokens)
        expected = alone.attend(query, 0).astype("f4")
        np.testing.assert_allclose(cache.attend(query, 0).astype("f4"), expected, atol=2e-3)
        before = cache.traffic
        cache.attend(query, 0)
        traffic, overheads = cache.traffic - before, []

        def step():
            """Run a step and note its seconds beyond the slowest shard's attention."""
            earlier = cache.about()
            took = timed(lambda: cache.attend(query, 0))
            shards = zip(earlier, cache.about(), strict=True)
            overheads.append(took - max(b["seconds"] - a["seconds"] for a, b in shards) * 1e6)

        times = medians(
            step=lambda: cache.attend(query, 0),
            process=lambda: alone.attend(query, 0),
            trip=cache.about,
            overhead=step,
        )
    return {
        "workers": workers,
        "tokens a worker": tokens,
        "step": times["step"],
        "overhead": statistics.median(overheads),
        "one process": times["process"],
        "round trip": times["trip"],
        "traffic": traffic,
    }


def offline(client, tokens, rng):
    """Return microseconds of attention over a dask array, and of one process on the same cores."""
    query = rng.standard_normal((1, 1, HEADS, DIM), np.float32).astype(np.float16)
    chunk = max(1, tokens // CHUNKS)
    key = da.map_blocks(
        filled_array,
        da.from_array(np.full(tokens // chunk, chunk), chunks=1),
        chunks=((1,), (chunk,) * (tokens // chunk), (KEY_HEADS,), (DIM,)),
        new_axis=(0, 2, 3),
        dtype=np.float16,
    ).persist()
    whole = filled_array(tokens // chunk * chunk)
    sizes = {"num_heads": HEADS, "head_dim": DIM, "num_kv_heads": KEY_HEADS}
    return medians(
        dask=lambda: client.compute(attend(query, key, key)).result(),
        process=lambda: kvkit.multi_head_attention(query, whole, whole, **sizes),
    )


def filled_array(tokens):
    """Return keys in memory of their own; `dask.array.ones` stores one number only."""
    return np.full((1, int(np.sum(tokens)), KEY_HEADS, DIM), 0.5, np.float16)


def modelled(rows):
    """Return a model f(workers, tokens, machines) of a step's milliseconds, and its constants.

    It adds an overhead, a line over the number of workers that is fitted to the rows, and the time to read
    the cache at the measured speed of one process, divided among machines.
    """
    shortest = min(row["tokens a worker"] for row in rows)
    counts, trips = zip(
        *((row["workers"], row["overhead"]) for row in rows if row["tokens a worker"] == shortest),
        strict=True,
    )
    slope = max(0.0, np.polyfit(counts, trips, 1)[0]) if len(set(counts)) > 1 else 0.0
    base = max(0.0, statistics.mean(trips) - slope * statistics.mean(counts))
    largest = max(rows, key=lambda row: row["workers"] * row["tokens a worker"])
    read_bytes = largest["workers"] * largest["tokens a worker"] * TOKEN_BYTES
    speed = read_bytes / largest["one process"]  # bytes a microsecond

    def milliseconds(workers, tokens, machines):
        return (base + slope * workers + tokens / machines * TOKEN_BYTES / speed) / 1000

    return milliseconds, {"base": base, "each worker": slope, "GB/s": speed / 1000}


def numbers(context, parameter, text):
    return [int(float(number)) for number in text.split(",")]


def measured(path):
    """Return the results of earlier runs in a file."""
    return json.loads(path.read_text()) if path and path.exists() else {"unit": "us", "rows": []}


def tables(results):
    """Yield the tables of the results and of the model."""
    columns = "workers", "tokens a worker", "step, ms", "overhead, ms", "one process, ms"
    table = Table(*columns, "round trip, ms", "bytes a step")
    for row in results["rows"]:
        times = (f"{row[name] / 1000:.2f}" for name in ("step", "overhead", "one process", "round trip"))
        size = f"{row['tokens a worker']:,}"
        table.add_row(str(row["workers"]), size, *times, f"{row['traffic']:,}")
    yield table
    if "offline" in results:
        dask, process = (results["offline"][name] / 1000 for name in ("dask", "process"))
        size = results["offline"]["tokens"]
        yield f"dask arrays, {size:,} tokens: {dask:.0f} ms; one process {process:.0f} ms"
    if not results["rows"]:
        return
    step_time, constants = modelled(results["rows"])
    sizes = 10**5, 10**6, 10**7, 10**8
    table = Table(
        "workers",
        *(f"{size:,} tokens" for size in sizes),
        title="A model, ms a layer step, each worker on a machine like this one",
    )
    for workers in (1, 4, 16, 64, 256):
        table.add_row(str(workers), *(f"{step_time(workers, size, workers):.1f}" for size in sizes))
    yield table
    yield "of " + ", ".join(f"{name} {value:.1f}" for name, value in constants.items())
    table = Table(
        "workers",
        "tokens",
        "modelled, ms",
        "measured, ms",
        title="The model, of workers on one machine, beside what was measured",
    )
    for row in results["rows"]:
        workers, size = row["workers"], row["workers"] * row["tokens a worker"]
        times = f"{step_time(workers, size, 1):.1f}", f"{row['step'] / 1000:.1f}"
        table.add_row(str(workers), f"{size:,}", *times)
    yield table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tokens", default="10000,100000", callback=numbers, show_default=True, help="On each worker.")
@click.option("--workers", default="1,2,4", callback=numbers, show_default=True)
@click.option(
    "--offline", "long", default=10**6, show_default=True, help="Tokens of the dask array; 0: none."
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="File for the figures.")
def main(tokens, workers, long, path):
    """Measure steps of a sharded cache, attention over a dask array, and model more workers."""
    rng, console, results = np.random.default_rng(0), Console(width=110), measured(path)
    results["machine"] = {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    rows = {tuple(row[name] for name in KEYS): row for row in results["rows"]}
    for count in workers:
        with cluster(count, max(1, (os.cpu_count() or 1) // count)) as client:
            for each in tokens:
                rows[count, each] = steps(count, each, client, rng)
    results["rows"] = [rows[key] for key in sorted(rows)]
    if long:
        with cluster(1, os.cpu_count() or 1) as client:
            results["offline"] = {"tokens": long} | offline(client, long, rng)
    for each in tables(results):
        console.print(each)
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n")


@contextlib.contextmanager
def cluster(workers, threads):
    """Start a client whose messages go to the workers themselves, not through the scheduler."""
    options = {"n_workers": workers, "threads_per_worker": threads, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster, direct_to_workers=True) as client:
        yield client


if __name__ == "__main__":
    main()
