"""List the test functions that catch nothing by themselves.

    python tests/needed.py record WHAT            run the quick suite once, and keep what each test runs
    python tests/needed.py ask WHAT tests/files   list what may go of a room or a file
    python tests/needed.py ask WHAT tests/files --mutants 6 --json REPORT

A function is needed if it alone runs a line or a branch of the package, starts a process, or alone notices a
mutant. Of the others the largest go first, each only while what it runs stays run by the rest, so that all
that are listed may go together. `--mutants` breaks that many of the lines that each of them runs, those first
that the fewest other tests run, and takes off the list what the others do not notice. Compiled code has no
lines here: a test of numbers runs the lines of others, and may still be the only one that sees a mistake of
a kernel. A list is a question: read a test before it goes.

Every mutant is tried in a fork of one process that has imported the package and collected the tests. The fork
exchanges the code of the functions that the changed line is in, and runs the tests that run this line.
"""

import argparse
import ast
import collections
import gc
import importlib
import json
import os
import pickle
import pkgutil
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import mutants
import pytest

HOUSE = mutants.HOUSE
LONGEST = 3  # seconds of the processor; tests that take longer, most of them fuzzers, are not asked about
SECONDS = 12  # of a fork's processor time, after which a mutant counts as noticed
OWN = "a process"  # stands for what a test runs outside this process
Arc = tuple[str, int, int]  # a file below the house, from line, to line


# What runs inside pytest


def too_long(*arguments):
    raise TimeoutError(f"more than {LONGEST} s")


class Recorder:
    """Records the arcs of the package that each test runs, and how long it takes."""

    def __init__(self, folder):
        import coverage

        self.folder, self.passed = Path(folder), {}
        file = self.folder / f"arcs-{os.getpid()}"
        self.covered = coverage.Coverage(file, source=["kvkit", "cli", "kvkit_cuda"], branch=True)
        sys.addaudithook(self.audit)
        self.started = set()
        self.item = ""
        signal.signal(signal.SIGVTALRM, too_long)

    def audit(self, event, arguments):
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and self.item:
            self.started.add(self.item)

    def pytest_sessionstart(self):
        self.covered.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self.item = item.nodeid
        self.covered.switch_context(item.nodeid)
        signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
        yield
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self.covered.switch_context("")
        self.item = ""

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed[report.nodeid] = report.duration

    def pytest_sessionfinish(self):
        self.covered.stop()
        self.covered.save()
        done = self.passed, self.started
        (self.folder / f"passed-{os.getpid()}").write_bytes(pickle.dumps(done))


class Breaker:
    """Tries mutants in forks, after the tests are collected."""

    def __init__(self, plan, answers):
        self.plan, self.answers = plan, answers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        import_all()
        functions = live_functions()
        gc.freeze()  # a fork's collector leaves the pages of its parent alone
        items = {item.nodeid: item for item in session.items}
        sound = {}  # by test: whether it passes in a fork where nothing is broken
        with open(self.answers, "w") as file:
            for mutant, *groups in self.plan:
                answer = None
                while answer is None:
                    kept, asked = (
                        [test for test in group if sound.get(test, test in items)] for group in groups
                    )
                    answer = in_fork(lambda m=mutant, k=kept, a=asked: noticed(items, functions, m, k, a))
                    for test in set(answer) & set(items) - set(sound):
                        sound[test] = not in_fork(lambda t=test: noticed(items, functions, None, [t], ()))
                        answer = answer if sound[test] else None
                print(json.dumps([mutant, answer]), file=file, flush=True)
        return True


def import_all():
    """Import every module of the package that can be imported here."""
    import kvkit
    import kvkit_cli

    for package in (kvkit, kvkit_cli):
        names = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None)
        for found in names:
            if not re.search("__main__|integrations", found.name):
                try:
                    importlib.import_module(found.name)
                except Exception:
                    continue


