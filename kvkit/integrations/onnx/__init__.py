"""kvkit's operators in ONNX's reference evaluator: standard attention and the custom operators of PMX.

``ReferenceEvaluator(model, new_ops=OPERATORS)`` runs the nodes `Attention` (opsets 23 to 25) and
`TensorScatter`, and those of the PMX domains, `opmx` and `pmx`, alone and with `.dynamic_batching`; all other
nodes run as they did. PMX nodes change `cache` and `scale` in place, in the very arrays that were fed.
"""

from kvkit.integrations.onnx import pmx
from kvkit.integrations.onnx.attention import Attention
from kvkit.integrations.onnx.tensor_scatter import TensorScatter

__all__ = ["OPERATORS"]

OPERATORS = [Attention, TensorScatter, *pmx.classes()]
