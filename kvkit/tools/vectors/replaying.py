"""`replay` and `diff`: kvkit's answers, or a device's, held against a pack."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvkit.checks.values import text
from kvkit.errors import KvkitError
from kvkit.operators import OPERATORS
from kvkit.reference.key_value_cache import DYNAMIC_LAYOUTS, STATIC_LAYOUTS
from kvkit.tools.causes import usable_inputs
from kvkit.tools.comparison import diff as compare
from kvkit.tools.vectors import packs
from kvkit.tools.vectors.packs import Case
from kvkit.typed import Array, FilePath

PACKAGES = {"cpu": "kvkit", "cuda": "kvkit_cuda"}


@dataclass(frozen=True)
class Outcome:
    """One case: its name, "passed", "failed" or "ran" (of a call without expectations), and why."""

    case: str
    operator: str
    status: str
    why: str = ""


@dataclass(frozen=True)
class Outcomes:
    """What became of the cases of a pack.

    Attributes
    ----------
    cases : list of Outcome
    """

    cases: list[Outcome] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there are cases, and none failed."""
        return bool(self.cases) and all(case.status != "failed" for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"ok": self.ok, "cases": [asdict(case) for case in self.cases]}

    def __str__(self) -> str:
        lines = [
            f"{case.case} ({case.operator}): {case.why}" for case in self.cases if case.status == "failed"
        ]
        counts = [
            f"{sum(case.status == word for case in self.cases)} {word}"
            for word in ("passed", "failed", "ran")
        ]
        return "\n".join(
            [*lines, ", ".join(each for each in counts if not each.startswith("0 ")) or "no cases"]
        )


def replay(
    folder: str | os.PathLike,
    *,
    backend: Literal["cpu", "cuda"] = "cpu",
    operator: str | None = None,
    advance: Any = None,
) -> Outcomes:
    """Run the cases of a pack, or of dumps of KVKIT_LOG=10, and hold the results against it.

    Parameters
    ----------
    folder : path
        Of a pack, or of several.
    backend : str
        "cpu" or "cuda".
    operator : str, optional
        Only its cases.
    advance : callable, optional
        Told 1 for every case that is done.

    Returns
    -------
    Outcomes
        ``ok`` is False if a case failed, or if there is none.

    Raises
    ------
    KvkitError
        If the folder is no pack.

    Examples
    --------
    >>> import tempfile
    >>> from kvkit.tools import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = vectors.make(folder, operator="merge_attention_states")
    ...     print(vectors.replay(folder))
    3 passed
    """
    text("backend", backend, tuple(PACKAGES))

    def run(folder: FilePath, case: Case) -> tuple[dict[str, Any], str, str]:
        if case["operator"] not in OPERATORS:
            raise packs.unknown(case["operator"], OPERATORS)
        op, given = OPERATORS[case["operator"]], packs.arguments(folder, case)
        positional = [array.name for array in op.inputs if not array.keyword]
        args = [given.pop(name, None) for name in positional]
        arrays = dict(zip(positional, args, strict=True)) | given
        before = {name: array.copy() for name, array in arrays.items() if isinstance(array, np.ndarray)}
        refused, results = "", None
        try:
            results = op.function(PACKAGES[backend])(*args, **given)
        except KvkitError as error:
            refused = str(error)
        attributes = {
            attribute.name: arrays.get(attribute.name, attribute.default) for attribute in op.attributes
        }
        returned = op.returned(attributes) if results is not None else []
        results = results if isinstance(results, tuple) else (results,)
        found = dict(zip(returned, results, strict=False)) | {name: arrays[name] for name in case["after"]}
        for name in case.get("unchanged", ()):
            if name in before and before[name].tobytes() != arrays[name].tobytes():
                return found, f"{name} has changed", refused
        return found, "", refused

    return outcomes(folder, run, operator, advance)


