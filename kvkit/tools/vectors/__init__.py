"""Make and use packs of golden vectors, for machines without kvkit.

A pack is a folder with ``manifest.json`` and .npy files, which hold fp8 and bfloat16 as bits. Each case is a
call of an operator: its arguments, the expected results, the names of arrays that must not change, and a
tolerance with its reason.

    make      write a pack with the cases of a suite, or of one operator
    verify    check hashes and versions, that no file is missing or unlisted, and that there is a case
    replay    run the cases of a pack, or dumps of KVKIT_LOG=10, with kvkit on the CPU or a GPU
    diff      compare the results of a device with a pack
    export    write cases as ONNX test data
"""

from kvkit.tools.vectors.exporting import export
from kvkit.tools.vectors.making import SUITES, make
from kvkit.tools.vectors.replaying import diff, replay
from kvkit.tools.vectors.verifying import verify

__all__ = ["SUITES", "diff", "export", "make", "replay", "verify"]
