"""The source files of the package, as they were when `kvkit` was imported.

Compiled code is kept under a digest of the files that it can come from. Read later, after an edit, they would
file what was compiled from the old sources under the new ones, so this is the one module that works at
import: a millisecond or two.
"""

import functools
import hashlib
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
TWIN = PACKAGE.with_name("kvkit_cuda")
IMPORT = re.compile(rb"^[ \t]*(?:from (kvkit[\w.]*) import (\([^)]*\)|[^\n#]*)|import (kvkit[\w., ]*))", re.M)


def read_sources():
    """Every source file, by the name of its module; None if one cannot be read."""
    found = {}
    try:
        for root in (PACKAGE, TWIN):
            for path in root.rglob("[!.]*.py"):
                parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = path.read_bytes()
    except OSError:
        return None
    return found


SOURCES = read_sources()


@functools.cache
def imported_modules(module):
    """The modules that one imports, wherever in it. A package stands for all that it may import."""
    found = set()
    for package, names, modules in IMPORT.findall(SOURCES[module]):
        for name in modules.decode().split(","):
            found.update(modules_within(name.split(" as ")[0].strip()))
        for name in re.findall(rb"(?:^|[,(])\s*(\w+)", names):
            one = f"{package.decode()}.{name.decode()}"
            found.update(modules_within(one if one in SOURCES else package.decode()))
    return found


@functools.cache
def modules_within(name):
    """A module, or all those of a package."""
    inside = [module for module in SOURCES if module.startswith(f"{name}.")]
    return [name, *inside] if inside else [name] if name in SOURCES else []


@functools.cache
def reachable_modules(module):
    """The modules that code of this one can come from: itself, and what it imports, directly or not."""
    found, left = set(), [module]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += imported_modules(name)
    return sorted(found)


@functools.cache
def digest(module):
    """Of all that code of a module can come from; None if it is not one of the package's."""
    return digest_of(module, SOURCES)


def digest_of(module, files):
    """The same for other states of the files; None if one has gone."""
    if not files or not SOURCES or module not in SOURCES:
        return None
    total = hashlib.sha256()
    for name in reachable_modules(module):
        if name not in files:
            return None
        total.update(f"{name}\0".encode() + files[name] + b"\0")
    return total.hexdigest()
