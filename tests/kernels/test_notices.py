"""Before a long compilation a terminal is told, once; nobody else is."""

import importlib
import io
import sys

import pytest

from kvkit.runtime import notices


class Terminal(io.StringIO):
    def isatty(self):
        return True


def stderr(monkeypatch, opened):
    """Take the place of stderr, here where pytest has put its own."""
    monkeypatch.setattr(sys, "stderr", opened)
    monkeypatch.setattr(notices, "SHOWN", set())
    return opened


def test_a_terminal_is_told_once(monkeypatch):
    terminal = stderr(monkeypatch, Terminal())
    for function in (
        "kvkit.cpu.attention.scheduler.schedule",
        "kvkit.cpu.attention.scheduler.work",
        "kvkit.cpu.attention.scheduler.quick",
    ):
        notices.compiling(function, "znver4")
    assert terminal.getvalue() == "kvkit: compiling attention for znver4, once, about 7 s\n"


@pytest.mark.parametrize("opened", [Terminal(), io.StringIO(), None], ids=["quiet", "a file", "no console"])
def test_others_are_not(monkeypatch, opened):
    stderr(monkeypatch, opened)
    if isinstance(opened, Terminal):
        monkeypatch.setenv("KVKIT_QUIET", "1")
    notices.compiling("kvkit.cpu.attention.scheduler.work", "znver4")
    assert opened is None or opened.getvalue() == ""


@pytest.mark.parametrize("name", notices.SECONDS)
def test_what_is_told_of_is_there(name):
    """Functions that were renamed would wait in silence."""
    path = name.partition(".<locals>")[0]
    module, _, function = path.rpartition(".")
    found = getattr(importlib.import_module(module), function)
    assert callable(getattr(found, "function", found))
