"""Compile kernels ahead of calls: for a prompt, then a token, over one kind of cache."""

import numpy as np

from kvkit.formats import BY_NAME, QUANTIZED
from kvkit_cuda import dynamic_batching
from kvkit_cuda.device_runtime import compiled

# Tokens of a prompt that is too long for the decode kernel, of a past with several splits, and of a page.
PROMPT, PAST, PAGE = 40, 600, 128
CODE_BITS = {fmt.name: bits for bits, fmt in QUANTIZED.items()}


def compile_for(capability):
    """Make this process compile kernels for a compute capability without a driver, and run none."""
    from kvkit_cuda.device_runtime import absent

    absent.compile_for(capability)


def warm(cache="float16", group=8, data="float16", dim=128, queries=4, scale=None):
    """Compile the kernels for a cache format and a data format, and keep them on disk.

    Parameters
    ----------
    cache, data, scale : str
        Formats of the cache, of new tokens and of scales (None: the format of the data).
    group, dim, queries : int
        Codes that share a scale, elements of a head, and query heads for each key head.

    Returns
    -------
    dict
        How many kernels this process has ``loaded`` and ``compiled``.

    Raises
    ------
    DeviceError
        If there is no device. Kernels are compiled for the current one.
    """
    bits, dtype = CODE_BITS.get(cache, 0), BY_NAME[data].dtype
    columns, last = -(-(PAST + PROMPT) // PAGE), dim * bits // 8 if bits else dim
    shape = columns * PAGE, 1, 2, 1
    rows = np.zeros((*shape, last), BY_NAME[cache].dtype)
    scales = np.zeros((*shape, dim // group), BY_NAME[scale or data].dtype) if bits else None
    codes = {"quant_bit": bits, "quant_group": group}
    sizes = {"num_heads": queries, "num_kv_heads": 1, "head_dim": dim}
    for tokens in (PROMPT, 1):
        table = np.arange(columns)[None] * PAGE
        index = [0, tokens], [0, PAST + tokens], table, [PAST]
        plan = dynamic_batching.plan(*index, cache_mode=1, page_size=PAGE)
        query, new = (np.zeros((tokens, heads, dim), dtype) for heads in (queries, 1))
        plan.multi_head_cache_attention(query, new, new, rows, scales, **sizes, **codes)
        plan.key_value_cache(new, new, rows, scales, **codes)
    return dict(compiled.counts)
