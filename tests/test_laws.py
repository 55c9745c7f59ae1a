"""What the house forbids itself, read from its syntax trees."""

import ast
import configparser
import re
from pathlib import Path

import house
import pytest

import kvkit

ROOT = Path(kvkit.__file__).parent
SOURCES = {path.relative_to(ROOT).as_posix(): path for path in ROOT.rglob("*.py")}

HOUSE = "cache/", "integrations/", "tools/"  # rooms that use what classes of `cache/` offer to the house
RECORDS = {"_asdict", "_fields", "_make", "_replace"}  # named tuples' public names
FOREIGN = {  # what has no public name where it comes from
    "integrations/transformers/cache.py": {"config._attn_implementation"},
    "integrations/transformers/studying.py": {"config._attn_implementation"},
    "runtime/jit.py": {"_nrt_python", "kernel._library"},
    "runtime/numba_068.py": {
        "_codegen._data_layout",
        "_codegen._module_pass_manager",
        "func_ir._definitions",
        "implementation._context",
    },
}


def owner(value):
    """Return the last name of the object that an attribute is taken from."""
    return ast.unparse(value).rpartition(".")[2]


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name not in RECORDS


def names_for_the_house():
    """Return the private names that stand in the bodies of classes of `cache/`."""
    classes = [
        node for name, path in SOURCES.items() if name.startswith("cache/")
        for node in house.walked(house.tree(path)) if isinstance(node, ast.ClassDef)
    ]  # fmt: skip
    bodies = [member for each in classes for member in each.body]
    names = {each.name for each in bodies if isinstance(each, ast.FunctionDef)}
    names |= {
        node.id
        for each in bodies
        if isinstance(each, (ast.Assign, ast.AnnAssign))
        for node in ast.walk(each)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    slots = [each.value for each in bodies if ast.unparse(each).startswith("__slots__")]
    names |= {node.value for each in slots for node in ast.walk(each) if isinstance(node, ast.Constant)}
    return set(filter(is_private, names))


def test_no_object_touches_anothers_private_names():
    found, of_the_house = {name: set() for name in SOURCES}, names_for_the_house()
    for name, path in SOURCES.items():
        for node in house.walked(house.tree(path)):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                offered = node.attr in of_the_house and name.startswith(HOUSE)
                if not offered and ast.unparse(node.value) not in ("self", "cls", "super()"):
                    found[name].add(f"{owner(node.value)}.{node.attr}")
            elif isinstance(node, ast.ImportFrom):
                found[name].update(alias.name for alias in node.names if is_private(alias.name))
    assert {name: names for name, names in found.items() if names} == FOREIGN


def test_no_test_imports_another():
    """What tests share is in `scenes/`, `oracles/` and `ptx/`, so that each may go or move alone."""
    tests = Path(__file__).parent
    found = {
        path.name: re.findall(r"(?m)^\s*(?:from|import) test_\w+", path.read_text())
        for path in tests.rglob("*.py")
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("subject", house.LIMITS)
def test_the_house_is_as_legible_as_promised(subject):
    """Each count stays within its limit. A change may lower a limit, never raise one."""
    count, limit = house.counts()[subject], house.LIMITS[subject]
    assert count <= limit, f"{subject}: {count}, at most {limit}"


def test_the_wheel_has_every_package():
    settings = configparser.ConfigParser()
    settings.read(ROOT.parent / "setup.cfg")
    listed = set(settings["options"]["packages"].split()) - {"kvkit_cli", "kvkit.data"}
    folders = [
        path.parent for top in ("kvkit", "kvkit_cuda") for path in (ROOT.parent / top).rglob("__init__.py")
    ]
    assert listed == {".".join(folder.relative_to(ROOT.parent).parts) for folder in folders}
