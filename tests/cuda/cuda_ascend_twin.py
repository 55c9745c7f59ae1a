"""A pytest plugin: `kvkit.ascend` is kvkit_cuda's; in the CUDA simulator its blocks are small."""

import kvkit.ascend
from kvkit_cuda import ascend
from kvkit_cuda.attend import bias, forms, merge
from kvkit_cuda.ground import device
from kvkit_cuda.moves import means, pieces

if device.SIMULATED:
    bias.THREADS = pieces.THREADS = means.THREADS = 8
    forms.THREADS, merge.THREADS = 16, 4
for name in ascend.__all__:
    setattr(kvkit.ascend, name, getattr(ascend, name))
