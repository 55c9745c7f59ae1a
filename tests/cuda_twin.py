"""A pytest plugin for the CUDA simulator: kvkit_cuda runs the scenes, in small blocks."""

import scenes

import kvkit_cuda
from kvkit_cuda import device, transfer

assert device.SIMULATED
transfer.THREADS = 16
ORACLES = {kind: oracle for kind, (_, oracle) in scenes.OPERATORS.items()}
scenes.OPERATORS = {
    "static": (kvkit_cuda.key_value_cache, ORACLES["static"]),
    "dynamic": (kvkit_cuda.dynamic_batching.key_value_cache, ORACLES["dynamic"]),
}
