"""The example that plants ten faults into a language model's cache."""

import importlib.util
from pathlib import Path

import kvkit

EXAMPLE = Path(kvkit.__file__).parents[1] / "examples/ten_faults.py"


def test_all_ten_are_named(capsys):
    spec = importlib.util.spec_from_file_location("ten_faults", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main() == 10
    said = capsys.readouterr().out
    assert said.startswith("as it is: fine: ")
    assert said.endswith("10 of 10 faults are named\n")
