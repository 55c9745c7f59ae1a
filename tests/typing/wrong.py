"""Wrong calls, which the type checkers of `make lint` must find: a comment that hides no error is one."""

import numpy as np

import kvkit

new = np.ones((1, 3, 2, 8), np.float32)
cache = np.zeros((1, 1, 2, 16, 2, 8), np.int8)


def wrong() -> None:
    kvkit.multi_head_attention(new, new, new, num_heads="eight", head_dim=8)  # type: ignore[arg-type]
    kvkit.multi_head_attention(new, new)  # type: ignore[call-arg]
    kvkit.multi_head_attention([[[[1.0]]]], new, new, num_heads=2, head_dim=8)  # type: ignore[arg-type]
    kvkit.multi_head_attention(new, new, new, num_heads=2, head_dim=8, window=4)  # type: ignore[arg-type]
    kvkit.key_value_cache(new, new, "0", cache)  # type: ignore[arg-type]
    kvkit.key_value_cache(new, new, 0, cache, quant_bit=2)  # type: ignore[arg-type]
    kvkit.key_value_cache(new, new, 0, cache, cache_mode=1)  # type: ignore[call-arg]
    kvkit.alibi_mask(3, 3, num_heads=2, data_type="float8")  # type: ignore[arg-type]
    kvkit.dynamic_batching.plan([0, 3], [0, 3], [0], [0], cache_mode=2)  # type: ignore[arg-type]
    kvkit.dynamic_batching.plan([0, 3], [0, 3], [0], [0]).multi_head_attention  # type: ignore[attr-defined]  # noqa: B018
    kvkit.ascend.nd_to_nz(new[0, 0], out=(new,))  # type: ignore[arg-type]
    kvkit.cache.StaticCache()  # type: ignore[call-arg]
    kvkit.cache.DynamicCache(window="4")  # type: ignore[arg-type]
    kvkit.cache.QuantSpec(3)  # type: ignore[arg-type]
    kvkit.cache.DynamicCache().attend([1.0], 0)  # type: ignore[arg-type]
