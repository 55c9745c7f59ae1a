"""Use a dynamic layout that is not in the table, (H, L, 2, MaxT, Dh) as number 4, beside plain loops.

`test_one_more_layout.py` adds it to a copy of the package and runs this there; what is found is printed.
"""

import json

import numpy as np
from click.testing import CliRunner

import kvkit
from kvkit_cli.describe import describe

L, H, MAX_T, DIM, LAYER = 2, 3, 40, 8, 1
SEQSTARTS, KVSTARTS, CACHESTARTS, START_POS = [0, 4, 6], [0, 9, 15], [3, 20], [5, 4]
STEP = SEQSTARTS, KVSTARTS, CACHESTARTS, START_POS
SIZES = {"num_layer": L, "layer_idx": LAYER}


def tokens():
    """Yield (sequence, token, position) of every new token."""
    for b, past in enumerate(START_POS):
        for i, token in enumerate(range(SEQSTARTS[b], SEQSTARTS[b + 1])):
            yield b, token, past + i


def append(key, value, cache):
    for b, token, position in tokens():
        for h in range(H):
            cache[h, LAYER, 0, CACHESTARTS[b] + position] = key[token, h]
            cache[h, LAYER, 1, CACHESTARTS[b] + position] = value[token, h]


def context(cache, b, kv, length):
    """Return the first rows of a sequence, [length, H, Dh]."""
    rows = [[cache[h, LAYER, kv, CACHESTARTS[b] + i] for h in range(H)] for i in range(length)]
    return np.array(rows, np.float64)


def attend(query, cache):
    out = np.zeros(query.shape)
    for b, token, position in tokens():
        keys, values = (context(cache, b, kv, position + 1) for kv in (0, 1))
        for h in range(H):
            scores = [sum(query[token, h] * key) / DIM**0.5 for key in keys[:, h]]
            weights = np.exp(np.array(scores) - max(scores))
            weights /= sum(weights)
            out[token, h] = sum(w * value for w, value in zip(weights, values[:, h], strict=True))
    return out


def main():
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, SEQSTARTS[-1], H, DIM)).astype(np.float32)
    old = rng.standard_normal((H, L, 2, MAX_T, DIM)).astype(np.float32)
    expected, cache, read = old.copy(), old.copy(), old.copy()
    append(key, value, expected)
    lengths = np.diff(KVSTARTS)
    keys, values = kvkit.dynamic_batching.key_value_cache(
        key, value, *STEP, None, None, cache, cache_layout=4, **SIZES
    )
    loaded = [np.concatenate([context(expected, b, kv, lengths[b]) for b in range(2)]) for kv in (0, 1)]
    output = kvkit.dynamic_batching.multi_head_cache_attention(
        query, key, value, *STEP, 0, None, None, read, num_heads=H, head_dim=DIM, cache_layout=4, **SIZES
    )
    message = ""
    try:
        kvkit.dynamic_batching.key_value_cache(key, value, *STEP, None, None, cache, cache_layout=5, **SIZES)
    except kvkit.KvkitError as error:
        message = str(error)
    found = {
        "file": kvkit.__file__,
        "stored": bool((cache == expected).all() and (read == expected).all()),
        "loaded": bool((keys == loaded[0]).all() and (values == loaded[1]).all()),
        "away": float(abs(output - attend(query, expected)).max()),
        "message": message,
        "described": CliRunner().invoke(describe, ["dynamic_batching.key_value_cache"]).output,
        "help": kvkit.dynamic_batching.key_value_cache.__doc__,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
