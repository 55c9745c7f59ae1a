"""Compare kernels on a GPU with the CPU, and time them; gpu_first_day.sh runs these commands.

python -m benchmarks.gpu_first_day names          names of the comparisons
python -m benchmarks.gpu_first_day smoke NAME     one of them, in a process of its own
python -m benchmarks.gpu_first_day bench          time 20 calls in a row, on the device and on the host
"""

import json
import statistics
import sys
import time
from pathlib import Path

import click
import ml_dtypes
import numpy as np
from numba import cuda, types

import kvkit
import kvkit_cuda
from benchmarks.gpu import timed
from kvkit_cuda.calls import tables
from kvkit_cuda.copy import chunks
from kvkit_cuda.device_runtime import device, host, ptx

BATCH, HEADS, KV_HEADS, DIM, PAGE = 3, 8, 2, 128, 16
LIMITS = {"bfloat16": 3e-2, "float16": 4e-3}
DECODE = (1, 32_768), (1, 131_072), (8, 8192), (64, 8192)  # sequences, tokens of each
IN_PAGES = "float16", "bfloat16", "float8_e4m3fn", "int8"  # with a scale for all codes
IN_CACHES = "int8/64", "int4/32"  # codes / codes that share a scale
PREFILL = 4096, 16_384
ROPE = kvkit.Rope(DIM)


def normal(rng, *shape, dtype=np.float16):
    return (rng.standard_normal(shape) * 0.5).astype(dtype)


