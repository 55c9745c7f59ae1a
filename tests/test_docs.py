"""Every example that a reader sees runs as printed, and the operator table tells the truth."""

import doctest
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import kvkit
from kvkit.operators import OPERATORS, REQUIRED

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


@pytest.mark.parametrize("op", OPERATORS.values(), ids=lambda op: op.name)
def test_docstring_example(op):
    run_examples(inspect.getdoc(op.function()), op.name)


@pytest.mark.parametrize("op", OPERATORS.values(), ids=lambda op: op.name)
def test_table_is_the_signature(op):
    """Names, order and defaults: inputs by position, then attributes and out= by keyword."""
    parameters = list(inspect.signature(op.function()).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert positional == [array.name for array in op.inputs if not array.keyword]
    assert keywords.pop("out") is None
    by_keyword = {array.name: None for array in op.inputs if array.keyword}
    assert keywords == {attribute.name: attribute.default for attribute in op.attributes} | by_keyword
    for attribute in op.attributes:
        assert attribute.default in (None, REQUIRED) or type(attribute.default) is attribute.kind


@pytest.mark.parametrize("op", OPERATORS.values(), ids=lambda op: op.name)
def test_docstring_names_everything(op):
    text = inspect.getdoc(op.function())
    for name in [array.name for array in (*op.inputs, *op.outputs)] + [a.name for a in op.attributes]:
        assert re.search(rf"\b{name}\b", text), name
    for section in ("Parameters", "Returns", "Raises", "Notes", "Examples"):
        assert f"\n{section}\n---" in text


def test_public_names():
    """Every operator is where its name says, and little else."""
    folders = {kvkit: ["DeviceError", "KvkitError", "__version__", "dynamic_batching"]}
    folders[kvkit.dynamic_batching] = ["Plan", "plan"]
    for name in OPERATORS:
        *folder, last = name.split(".")
        folders[getattr(kvkit, folder[0]) if folder else kvkit].append(last)
    for module, names in folders.items():
        assert module.__all__ == sorted(names)
        assert all(hasattr(module, name) for name in names)


def test_cuda_twin_imports_and_says_what_it_lacks():
    import kvkit_cuda

    with pytest.raises(kvkit.DeviceError, match="no operators yet"):
        kvkit_cuda.key_value_cache()


def test_benchmark_figures_are_not_typed():
    """Every table is what `benchmarks/table.py` makes of the committed results."""
    spec = importlib.util.spec_from_file_location("table", README.parent / "benchmarks" / "table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    pages = table.updated()
    assert README in pages
    for path, page in pages.items():
        assert path.read_text() == page
        assert "\n|---|" in page
