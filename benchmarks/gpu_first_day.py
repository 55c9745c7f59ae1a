"""Compare kernels of a GPU with the CPU, and time them: what gpu_first_day.sh runs, in parts.

python -m benchmarks.gpu_first_day names          names of the comparisons
python -m benchmarks.gpu_first_day smoke NAME     one of them, in a process of its own
python -m benchmarks.gpu_first_day bench          20 calls in a row between events; the host's time apart
"""

import json
import sys
import time
from pathlib import Path

import click
import ml_dtypes
import numpy as np

import kvkit
import kvkit_cuda

BATCH, HEADS, KV_HEADS, DIM, PAGE = 3, 8, 2, 128, 16
LIMITS = {"bfloat16": 3e-2, "float16": 4e-3}
DECODE = (1, 32_768), (1, 131_072), (8, 8192), (64, 8192)  # sequences, tokens of each


def normal(rng, *shape, dtype=np.float16):
    return (rng.standard_normal(shape) * 0.5).astype(dtype)


def index_of(tokens, past, batch, page):
    """Return the index tensors of a plan for sequences of one length, and the rows that they need."""
    pages, counts = -(-(past + tokens) // page), np.arange(batch + 1)
    table = np.arange(batch * pages).reshape(batch, pages) * page
    return (counts * tokens, counts * (past + tokens), table, np.full(batch, past)), batch * pages * page


def cached(package, rng, tokens, past, bits=0, dtype=np.float16):
    """Attend over a cache of floats or codes in pages; return the outputs and the cache."""
    index, rows = index_of(tokens, past, BATCH, PAGE)
    cache, scale = normal(rng, 1, 2, KV_HEADS, rows, DIM, dtype=dtype), None
    if bits:
        cache = rng.integers(-7, 8, (1, 2, KV_HEADS, rows, DIM * bits // 8)).astype(np.int8)
        scale = np.full((1, 2, KV_HEADS, rows, DIM // 8), 0.05, dtype)
    new = [normal(rng, BATCH * tokens, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    how = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "cache_layout": 3}
    how |= {"quant_bit": bits, "quant_group": 8} if bits else {}
    plan = package.dynamic_batching.plan(*index, cache_mode=1, page_size=PAGE)
    return plan.multi_head_cache_attention(*new, cache, scale, **how), cache


def paged(package, rng, stored, tokens=1, **scales):
    """Append to pools and attend, by a plan; return the outputs and the pools."""
    pools = [normal(rng, 12, PAGE, KV_HEADS, DIM).astype(stored) for _ in range(2)]
    plan = package.paged_plan(np.arange(12).reshape(BATCH, 4), [50, 17, 64], np.arange(BATCH + 1) * tokens,
                              page_size=PAGE)  # fmt: skip
    query, *new = (normal(rng, BATCH * tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    plan.paged_append(*new, *pools, **scales)
    return plan.paged_attention(query, *pools, **scales), *(pool.astype(np.float32) for pool in pools)


def packed(package, rng):
    tokens = [normal(rng, 2, 40, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return package.multi_head_attention(*tokens, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)


def rotated(package, rng):
    return package.rotary_position_embedding(normal(rng, 1, 7, 8, DIM), normal(rng, 1, 7, 2, DIM), 5)


def latent(package, rng, heads):
    """Attend to latent rows in pages, by a sequence of two queries and one that ends within a page."""
    rows, query = (normal(rng, *shape, dtype=ml_dtypes.bfloat16) for shape in ((4, 64, 576), (3, heads, 576)))
    tables, lengths = np.array([[3, 0, 2], [1, 1, 1]]), [180, 37]
    return package.mla_attention(query, rows, tables, lengths, [0, 2, 3], scale=192**-0.5, return_lse=True)


SCALES = {"key_scale": 0.5, "value_scale": 2.0}
CASES = {
    "slopes": lambda package, rng: package.alibi_slope(num_heads=12),
    "mask": lambda package, rng: package.alibi_mask(5, 3, num_heads=12),
    "rotary": rotated,
    "decode float16": lambda package, rng: cached(package, rng, 1, 600),
    "decode bfloat16": lambda package, rng: cached(package, rng, 1, 600, dtype=ml_dtypes.bfloat16),
    "decode int8": lambda package, rng: cached(package, rng, 1, 300, 8),
    "decode int4": lambda package, rng: cached(package, rng, 1, 300, 4),
    "prefill float16": lambda package, rng: cached(package, rng, 40, 70),
    "prefill packed": packed,
    "pages float16": lambda package, rng: paged(package, rng, np.float16),
    "pages e4m3": lambda package, rng: paged(package, rng, ml_dtypes.float8_e4m3fn, **SCALES),
    "pages e4m3, prefill": lambda package, rng: paged(package, rng, ml_dtypes.float8_e4m3fn, 12, **SCALES),
    "latent bfloat16 rows, 128 heads": lambda package, rng: latent(package, rng, 128),
    "latent bfloat16 rows, 16 heads": lambda package, rng: latent(package, rng, 16),
}


def leaves(result):
    """Return the arrays of nested results as float64."""
    if isinstance(result, (tuple, list)):
        return [leaf for each in result for leaf in leaves(each)]
    return [np.asarray(result).astype(np.float64)]


def timed(function, calls=20):
    """Return the median seconds of a call on the device, and those of the host, of calls in a row."""
    import torch

    for _ in range(3):
        function()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        host = time.perf_counter()
        for _ in range(calls):
            function()
        host = (time.perf_counter() - host) / calls
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e-3)
    return sorted(times)[2], host


def decode_cases():
    """Yield (name, function, bytes) of decoding from pages of floats and of e4m3, by plans."""
    import torch

    for batch, tokens in DECODE:
        blocks = batch * tokens // PAGE
        plan = kvkit_cuda.paged_plan(np.arange(blocks).reshape(batch, -1), [tokens] * batch, page_size=PAGE)
        for kind in ("float16", "bfloat16", "float8_e4m3fn"):
            dtype = torch.bfloat16 if kind == "bfloat16" else torch.float16
            pools = [
                torch.randn(blocks, PAGE, 8, DIM, device="cuda").to(getattr(torch, kind)) for _ in range(2)
            ]
            query = torch.randn(batch, 32, DIM, device="cuda", dtype=dtype)
            out, scales = torch.empty_like(query), SCALES if kind == "float8_e4m3fn" else {}

            def run(plan=plan, query=query, pools=pools, out=out, scales=scales):
                plan.paged_attention(query, *pools, **scales, out=out)

            yield f"decode B={batch} T={tokens} {kind}", run, 2 * pools[0].nbytes
            del pools


@click.group()
def main():
    """Compare kernels of a GPU with the CPU, and time them."""


@main.command()
def names():
    """Print the names of the comparisons."""
    print("\n".join(CASES))


@main.command()
@click.argument("name", type=click.Choice(list(CASES)))
def smoke(name):
    """Compare an operator with the CPU; end with 1 if they differ."""
    expected = leaves(CASES[name](kvkit, np.random.default_rng(1)))
    begin = time.perf_counter()
    found = leaves(CASES[name](kvkit_cuda, np.random.default_rng(1)))
    pairs = list(zip(found, expected, strict=True))
    alike = all((np.isfinite(one) == np.isfinite(other)).all() for one, other in pairs)
    finite = [(one[np.isfinite(one)], other[np.isfinite(other)]) for one, other in pairs if alike]
    worst = max((float(np.abs(one - other).max(initial=0)) for one, other in finite), default=np.inf)
    right = worst <= LIMITS["bfloat16" if "bfloat16" in name else "float16"]
    print(f"{'ok ' if right else 'BAD'} {name:20s} worst {worst:.2e} in {time.perf_counter() - begin:.1f} s")
    sys.exit(not right)


@main.command()
@click.option(
    "--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures there."
)
def bench(path):
    """Time decoding beside a copy."""
    import torch

    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target, results = torch.empty_like(source), []
    for name, function, moved in (("copy", lambda: target.copy_(source), 2 << 31), *decode_cases()):
        try:
            seconds, host = timed(function)
        except Exception as error:  # the others still tell something
            print(f"FAIL {name}: {type(error).__name__} {str(error)[:150]}")
            continue
        results.append({"case": name, "seconds": seconds, "host_seconds": host, "bytes": moved})
        print(
            f"{name:36s} {seconds * 1e6:9.1f} us {moved / seconds / 1e9:7.0f} GB/s  host {host * 1e6:7.1f} us"
        )
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
