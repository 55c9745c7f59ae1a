"""The GPU twin of `kvkit`. Importing it touches no driver; its operators are not written yet."""

from kvkit.errors import DeviceError


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise DeviceError(f"kvkit_cuda.{name}: the CUDA backend has no operators yet; use kvkit on the CPU")
