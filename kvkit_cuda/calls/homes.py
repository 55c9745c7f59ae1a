"""Find the device of a call's arrays, and the current stream of their library: there the call runs."""

import sys
from typing import Any, NamedTuple

import numpy as np

from kvkit.errors import argument_error
from kvkit_cuda.device_runtime import host

DLPACK_DEVICES = 2, 13  # CUDA memory, CUDA managed memory
NUMBERS = (int, float, str, bool, np.generic)


class Home(NamedTuple):
    """The number of a device, and the address of a library's current stream there; None if unknown."""

    device: int | None = None
    stream: int | None = None


NOWHERE = Home()


def library(array):
    """Return the package of an array's type or of its base types; torch and CuPy come first."""
    packages = [kind.__module__.partition(".")[0] for kind in type(array).__mro__]
    return next((name for name in packages if name in ("torch", "cupy")), packages[0])


def stream_of(array):
    """Return the address of torch's or CuPy's current stream on the device of an array."""
    package: Any = sys.modules[library(array)]
    if package.__name__ == "torch":
        return package.cuda.current_stream(array.device).cuda_stream or host.LEGACY_DEFAULT
    with array.device:
        return package.cuda.get_current_stream().ptr or host.LEGACY_DEFAULT


def of(name, array):
    """Return the device and stream of an array; `NOWHERE` for host arrays and other values."""
    if host.SIMULATED or isinstance(array, np.ndarray):
        return NOWHERE
    if library(array) == "torch" and getattr(array, "is_cuda", False):
        return Home(array.device.index, stream_of(array))
    if library(array) == "cupy" and hasattr(array, "device"):
        return Home(array.device.id, stream_of(array))
    described = None if library(array) == "torch" else host.interface(array)
    if described is not None:
        place = described["data"][0]
        found = host.device_of(place) if place else None
        if place and found is None and 0 not in described["shape"]:
            wanted = "an array in the memory of a CUDA device"
            raise argument_error(name, wanted, f"address {place:#x} of none")
        return Home(found)
    if hasattr(array, "__dlpack_device__"):
        kind, number = array.__dlpack_device__()
        return Home(int(number)) if kind in DLPACK_DEVICES else NOWHERE
    return NOWHERE


def of_call(values):
    """Return the device of all arrays of a call, which must be one, and the first array's stream."""
    found, first = NOWHERE, None
    for name, value in values.items():
        several = isinstance(value, (list, tuple)) and not (value and isinstance(value[0], NUMBERS))
        for i, array in enumerate(value if several else (value,)):
            if array is None or isinstance(array, NUMBERS):
                continue
            label = f"{name}[{i}]" if several else name
            home = of(label, array)
            if home.device is None:
                continue
            if first is None:
                found, first = home, label
            elif home.device != found.device:
                there = f"an array of device {found.device}, where {first} lies"
                raise argument_error(label, there, f"one of device {home.device}")
    return found
