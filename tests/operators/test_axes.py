"""Arrays whose axes are in another order than the operator takes: the error names both orders."""

import itertools

import numpy as np
import pytest

import kvkit
from kvkit.cache import PagedCache

B, Q, S, H, G, D = 2, 5, 11, 6, 3, 16  # all sizes differ, so that any two exchanged axes can be told


def array(*shape):
    return np.ones(shape, np.float32)


def static(query, key, value):
    heads = {"num_heads": H, "num_kv_heads": G, "head_dim": D}
    return kvkit.multi_head_attention(query, key, value, **heads)


def packed(query, key, value):
    heads = {"num_heads": H, "num_kv_heads": G, "head_dim": D}
    return kvkit.dynamic_batching.multi_head_attention(query, key, value, [0, Q], [0, S], 0, Q, S, **heads)


def pages(current_key, current_value):
    cache = PagedCache(8, 4, num_layers=1, num_kv_heads=G, head_dim=D, dtype=np.float32)
    with cache.begin_step([(cache.blocks.add(), Q)]) as step:
        step.update(current_key, current_value, 0)


CALLS = {
    static: {"query": array(B, Q, H, D), "key": array(B, S, G, D), "value": array(B, S, G, D)},
    packed: {"query": array(Q, H, D), "key": array(S, G, D), "value": array(S, G, D)},
    pages: {"current_key": array(Q, G, D), "current_value": array(Q, G, D)},
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_error_names_both_orders_of_axes(call):
    legal = CALLS[call]
    call(**legal)
    for name, value in legal.items():
        for i, j in itertools.combinations(range(value.ndim), 2):
            if name != "query" or j >= value.ndim - 2:  # a query has any number of sequences and tokens
                wanted = r"look like \[.*\], expected is \[.*\]: swapaxes|in another order than \["
                with pytest.raises(kvkit.KvkitError, match=wanted):
                    call(**legal | {name: np.ascontiguousarray(value.swapaxes(i, j))})
