"""Make calls on compressed caches of DeepSeek V4: suites v4-compress and v4-decode."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.random import Generator

from kvkit.reference.compressed import compress_tokens
from kvkit.tools.vectors.draws import FP_TYPES, NAN, Call, Sizes, normal
from kvkit.tools.vectors.latent import ATTENTION, pool_of
from kvkit.typed import Array

IN_FLOAT64 = "compress_tokens", "rope_back"  # operators whose expected results are not rounded
RATIOS = {"csa": (4, True), "hca": (128, False)}  # {kind: (tokens of a window, overlap)}
WINDOW, DIM, ROPE = 128, 512, 64
CONTEXTS = 1, 127, 128, 129, 4095
CHOSEN = 512  # rows that an indexer chooses at most
FEW = 10  # rows that become bytes


def compression(
    rng: Generator, sizes: Sizes, kind: str, dtype: str = "fp32", pasts: tuple[int, ...] = (0, 0),
    new: tuple[int, ...] = (1, 1), dim: int = 0, padding: bool = False,
) -> Call:  # fmt: skip
    """Return a call that pools new tokens of sequences after past ones, which the reference has pooled."""
    (ratio, overlap), dim = RATIOS[kind], dim or 5 * sizes.dim
    width, ring, slots = dim * (1 + overlap), ratio * (1 + overlap), [2, 0, 5, 3, 7, 6][: len(new)]
    fixed: dict[str, Any] = {
        "ape": normal(rng, (ratio, width), "fp32"),
        "ratio": ratio,
        "overlap": overlap,
    }
    fixed |= {"norm_weight": 1 + normal(rng, (dim,), "fp32") / 4}
    rope = {"rotary_dim": ROPE if dim == DIM else sizes.dim, "theta": 1.6e5, "interleaved": True}
    state = np.full((9, ring, 2, width), NAN, np.float32)

    def tokens(counts: tuple[int, ...]) -> dict[str, Any]:
        names = "kv", "gate"
        arrays = {name: normal(rng, (sum(counts), width), dtype) for name in names}
        return arrays | {"starts": np.cumsum([0, *counts]).astype(np.int32)}

    before = tokens(tuple(min(past, ring) for past in pasts))
    stored = zip(pasts, np.diff(before["starts"]).tolist(), strict=True)
    places = [past - count + np.arange(count) for past, count in stored]
    compress_tokens(**before, **fixed, state=state, positions=np.concatenate(places), state_indices=slots)
    if padding:
        slots[-1] = -1
    inputs = tokens(new)
    positions = np.concatenate([past + np.arange(count) for past, count in zip(pasts, new, strict=True)])
    inputs = {name: inputs[name] for name in ("kv", "gate")} | {"ape": fixed["ape"], "state": state} | inputs
    inputs |= {"norm_weight": fixed["norm_weight"], "positions": positions.astype(np.int32)}
    inputs["state_indices"] = np.array(slots, np.int32)
    return Call("compress_tokens", inputs, {"ratio": ratio, "overlap": overlap, "rope": rope})


def compress(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `v4-compress`: prompts in chunks, boundaries, padding, slots, bytes."""
    for kind, (ratio, _) in RATIOS.items():
        for dtype in FP_TYPES:
            yield f"prompt257-{kind}-{dtype}", compression(rng, sizes, kind, dtype, (0,), (257,))
        yield f"chunk100-{kind}", compression(rng, sizes, kind, new=(100, 100))
        yield f"chunk1024-after100-{kind}", compression(rng, sizes, kind, pasts=(100, 0), new=(1024, 3))
        boundary = (127, 255, 383, 511)
        yield f"boundary-{kind}", compression(rng, sizes, kind, pasts=boundary, new=(1, 1, 1, 1))
        yield f"inside-{kind}", compression(rng, sizes, kind, pasts=(128, 254, 0), new=(1, 1, 0))
        padded = compression(rng, sizes, kind, pasts=(1000, 0, 0), new=(130, 129, 7), padding=True)
        yield f"padded-{kind}", padded
        positions, sequences = np.arange(-1, 3 * ratio * sizes.page), sizes.batch
        owner = np.arange(len(positions)) % sequences
        table = rng.permutation(4 * sequences).reshape(sequences, 4)
        slots: dict[str, Any] = {
            "positions": positions.astype(np.int32),
            "block_tables": table.astype(np.int32),
        }
        slots |= {"page_size": sizes.page, "sequence_of_token": owner.astype(np.int32)}
        yield f"slots-{kind}", Call("compressed_slots", slots, {"ratio": ratio})
        yield f"bytes-{kind}", coded(rng, sizes, kind)
    wrong = compression(rng, sizes, "csa", new=(9, 4))
    wrong.inputs["positions"][3:9] += 1
    yield "position-left-out-refused", wrong
    twice = compression(rng, sizes, "csa", new=(9, 4))
    twice.inputs["state_indices"][:] = 2
    yield "slot-twice-refused", twice