def in_fork(work):
    """Return the words that `work` yields in a fork; a fork that breaks off adds its own."""
    begin, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(begin)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        signal.alarm(10 * SECONDS)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        locks = sys.modules["kvkit.runtime.locks"]
        locks.forked, locks.BUSY[0] = False, 0  # its parent has taken locks by importing, but runs no thread
        try:
            for word in work():
                os.write(end, f"{word}\n".encode())
        except BaseException as error:
            os.write(end, f"broke off: {type(error).__name__}\n".encode())
        os._exit(0)
    os.close(end)
    with open(begin) as file:
        words = file.read().splitlines()
    _, status = os.waitpid(child, 0)
    return words + (["broke off"] if status else [])


def noticed(items, functions, mutant, kept, questions):
    """Yield which test of `kept` notices a mutant first, or else all of `questions` that do."""
    from _pytest.runner import runtestprotocol

    if mutant:
        exchange(functions, *mutant)
    for test in (*kept, *questions):
        if any(report.failed for report in runtestprotocol(items[test], log=False, nextitem=None)):
            yield test
            if test in kept:
                return


def live_functions():
    """Return the functions of the package that exist, by file."""
    found = collections.defaultdict(list)
    gc.unfreeze()  # `conftest.py` has frozen them
    for function in gc.get_objects():
        if type(function) is types.FunctionType:  # isinstance would wake lazy proxies
            path = os.path.relpath(os.path.realpath(function.__code__.co_filename), HOUSE)
            if path.startswith(("kvkit", "cli")):
                found[path].append(function)
    return found


def exchange(functions, path, number, changed):
    """Exchange the code of every function that a changed line is in."""
    lines = (HOUSE / path).read_text().splitlines()
    lines[number - 1] = changed
    codes, waiting = {}, [compile("\n".join(lines), str(HOUSE / path), "exec")]
    while waiting:
        code = waiting.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    for function in functions[path]:
        new = codes.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
        if new is not None and new.co_freevars == function.__code__.co_freevars:
            function.__code__ = new


def pytest_configure(config):
    """Register what `NEEDED` names, in a worker or a lone process."""
    how, *arguments = json.loads(os.environ["NEEDED"])
    if how == "record" and not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(*arguments))
    if how == "break":
        config.pluginmanager.register(Breaker(json.loads(Path(arguments[0]).read_text()), arguments[1]))


# What runs outside


