"""`kvkit convert`: move a cache to another layout, format or file."""

import json
from dataclasses import replace
from functools import partial

import click

from kvkit import files, tools
from kvkit.errors import KvkitError
from kvkit.files.llama_writing import SUFFIX
from kvkit.files.paths import check_target
from kvkit.tools.contents import by_patterns
from kvkit.tools.conversion import write_conversion
from kvkit.tools.model_facts import key_heads, with_model
from kvkit.tools.quantities import tokens_in
from kvkit.tools.source import CacheSource
from kvkit_cli import clusters, complete, show, tool, watch


@click.command(cls=tool.ToolVerb)
@click.argument("sources", metavar="IN...", type=tool.PATH, nargs=-1, required=True)
@click.argument("target", metavar="OUT", type=tool.PATH)
@click.option(
    "--layout", "--from", "from_layout", metavar="NAME", shell_complete=complete.layouts,
    help="The layout of IN, if the file does not name it.",
)  # fmt: skip
@tool.layout("--to", "to_layout", "The layout of OUT: see kvkit list layouts.")
@click.option(
    "--format", metavar="NAME",
    help="The format of the numbers in OUT, instead of --to: float16, q8_0, int4:g32...",
    shell_complete=complete.formats,
)  # fmt: skip
@click.option(
    "--from-format", metavar="NAME", help="The format of codes in IN, if the file does not name it.",
    shell_complete=complete.formats,
)  # fmt: skip
@tool.names
@tool.sizes()
@click.option("--page-size", metavar="N|longest", help="Copy all sequences into new pages of N tokens.")
@click.option(
    "--tables", "tables_from", metavar="FILE", type=tool.PATH, help="Page tables, if they are not in IN."
)
@tool.model
@tool.rotation
@click.option(
    "--rope-pairs", metavar="halves|neighbours",
    help="Pair elements of keys in OUT for this rotary embedding.",
)  # fmt: skip
@click.option(
    "--from-rope-pairs", metavar="halves|neighbours", help="The pairs of IN, if the file does not name them."
)
@click.option(
    "--states", metavar="KV|VK[:tiled]", help="The order of recurrent states in OUT; VK:tiled is llama.cpp's."
)
@click.option(
    "--from-states", metavar="KV|VK[:tiled]", help="The order of states in IN, which no shape tells."
)
@click.option("--state-heads", metavar="KEY/VALUE", help="Heads of states, if they are tiled: 16/32.")
@click.option("--layers", metavar="N,N:N,...", help="The layers to take, as 0,2,4:.")
@click.option("--compress", metavar="zstd", help="Compress the arrays of a .npz file, without loss.")
@click.option("--verify", is_flag=True, help="Read the result back and compare it with IN.")
@click.option(
    "--axis", metavar="h|n", help="Join the heads, or tokens, of several IN, in order, into one OUT."
)
@click.option(
    "--ranks", type=int, metavar="N", help="Cut IN into the caches of N ranks, files in the folder OUT."
)
@clusters.on_cluster
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; for several files, one object by file name."
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
def convert(
    sources, target, page_size, axis, ranks, dask, as_json, quiet, keys, values, fused, model, **options
):
    """Move a cache to another layout, bit for bit, or to another format.

    IN is any file that `kvkit inspect` reads. Its cache is the array cache, the arrays cache.0, cache.0.1
    and so on if the layout has lists, or pairs such as key_cache and value_cache, key and value. OUT is a
    .npz, .npy or .safetensors file, or a .bin file, which is a sequence state of llama.cpp; on an error it
    does not change. With several IN, OUT is an existing folder; or, with --axis h, one file with the heads of
    all tensor-parallel ranks, each once. --ranks does the inverse: OUT is a folder for rank0.npz and so on,
    or a name, as pool.npz for pool.rank0.npz.

    Rows do not move, except with --page-size: it copies each sequence of the page tables (block_tables and
    context_lens; kv_indptr, kv_indices and kv_last_page_len; cells of llama.cpp), or each b if there are no
    tables, into new pages. --page-size longest makes one page of each sequence.

    --format converts the numbers and writes them in the layout "l kv | b n h c". The numbers of IN are
    floats, or codes whose format --from-format names, if the file does not.

    \b
    Examples:
      kvkit convert prompt.safetensors pool.npz --to vllm-lbnhc --page-size 16
      kvkit convert pool.npz small.npz --to vllm-lbnhc --compress zstd
      kvkit convert pool.npz old.npz --from vllm-lbnhc --to vllm-flash-attention --verify
      kvkit convert slot.bin cache.safetensors --format float16 --rotation llama.cpp --model model.gguf
      kvkit convert slot.bin cache.npz --to hf --page-size longest --model model.gguf --rope-pairs halves
      kvkit convert dumps/*.npz converted --to hf --dask local
      kvkit convert rank0.npz rank1.npz whole.npz --axis h --from vllm-lbnhc --to hf
      kvkit convert whole.npz folder --ranks 8
      kvkit convert dump.npz out.npz --states KV --from-states VK
    """
    if axis is not None and (dask is not None or len(set(sources)) < len(sources)):
        raise KvkitError("--axis: expected IN that differ, and no --dask, as they make one OUT")
    options["page_size"] = page_size
    if page_size not in (None, "longest"):
        options["page_size"] = tokens_in("--page-size", page_size)
        if options["page_size"] >= 2**31:
            wanted = f"less than {2**31} tokens, or longest"
            raise KvkitError(f"--page-size {page_size}: expected {wanted}")
    if ranks is not None:
        if axis is not None or dask is not None or len(sources) > 1:
            raise KvkitError("--ranks: expected one IN, and neither --axis nor --dask")
        results = cut_file(sources[0], target, ranks, (keys, values, fused), model, options)
        if as_json and not quiet:
            click.echo(json.dumps({name: done.to_dict() for name, done in results.items()}, indent=2))
        for name, done in results.items() if not (as_json or quiet) else ():
            tool.show_text(f"{name}: {done}")
        return
    inputs = [sources] if axis is not None else [(source,) for source in sources]
    targets = targets_of(inputs, target)
    with clusters.mapper(dask) as mapper:
        is_here = dask is None
        about = {
            "keys": keys,
            "values": values,
            "fused": fused,
            "model": model,
            "axis": axis,
            "options": options,
        }
        work = partial(convert_files, **about, quiet=quiet, is_here=is_here)
        results = {}
        for paths, done in zip(inputs, mapper(work, inputs, targets), strict=True):
            results[str(paths[0])] = done.to_dict()
            if not quiet and not as_json:
                tool.show_text(f"{paths[0]}: {done}" if len(inputs) > 1 else done)
    if as_json and not quiet:
        click.echo(json.dumps(results if len(inputs) > 1 else results[str(sources[0])], indent=2))


