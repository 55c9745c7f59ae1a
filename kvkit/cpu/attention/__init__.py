"""Attend to keys and values in arrays, or in place in a cache."""

from typing import TYPE_CHECKING

from kvkit.runtime.lazy_imports import lazy_modules

if TYPE_CHECKING:  # so that editors and type checkers follow a call
    from kvkit.cpu.attention import index_scores as index_scores
    from kvkit.cpu.attention import latent as latent
    from kvkit.cpu.attention import merge as merge
    from kvkit.cpu.attention import prepare as prepare
    from kvkit.cpu.attention import segmented as segmented
    from kvkit.cpu.attention import top_rows as top_rows

__getattr__ = lazy_modules(__name__, "index_scores", "latent", "merge", "prepare", "segmented", "top_rows")