def run_pytest(how, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "needed", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(HOUSE), str(HOUSE / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "NEEDED": json.dumps(how)}
    subprocess.run([*command, "-m", mutants.MARKS, *arguments], cwd=HOUSE, env=environment, check=False)


def record(what, arguments):
    """Run tests, and keep the arcs of each that passes in the file `what`."""
    runs = collections.defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        run_pytest(["record", folder], *arguments)
        passed, started = {}, set()
        for path in Path(folder).glob("passed-*"):
            more, own = pickle.loads(path.read_bytes())
            passed |= more
            started |= own
        for path in Path(folder).glob("arcs-*"):
            with sqlite3.connect(path) as data:
                rows = data.execute(
                    "select context.context, file.path, fromno, tono from arc "
                    "join context on context.id = context_id join file on file.id = file_id"
                )
                for test, file, begin, end in rows:
                    if test in passed:
                        runs[test].add((os.path.relpath(os.path.realpath(file), HOUSE), begin, end))
    for test in started & set(passed):
        runs[test].add((OWN, 0, hash(test)))
    Path(what).write_bytes(pickle.dumps((dict(runs), passed)))


def function_of(test):
    return test.partition("[")[0]


def lines_of(functions):
    """Return the lines of each test function."""
    found = {}
    for file in {test.split("::")[0] for test in functions}:
        if (HOUSE / file).exists():
            for node in ast.walk(ast.parse((HOUSE / file).read_text())):
                if isinstance(node, ast.FunctionDef):
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    found[f"{file}::{node.name}"] = node.end_lineno - first + 1
    return {test: found[test] for test in functions if test in found}


def removable(weights, lines, candidates):
    """Return candidates that can go together, the largest first: the rest still has all that they have."""
    times = collections.Counter(each for has in weights.values() for each in has)
    gone = []
    for test in sorted(candidates, key=lambda test: -lines[test]):
        if weights[test] and all(times[each] > 1 for each in weights[test]):
            times.subtract(weights[test])
            gone.append(test)
    return gone


def texts(path):
    """Yield (line number, line, changed line) with a mark in the text of a line that raises or returns."""
    source = (HOUSE / path).read_text()
    lines = source.splitlines()
    for number, line in enumerate(lines, 1):
        if line.isascii() and re.match(r"\s*(raise|return|yield)\b|.*_error\(", line) and '"""' not in line:
            changed = re.sub(r'(f?")([\w{])', r"\1~\2", line, count=1)
            if changed != line:
                yield number, line, changed


def plan_of(gone, weights, runs, seconds, count):
    """Return the mutants to try: (mutant, tests that stay, tests that would go), by the lines of `gone`."""
    going = set(gone)
    by_line = collections.defaultdict(set)
    for test, arcs in runs.items():
        for file, _, line in arcs:
            by_line[file, abs(line)].add(test)
    remain = {line: sum(function_of(test) not in going for test in tests) for line, tests in by_line.items()}
    of_files, chosen = {}, {}
    for function in gone:
        own = {(file, abs(line)) for file, _, line in weights[function]}
        found = []
        for file in sorted({file for file, _ in own if file.startswith(("kvkit/", "cli/"))}):
            if file not in of_files:
                source = HOUSE / file
                of_files[file] = sorted({*mutants.changed_lines(source), *texts(file)})
            found += [(file, *mutant) for mutant in of_files[file] if (file, mutant[0]) in own]
        for m in sorted(found, key=lambda m: (remain[m[:2]], mutants.digest(m[0], m[3])))[:count]:
            chosen[m] = by_line[m[:2]]
    plan = []
    for (file, number, _, changed), tests in chosen.items():
        order = sorted(tests, key=lambda test: seconds[test])
        kept = [test for test in order if function_of(test) not in going][:40]
        plan.append([(file, number, changed), kept, [test for test in order if function_of(test) in going]])
    return plan


def ask(what, rooms, count, report, places):
    """Print the functions of some rooms that may go."""
    runs, seconds = pickle.loads(Path(what).read_bytes())
    weights = collections.defaultdict(set)
    for test, arcs in runs.items():
        weights[function_of(test)] |= arcs
    lines = lines_of(weights)
    weights = {test: weights[test] for test in lines}
    gone = removable(weights, lines, [test for test in lines if test.startswith(tuple(rooms))])
    outcomes = []
    if count:
        plan = plan_of(gone, weights, runs, seconds, count)
        needed = sorted({test for _, *groups in plan for group in groups for test in group})
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "plan").write_text(json.dumps(plan))
            run_pytest(["break", f"{folder}/plan", places], *{test.split("::")[0] for test in needed})
        outcomes = [json.loads(line) for line in Path(places).read_text().splitlines()]
        for (*_, questions), (_, answer) in zip(plan, outcomes, strict=True):
            if answer and answer[0] in questions:
                own = {function_of(test) for test in answer}
                if own <= set(gone):  # the smallest that notices stays
                    gone.remove(min(own, key=lambda test: (lines[test], test)))
        caught = sum(bool(answer) for _, answer in outcomes)
        alone = sum(bool(answer) and answer[0] in plan[i][2] for i, (_, answer) in enumerate(outcomes))
        print(f"{caught} of {len(outcomes)} mutants are noticed, {alone} by what was asked about alone")
    if report:
        Path(report).write_text(json.dumps({"gone": gone, "outcomes": outcomes}, indent=1))
    for test in gone:
        print(f"{lines[test]:4} {test}")
    total = sum(lines[test] for test in lines if test.startswith(tuple(rooms)))
    print(f"{len(gone)} functions have nothing of their own: {sum(map(lines.get, gone))} lines of {total}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=["record", "ask"])
    parser.add_argument("what", help="the file of what tests run")
    parser.add_argument("--mutants", type=int, default=0, help="how many to try for each function")
    parser.add_argument("--json", help="a file for the list and the mutants")
    options, rest = parser.parse_known_args()
    if options.verb == "record":
        record(options.what, rest)
    else:
        ask(options.what, rest, options.mutants, options.json, f"{options.what}.answers")


if __name__ == "__main__":
    main()
