"""Where the arrays of a call are at home: on which device, and what stream their library works on.

It decides where a call runs, so that nothing has to be said of devices.
"""

import sys
from typing import Any, NamedTuple

import numpy as np

from kvkit.errors import argument_error
from kvkit_cuda.device_runtime import host

DLPACK_DEVICES = 2, 13  # of CUDA: its memory, managed memory
NUMBERS = (int, float, str, bool, np.generic)


class Home(NamedTuple):
    """The number of a device, and the address of a library's current stream there; None: of no matter."""

    device: int | None = None
    stream: int | None = None


NOWHERE = Home()


def library(array):
    """Return the package that an array's type, or a type it derives from, is of: torch and CuPy first."""
    packages = [kind.__module__.partition(".")[0] for kind in type(array).__mro__]
    return next((name for name in packages if name in ("torch", "cupy")), packages[0])


def stream_of(array):
    """Return the address of the current stream of torch or CuPy, on the device of its array."""
    package: Any = sys.modules[library(array)]
    if package.__name__ == "torch":
        return package.cuda.current_stream(array.device).cuda_stream or host.LEGACY_DEFAULT
    with array.device:
        return package.cuda.get_current_stream().ptr or host.LEGACY_DEFAULT


def of(name, array):
    """Return the home of an array; arrays of the host, and other values, have none."""
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
            raise argument_error(
                name, "an array in the memory of a CUDA device", f"address {place:#x} of none"
            )
        return Home(found)
    if hasattr(array, "__dlpack_device__"):
        kind, number = array.__dlpack_device__()
        return Home(int(number)) if kind in DLPACK_DEVICES else NOWHERE
    return NOWHERE


def of_call(values):
    """Return the home of all arrays among the arguments of a call; the first one's stream is the call's."""
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
