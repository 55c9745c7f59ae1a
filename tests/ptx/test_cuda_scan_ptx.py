"""The kernels that check index tensors compile without a device, into what a GPU runs well."""

import pytest
from ptx_texts import assemble, texts_for

from kvkit_cuda.calls import scan

KERNELS = {
    "copy of int32": (scan.copy(4), scan.COPY, 256),
    "copy of int64": (scan.copy(8), scan.COPY, 256),
    "scan": (scan.scan, scan.SCAN, 1024),
}
REGISTERS = 64 * 1024  # of a multiprocessor


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name, tmp_path, capabilities):
    kernel, signature, threads = KERNELS[name]
    for text, capability in zip(texts_for(kernel, signature, capabilities), capabilities, strict=True):
        assert ".target sm_{}{}\n".format(*capability) in text
        assert ".f64" not in text
        frame, registers = assemble(text, capability, tmp_path)
        assert frame == [0, 0, 0]
        assert registers * threads <= REGISTERS
