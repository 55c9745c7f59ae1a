"""Make calls on recurrent states: suites gdn-decode, gdn-prefill, kda-prefill, gdn-drafts and causal-conv."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator

from kvkit.reference.recurrent import gated_delta_rule
from kvkit.tools.vectors.draws import FP_TYPES, NAN, Call, Sizes, normal
from kvkit.typed import Array

# Operators whose expected results are not rounded.
IN_FLOAT64 = "gated_delta_step", "gated_delta_rule", "delta_gates", "causal_conv", "causal_conv_update"
PROMPT_LENGTHS = (1, 0, 63, 64, 65, 130)  # of packed prompts
IN_STATE = {
    "atol": 2e-5,
    "rtol": 2e-5,
    "reason": "float64 reference, rounded once to float32; sums in float32",
}
NARROW_STATE = {"atol": 2**-8, "rtol": 2**-8, "reason": "a state of bfloat16 is rounded once a call"}
RULE_INPUTS = {"linear": (), "gated": ("g",), "delta": ("beta",), "gated_delta": ("g", "beta")}
WIDTH = 4  # taps of the convolution


def tokens_of(
    rng: Generator, sizes: Sequence[int], count: int, by_channel: bool = False, dtype: str = "fp32"
) -> dict[str, Any]:
    """Return q, k, v, g and beta of tokens; a head has g = 0, and some tokens of another g = -60.

    `sizes` are the heads of q, k and v, and the elements of a key and of a value.
    """
    queries, keys, heads, key_dim, value_dim = sizes
    shapes = {"q": (queries, key_dim), "k": (keys, key_dim), "v": (heads, value_dim)}
    arrays = {name: normal(rng, (count, *shape), dtype) for name, shape in shapes.items()}
    g = -rng.exponential(0.5, (count, heads, key_dim) if by_channel else (count, heads)).astype(np.float32)
    g[:, 0] = 0
    g[count // 2 :: 7, -1] = -60
    return arrays | {"g": g, "beta": rng.random((count, heads)).astype(np.float32)}


def sizes_of(sizes: Sizes, groups: int) -> tuple[int, ...]:
    """Return the sizes of tokens with `groups` value heads for a key head."""
    return sizes.heads, sizes.heads, sizes.heads * groups, sizes.dim, sizes.dim


def state_pool(
    rng: Generator, sizes: Sizes, groups: int, used: list[int], layout: str = "KV", kind: str = "fp32"
) -> Array:
    """Return a pool of states; slots of no sequence are NaN."""
    pool = normal(rng, (max(used) + 2, sizes.heads * groups, sizes.dim, sizes.dim), FP_TYPES[kind])
    free = np.setdiff1d(np.arange(len(pool)), used)
    pool[free] = NAN
    return pool


def slots_of(sizes: Sizes) -> Array:
    """Return a slot for each sequence, in no order and with holes; the second sequence has none."""
    slots = 2 * np.arange(sizes.batch)[::-1] + 1
    slots[1] = -1
    return slots.astype(np.int32)


def with_only(names: Sequence[str], call: Call) -> Call:
    """Return a call with these of g and beta, or none."""
    kept = {name: array for name, array in call.inputs.items() if name not in ("g", "beta") or name in names}
    return Call(call.name, kept)


def decode(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `gdn-decode`: a token of each sequence, over pools with holes."""

    def step(
        groups: int = 2, dtype: str = "fp32", layout: str = "KV", state: str = "fp32", **more: Any
    ) -> Call:
        tokens, slots = tokens_of(rng, sizes_of(sizes, groups), sizes.batch, dtype=dtype), slots_of(sizes)
        used = [slot for slot in slots.tolist() if slot >= 0]
        tokens["state"] = state_pool(rng, sizes, groups, used, layout, state)
        options = {"state_indices": slots, "norm": True, "state_layout": layout}
        return Call("gated_delta_step", tokens | options | more)

    for layout in ("KV", "VK"):
        for groups in (1, 2, 3):
            yield f"step-{layout}-groups{groups}", step(groups, layout=layout)
        for dtype in ("fp16", "bf16"):
            yield f"step-{layout}-{dtype}", step(dtype=dtype, layout=layout)
        yield f"step-{layout}-state-bf16", step(dtype="bf16", layout=layout, state="bf16")
    for rule, names in RULE_INPUTS.items():
        yield f"rule-{rule}", with_only(names, step(rule=rule))
    heads = sizes.heads * 2
    gates = normal(rng, (heads,), np.float32), normal(rng, (heads,), np.float32)
    raw: dict[str, Any] = {name: normal(rng, (sizes.batch, heads), np.float32) for name in ("g", "beta")}
    yield "raw-gates", step(gates=gates, **raw)
    yield "scale", step(scale=1.0, norm_eps=1e-4)
    moved = slots_of(sizes)
    moved[moved >= 0] -= 1
    yield "other-slots", step(out_state_indices=moved)
    twice = step()
    twice.inputs["state_indices"] = np.full(sizes.batch, 1, np.int32)
    yield "slot-twice-refused", twice
    outside = step()
    outside.inputs["state_indices"] = np.arange(sizes.batch, dtype=np.int32) + 2**20
    yield "slot-outside-refused", outside
    for kind in ("gdn", "kda"):
        inner = (heads, sizes.dim) if kind == "kda" else (heads,)
        for bound in (None, -5.0):
            arrays = {"a": 3 * normal(rng, (5, *inner), np.float32)}
            arrays |= {"b": normal(rng, (5, heads), np.float32), "a_log": gates[0]}
            arrays["dt_bias"] = normal(rng, inner, np.float32)
            options = {"kind": kind, "lower_bound": bound, "double_beta": bound is not None}
            yield (
                f"gates-{kind}-{'free' if bound is None else 'bounded'}",
                Call("delta_gates", arrays, options),
            )


