"""Make quantized layers of two kinds of codes, and read what they store."""

import copy

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from kvkit.cache.layers.quant_spec import QuantSpec

KEY, VALUE = QuantSpec("uint4:g4:channel"), QuantSpec("uint2:g8")
PMX = ("float32", "float16"), ("float16", "float16"), ("bfloat16", "float32")  # of data, of scales
OPTIONS = {"key": KEY, "value": VALUE, "residual_length": 5, "sink": 2}


def states(tokens, batch=2, heads=2, dims=(16, 24), dtype=np.float32, seed=0):
    """Return keys and values [B, H, tokens, D]."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((batch, heads, tokens, dim)).astype(dtype) for dim in dims]


def feed(layer, given, *ends):
    """Update a layer with tokens up to each end in turn; return the last result."""
    begin = result = None
    for end in ends:
        begin = layer.get_seq_length()
        result = layer.update(*(x[:, :, begin:end] for x in given))
    return result


def coded(layer, side=0):
    """Return (bytes of codes, scales and minima) of a layer's keys or values."""
    side = layer.store.sides[side]
    return side.codes[:, :, : side.coded], side.cells[:, :, : side.block_count]


SPECS = {
    "channel and token": OPTIONS,
    "token and channel": OPTIONS | {"key": OPTIONS["value"], "value": OPTIONS["key"]},
    "no sinks, no tail": OPTIONS | {"sink": 0, "residual_length": 0, "read_back": True},
}
KINDS = tuple(SPECS.values())


def assert_same(one, other):
    assert one._describe() == other._describe()
    assert one.get_seq_length() == other.get_seq_length()
    assert one._record_past == other._record_past
    one, other = copy.deepcopy((one, other))
    for layer in (one, other):
        if layer.store:
            layer.store.release_undo()
    assert one.nbytes == other.nbytes
    if not one.nbytes:
        return
    for side in (0, 1):
        for a, b in zip(coded(one, side), coded(other, side), strict=True):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()
    assert one.keys.tobytes() == other.keys.tobytes()
    assert one.values.tobytes() == other.values.tobytes()


def do(layer, name, argument, seed):
    """Call a method; return its result as bytes."""
    if name == "update":
        new = states(argument, layer.batch_size or 2, seed=seed)
        return [np.asarray(view).tobytes() for view in layer.update(*new)]
    return getattr(layer, name)(*(() if argument is None else (argument,)))


def attended(layer):
    if not layer.get_seq_length():
        return None
    query = states(1, layer.batch_size, 4, dims=(16,), seed=9)[0]
    return layer.attend(query).tobytes()


def assert_alike_from_now_on(one, other):
    for seed, count in enumerate((1, 6, 1)):
        assert do(one, "update", count, seed) == do(other, "update", count, seed)
        assert attended(one) == attended(other)
    assert_same(one, other)
