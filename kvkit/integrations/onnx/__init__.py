"""Run ONNX attention, recurrent states and the operators of PMX on kvkit, in ONNX's reference evaluator.

``ReferenceEvaluator(model, new_ops=OPERATORS)`` runs the nodes `Attention` (opsets 23 to 25),
`TensorScatter`, `LinearAttention` and `CausalConvWithState` (opset 27), and those of the PMX domains, `opmx`
and `pmx`, alone and with `.dynamic_batching`. All other nodes run as before. PMX nodes change their inputs
`cache` and `scale` in place.
"""

try:
    from kvkit.integrations.onnx import pmx
except ModuleNotFoundError as error:
    error.add_note("pip install onnx")
    raise
from kvkit.integrations.onnx.attention import Attention
from kvkit.integrations.onnx.recurrent import CausalConvWithState, LinearAttention
from kvkit.integrations.onnx.tensor_scatter import TensorScatter

__all__ = ["OPERATORS"]

OPERATORS = [Attention, TensorScatter, LinearAttention, CausalConvWithState, *pmx.operator_classes()]
