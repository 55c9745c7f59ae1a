"""What kvkit_cuda asks of numba-cuda itself, as far as that goes without a driver; warnings are errors."""

from types import SimpleNamespace

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed; `make test` installs it")
from numba import cuda
from numba.cuda.core.errors import NumbaPerformanceWarning
from numba.cuda.cudadrv import driver

from kvkit.errors import DeviceError
from kvkit_cuda.ground import device, host

DEVICES = {(7, 5): "expected compute capability 8.0 or later, got Tesla T4, of 7.5", (8, 0): None}
DEFAULT, LEGACY, PER_THREAD, OTHER = 0, 1, 2, 4096


@pytest.mark.parametrize("capability", DEVICES)
def test_old_devices_are_refused(capability, monkeypatch):
    found = SimpleNamespace(compute_capability=capability, name="Tesla T4")
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_current_device", lambda: found)
    if DEVICES[capability]:
        with pytest.raises(DeviceError, match=DEVICES[capability]):
            host.require()
    else:
        host.require()


def stream(address):
    return driver.Stream(driver.binding.CUstream(address))


@pytest.fixture
def waited(monkeypatch):
    """The streams that are waited for, by their addresses."""
    found = []

    class Waiting(driver.Stream):
        def synchronize(self):
            found.append(int(self.handle))

    monkeypatch.setattr(cuda, "external_stream", lambda address: Waiting(driver.binding.CUstream(address)))
    monkeypatch.setattr(cuda, "legacy_default_stream", lambda: stream(LEGACY))
    return found


@pytest.mark.usefixtures("waited")
def test_streams_have_addresses():
    """numba would have the default stream at 0, which protocols do not allow; arrays tell the address."""
    for given in (None, 0, stream(DEFAULT), LEGACY, stream(LEGACY)):
        assert int(host.stream(given)) == host.number(host.stream(given)) == LEGACY
    for address in (PER_THREAD, OTHER):
        for given in (address, stream(address)):
            assert int(host.stream(given)) == host.number(host.stream(given)) == address


def test_a_call_waits_for_other_streams_only(waited):
    for producer in (DEFAULT, LEGACY, PER_THREAD, OTHER):
        for own in (None, PER_THREAD, OTHER):
            host.wait_for(producer, host.stream(own))
            assert waited == ([] if (producer or LEGACY) == (own or LEGACY) else [producer])
            waited.clear()


def test_small_grids_are_launched_without_a_warning():
    kernel, grid, asked = cuda.jit(lambda: None), ((1, 1), (32, 1), stream(LEGACY)), device.config
    before = asked.CUDA_LOW_OCCUPANCY_WARNINGS
    assert host.configured(kernel, *grid).griddim == (1, 1, 1)
    assert before == asked.CUDA_LOW_OCCUPANCY_WARNINGS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asked, "CUDA_LOW_OCCUPANCY_WARNINGS", 1)
        with pytest.warns(NumbaPerformanceWarning):
            kernel[2, 32, stream(LEGACY)]
