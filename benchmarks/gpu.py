"""Measure kvkit_cuda on one GPU: python -m benchmarks.gpu --json benchmarks/results/gpu.json

All functions alternate in one process. CUDA events time 20 calls in a row, so that the device does not wait
for the host, whose time is measured separately. `copy` reads and writes as many bytes as the operator must;
`matmul` is torch's product with as many operations. `torch` is the fastest backend of
scaled_dot_product_attention; `gather + torch` copies the rows of the cache first, and widens codes.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import click
import numpy as np

import kvkit_cuda
from benchmarks.suites.measuring import Case, Work, machine, table_row
from kvkit_cli import show
from kvkit_cuda.device_runtime import device, host

B, HEADS, KV_HEADS, DIM, PAST, PAGE = 64, 32, 8, 128, 8191, 128  # sequences, ..., past tokens, page size
PREFILL, APPEND = 4096, 512  # tokens of a prompt, and of an append to each sequence
GROUP = 8  # codes that share a scale
IN_A_ROW = 20  # calls between two events
SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}
DEVICE = "cuda"


def sequences(past, new, paged):
    """Return (a plan, cache rows by position [B, tokens], number of rows); pages are in random order."""
    length = past + new
    pages = -(-length // PAGE)
    starts = np.arange(B * pages).reshape(B, pages) * PAGE
    if paged:
        starts = np.random.default_rng(0).permutation(starts.reshape(-1)).reshape(starts.shape)
    position = np.arange(length)
    rows = starts[:, position // PAGE] + position % PAGE
    plan = kvkit_cuda.dynamic_batching.plan(
        np.arange(B + 1) * new, np.arange(B + 1) * length,
        starts if paged else starts[:, 0], np.full(B, past), B if new == 1 else 0,
        cache_mode=int(paged), page_size=PAGE,
    )  # fmt: skip
    return plan, rows, B * pages * PAGE


def cache_of(kind, rows):
    """Return (cache [L, 2, H, MaxT, Dh], scale, attributes)."""
    import torch

    shape, attributes = (1, 2, KV_HEADS, rows, DIM), {"cache_layout": 3}
    if kind != "int8":
        return torch.randn(shape, device=DEVICE, dtype=getattr(torch, kind)), None, attributes
    codes = torch.randint(-127, 128, shape, device=DEVICE, dtype=torch.int8)
    scale = torch.full((*shape[:-1], DIM // GROUP), 0.02, device=DEVICE, dtype=torch.float16)
    return codes, scale, attributes | {"quant_bit": 8, "quant_group": GROUP}


def new_tokens(kind, tokens):
    import torch

    dtype = getattr(torch, "float16" if kind == "int8" else kind)
    shapes = (tokens, HEADS, DIM), (tokens, KV_HEADS, DIM), (tokens, KV_HEADS, DIM)
    return [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes]


def gathered(cache, scale, rows):
    """Gather keys and values [B, H, tokens, Dh] from the rows of a cache with torch."""
    import torch

    flat = torch.as_tensor(rows.reshape(-1), device=DEVICE)
    states = cache[0].index_select(2, flat)
    if scale is not None:
        codes = states.half().view(*states.shape[:-1], -1, GROUP)
        states = codes * scale[0].index_select(2, flat)[..., None]
    return states.reshape(2, KV_HEADS, *rows.shape, DIM).transpose(1, 2)


def bytes_of(cache, scale, tokens):
    """Return the bytes of the keys and values of this many tokens."""
    arrays = [array for array in (cache, scale) if array is not None]
    return sum(array.nbytes // array.shape[3] * tokens for array in arrays)


def copy(moved):
    """Return a function of the round that reads and writes `moved` bytes in all."""
    import torch

    source, target = (torch.empty(moved // 2, device=DEVICE, dtype=torch.uint8) for _ in range(2))
    return lambda i: target.copy_(source)


def fastest_of_torch(query, key, value, causal):
    """Return the name and the function of torch's fastest attention for these arrays.

    A single query may be folded: the query heads of a key head then take the place of queries.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(backend, folded):
        def run(key, value):
            queries = query.reshape(*key.shape[:2], -1, DIM) if folded else query
            with sdpa_kernel(backend):
                output = torch.nn.functional.scaled_dot_product_attention(
                    queries, key, value, is_causal=causal, enable_gqa=not folded
                )
            return output.reshape(query.shape)

        return run

    candidates = []  # (seconds, name, function)
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        for folded in (False, True) if query.shape[2] == 1 else (False,):
            run = attention(getattr(SDPBackend, name), folded)
            try:
                seconds, _ = timed(lambda i, run=run: run(key, value))
            except RuntimeError:  # the backend does not take these arrays, or lacks memory
                continue
            candidates.append((seconds, name.lower() + " folded" * folded, run))
    _, name, run = min(candidates, key=lambda candidate: candidate[0])
    return name, run


