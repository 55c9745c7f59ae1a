"""A cache on many workers: what a step costs beside one process, what travels, and a model of more workers.

    python benchmarks/sharded.py [--tokens 10000,100000] [--workers 1,2,4] [--json FILE]

A step is one layer of one sequence: 32 query heads, 8 key heads of 128 float16 elements, of which a token
takes 4 KiB. Each row is the median of steps that alternate with those of one process over as many tokens.
"""

import itertools
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
TOKEN = 2 * KEY_HEADS * DIM * 2  # bytes
PIECE = 8192  # tokens appended at a time


def filled(cache, append, tokens):
    piece = (
        np.random.default_rng(1)
        .standard_normal((1, KEY_HEADS, min(PIECE, tokens), DIM), np.float32)
        .astype(np.float16)
    )
    for begin in range(0, tokens, PIECE):
        new = piece[:, :, : min(PIECE, tokens - begin)]
        append(cache, new)
    return cache


def medians(calls, seconds=2.0, least=9):
    """Microseconds of each call, in turn, for so long."""
    for call in calls:
        call()
        call()
    found, end = [[] for _ in calls], time.perf_counter() + seconds
    while len(found[0]) < least or time.perf_counter() < end:
        for times, call in zip(found, calls, strict=True):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
    return [statistics.median(times) for times in found]


def one_process(tokens):
    blocks = -(-tokens // PAGE)
    cache = PagedCache(blocks, PAGE, 1, KEY_HEADS, DIM, np.float16)
    return filled(cache, lambda cache, new: cache.update(new, new, 0), tokens)


def steps(workers, tokens, transport, client, rng):
    """A row of the table: so many tokens on each worker."""
    blocks = -(-tokens // PAGE) + 1
    query = rng.standard_normal((1, HEADS, 1, DIM), np.float32).astype(np.float16)
    options = {"shards": workers, "num_blocks": blocks, "page_size": PAGE, "transport": transport}
    with ShardedCache(client, 1, KEY_HEADS, DIM, **options) as cache:
        filled(cache, lambda cache, new: cache.append(new, new, 0), workers * tokens)
        cache.attend(query, 0)  # sends what is pending
        alone = one_process(workers * tokens)
        before = cache.traffic
        np.testing.assert_allclose(
            cache.attend(query, 0).astype("f4"), alone.attend(query, 0).astype("f4"), atol=2e-3
        )
        traffic = cache.traffic - before
        step, process, trip = medians(
            [
                lambda: cache.attend(query, 0),
                lambda: alone.attend(query, 0),
                cache.about,
            ]
        )
    return {
        "transport": transport,
        "workers": workers,
        "tokens a worker": tokens,
        "step": step,
        "one process": process,
        "round trip": trip,
        "traffic": traffic,
    }


def offline(client, tokens, rng):
    """Attention over a dask array, beside one process on the same cores: microseconds of both."""
    query = rng.standard_normal((1, 1, HEADS, DIM), np.float32).astype(np.float16)
    shape, chunk = (1, tokens, KEY_HEADS, DIM), max(1, tokens // 8)
    key = da.ones(shape, chunks=(1, chunk, KEY_HEADS, DIM), dtype=np.float16).persist()
    whole = np.ones(shape, np.float16)
    sizes = {"num_heads": HEADS, "head_dim": DIM, "num_kv_heads": KEY_HEADS}
    return medians(
        [
            lambda: client.compute(attend(query, key, key)).result(),
            lambda: kvkit.multi_head_attention(query, whole, whole, **sizes),
        ],
        least=3,
    )


def modelled(rows):
    """Milliseconds of a step on more workers: the slowest round trip, and a share of the bytes.

    From what was measured: the round trip by workers, as a line; the bytes a worker reads a second.
    """
    actors = [row for row in rows if row["transport"] == "actors"]
    counts, trips = zip(*((row["workers"], row["round trip"]) for row in actors), strict=True)
    slope = max(0.0, np.polyfit(counts, trips, 1)[0]) if len(set(counts)) > 1 else 0.0
    base = max(0.0, statistics.mean(trips) - slope * statistics.mean(counts))
    largest = max(rows, key=lambda row: row["one process"])
    speed = largest["workers"] * largest["tokens a worker"] * TOKEN / largest["one process"]  # bytes a us
    return {
        (workers, tokens): (base + slope * workers + tokens / workers * TOKEN / speed) / 1000
        for workers in (1, 4, 16, 64, 256)
        for tokens in (10**5, 10**6, 10**7, 10**8)
    }


def numbers(context, parameter, text):
    return [int(float(number)) for number in text.split(",")]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tokens", default="10000,100000", callback=numbers, show_default=True, help="On each worker.")
@click.option("--workers", default="1,2,4", callback=numbers, show_default=True)
@click.option(
    "--offline", "long", default=10**6, type=int, show_default=True, help="Tokens of the dask array."
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="File for the figures.")
def main(tokens, workers, long, path):
    """Measure steps of a sharded cache, attention over a dask array, and model more workers."""
    rng, console, rows = np.random.default_rng(0), Console(), []
    for count in workers:
        threads = max(1, (os.cpu_count() or 1) // count)
        with (
            LocalCluster(n_workers=count, threads_per_worker=threads, dashboard_address=None) as cluster,
            Client(cluster) as client,
        ):
            for each, transport in itertools.product(tokens, ("actors", "pipes")):
                rows.append(steps(count, each, transport, client if transport == "actors" else None, rng))
    with (
        LocalCluster(n_workers=1, threads_per_worker=os.cpu_count() or 1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        chunks, process = offline(client, long, rng)
    table = Table(
        "transport", "workers", "tokens a worker", "step, ms", "one process, ms", "round trip, ms", "bytes"
    )
    for row in rows:
        times = (f"{row[name] / 1000:.2f}" for name in ("step", "one process", "round trip"))
        size = f"{row['tokens a worker']:,}"
        table.add_row(row["transport"], str(row["workers"]), size, *times, f"{row['traffic']:,}")
    console.print(table)
    console.print(
        f"dask arrays, {long:,} tokens: {chunks / 1000:.1f} ms; one process {process / 1000:.1f} ms"
    )
    model = modelled(rows)
    table = Table(
        "workers",
        *(f"{tokens:.0e} tokens" for tokens in (10**5, 10**6, 10**7, 10**8)),
        title="A model, ms a layer step",
    )
    for count in (1, 4, 16, 64, 256):
        table.add_row(str(count), *(f"{ms:.1f}" for (each, _), ms in model.items() if each == count))
    console.print(table)
    if path:
        about = {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()}
        said = {
            "machine": about,
            "rows": rows,
            "offline": {"tokens": long, "dask": chunks, "one process": process},
        }
        path.write_text(json.dumps(said | {"unit": "us"}, indent=1) + "\n")


if __name__ == "__main__":
    main()
