"""Make the custom ONNX operators of PMX from kvkit's table of operators."""

from __future__ import annotations

import inspect
from typing import Any

from onnx.reference.op_run import OpRun

from kvkit import operators
from kvkit.errors import argument_error

SOURCE = "PMX "
ROOTS = "opmx", "pmx"  # "pmx" was the name until April 2024
DATA_TYPES = {1: "float32", 10: "float16", 16: "bfloat16"}  # {ONNX's number of a type: kvkit's name}


def operator_classes() -> list[type]:
    """Return a class for each operator of the table in each of its domains."""
    pmx = [op for op in operators.OPERATORS.values() if op.source.startswith(SOURCE)]
    by_path = {op.source.removeprefix(SOURCE): op for op in pmx}
    op_classes = []
    for path, op in by_path.items():
        suffix, _, name = path.rpartition(".")
        members = {"operator": op, "static": by_path.get(name, op), "__doc__": op.summary}
        for root in ROOTS:
            domain = f"{root}.{suffix}" if suffix else root
            op_classes.append(type(name, (PmxOperator,), members | {"op_domain": domain}))
    return op_classes


class PmxOperator(OpRun):
    """Calls the function of kvkit whose arguments are the inputs and attributes of a node.

    PMX exports a static MultiHeadCacheAttention without a mask under the dynamic domain. A node with too few
    inputs for the dynamic operator therefore runs the static one.
    """

    op_schema = None  # these names are in no ONNX schema
    operator: operators.Operator
    static: operators.Operator

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        required = (i for i, spec in enumerate(self.operator.inputs, 1) if not spec.optional)
        op = self.operator if len(inputs) >= max(required, default=0) else self.static
        function = op.function()
        names = [spec.name for spec in op.inputs if not spec.keyword]
        arguments = dict(zip(names, inputs, strict=False))
        arguments |= {"interleaved": True} if op.name == "rotary_position_embedding" else {}  # PMX's pairs
        arguments |= {name: argument(name, value) for name, value in attributes.items()}
        try:
            if len(inputs) > len(names):
                raise TypeError(f"{len(inputs)} inputs")
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            expected = f"the inputs and attributes of kvkit.{op.name}"
            raise argument_error(f"{self.domain}.{self.op_type}", expected, error) from None
        outputs = function(**arguments)
        return outputs if isinstance(outputs, tuple) else (outputs,)


def argument(name: str, value: Any) -> Any:
    """Return an ONNX attribute as an argument of kvkit."""
    if name == "data_type":
        return DATA_TYPES.get(value, value)
    if name == "softmax_scale" and value == 0:  # PMX exports 0 for the default, 1 / sqrt(head_dim)
        return None
    return value
