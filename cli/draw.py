"""`kvkit draw`: draw a layout, or the rows of a saved cache by sequence."""

from pathlib import Path

import click

from kvkit.errors import KvkitError
from kvkit.files.paths import check_target, name_in_errors
from kvkit.files.replace import replacing
from kvkit.layouts import NAMED
from kvkit.layouts.named import ALIASES
from kvkit.tools import draw as drawing
from kvkit.tools.source import CacheSource
from kvkit_cli import complete, show, tool
from kvkit_cli.layouts import known_layout

SVG = ".svg"


@click.command(cls=tool.ToolVerb)
@click.argument("what", metavar="FILE|LAYOUT", shell_complete=complete.files_and_layouts)
@click.option("-o", "--output", metavar="OUT.svg", type=click.Path(path_type=Path), help="Write a picture.")
@tool.sizes("Lengths of a layout's axes. For a file, n is the rows of a page.")
def draw(what, output, sizes):
    """Draw a layout, or which sequence each row of a saved cache belongs to.

    If the file has page tables (block_tables and context_lens, kv_indptr and so on, cells of llama.cpp), each
    row is drawn as one sequence's, shared, free or stale. Otherwise the layout is drawn.

    \b
    Examples:
      kvkit draw vllm-lbnhc -o layout.svg
      kvkit draw pool.npz
    """
    if output is not None:
        if output.suffix != SVG:
            raise KvkitError(f"-o {output}: pictures are written as {SVG}: give -o {output.with_suffix(SVG)}")
        check_target(output)
    kind = "svg" if output else "text"
    if Path(what).exists():
        picture = draw_file(what, sizes, kind)
    elif name := known_layout(what):
        picture = drawing.layout(name, sizes=sizes, kind=kind)
    else:
        hint = show.suggestion(what, [*NAMED, *ALIASES])
        raise KvkitError(f"{what}: no such file, and no layout{hint}: see kvkit layouts")
    if output is None:
        show.text(picture)
        return
    with name_in_errors(output), replacing(output) as file:
        file.write(picture.encode())


def draw_file(path, sizes, kind):
    """Draw the rows of a file's cache by its page tables, or its layout if it has none."""
    source = CacheSource(path)
    found = source.block_tables(sizes.get("n"))
    if found is not None:
        rows, filled = filled_rows(source, found[1])
        blocks, page_size = source.integer("num_blocks"), source.page_size(sizes.get("n"))
        if rows is None and blocks and page_size:
            rows = blocks * page_size
        across = source.paged.get("arguments", {}).get("page_size")  # where a page of the table is a row
        return drawing.cells(found[1], rows, page_size=across, filled=filled, kind=kind)
    if source.layout is None:
        raise KvkitError(
            f"{path}: it has no tables and names no layout: give one, as in kvkit draw vllm-lbnhc"
        )
    return drawing.layout(source.layout, sizes=sizes, kind=kind)


def filled_rows(source, pages):
    """Return (number of rows, which rows are not zero); (None, None) without a layout."""
    kv, _ = source.one_head_view()
    if kv is None or isinstance(kv.keys[0], tuple) or kv.keys[0].shape[1] % pages.page_size:
        return None, None
    keys = kv.keys[0]  # [blocks, rows, heads, content]
    return keys.shape[0] * keys.shape[1], (keys != 0).any((-2, -1)).ravel()