def timed(function):
    """Return the seconds that a call takes on the device and on the host, of calls in a row."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    started = time.perf_counter()
    for i in range(IN_A_ROW):
        function(i)
    host_seconds = (time.perf_counter() - started) / IN_A_ROW
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / IN_A_ROW / 1e3, host_seconds


def check_close(kind, got, expected):
    """Raise if results differ, so that no wrong kernel is measured."""
    worst = (got.float() - expected.float()).abs().max().item()
    if not worst < TOLERANCE["float16" if kind == "int8" else kind]:
        raise click.ClickException(f"{kind}: results are {worst:.3g} apart")


def decode(kind, paged):
    def prepare():
        plan, rows, count = sequences(PAST, 1, paged)
        cache, scale, attributes = cache_of(kind, count)
        query, key, value = new_tokens(kind, B)
        out = query.clone()

        def run(i, plan=plan, cache=cache, scale=scale):
            plan.multi_head_cache_attention(
                query, key, value, cache, scale, **SIZES, **attributes, out=out, stream=stream()
            )

        run(0)
        queries, (keys, values) = query[:, :, None], gathered(cache, scale, rows)
        keys, values = keys.contiguous(), values.contiguous()
        name, torch_run = fastest_of_torch(queries, keys, values, False)
        check_close(kind, out[:, :, None], torch_run(keys, values))
        moved = bytes_of(cache, scale, B * (PAST + 1))
        beside = {
            "copy": copy(moved),
            "torch": lambda i: torch_run(keys, values),
            "gather + torch": lambda i: torch_run(*gathered(cache, scale, rows)),
        }
        if paged:
            plan_without_pages, _, count = sequences(PAST, 1, False)
            contiguous_cache = cache_of(kind, count)[:2]
            beside["contiguous"] = lambda i: run(i, plan_without_pages, *contiguous_cache)
        return Work(run, moved, beside=beside, forms={"torch": name})

    return prepare


def transfer(kind, past, new):
    """Prepare an append of new tokens and a gather of all contexts, into given outputs."""

    def prepare():
        plan, rows, count = sequences(past, new, True)
        cache, scale, attributes = cache_of(kind, count)
        _, key, value = new_tokens(kind, B * new)
        out = tuple(key.new_empty((rows.size, KV_HEADS, DIM)) for _ in range(2))

        def run(i):
            plan.key_value_cache(key, value, cache, scale, **attributes, out=out, stream=stream())

        run(0)
        expected = gathered(cache, scale, rows).transpose(2, 3).reshape(2, -1, KV_HEADS, DIM)
        for got, array in zip(out, expected, strict=True):
            check_close(kind, got, array)
        moved = 2 * key.nbytes + bytes_of(cache, scale, B * new) + bytes_of(cache, scale, rows.size)
        return Work(run, moved + 2 * out[0].nbytes, beside={"copy": copy(moved + 2 * out[0].nbytes)})

    return prepare


def prefill(kind):
    def prepare():
        import torch

        query, key, value = new_tokens(kind, PREFILL)
        pools = [array.reshape(-1, PAGE, KV_HEADS, DIM) for array in (key, value)]  # pages in order
        table = np.arange(PREFILL // PAGE)[None]
        plan, out = kvkit_cuda.paged_plan(table, [PREFILL], [0, PREFILL], page_size=PAGE), query.clone()

        def run(i):
            plan.paged_attention(query, *pools, out=out, stream=stream())

        run(0)
        heads_first = [array[None].transpose(1, 2).contiguous() for array in (query, key, value)]
        name, torch_run = fastest_of_torch(*heads_first, True)
        check_close(kind, out[None].transpose(1, 2), torch_run(*heads_first[1:]))
        operations = 2 * DIM * HEADS * PREFILL * (PREFILL + 1)  # two products over half of the scores
        left = torch.randn(PREFILL, PREFILL, device=DEVICE, dtype=query.dtype)
        right = torch.randn(PREFILL, operations // (2 * left.numel()), device=DEVICE, dtype=query.dtype)
        beside = {"matmul": lambda i: left @ right, "torch": lambda i: torch_run(*heads_first[1:])}
        return Work(run, operations=operations, beside=beside, forms={"torch": name})

    return prepare


def stream():
    import torch

    return torch.cuda.current_stream()


CASES = [
    *(Case(f"decode {kind}", decode(kind, False), {"copy": 0.6 if kind == "int8" else 0.75})
      for kind in ("float16", "bfloat16", "int8")),
    *(Case(f"decode {kind}, pages of {PAGE}", decode(kind, True), {"contiguous": 0.95})
      for kind in ("float16", "bfloat16", "int8")),
    *(Case(f"append 1, gather 8,192, {kind}", transfer(kind, PAST, 1), {"copy": 0.8})
      for kind in ("float16", "int8")),
    *(Case(f"append and gather {APPEND}, {kind}", transfer(kind, 0, APPEND), {"copy": 0.8})
      for kind in ("float16", "int8")),
    *(Case(f"prefill {PREFILL:,}, {kind}", prefill(kind), {"matmul": 0.35})
      for kind in ("float16", "bfloat16")),
]  # fmt: skip


def measure(case, rounds):
    """Return median seconds of a case and of the functions beside it, which alternate, after two warm-ups.

    `seconds` are of the device; `host_seconds` are those that the host takes for a call of the case.
    """
    work = case.prepare()
    functions = {"case": work.run} | work.beside
    times = {name: [] for name in functions}  # (seconds of the device, seconds of the host)
    for _ in range(rounds + 2):
        for name, function in functions.items():
            times[name].append(timed(function))
    medians = {
        name: [statistics.median(each) for each in zip(*pairs[2:], strict=True)]
        for name, pairs in times.items()
    }
    seconds, host_seconds = medians.pop("case")
    medians = {name: device_seconds for name, (device_seconds, _) in medians.items()}
    result = {"case": case.name, "seconds": seconds, "host_seconds": host_seconds}
    result |= {"bytes": work.moved} if work.moved else {"operations": work.operations}
    return result | {"beside": medians, "forms": work.forms, "goals": case.goals}


@click.command()
@click.option(
    "--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures there."
)
@click.option("--only", default="", metavar="TEXT", help="Only cases whose names contain TEXT.")
@click.option("--rounds", default=21, show_default=True, help="Runs of each case; medians are shown.")
def main(path, only, rounds):
    """Measure kvkit_cuda beside copies and torch on the current GPU."""
    try:
        import torch

        host.require()
        host.require_device(host.current())
    except (ImportError, kvkit_cuda.DeviceError) as error:
        raise click.ClickException(str(error)) from None
    if device.SIMULATED or not torch.cuda.is_available():
        raise click.ClickException("expected a GPU that torch can use, got none")
    gpu = torch.cuda.get_device_properties(0)
    versions = {"cuda": torch.version.cuda, "torch": torch.__version__}
    machine_facts = machine() | {"gpu": gpu.name, "multiprocessors": gpu.multi_processor_count} | versions
    table = show.table(
        f"{gpu.name}; medians of {rounds}",
        *("case", "µs", "GB/s", "Gop/s", "as fast as", "goals missed", "host µs"),
    )
    results = []
    for case in CASES:
        if only in case.name:
            results.append(measure(case, rounds))
            table.add_row(*table_row(results[-1]), f"{results[-1]['host_seconds'] * 1e6:,.0f}")
            torch.cuda.empty_cache()
    show.console(width=None if sys.stdout.isatty() else 130).print(table)
    if path:
        about = {"kvkit": kvkit_cuda.__version__, "machine": machine_facts, "rounds": rounds}
        path.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
