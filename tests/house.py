"""Count what makes the code hard to read: `python tests/house.py` prints each count and its limit.

`tests/test_laws.py` holds the counts to the limits. A change may lower a limit, never raise one. Lines have a
target and no limit: the script prints it beside what each room takes, in the package and in its tests.
"""

import ast
import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from kvkit.operators import OPERATORS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "kvkit", "kvkit_cuda", "cli"
TYPED = "errors", "interop", "checks", "calls", "files", "formats", "layouts", "models", "operators", "tools"
# Functions that every reader of files, every verb, every lazy package or every engine of attention has.
PROTOCOL = {"read", "write", "main", "__getattr__", "__dir__", "engine", "load", "scores", "sums"}
# Files of the operators without a namespace, some of which have namesakes in one.
PLAIN = "kvkit/__init__.py", "kvkit/paged.py", "kvkit/planned_pages.py", "kvkit_cuda/__init__.py"
SPACE = re.compile(r"\b(?:static|dynamic_batching|ascend)\b")
NO_SUBJECT = re.compile(r"(What|The same|Likewise|That of|Those|Of|As)\b")
LONGEST, LONGEST_OF_KERNELS = 60, 90  # lines of a function
WIDEST = 8  # positional arguments of a call

Trees = dict[str, ast.Module]


@functools.cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@functools.cache
def walked(tree: ast.AST) -> list[ast.AST]:
    """Return the node and all that are below it."""
    return list(ast.walk(tree))


def trees(*packages: str) -> Trees:
    """Return the syntax tree of every file of some packages, by its path."""
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): tree(path) for path in paths}


def lines(package: str) -> int:
    """Return the number of lines of a package, with its stubs."""
    paths = [path for suffix in ("*.py", "*.pyi") for path in (ROOT / package).rglob(suffix)]
    return sum(len(path.read_text().splitlines()) for path in paths)


