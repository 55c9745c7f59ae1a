"""Try usual causes of differing bytes, by computing the bytes that each cause would have produced."""

from kvkit.tools.causes import attention, bits, places, positions, rounding
from kvkit.tools.causes.indices import index_causes
from kvkit.tools.causes.inputs import usable_inputs
from kvkit.tools.causes.trial import CAUSES, Cause, Trial, try_causes

__all__ = [
    "CAUSES", "Cause", "Trial", "attention", "bits", "index_causes", "places", "positions", "rounding",
    "try_causes", "usable_inputs",
]  # fmt: skip
