"""Before a long compilation a terminal is told, once; nobody else is."""

import importlib
import io
import sys

import pytest

from kvkit import waiting


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(waiting, "TOLD", set())
    return sys.stderr


def test_a_terminal_is_told_once(terminal):
    for function in ("kvkit.cpu.attend.schedule", "kvkit.cpu.attend.work", "kvkit.cpu.attend.quick"):
        waiting.tell(function, "znver4")
    assert terminal.getvalue() == "kvkit: compiling attention for znver4, once, about 14 s\n"


def test_others_are_not(terminal, monkeypatch):
    monkeypatch.setenv("KVKIT_QUIET", "1")
    waiting.tell("kvkit.cpu.attend.work", "znver4")
    assert terminal.getvalue() == ""
    monkeypatch.delenv("KVKIT_QUIET")
    for stderr in (io.StringIO(), None):  # a file; a program without a console
        monkeypatch.setattr(sys, "stderr", stderr)
        waiting.tell("kvkit.cpu.attend.work", "znver4")
    assert sys.stderr is None


@pytest.mark.parametrize("name", waiting.LONG)
def test_what_is_told_of_is_there(name):
    """Functions that were renamed would wait in silence."""
    path = name.partition(".<locals>")[0]
    module, _, function = path.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))
