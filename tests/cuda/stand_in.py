"""A pytest plugin: kvkit_cuda over numba-cuda as it is, and a stand-in for the driver below that.

The stand-in (`driver/`) is built by the system's C compiler. It counts what it is asked for, keeps the memory
of its two devices from the host, does what streams are given as late as it may, captures graphs, and hands
launches to machines that run the PTX of kernels.
"""

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from ptx_machine import Machine, Program
from ptx_operations import Type

SOURCES = Path(__file__).with_name("driver")
COUNTED = "allocations", "frees", "copies", "waits", "launches", "modules", "events", "refusals"
DEVICES = 2
NO_COMPILER = "no C compiler (cc) is installed, which builds the stand-in for the CUDA driver"
REFUSED = 900

machines = [Machine() for _ in range(DEVICES)]
libraries: dict = {}  # of compiled code, by the driver's addresses of their kernels
programs: dict = {}
launches: list = []  # (program, grid, block, device, arguments, shared memory)
errors: list = []


def built(folder):
    """Return the library, built in a folder of its own; None without a compiler."""
    compiler = shutil.which("cc")
    library = folder / "libcuda.so.1"
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir())
    if compiler and not (library.exists() and library.stat().st_mtime > newest):
        made = library.with_suffix(f".{id(folder)}")
        sources = sorted(SOURCES.glob("*.c"))
        options = "-O1", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{library.name}"
        subprocess.run([compiler, *options, "-o", made, *sources, "-ldl"], check=True)
        made.replace(library)
    return library if compiler else None


def launched(kernel, form, device, parameters):
    """Receive a launch and read its parameters at once, as drivers do."""
    try:
        if kernel not in programs:
            programs[kernel] = Program(libraries[kernel].get_asm_str())
        program, arguments = programs[kernel], []
        for i, (kind, _) in enumerate(program.parameters):
            arguments.append(number(Type(kind), ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[i]))
        launches.append((program, tuple(form[:3]), tuple(form[3:6]), device, arguments, form[6]))
    except BaseException as error:
        errors.append(error)
        return -1
    return len(launches) - 1


def number(kind, place):
    value = np.ctypeslib.as_array((ctypes.c_uint8 * kind.size).from_address(place)).view(kind.dtype)[0]
    return float(value) if kind.floating else int(value)


def run(which):
    program, blocks, threads, device, arguments, shared = launches[which]
    try:
        machines[device].launch(program, blocks, threads, arguments, shared)
    except BaseException as error:
        errors.append(error)
        return 1
    return 0


def moved(device, place, size):
    memory = machines[device].memory
    if size:
        memory.allow(place, size)
    else:
        memory.forbid(place)


UINTS = ctypes.POINTER(ctypes.c_uint)
CALLBACKS = (
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, UINTS, ctypes.c_int, ctypes.c_void_p)(launched),
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(run),
    ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t)(moved),
)
driver = None


def begin(library):
    """Take the driver's place: whoever looks for it finds what is loaded under its name."""
    global driver
    driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    driver.stand_in_count.restype = ctypes.c_long
    driver.stand_in_begin(*CALLBACKS)

    from kvkit_cuda.device_runtime import host

    seen = host.loaded

    def loaded(kernel, which):
        found = seen(kernel, which)
        (overload,) = kernel.overloads.values()
        libraries[int(found)] = overload.library
        return found

    host.loaded = loaded


def pytest_configure(config):
    config.option.tbstyle = "native"  # others show arguments, and arrays of the device cannot be shown
    library = built(config.cache.mkdir("stand-in"))
    if library:
        begin(library)


def pytest_collection_modifyitems(items):
    for item in items if driver is None else ():
        item.add_marker(pytest.mark.skip(reason=NO_COMPILER))


@pytest.fixture(autouse=True)
def sound():
    """Set the counters to zero; after the test wait for all work, and fail if it had a fault."""
    errors.clear()
    driver.stand_in_forget()
    yield
    driver.cuCtxSynchronize()
    launches.clear()
    assert not errors, errors[0]


def counts():
    """Return how often each function of the driver was called since the last time, without zeros."""
    found = {name: driver.stand_in_count(i) for i, name in enumerate(COUNTED)}
    driver.stand_in_forget()
    return {name: count for name, count in found.items() if count}


@contextlib.contextmanager
def idle():
    """Run no kernel meanwhile, so that the host's time remains."""
    driver.stand_in_begin(None, None, CALLBACKS[2])
    yield
    driver.stand_in_begin(*CALLBACKS)


@contextlib.contextmanager
def captured(stream):
    """Capture a stream's work as a graph; the list gets a function that replays it."""
    found, graph, handle = [], ctypes.c_void_p(), ctypes.c_void_p(int(stream.handle))
    assert driver.cuStreamBeginCapture_v2(handle, 0) == 0
    try:
        yield found
    finally:
        error = driver.cuStreamEndCapture(handle, ctypes.byref(graph))
    assert error == 0
    found.append(lambda stream: driver.cuGraphLaunch(graph, ctypes.c_void_p(int(stream.handle))))
