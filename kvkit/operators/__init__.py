"""The operators as data: what each takes and gives, in the words of its specification.

The command line runs and describes them from this table, and a test holds the functions to it.
Importing it compiles nothing and loads no Numba.
"""

from kvkit.operators import ascend, attention, paged, positions
from kvkit.operators.attributes import REQUIRED, Attribute
from kvkit.operators.words import Input, Operator, Output

__all__ = ["OPERATORS", "REQUIRED", "Attribute", "Input", "Operator", "Output"]

OPERATORS = {
    op.name: op
    for op in (
        attention.STATIC_KEY_VALUE_CACHE,
        attention.STATIC_ATTENTION,
        attention.STATIC_CACHE_ATTENTION,
        attention.MERGE,
        paged.PAGED_ATTENTION,
        paged.PAGED_APPEND,
        paged.SWAP_BLOCKS,
        positions.STATIC_ROTARY,
        positions.ALIBI_SLOPE,
        positions.STATIC_ALIBI_MASK,
        attention.DYNAMIC_KEY_VALUE_CACHE,
        attention.DYNAMIC_ATTENTION,
        attention.DYNAMIC_CACHE_ATTENTION,
        positions.POSITION_INDEX,
        positions.DYNAMIC_ROTARY,
        positions.DYNAMIC_ALIBI_MASK,
        ascend.RESHAPE_AND_CACHE,
        ascend.PAGED_CACHE_LOAD,
        ascend.BLOCK_COPY,
        ascend.PAGED_ATTENTION,
        ascend.ND_TO_NZ,
        ascend.NZ_TO_ND,
    )
}
