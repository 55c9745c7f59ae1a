"""`kvkit list`: list names of formats, schemes, scorers, layouts, rules, models and operators."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import click

from kvkit import layouts as kvkit_layouts
from kvkit.eviction import SCORERS
from kvkit.files.model_config import read_model
from kvkit.formats.elements import FLOATS
from kvkit.formats.known import ALIASES, NAMED
from kvkit.formats.rotations import ROTATIONS
from kvkit.formats.schemes import FORMAT_PAIRS, REGISTERED
from kvkit.models.known import known_models
from kvkit.operators import OPERATORS
from kvkit.tools.rules import RULES
from kvkit.tools.text import columns
from kvkit_cli import show, tool

Facts = dict[str, Any]  # of one name; `name` and `about` are what the table shows
Names = Callable[[], Iterator[Facts]]
KINDS: dict[str, Names] = {}


def listed(names: Names) -> Names:
    """Decorate the function of the names of a kind."""
    KINDS[names.__name__] = names
    return names


@listed
def formats() -> Iterator[Facts]:
    """Yield the formats that caches, studies, sizes and conversions take by name."""
    of = {name: [alias for alias, known in ALIASES.items() if known == name] for name in ALIASES.values()}
    for element in map(str, FLOATS):
        yield {"name": element, "about": "floats", "options": [], "aliases": of.get(element, [])}
    for name, known in NAMED.items():
        scale = f", a scale for each {known.per}" if known.per else ", times 1 or a given scale"
        scale += f" of {known.group}" if known.per in ("group", "channel") and known.group else ""
        about = f"{known.code.bits} bits{scale}; {known.source}"
        yield {"name": name, "about": about, "options": list(known.options), "aliases": of.get(name, [])}
    kivi = {f"kivi{bits}": (f"kivi_key{bits}", f"kivi_value{bits}") for bits in (4, 2)}
    for name, (key, value) in (kivi | FORMAT_PAIRS).items():
        yield {"name": name, "about": f"keys {key}, values {value}", "options": [], "aliases": []}


@listed
def schemes() -> Iterator[Facts]:
    """Yield what may follow a format, and the schemes of one's own."""
    yield {"name": "FORMAT", "about": "one of `kvkit list formats`, with options: int8:g32, int4:channel"}
    yield {"name": "FORMAT/FORMAT", "about": "of keys, and of values: q8_0/q4_0"}
    yield {"name": "K=FORMAT,V=FORMAT", "about": "the same, each with a rotation of its own"}
    yield {
        "name": "FORMAT@LAYERS/FORMAT",
        "about": "a mix, also after K= and V=: int8@0,1,-1/int4:g32, int8@2:6/fp8",
    }
    yield {"name": "FILE.json", "about": "a mix that `kvkit study --bits` wrote"}
    for name, rotation in ROTATIONS.items():
        turned = "blocks" if any(rotation.block) else "whole heads"
        signs = ", after signs" if rotation.signs else ""
        about = f"with {turned} rotated by Hadamard matrices{signs}"
        yield {"name": f"FORMAT+{name}", "about": about}
    yield {"name": "FORMAT+hadamard:N", "about": "with blocks of N elements rotated"}
    for name, cls in REGISTERED.items():
        yield {"name": name, "about": first_line(cls)}
    yield {"name": "FILE.py:CLASS", "about": "a class with encode and decode, for `kvkit study`"}


@listed
def scorers() -> Iterator[Facts]:
    """Yield the scorers of tokens, pages and channels."""
    for name, known in SCORERS.items():
        facts = {"scored": known.scored, "needs": list(known.needs), "options": list(known.options)}
        yield {"name": name, "about": first_line(known.score)} | facts


@listed
def layouts() -> Iterator[Facts]:
    """Yield the layouts of engines' caches."""
    for name, known in kvkit_layouts.NAMED.items():
        keys = "line", "engine", "versions", "source", "mark", "note"
        facts = {key: getattr(known, key) for key in keys} | {"aliases": list(known.aliases)}
        yield {"name": name, "about": f"{known.line}  ({known.engine} {known.versions})"} | facts


@listed
def rules() -> Iterator[Facts]:
    """Yield the rules of `kvkit check`."""
    for name, known in RULES.items():
        facts = {"severity": known.severity, "hint": known.hint, "needs": known.needs.split(", ")}
        yield {"name": name, "about": first_line(known.look)} | facts


@listed
def models() -> Iterator[Facts]:
    """Yield the models that `kvkit size` and `kvkit warm` know by name."""
    for name, configuration in known_models().items():
        shape = read_model(configuration)
        kinds = Counter(layer.kind for layer in shape.layers)
        layers = " + ".join(f"{count} {kind}" for kind, count in kinds.items())
        yield {"name": name, "about": f"layers: {layers}; {shape.longest} tokens", "tokens": shape.longest}


@listed
def ops() -> Iterator[Facts]:
    """Yield the operators."""
    for name, op in OPERATORS.items():
        yield {"name": name, "about": op.summary, "source": op.source}


def first_line(thing: Any) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


@click.command("list")
@click.argument("kind", metavar="KIND", type=click.Choice(list(KINDS)))
@tool.json_option
def listing(kind: str, as_json: bool) -> None:
    """List formats, schemes, scorers, layouts, rules, models or ops (operators).

    KIND is formats, schemes, scorers, layouts, rules, models or ops. `kvkit draw NAME` draws a layout, and
    says where it is from; `kvkit describe NAME` shows an operator.

    \b
    Examples:
      kvkit list formats
      kvkit list ops --json | jq -r '.[].name'
    """
    facts = list(KINDS[kind]())
    if as_json:
        show.as_json(facts)
        return
    rows = [(each["name"], each["about"]) for each in facts]
    click.echo(columns(("name", "about"), rows, len(rows)))