def coded(rng: Generator, sizes: Sizes, kind: str) -> Call:
    """Return a call that stores rows, rounded from float64 to float32, as the 584 bytes of `ds_v4`."""
    pooled = compression(rng, sizes, kind, new=(FEW * RATIOS[kind][0],), pasts=(0,), dim=DIM)
    rows = compress_tokens(**pooled.inputs | pooled.attributes)[0].astype(np.float32)
    used = np.zeros((-(-FEW // sizes.page), sizes.page), bool)
    cache = pool_of(np.zeros((*used.shape, DIM), np.float32), used, "ds_v4")["latent"]
    inputs = {"latent": rows[:, :-ROPE].copy(), "rope": rows[:, -ROPE:].copy(), "cache": cache}
    return Call("mla_append", inputs | {"slot_mapping": np.arange(FEW, dtype=np.int32)}, {"format": "ds_v4"})


def decode(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `v4-decode`: rows of windows, compressed rows, sinks, rotation back."""
    for heads in (64, 128):
        for kind in ("window", *RATIOS):
            for format in (None, "ds_v4"):
                name = f"{kind}-heads{heads}-{'bytes' if format else 'bf16'}"
                yield name, attention(rng, kind, heads, format)
    rope = {"rotary_dim": ROPE, "theta": 1.6e5, "interleaved": True}
    for dtype, kind in FP_TYPES.items():
        inputs = {"output": normal(rng, (len(CONTEXTS), sizes.heads, DIM), kind)}
        inputs["positions"] = np.array(CONTEXTS, np.int32) - 1
        yield f"back-{dtype}", Call("rope_back", inputs, {"rope": rope})


def attention(rng: Generator, kind: str, heads: int, format: str | None) -> Call:
    """Return a call of attention of one token of each context to its window, and to compressed rows."""
    dtype, contexts = FP_TYPES["bf16"], np.array(CONTEXTS)

    def side(counts: Array, ready: Array) -> tuple[dict[str, Any], Array]:
        """Return a pool of a block for each context, and the chosen slots of each query."""
        blocks, size = len(counts), int(ready.max())
        chosen = np.full((blocks, int(counts.max())), -1, np.int32)
        for b, (count, all_rows) in enumerate(zip(counts.tolist(), ready.tolist(), strict=True)):
            rows = np.sort(rng.permutation(all_rows)[:count])
            chosen[b, :count] = b * size + rows
        used = np.arange(size) < ready[:, None]
        return pool_of(normal(rng, (blocks, size, DIM), dtype), used, format), chosen

    near = np.minimum(contexts, WINDOW)
    pool, indices = side(near, near)
    inputs = {"query": normal(rng, (len(contexts), heads, DIM), dtype), "latent": pool.pop("latent")}
    inputs |= {"indices": indices, "sinks": normal(rng, (heads,), "fp32")}
    if kind != "window":
        ready = contexts // RATIOS[kind][0]
        extra, chosen = side(np.minimum(ready, CHOSEN), ready)
        inputs["extra"] = extra["latent"], chosen, None
    attributes = {"softmax_scale": DIM**-0.5, "value_dim": DIM, "return_lse": True}
    return Call(ATTENTION, inputs, attributes | pool)
