"""The operators over dynamic caches on the device, and the plan of a step.

Names in capitals are sentences that are added to the docstrings of kvkit.
"""

from kvkit_cuda.mirror import ANGLES, CODES, EQUAL, INTO, ONCE, SUMS, on_device

__all__ = [
    "Plan", "alibi_mask", "key_value_cache", "multi_head_attention", "multi_head_cache_attention", "plan",
    "position_index", "rotary_position_embedding",
]  # fmt: skip

TABLE = "A page table on the device is checked on the device."
SAME_STEP = """with the same `seqstarts`, `page_size`, `cache_mode` and `decoding_batches`, whose page
    table has at least as many columns."""
CHECK = """check : bool
    False skips the check of entries, for index tensors that an earlier plan over the same caches has checked.
    Only totals are checked then; wrong entries make kernels read and write arbitrary memory.
"""


class Plan:
    """The operators over one checked step; `plan` makes it. Its methods may be called for any caches."""

    __slots__ = ("step",)

    def __init__(self, step):
        self.step = step  # a `PlannedStep` of calls/steps.py

    key_value_cache = on_device("dynamic_batching.Plan.key_value_cache")
    multi_head_cache_attention = on_device("dynamic_batching.Plan.multi_head_cache_attention")


plan = on_device(
    "dynamic_batching.plan",
    TABLE,
    ONCE,
    own={"check": (True, CHECK), "into": (None, INTO.format(same=SAME_STEP))},
    then=Plan,
)
key_value_cache = on_device("dynamic_batching.key_value_cache", EQUAL, TABLE)
multi_head_attention = on_device("dynamic_batching.multi_head_attention", SUMS)
multi_head_cache_attention = on_device(
    "dynamic_batching.multi_head_cache_attention", EQUAL, CODES, SUMS, TABLE
)
position_index = on_device("dynamic_batching.position_index")
rotary_position_embedding = on_device("dynamic_batching.rotary_position_embedding", ANGLES)
alibi_mask = on_device("dynamic_batching.alibi_mask")
