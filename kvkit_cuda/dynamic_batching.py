"""The operators over dynamic caches on the device, and the plan of a step."""

from kvkit_cuda.mirror import ANGLES, BITS, CODES, SUMS, on_device

__all__ = [
    "Plan",
    "alibi_mask",
    "key_value_cache",
    "multi_head_attention",
    "multi_head_cache_attention",
    "plan",
    "position_index",
    "rotary_position_embedding",
]

TABLE = "A page table that is on the device is checked there, and stays there."
ONCE = """After the first call of its form a call of the plan's methods copies nothing to the device and
allocates nothing there, if its arrays lie there and results are given as `out`."""
INTO = """into : Plan
    A plan of the same `seqstarts`, `page_size`, `cache_mode` and `decoding_batches`, whose page table has as
    many columns: it becomes the plan of this step, and its tables take the places of the last ones. Then
    nothing is allocated, if index tensors are on the host, and a CUDA graph that captured calls of the plan's
    methods computes for this step when it is replayed, on caches with rows enough. `stream` is the one that
    replays it. A call of the same form comes before each that is captured, and graphs that were captured on
    one stream are replayed on one.
"""
CHECK = """check : bool
    False for index tensors that a plan, for the same caches, has checked once. Then of their entries only
    the totals are looked at; wrong ones make kernels read and write any memory.
"""


class Plan:
    """The operators over one checked step; `plan` makes it. Its methods may be called for any caches."""

    __slots__ = ("step",)

    def __init__(self, step):
        self.step = step  # as `calls.steps` has it

    key_value_cache = on_device("dynamic_batching.Plan.key_value_cache")
    multi_head_cache_attention = on_device("dynamic_batching.Plan.multi_head_cache_attention")


plan = on_device(
    "dynamic_batching.plan", TABLE, ONCE, own={"check": (True, CHECK), "into": (None, INTO)}, then=Plan
)
key_value_cache = on_device("dynamic_batching.key_value_cache", BITS, TABLE)
multi_head_attention = on_device("dynamic_batching.multi_head_attention", SUMS)
multi_head_cache_attention = on_device(
    "dynamic_batching.multi_head_cache_attention", BITS, CODES, SUMS, TABLE
)
position_index = on_device("dynamic_batching.position_index")
rotary_position_embedding = on_device("dynamic_batching.rotary_position_embedding", ANGLES)
alibi_mask = on_device("dynamic_batching.alibi_mask")
