"""Make calls of attention over caches in blocks, for sequences or for each head apart."""

import backends
import pytest

from kvkit.tools.vectors.pools import block_attention

paged_attention = backends.operators.ascend.paged_attention
apart_or_not = pytest.mark.parametrize("apart", [False, True], ids=["plain", "per_head"])


def call_of(rng, *how, **more):
    """Return the arguments of a legal call; rows outside contexts and unused table entries are poison."""
    call = block_attention(rng, *how, **more)
    return call.inputs | call.attributes


FIRST = ("query", "key_cache", "value_cache", "block_tables", "context_lens")


def run(call, function=paged_attention, **more):
    return function(
        *(call[name] for name in FIRST), **{k: v for k, v in call.items() if k not in FIRST}, **more
    )


EXTRAS = {
    "razor": {"razor": True}, "scale": {"softmax_scale": 0.7},
    "razor_scale": {"razor": True, "softmax_scale": -0.3}, "window": {"window": (5, -1)},
    "right": {"window": (-1, 0)}, "last": {"window": (0, 3), "razor": True}, "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"razor": True, "window": (7, 0), "softcap": 2.0, "sinks": True, "softmax_scale": 0.5},
}  # fmt: skip
