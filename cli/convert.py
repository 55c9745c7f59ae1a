"""`kvkit convert`: a cache from layout to layout, from file to file."""

import json
from pathlib import Path

import click

from kvkit import files, tools
from kvkit.errors import KvkitError
from kvkit.files.paths import check_target
from kvkit_cli import show, watch
from kvkit_cli.pairs import sizes_of

PATH = click.Path(path_type=Path, readable=False)  # files say what is wrong with a path


@click.command()
@click.argument("source", metavar="IN", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.option("--from", "before", metavar="NAME", help="The layout of IN, if it does not say its own.")
@click.option("--to", "after", metavar="NAME", required=True, help="The layout of OUT: see kvkit layouts.")
@click.option("--sizes", metavar="AXIS=N,...", help="Lengths of axes that shapes do not tell: h=8.")
@click.option("--page-size", metavar="N|longest", help="New pages for all sequences.")
@click.option("--tables", metavar="FILE", type=PATH, help="Page tables, if they are not in IN.")
@click.option("--verify", is_flag=True, help="Read the result back and compare it with IN.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--quiet", is_flag=True, help="Print nothing.")
def convert(source, target, before, after, sizes, page_size, tables, verify, as_json, quiet):
    """Move a cache from layout to layout, bit for bit.

    IN is any file that `kvkit inspect` reads; its cache is the array cache, or arrays cache.0, cache.0.1 and
    so on where its layout has lists. OUT is a .npz, .npy or .safetensors file, whole or untouched. Rows stay
    where they are, unless --page-size makes new pages of the sequences that tables tell (block_tables and
    context_lens, or kv_indptr, kv_indices and kv_last_page_len, or cells of llama.cpp; without tables a
    sequence for each b); one page for each if it is longest.

    \b
    Examples:
      kvkit convert prompt.safetensors pool.npz --to vllm-lbnhc --page-size 16
      kvkit convert pool.npz old.npz --from vllm-lbnhc --to vllm-flash-attention --verify
    """
    check_target(target)
    if target.suffix not in files.WRITTEN:
        raise KvkitError(f"{target}: a cache is written as {', '.join(files.WRITTEN)}: give such a name")
    if source.exists() and target.exists() and target.samefile(source):
        raise KvkitError(f"{target}: OUT is IN: give another name")
    contents = files.read(source)
    total = sum(array.nbytes for array in contents.arrays.values())
    with watch.watched(source, contents.mapped):
        with show.progress(f"moving {source.name}", total, quiet) as advance:
            done = tools.convert(
                contents,
                None,
                from_layout=before,
                to_layout=after,
                sizes=sizes_of(sizes),
                page_size=pages_of(page_size),
                tables_from=tables,
                verify=verify,
                progress=stepwise(advance),
            )
        watch.check(source, contents.mapped)
        with show.progress(f"writing {target.name}", done.bytes, quiet) as advance:
            files.write(target, done.arrays, done.description, advance=advance)
    if not quiet:
        click.echo(json.dumps(done.to_dict(), indent=2) if as_json else str(done))


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