def index_of(tokens, past, batch, page):
    """Return the index tensors of a plan for sequences of one length, and the rows that they need."""
    pages, counts = -(-(past + tokens) // page), np.arange(batch + 1)
    table = np.arange(batch * pages).reshape(batch, pages) * page
    return (counts * tokens, counts * (past + tokens), table, np.full(batch, past)), batch * pages * page


def attend_to_cache(package, rng, tokens, past, bits=0, dtype=np.float16):
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


def attend_to_pages(package, rng, stored, tokens=1, **scales):
    """Append rotated keys to pools and attend, by a plan; return the outputs and the pools."""
    pools = [normal(rng, 12, PAGE, KV_HEADS, DIM).astype(stored) for _ in range(2)]
    plan = package.paged_plan(np.arange(12).reshape(BATCH, 4), [50, 17, 64], np.arange(BATCH + 1) * tokens,
                              page_size=PAGE)  # fmt: skip
    query, *new = (normal(rng, BATCH * tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    plan.paged_append(*new, *pools, **scales, rope=ROPE)
    return plan.paged_attention(query, *pools, **scales), *(pool.astype(np.float32) for pool in pools)


def attend_to_keys(package, rng):
    tokens = [normal(rng, 2, 40, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return package.multi_head_attention(*tokens, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)


def rotated(package, rng):
    query, key = normal(rng, 1, 7, 8, DIM), normal(rng, 1, 7, 2, DIM)
    return package.rotary_position_embedding(query, key, 5, interleaved=True)


def latent(package, rng, heads):
    """Attend to latent rows in pages, by a sequence of two queries and one that ends within a page."""
    rows, query = (normal(rng, *shape, dtype=ml_dtypes.bfloat16) for shape in ((4, 64, 576), (3, heads, 576)))
    tables, lengths = np.array([[3, 0, 2], [1, 1, 1]]), [180, 37]
    options = {"softmax_scale": 192**-0.5, "return_lse": True}
    return package.mla_attention(query, rows, tables, lengths, [0, 2, 3], **options)


def subnormals(package, rng):
    """Multiply codes c, as the subnormal float16 numbers c 2^-24, in tensor cores; on the CPU in float64."""
    codes = rng.integers(0, 256, (16, 16)).astype(np.uint16).view(np.float16)  # [rows, inner]
    factors = (rng.integers(-64, 65, (16, 8)) * 256).astype(np.float16)  # [inner, columns]; sums are exact
    if package is kvkit:
        return codes.astype(np.float64) @ factors.astype(np.float64)
    lane = np.arange(32)
    # A lane's place in fragments of PTX's mma.m16n8k16: row g, and columns k and k + 1.
    g, k = lane // 4, lane % 4 * 2 + np.arange(2)[:, None]  # [two elements of a word, lanes]
    a = [codes[g + row, k + column] for column in (0, 8) for row in (0, 8)]
    b = [factors[k + row, g] for row in (0, 8)]
    words = np.stack([pair.T.copy().view(np.uint32)[:, 0] for pair in (*a, *b)], 1)  # [lanes, words]
    stream = host.stream(None)
    (there,) = host.tables([words.astype(np.int64)], stream)
    sums = host.empty(4 * 32, np.float32, stream)
    kernel = device.kernel(multiply, types.void(types.Array(types.int64, 2, "C"), types.int64))
    host.launch(kernel, (1,), 32, stream, (there, host.address(sums)))
    c = host.read(host.address(sums), 4 * 4 * 32, stream).view(np.float32).reshape(8, 4, 2, 2)
    return c.transpose(2, 0, 1, 3).reshape(16, 8)  # [two rows, g, columns of a lane, two columns]


mma, write = ptx.mma("float16"), chunks.write("float32")


def multiply(words, out):
    """Write a lane's four sums of a product of matrices, whose fragments are words [lanes, 6]."""
    lane, zero = int(cuda.threadIdx.x), np.float32(0)
    a = (np.uint32(words[lane, 0]), np.uint32(words[lane, 1]),
         np.uint32(words[lane, 2]), np.uint32(words[lane, 3]))  # fmt: skip
    c = mma(a, (np.uint32(words[lane, 4]), np.uint32(words[lane, 5])), (zero, zero, zero, zero))
    for i in range(4):
        write(out + (4 * lane + i) * 4, c[i])


SCALES = {"key_scale": 0.5, "value_scale": 2.0}
CASES = {
    "float16 subnormals": subnormals,
    "slopes": lambda package, rng: package.alibi_slope(num_heads=12),
    "mask": lambda package, rng: package.alibi_mask(5, 3, num_heads=12),
    "rotary": rotated,
    "decode float16": lambda package, rng: attend_to_cache(package, rng, 1, 600),
    "decode bfloat16": lambda package, rng: attend_to_cache(package, rng, 1, 600, dtype=ml_dtypes.bfloat16),
    "decode int8": lambda package, rng: attend_to_cache(package, rng, 1, 300, 8),
    "decode int4": lambda package, rng: attend_to_cache(package, rng, 1, 300, 4),
    "prefill float16": lambda package, rng: attend_to_cache(package, rng, 40, 70),
    "prefill packed": attend_to_keys,
    "pages float16": lambda package, rng: attend_to_pages(package, rng, np.float16),
    "pages e4m3": lambda package, rng: attend_to_pages(package, rng, ml_dtypes.float8_e4m3fn, **SCALES),
    "pages e4m3, prefill": lambda package, rng: attend_to_pages(
        package, rng, ml_dtypes.float8_e4m3fn, 12, **SCALES
    ),
    "latent bfloat16 rows, 128 heads": lambda package, rng: latent(package, rng, 128),
    "latent bfloat16 rows, 16 heads": lambda package, rng: latent(package, rng, 16),
}


def leaves(result):
    """Return the arrays of nested results as float64."""
    if isinstance(result, (tuple, list)):
        return [leaf for each in result for leaf in leaves(each)]
    return [np.asarray(result).astype(np.float64)]


def random(*shape, dtype="float16"):
    """Return random numbers on the device: normal ones, or codes."""
    import torch

    if dtype == "int8":
        return torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8)
    numbers = torch.empty(shape, device="cuda", dtype=torch.float16).normal_()
    return numbers.to(getattr(torch, dtype))


def page_cases(batch, tokens):
    """Yield (name, function, bytes) of decoding from pages, by plans; of one sequence in fewer splits too."""
    blocks = batch * tokens // PAGE
    table = np.arange(blocks).reshape(batch, -1)
    for kind in IN_PAGES:
        pools = [random(blocks, PAGE, 8, DIM, dtype=kind) for _ in range(2)]
        query = random(batch, 32, DIM, dtype="bfloat16" if kind == "bfloat16" else "float16")
        scales, usual = SCALES if kind in IN_PAGES[2:] else {}, tables.MOST_SPLITS
        for splits in (usual, 256) if kind == "float16" and batch == 1 else (usual,):
            tables.MOST_SPLITS = splits  # of a plan's calls, when they first run
            plan = kvkit_cuda.paged_plan(table, [tokens] * batch, page_size=PAGE)

            out = query.clone()

            def run(i, plan=plan, query=query, pools=pools, out=out, scales=scales):
                plan.paged_attention(query, *pools, **scales, out=out)

            note = f", {splits} splits" * (splits != usual)
            yield f"decode B={batch} T={tokens} {kind}{note}", run, {"bytes": 2 * pools[0].nbytes}
        tables.MOST_SPLITS = usual


def cache_cases(batch, tokens):
    """Yield (name, function, bytes) of an append and decoding from codes in groups, by a plan."""
    index, rows = index_of(1, tokens - 1, batch, 128)
    plan = kvkit_cuda.dynamic_batching.plan(*index, batch, cache_mode=1, page_size=128)
    for kind in IN_CACHES:
        bits, group = (int(number) for number in kind.removeprefix("int").split("/"))
        cache = random(1, 2, 8, rows, DIM * bits // 8, dtype="int8")
        scale = random(1, 2, 8, rows, DIM // group).abs_().mul_(0.02)
        new = [random(batch, heads, DIM) for heads in (32, 8, 8)]
        how = {"num_heads": 32, "num_kv_heads": 8, "head_dim": DIM, "cache_layout": 3}

        how |= {"quant_bit": bits, "quant_group": group, "out": new[0].clone()}

        def run(i, new=new, cache=cache, scale=scale, how=how):
            plan.multi_head_cache_attention(*new, cache, scale, **how)

        yield f"decode B={batch} T={tokens} {kind}", run, {"bytes": cache.nbytes + scale.nbytes}


def prefill_cases(tokens):
    """Yield (name, function, operations) of a prompt in pages by a plan, and of torch's attention."""
    import torch

    plan = kvkit_cuda.paged_plan(np.arange(tokens // PAGE)[None], [tokens], [0, tokens], page_size=PAGE)
    work = {"operations": 2 * DIM * 32 * tokens * (tokens + 1)}  # two products over half of the scores
    for kind in ("float16", "bfloat16"):
        query, *pools = (random(tokens, heads, DIM, dtype=kind) for heads in (32, 8, 8))
        pools = [pool.reshape(-1, PAGE, 8, DIM) for pool in pools]

        out = query.clone()

        def run(i, query=query, pools=pools, out=out):
            plan.paged_attention(query, *pools, out=out)

        yield f"prefill {tokens} {kind}", run, work
        states = [array.reshape(1, tokens, -1, DIM).transpose(1, 2) for array in (query, *pools)]

        def attend(i, states=states):
            torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True, enable_gqa=True)

        yield f"torch prefill {tokens} {kind}", attend, work


def bench_cases():
    """Yield (name, function, work) of all that is timed: limits of the device first."""
    arrays = [random(2**30) for _ in range(2)]
    yield "copy", lambda i: arrays[0].copy_(arrays[1]), {"bytes": 2 * arrays[0].nbytes}
    arrays[:] = [random(8192, 8192)] * 2
    yield "matmul 8192", lambda i: arrays[0] @ arrays[1], {"operations": 2 * 8192**3}
    for sizes in DECODE:
        yield from page_cases(*sizes)
        yield from cache_cases(*sizes)
    for tokens in PREFILL:
        yield from prefill_cases(tokens)


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
    same_places = all((np.isfinite(got) == np.isfinite(want)).all() for got, want in pairs)
    finite = [(got[np.isfinite(got)], want[np.isfinite(want)]) for got, want in pairs if same_places]
    worst = max((float(np.abs(got - want).max(initial=0)) for got, want in finite), default=np.inf)
    is_right = worst <= LIMITS["bfloat16" if "bfloat16" in name else "float16"]
    seconds = time.perf_counter() - begin
    print(f"{'ok ' if is_right else 'BAD'} {name:20s} worst {worst:.2e} in {seconds:.1f} s")
    sys.exit(not is_right)


@main.command()
@click.option(
    "--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures there."
)
def bench(path):
    """Time decoding and prompts beside a copy and a product: medians of 5 times 20 calls in a row."""
    results = []
    for name, function, work in bench_cases():
        try:
            runs = [timed(function) for _ in range(6)][1:]
        except Exception as error:  # the others still tell something
            print(f"FAIL {name}: {type(error).__name__} {str(error)[:150]}")
            continue
        seconds, host = (statistics.median(each) for each in zip(*runs, strict=True))
        results.append({"case": name, "seconds": seconds, "host_seconds": host} | work)
        rates = {"bytes": (1e9, "GB/s"), "operations": (1e12, "TFLOP/s")}
        rate = "".join(f"{work[key] / seconds / rates[key][0]:7.0f} {rates[key][1]:7s}" for key in work)
        print(f"{name:44s} {seconds * 1e6:9.1f} us {rate} host {host * 1e6:7.1f} us")
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
