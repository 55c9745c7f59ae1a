"""List the test functions of a room that catch nothing by themselves: `python tests/needed.py ROOM`.

The rooms are those of `mutants.py`. A function is needed if it alone runs a line or a branch of the package,
or if it alone fails on a mutant (`-n`). Of the others the largest go first, each only while what it runs and
catches stays run and caught by the rest, so that all that are listed may go together. Compiled code has no
lines here: what kernels compute is seen by mutants only.

    python tests/needed.py layouts            lines and branches only
    python tests/needed.py layouts -n 20      with twenty mutants, each tried by the tests that run its line

A list is a question. A test of numbers runs the lines of others, and may still be the only one that would see
another mistake: read it before it goes, and let `mutants.py --room ROOM` catch as many after as before.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import mutants

HOUSE = mutants.HOUSE
PLUGIN = """
import os, re
import coverage, pytest
import kvkit, kvkit_cli.main  # what runs at import belongs to no test

packages = ["kvkit", "kvkit_cuda", "cli"]
covered = coverage.Coverage(data_file=os.environ["NEEDED"], source=packages, branch=True)

def pytest_sessionstart(session):
    covered.start()

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    covered.switch_context(re.sub(r"\\[.*", "", item.nodeid))
    yield
    covered.switch_context("")

def pytest_sessionfinish(session):
    covered.stop()
    covered.save()
"""
Functions = dict[str, set]  # of test functions: what they run or catch


def run_of(tests: list[str]) -> Functions:
    """Return the arcs (file, from line, to line) that each test function runs."""
    import coverage

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "needed_plugin.py").write_text(PLUGIN)
        where = Path(folder) / "data"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "needed_plugin", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": folder, "NEEDED": str(where)}
        subprocess.run([*command, "-m", mutants.MARKS, *tests], cwd=HOUSE, env=environment, check=False)
        data = coverage.CoverageData(str(where))
        data.read()
        runs: Functions = {}
        for context in sorted(data.measured_contexts() - {""}):
            data.set_query_contexts([f"^{re.escape(context)}$"])
            arcs = ((file, *arc) for file in data.measured_files() for arc in data.arcs(file) or ())
            runs[context] = {(str(Path(file).relative_to(HOUSE)), begin, end) for file, begin, end in arcs}
    return runs


def catches(room: str, count: int, runs: Functions) -> tuple[Functions, int]:
    """Return the mutants that each function catches, and how many of `count` nothing catches."""
    caught, survived = defaultdict(set), 0
    with tempfile.TemporaryDirectory() as folder:
        house = Path(folder) / "house"
        mutants.copy_house(house)
        for path, number, line, changed in mutants.choose(room)[:count]:
            if mutants.reason((path, number, line, changed)):
                continue
            here = (path.as_posix(), number)
            users = [
                test for test, arcs in runs.items() if any((arc[0], abs(arc[2])) == here for arc in arcs)
            ]
            if not users:
                print(f"{path}:{number}: no test runs this line but what is compiled or imported", flush=True)
                continue
            try:
                with mutants.broken(house, (path, number, line, changed)):
                    done = mutants.tested(house, users, 900)
            except subprocess.TimeoutExpired:
                print(f"{path}:{number}: nothing went on for 900 s: it counts for no function", flush=True)
                continue
            failed = re.findall(r"^(?:FAILED|ERROR) ([\w/.]+::\w+)", done.stdout, re.M)
            survived += not done.returncode
            for test in set(failed):
                caught[test].add((path.as_posix(), changed.strip()))
            print(f"{path}:{number}: {len(set(failed))} of {len(users)} functions notice", flush=True)
    return caught, survived


def sizes(runs: Functions) -> dict[str, int]:
    """Return the lines of each test function."""
    found = {}
    for file in {test.split("::")[0] for test in runs}:
        for node in ast.walk(ast.parse((HOUSE / file).read_text())):
            if isinstance(node, ast.FunctionDef):
                found[f"{file}::{node.name}"] = node.end_lineno - node.lineno + 1
    return {test: found.get(test, 0) for test in runs}


def removable(weights: Functions, lines: dict[str, int]) -> list[str]:
    """Return functions that can go together, the largest first: the rest still has all that they have."""
    times = Counter(each for has in weights.values() for each in has)
    gone = []
    for test in sorted(weights, key=lambda test: -lines[test]):
        if all(times[each] > 1 for each in weights[test]):
            times.subtract(weights[test])
            gone.append(test)
    return gone


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("room", choices=mutants.ROOMS)
    parser.add_argument("tests", nargs="*", help="instead of the room's tests")
    parser.add_argument("-n", type=int, default=0, help="how many mutants to try")
    parser.add_argument("--json", help="a file for what each function runs and catches")
    options = parser.parse_intermixed_args()
    runs = run_of(options.tests or mutants.tests_of(options.room))
    caught, survived = catches(options.room, options.n, runs) if options.n else ({}, 0)
    weights = {test: arcs | caught.get(test, set()) for test, arcs in runs.items()}
    lines = sizes(runs)
    gone = removable(weights, lines)
    if options.json:
        report = {test: {"lines": lines[test], "caught": sorted(caught.get(test, ()))} for test in runs}
        Path(options.json).write_text(json.dumps(report, indent=1))
    for test in gone:
        print(f"{lines[test]:4} {test}")
    own, whole = sum(map(lines.get, gone)), sum(lines.values())
    print(f"{len(gone)} of {len(runs)} functions have nothing of their own: {own} lines of {whole}")
    print(f"{survived} of {options.n} mutants survived")


if __name__ == "__main__":
    main()
