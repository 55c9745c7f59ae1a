"""Every example of the pages, run as printed: when the site is built, and in the tests."""

import doctest
import os
import re
import shlex
from pathlib import Path

DOCS = Path(__file__).parent
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
SHELL = re.compile(r"```console\n(.*?)```", re.S)
FLAGS = doctest.NORMALIZE_WHITESPACE


def pages():
    """The pages that have examples."""
    return [path for path in sorted(DOCS.rglob("*.md")) if "\n>>> " in path.read_text()]


def commands(path):
    """The lines of the shell of a page, as words."""
    lines = "".join(SHELL.findall(path.read_text())).splitlines()
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def failures(path):
    """What does not come out as a page says; empty if all does. Paths are those of the repository's root."""
    text = "\n".join(BLOCK.findall(path.read_text()))
    test = doctest.DocTestParser().get_doctest(text, {}, path.name, str(path), 0)
    runner, said, before = doctest.DocTestRunner(optionflags=FLAGS), [], os.getcwd()
    os.chdir(DOCS.parent)
    try:
        runner.run(test, out=said.append)
    finally:
        os.chdir(before)
    return "".join(said)