def prefill(rng: Generator, sizes: Sizes, channels: bool = False) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suites `gdn-prefill` and `kda-prefill`: packed prompts, one of them empty."""
    starts = np.cumsum([0, *PROMPT_LENGTHS]).astype(np.int32)
    groups = 1 if channels else 2

    def prompt(dtype: str = "fp32", layout: str = "KV", state: bool = True, **more: Any) -> Call:
        tokens = tokens_of(rng, sizes_of(sizes, groups), int(starts[-1]), channels, dtype)
        slots = np.array([2, 0, 5, 3, 8, 6], np.int32)
        pool = {"state": state_pool(rng, sizes, groups, slots.tolist(), layout), "state_indices": slots}
        options = {"starts": starts, "norm": True, "state_layout": layout}
        return Call("gated_delta_rule", tokens | (pool if state else {}) | options | more)

    for layout in ("KV", "VK"):
        yield f"prompts-{layout}", prompt(layout=layout)
        yield f"new-states-{layout}", prompt(layout=layout, state=False)
    for dtype in ("fp16", "bf16"):
        yield f"prompts-{dtype}", prompt(dtype)
    for chunk in (1, 16, 128):
        yield f"chunk{chunk}", prompt(chunk=chunk)
    if not channels:
        for rule, names in RULE_INPUTS.items():
            yield f"rule-{rule}", with_only(names, prompt(rule=rule, state=False))
    falls = prompt()
    falls.inputs["starts"] = starts[::-1].copy()
    yield "starts-fall-refused", falls


def drafts(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `gdn-drafts`: states of each token, capsules, and their replay."""
    lengths = np.resize([4, 1, 0, 3], sizes.batch)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    for layout in ("KV", "VK"):
        for channels in (False, True):
            groups = 1 if channels else 2
            name = f"{layout}-{'channels' if channels else 'heads'}"
            slots = np.arange(sizes.batch, dtype=np.int32)[::-1].copy()
            tokens = tokens_of(rng, sizes_of(sizes, groups), int(starts[-1]), channels)
            tokens["state"] = state_pool(rng, sizes, groups, slots.tolist(), layout)
            tokens |= {"starts": starts, "state_indices": slots, "norm": True, "state_layout": layout}
            yield f"states-{name}", Call("gated_delta_rule", tokens, {"return_states": True})
            yield f"capsule-{name}", Call("gated_delta_rule", tokens, {"return_capsule": 4})
            *_, capsule = gated_delta_rule(**tokens | {"state": tokens["state"].copy()}, return_capsule=4)
            for accepted in range(5):
                inputs = {"state": tokens["state"], "capsule": capsule.astype(np.float32)}
                inputs["accepted"] = np.minimum(lengths, accepted).astype(np.int32)
                options = {"state_indices": slots, "state_layout": layout}
                yield f"accepted{accepted}-{name}", Call("gated_delta_replay", inputs | options)
    inputs["accepted"] = np.full(sizes.batch, 5, np.int32)
    yield "more-than-there-are-refused", Call("gated_delta_replay", inputs | options)


def convolution(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `causal-conv`: packed prompts and single tokens."""
    channels, starts = 3 * sizes.heads * sizes.dim + 3, np.cumsum([0, 1, 0, 2, 70]).astype(np.int32)

    def inputs(tokens: int, slots: Sequence[int], dtype: str = "fp32") -> dict[str, Any]:
        shapes = {"x": (tokens, channels), "weight": (channels, WIDTH), "bias": (channels,)}
        shapes["state"] = (6, channels, WIDTH - 1)
        arrays = {name: normal(rng, shape, dtype) for name, shape in shapes.items()}
        arrays["state"][np.setdiff1d(np.arange(6), slots)] = NAN
        return arrays | {"state_indices": np.array(slots, np.int32)}

    for dtype in FP_TYPES:
        prompts = inputs(73, [4, 0, -1, 2], dtype) | {"starts": starts}
        yield f"prompts-{dtype}", Call("causal_conv", prompts)
        yield f"tokens-{dtype}", Call("causal_conv_update", inputs(4, [4, 0, -1, 2], dtype))
    plain_sums = inputs(73, [4, 0, 3, 2]) | {"starts": starts}
    yield "without-activation", Call("causal_conv", plain_sums, {"activation": None})
    alone = {name: plain_sums[name] for name in ("x", "weight")}
    yield "one-prompt", Call("causal_conv", alone)
    twice = inputs(4, [4, 0, 3, 2])
    twice["state_indices"][:] = 4
    yield "slot-twice-refused", Call("causal_conv_update", twice)