def diff(
    folder: str | os.PathLike, results: str | os.PathLike, *, operator: str | None = None, advance: Any = None
) -> Outcomes:
    """Hold what a device gave against a pack, with the usual causes of what differs.

    Parameters
    ----------
    folder : path
        Of the pack.
    results : path
        A folder with a file ``CASE/NAME.npy`` (or .bin) for every output and every array that changes, of
        the dtypes of the pack; bfloat16 and fp8 as their bits. Of cases that must be refused, what they left.
    operator, advance : optional
        As in `replay`.

    Returns
    -------
    Outcomes

    Examples
    --------
    Of a device that has not run anything yet:

    >>> import tempfile
    >>> from kvkit.tools import vectors
    >>> with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as results:
    ...     _ = vectors.make(folder, operator="merge_attention_states")
    ...     outcomes = vectors.diff(folder, results)
    >>> [case.status for case in outcomes.cases]
    ['failed', 'failed', 'failed']
    """
    results = Path(results)

    def read(folder: FilePath, case: Case) -> tuple[dict[str, Any], str, str]:
        found: dict[str, Any] = {}
        for group, name, entry in packs.entries(case):
            if group != "arguments":
                path = results / case["name"] / f"{name}{Path(entry['file']).suffix}"
                if not path.is_file():
                    return found, f"{path}: no such file", "refused" if case.get("refused") else ""
                found[name] = packs.array(folder, entry, path)
        return found, "", "refused" if case.get("refused") else ""

    return outcomes(folder, read, operator, advance)


def outcomes(folder: FilePath, run: Callable, operator: str | None, advance: Any) -> Outcomes:
    """Return the outcome of every case. `run` gives (results, a fault it saw, why it was refused)."""
    result = Outcomes()
    for pack in packs.manifests(folder):
        for case in packs.manifest(pack)["cases"]:
            if operator is None or case["operator"] == operator:
                result.cases.append(judged(pack, case, *run(pack, case)))
                if advance is not None:
                    advance(1)
    return result


def judged(folder: Path, case: Case, found: dict[str, Any], why: str, refused: str) -> Outcome:
    """Return the outcome of one case."""
    if not why and case.get("refused") and not refused:
        why = "was done, and must be refused"
    if not why and refused and not case.get("refused"):
        why = f"was refused: {refused}"
    # What was stored comes before what was read back from it: there causes show.
    for group, name, entry in sorted(packs.entries(case), key=lambda each: each[0] != "after"):
        if why or group == "arguments":
            continue
        expected, tolerance = packs.array(folder, entry), entry.get("tolerance", {})
        if name not in found or found[name] is None:
            why = f"{name} is missing"
        elif found[name].shape != expected.shape or found[name].dtype != expected.dtype:
            why = f"{name} is {found[name].dtype} {found[name].shape}, not {expected.dtype} {expected.shape}"
        elif not close(expected, found[name], tolerance):
            inputs = {
                key: array
                for key, array in packs.arguments(folder, case).items()
                if isinstance(array, np.ndarray)
            }
            limits = {key: tolerance.get(key, 0.0) for key in ("atol", "rtol")}
            like = before(name, inputs)
            seen = compare(
                {name: expected},
                {name: found[name]},
                like=like if usable_inputs(like, {name: expected}) else None,
                axes=axes_of(case, name),
                **limits,
            )
            why = "; ".join(line.strip() for line in str(seen).splitlines())
    if why:
        return Outcome(case["name"], case["operator"], "failed", why)
    expects = any(group != "arguments" for group, *_ in packs.entries(case))
    return Outcome(case["name"], case["operator"], "passed" if expects or case.get("refused") else "ran")


def axes_of(case: Case, name: str) -> str | None:
    """Return the axes of a PMX cache or scale; None for other arrays, which are in the usual order."""
    if name not in ("cache", "scale"):
        return None
    layouts = DYNAMIC_LAYOUTS if case["operator"].startswith("dynamic") else STATIC_LAYOUTS
    return layouts[case["arguments"].get("cache_layout", {}).get("value", 0)]


def close(expected: Array, got: Array, tolerance: dict[str, Any]) -> bool:
    """Return whether a result is as exact as the manifest asks; equal bytes always are."""
    if expected.tobytes() == got.tobytes():
        return True
    atol, rtol = tolerance.get("atol", 0.0), tolerance.get("rtol", 0.0)
    if not atol and not rtol:
        return False
    with np.errstate(all="ignore"):
        one, two = expected.astype(np.float64), got.astype(np.float64)
        return bool(
            (
                (one == two)
                | (np.isnan(one) & np.isnan(two))
                | (np.abs(one - two) <= atol + rtol * np.abs(one))
            ).all()
        )


def before(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a call with the array that was at `name` before it, for causes."""
    return inputs | ({"before": inputs[name]} if name in inputs else {})
