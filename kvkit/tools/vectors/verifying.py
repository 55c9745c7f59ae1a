"""Verify packs: check that no file has changed."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvkit.errors import KvkitError, printable
from kvkit.runtime.call_log import MANIFEST
from kvkit.tools.tasks import Mapper
from kvkit.tools.vectors import packs


@dataclass(frozen=True)
class Verified:
    """Holds the result of `verify`.

    Attributes
    ----------
    cases, files : int
        How many cases and files were checked.
    problems : list of str
        One line for each problem: the path and what is wrong.
    """

    cases: int
    files: int
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether there are no problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        return {"ok": self.ok, "cases": self.cases, "files": self.files, "problems": self.problems}

    def __str__(self) -> str:
        if self.ok:
            return f"fine: {self.cases} cases, {self.files} files"
        return "\n".join([*map(printable, self.problems), f"{len(self.problems)} problems"])


def verify(folder: str | os.PathLike, *, mapper: Mapper = map) -> Verified:
    """Check a pack: version, hashes, that no file is missing or unlisted, and that there is a case.

    Parameters
    ----------
    folder : path
        The folder of the pack.
    mapper : callable
        A function such as `map`, which checks each case. `kvkit.integrations.dask.mapper` uses workers.

    Returns
    -------
    Verified
        ``ok``, and the problems.

    Raises
    ------
    FileError
        If there is no manifest, or it cannot be read.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from kvkit.tools import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = vectors.make(folder, operator="merge_attention_states")
    ...     fine = vectors.verify(folder).ok
    ...     next(pathlib.Path(folder).rglob("*.npy")).unlink()
    ...     fine, vectors.verify(folder).ok
    (True, False)
    """
    folder = Path(folder)
    cases = packs.manifest(folder)["cases"]
    problems, listed = [], {(folder / MANIFEST).resolve()}
    if not cases:
        problems.append(f"{folder / MANIFEST}: no cases: an empty pack proves nothing")
    names = [case["name"] for case in cases]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{folder / MANIFEST}: two cases are called {name}")
    titles = [f"{folder}, case {name}" for name in names]
    for paths, found in mapper(partial(check_case, folder), titles, cases):
        listed.update(paths)
        problems += found
    existing = {path.resolve() for path in folder.rglob("*") if path.is_file()}
    problems += [f"{path}: in no case of the manifest" for path in sorted(existing - listed)]
    return Verified(len(cases), len(listed), problems)


def check_case(folder: Path, title: str, case: dict[str, Any]) -> tuple[list[Path], list[str]]:
    """Check a case; return (its files, its problems)."""
    paths, problems = [], []
    if not case["outputs"] and not case["after"]:
        problems.append(f"{folder / MANIFEST}: case {case['name']} expects nothing")
    for *_, entry in packs.entries(case):
        try:
            path = packs.inside(folder, entry["file"])
            paths.append(path)
            if not path.is_file():
                problems.append(f"{path}: missing")
            elif hashlib.sha256(path.read_bytes()).hexdigest() != entry.get("sha256"):
                problems.append(f"{path}: its SHA-256 differs from the manifest")
            else:
                packs.array(folder, entry)
        except KvkitError as error:
            problems.append(str(error))
    return paths, problems
