"""Public functions of files and tools: their examples run as printed, their arguments are explained."""

import doctest
import inspect
import re

import pytest

from kvkit import files, tools

FUNCTIONS = (files.read, files.write, files.Description, tools.inspect, tools.convert, tools.draw.layout,
             tools.draw.cells)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_examples(function):
    text = inspect.getdoc(function)
    test = doctest.DocTestParser().get_doctest(text, {}, function.__name__, None, 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
    for name in inspect.signature(function).parameters:
        assert re.search(rf"^(.*, )?{name}(, .*)? : ", text, re.M), name
