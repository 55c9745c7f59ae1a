"""Count what makes the code hard to read: `python tests/house.py` prints each count and its limit.

`tests/test_laws.py` holds the counts to the limits. A change may lower a limit, never raise one. Then the
script prints lines, with their targets, and the price of each room and each feature: its lines in packages,
in tests and in pages.
"""

import ast
import collections
import functools
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np

import kvkit
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


def name_of(path: Path) -> str:
    """Return the name of a file's module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a node, those inside others too."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield each
            yield from statements(each)


@functools.cache
def imported(name: str, types: bool = False) -> list[tuple[str, str, bool]]:
    """Return (module, package that it is taken from, whether in a function) of a module's imports.

    Imports for type checkers alone are left out unless `types` is true.
    """
    syntax, found = [*statements(tree(FILES[name]))], []
    checked = [
        node
        for node in syntax
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    left_out = {inner for node in checked if not types for inner in statements(node)}
    late = {inner for node in syntax if isinstance(node, ast.FunctionDef) for inner in statements(node)}
    for node in syntax:
        if isinstance(node, ast.Import) and node not in left_out:
            found += [(alias.name, alias.name, node in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node not in left_out:
            assert node.level == 0, f"{name}: {ast.unparse(node)}"
            base = node.module.replace("kvkit_cli", "cli", 1)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.append((inner if inner in FILES else base, node.module, node in late))
    return found


def circles() -> int:
    """Return how many imports close a circle, those in functions and those for type checkers included."""
    graph = {name: {module for module, *_ in imported(name, types=True) if module in FILES} for name in FILES}
    graph = {name: modules - {name} for name, modules in graph.items()}
    for count in range(len(FILES)):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            graph[error.args[1][1]].discard(error.args[1][0])
        else:
            return count
    return len(FILES)


def assigned(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of a module's assignments to one name."""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def types_defined_twice(sources: Trees) -> list[str]:
    """Return the names of classes and aliases of types that stand in several files."""
    places = collections.defaultdict(set)
    for path, module in sources.items():
        names = [node.name for node in module.body if isinstance(node, ast.ClassDef)]
        names += [name for name, _ in assigned(module) if name[0].isupper() and not name.isupper()]
        for name in names:
            places[name].add(path)
    return [name for name, paths in places.items() if len(paths) > 1]


def constants_of_many_values(sources: Trees) -> list[str]:
    """Return the names of constants that have three values or more."""
    values = collections.defaultdict(set)
    for module in sources.values():
        for name, value in assigned(module):
            if name.isupper() and len(name) > 1:
                values[name].add(ast.unparse(value))
    return [name for name, found in values.items() if len(found) > 2]


def short_functions_called_once(sources: Trees) -> list[str]:
    """Return functions of at most eight lines that only their own file names, and once."""
    named = collections.Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes(sources, ast.Name, ast.Attribute)
    )
    found = []
    for path, module in sources.items():
        inside = collections.Counter(node.id for node in walked(module) if isinstance(node, ast.Name))
        functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
        found += [
            f"{path}:{each.name}"
            for each in functions
            if body_lines(each) <= 8
            and not each.decorator_list
            and inside[each.name] == named[each.name] == 1
        ]
    return found


@functools.cache
def first_call() -> tuple[set[tuple[str, str]], set[str]]:
    """Return the functions that a first call of attention enters, and the named tuples that it makes.

    It is `multi_head_cache_attention` with sequences and a number of heads that no call had before; its
    machine code is compiled.
    """
    functions, kinds = set(), set()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT / "kvkit")) and code.co_name[0] != "<":
            functions.add((code.co_filename, code.co_qualname))
        elif event == "call" and code.co_name == "<lambda>" and "_cls" in frame.f_locals:
            kinds.add(frame.f_locals["_cls"].__name__)

    for heads, profile in ((2, None), (2, None), (5, note)):
        new, cache = np.ones((2, heads, 64), np.float32), np.zeros((1, 2, heads, 32, 64), np.float32)
        index = [0, 1, 2], [0, 4, 6], [[0], [16]], [3, 1]
        arguments = *map(np.array, index), 0, None, None, cache
        sizes = {"num_heads": heads, "head_dim": 64, "cache_mode": 1, "page_size": 16, "cache_layout": 3}
        kvkit.calls.steps.planned_steps.clear()
        sys.setprofile(profile)
        try:
            kvkit.dynamic_batching.multi_head_cache_attention(new, new, new, *arguments, **sizes)
        finally:
            sys.setprofile(None)
    return functions, kinds


