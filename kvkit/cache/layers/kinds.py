"""Every kind of layer by its name, as files say it."""

from typing import Any

from kvkit.cache.layers.dynamic import DynamicLayer, StaticLayer
from kvkit.cache.layers.quant_spec import QuantSpec
from kvkit.cache.layers.quantized import QuantizedLayer
from kvkit.cache.layers.sliding import SlidingWindowLayer, StaticSlidingWindowLayer

KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (DynamicLayer, QuantizedLayer, SlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
}


def described(layer):
    """What a file says of a layer, so that `made` makes another one."""
    return {"kind": type(layer).__name__, "arguments": layer.describe()}


def made(about):
    arguments = about["arguments"].items()
    return KINDS[about["kind"]](
        **{name: QuantSpec(**x) if isinstance(x, dict) else x for name, x in arguments}
    )
