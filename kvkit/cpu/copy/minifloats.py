"""Store rows as 8-bit codes with scales: quotients in float32 are rounded once and saturate.

Codes are 8-bit floats, or int8 with the caller's scales. `rows.py` computes scales of int8, by PMX's rules.
"""

from typing import Any

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.simd import minifloats as panels
from kvkit.cpu.simd.lanes import LANES
from kvkit.formats.elements import BY_NAME
from kvkit.formulas import numeric
from kvkit.runtime.jit import helper

put_int8 = memory.store(types.int8)


@helper
def write_code(address, x):
    """Write the int8 code nearest to x."""
    put_int8(address, numeric.nearest_code(x))


def scaled_row(packed, cache, scale, group, plain):
    """Return a row function that writes codes, and a scale per group; with group 0 it reads one scale."""
    get, get_scale, put_scale = memory.read(packed), memory.read(scale), memory.write(scale)
    put = memory.write(cache) if BY_NAME[cache].minifloat else write_code
    packed_bytes, scale_bytes, limit = (
        BY_NAME[packed].bytes(1),
        BY_NAME[scale].bytes(1),
        BY_NAME[cache].limits[1],
    )
    largest_scale = numeric.largest_scaling(scale)
    vector = group % LANES == 0 and not plain
    largest_of: Any = panels.largest(packed) if vector else None
    panel: Any = panels.quotients(packed, cache, scale) if vector else None

    def row(packed, cache, scale, dim):
        shared = group if group else dim  # elements that share a scale
        for first in range(0, dim, shared):
            scale_at = scale + first // shared * scale_bytes
            source, target = packed + first * packed_bytes, cache + first
            whole = 0
            if group:
                largest = abs(get(source))
                if vector:
                    largest = largest_of(source, shared)
                else:
                    for i in range(1, shared):
                        largest = max(largest, abs(get(source + i * packed_bytes)))
                put_scale(scale_at, largest_scale(largest, limit))
            if vector:
                whole = shared // LANES * LANES
                for i in range(0, whole, LANES):
                    panel(source + i * packed_bytes, scale_at, target + i)
            for i in range(whole, shared):
                put(target + i, get(source + i * packed_bytes) / get_scale(scale_at))

    return row
