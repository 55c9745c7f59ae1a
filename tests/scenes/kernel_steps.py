"""Call the steps of attention's engines as the walk does, on records of params, a block and a tile."""

import numpy as np

from kvkit.cpu.attention.params import ATTENTION_PARAMS, BLOCK, TILE


def run_step(code, params, block, tile):
    """Run a step; fields are numbers or arrays by name, all others are 0. Return block and `tile`."""
    records = []
    for form, fields in ((ATTENTION_PARAMS, params), (BLOCK, block), (TILE, tile)):
        numbers = np.zeros(len(form.names), np.int64)
        for name, field in fields.items():
            numbers[form.at[name]] = field.ctypes.data if isinstance(field, np.ndarray) else field
        records.append(numbers)
    code.ctypes(*[numbers.ctypes.data for numbers in records])
    block, tile = (
        dict(zip(form.names, record.tolist(), strict=True))
        for form, record in zip((BLOCK, TILE), records[1:], strict=True)
    )
    return block | {"tile": tile}
