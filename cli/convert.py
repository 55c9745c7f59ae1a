"""`kvkit convert`: a cache from layout to layout, from file to file."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from kvkit import files, tools
from kvkit.errors import KvkitError
from kvkit.files.paths import check_target
from kvkit_cli import clusters, show, watch
from kvkit_cli.pairs import sizes_of

PATH = click.Path(path_type=Path, readable=False)  # files say what is wrong with a path


@click.command()
@click.argument("sources", metavar="IN...", type=PATH, nargs=-1, required=True)
@click.argument("target", metavar="OUT", type=PATH)
@click.option("--from", "before", metavar="NAME", help="The layout of IN, if it does not say its own.")
@click.option("--to", "after", metavar="NAME", help="The layout of OUT: see kvkit layouts.")
@click.option("--format", "form", metavar="NAME", help="Or how OUT holds numbers: float16, q8_0, int4:g32...")
@click.option("--from-format", "coded", metavar="NAME", help="What codes in IN are, if it does not say so.")
@click.option("--sizes", metavar="AXIS=N,...", help="Lengths of axes that shapes do not tell: h=8.")
@click.option("--page-size", metavar="N|longest", help="New pages for all sequences.")
@click.option("--tables", metavar="FILE", type=PATH, help="Page tables, if they are not in IN.")
@click.option("--verify", is_flag=True, help="Read the result back and compare it with IN.")
@clusters.on_cluster
@click.option("--json", "as_json", is_flag=True, help="Print JSON: of several files, by their names.")
@click.option("--quiet", is_flag=True, help="Print nothing.")
def convert(
    sources, target, before, after, form, coded, sizes, page_size, tables, verify, dask, as_json, quiet
):
    """Move a cache to another layout, bit for bit, or to another format.

    IN is any file that `kvkit inspect` reads; its cache is the array cache, or arrays cache.0, cache.0.1 and
    so on where its layout has lists. OUT is a .npz, .npy or .safetensors file, whole or untouched; of several
    IN it is a folder that exists. Rows stay where they are, unless --page-size makes new pages of the
    sequences that tables tell (block_tables and context_lens, or kv_indptr, kv_indices and kv_last_page_len,
    or cells of llama.cpp; without tables a sequence for each b); one page for each if it is longest.

    With --format floats, codes that a file names (a state of llama.cpp, a saved cache) or --from-format does
    become what a format of kvkit holds, layer by layer, as "l kv | b n h c".

    \b
    Examples:
      kvkit convert prompt.safetensors pool.npz --to vllm-lbnhc --page-size 16
      kvkit convert pool.npz old.npz --from vllm-lbnhc --to vllm-flash-attention --verify
      kvkit convert slot.bin cache.safetensors --format float16 --sizes h=8
      kvkit convert dumps/*.npz converted --to hf --dask local
    """
    targets = targets_of(sources, target)
    options = {"from_layout": before, "to_layout": after, "sizes": sizes_of(sizes), "verify": verify}
    options |= {"page_size": pages_of(page_size), "tables_from": tables}
    options |= {"format": form, "from_format": coded}
    with clusters.mapper(dask) as mapper:
        work = partial(one_file, options=options, quiet=quiet, alone=dask is None)
        said = {}
        for source, done in zip(sources, mapper(work, sources, targets), strict=True):
            said[str(source)] = done.to_dict()
            if not quiet and not as_json:
                click.echo(f"{source}: {done}" if len(sources) > 1 else str(done))
    if as_json and not quiet:
        click.echo(json.dumps(said if len(sources) > 1 else said[str(sources[0])], indent=2))


def targets_of(sources, target):
    """Where each file goes; all names are looked at before one is written."""
    targets = [target]
    if len(sources) > 1 or target.is_dir():
        if not target.is_dir():
            raise KvkitError(f"{target}: no folder: of several IN, OUT is a folder that exists")
        targets = [
            target / (source.name if source.suffix in files.WRITTEN else f"{source.name}.npz")
            for source in sources
        ]
    for source, one in zip(sources, targets, strict=True):
        check_target(one)
        if one.suffix not in files.WRITTEN:
            raise KvkitError(f"{one}: a cache is written as {', '.join(files.WRITTEN)}: give such a name")
        if source.exists() and one.exists() and one.samefile(source):
            raise KvkitError(f"{one}: OUT is IN: give another name")
        if targets.count(one) > 1:
            raise KvkitError(f"{one}: two IN have this name: convert them one by one")
    return targets


def one_file(source, target, options, quiet, alone):
    """Convert a file; `alone` in this process, which says so, and watches what it reads."""
    contents = files.read(source)
    total = sum(array.nbytes for array in contents.arrays.values())
    quiet = quiet or not alone
    if options["format"] is not None:
        with clusters.naming(source), show.progress(f"coding {source.name}", total, quiet) as advance:
            done = tools.convert(source, target, **options, progress=stepwise(advance))
        return replace(done, arrays={})
    with clusters.naming(source), watch.watched(source, contents.mapped if alone else None):
        with show.progress(f"moving {source.name}", total, quiet) as advance:
            done = tools.convert(contents, None, **options, progress=stepwise(advance))
        watch.check(source, contents.mapped)
        with show.progress(f"writing {target.name}", done.bytes, quiet) as advance:
            files.write(target, done.arrays, done.description, advance=advance)
    return replace(done, arrays={})


def pages_of(text):
    if text is None or text == "longest":
        return text
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text[:10]) < 2**31:
        raise KvkitError(f"--page-size {text}: expected a positive number, or longest")
    return int(text)


def stepwise(advance):
    """What hears of all bytes done, as what hears of each step's."""
    heard = [0]

    def progress(done, total):
        advance(done - heard[0])
        heard[0] = done

    return progress
