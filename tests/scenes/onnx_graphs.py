"""Run small ONNX graphs in the reference evaluator, with kvkit's operators."""

from onnx import helper
from onnx.reference import ReferenceEvaluator

from kvkit.integrations.onnx import OPERATORS

DOMAINS = [(root, suffix) for root in ("opmx", "pmx") for suffix in ("", ".dynamic_batching")]


def graph(nodes, inputs, outputs, constants=()):
    """Return a model of opset 25, with version 1 of the domains of PMX."""
    values = [[helper.make_empty_tensor_value_info(name) for name in names] for names in (inputs, outputs)]
    opsets = [helper.make_opsetid(root + suffix, 1) for root, suffix in DOMAINS]
    model = helper.make_graph(nodes, "graph", *values, initializer=constants)
    return helper.make_model(model, opset_imports=[helper.make_opsetid("", 25), *opsets])


def run_node(op_type, feeds, outputs, domain="", new_ops=OPERATORS, **attributes):
    """Return the outputs of a node with these inputs in order; None stands for an input left out."""
    fed = {name: array for name, array in feeds.items() if array is not None}
    inputs = [name if name in fed else "" for name in feeds]
    node = helper.make_node(op_type, inputs, outputs, domain=domain, **attributes)
    model = graph([node], fed, [name for name in outputs if name])
    return ReferenceEvaluator(model, new_ops=new_ops).run(None, fed)
