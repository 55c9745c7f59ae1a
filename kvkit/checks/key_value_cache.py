"""Check a call of `key_value_cache`."""

from typing import NamedTuple

from kvkit.checks import caches
from kvkit.checks.arguments import CacheTransfer
from kvkit.checks.index_tensors import Sequences
from kvkit.checks.outputs import Results
from kvkit.checks.records import Context, StepIndex
from kvkit.checks.values import NamedArrays, check_new_tokens, check_size, integer
from kvkit.formats import Element
from kvkit.typed import Array

RESULTS = "key", "value"


class TransferCall(NamedTuple):
    """A checked call of `key_value_cache`, without outputs."""

    fmt: Element
    shape: tuple[int, ...]  # of key and value
    current_key: Array
    current_value: Array
    layer: Context
    steps: StepIndex
    repeat: int
    written: NamedArrays
    results: Results


def checked_key_value_cache(call: CacheTransfer, sequences: Sequences) -> TransferCall:
    """Check a call of `key_value_cache`."""
    fmt, key, value = check_new_tokens(call.current_key, call.current_value, sequences.axes)
    heads, dim = key.shape[-2:]
    repeat = integer("num_repeat", call.num_repeat, 1)
    inputs = [("current_key", key), ("current_value", value)]
    layer = caches.cache_layer(fmt, heads, dim, call.cache, call.scale, sequences.layouts, call.place)
    written = caches.check_written(call.cache, call.scale, layer, inputs)
    steps = sequences.over_cache("current_key", key, layer)
    shape = (*sequences.context_axes(steps), heads * repeat, dim)
    check_size("num_repeat", shape, fmt)
    results = Results(dict.fromkeys(RESULTS, (shape, fmt.dtype)), [*inputs, *written])
    return TransferCall(fmt, shape, key, value, layer, steps, repeat=repeat, written=written, results=results)
