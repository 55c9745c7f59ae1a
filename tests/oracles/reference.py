"""Oracle of the KeyValueCache operators: loops over tokens and heads, legal inputs only, nothing checked."""

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

QMAX = {8: 127, 4: 7}
KEY, VALUE = 0, 1


def static_cell(array, layout, layer, kv, batch, pos, head):
    """The last axis (a view) of one token and head of a static cache or scale.

    Every index is one integer: a slice beside an index array would reorder axes in numpy, not in torch.
    """
    if layout == 0:
        return array[batch, layer, kv, pos, head]
    if layout == 1:
        return array[layer, batch, kv, head, pos]
    raise AssertionError(layout)


def dynamic_cell(array, layout, layer, kv, row, head):
    """The last axis (a view) of one token and head of a dynamic cache or scale."""
    if layout == 0:
        return array[row, layer, kv, head]
    if layout == 1:
        return array[layer, row, kv, head]
    if layout == 2:
        return array[layer, kv, row, head]
    if layout == 3:
        return array[layer, kv, head, row]
    raise AssertionError(layout)


def dynamic_row(cachestarts, batch, pos, cache_mode, page_size):
    """The cache row of one position of one batch, as a Python int."""
    if cache_mode == 0:
        return int(cachestarts[batch]) + pos
    return int(cachestarts[batch, pos // page_size]) + pos % page_size


def divide(a, b, t1):
    """a / b rounded once to t1."""
    with np.errstate(all="ignore"):
        return (np.asarray(a, np.float32) / np.asarray(b, np.float32)).astype(t1)


def quantize(x, quant_bit, group):
    """Codes (int8, one per element) and scales (one per group, dtype of x) of one head."""
    t1 = x.dtype
    qmax = QMAX[quant_bit]
    groups = x.reshape(-1, group).astype(np.float32)
    s = divide(np.abs(groups).max(axis=1), qmax, t1)
    eps = np.float32(1e-5).astype(t1)
    s = np.maximum(s, eps)
    u = divide(groups, s[:, None], t1)
    q = np.clip(np.rint(u.astype(np.float32)), -qmax, qmax)
    with np.errstate(all="ignore"):
        return q.astype(np.int8).reshape(-1), s


def dequantize(q, cell, group, t1):
    """The elements of one head from its codes and its stored scales."""
    t3 = cell.dtype
    with np.errstate(all="ignore"):
        product = q.reshape(-1, group).astype(np.float32) * cell.astype(np.float32)[:, None]
        return product.astype(t3).astype(t1).reshape(-1)


def pack_int4(q):
    """Bytes (uint8) of the codes of one head: the even element in the low nibble."""
    packed = []
    for k in range(len(q) // 2):
        packed.append((int(q[2 * k]) & 15) | ((int(q[2 * k + 1]) & 15) << 4))
    return np.array(packed, np.uint8)


def unpack_int4(packed):
    """Codes (int8) of one head from its bytes."""
    q = []
    for byte in packed:
        for nibble in (int(byte) & 15, (int(byte) >> 4) & 15):
            q.append(nibble - 16 if nibble >= 8 else nibble)
    return np.array(q, np.int8)


def store_head(x, cell, scale_cell, quant_bit, group):
    """Write one head of one token."""
    if quant_bit == 0:
        with np.errstate(all="ignore"):
            cell[:] = x.astype(cell.dtype)
        return
    q, s = quantize(x, quant_bit, group)
    cell[:] = q if quant_bit == 8 else pack_int4(q).view(cell.dtype)
    with np.errstate(all="ignore"):
        scale_cell[:] = s.astype(scale_cell.dtype)


def load_head(cell, scale_cell, quant_bit, group, t1):
    """Read one head of one token."""
    if quant_bit == 0:
        with np.errstate(all="ignore"):
            return cell.astype(t1)
    q = cell if quant_bit == 8 else unpack_int4(cell)
    return dequantize(q, scale_cell, group, t1)


def key_value_cache(
    current_key,
    current_value,
    start_pos,
    cache,
    scale=None,
    *,
    num_layer=1,
    layer_idx=0,
    quant_bit=0,
    quant_group=8,
    num_repeat=1,
    cache_layout=0,
):
    """Static KeyValueCache -> (key, value); cache and scale change in place."""
    batches, seqlen, heads, head_dim = current_key.shape
    start = int(np.asarray(start_pos).reshape(-1)[0])
    t1 = current_key.dtype

    def cells(kv, b, t, h):
        cell = static_cell(cache, cache_layout, layer_idx, kv, b, t, h)
        if quant_bit == 0:
            return cell, None
        return cell, static_cell(scale, cache_layout, layer_idx, kv, b, t, h)

    for kv, current in ((KEY, current_key), (VALUE, current_value)):
        for b in range(batches):
            for i in range(seqlen):
                for h in range(heads):
                    cell, scale_cell = cells(kv, b, start + i, h)
                    store_head(current[b, i, h], cell, scale_cell, quant_bit, quant_group)

    outputs = []
    for kv in (KEY, VALUE):
        out = np.zeros((batches, start + seqlen, heads * num_repeat, head_dim), t1)
        for b in range(batches):
            for t in range(start + seqlen):
                for h in range(heads * num_repeat):
                    cell, scale_cell = cells(kv, b, t, h // num_repeat)
                    out[b, t, h] = load_head(cell, scale_cell, quant_bit, quant_group, t1)
        outputs.append(out)
    return outputs[0], outputs[1]


def dynamic_key_value_cache(
    current_key,
    current_value,
    seqstarts,
    kvstarts,
    cachestarts,
    start_pos,
    max_seqlen,
    max_kvlen,
    cache,
    scale=None,
    *,
    num_layer=1,
    layer_idx=0,
    quant_bit=0,
    quant_group=8,
    num_repeat=1,
    cache_mode=0,
    cache_layout=0,
    page_size=128,
):
    """Dynamic KeyValueCache -> (key, value); cache and scale change in place."""
    heads, head_dim = current_key.shape[1:]
    t1 = current_key.dtype
    seqs = [int(v) for v in seqstarts]
    kvs = [int(v) for v in kvstarts]
    starts = [int(v) for v in start_pos]

    def cells(kv, b, t, h):
        row = dynamic_row(cachestarts, b, t, cache_mode, page_size)
        cell = dynamic_cell(cache, cache_layout, layer_idx, kv, row, h)
        if quant_bit == 0:
            return cell, None
        return cell, dynamic_cell(scale, cache_layout, layer_idx, kv, row, h)

    for kv, current in ((KEY, current_key), (VALUE, current_value)):
        for b in range(len(starts)):
            for i in range(seqs[b + 1] - seqs[b]):
                for h in range(heads):
                    cell, scale_cell = cells(kv, b, starts[b] + i, h)
                    store_head(current[seqs[b] + i, h], cell, scale_cell, quant_bit, quant_group)

    outputs = []
    for kv in (KEY, VALUE):
        out = np.zeros((kvs[-1], heads * num_repeat, head_dim), t1)
        for b in range(len(starts)):
            for t in range(kvs[b + 1] - kvs[b]):
                for h in range(heads * num_repeat):
                    cell, scale_cell = cells(kv, b, t, h // num_repeat)
                    out[kvs[b] + t, h] = load_head(cell, scale_cell, quant_bit, quant_group, t1)
        outputs.append(out)
    return outputs[0], outputs[1]
