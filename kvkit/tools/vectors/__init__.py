"""Packs of golden vectors, for people without kvkit on their machine.

A pack is a folder: ``manifest.json`` and .npy files, fp8 and bfloat16 as their bits. Each case is a call of
an operator: its arguments, what it must give and must leave alone, and how exact that has to be, with the
reason.

    make      write a pack: a suite, or some operators
    verify    hashes, versions, no file that is missing or unlisted, and at least one case
    replay    run kvkit, on the CPU or a GPU, on a pack, or on dumps of KVKIT_LOG=10
    diff      hold what a device gave against a pack
    export    test data as onnx's runners take them
"""

from kvkit.tools.vectors.exporting import export
from kvkit.tools.vectors.making import SUITES, make
from kvkit.tools.vectors.replaying import diff, replay
from kvkit.tools.vectors.verifying import verify

__all__ = ["SUITES", "diff", "export", "make", "replay", "verify"]
