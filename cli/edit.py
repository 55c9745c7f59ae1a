"""`kvkit edit`: remove, keep, move and add tokens of a saved cache."""

import json
import re
from pathlib import Path

import click
import numpy as np

from kvkit import Rope, files
from kvkit.cache import PagedCache, StateLayer, load
from kvkit.errors import KvkitError
from kvkit.files import llama, llama_writing
from kvkit.files.errors import FileError
from kvkit.files.model_config import read_entries
from kvkit.files.paths import check_source, check_target
from kvkit.tools import states
from kvkit_cli import tool

CHANGES = {  # {change: (value of its option, help)}
    "remove": ("BEGIN:END", "Remove the tokens with these positions; END may be left out."),
    "retain": ("BEGIN:END,...", "Remove all other tokens."),
    "shift": ("BEGIN:END:DELTA", "Move tokens to other positions."),
    "divide": ("BEGIN:END:D", "Divide positions by D, rounding down."),
    "append": ("FILE", "Add the tokens of another saved cache behind."),
}
RANGE = re.compile(r"(\d*):(\d*)(?::(-?\d+))?")  # BEGIN:END or BEGIN:END:NUMBER
LONGEST_RANGE = 60  # characters: Python refuses to parse numbers of thousands of digits


class Edit(tool.ToolVerb):
    """Makes changes in the order of the options that name them."""

    def parse_args(self, ctx, args):
        """Parse the options, and note the order of the changes."""
        names = (arg.removeprefix("--").partition("=")[0] for arg in args if arg.startswith("--"))
        ctx.meta["order"] = [name for name in names if name in CHANGES]
        return super().parse_args(ctx, args)


@click.command(cls=Edit)
@click.argument("source", metavar="FILE", type=tool.PATH)
@click.option("--remove", multiple=True, metavar=CHANGES["remove"][0], help=CHANGES["remove"][1])
@click.option("--retain", multiple=True, metavar=CHANGES["retain"][0], help=CHANGES["retain"][1])
@click.option("--shift", multiple=True, metavar=CHANGES["shift"][0], help=CHANGES["shift"][1])
@click.option("--divide", multiple=True, metavar=CHANGES["divide"][0], help=CHANGES["divide"][1])
@click.option("--append", multiple=True, metavar=CHANGES["append"][0], help=CHANGES["append"][1])
@click.option("--close", is_flag=True, help="Move later tokens back by what is removed.")
@click.option(
    "--rope",
    metavar="CONFIG|NAME=N,...",
    help="The rotary embedding of keys: a config.json, or rotary_dim=64,theta=10000, or none. Moves need it.",
)
@click.option("-o", "--output", metavar="OUT", type=tool.PATH, help="The file to write, of the kind of FILE.")
@tool.json_option
@click.pass_context
def edit(ctx, source, close, rope, output, as_json, **changes):
    """Remove, keep, move and add tokens of a saved cache.

    FILE is a .npz file that Cache.save wrote, or a session or state of llama.cpp, for which only --remove and
    --retain are possible. Changes are made in the order of the options. Positions count from 0; ranges are
    half-open. Keys stay as they are: attention accounts for moves. Nothing is written unless all changes are
    possible.

    \b
    Examples:
      kvkit edit chat.npz --remove 10:20 -o shorter.npz
      kvkit edit slot.bin --remove 4:100 -o shorter.bin
      kvkit edit chat.npz --remove 4:100 --close --rope config.json -o window.npz
      kvkit edit chat.npz --retain 0:4,100: --shift 100::-96 --rope rotary_dim=64 -o window.npz
      kvkit edit a.npz --append b.npz --rope config.json -o both.npz
    """
    if not ctx.meta["order"] or output is None:
        raise KvkitError("edit: expected a change (--remove, ...), and -o OUT")
    check_target(output)
    check_source(source)
    with open(source, "rb") as file:
        is_llama = file.read(4) in llama.MAGICS
    if is_llama:
        edit_state(ctx, source, output, changes, close, as_json)
        return
    if output.suffix != ".npz":
        raise KvkitError(f"{output}: a cache is saved as .npz: give such a name")
    cache = open_cache(source)
    rotation = None if rope is None else parse_rope(rope)
    values = {name: iter(given) for name, given in changes.items()}
    notes = [apply_change(cache, name, next(values[name]), close, rotation) for name in ctx.meta["order"]]
    cache.save(output)
    print_notes(notes)
    layer = longest(cache)
    shifts = {"rope_shifts": layer.rope_shifts.tolist()}
    if layer.positions.ndim > 1:
        lengths, end = layer.lengths, cache.get_seq_length()  # of each head, [B, heads]
        facts = {"tokens": lengths.tolist(), "next_position": end} | shifts
        text = f"{lengths.min()} to {lengths.max()} tokens in a head, the next at {end}"
        click.echo(json.dumps(facts) if as_json else text)
    else:
        print_tokens(layer.positions, cache.get_seq_length(), as_json, shifts)


