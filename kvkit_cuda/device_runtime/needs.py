"""Find the parts of CUDA that a machine lacks for kernels to run, and say how to install them.

numba-cuda is not imported unless it is installed.
"""

import functools
import importlib.util
import os
import site
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import numpy as np

from kvkit.errors import DeviceError, argument_error

OLDEST = 8, 0  # compute capability of a device whose tensor cores take bfloat16
DRIVERS = {12: "525 (Linux) or 528 (Windows)", 13: "580"}  # the oldest ones, by CUDA's major version
# The first CUDA for a compute capability.
FIRST = {(10, 0): "12.8", (10, 3): "12.9", (11, 0): "13.0", (12, 0): "12.8", (12, 1): "12.9"}
FIRST_WITH_HALVES = "12.5"  # the first CUDA that compiles 16-bit floats for earlier compute capabilities
INSTALL = "pip install '.[{extra}]' in a clone"


def messages():
    """Return a message for each thing that kernels need and the machine lacks."""
    found = []
    for need in (packages, driver, devices):
        try:
            need()
        except DeviceError as error:
            found.append(str(error))
            if need is packages:
                break
    return found


def missing_error(expected, got, remedy):
    """Return the error for a part of CUDA that is missing or unfit."""
    return argument_error("kvkit_cuda", expected, f"{got}: {remedy}", DeviceError)


def packages():
    """Raise unless numba-cuda is installed, and can be `numba.cuda`."""
    if importlib.util.find_spec("numba_cuda") is None:
        remedy = INSTALL.format(extra="cuda") + " (kvkit itself needs none)"
        raise missing_error("the package numba-cuda", "none", remedy)
    early = sys.modules.get("numba.cuda")
    if early is not None and getattr(early, "implementation", "NVIDIA") != "NVIDIA":
        remedy = "import _numba_cuda_redirector before it, as its .pth file does in a site folder"
        raise missing_error("numba-cuda as numba.cuda", "that of Numba, which was imported before", remedy)
    find_in_any_folder()
    import_with_row_stack()


def find_in_any_folder():
    """Let numba-cuda and NVIDIA's libraries be found where .pth files are not read, as with `pip --target`.

    numba-cuda is `numba.cuda` once its redirector is imported. cuda.pathfinder looks for packages in site
    folders only, and asks `site` which they are.
    """
    with suppress(ImportError):
        importlib.import_module("_numba_cuda_redirector")
    nvidia, known = importlib.util.find_spec("nvidia"), site.getsitepackages
    folders = [str(Path(place).parent) for place in (nvidia and nvidia.submodule_search_locations) or ()]
    others = [folder for folder in folders if folder not in (*known(), site.getusersitepackages())]
    if others:
        site.getsitepackages = lambda prefixes=None: [*known(prefixes), *others]


def import_with_row_stack():
    """Import the part of numba-cuda that needs `numpy.row_stack`, which numpy 2.5 removed."""
    name = "row_stack"
    if not hasattr(np, name):
        setattr(np, name, np.vstack)
        try:
            importlib.import_module("numba.cuda.np.arrayobj")
        finally:
            delattr(np, name)


def driver():
    """Raise unless there is a driver that is new enough and shows a GPU."""
    from numba import cuda
    from numba.cuda.cudadrv import driver as numbas

    api, toolkit = numbas.driver, toolkit_version()
    wanted = DRIVERS.get(toolkit, f"of CUDA {toolkit}")
    if "lib" not in vars(api):  # set if libcuda was found
        remedy = f"install NVIDIA's driver {wanted} or later, for a GPU of this machine"
        raise missing_error("an NVIDIA GPU and its driver", "no driver (libcuda)", remedy)
    error, version = numbas.binding.cuDriverGetVersion()
    if not int(error) and version // 1000 < toolkit:
        got = f"one for CUDA {version // 1000}.{version % 1000 // 10}"
        remedy = f"update it to {wanted} or later"
        if version // 1000 in DRIVERS:
            remedy += f", or {INSTALL.format(extra=f'cuda{version // 1000}')} in a fresh environment"
        raise missing_error(f"a driver for CUDA {toolkit}", got, remedy)
    if not cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        remedy = "see what nvidia-smi says" if hidden is None else f"CUDA_VISIBLE_DEVICES is {hidden!r}"
        raise missing_error("an NVIDIA GPU", "a driver that shows none", remedy)


def toolkit_version():
    """Return the major version of CUDA of numba-cuda's libraries."""
    try:
        return int(metadata.version("cuda-bindings").partition(".")[0])
    except metadata.PackageNotFoundError:
        remedy = INSTALL.format(extra="cuda")
        raise missing_error("the package cuda-bindings", "none", remedy) from None


def devices():
    """Raise unless kernels can be compiled for each GPU, or for the oldest supported one if there is none."""
    from numba import cuda

    there = [(each.name, each.compute_capability) for each in cuda.gpus] if cuda.is_available() else []
    for name, found in there or [("", OLDEST)]:
        device(str(name), tuple(found))


def device(name, found):
    """Raise unless kernels can be compiled for a GPU of this name and compute capability."""
    capability(name, found)
    libraries(found)


def capability(name, found):
    """Raise unless a device is new enough."""
    if tuple(found) < OLDEST:
        oldest, own = (".".join(map(str, numbers)) for numbers in (OLDEST, found))
        expected = f"compute capability {oldest} or later"
        raise argument_error("kvkit_cuda", expected, f"{name}, of {own}", DeviceError)


@functools.cache
def libraries(found):
    """Raise unless NVVM compiles, and nvJitLink links, for a compute capability.

    Older libraries do not know newer devices, and an older linker rejects newer PTX.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    extra = "cuda" if toolkit_version() > 12 else f"cuda{toolkit_version()}"
    remedy = f"{INSTALL.format(extra=extra)} --upgrade in a fresh environment, without a toolkit in CUDA_HOME"
    first = FIRST.get(found, FIRST_WITH_HALVES if found < min(FIRST) else None)
    release = f"of CUDA {first} or later" if first else "of a later CUDA"
    release += f", for compute capability {found[0]}.{found[1]}"
    try:
        code = small_ptx(found)
    except Exception as error:
        got = f"none that works ({first_line(error)})"
        raise missing_error(f"NVIDIA's compiler (NVVM) {release}", got, remedy) from None
    try:
        options = LinkerOptions(arch=f"sm_{found[0]}{found[1]}")
        Linker(ObjectCode.from_ptx(code.encode()), options=options).link("cubin")
    except Exception as error:
        (version,) = [line for line in code.splitlines() if line.startswith(".version")]
        got = f"one that fails ({first_line(error)})"
        expected = f"a linker (nvJitLink) {release} and the PTX of NVVM, {version[1:]}"
        raise missing_error(expected, got, remedy) from None


def small_ptx(found):
    """Return the PTX of a formula that all kernels share, for a compute capability.

    numba-cuda compiles for an earlier one if its libraries do not know it.
    """
    from numba import cuda, types

    from kvkit.formulas import numeric

    return cuda.compile_ptx(numeric.half_to_float, (types.uint16,), device=True, cc=found)[0]


def first_line(error):
    """Return the first line of an error, or of its notes, where a linker's error has it."""
    lines = [*str(error).strip().splitlines(), *getattr(error, "__notes__", ())]
    lines = [line for line in lines if "version" in line] or lines
    return lines[0].strip() if lines else type(error).__name__
