"""Typical use, for the type checkers of `make lint`; it also runs."""

import numpy as np
from numpy.typing import NDArray

import kvkit

Floats = NDArray[np.float32]


def static(new: Floats) -> float:
    cache = np.zeros((1, 1, 2, 16, 2, 8), np.int8)
    scale = np.zeros((1, 1, 2, 16, 2, 1), np.float16)
    key, value = kvkit.key_value_cache(new, new, 0, cache, scale, quant_bit=8)
    kvkit.key_value_cache(new, new, np.int64(0), cache, scale, quant_bit=8, out=(key, value))
    sizes = key.shape[2], key.shape[3]
    output = kvkit.multi_head_attention(new, key, value, num_heads=sizes[0], head_dim=sizes[1])
    whole, lse = kvkit.multi_head_attention(new, key, value, num_heads=2, head_dim=8, return_lse=True)
    merged, total = kvkit.merge_attention_states((whole, whole), [lse, lse])
    mask = kvkit.alibi_mask(3, 3, num_heads=2, data_type="float16")
    query, _ = kvkit.rotary_position_embedding(
        new, new, 0, interleaved=False, scaling_type="linear", scaling_factor=2
    )
    return float(output.sum() + merged.sum() + total.sum() + query.sum() + mask[0, 0, 0])


def dynamic(new: Floats) -> tuple[int, ...]:
    cache = np.zeros((1, 2, 2, 64, 8), np.float16)
    step = kvkit.dynamic_batching.plan([0, 3], [0, 3], [[16]], [0], cache_mode=1, page_size=16)
    output = step.multi_head_cache_attention(new, new, new, cache, num_heads=2, head_dim=8, cache_layout=3)
    key, value = kvkit.dynamic_batching.key_value_cache(
        new, new, np.array([0, 3]), [0, 3], [[16]], [0], 3, None, cache, cache_mode=1, cache_layout=3
    )
    return key.shape + value.shape + output.shape


def blocks(new: Floats) -> int:
    cache = np.zeros((4, 2, 2, 8), np.float32)
    where = kvkit.ascend.slots([3], block_size=2)
    kvkit.ascend.reshape_and_cache(new, new, cache, cache.copy(), where.slot_mapping)
    key, nothing = kvkit.ascend.paged_cache_load(cache, None, where.block_tables, where.context_lens)
    output = kvkit.ascend.paged_attention(
        new[:1], cache, cache, where.block_tables, where.context_lens, softmax_scale=0.5
    )
    assert nothing is None
    return key.size + int(output.size)


def errors() -> str:
    try:
        kvkit.alibi_slope(num_heads=0)
    except kvkit.KvkitError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    new = np.ones((1, 3, 2, 8), np.float32)
    print(static(new), dynamic(new[0]), blocks(new[0]), errors())
