"""The shared scalar helpers give the same bits in a CUDA kernel (simulated) as in a CPU kernel."""

import subprocess
import sys

import pytest

SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import numba
import numpy as np
from numba import cuda
from kvkit.formulas import index, numeric

assert cuda.is_available() and cuda.simulator


rotated = numeric.rotation(numeric.product)
scale_of, bfloat16_scale = map(numeric.group_scaling, ("float16", "bfloat16"))
half_code, bfloat16_code = map(numeric.quantizing, ("float16", "bfloat16"))
rounded = numeric.rounding("bfloat16")
dequantize = numeric.dequantizing("float32", "float16")


def body(i, x, half, table, floats, codes, rows):
    scale = scale_of(abs(x[i]), 7)
    codes[i, 0] = half_code(x[i], scale, 7)
    codes[i, 1] = bfloat16_code(x[i], bfloat16_scale(abs(x[i]), 127), 127)
    codes[i, 2] = numeric.pack_nibbles(codes[i, 0], codes[i, 1])
    codes[i, 3] = numeric.low_nibble(codes[i, 2])
    codes[i, 4] = numeric.high_nibble(codes[i, 2])
    floats[i, 0] = numeric.half_to_float(half[i])
    floats[i, 1] = numeric.bfloat16_to_float(half[i])
    floats[i, 2] = dequantize(codes[i, 0], scale)
    floats[i, 3] = rounded(x[i])
    rows[i, 0] = index.row_of(table[index.page_of(i, 5)], i, 5)
    rows[i, 1] = index.rest_of_page(i, 5)
    rows[i, 2] = index.share(1000, i, 300)
    rows[i, 3], rows[i, 4] = index.visible_range(9, 40 + i, i % 9, i % 5 - 1, i % 3 - 1, i % 2 == 0)
    half_of = x[i] * np.float32(0.5)
    floats[i, 4] = numeric.apply_softcap(x[i], np.float32(i % 4))
    floats[i, 5] = numeric.add_split_sum(half_of, x[i], half_of, -x[i])
    floats[i, 6] = numeric.normalizer(x[i], np.float32(i % 7), half_of)
    floats[i, 7] = numeric.alibi_bias(half_of, i - 100)
    floats[i, 8], floats[i, 9] = rotated(x[i], floats[i, 3], floats[i, 4], half_of)
    floats[i, 10] = numeric.alibi_slope(i % 12, 12)
    base = numeric.rotary_theta(1e4, 64, i, 40, 2.5)
    frequency = numeric.rotary_frequency(base, i % 32, 64)
    floats[i, 11] = numeric.rotary_angle(i, 1.5, np.float32(frequency))
    floats[i, 12], floats[i, 13] = numeric.cos_sin(floats[i, 11])


@numba.njit
def on_cpu(x, half, table, floats, codes, rows):
    for i in range(x.size):
        body_cpu(i, x, half, table, floats, codes, rows)


@cuda.jit
def on_cuda(x, half, table, floats, codes, rows):
    i = cuda.grid(1)
    if i < x.size:
        body(i, x, half, table, floats, codes, rows)


body_cpu = numba.njit(body)
count = 256
rng = np.random.default_rng(0)
x = (rng.standard_normal(count) * 10.0 ** rng.integers(-9, 5, count)).astype(np.float32)
half = np.arange(count, dtype=np.uint16) * 123
table = rng.integers(0, 2**40, count)
results = []
for launch in (on_cpu, on_cuda[count // 32, 32]):
    out = np.zeros((count, 14), np.float32), np.zeros((count, 5), np.int8), np.full((count, 5), -1)
    launch(x, half, table, *out)
    results.append([array.tobytes() for array in out])
    assert len(np.unique(out[1])) > 9 and len(np.unique(out[0][:, 10:])) > 300 and (out[2] >= 0).all()
assert results[0] == results[1]
print("same bits")
"""


@pytest.mark.slow  # random calls of operators compare these bits, too
def test_same_bits_in_the_simulator(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "same bits\n"), done.stderr
