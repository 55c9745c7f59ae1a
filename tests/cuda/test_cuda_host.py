"""What kvkit_cuda asks of numba-cuda itself, as far as that goes without a driver; warnings are errors."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed; `make test` installs it")
from llvmlite import ir
from numba import cuda
from numba.cuda.cudadrv import driver

from kvkit.errors import DeviceError
from kvkit_cuda.device_runtime import host, needs, ptx

DEVICES = {(7, 5): "expected compute capability 8.0 or later, got Tesla T4, of 7.5", (8, 0): None}
DEFAULT, LEGACY, PER_THREAD, OTHER = 0, 1, 2, 4096


@pytest.mark.parametrize("capability", DEVICES)
def test_old_devices_are_refused(capability):
    if DEVICES[capability]:
        with pytest.raises(DeviceError, match=DEVICES[capability]):
            needs.capability("Tesla T4", capability)
    else:
        needs.capability("Tesla T4", capability)


def stream(address):
    return driver.Stream(driver.binding.CUstream(address))


@pytest.fixture
def events(monkeypatch):
    """Return a list of (stream that is recorded, stream that waits for it), by address."""
    found = []

    class Event:
        def record(self, stream):
            self.recorded = int(stream.handle)

        def wait(self, stream):
            found.append((self.recorded, int(stream.handle)))

    monkeypatch.setattr(cuda, "event", lambda timing: Event())
    monkeypatch.setattr(cuda, "external_stream", stream)
    monkeypatch.setattr(cuda, "legacy_default_stream", lambda: stream(LEGACY))
    return found


@pytest.mark.usefixtures("events")
def test_streams_have_addresses():
    """numba would have the default stream at 0, which protocols do not allow; arrays tell the address."""
    for given in (None, 0, stream(DEFAULT), LEGACY, stream(LEGACY)):
        assert int(host.stream(given)) == host.stream_address(host.stream(given)) == LEGACY
    for address in (PER_THREAD, OTHER):
        for given in (address, stream(address)):
            assert int(host.stream(given)) == host.stream_address(host.stream(given)) == address


def test_a_stream_waits_for_other_streams_only(events):
    for producer in (DEFAULT, LEGACY, PER_THREAD, OTHER):
        for own in (None, PER_THREAD, OTHER):
            host.wait_for(producer, host.stream(own))
            pair = producer or LEGACY, own or LEGACY
            assert events == ([] if pair[0] == pair[1] else [pair])
            events.clear()


def test_a_compiler_that_is_missing(monkeypatch):
    monkeypatch.setattr(cuda, "compile_ptx", lambda *_, **__: 1 / 0)
    words = r"expected NVIDIA's compiler \(NVVM\) of CUDA 12.8 or later, for .* 12.0, got none that works"
    with pytest.raises(DeviceError, match=words):
        needs.libraries.__wrapped__((12, 0))


def test_numba_cuda_that_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"numba-cuda, got none: pip install '\.\[cuda\]' in a clone"):
        needs.packages()
    assert len(needs.messages()) == 1


def test_a_numpy_without_row_stack(monkeypatch):
    """numpy 2.5 removed it; numba-cuda has it while it imports what it knows of numpy, and no longer."""
    seen = []
    monkeypatch.delattr(np, "row_stack", raising=False)
    monkeypatch.setattr(
        importlib, "import_module", lambda name: seen.append((name, hasattr(np, "row_stack")))
    )
    needs.import_with_row_stack()
    assert seen == [("numba.cuda.np.arrayobj", True)]
    assert not hasattr(np, "row_stack")


def test_what_a_warp_runs_together_is_convergent():
    function = ir.Function(ir.Module(), ir.FunctionType(ir.IntType(32), [ir.IntType(32)]), "warp")
    builder = ir.IRBuilder(function.append_basic_block())
    for instruction in (ptx._transposed, ptx.instruction("mov.b32 $0, $1;", [ptx.WORD], [ptx.WORD])):
        signature, emit = instruction._defn(None, ptx.WORD)
        emit(None, builder, signature, function.args)
    together, alone = str(function).split("movmatrix")[1].split("mov.b32")
    assert "convergent" in together
    assert "convergent" not in alone


@pytest.mark.parametrize("page", ["docs/install.md", "docs/tools/cuda.md"])
def test_pages_name_the_drivers(page):
    text = (Path(__file__).parents[2] / page).read_text()
    extras = dict(re.findall(r"`(cuda(?:12)?)`[^`]* driver (.*?) or later", text))
    expected = {"cuda": needs.DRIVERS[13], "cuda12": needs.DRIVERS[12]}
    assert extras == expected
    assert f"compute capability {'.'.join(map(str, needs.OLDEST))} or later" in " ".join(text.split())


def test_libraries_without_metadata(monkeypatch):
    monkeypatch.setattr(
        needs.metadata, "version", lambda name: needs.metadata.distribution("none-such").version
    )
    with pytest.raises(DeviceError, match=r"the package cuda-bindings, got none: pip install"):
        needs.toolkit_version()
    assert needs.first_line(RuntimeError("\nno NVVM")) == "no NVVM"
