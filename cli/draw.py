"""`kvkit draw`: draw a layout, or the rows of a saved cache by sequence."""

from pathlib import Path

import click

from kvkit.errors import KvkitError, argument_error
from kvkit.files.paths import check_target, name_in_errors
from kvkit.files.replace import replacing
from kvkit.layouts import NAMED, parse
from kvkit.layouts.named import ALIASES
from kvkit.tools import draw as drawing
from kvkit.tools.contents import by_patterns
from kvkit.tools.names import BESIDE_TABLE
from kvkit.tools.saved_pages import published_rows
from kvkit.tools.source import CacheSource, check_pages_in_pool
from kvkit_cli import complete, listing, show, tool

SVG = ".svg"
MARKS = {
    "A": "checked against the engine's own index code",
    "S": "read in the engine's source",
    "T": "from a thread or documentation",
    "K": "common knowledge",
}


@click.command(cls=tool.ToolVerb, words={"source": "FILE"})
@click.argument("what", metavar="FILE|LAYOUT", shell_complete=complete.files_and_layouts)
@click.option("-o", "--output", metavar="OUT.svg", type=click.Path(path_type=Path), help="Write a picture.")
@tool.layout(about="The layout of FILE's cache, if it does not name one.")
@tool.sizes("Lengths of a layout's axes. For a file, n is the rows of a page.")
@tool.names
@click.option("--json", "as_json", is_flag=True, help="Print the facts about a layout as JSON.")
@click.pass_context
def draw(ctx, what, output, layout, sizes, keys, values, fused, as_json):
    """Draw a layout, or the rows of a saved cache by sequence.

    LAYOUT is one that `kvkit list layouts` prints, a name that vLLM or LMCache use, or a line:
    `l | b kv n h c`.

    If the file has page tables (block_tables and context_lens, kv_indptr and so on, cells of llama.cpp), each
    row is drawn by the sequence that uses it, or as shared, free, stale, or published (kept by a PagedCache
    for sequences with the same beginning). Otherwise the layout is drawn, in small sizes.

    \b
    Examples:
      kvkit draw vllm-lbnhc -o layout.svg
      kvkit draw pool.npz
    """
    if output is not None:
        if output.suffix != SVG:
            raise KvkitError(f"-o {output}: pictures are written as {SVG}: give -o {output.with_suffix(SVG)}")
        check_target(output)
    kind, name = "svg" if output else "text", ALIASES.get(what, what)
    is_layout = layout is None and (name in NAMED or "|" in name or " " in name)
    if not Path(what).exists() and is_layout:
        if as_json:
            known = {each["name"]: each for each in listing.layouts()}
            show.as_json(known.get(name) or {"line": str(parse(name))})
            return
        picture, notes = drawing.layout(name, sizes=sizes, kind=kind), ()
    else:
        if not Path(what).exists() and not Path(what).suffix and layout is None:
            hint = show.suggestion(what, [*NAMED, *ALIASES])
            raise KvkitError(f"{what}: no such file, and no layout{hint}: see kvkit list layouts")
        if as_json:
            raise KvkitError(f"--json: expected a layout beside it, got the file {what}")
        picture, notes = draw_file(what, (keys, values, fused), layout, sizes, kind)
    if output is None:
        show.text(picture)
        if is_layout and (about := NAMED.get(name)):
            show.text("\n" + ", ".join(filter(None, (about.engine, about.versions))))
            show.text(f"{about.note}\n{about.source} ({MARKS[about.mark]})".strip())
            if about.aliases:
                show.text(f"also called {', '.join(about.aliases)}")
    else:
        with name_in_errors(output), replacing(output) as file:
            file.write(picture.encode())
    for note in notes:
        show.text(f"note: {ctx.command.in_shell(note)}")


def draw_file(path, patterns, layout, sizes, kind):
    """Return (drawing, notes) of the rows of a file's cache by its page tables, or of its layout."""
    source = CacheSource(by_patterns(path, *patterns), layout)
    if source.layout is not None and source.cache is not None:
        source.check_levels()
    convention, pages = source.block_tables(sizes.get("n")) or ("", None)
    if pages is None:
        check_parts(source)
        if source.orders or (source.arrays and source.cache is None and not source.separate):
            source.require_cache()
        if source.layout is None:
            raise argument_error("layout", f"a layout, as {path} has no tables and names none", "None")
        notes = (
            "the file has no page tables (block_tables and context_lens): this is its layout, in small sizes",
        )
        return drawing.layout(source.layout, sizes=sizes, kind=kind), (*notes, *notes_of(source))
    rows, filled = filled_rows(source, pages)
    blocks, page_size = source.integer("num_blocks"), source.page_size(sizes.get("n"))
    if rows is None and blocks and page_size:
        rows = blocks * page_size
    notes = notes_of(source)
    if rows is None:
        unknown = "neither a layout nor num_blocks gives the number of rows"
        notes = (f"drawn up to the last row in use, as {unknown}", *notes)
    else:
        check_pages_in_pool(convention, pages, rows)
    cache_page_size = source.paged.get("arguments", {}).get("page_size")  # a PagedCache's table lists rows
    published = published_rows(source.arrays, source.paged) if source.paged else None
    options = {"page_size": cache_page_size, "filled": filled, "published": published}
    return drawing.cells(pages, rows, **options, kind=kind), notes


def notes_of(source):
    """Return notes on how a file is read, and on arrays that are not drawn."""
    return *source.guess, *source.unread()


def check_parts(source):
    """Refuse an incomplete page table, and one with pages of unknown size."""
    name = next((name for name in BESIDE_TABLE if name in source.arrays), None)
    if name is None:
        return
    for other in BESIDE_TABLE[name]:
        if other not in source.arrays:
            raise argument_error(other, f"an array, beside {name}", "None")
    if source.cache is None and not source.separate and any(x.ndim > 2 for x in source.arrays.values()):
        raise source.no_cache()
    wanted = f"the layout of the cache, or --sizes n=N, the rows of a page, as {name} is given"
    raise argument_error("layout", wanted, "None")


def filled_rows(source, pages):
    """Return (number of rows, bool [rows] of rows that are not zero); (None, None) without a layout."""
    kv, _ = source.one_head_view()
    if kv is None or isinstance(kv.keys[0], tuple) or kv.keys[0].shape[1] % pages.page_size:
        return None, None
    keys = kv.keys[0]  # [blocks, rows, heads, content]
    return keys.shape[0] * keys.shape[1], (keys != 0).any((-2, -1)).ravel()
