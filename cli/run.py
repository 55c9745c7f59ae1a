"""`kvkit run`: an operator from files to files."""

import time
from pathlib import Path

import click

from kvkit.errors import KvkitError
from kvkit_cli import npz, show
from kvkit_cli.arguments import bind, find

PACKAGES = {"cpu": "kvkit", "cuda": "kvkit_cuda"}
PATH = click.Path(path_type=Path, readable=False)  # npz says what is wrong with a path


@click.command()
@click.argument("operator", metavar="OP")
@click.argument("source", metavar="IN.npz", type=PATH)
@click.option("-o", "--output", metavar="OUT.npz", type=PATH, help="Write the outputs, cache and scale.")
@click.option("--in-place", is_flag=True, help="Rewrite IN.npz with the changed cache and scale.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Attributes and 0-d inputs.")
@click.option("--backend", type=click.Choice(list(PACKAGES)), default="cpu", show_default=True)
@click.option("--threads", type=int, help="Threads of the operator; all CPUs if not given.")
@click.option("--quiet", is_flag=True, help="Print nothing.")
def run(operator, source, output, in_place, settings, backend, threads, quiet):
    """Run an operator on the arrays of a file.

    IN.npz holds an array for each input, under the names that `kvkit describe OP` shows. Attributes are 0-d
    arrays in it or are given with --set, which wins. IN.npz is only changed with --in-place; at least one of
    -o and --in-place is needed.
    """
    op = find(operator)
    check_targets(source, output, in_place)
    contents = npz.read(source)
    inputs, attributes = bind(op, source, contents.arrays, settings)
    if threads is not None:
        use_threads(threads)
    results, seconds = call(op.function(PACKAGES[backend]), inputs, attributes)
    outputs = {array.name: result for array, result in zip(op.outputs, results, strict=True)}
    changed = {array.name: inputs[array.name] for array in op.inputs if array.inout}
    changed = {name: array for name, array in changed.items() if array is not None}
    if output:
        npz.write(output, outputs | changed, {"operator": op.name, "attributes": attributes}, quiet)
    if in_place:
        npz.write(source, contents.arrays | changed, contents.metadata, quiet)
    if not quiet:
        report(op, inputs, outputs, changed)
        click.echo(f"{op.name} on {backend}: {seconds:.3g} s (includes compiling or loading the kernels)")


def check_targets(source, output, in_place):
    """What can be said about the files to write before any work is done."""
    if output is None and not in_place:
        raise KvkitError("nothing to write: give -o OUT.npz, --in-place or both")
    if output is not None:
        npz.check_target(output)
        if output.exists() and source.exists() and output.samefile(source):
            raise KvkitError(f"{output}: -o names the input: give another name, or --in-place")
    if in_place and source.exists():
        npz.check_target(source)


def use_threads(count):
    import numba

    most = numba.config.NUMBA_NUM_THREADS
    if not 1 <= count <= most:
        raise KvkitError(f"--threads {count}: expected 1 to {most}")
    numba.set_num_threads(count)


def call(function, inputs, attributes):
    """The operator's results and the seconds it took."""
    begin = time.perf_counter()
    results = function(*inputs.values(), **attributes)
    return results, time.perf_counter() - begin


def report(op, inputs, outputs, changed):
    table = show.table(op.name, "array", "role", "dtype", "shape", "size")
    for name, array in (inputs | outputs).items():
        role = "out" if name in outputs else "in-out" if name in changed else "in"
        if array is not None:
            table.add_row(name, role, array.dtype.name, show.shape(array), show.size(array.nbytes))
    show.console().print(table)
