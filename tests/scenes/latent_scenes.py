"""Make latent caches of every kind that engines have, from rows of 512 + 64 numbers."""

import ml_dtypes
import numpy as np

from kvkit.formats import decode, encode

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
    if kind.startswith("ds_v4"):
        flat = flat[:, 64:]
        stored = encode(flat, kind)["codes"].reshape(blocks, page, 584)
        room = np.zeros((blocks, -(-page * 584 // 576) * 576), np.uint8)
        room[:, : page * 576] = stored[..., :576].reshape(blocks, -1)
        room[:, page * 576 : page * 584] = stored[..., 576:].reshape(blocks, -1)
        return {"latent": room, "format": kind}, decode(stored, kind).reshape(blocks * page, -1)
    stored = encode(flat, kind)["codes"].view(np.uint8).reshape(blocks, page, 656)
    return {"latent": stored, "format": kind}, decode(stored, kind).reshape(blocks * page, -1)
