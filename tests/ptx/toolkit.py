"""One release of NVIDIA's compiler (NVVM), or of its linker (nvJitLink): a process has only one of each.

`toolkit.py compile` and `toolkit.py link` speak JSON.
"""

import json
import sys

from cuda.bindings import nvjitlink, nvvm
from cuda.pathfinder import load_nvidia_dynamic_lib

from kvkit.errors import DeviceError
from kvkit_cuda.copy import transfer
from kvkit_cuda.device_runtime import device, needs

NEWER = 12, 0  # which CUDA 12.8 is the first to know
KERNEL = "store", "float16", "int8", "float32", 8  # with divisions, and exchanges in a warp


def compiled(_):
    """Return the PTX that `needs` looks at and a kernel's; else the texts of `needs` and of the failure.

    Behind them is what `needs` says for `NEWER`, or None.
    """
    try:
        (text,) = device.ptx(transfer.copy_tokens(*KERNEL), transfer.SIGNATURE, [needs.OLDEST])
    except nvvm.nvvmError as error:
        return said(needs.OLDEST), str(error), said(NEWER)
    return needs.small_ptx(needs.OLDEST), text, said(NEWER)


def linked(texts):
    """Return by compiler what `needs` says of it and this linker, and how linking its kernel fails, or None.

    Behind them is what `needs` says for `NEWER`.
    """
    answers = {}
    for compiler, (small, kernel, _) in texts.items():
        needs.small_ptx = lambda found, small=small: small
        answers[compiler] = said(needs.OLDEST), failure(kernel), said(NEWER)
    return answers


def said(found):
    try:
        needs.libraries.__wrapped__(found)
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
