"""The check of index tensors on the device: its suite in the simulator, and its kernels without a device."""

import pytest
from test_cuda import simulated
from test_cuda_ptx import CAPABILITIES, assemble

from kvkit_cuda.calls import scan
from kvkit_cuda.ground import device

KERNELS = {
    "copy of int32": (scan.copy(4), scan.COPY, 256),
    "copy of int64": (scan.copy(8), scan.COPY, 256),
    "scan": (scan.scan, scan.SCAN, 1024),
}
REGISTERS = 64 * 1024  # of a multiprocessor


def test_in_the_simulator():
    assert simulated("-p", "cuda_twin", "cuda_scan.py", "-m", "not slow") > 70


@pytest.mark.slow
def test_more_threads_in_the_simulator():
    assert simulated("-p", "cuda_twin", "cuda_scan.py", "-m", "slow") == 1


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name, tmp_path):
    kernel, signature, threads = KERNELS[name]
    for text, capability in zip(device.ptx(kernel, signature, CAPABILITIES), CAPABILITIES, strict=True):
        assert ".target sm_{}{}\n".format(*capability) in text
        assert ".f64" not in text
        frame, registers = assemble(text, capability, tmp_path)
        assert frame == [0, 0, 0]
        assert registers * threads <= REGISTERS
