"""A pytest plugin: the position operators are kvkit_cuda's; in the CUDA simulator their blocks are small."""

import kvkit
import kvkit_cuda
from kvkit_cuda.ground import device
from kvkit_cuda.positions import alibi, angles, index, rotary

if device.SIMULATED:
    alibi.THREADS = angles.THREADS = index.THREADS = rotary.THREADS = 8
OPERATORS = {
    "": ("alibi_mask", "alibi_slope", "rotary_position_embedding"),
    "dynamic_batching.": ("alibi_mask", "position_index", "rotary_position_embedding"),
}
TWINS = {}  # the CPU's own
for prefix, names in OPERATORS.items():
    cpu, cuda = (kvkit.dynamic_batching, kvkit_cuda.dynamic_batching) if prefix else (kvkit, kvkit_cuda)
    for name in names:
        TWINS[prefix + name] = getattr(cpu, name)
        setattr(cpu, name, getattr(cuda, name))
