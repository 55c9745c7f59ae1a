"""Mirror `kvkit` on a GPU: the same operators for arrays of CUDA devices, and for numpy arrays.

The first call imports Numba and loads a driver; importing this package does neither.
"""

from kvkit.errors import DeviceError, KvkitError
from kvkit.version import __version__
from kvkit_cuda import ascend, dynamic_batching, mirror
from kvkit_cuda.mirror import on_device

__all__ = [
    "DeviceError", "KvkitError", "PagedPlan", "__version__", "alibi_mask", "alibi_slope", "ascend",
    "causal_conv", "causal_conv_update", "compress_tokens", "compressed_slots", "delta_gates",
    "dynamic_batching", "gated_delta_replay", "gated_delta_rule", "gated_delta_step", "indexer_scores",
    "key_value_cache", "merge_attention_states", "mla_absorb", "mla_append", "mla_attention", "mla_expand",
    "multi_head_attention", "multi_head_cache_attention", "paged_append", "paged_attention", "paged_plan",
    "rope_back", "rotary_position_embedding", "swap_blocks", "topk_rows",
]  # fmt: skip

key_value_cache = on_device("key_value_cache", mirror.EQUAL)
multi_head_attention = on_device("multi_head_attention", mirror.SUMS, mirror.KEY_WEIGHTS)
multi_head_cache_attention = on_device("multi_head_cache_attention", mirror.EQUAL, mirror.CODES, mirror.SUMS)
merge_attention_states = on_device("merge_attention_states")
paged_attention = on_device("paged_attention", mirror.SUMS, mirror.KEY_WEIGHTS)
paged_append = on_device("paged_append")
swap_blocks = on_device("swap_blocks")
mla_attention = on_device("mla_attention", mirror.SUMS, mirror.GATHERED)
mla_append = on_device("mla_append", mirror.EQUAL, mirror.ENCODED_ON_HOST)
mla_absorb = on_device("mla_absorb", mirror.ON_THE_CPU)
mla_expand = on_device("mla_expand", mirror.ON_THE_CPU)
indexer_scores = on_device("indexer_scores", mirror.ON_THE_CPU)
topk_rows = on_device("topk_rows", mirror.ON_THE_CPU)
compress_tokens = on_device("compress_tokens", mirror.ON_THE_CPU)
compressed_slots = on_device("compressed_slots", mirror.INDEX_ON_HOST)
rope_back = on_device("rope_back", mirror.ON_THE_CPU)
gated_delta_step = on_device("gated_delta_step", mirror.SUMS, mirror.STEPS_OF_STATES)
gated_delta_rule = on_device("gated_delta_rule", mirror.SUMS, mirror.PROMPTS_OF_STATES)
gated_delta_replay = on_device("gated_delta_replay", mirror.ON_THE_CPU)
delta_gates = on_device("delta_gates", mirror.ON_THE_CPU)
causal_conv = on_device("causal_conv", mirror.ON_THE_CPU)
causal_conv_update = on_device("causal_conv_update", mirror.ON_THE_CPU)
rotary_position_embedding = on_device("rotary_position_embedding", mirror.ANGLES)
alibi_slope = on_device("alibi_slope")
alibi_mask = on_device("alibi_mask")


SAME_PAGES = """with the same `query_starts` and `page_size`, whose block tables have at least as many
    columns, or whose first lists had at least half as many pages."""


class PagedPlan:
    """Runs operators for checked contexts in pages, over any pools on the device. `paged_plan` makes it."""

    __slots__ = ("step",)

    def __init__(self, step):
        self.step = step  # the `PlannedPages` of calls/steps.py

    paged_append = on_device("PagedPlan.paged_append", mirror.EQUAL)
    paged_attention = on_device("PagedPlan.paged_attention", mirror.SUMS, mirror.KEY_WEIGHTS)


paged_plan = on_device(
    "paged_plan",
    mirror.ON_HOST,
    mirror.ONCE,
    own={"into": (None, mirror.INTO.format(same=SAME_PAGES))},
    then=PagedPlan,
)


def __dir__():
    return __all__
