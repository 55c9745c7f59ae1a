"""`kvkit warm`: compile code ahead of calls, in several processes, for the CPU or a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing.connection
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from kvkit import formats
from kvkit.errors import KvkitError
from kvkit.formats.known import ALIASES
from kvkit_cli import show
from kvkit_cli.warming import CODE_BITS, CacheKind

WHAT = "attention", "cache", "all"
USUAL = "float16,int8:g8,int4:g8"  # --formats, if it is not given
DEFAULT_GROUP = 8  # elements that share a scale, where there are scales
POSITIVE = click.IntRange(1)
Wave = list[tuple[str, str, CacheKind]]  # (name to print, task of warming.py, its argument)
Process = subprocess.Popen[str]


def parse_formats(texts: Sequence[str], data: str, dim: int, queries: int) -> Iterator[tuple[str, CacheKind]]:
    """Yield (text, kind) for each cache format in the texts."""
    for text in ",".join(texts or [USUAL]).split(","):
        name = ALIASES.get(text, text)
        if name in map(str, formats.FLOATS):
            yield text, CacheKind(name, DEFAULT_GROUP, name, dim, queries)
            continue
        try:
            known = formats.named(text)
        except KvkitError as error:
            raise KvkitError(f"--formats {text}: {str(error).partition(': ')[2]}") from None
        if known.code.name not in CODE_BITS or known.rule != "pmx" or known.per != "group":
            wanted = f"expected floats or {', '.join(CODE_BITS)} with their group, as in int4:g32"
            wanted += f", got a format of {known.code.name}"
            raise KvkitError(f"--formats {text}: {wanted}")
        if dim % known.group:
            raise KvkitError(f"--formats {text}: expected a group that divides a head of {dim} elements")
        yield text, CacheKind(known.code.name, known.group, data, dim, queries)


@click.command()
@click.argument("what", type=click.Choice(WHAT), default="all", required=False)
@click.option(
    "--formats", "texts", multiple=True, metavar="FORMAT,...",
    help=f"Formats of caches; {USUAL} if not given. "
    "Scales are float16.",
)  # fmt: skip
@click.option(
    "--data", type=click.Choice([fmt.name for fmt in formats.FLOATS]), default="float16", show_default=True,
    help="The type of keys and values before they become codes.",
)  # fmt: skip
@click.option("--head-dim", "dim", type=POSITIVE, default=128, show_default=True, help="Elements of a head.")
@click.option("--queries", type=POSITIVE, default=4, show_default=True, help="Query heads for each key head.")
@click.option(
    "--backend", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="What runs the code: this CPU, or the first GPU of this machine.",
)  # fmt: skip
@click.option(
    "--capability", metavar="X.Y",
    help="With --backend cuda: compile for this compute capability, without a GPU.",
)  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
def warm(
    what: str,
    texts: Sequence[str],
    data: str,
    dim: int,
    queries: int,
    backend: str,
    capability: str | None,
    quiet: bool,
) -> None:
    """Compile code ahead of the calls that need it.

    Compiled code is kept on disk, where later processes find it; `kvkit info` prints the folder. One process
    for each CPU compiles. Then attention is measured for 3 seconds, once a machine, to choose how far ahead
    it prefetches here. That changes no result; KVKIT_TUNE=off turns it off. --backend cuda compiles the
    kernels of paged caches: append, load and attention.

    \b
    Examples:
      kvkit warm
      kvkit warm attention --formats bfloat16 --head-dim 64
      kvkit warm cache --formats int8:g64,int4:g32 --data float32
      kvkit warm --backend cuda --formats bfloat16,int8 --data bfloat16
      kvkit warm --backend cuda --capability 9.0
    """
    chosen = list(parse_formats(texts, data, dim, queries))
    if backend == "cpu":
        if capability:
            raise KvkitError(f"--capability {capability}: only GPUs have one: add --backend cuda")
        compile_waves(task_waves(what, chosen), quiet)
        return
    if what != "all":
        raise KvkitError(f"{what}: --backend cuda compiles attention and cache together: leave {what} out")
    name, folder, number = find_device(capability)
    chosen = [(text, dataclasses.replace(kind, capability=number)) for text, kind in chosen]
    compile_waves([[(f"kernels for a cache of {text}", "kernels", kind) for text, kind in chosen]], quiet)
    if not quiet:
        click.echo(f"for {name}; compile cache {show.code_folder_text(folder)}")


def find_device(capability: str | None) -> tuple[str, Path | None, tuple[int, int] | None]:
    """Return (name of the GPU to compile for, folder of its code, `capability` as two numbers or None)."""
    from kvkit_cuda.device_runtime import needs

    needs.packages()

    from kvkit_cuda.device_runtime import compiled, host

    if capability:
        major, _, minor = capability.partition(".")
        if not (major.isdecimal() and minor.isdecimal()):
            raise KvkitError(f"--capability {capability}: expected X.Y, as 9.0")
        number = int(major), int(minor)
        needs.device("a GPU", number)
        return f"compute capability {capability}", compiled.folder(), number
    host.require()
    host.require_device(host.current())
    return host.name(), compiled.folder(), None


def task_waves(what: str, kinds: Sequence[tuple[str, CacheKind]]) -> list[Wave]:
    """Return waves of tasks. The second needs code that the first compiles; the third measures, alone."""
    any_kind = kinds[0][1]  # these tasks compile the same for all
    first, second = [("index tensors of a step", "step", any_kind)], []
    if what != "cache":
        first.insert(0, ("attention", "attention", any_kind))  # the longest task begins first
        second = [(f"attention to {text}", "attention_to_cache", kind) for text, kind in kinds]
    if what != "attention":
        first += [(f"cache of {text}", "cache", kind) for text, kind in kinds]
    third = [("distances of prefetches", "tune", any_kind)]
    return [first, second] if what == "cache" else [first, second, third]


def compile_waves(waves: list[Wave], quiet: bool = False) -> None:
    """Run all tasks in one process for each CPU. All processes end when this returns or raises."""
    with contextlib.ExitStack() as started, show.steps("compiling", sum(map(len, waves)), quiet) as done:
        command = [sys.executable, "-P", "-m", "kvkit_cli.warming"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes: list[Process] = []
        for _ in range(min(os.cpu_count() or 1, len(waves[0]))):
            process = subprocess.Popen(command, env=os.environ | {"KVKIT_QUIET": "1"}, **pipes)
            started.callback(end_process, process)  # when the stack unwinds
            processes.append(process)
        for wave in waves:
            run_wave(wave, processes, done)


def end_process(process: Process) -> None:
    """Kill a process, and close its pipes even if it has not read all."""
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()


def run_wave(wave: Wave, processes: Sequence[Process], done: Callable[[str], object]) -> None:
    """Run the tasks of a wave, each in an idle process."""
    idle, busy, waiting = list(processes), {}, list(wave)
    while waiting or busy:
        while waiting and idle:
            name, task, kind = waiting.pop(0)
            process = idle.pop()
            busy[process.stdout] = process, name
            with contextlib.suppress(BrokenPipeError):  # `read_answer` meets a process that has ended
                process.stdin.write(json.dumps([task, dataclasses.asdict(kind)]) + "\n")
                process.stdin.flush()
        for output in multiprocessing.connection.wait(list(busy)):
            process, name = busy.pop(output)
            done(name + read_answer(process, name))
            idle.append(process)


def read_answer(process: Process, name: str) -> str:
    """Return the text that a process answers; raise if its task failed or it has ended."""
    line = process.stdout.readline()
    if not line.endswith("\n"):
        code = process.wait()
        why = f"signal {-code}" if code < 0 else f"code {code}"
        raise ChildProcessError(f"compiling {name}: its process ended with {why}")
    answer, failure = json.loads(line)
    if failure:
        raise ChildProcessError(f"compiling {name}: {failure}")
    return answer
