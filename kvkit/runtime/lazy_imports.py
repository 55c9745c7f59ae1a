"""Garbage, which Python need not look for where much is made that stays."""

import contextlib
import gc
import importlib
import sys


@contextlib.contextmanager
def gc_paused():
    """Look for none until the block ends."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def import_module(name):
    """The module of this name. If Numba comes with it, its objects count as old from the start.

    They are some hundred thousand: looked at again and again they take a fifth of a process's first call.
    """
    if "numba" in sys.modules:
        return importlib.import_module(name)
    with gc_paused():
        module = importlib.import_module(name)
        if not gc.get_freeze_count():  # what others have frozen stays frozen
            gc.freeze()
            gc.unfreeze()
    return module
