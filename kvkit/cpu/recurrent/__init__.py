"""Run states: the gated delta rule by tokens and in chunks, the short convolution, pooled tokens."""

from typing import TYPE_CHECKING

from kvkit.runtime.lazy_imports import lazy_modules

if TYPE_CHECKING:  # so that editors and type checkers follow a call
    from kvkit.cpu.recurrent import chunks as chunks
    from kvkit.cpu.recurrent import convolution as convolution
    from kvkit.cpu.recurrent import gates as gates
    from kvkit.cpu.recurrent import pooling as pooling
    from kvkit.cpu.recurrent import replay as replay
    from kvkit.cpu.recurrent import tokens as tokens

__getattr__ = lazy_modules(__name__, "chunks", "convolution", "gates", "pooling", "replay", "tokens")
