"""Every example that a reader sees runs as printed, and the operator table tells the truth."""

import doctest
import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest

import kvkit
from kvkit.operators import OPERATORS

README = Path(__file__).parent.parent / "README.md"


def run_examples(text, name):
    test = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    assert test.examples
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL | doctest.NORMALIZE_WHITESPACE)
    report = []
    runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_readme_examples():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    run_examples("\n".join(blocks), "README.md")


@pytest.mark.parametrize("op", OPERATORS.values(), ids=str)
def test_docstring_example(op):
    run_examples(inspect.getdoc(op.function()), op.name)


@pytest.mark.parametrize("op", OPERATORS.values(), ids=lambda op: op.name)
def test_table_is_the_signature(op):
    """Names, order and defaults: inputs by position, then attributes and out= by keyword."""
    parameters = list(inspect.signature(op.function()).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert positional == [array.name for array in op.inputs]
    assert keywords.pop("out") is None
    assert keywords == {attribute.name: attribute.default for attribute in op.attributes}


@pytest.mark.parametrize("op", OPERATORS.values(), ids=lambda op: op.name)
def test_docstring_names_everything(op):
    text = inspect.getdoc(op.function())
    for name in [array.name for array in (*op.inputs, *op.outputs)] + [a.name for a in op.attributes]:
        assert re.search(rf"\b{name}\b", text), name
    for section in ("Parameters", "Returns", "Raises", "Notes", "Examples"):
        assert f"\n{section}\n---" in text


def test_public_names():
    assert kvkit.__all__ == [
        "DeviceError",
        "KvkitError",
        "__version__",
        "dynamic_batching",
        "key_value_cache",
    ]
    assert all(hasattr(kvkit, name) for name in kvkit.__all__)


def test_cuda_twin_imports_and_says_what_it_lacks():
    import kvkit_cuda

    with pytest.raises(kvkit.DeviceError, match="no operators yet"):
        kvkit_cuda.key_value_cache()


def test_benchmark_figures_are_not_typed():
    """The table is what `benchmarks/table.py` makes of the committed results."""
    folder = README.parent / "benchmarks"
    spec = importlib.util.spec_from_file_location("table", folder / "table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    readme = (folder / "README.md").read_text()
    report = json.loads((folder / "results" / "cpu.json").read_text())
    assert report["results"]
    assert table.text(readme, report) == readme
