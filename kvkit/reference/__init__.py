"""Define every operator in plain numpy: the specification as code, to read and to compare with.

The loops over tokens, heads and elements share no code with the rest of the package. Inputs are not checked.
Operators that copy or quantize give exact bytes. Attention and rotary embedding are computed in float64, and
results are not rounded to the type of the inputs. Caches and scales change in place.
"""

from collections.abc import Callable
from typing import Any

from kvkit.reference import alibi, ascend, attention, cache, compressed, latent, paged, positions, recurrent
from kvkit.reference.compressed import compressed_attention as compressed_attention

MODULES = alibi, ascend, attention, cache, compressed, latent, paged, positions, recurrent


REFERENCE: dict[str, Callable[..., Any]] = {
    ("ascend." if module is ascend else "") + name.replace("dynamic_", "dynamic_batching."): getattr(
        module, name
    )
    for module in MODULES
    for name in module.__all__
}


def __getattr__(name: str) -> Callable[..., Any]:
    """Return an operator by its name in `kvkit`."""
    if name in REFERENCE:
        return REFERENCE[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
