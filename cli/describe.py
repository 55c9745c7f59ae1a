"""`kvkit describe`: show the inputs, attributes and outputs of an operator."""

from __future__ import annotations

from shlex import quote
from typing import Any

import click

from kvkit.operators import REQUIRED, Attribute, Operator
from kvkit_cli import complete, show
from kvkit_cli.arguments import find_operator, is_scalar

# The values of arguments in examples; all others are 0.
EXAMPLES = {
    "num_heads": 8, "head_dim": 64, "seqlen_q": 4, "seqlen_kv": 16, "m": 100, "n": 30,
    "rope": """'{"rotary_dim": 64}'""",
}  # fmt: skip


@click.command()
@click.argument("operator", metavar="OP", shell_complete=complete.operators)
@click.option("--json", "for_programs", is_flag=True, help="Print JSON.")
def describe(operator: str, for_programs: bool) -> None:
    """Show the inputs, attributes and outputs of an operator.

    OP is its name in kvkit, or in its specification.

    \b
    Examples:
      kvkit describe key_value_cache
      kvkit describe KeyValueCache
      kvkit describe ascend.paged_attention --json
    """
    op = find_operator(operator)
    if for_programs:
        facts_of: list[dict[str, Any]] = []
        for each in op.attributes:  # a required one has no default
            facts = {"type": each.kind.__name__, "about": each.about, "modes": dict(each.modes)}
            default = {} if each.default is REQUIRED else {"default": each.default}
            facts_of.append({"name": each.name} | facts | default)
        show.as_json(op.to_dict() | {"attributes": facts_of})
        return
    show.out(f"{op.name}: {op.summary}\nSpecification: {op.source}\n")
    inputs = show.table("Inputs: arrays in IN.npz", "name", "role", "dtypes", "shape", "meaning")
    for array in op.inputs:
        role = ("in-out" if array.inout else "in") + "\noptional" * array.optional
        dtypes, shapes = "\n".join(array.dtypes), "\n".join(array.shapes)
        inputs.add_row(array.name, role, dtypes, shapes, array.about, end_section=True)
    attributes = show.table("Attributes", "name", "default", "meaning")
    for attribute in op.attributes:
        modes = [f"{number} {name}: {about}" for number, (name, about) in enumerate(attribute.modes)]
        attributes.add_row(attribute.name, default_text(attribute), "\n".join([attribute.about, *modes]))
    more = ", besides the in-out arrays" if any(array.inout for array in op.inputs) else ""
    outputs = show.table(f"Outputs: arrays in OUT.npz{more}", "name", "dtype", "shape", "meaning")
    for output in op.outputs:
        about = f"{output.about}; with {output.only_with}" if output.only_with else output.about
        outputs.add_row(output.name, output.dtype, output.shape, about)
    for table in (inputs, attributes, outputs):
        if table.row_count:
            show.out(table)
    if not op.outputs:
        show.out("Outputs: the in-out arrays.\n")
    show.out(note(op))
    click.echo(example(op))


def default_text(attribute: Attribute) -> str:
    """Return the default of an attribute as text, or "required"."""
    if attribute.default is REQUIRED:
        return "required"
    value = attribute.names[attribute.default] if attribute.modes else attribute.default
    return str(value) or "''"


def note(op: Operator) -> str:
    """Return a sentence on how to give 0-d inputs and attributes."""
    scalars = ["inputs with shape ()"] if any(map(is_scalar, op.inputs)) else []
    scalars += ["attributes"] if op.attributes else []
    text = f"{' and '.join(scalars).capitalize()} are 0-d arrays in IN.npz, or are given with --set"
    for attribute in op.attributes:
        if attribute.kind is tuple:
            text += f"; {attribute.name} is an array of 2, or --set {attribute.name}=NUMBER,NUMBER"
    return f"{text}.\n" if scalars else ""


def example(op: Operator) -> str:
    """Return an example command, in two lines if it is long."""
    needed = [array for array in op.inputs if not array.optional]
    settings = [f"{array.name}={EXAMPLES.get(array.name, 0)}" for array in needed if is_scalar(array)]
    required = [attribute for attribute in op.attributes if attribute.default is REQUIRED]
    settings += [f"{attribute.name}={EXAMPLES.get(attribute.name, 0)}" for attribute in required]
    if not required:
        settings += [f"{attribute.name}={quote(default_text(attribute))}" for attribute in op.attributes[:1]]
    source = "" if all(map(is_scalar, needed)) else " IN.npz"
    command = f"kvkit run {op.name}{source} -o OUT.npz"
    options = "".join(f" --set {setting}" for setting in settings)
    return command + options if len(command + options) <= 80 else f"{command} \\\n   {options}"
