"""`kvkit run`: an operator from files to files."""

import contextlib
import time
from pathlib import Path

import click

from kvkit.errors import KvkitError
from kvkit_cli import npz, show, watch
from kvkit_cli.arguments import bind, find, fits, left_over

PACKAGES = {"cpu": "kvkit", "cuda": "kvkit_cuda"}
FOREIGN = ".npy", ".safetensors", ".pt", ".pth", ".gguf"
PATH = click.Path(path_type=Path, readable=False)  # npz says what is wrong with a path


@click.command()
@click.argument("operator", metavar="OP")
@click.argument("source", metavar="[IN.npz]", type=PATH, required=False)
@click.option("-o", "--output", metavar="OUT.npz", type=PATH, help="Write outputs, cache and scale.")
@click.option("--in-place", is_flag=True, help="Rewrite IN.npz with the changed cache and scale.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="An attribute or 0-d input.")
@click.option("--backend", type=click.Choice(list(PACKAGES)), default="cpu", show_default=True)
@click.option("--threads", type=int, help="Threads of the operator; all CPUs if not given.")
@click.option("--quiet", is_flag=True, help="Print nothing.")
def run(operator, source, output, in_place, settings, backend, threads, quiet):
    """Run an operator on the arrays of a file.

    IN.npz holds an array for each input, under the names that `kvkit describe OP` shows. Attributes are 0-d
    arrays in it or are given with --set, which wins; no file is needed where that is all. Of the results of
    another run what OP does not take is passed over. IN.npz is only changed with --in-place; at least one of
    -o and --in-place is needed.
    """
    op = find(operator)
    check_targets(op, source, output, in_place)
    if backend != "cpu" and not op.twin:
        raise KvkitError(f"--backend {backend}: {op.name} runs on the CPU alone: leave it out")
    with contextlib.ExitStack() as block:
        contents = npz.Contents({}, {})
        if in_place:
            block.enter_context(npz.alone(source))
        if source:
            contents = npz.read(source, lambda *found: fits(op, source, *found, settings))
        over = left_over(op, contents.metadata)
        arrays = {name: array for name, array in contents.arrays.items() if name not in over}
        inputs, attributes = bind(op, source, arrays, settings)
        if threads is not None:
            use_threads(threads)
        block.enter_context(watch.watched(source, contents.mapped))
        results, seconds = call(op, op.function(PACKAGES[backend]), inputs, attributes)
        changed = given({array.name: inputs[array.name] for array in op.inputs if array.inout})
        outputs = given(dict(zip(op.returned(attributes), results, strict=True)))
        outputs = {name: array for name, array in outputs.items() if name not in changed}
        watch.check(source, contents.mapped)
        if output:
            npz.write(output, outputs | changed, {"operator": op.name, "attributes": attributes}, quiet)
        if in_place:
            npz.write(source, contents.arrays | changed, contents.metadata, quiet)
    if not quiet:
        report(op, inputs, outputs, changed)
        click.echo(f"{op.name} on {backend}: {seconds:.3g} s (includes compiling or loading the kernels)")


def given(arrays):
    """Those that are there: optional ones may be None."""
    return {name: array for name, array in arrays.items() if array is not None}


def check_targets(op, source, output, in_place):
    """What can be said about the files to write before any work is done."""
    changes = [array.name for array in op.inputs if array.inout]
    if in_place and not (source and changes):
        wrong = "there is no IN.npz" if changes else f"{op.name} changes none of its inputs"
        raise KvkitError(f"--in-place: {wrong}: give -o OUT.npz")
    if output is None and not in_place:
        ways = "-o OUT.npz, --in-place or both" if changes else "-o OUT.npz"
        raise KvkitError(f"nothing to write: give {ways}")
    for option, path in (("IN.npz", source), ("-o", output)):
        if str(path) == "-":
            raise KvkitError(f"{option} -: .npz files are not read from or written to pipes: name a file")
    there = source is not None and source.exists()
    if output is not None:
        if output.suffix in FOREIGN:
            other = output.with_suffix(".npz")
            raise KvkitError(
                f"-o {output}: results are written as .npz, not as {output.suffix}: give -o {other}"
            )
        npz.check_target(output)
        if output.exists() and there and output.samefile(source):
            raise KvkitError(f"{output}: -o names the input: give another name, or --in-place")
    if in_place and there:
        npz.check_target(source)


def use_threads(count):
    import numba

    most = numba.config.NUMBA_NUM_THREADS
    if not 1 <= count <= most:
        raise KvkitError(f"--threads {count}: expected 1 to {most}")
    numba.set_num_threads(count)


def call(op, function, inputs, attributes):
    """The operator's results, as a tuple, and the seconds it took."""
    by_position = [inputs[array.name] for array in op.inputs if not array.keyword]
    by_keyword = {array.name: inputs[array.name] for array in op.inputs if array.keyword}
    begin = time.perf_counter()
    results = function(*by_position, **by_keyword, **attributes)
    seconds = time.perf_counter() - begin
    return results if isinstance(results, tuple) else (results,), seconds


def report(op, inputs, outputs, changed):
    table = show.table(op.name, "array", "role", "dtype", "shape", "size")
    rows = [("in-out" if name in changed else "in", name, array) for name, array in inputs.items()]
    for role, name, array in rows + [("out", *pair) for pair in outputs.items()]:
        if array is not None:
            table.add_row(name, role, array.dtype.name, show.shape(array), show.size(array.nbytes))
    show.console().print(table)