def targets_of(inputs, target):
    """Return the path to write for each group of inputs; all are checked before one is written."""
    targets = [target]
    if len(inputs) > 1 or (target.is_dir() and len(inputs[0]) == 1):
        if not target.is_dir():
            raise KvkitError(f"{target}: no folder: with several IN, OUT is a folder that exists")
        names = [path.name if path.suffix in files.WRITTEN else f"{path.name}.npz" for [path] in inputs]
        targets = [target / name for name in names]
    for paths, path in zip(inputs, targets, strict=True):
        check_target(path)
        if path.suffix not in (*files.WRITTEN, SUFFIX):
            raise KvkitError(f"{path}: a cache is written as {', '.join(files.WRITTEN)}: give such a name")
        if path.exists() and any(source.exists() and path.samefile(source) for source in paths):
            raise KvkitError(f"{path}: OUT is IN: give another name")
        if targets.count(path) > 1:
            raise KvkitError(f"{path}: two IN have this name: convert them one by one")
    return targets


def convert_files(paths, target, keys, values, fused, model, axis, options, quiet, is_here):
    """Convert one file, or several that are joined, to `target`.

    A task that runs in this process, `is_here`, shows progress and watches for changes of its files.
    """
    parts = {path: files.read(path) for path in paths}
    mapped = {path: contents.mapped for path, contents in parts.items()}
    total = sum(array.nbytes for contents in parts.values() for array in contents.arrays.values())
    first, quiet = paths[0], quiet or not is_here
    coding = options["format"] is not None  # then layer by layer, and the result is written as it comes
    with clusters.naming(first), watch.watching(mapped if is_here else {}):
        sources = {str(path): by_patterns(parts[path], keys, values, fused) for path in paths}
        source = sources[str(first)]
        if axis is not None:
            about = {"layout": options["from_layout"], "sizes": options["sizes"]}
            source = tools.join(sources, axis=axis, num_kv_heads=key_heads(model), **about)
            options = options | {"from_layout": None, "sizes": None}
        source = with_model(source, model)
        with show.progress(f"{'coding' if coding else 'moving'} {first.name}", total, quiet) as advance:
            done = tools.convert(source, target if coding else None, **options, progress=in_steps(advance))
        if not coding:
            for path, status in mapped.items():
                watch.refuse_changed(path, status)
            with show.progress(f"writing {target.name}", done.bytes, quiet) as advance:
                done = write_conversion(target, done, advance, options["compress"])
    return replace(done, arrays={})


def cut_file(path, target, ranks, patterns, model, options):
    """Cut a file into the caches of ranks; return {file of a rank: its conversion}."""
    with clusters.naming(path):
        source = with_model(by_patterns(path, *patterns), model)
        about = {"layout": options["from_layout"], "sizes": options["sizes"]}
        parts = tools.cut(source, ranks, **about)
        if options["to_layout"] is None and options["format"] is None:
            options["to_layout"] = str(CacheSource(source, *about.values()).layout)
    options |= {"from_layout": None, "sizes": None}
    if target.suffix in files.WRITTEN:
        targets = [target.with_suffix(f".rank{rank}{target.suffix}") for rank in range(ranks)]
    else:
        target.mkdir(exist_ok=True)
        targets = [target / f"rank{rank}.npz" for rank in range(ranks)]
    for each in targets:
        check_target(each)
    return {
        str(each): tools.convert(part, each, **options) for each, part in zip(targets, parts, strict=True)
    }


def in_steps(advance):
    """Return a callback (bytes done, all bytes) that calls `advance` with the bytes since its last call."""
    last = 0

    def progress(done, total):
        nonlocal last
        advance(done - last)
        last = done

    return progress
