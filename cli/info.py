"""`kvkit info`: show versions, the CPU, compiled code and backends, for bug reports."""

from __future__ import annotations

import contextlib
import platform
from typing import Any

import click
import llvmlite
import llvmlite.binding
import ml_dtypes
import numba
import numpy as np

from kvkit.cpu import machine, prefetching
from kvkit.errors import DeviceError
from kvkit.runtime import disk_cache, source_digest
from kvkit.runtime.jit import SOURCE_LETTERS, cache_folder
from kvkit.runtime.processor import this_processor
from kvkit.tools import tuning
from kvkit.version import __version__
from kvkit_cli import ownership, show

THIS = "these sources of kvkit"
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "neon": "NEON"}  # the widest first


@click.command()
@click.option("--compiled", is_flag=True, help="List the compiled code by module too.")
@click.option("--json", "for_programs", is_flag=True, help="Print JSON.")
def info(compiled: bool, for_programs: bool) -> None:
    """Show versions, the CPU, threads, compiled code and backends.

    \b
    Examples:
      kvkit info
      kvkit info --compiled
      kvkit info --json
    """
    code = compiled_code()
    if for_programs:
        show.as_json(system_facts() | {"compiled": code})
        return
    table = show.table(None, "what", "here")
    for name, text in system_facts().items():
        table.add_row(name, text)
    count, size = (sum(row[key] for row in code) for key in ("variants", "bytes"))
    table.add_row("compiled code", f"{count} variants, {show.size(size)} (--compiled lists them)")
    show.out(table)
    if not compiled:
        return
    table = show.table("Compiled code", "of", "for", "variants", "size")
    for row in code:
        table.add_row(row["of"], row["for"], str(row["variants"]), show.size(row["bytes"]))
    if table.row_count:
        show.out(table)


def compiled_code() -> list[dict[str, Any]]:
    """Count files of compiled code by module and by the sources and machine that they are for."""
    root, here = disk_cache.root_folder(), cache_folder()
    counts: dict[tuple[str, str], tuple[int, int]] = {}  # {(module, what for): (files, bytes)}
    for path in sorted(root.glob("*/*.bin")) if root else ():
        module, sources = module_of(path.stem), path.stem.split("-")[-2]  # MODULE-FUNCTION-SOURCES-VARIANT
        if path.name.startswith("kvkit_cuda"):
            row = "kvkit_cuda", "GPUs"
        elif path.parent != here:
            row = "all", "another CPU, Python or Numba"
        elif module and sources == source_digest.digest(module)[:SOURCE_LETTERS]:
            row = module, THIS
        else:
            row = "all", "other sources of kvkit"
        count, size = counts.get(row, (0, 0))
        with contextlib.suppress(FileNotFoundError):  # another process has removed it since
            counts[row] = count + 1, size + path.stat().st_size
    rows = sorted(counts.items(), key=lambda entry: (entry[0][1] != THIS, entry[0]))  # these sources first
    return [{"of": of, "for": what, "variants": n, "bytes": size} for (of, what), (n, size) in rows]


def module_of(name: str) -> str | None:
    """Return the module whose compiled code is in a file of this name; None if there is none."""
    legal = [module for module in source_digest.SOURCES if name.startswith(module.replace(".", "-") + "-")]
    return max(legal, key=len, default=None)


def system_facts() -> dict[str, str]:
    """Return {name: fact} about this system."""
    distances, source = prefetching.of_this_machine()
    layer, layers = numba.config.THREADING_LAYER, numba.config.THREADING_LAYER_PRIORITY
    obstacle = machine.tiles_obstacle()
    modules, features = (np, numba, llvmlite, ml_dtypes), llvmlite.binding.get_host_cpu_features()
    vectors = next((name for feature, name in VECTORS.items() if features.get(feature)), "no known vectors")
    return {
        "kvkit": __version__,
        "distribution": ownership.owners(),
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        **{module.__name__: module.__version__ for module in modules},
        "CPU": f"{this_processor().name}, {vectors}; to LLVM {llvmlite.binding.get_host_cpu_name()}",
        "prefetches": f"{tuning.describe(distances)} ({source})",
        "tiles (AMX)": f"not used: {obstacle}" if obstacle else "used",
        "threads": f"{numba.get_num_threads()} of at most {numba.config.NUMBA_NUM_THREADS}",
        # Numba chooses when the first parallel kernel starts.
        "threading layer": f"{layer}: the first of {', '.join(layers)} that loads",
        "compile cache": show.code_folder_text(cache_folder()),
        "backend cpu": "works",
        "backend cuda": cuda_state(),
    }


def cuda_state() -> str:
    """Return the device that kvkit_cuda runs on, or what it lacks."""
    from kvkit_cuda.device_runtime import needs

    missing = needs.messages()
    if missing:
        return f"not available: {'; '.join(missing)}"

    from kvkit_cuda.device_runtime import host

    try:
        host.require_device(host.current())
    except DeviceError as error:
        return f"not available: {error}"
    return f"works on {host.name()}"