def print_tokens(positions, next_position, as_json, more):
    """Print how many tokens are left, and their positions; `more` is added to JSON."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    runs = [[int(run[0]), int(run[-1]) + 1] for run in np.split(positions, breaks) if len(run)]
    facts = {"tokens": len(positions), "next_position": next_position, "positions": runs} | more
    shown = ",".join(f"{begin}:{end}" for begin, end in runs)
    text = f"{len(positions)} tokens at {shown or 'none'}, the next at {next_position}"
    click.echo(json.dumps(facts) if as_json else text)


def edit_state(ctx, source, output, changes, close, as_json):
    """Remove tokens of a session or state of llama.cpp."""
    if close or any(name in ("shift", "divide", "append") for name in ctx.meta["order"]):
        moves = "moves, as a state has keys rotated by their positions"
        raise KvkitError(f"{source}: expected --remove or --retain, got {moves}")
    values = {name: iter(given) for name, given in changes.items()}
    texts = [(name, next(values[name])) for name in ctx.meta["order"]]
    parsed = [(name, text, parse_ranges(name, text)) for name, text in texts]

    def keep(positions):
        stays = np.ones(len(positions), bool)
        for name, _, ranges in parsed:
            stays &= in_ranges(positions, ranges) == (name == "retain")
        return stays

    before = files.read(source)
    contents = states.retain_tokens(before, keep)
    found = states.positions_of(contents)
    if not len(found):
        raise KvkitError(f"{source}: expected tokens that stay, got none")
    llama_writing.write(output, contents)
    positions = states.positions_of(before)
    print_notes(note_if_outside(name, text, positions, ranges) for name, text, ranges in parsed)
    print_tokens(found, int(found[-1]) + 1, as_json, {})


def open_cache(source):
    """Return the cache of a file that kvkit saved."""
    try:
        cache = load(source)
    except KvkitError as error:
        takes = "kvkit edit takes files of Cache.save and states of llama.cpp"
        raise type(error)(f"{error}; {takes}") from error
    if isinstance(cache, PagedCache):
        got = "sequences in blocks (in Python: PagedCache.remove(seq, ...))"
        raise KvkitError(f"{source}: expected a cache of one context, got {got}")
    if not getattr(cache, "layers", None) or not hasattr(cache.layers[0], "rope_shifts"):
        raise KvkitError(f"{source}: expected a cache of layers with tokens, got {type(cache).__name__}")
    return cache


def longest(cache):
    """Return the layer that stores most tokens: layers with a window store only the last ones."""
    return max(cache.layers, key=lambda layer: layer.stored_tokens)


def note_if_outside(name, text, positions, ranges):
    """Return a note if no token has a position in the ranges of a change, else ""."""
    if in_ranges(positions, ranges).any():
        return ""
    where = f"they end with {positions.max()}" if positions.size else "there are none"
    return f"kvkit: --{name} {text}: no token has such a position ({where})"


def print_notes(notes):
    """Print notes on stderr, without empty ones."""
    for note in filter(None, notes):
        click.echo(note, err=True)


def apply_change(cache, name, text, close, rotation):
    """Apply one change to a cache; return a note if no token has such a position, else ""."""
    if name == "append":
        cache.append(open_cache(Path(text)), rope=rotation)
        return ""
    layer = longest(cache)
    positions = layer.positions
    if name == "retain":
        if positions.ndim > 1:
            raise KvkitError(f"--retain {text}: expected heads with the same tokens, got a compressed cache")
        ranges = parse_ranges(name, text)
        cache.retain(positions[in_ranges(positions, ranges)])
    else:
        begin, end, delta_or_d = parse_range(name, text, has_third=name != "remove")
        if name != "remove":
            getattr(cache, name)(begin, end, delta_or_d, rope=rotation)
            return ""
        cache.remove(begin, end, close=close, **({"rope": rotation} if close else {}))
        ranges = [(begin, end, None)]
    return note_if_outside(name, text, positions, ranges) if not isinstance(layer, StateLayer) else ""


def parse_ranges(name, text):
    """Parse a text such as 0:4,100: into ranges."""
    return [parse_range(name, part, has_third=False) for part in text.split(",")]


def in_ranges(positions, ranges):
    """Return which positions lie in one of the ranges, bool [positions]."""
    ends = [np.inf if end is None else end for _, end, _ in ranges]
    inside = [(positions >= begin) & (positions < end) for (begin, *_), end in zip(ranges, ends, strict=True)]
    return np.any(inside, axis=0)


def parse_range(name, text, has_third):
    """Parse 10:20, or with a third number 10:20:-4, into (begin, end or None, third number or None)."""
    found = RANGE.fullmatch(text.strip())
    if found is None or len(text) > LONGEST_RANGE or (found[3] is not None) != has_third:
        form = "10:20:-4" if has_third else "10:20"
        raise KvkitError(f"--{name} {text}: expected {CHANGES[name][0]}, as {form}")
    begin, end, third = found.groups()
    return int(begin or 0), int(end) if end else None, int(third) if has_third else None


def parse_rope(text):
    """Parse a rotary embedding: the path of a config.json, numbers by name, or "none"."""
    if text == "none":
        return text
    try:
        if "=" not in text:
            return Rope.from_config(read_entries(text))
        pairs = (part.partition("=") for part in text.split(","))
        return Rope(**{name: json.loads(value) for name, _, value in pairs})
    except FileError:  # which names the file
        raise
    except KvkitError as error:
        raise KvkitError(f"--rope {text}: {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        if "=" not in text:
            raise KvkitError(f"--rope {text}: not a config.json: {error}") from None
        wanted = "rotary_dim=64,theta=10000, or a config.json, or none"
        raise KvkitError(f"--rope {text}: expected {wanted}") from None
