"""Make and use packs of golden vectors, for machines without kvkit.

A pack is a folder with ``manifest.json`` and .npy files, which hold fp8 and bfloat16 as bits. Each case is a
call of an operator: its arguments, the expected results, the arrays that must not change, and the tolerance
with a reason.

    make      write a pack with the cases of a suite, or of some operators
    verify    check hashes and versions, that no file is missing or unlisted, and that there is a case
    replay    run kvkit, on the CPU or a GPU, on a pack, or on dumps of KVKIT_LOG=10
    diff      compare the results of a device with a pack
    export    write test data for onnx's runners
"""

from kvkit.tools.vectors.exporting import export
from kvkit.tools.vectors.making import SUITES, make
from kvkit.tools.vectors.replaying import diff, replay
from kvkit.tools.vectors.verifying import verify

__all__ = ["SUITES", "diff", "export", "make", "replay", "verify"]
