"""What the house forbids itself, read from its syntax trees."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import kvkit

ROOT = Path(kvkit.__file__).parent
SOURCES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}

RECORDS = {"_asdict", "_fields", "_make", "_replace"}  # named tuples' public names
FOREIGN = {  # what has no public name where it comes from
    "integrations/transformers/cache.py": {"config._attn_implementation"},
    "jit.py": {"_codegen._data_layout", "_codegen._module_pass_manager", "whole._library"},
}
LAZY = {"stores/codes.py"}  # of kvkit.cache: kernels, and Numba with them, are imported when first used


def owner(value):
    """What an attribute is taken from, by its last name."""
    return ast.unparse(value).rpartition(".")[2]


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name not in RECORDS


def test_no_object_touches_anothers_private_names():
    found = {name: set() for name in SOURCES}
    for name, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                if ast.unparse(node.value) not in ("self", "cls", "super()"):
                    found[name].add(f"{owner(node.value)}.{node.attr}")
            elif isinstance(node, ast.ImportFrom):
                found[name].update(alias.name for alias in node.names if is_private(alias.name))
    assert {name: names for name, names in found.items() if names} == FOREIGN


def imports(tree):
    """(module, whether in a function) of all that a file imports from the package."""
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("kvkit"):
            for alias in node.names:
                whole = "/".join([*node.module.split("."), alias.name])
                yield whole if f"{whole[6:]}.py" in SOURCES else node.module.replace(".", "/"), node in inside


def test_caches_import_in_one_direction():
    """Also where an import in a function would hide that they do not."""
    graph, lazy = {}, set()
    for name, tree in SOURCES.items():
        room = name.removeprefix("cache/")
        if room != name and not name.endswith("__init__.py"):
            used = list(imports(tree))
            graph[f"kvkit/{name}"] = {f"{module}.py" for module, _ in used}
            lazy |= {room for _, inside in used if inside}
    assert lazy == LAZY
    assert len(list(TopologicalSorter(graph).static_order())) > len(graph) > 20
