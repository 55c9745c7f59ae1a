"""`kvkit describe`: the table of one operator, for people."""

import click

from kvkit_cli import show
from kvkit_cli.arguments import find, is_scalar


@click.command()
@click.argument("operator", metavar="OP")
def describe(operator):
    """Show what an operator takes and gives."""
    op = find(operator)
    screen = show.console()
    screen.print(f"{op.name}: {op.summary}\nSpecification: {op.source}\n")
    for table in (inputs(op), attributes(op), outputs(op)):
        screen.print(table)
    screen.print("Inputs with shape () and attributes are 0-d arrays in IN.npz or given with --set.\n")
    click.echo(example(op))


def inputs(op):
    table = show.table("Inputs: arrays in IN.npz", "name", "role", "dtypes", "shape", "meaning")
    for array in op.inputs:
        role = "in-out" if array.inout else "in"
        if array.optional:
            role += "\noptional"
        shapes = "\n".join(array.shapes)
        table.add_row(array.name, role, "\n".join(array.dtypes), shapes, array.about, end_section=True)
    return table


def attributes(op):
    table = show.table("Attributes", "name", "default", "meaning")
    for attribute in op.attributes:
        table.add_row(attribute.name, str(attribute.default), attribute.about)
    return table


def outputs(op):
    title = "Outputs: arrays in OUT.npz, beside the in-out ones"
    table = show.table(title, "name", "dtype", "shape", "meaning")
    for array in op.outputs:
        table.add_row(array.name, array.dtype, array.shape, array.about)
    return table


def example(op):
    """A line to copy."""
    settings = [f"{array.name}=0" for array in op.inputs if is_scalar(array) and not array.optional]
    settings += [f"{attribute.name}={attribute.default}" for attribute in op.attributes[:1]]
    return " ".join([f"kvkit run {op.name} IN.npz -o OUT.npz", *(f"--set {setting}" for setting in settings)])
