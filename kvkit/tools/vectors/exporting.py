"""Export packs: write cases as ONNX test data, if ONNX has the operator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.checks.values import text
from kvkit.errors import KvkitError
from kvkit.reference.alibi import alibi_mask
from kvkit.reference.attention import visible_keys
from kvkit.tools.vectors import packs
from kvkit.tools.vectors.packs import CaseEntry
from kvkit.typed import Array, FilePath

OPSET = 23
ATTRIBUTES = {  # attributes of multi_head_attention that ONNX's Attention can express
    "num_heads", "head_dim", "num_kv_heads", "is_causal", "is_alibi", "softmax_scale", "softcap",
    "return_lse", "window",
}  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """Holds the result of `export`.

    Attributes
    ----------
    folder : Path
    written, left_out : list of str
        Names of cases: those that were written, and those that ONNX cannot express.
    """

    folder: Path
    written: list[str]
    left_out: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        return asdict(self) | {"folder": str(self.folder)}

    def __str__(self) -> str:
        left_out = f"{len(self.left_out)} that onnx's Attention does not have"
        return f"{self.folder}: {len(self.written)} cases, {left_out}"


def export(folder: str | os.PathLike, target: str | os.PathLike, *, to: str = "onnx") -> Exported:
    """Write cases of a pack for ONNX's runners: ``CASE/model.onnx``, ``CASE/test_data_set_0/*.pb``.

    Parameters
    ----------
    folder, target : path
        The folder of the pack, and the folder to write.
    to : str
        "onnx": operator Attention of opset 23.

    Returns
    -------
    Exported

    Raises
    ------
    KvkitError
        If the package onnx is missing, or ONNX can express no case.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from kvkit.tools import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = vectors.make(f"{folder}/pack", operator="multi_head_attention")
    ...     _ = vectors.export(f"{folder}/pack", f"{folder}/onnx")
    ...     sorted(each.name for each in pathlib.Path(folder, "onnx", "attention-fp32").iterdir())
    ['model.onnx', 'test_data_set_0']
    """
    text("to", to, ("onnx",))
    try:
        import onnx
    except ImportError:
        raise KvkitError("export: needs onnx: pip install onnx") from None
    target, written, left_out = Path(target), [], []
    for case in packs.manifest(folder)["cases"]:
        model = as_onnx(onnx, folder, case)
        if model is None:
            left_out.append(case["name"])
            continue
        proto, inputs, outputs = model
        place = target / case["name"] / "test_data_set_0"
        place.mkdir(parents=True, exist_ok=True)
        onnx.save(proto, place.parent / "model.onnx")
        for kind, arrays in (("input", inputs), ("output", outputs)):
            for i, (name, array) in enumerate(arrays.items()):
                tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(array), name)
                (place / f"{kind}_{i}.pb").write_bytes(tensor.SerializeToString())
        written.append(case["name"])
    if not written:
        wrong = "ONNX can express no case"
        raise KvkitError(f"{folder}: {wrong}: export a pack with multi_head_attention")
    return Exported(target, written, left_out)


def as_onnx(
    onnx: Any, folder: FilePath, case: CaseEntry
) -> tuple[Any, dict[str, Array], dict[str, Array]] | None:
    """Return (model, inputs, outputs) of a case; None if ONNX's Attention cannot express it."""
    if case["operator"] != "multi_head_attention" or case.get("refused"):
        return None
    given = packs.arguments(folder, case)
    arrays = {name: array for name, array in given.items() if isinstance(array, np.ndarray)}
    attributes = {name: value for name, value in given.items() if name not in arrays and value is not None}
    query, key = arrays["query"], arrays["key"]
    if set(arrays) - {"query", "key", "value", "attn_mask"} or set(attributes) - ATTRIBUTES:
        return None
    if query.dtype.name == "bfloat16":
        return None  # onnxruntime lacks this on the CPU
    inputs = {name[0].upper(): arrays[name].swapaxes(1, 2) for name in ("query", "key", "value")}
    mask = whole_mask(query, key, arrays.get("attn_mask"), attributes)
    if np.isneginf(mask).all(axis=-1).any():
        return None  # versions of ONNX differ about queries that see no key
    inputs["attn_mask"] = mask.astype(query.dtype)
    outputs = {"Y": packs.array(folder, case["outputs"]["attn_output"]).swapaxes(1, 2)}
    options = {"softcap": float(attributes.get("softcap", 0.0))}
    if "softmax_scale" in attributes:
        options["scale"] = float(attributes["softmax_scale"])
    node = onnx.helper.make_node("Attention", list(inputs), list(outputs), **options)

    def info(name: str, array: Array) -> Any:
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return onnx.helper.make_tensor_value_info(name, kind, array.shape)

    values = ([info(*item) for item in arrays.items()] for arrays in (inputs, outputs))
    whole = onnx.helper.make_graph([node], case["name"], *values)
    model = onnx.helper.make_model(whole, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=10)
    return model, inputs, outputs


def whole_mask(query: Array, key: Array, mask: Array | None, attributes: Mapping[str, Any]) -> Array:
    """Join all masks and biases to one additive mask [batch, heads or 1, queries, keys]."""
    n, m, alibi = query.shape[1], key.shape[1], attributes.get("is_alibi", False)
    causal, window = attributes.get("is_causal", True) or alibi, attributes.get("window", (-1, -1))
    visible = np.reshape([visible_keys(n, m, i, causal, window) for i in range(n)], (n, m))
    whole = np.zeros((1, 1, n, m), np.float32)
    if mask is not None:
        mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)[..., :m]
        whole = np.where(mask, 0, -np.inf) if mask.dtype == bool else mask.astype(np.float32)
    if alibi:
        whole = whole + alibi_mask(n, m, num_heads=query.shape[2])[..., :m]
    return np.where(visible, np.broadcast_to(whole, (*whole.shape[:2], n, m)), -np.inf)
