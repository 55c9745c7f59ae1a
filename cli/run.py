"""`kvkit run`: run an operator on the arrays of a file and write a file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from kvkit.calls.targets import Checks, definition
from kvkit.errors import KvkitError, brief
from kvkit.operators import Operator
from kvkit_cli import complete, npz, show, watch
from kvkit_cli.arguments import (
    SOME,
    argument_names,
    bind,
    check_headers,
    find_operator,
    ignored_arrays,
)
from kvkit_cli.show import suggestion

ArrayDict = dict[str, Any]  # {name: array, or its header, or None}
PACKAGES = {"cpu": "kvkit", "cuda": "kvkit_cuda"}
PATH = click.Path(path_type=Path, readable=False)  # npz.py checks paths


@click.command()
@click.argument("operator", metavar="OP", shell_complete=complete.operators)
@click.argument("source", metavar="[IN.npz]", type=PATH, required=False)
@click.option("-o", "--output", metavar="OUT.npz", type=PATH, help="Write outputs, cache and scale.")
@click.option("--in-place", is_flag=True, help="Rewrite IN.npz with the changed cache and scale.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", shell_complete=complete.settings,
    help="Set an attribute or a 0-d input.",
)  # fmt: skip
@click.option(
    "--map", "renamed", multiple=True, metavar="ARRAY=NAME", help="Use this array of the file as input NAME."
)
@click.option("--check", "only_check", is_flag=True, help="Check the call, compute and write nothing.")
@click.option("--backend", type=click.Choice(list(PACKAGES)), default="cpu", show_default=True)
@click.option("--threads", type=int, help="Threads of the operator; all CPUs if not given.")
@click.option("--json", "for_programs", is_flag=True, help="Print the report as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
def run(
    operator: str,
    source: Path | None,
    output: Path | None,
    in_place: bool,
    settings: Sequence[str],
    renamed: Sequence[str],
    only_check: bool,
    backend: str,
    threads: int | None,
    for_programs: bool,
    quiet: bool,
) -> None:
    """Run an operator on the arrays of a file.

    IN.npz holds an array for each input, under the names that `kvkit describe OP` shows, or under others that
    --map translates. Attributes are 0-d arrays in IN.npz, or are given with --set, which takes precedence. No
    file is needed if no input is an array. IN.npz may be the results of another run, whose other arrays are
    ignored. It is changed only with --in-place. Give -o, --in-place or --check.

    \b
    Examples:
      kvkit run key_value_cache IN.npz -o OUT.npz --set quant_bit=8
      kvkit run key_value_cache IN.npz --map k=current_key --map v=current_value --check
      kvkit run alibi_slope -o OUT.npz --set num_heads=8
    """
    op = find_operator(operator)
    check_targets(op, source, output, in_place, only_check)
    names = parse_map(op, renamed)
    with contextlib.ExitStack() as stack:
        contents = npz.Contents({}, {})
        if in_place:
            stack.enter_context(npz.keep_for_changes(source))
        if source:

            def check_file(headers: dict[str, Any], metadata: dict[str, Any]) -> None:
                check_headers(op, source, mapped_arrays(source, headers, names), metadata, settings)

            contents = npz.read(source, check_file)
        ignored = ignored_arrays(op, contents.metadata)
        named_arrays = mapped_arrays(source, contents.arrays, names)
        arrays = {name: array for name, array in named_arrays.items() if name not in ignored}
        inputs, attributes = bind(op, source, arrays, settings)
        if only_check:
            Checks().call(definition(op.function()), inputs | attributes)
            results, seconds = (), None
        else:
            if threads is not None:
                import numba

                most = numba.config.NUMBA_NUM_THREADS
                if not 1 <= threads <= most:
                    raise KvkitError(f"--threads {threads}: expected 1 to {most}")
                numba.set_num_threads(threads)
            stack.enter_context(watch.watching({source: contents.mapped}))
            results, seconds = call_operator(op, op.function(PACKAGES[backend]), inputs, attributes)
        in_out = {array.name: inputs[array.name] for array in op.inputs if array.changes(inputs[array.name])}
        changed = present(in_out)
        names_of_results = op.returned(attributes) if not only_check else ()
        outputs = present(dict(zip(names_of_results, results, strict=True)))
        outputs = {name: array for name, array in outputs.items() if name not in changed}
        watch.refuse_changed(source, contents.mapped)
        if output and not only_check:
            npz.write(output, outputs | changed, {"operator": op.name, "attributes": attributes}, quiet)
        if in_place and not only_check:
            names_in_file = {name: array for array, name in names.items()}  # --map the other way round
            rewritten = {names_in_file.get(name, name): array for name, array in changed.items()}
            npz.write(source, contents.arrays | rewritten, contents.metadata, quiet)
    if quiet:
        return
    rows = array_rows(inputs, outputs, changed)
    if for_programs:
        call = {"operator": op.name, "attributes": attributes, "backend": backend, "seconds": seconds}
        show.as_json(call | {"arrays": rows})
        return
    table = show.table(op.name, "array", "role", "dtype", "shape", "size")
    for row in rows:
        texts = row["array"], row["role"], row["dtype"], show.shape(row["shape"]), show.size(row["bytes"])
        table.add_row(*texts)
    show.out(table)
    if only_check:
        click.echo(f"{op.name}: the call is legal; nothing was computed or written")
    else:
        click.echo(f"{op.name} on {backend}: {seconds:.3g} s (includes compiling or loading the kernels)")


def parse_map(op: Operator, renamed: Sequence[str]) -> dict[str, str]:
    """Return {array of the file: input or attribute} of `--map` texts."""
    legal, names = argument_names(op), dict[str, str]()
    for text in renamed:
        array, sign, name = text.partition("=")
        if not (array and sign and name):
            wanted = f"ARRAY=NAME, an array of the file and an input of {op.name}"
            raise KvkitError(f"--map {text}: expected {wanted}")
        if name not in legal:
            raise KvkitError(f"--map {text}: {op.name} takes no {name}{suggestion(name, legal)}")
        if array in names or name in names.values():
            raise KvkitError(f"--map {text}: {array if array in names else name} is mapped twice")
        names[array] = name
    return names


def mapped_arrays(path: Path | None, arrays: ArrayDict, names: dict[str, str]) -> ArrayDict:
    """Return the arrays of a file under the operator's names."""
    for array, name in names.items():
        if array not in arrays:
            hint = suggestion(array, arrays) or f"; there are {', '.join(map(brief, [*arrays][:SOME]))}"
            raise KvkitError(f"--map {array}={name}: {path or 'no IN.npz'} has no array {array}{hint}")
        if name in arrays and name not in names:
            raise KvkitError(f"--map {array}={name}: {path} has an array {name} too")
    return {names.get(name, name): array for name, array in arrays.items()}


