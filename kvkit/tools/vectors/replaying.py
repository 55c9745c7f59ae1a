"""Replay packs with kvkit, or compare them with the results of a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from kvkit.checks.values import text
from kvkit.errors import KvkitError, argument_error, brief
from kvkit.operators import OPERATORS
from kvkit.operators.operator import IN_PYTHON
from kvkit.tools.axes import axes_of_shape
from kvkit.tools.causes import usable_inputs
from kvkit.tools.causes.attention import ATTRIBUTE
from kvkit.tools.comparison import Difference
from kvkit.tools.comparison import diff as diff_arrays
from kvkit.tools.counting import equal_elements
from kvkit.tools.vectors import packs
from kvkit.tools.vectors.packs import CaseEntry
from kvkit.typed import Array, FilePath

NO_FILE = ": no such file"  # ends why a case without results failed
PACKAGES = {"cpu": "kvkit", "cuda": "kvkit_cuda"}


class CaseResults(NamedTuple):
    """Holds what a call of a case did."""

    arrays: dict[str, Any]  # results and changed arrays, by name
    fault: str  # why the case failed; "" if that is not known yet
    refusal: str  # the error of a call that was refused, or ""


@dataclass(frozen=True)
class Outcome:
    """Holds the outcome of a case."""

    case: str
    operator: str
    status: str  # "passed", "failed", or "ran" for a call without expected results
    why: str = ""  # why it failed

    def __str__(self) -> str:
        title, (first, *more) = f"{self.case} ({self.operator})", self.why.split("\n")
        return f"{title}: {first}" if not more else "\n  ".join([f"{title}:", first, *more])


@dataclass(frozen=True)
class Outcomes:
    """Holds the outcomes of all cases."""

    cases: list[Outcome] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether there are cases and none failed."""
        return bool(self.cases) and all(case.status != "failed" for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Return the outcomes as values that JSON can hold."""
        return {"ok": self.ok, "cases": [asdict(case) for case in self.cases]}

    def __str__(self) -> str:
        failed = [case for case in self.cases if case.status == "failed"]
        missing = [case for case in failed if case.why.endswith(NO_FILE)]
        lines = [str(case) for case in failed if len(missing) < 2 or case not in missing]
        if len(missing) > 1:
            lines.append(f"{len(missing)} cases have no results, the first is {missing[0].why}")
        statuses = [case.status for case in self.cases]
        counts = [f"{statuses.count(x)} {x}" for x in ("passed", "failed", "ran") if x in statuses]
        return "\n".join([*lines, ", ".join(counts) or "no cases"])


def replay(
    folder: str | os.PathLike,
    *,
    backend: Literal["cpu", "cuda"] = "cpu",
    operator: str | None = None,
    advance: Any = None,
) -> Outcomes:
    """Run the cases of a pack, or dumps of KVKIT_LOG=10, and compare the results.

    Parameters
    ----------
    folder : path
        The folder of a pack, or of several packs.
    backend : str
        "cpu" or "cuda".
    operator : str, optional
        Replay only the cases of this operator.
    advance : callable, optional
        A function that is called with 1 after every case.

    Returns
    -------
    Outcomes
        ``ok`` is False if a case failed, or if there are no cases.

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

    def run(folder: FilePath, case: CaseEntry) -> CaseResults:
        if case["operator"] not in OPERATORS:
            raise argument_error("operator", f"one of {', '.join(OPERATORS)}", brief(repr(case["operator"])))
        op, given = OPERATORS[case["operator"]], packs.arguments(folder, case)
        if op.name == "rotary_position_embedding":
            given = {"interleaved": True} | given  # packs of PMX do not say it
        known = {*IN_PYTHON, *(each.name for each in op.inputs), *(each.name for each in op.attributes)}
        unknown = [name for name in given if name not in known]
        if unknown:
            raise argument_error(f"case {case['name']}", f"arguments of {op.name}", ", ".join(unknown))
        arrays = {array.name: None for array in op.inputs if not array.keyword} | given
        before = {name: array.copy() for name, array in arrays.items() if isinstance(array, np.ndarray)}
        refusal, results = "", None
        try:
            results = op.call(given, PACKAGES[backend])
        except KvkitError as error:
            refusal = str(error)
        attributes = {each.name: arrays.get(each.name, each.default) for each in op.attributes}
        returned = op.returned(attributes) if results is not None else []
        results = results if isinstance(results, tuple) else (results,)
        found = dict(zip(returned, results, strict=False)) | {name: arrays[name] for name in case["after"]}
        for name in case.get("unchanged", ()):
            if name in before and before[name].tobytes() != arrays[name].tobytes():
                return CaseResults(found, f"{name} has changed", refusal)
        return CaseResults(found, "", refusal)

    return outcomes(folder, run, operator, advance)


def diff(
    folder: str | os.PathLike, results: str | os.PathLike, *, operator: str | None = None,
    case: str | None = None, advance: Any = None,
) -> Outcomes:  # fmt: skip
    """Compare the results of a device with a pack, and find causes of differences.

    Parameters
    ----------
    folder : path
        The folder of the pack.
    results : path
        A folder with a file ``CASE/NAME.npy`` (or .bin) for every output and every array that changes, in
        the dtypes of the pack, bfloat16 and fp8 as bits. For calls to refuse: the arrays after the call.
    case : str, optional
        Compare only the cases of this name, or of names that a pattern fits, such as ``"plain-*"``.
    operator, advance : optional
        See `replay`.

    Returns
    -------
    Outcomes

    Examples
    --------
    For a device that has written no results:

    >>> import tempfile
    >>> from kvkit.tools import vectors
    >>> with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as results:
    ...     _ = vectors.make(folder, operator="merge_attention_states")
    ...     outcomes = vectors.diff(folder, results)
    >>> [case.status for case in outcomes.cases]
    ['failed', 'failed', 'failed']
    """
    results = Path(results)

    def read(folder: FilePath, case: CaseEntry) -> CaseResults:
        found: dict[str, Any] = {}
        refusal = "refused" if case.get("refused") else ""
        for group, name, entry in packs.entries(case):
            if group != "arguments":
                path = results / case["name"] / f"{name}{Path(entry['file']).suffix}"
                if not path.is_file():
                    return CaseResults(found, f"{path}{NO_FILE}", refusal)
                found[name] = packs.array(folder, entry | {"dtype": packs.result_dtype(entry)}, path)
        return CaseResults(found, "", refusal)

    return outcomes(folder, read, operator, advance, case)


def outcomes(
    folder: FilePath, run: Callable[[Path, CaseEntry], CaseResults], operator: str | None, advance: Any,
    pattern: str | None = None,
) -> Outcomes:  # fmt: skip
    """Run the cases of an operator whose names fit a pattern, or all; return the outcomes."""
    result, names = Outcomes(), []
    for pack in packs.manifests(folder):
        for case in packs.manifest(pack)["cases"]:
            names.append(case["name"])
            if operator not in (None, case["operator"]) or not fnmatchcase(case["name"], pattern or "*"):
                continue
            result.cases.append(judge_case(pack, case, run(pack, case)))
            if advance is not None:
                advance(1)
    if pattern is not None and not result.cases:
        raise argument_error("case", f"a case or a pattern of cases ({brief(', '.join(names))})", pattern)
    return result


def judge_case(folder: Path, case: CaseEntry, results: CaseResults) -> Outcome:
    """Compare the results of a case with the expected ones."""
    found, why, refusal = results
    if not why and case.get("refused") and not refusal:
        why = "was done, but must be refused"
    if not why and refusal and not case.get("refused"):
        why = f"was refused: {refusal}"
    # Arrays that the call changed come first: causes of differences are found there.
    for group, name, entry in sorted(packs.entries(case), key=lambda each: each[0] != "after"):
        if why or group == "arguments":
            continue
        expected, tolerance = packs.array(folder, entry), entry.get("tolerance", {})
        if name not in found or found[name] is None:
            why = f"{name} is missing"
        elif found[name].shape != expected.shape or found[name].dtype.name != packs.result_dtype(entry):
            wanted = f"{packs.result_dtype(entry)} {expected.shape}"
            why = f"{name} is {found[name].dtype} {found[name].shape}, not {wanted}"
        elif not close(expected, found[name], tolerance):
            why = str(compare_result(folder, case, name, expected, found[name]))
    if why:
        return Outcome(case["name"], case["operator"], "failed", why)
    expects = any(group != "arguments" for group, *_ in packs.entries(case))
    return Outcome(case["name"], case["operator"], "passed" if expects or case.get("refused") else "ran")


def compare_result(folder: Path, case: CaseEntry, name: str, expected: Array, got: Array) -> Difference:
    """Compare a result; its causes are searched with the call's inputs and other expected results."""
    given = packs.arguments(folder, case)
    inputs = {key: x for key, x in given.items() if isinstance(x, np.ndarray)}
    like = (
        inputs
        | (stored_floats(case, inputs) if name in inputs else {})
        | {"operator": np.array(case["operator"])}
    )
    like |= {ATTRIBUTE + key: np.array(x) for key, x in given.items() if key not in inputs and x is not None}
    if expected.dtype.kind == "f" and got.dtype != expected.dtype:  # float64, for results of another type
        expected = expected.astype(got.dtype)
    like |= {"before": inputs[name]} if name in inputs else {}
    others = {other: packs.array(folder, entry) for other, entry in case["after"].items() if other != name}
    tolerance = (case["after"] | case["outputs"])[name].get("tolerance", {})
    return diff_arrays(
        {name: expected} | others,
        {name: got} | others,
        like=like if usable_inputs(like, {name: expected} | others) else None,
        axes=axes_of(case, name, expected),
        **{key: tolerance.get(key, 0.0) for key in ("atol", "rtol")},
    )


def stored_floats(case: CaseEntry, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return {"cache": floats that a PMX call quantized, where it stored their codes}; {} for other calls."""
    attributes = {key: packs.plain(entry.get("value")) for key, entry in case["arguments"].items()}
    if not attributes.get("quant_bit") or not {"cache", "current_key"} <= set(inputs):
        return {}
    op, current = OPERATORS[case["operator"]], inputs["current_key"]
    floats = np.full((*inputs["cache"].shape[:-1], current.shape[-1]), np.nan, current.dtype)
    given = attributes | inputs | {"cache": floats, "scale": None, "quant_bit": 0}
    try:
        op.call(given)
    except KvkitError:  # the call must be refused
        return {}
    return {"cache": floats}


def axes_of(case: CaseEntry, name: str, array: Array) -> str | None:
    """Return the documented axes of an operator's array; None if they are not documented."""
    op = OPERATORS.get(case["operator"])
    if op is None:
        return None
    values = {key: entry.get("value") for key, entry in case["arguments"].items()}
    if "layout" in values and name.endswith("_cache"):
        return str(values["layout"])
    inputs = {each.name: each.shapes for each in op.inputs}
    shapes = inputs.get(name) or [each.shape for each in op.outputs if each.name == name]
    texts = [text.strip() for shape in shapes for text in shape.split(";")]
    first = "NZ:" if values.get("cache_format") == "NZ" else f"{values.get('cache_layout', 0)}:"
    texts.sort(key=lambda text: not text.startswith(first))
    return next((axes for text in texts if (axes := axes_of_shape(text, array.ndim))), None)


def close(expected: Array, got: Array, tolerance: dict[str, Any]) -> bool:
    """Return whether a result is within the tolerance of the manifest, or has equal bytes."""
    if expected.tobytes() == got.tobytes():
        return True
    atol, rtol = tolerance.get("atol", 0.0), tolerance.get("rtol", 0.0)
    return bool((atol or rtol) and equal_elements(expected, got, (atol, rtol, 0)).all())
