"""`kvkit study`: what schemes of quantization cost a cache."""

import json
from pathlib import Path

import click

from kvkit import tools
from kvkit_cli import clusters, show
from kvkit_cli.pairs import sizes_of

SCHEMES = "fp8,int8:g8,int4:g32,int4:g32+hadamard,q8_0,q4_0"


@click.command()
@click.argument("file", type=click.Path(path_type=Path, readable=False))
@click.option("--schemes", default=SCHEMES, show_default=True, metavar="NAME,...", help="What is compared.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Folder for report.html, Markdown, JSON, plots."
)
@click.option("--layout", metavar="NAME", help="How the cache lies, if the file does not say so.")
@click.option("--sizes", metavar="AXIS=N,...", help="Lengths of axes that shapes do not tell: h=8.")
@clusters.on_cluster
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def study(file, schemes, output, layout, sizes, dask, as_json):
    """Say what schemes of quantization cost a cache, head by head.

    A scheme is a format with options (int4:g32, kivi2, mxfp4:ceil), perhaps a rotation behind a plus
    (int4:g32+hadamard), or a class of a Python file that encodes and decodes (mine.py:Scheme).

    \b
    Examples:
      kvkit study cache.safetensors -o report
      kvkit study pool.npy --layout vllm-lbnhc --sizes c=64 --schemes "fp8,int4:g32"
    """
    options = {"layout": layout, "sizes": sizes_of(sizes)}
    with clusters.mapper(dask) as mapper, show.counted("layers", quiet=dask is not None) as progress:
        found = tools.study(file, schemes, **options, progress=progress, mapper=mapper)
    if output:
        for path in found.save(output):
            click.echo(path, err=True)
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else str(found))
