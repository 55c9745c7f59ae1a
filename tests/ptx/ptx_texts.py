"""PTX of kernels for some GPUs, and what NVIDIA's assembler says of it."""

import importlib.util
import itertools
import re
import shutil
import subprocess
from pathlib import Path

from sass import main_loop

from kvkit_cuda.device_runtime import device

FLOATS = ("float32", "float16", "bfloat16")
MOVED = [(packed, stored, None) for packed in FLOATS for stored in FLOATS] + [("int8", "int8", None)]
CODES = [(packed, stored, cell) for packed in FLOATS for stored in ("int8", "int4") for cell in FLOATS]
FAMILIES = (8, 0), (10, 0)  # the first of those for which NVVM makes the same PTX
REGISTERS = 80  # of a thread: three blocks of 256 threads share a multiprocessor


def ptxas():
    """Return the path of NVIDIA's assembler, from the package nvidia-cuda-nvcc or a toolkit."""
    packages = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in packages.submodule_search_locations] if packages else []
    found = [path for folder in folders for path in folder.glob("*/bin/ptxas")]
    return str(found[0]) if found else shutil.which("ptxas")


def texts_for(kernel, signature, capabilities):
    """Return a kernel's PTX for some compute capabilities; NVVM makes the same for all of a family."""
    families = {each: max(first for first in FAMILIES if first <= each) for each in capabilities}
    firsts = list(dict.fromkeys(families.values()))
    made = dict(zip(firsts, device.ptx(kernel, signature, firsts), strict=True))
    return [retargeted(made[families[each]], each) for each in capabilities]


def retargeted(text, capability):
    return re.sub(r"(?m)^\.target sm_\w+", f".target {target(capability)}", text)


def target(capability):
    return "sm_" + "".join(map(str, capability))


def assemble(ptx, capability, folder):
    """Assemble a kernel; return (bytes of stack and spills, registers)."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    done = subprocess.run(
        [ptxas(), "-v", f"-arch={target(capability)}", source, "-o", folder / "kernel.cubin"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (frame,) = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr
    )
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    return [int(number) for number in frame], int(registers)


CACHES = [(None, "{}"), *itertools.product(("float16", "bfloat16", "float32"), ("int8", "int4"))]
SIZES = [*range(16, 257, 16)]


def way_round(kernel, signature, folder, capability=(9, 0)):
    """Return the instructions of one iteration of a kernel's main loop, for a warp."""
    (text,) = device.ptx(kernel, signature, [capability])
    assemble(text, capability, folder)
    return main_loop(folder / "kernel.cubin")
