"""Make calls of the operators for positions: rotary embedding, ALiBi and position indices."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.random import Generator

from kvkit.tools.vectors.draws import FP_TYPES, NAN, Call, Sizes, normal
from kvkit.typed import Array

ROTATIONS: dict[str, dict[str, Any]] = {
    "neighbours": {},
    "halves": {"interleaved": False},
    "part-of-a-head": {"rotary_dim": 8},
    "keys-as-they-are": {"bypass_key": True, "theta": 500000.0},
    "linear": {"scaling_type": "linear", "scaling_factor": 4.0},
    "dynamic": {"scaling_type": "dynamic", "scaling_factor": 2.0, "max_position_embeddings": 16},
}
START = 13  # the position of the first token


def tables(rng: Generator, rows: int, columns: int) -> dict[str, Array]:
    """Return cosines and sines of random angles."""
    angles = rng.uniform(-np.pi, np.pi, (rows, columns))
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def static_rotation(
    rng: Generator, sizes: Sizes, dtype: str = "fp32", pads: bool = False, given: bool = False,
    **attributes: Any,
) -> Call:  # fmt: skip
    """Return a call over five tokens, perhaps with padding before some sequences or with given tables."""
    shape = sizes.batch, 5, sizes.heads, sizes.dim
    inputs: dict[str, Any] = {"query": normal(rng, (*shape[:2], 2 * sizes.heads, sizes.dim), dtype)}
    inputs |= {"key": normal(rng, shape, dtype), "start_pos": START}
    if pads:
        inputs["pad_len"] = np.array(sizes.each(0, 3, 1))
    if given:
        inputs |= tables(rng, START + 5, sizes.dim // 2)
    return Call("rotary_position_embedding", inputs, {"interleaved": True} | attributes)


def dynamic_rotation(rng: Generator, sizes: Sizes, dtype: str = "fp32", **attributes: Any) -> Call:
    """Return a call over packed queries and keys; one sequence is empty."""
    lengths = sizes.each(1, 3, 0, 9)
    name, heads = "dynamic_batching.rotary_position_embedding", {"query": 2 * sizes.heads, "key": sizes.heads}
    inputs = {each: normal(rng, (sum(lengths), h, sizes.dim), dtype) for each, h in heads.items()}
    inputs |= {"seqstarts": np.cumsum([0, *lengths]), "start_pos": np.array(sizes.each(40, 0, 7, 11))}
    return Call(name, inputs | {"max_seqlen": None}, attributes)


def static_bias(rng: Generator, heads: int, dtype: str = "float32", mask: str | None = None) -> Call:
    """Return a call for three queries and seven keys; a mask of floats has two more columns, of NaN."""
    inputs: dict[str, Any] = {"seqlen_q": 3, "seqlen_kv": 7}
    if mask == "float":
        inputs["attn_mask"] = normal(rng, (2, 1, 3, 9), np.float32)
        inputs["attn_mask"][..., 7:] = NAN
    elif mask == "bool":
        inputs["attn_mask"] = rng.random((heads, 3, 7)) < 0.6
    return Call("alibi_mask", inputs, {"num_heads": heads, "data_type": dtype})


def positions(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) for the operators of positions in the suite `pmx`."""
    for dtype in FP_TYPES:
        yield f"turn-{dtype}", static_rotation(rng, sizes, dtype)
        yield f"turn-dynamic-{dtype}", dynamic_rotation(rng, sizes, dtype)
    for name, attributes in ROTATIONS.items():
        yield f"turn-{name}", static_rotation(rng, sizes, **attributes)
        yield f"turn-dynamic-{name}", dynamic_rotation(rng, sizes, **attributes)
    yield "turn-behind-padding", static_rotation(rng, sizes, pads=True)
    yield "turn-by-tables", static_rotation(rng, sizes, given=True, interleaved=False)
    for heads in (1, 8, 6):
        yield f"alibi-slope-{heads}", Call("alibi_slope", {}, {"num_heads": heads})
    starts, kvstarts = (np.cumsum([0, *sizes.each(*each)]) for each in ((1, 3, 0, 2), (7, 3, 4, 2)))
    for dtype in ("float32", "float16", "bfloat16"):
        yield f"alibi-mask-{dtype}", static_bias(rng, 6, dtype)
        packed = {"seqstarts": starts, "kvstarts": kvstarts}, {"num_heads": 6, "data_type": dtype}
        yield f"alibi-mask-dynamic-{dtype}", Call("dynamic_batching.alibi_mask", *packed)
    for mask in ("float", "bool"):
        yield f"alibi-mask-and-{mask}", static_bias(rng, 4, mask=mask)
    inputs: dict[str, Any] = {"sequences": np.zeros(starts[-1], np.int64), "seqstarts": starts}
    inputs |= {"start_pos": np.array(sizes.each(40, 0, 7, 11)), "max_seqlen": None}
    yield "position-index", Call("dynamic_batching.position_index", inputs)
