"""Public functions: their examples run as printed, their arguments are explained."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import kvkit
from examples import run_examples
from kvkit.operators import OPERATORS

ROOMS = (
    "layouts", "layouts.tables", "formats", "files", "tools", "tools.draw", "tools.vectors",
    "integrations.dask", "eviction", "ascend",
)  # fmt: skip
TABLED = [op.function() for op in OPERATORS.values()]  # whose arguments `cli/test_docs.py` looks for
HELPERS = {"formats.coarser", "formats.mask_bytes", "formats.rotation_named"}  # which the house needs


def functions():
    """Yield public functions of a room, or its own functions with an example, and all operators."""
    for room in ROOMS:
        module = importlib.import_module(f"kvkit.{room}")
        named = getattr(module, "__all__", None)
        for name in named or dir(module):
            thing = getattr(module, name)
            own = inspect.isfunction(thing) and thing.__module__.startswith(module.__name__)
            others = f"{room}.{name}" in HELPERS | OPERATORS.keys()
            if own and not others and (named or ">>>" in (thing.__doc__ or "")):
                yield pytest.param(thing, id=f"{room}.{name}")
    yield from (pytest.param(op.function(), id=op.name) for op in OPERATORS.values())


@pytest.mark.parametrize("function", list(functions()))
def test_examples(function):
    text = inspect.getdoc(function)
    run_examples(text, function.__name__)
    if "\nParameters\n" in text and function not in TABLED:
        for name in inspect.signature(function).parameters:
            assert re.search(rf"^(.*, )?(\*\*)?{name}(, .*)?( : |$)", text, re.M), name


EXAMPLE = Path(kvkit.__file__).parents[1] / "examples/ten_faults.py"


def test_all_ten_are_named(capsys):
    spec = importlib.util.spec_from_file_location("ten_faults", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main() == 10
    said = capsys.readouterr().out
    assert said.startswith("as it is: nothing found: ")
    assert said.endswith("10 of 10 faults are named\n")
    page = (EXAMPLE.parents[1] / "docs/tools/ten_faults.md").read_text()
    assert page.partition("```text\n")[2].partition("```")[0] == said
