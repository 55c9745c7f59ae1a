"""Copy tokens and rows between arrays and caches, for each format."""

from typing import TYPE_CHECKING

from kvkit.runtime.lazy_imports import lazy_modules

if TYPE_CHECKING:  # so that editors and type checkers follow a call
    from kvkit.cpu.copy import codes as codes
    from kvkit.cpu.copy import pieces as pieces
    from kvkit.cpu.copy import rotations as rotations
    from kvkit.cpu.copy import rows as rows
    from kvkit.cpu.copy import runs as runs
    from kvkit.cpu.copy import transfer as transfer

__getattr__ = lazy_modules(__name__, "codes", "pieces", "rotations", "rows", "runs", "transfer")
