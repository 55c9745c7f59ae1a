"""Make latent caches of every kind that engines have, from rows of 512 + 64 numbers."""

import ml_dtypes
import numpy as np

from kvkit.formats import decode, encode
from kvkit.tools.vectors.latent import pool_of

F32, BF16, F16 = np.float32, ml_dtypes.bfloat16, np.float16
LATENT, ROPE = 512, 64


def pools(rows, kind):
    """Return (keyword arguments of a pool, the numbers that it holds) for latent rows in a kind of cache."""
    blocks, page, _ = rows.shape
    flat = rows.reshape(blocks * page, -1)
    if kind == "one pool":
        return {"latent": rows}, flat
    if kind == "with gaps":  # FlashMLA allocates a row more for each block
        wide = np.full((blocks, page + 1, 1, rows.shape[2]), np.nan, rows.dtype)
        wide[:, :page, 0] = rows
        return {"latent": wide[:, :page]}, flat
    if kind == "two pools":
        return {"latent": rows[..., :LATENT], "rope_cache": np.ascontiguousarray(rows[..., LATENT:])}, flat
    rows = rows[..., 64:] if kind.startswith("ds_v4") else rows
    codes = encode(rows.reshape(blocks * page, -1), kind)["codes"]
    return pool_of(rows, np.ones((blocks, page), bool), kind), decode(codes, kind).reshape(blocks * page, -1)
