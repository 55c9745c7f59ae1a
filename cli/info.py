"""`kvkit info`: what a report of a problem should begin with."""

import platform

import click
import llvmlite
import llvmlite.binding
import ml_dtypes
import numba
import numpy as np

from kvkit import kept
from kvkit.errors import DeviceError
from kvkit.jit import cache_folder
from kvkit.version import __version__
from kvkit_cli import show

VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "neon": "NEON"}  # the widest first


@click.command()
def info():
    """Show versions, the CPU, threads, the compile cache and backends."""
    table = show.table(None, "what", "here")
    for name, text in facts().items():
        table.add_row(name, text)
    show.console().print(table)


def facts():
    """Every line of the table."""
    modules = (np, numba, llvmlite, ml_dtypes)
    return {
        "kvkit": __version__,
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        **{module.__name__: module.__version__ for module in modules},
        "CPU": f"{llvmlite.binding.get_host_cpu_name()}, {vectors()}",
        "threads": f"{numba.get_num_threads()} of at most {numba.config.NUMBA_NUM_THREADS}",
        "threading layer": layer(),
        "compile cache": cache(),
        "backend cpu": "works",
        "backend cuda": cuda(),
    }


def vectors():
    """The widest vector instructions of this CPU."""
    features = llvmlite.binding.get_host_cpu_features()
    return next((name for feature, name in VECTORS.items() if features.get(feature)), "no known vectors")


def layer():
    """The threading layer that Numba is told to take; it chooses when the first parallel kernel starts."""
    asked = numba.config.THREADING_LAYER
    return f"{asked}: the first of {', '.join(numba.config.THREADING_LAYER_PRIORITY)} that loads"


def cache():
    """Where compiled code is kept, or why none is."""
    folder = cache_folder()
    if folder is None:
        return "off: KVKIT_CACHE_DIR is empty, or there is no home directory"
    refusal = kept.refusal(folder)
    if refusal:
        return f"none is kept in {folder}: {refusal}"
    sizes = [path.stat().st_size for path in folder.glob("*.bin")]
    return f"{folder}: {len(sizes)} files, {show.size(sum(sizes))}"


def cuda():
    """Whether the GPU package can run, and on which device; else all that it misses."""
    from kvkit_cuda.ground import needs

    missing = needs.told()
    if missing:
        return f"not available: {'; '.join(missing)}"

    from kvkit_cuda.ground import host

    try:
        host.require_device(host.current())
    except DeviceError as error:
        return f"not available: {error}"
    return f"works on {host.name()}"
