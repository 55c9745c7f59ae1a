"""Every kind of layer by its name, as files say it."""

from kvkit.cache.layers import DynamicLayer, StaticLayer
from kvkit.cache.sliding import SlidingWindowLayer, StaticSlidingWindowLayer

KINDS = {
    kind.__name__: kind for kind in (DynamicLayer, SlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
}


def described(layer):
    """What a file says of a layer, so that `made` makes another one."""
    return {"kind": type(layer).__name__, "arguments": layer.describe()}


def made(about):
    return KINDS[about["kind"]](**about["arguments"])