def present(arrays: ArrayDict) -> ArrayDict:
    """Return the arrays that are not None."""
    return {name: array for name, array in arrays.items() if array is not None}


def check_targets(
    op: Operator, source: Path | None, output: Path | None, in_place: bool, only_check: bool
) -> None:
    """Refuse files that cannot be written, before any work is done."""
    changes = [array.name for array in op.inputs if array.inout]
    if in_place and not (source and changes):
        wrong = "there is no IN.npz" if changes else f"{op.name} changes none of its inputs"
        raise KvkitError(f"--in-place: {wrong}: give -o OUT.npz")
    if output is None and not in_place and not only_check:
        ways = "-o OUT.npz, --in-place or both" if changes else "-o OUT.npz"
        raise KvkitError(f"nothing to write: give {ways}")
    for option, path in (("IN.npz", source), ("-o", output)):
        if str(path) == "-":
            raise KvkitError(f"{option} -: .npz files are not read from or written to pipes: name a file")
    source_exists = source is not None and source.exists()
    if output is not None:
        if output.suffix not in ("", ".npz"):
            wrong = f"results are written as .npz, not as {output.suffix}"
            raise KvkitError(f"-o {output}: {wrong}: give -o {output.with_suffix('.npz')}")
        npz.check_target(output)
        if output.exists() and source_exists and output.samefile(source):
            raise KvkitError(f"{output}: -o names the input: give another name, or --in-place")
    if in_place and source_exists:
        npz.check_target(source)


def call_operator(
    op: Operator, function: Callable[..., Any], inputs: dict[str, Any], attributes: dict[str, Any]
) -> tuple[tuple[Any, ...], float]:
    """Call the operator; return (tuple of results, seconds)."""
    by_position = [inputs[array.name] for array in op.inputs if not array.keyword]
    by_keyword = {array.name: inputs[array.name] for array in op.inputs if array.keyword}
    begin = time.perf_counter()
    results = function(*by_position, **by_keyword, **attributes)
    seconds = time.perf_counter() - begin
    return results if isinstance(results, tuple) else (results,), seconds


def array_rows(inputs: ArrayDict, outputs: ArrayDict, changed: ArrayDict) -> list[dict[str, Any]]:
    """Return the name, role, dtype, shape and bytes of every array."""
    rows = [("in-out" if name in changed else "in", name, array) for name, array in inputs.items()]
    rows += [("out", *pair) for pair in outputs.items()]
    return [
        {"array": name, "role": role, "dtype": array.dtype.name, "shape": array.shape, "bytes": array.nbytes}
        for role, name, array in rows
        if array is not None
    ]
