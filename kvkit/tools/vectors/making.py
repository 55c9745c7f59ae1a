"""Make a pack: write calls, the reference's results, and the tolerance of each result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from kvkit.checks.values import text
from kvkit.errors import KvkitError, argument_error, near_names
from kvkit.operators import OPERATORS
from kvkit.reference import REFERENCE
from kvkit.runtime import call_log
from kvkit.tools.vectors import compressed, latent, pmx, pools, recurrent
from kvkit.tools.vectors.draws import Call, Sizes
from kvkit.version import __version__

SUITES: dict[str, Callable[[Generator, Sizes], Iterator[tuple[str, Call]]]] = {
    "pmx": pmx.pmx, "ascend": pools.ascend, "paged": pools.paged, "mla-dense": latent.mla_dense,
    "mla-ds656": partial(latent.coded, names=("656", "656-powers")),
    "mla-ds584": partial(latent.coded, names=("584",)), "dsa-indexer": latent.dsa_indexer,
    "dsa-sparse": latent.dsa_sparse, "gdn-decode": recurrent.decode, "gdn-prefill": recurrent.prefill,
    "kda-prefill": partial(recurrent.prefill, channels=True), "gdn-drafts": recurrent.drafts,
    "causal-conv": recurrent.convolution, "v4-compress": compressed.compress,
    "v4-decode": compressed.decode,
}  # fmt: skip
# in names of operators that round
ROUNDING = (
    "attention",
    "rotary",
    "alibi",
    "absorb",
    "expand",
    "indexer",
    "delta",
    "conv",
    "compress_",
    "_back",
)
EXACT = {"atol": 0.0, "rtol": 0.0, "reason": "bytes are moved, or made by a recipe that says every rounding"}
IN_FLOAT64 = (*latent.IN_FLOAT64, *recurrent.IN_FLOAT64, *compressed.IN_FLOAT64)
IN_PLACE = "state", "row_of_token"  # outputs that have their own type
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # {dtype of a result: tolerance}
REASON = "float64 reference; sums in float32, one rounding to {}: an error of {} times max(1, |expected|)"
IF_CODED = "; over codes a kernel may leave out a rounding of keys, which moves a score by its share of them"
LSE = {"atol": 2e-5, "rtol": 2e-5, "reason": "float64 reference; sums in float32"}


@dataclass(frozen=True)
class Pack:
    """Holds the result of `make`.

    Attributes
    ----------
    folder : Path
    cases, files, nbytes : int
        The numbers of cases and files in the folder, and the size of the files in bytes.
    """

    folder: Path
    cases: int
    files: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        return asdict(self) | {"folder": str(self.folder)}

    def __str__(self) -> str:
        return f"{self.folder}: {self.cases} cases, {self.files} files, {self.nbytes} bytes"


def make(
    folder: str | os.PathLike,
    suite: str | None = None,
    *,
    operator: str | None = None,
    shapes: Mapping[str, int] | None = None,
    seed: int = 0,
    raw: bool = False,
    advance: Any = None,
) -> Pack:
    """Write a pack of golden vectors into a new folder.

    Parameters
    ----------
    folder : path
        The folder to write, new or empty.
    suite : str, optional
        "pmx", "ascend", "paged", "mla-dense", "mla-ds656", "mla-ds584", "dsa-indexer", "dsa-sparse",
        "gdn-decode", "gdn-prefill", "kda-prefill", "gdn-drafts", "causal-conv", "v4-compress" or "v4-decode";
        by default the suite of `operator`, or "pmx".
    operator : str, optional
        Only the cases of this operator.
    shapes : mapping, optional
        Sizes, with defaults: "num_kv_heads" (2; queries have a multiple), "head_dim" (16, a multiple of 16),
        "page_size" in tokens (4), and sequences of a "batch" (4, at least 2).
    seed : int
        The seed of all random numbers; equal seeds give equal bytes.
    raw : bool
        Write raw bytes (.bin) instead of .npy files, for programs that cannot read .npy.
    advance : callable, optional
        A function that is called with 1 after every case.

    Returns
    -------
    Pack

    Raises
    ------
    KvkitError
        If there is no such suite, operator or shape, or the folder is not empty.

    Examples
    --------
    >>> import tempfile
    >>> from kvkit.tools import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pack = vectors.make(folder, "paged")
    ...     vectors.verify(folder).ok, vectors.replay(folder).ok
    (True, True)
    """
    if suite is not None:
        text("suite", suite, tuple(SUITES))
    sizes = Sizes.of(shapes)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise KvkitError(f"{folder}: there is something already: give a new folder")
    cases: list[dict[str, Any]] = []
    requested = [suite] if suite else list(SUITES) if operator else ["pmx"]
    known: dict[str, None] = {}  # the operators of the suites, in order
    for suite in requested:
        for name, call in SUITES[suite](np.random.default_rng(seed), sizes):
            known[call.name] = None
            if operator is None or call.name == operator:
                cases.append(case_of(folder, name, call, raw))
                if advance is not None:
                    advance(1)
        if cases:
            break
    if not cases:
        near = near_names(str(operator), known)
        wanted = f"an operator of {'any suite' if len(requested) > 1 else f'suite {requested[0]}'}"
        raise argument_error(
            "operator", wanted if near else f"{wanted}: {', '.join(known)}", f"{operator!r}{near}"
        )
    more = {"suite": suite, "seed": seed, "shapes": asdict(sizes), "raw": raw}
    call_log.write_manifest(folder, cases, producer=f"kvkit {__version__}", **more)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return Pack(folder, len(cases), len(files), sum(path.stat().st_size for path in files))


def case_of(folder: Path, name: str, call: Call, raw: bool) -> dict[str, Any]:
    """Write the files of a case; return its entry in the manifest."""
    operator, attributes = call.name, call.attributes
    order = [array.name for array in OPERATORS[operator].inputs]
    inputs = {each: call[each] for each in order if each in call.inputs} | call.inputs
    refused = name.endswith("-refused")
    arguments = {
        key: call_log.write_argument(folder, f"{name}/{key}", value, raw)
        for key, value in call_log.members(inputs | attributes)
    }
    changed = [array.name for array in OPERATORS[operator].inputs if array.inout]
    inout = [name for name in changed if inputs.get(name) is not None]
    after = deepcopy(inputs)
    results: Any = ()
    if not refused:  # the reference changes in-out arrays in `after`
        options = {key: value for key, value in attributes.items() if key != "return_lse"}
        options |= {"kind": np.float64} if "rotary" in operator else {}  # of angles
        results = REFERENCE[operator](**after, **options)
        results = results if isinstance(results, tuple) else () if results is None else (results,)
    outputs = {}
    asked = "return_states", "return_capsule"  # outputs that only some calls have
    names = [
        each
        for each in OPERATORS[operator].outputs
        if not refused
        and each.name not in inout
        and (each.only_with not in asked or attributes.get(each.only_with))
    ]
    results = tuple(result for result in results if not any(result is after[name] for name in inout))
    for output, result in zip(names, results, strict=False):
        dtype = type_of(output, inputs, attributes)
        wide = operator in IN_FLOAT64 and output.name not in IN_PLACE
        stored = result.astype(np.float64 if wide else dtype)
        outputs[output.name] = call_log.write_array(folder, f"{name}/expected-{output.name}", stored, raw)
        if stored.dtype != dtype:
            outputs[output.name]["result_dtype"] = dtype.name
        outputs[output.name]["tolerance"] = tolerance(operator, output.name, inputs, dtype, attributes)
    changes = dict.fromkeys(inout, EXACT)  # bytes are moved, but states are computed
    if "gated_delta" in operator:
        of_state = {np.dtype(np.float32): recurrent.IN_STATE}
        changes = {key: of_state.get(after[key].dtype, recurrent.NARROW_STATE) for key in inout}
    kept = {key: call_log.write_array(folder, f"{name}/after-{key}", after[key], raw) for key in inout}
    return {
        "name": name, "operator": operator, "arguments": arguments, "outputs": outputs,
        "after": {key: {**entry, "tolerance": changes[key]} for key, entry in kept.items()},
        "unchanged": [key for key, array in inputs.items() if hasattr(array, "shape") and key not in inout],
        "refused": refused,
        "reference": "matched precision" if exact(operator) else "float64",
    }  # fmt: skip


def type_of(output: Any, inputs: dict[str, Any], attributes: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the dtype of an output: a fixed one, one that an attribute names, or the first input's."""
    if output.dtype in attributes or output.dtype in ("float32", "int64", "int32"):
        return np.dtype(attributes.get(output.dtype, output.dtype))
    if output.name in ("state", "states") and "q" in inputs:
        return inputs["state"].dtype if "state" in inputs else np.dtype(np.float32)
    return next(iter(inputs.values())).dtype


def exact(operator: str) -> bool:
    """Return whether the specification defines every bit of an operator's outputs."""
    return not any(word in operator for word in ROUNDING)


def tolerance(
    operator: str, output: str, inputs: dict[str, Any], dtype: np.dtype[Any], attributes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the tolerance of an output. Over codes, lse has the tolerance of the queries' type."""
    if exact(operator) or output == "row_of_token":
        return EXACT
    coded = attributes.get("quant_bit") or attributes.get("format")
    if output == "lse":
        if not coded:
            return LSE
        dtype = inputs["query"].dtype
    if operator == "causal_conv" and output == "state":
        return EXACT
    size = 2**-8 if operator in recurrent.IN_FLOAT64 and dtype.itemsize == 2 else TOLERANCES[dtype.name]
    reason = REASON.format(dtype.name, size)
    if coded:
        return {"atol": 2 * size + 2e-3, "rtol": 2 * size, "reason": reason + IF_CODED}
    return {"atol": size, "rtol": size, "reason": reason}
