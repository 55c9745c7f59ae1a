"""One release of NVIDIA's compiler (NVVM), or of its linker (nvJitLink): a process has only one of each.

`toolkit.py compile` and `toolkit.py link` speak JSON.
"""

import json
import sys

from cuda.bindings import nvjitlink, nvvm
from cuda.pathfinder import load_nvidia_dynamic_lib

from kvkit.errors import DeviceError
from kvkit_cuda.ground import device, needs
from kvkit_cuda.moves import transfer

KERNEL = "store", "float16", "int8", "float32", 8  # with divisions, and exchanges in a warp


def compiled(_):
    """The PTX that `needs` looks at, and a kernel's; else what `needs` says, and how the kernel fails."""
    try:
        (text,) = device.ptx(transfer.walk(*KERNEL), transfer.SIGNATURE, [needs.OLDEST])
    except nvvm.nvvmError as error:
        return said(), str(error)
    return needs.small_ptx(), text


def linked(texts):
    """By compiler: what `needs` says of it and this linker, how the linker fails on its kernel; or None."""
    answers = {}
    for compiler, (small, kernel) in texts.items():
        needs.small_ptx = lambda small=small: small
        answers[compiler] = said(), failure(kernel)
    return answers


def said():
    try:
        needs.libraries.__wrapped__()
    except DeviceError as error:
        return str(error)
    return None


def failure(text):
    handle = nvjitlink.create(1, ["-arch=sm_{}{}".format(*needs.OLDEST)])
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text.encode(), len(text), "kernel")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    except nvjitlink.nvJitLinkError:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        return log.decode()
    finally:
        nvjitlink.destroy(handle)
    assert cubin.startswith(b"\x7fELF")
    return None


TASKS = {"compile": ("nvvm", compiled), "link": ("nvJitLink", linked)}

if __name__ == "__main__":
    library, task = TASKS[sys.argv[1]]
    answer = task(json.load(sys.stdin))
    print(json.dumps([load_nvidia_dynamic_lib(library).abs_path, answer]))