def nodes(sources: Trees, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of these kinds in all trees."""
    return (node for tree in sources.values() for node in walked(tree) if isinstance(node, kinds))


def body_lines(function: ast.FunctionDef) -> int:
    """Return the lines of a function without its signature and its docstring."""
    first = function.body[0]
    begin = first.lineno if ast.get_docstring(function) is None else first.end_lineno + 1
    return function.end_lineno - begin + 1


def long_functions(sources: Trees) -> list[str]:
    """Return the functions that are longer than one can see at once, kernels and vector forms apart."""
    found = []
    for path, tree in sources.items():
        limit = LONGEST_OF_KERNELS if path.startswith("kvkit_cuda/attention/") else LONGEST
        functions = [node for node in walked(tree) if isinstance(node, ast.FunctionDef)]
        if "/simd/" not in path:
            found += [f"{path}:{each.name}" for each in functions if body_lines(each) > limit]
    return found


def repeated_classes(sources: Trees) -> list[str]:
    """Return the class names that stand more than once."""
    names = collections.Counter(node.name for node in nodes(sources, ast.ClassDef))
    return [name for name, count in names.items() if count > 1]


def most_namesakes(sources: Trees) -> int:
    """Return how many functions of modules share the commonest name.

    Vector forms are named like their plain forms, the reference like the operators.
    """
    functions = [
        node.name
        for path, tree in sources.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and "/simd/" not in path and "/reference/" not in path
    ]
    return max(collections.Counter(name for name in functions if name not in PROTOCOL).values())


def headless_docstrings(sources: Trees) -> int:
    """Return how many docstrings begin without a subject or a verb."""
    texts = [
        ast.get_docstring(node) or "" for node in nodes(sources, ast.FunctionDef, ast.ClassDef, ast.Module)
    ]
    return sum(bool(NO_SUBJECT.match(text)) for text in texts)


def wide_calls(sources: Trees) -> int:
    """Return how many calls have eight or more positional arguments, vector forms apart."""
    plain = {path: tree for path, tree in sources.items() if "/simd/" not in path}
    return sum(len(call.args) >= WIDEST for call in nodes(plain, ast.Call))


def untyped_parameters(sources: Trees) -> int:
    """Return how many parameters of the rooms that are typed have no annotation."""
    rooms = {path: tree for path, tree in sources.items() if path.split("/")[1].removesuffix(".py") in TYPED}
    parameters = [
        each
        for function in nodes(rooms, ast.FunctionDef)
        for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    ]
    return sum(each.annotation is None and each.arg not in ("self", "cls") for each in parameters)


def locals_calls(sources: Trees) -> int:
    """Return how often `locals()` is called."""
    return sum(ast.unparse(call.func) == "locals" for call in nodes(sources, ast.Call))


def names_of(path: str, tree: ast.Module) -> set[str]:
    """Return the names that a file defines or writes as text, and those that an `__init__` passes on."""
    names = {node.name for node in walked(tree) if isinstance(node, ast.FunctionDef)}
    texts = [node.value for node in walked(tree) if isinstance(node, ast.Constant)]
    names.update(*(text.split(".") for text in texts if isinstance(text, str) and " " not in text))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and "__init__" in path]
    return names.union(alias.name for node in imports for alias in node.names)


def most_files_of_an_operator(sources: Trees) -> int:
    """Return in how many files the operator stands that stands in most.

    A file that calls an operator does not count, nor one whose namespace has another of the same name.
    """
    users = re.compile("kvkit/(cache|integrations|cpu|formulas)/")
    names = {path: names_of(path, tree) for path, tree in sources.items() if not users.match(path)}
    spaces = {path: next(iter(SPACE.findall(path)), "static" if path in PLAIN else "") for path in names}
    files = collections.Counter()
    for operator in OPERATORS:
        space, _, name = operator.rpartition(".")
        legal = "", space or "static"
        files[operator] = sum(name in found and spaces[path] in legal for path, found in names.items())
    return max(files.values())


LIMITS = {
    "calls of locals()": 0, "class names that stand twice": 0, "functions of one name": 3,
    "files that name one operator": 8, "functions too long to see at once": 0,
    "docstrings without a subject": 0, "calls with eight or more positional arguments": 13,
    "parameters without a type": 0,
}  # fmt: skip
TARGETS = {"kvkit": 50_000, "tests": 40_000}  # lines, below what they are


@functools.cache
def counts() -> dict[str, int]:
    """Return every count by its subject."""
    everything, host, kvkit = trees(*PACKAGES), trees("kvkit", "cli"), trees("kvkit")
    return {
        "calls of locals()": locals_calls(everything),
        "class names that stand twice": len(repeated_classes(host)),
        "functions of one name": most_namesakes(host),
        "files that name one operator": most_files_of_an_operator(everything),
        "functions too long to see at once": len(long_functions(everything)),
        "docstrings without a subject": headless_docstrings(everything),
        "calls with eight or more positional arguments": wide_calls(everything),
        "parameters without a type": untyped_parameters(kvkit),
    }


def price(room: str) -> tuple[int, int]:
    """Return the lines of a room of kvkit, and those of the tests that have its name."""
    tests = lines(f"tests/{room}") if (ROOT / "tests" / room).is_dir() else 0
    return lines(f"kvkit/{room}"), tests


if __name__ == "__main__":
    for subject, count in counts().items():
        print(
            f"{'ok  ' if count <= LIMITS[subject] else 'over'} {subject}: {count} (at most {LIMITS[subject]})"
        )
    for package in (*PACKAGES, "tests"):
        target = f" (target {TARGETS[package]:,})" if package in TARGETS else ""
        print(f"     lines of {package}: {lines(package):,}{target}")
    for path in sorted((ROOT / "kvkit").iterdir()):
        if (path / "__init__.py").exists():
            own, of_tests = price(path.name)
            print(f"     lines of kvkit/{path.name}: {own:,}, of its tests {of_tests:,}")
