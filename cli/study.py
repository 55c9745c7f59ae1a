"""`kvkit study`: measure what quantization and eviction cost a cache."""

from dataclasses import replace
from pathlib import Path

import click

from kvkit import tools
from kvkit.errors import KvkitError, argument_error, brief
from kvkit.files.paths import check_source
from kvkit.tools.contents import by_patterns
from kvkit.tools.model_facts import with_model
from kvkit.tools.studies import plots, report
from kvkit.tools.studies.schemes import DEFAULT, MIXED
from kvkit.tools.studies.study import check_threshold
from kvkit_cli import clusters, complete, show, tool
from kvkit_cli.edit import parse_rope


class Share(click.ParamType):
    """Parse a share such as 5% or 0.05."""

    name = "share"

    def convert(self, value, param, ctx):
        """Return the share as a number."""
        number, percent, rest = str(value).partition("%")
        try:
            share = float(number) / (100 if percent else 1)
        except ValueError:
            share = 1.0
        if rest or not 0 < share < 1:
            raise argument_error("--error", "a share below 1, as 5% or 0.05", brief(value))
        return share


@click.command(cls=tool.ToolVerb, words=dict.fromkeys(("format", "scheme", "rotation"), "--schemes"))
@click.argument("source", metavar="[FILE]", type=tool.PATH, required=False)
@click.option(
    "--model", metavar="NAME",
    help="Study a model that reads --text: a folder, GGUF file or name. With FILE: its GGUF or config.json.",
)  # fmt: skip
@click.option("--text", type=click.Path(path_type=Path), help="A text file for the model to read.")
@click.option(
    "--tokens", type=tool.TokenCount(), default=512, show_default=True, metavar="N",
    help="Tokens of the text to read: 4k is 4,096.",
)  # fmt: skip
@click.option(
    "--schemes", show_default=DEFAULT, metavar="NAME,...", shell_complete=complete.formats,
    help="Schemes to compare; with --evict, each with each policy. Of the default, those that fit.",
)  # fmt: skip
@click.option(
    "--evict", metavar="POLICY,...",
    help="Policies SCORER@SHARE[+SCHEME] and schemes: snapkv@0.5,int4:g32,snapkv@0.5+int4:g32.",
)  # fmt: skip
@click.option("--budget", default="uniform", show_default=True, metavar="NAME", help="Or ada, pyramid.")
@click.option(
    "--judge", type=int, metavar="N", help="Measure errors with the last N queries.  [default: a quarter]"
)
@click.option("--rope", metavar="CONFIG|NAME=N,...", help="The rotary embedding of keys, as in kvkit edit.")
@click.option(
    "--bits", type=float, metavar="N",
    help="Find the formats of layers, keys and values that lose least at so many bits a number.",
)  # fmt: skip
@click.option(
    "--error", type=Share(), metavar="N%",
    help="Find those with the fewest bits, for at most this error of attention's outputs.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path),
    help="Folder for report.html, Markdown, JSON, plots. With --bits or --error also mix.json, which a "
    "QuantizedCache takes; FILE.json is that file alone.",
)  # fmt: skip
@click.option(
    "--threshold", type=float, default=0.1, show_default=True,
    help="Advise the smallest scheme whose error is below this in every head. The number is arbitrary.",
)  # fmt: skip
@click.option(
    "--write-scales", "scales", type=click.Path(path_type=Path), metavar="FILE",
    help="Only calibrate scales of 8-bit floats, and write them as .safetensors that vLLM loads.",
)  # fmt: skip
@click.option("--per", default="tensor", show_default=True, help="What has a scale: tensor, head, layer.")
@tool.rotation
@tool.layout()
@tool.names
@click.option(
    "--queries", metavar="PATTERN",
    help="The names of arrays of queries. By default, with --keys K_{l}, those of Q_{l}.",
)  # fmt: skip
@tool.sizes()
@clusters.on_cluster
@tool.json_option
@click.pass_context
def study(
    ctx, source, model, text, tokens, schemes, evict, budget, judge, rope, bits, error, output, threshold,
    scales, per, rotation, layout, keys, values, fused, queries, sizes, dask, as_json,
):  # fmt: skip
    """Measure what quantization and eviction cost a cache, head by head.

    A scheme is a format with options (int4:g32, kivi2, mxfp4:ceil), perhaps with a rotation after a plus
    (int4:g32+hadamard), or a class in a Python file that encodes and decodes (mine.py:Scheme). With --model
    and --text, a model of transformers reads the text and gives keys, values and queries. It reads the text
    again with each scheme, to measure perplexity and how often its most likely token stays the same.

    A policy is a scorer of kvkit.eviction, perhaps with options, the share of tokens that it keeps, and
    perhaps a scheme: snapkv(window=32)@0.25+int4:g32. Errors are those of the last queries, which scorers do
    not see. The scorers random and oracle (which sees them) are added.

    --bits and --error find the best mix of formats, which may differ by layer, and between keys and values:
    "K=int8:g32@0,1/int4:g32,V=int4:g32". The queries that judge are held back from the search.

    \b
    Examples:
      kvkit study cache.safetensors -o report
      kvkit study pool.npy --layout "b n h (kv c)" --sizes c=64 --schemes "fp8,int4:g32"
      kvkit study chat.npz --evict "snapkv@0.5,int4:g32,snapkv@0.5+int4:g32" -o report
      kvkit study chat.npz --bits 4.5 -o mix.json
      kvkit study chat.npz --write-scales scales.safetensors --per head
      kvkit study chat.npz --evict "none,keydiff@0.5,knorm@0.5" --schemes "float16,int4:g32" --budget ada
      kvkit study --model HuggingFaceTB/SmolLM2-135M --text book.txt -o report
    """
    only_mix = output is not None and output.suffix == ".json"
    if only_mix and bits is error is None:
        raise argument_error("--output", "a folder, or --bits or --error for a mix", brief(output))
    if output and not only_mix:
        report.check_folder(output)
        if lacking := plots.missing():
            click.echo(f"kvkit: {lacking}", err=True)
    check_threshold(threshold)
    policies = {"evict": evict, "budget": budget, "judge": judge, "bits": bits, "error": error}
    if source is not None:
        source = with_model(by_patterns(source, keys, values, fused, queries), model)
    elif model is None:
        raise argument_error("study", "a FILE or --model", "none")
    if scales:
        if source is None:
            raise argument_error("--write-scales", "a FILE of keys and values", "none")
        with show.task_bar("layers") as progress:
            tools.write_scales(
                source, scales, per, layout=layout, sizes=sizes, rotation=rotation, progress=progress
            )
        click.echo(scales, err=True)
        return
    if source is not None:
        with clusters.mapper(dask) as mapper, show.task_bar("layers", quiet=dask is not None) as progress:
            found = tools.study(
                source, schemes, layout=layout, sizes=sizes, rotation=rotation, progress=progress,
                mapper=mapper, threshold=threshold,
                rope=None if rope is None else parse_rope(rope), **policies,
            )  # fmt: skip
    else:
        if text is None or dask or layout or sizes or rope or rotation:
            wanted = "--text, and no --layout, --sizes, --dask, --rope, --rotation"
            raise argument_error("--model", wanted, "other options")
        schemes = (DEFAULT if bits is error is None else MIXED) if schemes is evict is None else schemes
        found = replace(study_model(model, text, tokens, schemes, policies), threshold=threshold)
    if as_json:
        show.as_json(found.to_dict())
    else:
        show.text(ctx.command.in_shell(str(found)))
    if output:
        for path in [found.save_mix(output)] if only_mix else found.save(output):
            click.echo(path, err=True)


def study_model(name, text, tokens, schemes, policies):
    """Study a model of transformers that reads a text file."""
    check_source(text)
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        from kvkit.integrations.transformers import study
    except ImportError:
        raise KvkitError("--model: needs transformers: pip install '.[transformers]' in a clone") from None
    path = Path(name)
    where, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (name, {})
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argument_error("--text", "a text file", f"{brief(text)} ({error})") from None
    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        model = AutoModelForCausalLM.from_pretrained(where, **options).eval()
    except (OSError, ValueError) as error:
        wanted = "a model that transformers loads"
        raise argument_error("--model", wanted, f"{brief(name)} ({error})") from None
    with show.task_bar("readings") as progress:
        return study(model, tokenizer(words).input_ids[:tokens], schemes, progress=progress, **policies)
