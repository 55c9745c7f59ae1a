"""Choose what multiplies tiles in attention: the processor's instructions, memory, or nothing."""

import pytest

from kvkit.calls.prepared import forget_all
from kvkit.cpu import machine

HAVE_TILES = machine.has("amx") and machine.tiles_obstacle() is None
needs_tiles = pytest.mark.skipif(not HAVE_TILES, reason="the processor has no tiles, or may not use them")
needs_pairs = pytest.mark.skipif(not machine.has_pairs(), reason="the processor has no pairs of bfloat16")
# Where the processor has tiles, what is multiplied in memory runs in tests alone.
FORMS = [
    pytest.param(machine.MEMORY, marks=[needs_pairs, *[pytest.mark.slow] * HAVE_TILES]),
    pytest.param(machine.INSTRUCTIONS, marks=needs_tiles),
]
forms = pytest.mark.parametrize("form", FORMS)


def use_tiles(monkeypatch, form):
    """Multiply tiles by "instructions", in "memory", or, if the form is None, not at all."""
    monkeypatch.setattr(machine, "tiles", lambda: form)
    forget_all()  # a call of the same form would be that of other engines
