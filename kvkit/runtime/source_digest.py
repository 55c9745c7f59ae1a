"""Digests of the source files that compiled code can come from.

The files are read when `kvkit` is imported, in a few milliseconds. If they were read later, after an edit,
code of the old sources would be filed under the digest of the new ones.
"""

import functools
import hashlib
import os
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CUDA_PACKAGE = PACKAGE.with_name("kvkit_cuda")
# The groups: from (kvkit.x) import (y, z), or import (kvkit.x, kvkit.y).
IMPORT = re.compile(rb"^[ \t]*(?:from (kvkit[\w.]*) import (\([^)]*\)|[^\n#]*)|import (kvkit[\w., ]*))", re.M)


def read_sources() -> dict[str, bytes]:
    """Return the contents of every source file by the name of its module; {} if one cannot be read."""
    sources = {}
    try:
        for root in (PACKAGE, CUDA_PACKAGE):
            for folder, _, files in os.walk(root):
                package = os.path.relpath(folder, root.parent).replace(os.sep, ".")
                for name in files:
                    if name.endswith(".py") and not name.startswith("."):
                        with open(f"{folder}/{name}", "rb", buffering=0) as stream:
                            sources[f"{package}.{name[:-3]}".removesuffix(".__init__")] = stream.read()
    except OSError:
        return {}
    return sources


SOURCES = read_sources()


@functools.cache
def imported_modules(module: str) -> set[str]:
    """Return the modules that a module imports. An imported package counts with all its modules."""
    imported = set()
    for package, names, modules in IMPORT.findall(SOURCES[module]):
        for name in modules.decode().split(","):  # import kvkit.x, kvkit.y as z
            imported.update(modules_within(name.split(" as ")[0].strip()))
        for name in re.findall(rb"(?:^|[,(])\s*(\w+)", names):  # from kvkit.x import y, z
            inner = f"{package.decode()}.{name.decode()}"
            imported.update(modules_within(inner if inner in SOURCES else package.decode()))
    return imported


@functools.cache
def modules_within(name: str) -> list[str]:
    """Return a module, or all modules of a package."""
    inside = [module for module in SOURCES if module.startswith(f"{name}.")]
    return [name, *inside] if inside else [name] if name in SOURCES else []


@functools.cache
def reachable_modules(module: str) -> list[str]:
    """Return the module and all modules that it imports, directly or through others."""
    reached, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imported_modules(name)
    return sorted(reached)


@functools.cache
def digest(module: str) -> str | None:
    """Return a digest of all sources that a module's code can come from; None outside the package."""
    return digest_of(module, SOURCES)


def digest_of(module: str, files: dict[str, bytes]) -> str | None:
    """Return the digest of a module and its imports, from the contents in `files`; None if one is missing."""
    if not files or not SOURCES or module not in SOURCES:
        return None
    total = hashlib.sha256()
    for name in reachable_modules(module):
        if name not in files:
            return None
        total.update(f"{name}\0".encode() + files[name] + b"\0")
    return total.hexdigest()