SHORT = "functions of at most eight lines that are called once"
LIMITS = {
    "calls of locals()": 0, "class names that stand twice": 0, "functions of one name": 3,
    "files that name one operator": 8, "functions too long to see at once": 0,
    "docstrings without a subject": 0, "calls with eight or more positional arguments": 13,
    "parameters without a type": 0, "imports that close a circle": 0,
    "types of one name in several files, aliases and kvkit_cuda included": 7,  # twins by design
    "constants of one name with three or more values": 13, SHORT: 80,
    "functions that a first call of a new form enters": 80,
    "kinds of named tuples that a first call of a new form makes": 11,
}  # fmt: skip
LINES = {"kvkit": 50_000, "tests": 40_000}  # targets
# Words in the paths of a feature's files.
FEATURES = {
    "attention of few and many query rows": r"attention(?!.*ascend)", "latent rows": r"latent|mla|indexer",
    "states": r"recurrent|delta|states?\b|state_", "Ascend's operators": r"ascend",
    "pages": r"paged?(?!_attention)|blocks/|block_", "codes": r"quantiz|codes|formats|coding",
    "eviction": r"evict|compress|ragged|heads|what_to_keep",
    "moving tokens": r"surgery|positions|pieces|cut_and_shift",
    "llama.cpp": r"llama|gguf", "MLX": r"mlx", "transformers": r"transformers", "ONNX": r"onnx",
    "Dask": r"dask|cluster", "check": r"rules|checking|test_check|check\.", "diff": r"causes|diff",
    "study": r"stud", "convert": r"conver|recod", "vectors": r"vectors|packs", "CUDA": r"cuda|ptx",
}  # fmt: skip


@functools.cache
def counts() -> dict[str, int]:
    """Return every count by its subject."""
    everything, host, package = trees(*PACKAGES), trees("kvkit", "cli"), trees("kvkit")
    return {
        "calls of locals()": locals_calls(everything),
        "class names that stand twice": len(repeated_classes(host)),
        "functions of one name": most_namesakes(host),
        "files that name one operator": most_files_of_an_operator(everything),
        "functions too long to see at once": len(long_functions(everything)),
        "docstrings without a subject": headless_docstrings(everything),
        "calls with eight or more positional arguments": wide_calls(everything),
        "parameters without a type": untyped_parameters(package),
        "imports that close a circle": circles(),
        "types of one name in several files, aliases and kvkit_cuda included": len(
            types_defined_twice(everything)
        ),
        "constants of one name with three or more values": len(constants_of_many_values(everything)),
        SHORT: len(short_functions_called_once(everything)),
        "functions that a first call of a new form enters": len(first_call()[0]),
        "kinds of named tuples that a first call of a new form makes": len(first_call()[1]),
    }


def price_of(words: str) -> list[int]:
    """Return the lines of files whose paths have such words: of the packages, of tests, of pages."""
    found = []
    for tops, ends in ((PACKAGES, (".py", ".pyi")), (("tests",), (".py",)), (("docs",), (".md",))):
        paths = [path for top in tops for path in (ROOT / top).rglob("*") if path.suffix in ends]
        named = [path for path in paths if re.search(words, path.relative_to(ROOT).as_posix())]
        found.append(sum(len(path.read_text().splitlines()) for path in named))
    return found


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
        target = f" (target {LINES[package]:,})" if package in LINES else ""
        print(f"     lines of {package}: {lines(package):,}{target}")
    for path in sorted((ROOT / "kvkit").iterdir()):
        if (path / "__init__.py").exists():
            own, of_tests = price(path.name)
            print(f"     lines of kvkit/{path.name}: {own:,}, of its tests {of_tests:,}")
    for feature, words in FEATURES.items():
        own, of_tests, pages = price_of(words)
        print(f"     lines of {feature}: {own:,}, tests {of_tests:,}, pages {pages:,}")
