"""Define options that several verbs share, and make errors name options of the shell."""

import json
import re
from pathlib import Path

import click

from kvkit.errors import KvkitError
from kvkit.tools.quantities import tokens_in
from kvkit_cli import complete, show

IN_SIZES, AS_OPTION = re.compile(r"sizes=\{([^}]*)\}"), str.maketrans("", "", "' ")  # sizes={'h': N, 'c': N}
HINTS = "note: ", "layouts that fit: "  # lines of results that say what to give begin so
PATH = click.Path(path_type=Path, readable=False)  # the readers of files check paths


class ToolVerb(click.Command):
    """A verb whose errors name options of the shell, such as --layout, not arguments of Python.

    `words` is {first word of an error: option} for errors that begin with another word than an argument.
    """

    def __init__(self, *args, words=None, **extra):
        super().__init__(*args, **extra)
        self.words = words or {}

    def invoke(self, ctx):
        """Run the verb; rewrite its errors."""
        try:
            return super().invoke(ctx)
        except KvkitError as error:
            raise type(error)(self.in_shell(str(error))) from error

    def in_shell(self, text):
        """Replace arguments of Python in a text by options of the shell.

        "from_layout: expected a layout" becomes "--from: expected a layout", "give layout='hf'" becomes "give
        --layout hf", and "give sizes={'h': N}" becomes "give --sizes h=N".
        """
        text = IN_SIZES.sub(lambda found: "--sizes " + found[1].translate(AS_OPTION).replace(":", "="), text)
        for word, option in self.words.items():
            text = re.sub(rf"(^|: ){word}(?=: expected)", rf"\g<1>{option}", text)
        for param in self.params:
            name, spelled = param.name, param.opts[-1]
            if isinstance(param, click.Argument):
                spelled = (param.metavar or name.upper()).strip("[].")
                name = name.removesuffix("s") if param.nargs == -1 else name
            text = re.sub(rf"(^|: ){name}(?=: expected)", rf"\g<1>{spelled}", text)
            if isinstance(param, click.Option):
                text = re.sub(rf"(?<![\w-]){name}=('?)(\w*)\1", rf"{spelled} \2", text)
                if "_" in name:  # no other word is so written
                    text = re.sub(rf"(?<![\w.'-]){name}\b", spelled, text)
        return text


class TokenCount(click.ParamType):
    """A number of tokens as people write it: 4096, 128k."""

    name = "tokens"

    def convert(self, value, param, ctx):
        """Return the number."""
        return tokens_in(param.opts[-1], value) if isinstance(value, str) else value


def parse_sizes(text, option="--sizes"):
    """Parse a text such as n=16,h=8 into {axis: length}. The tools check the names of axes."""
    found = {}
    for pair in filter(None, (text or "").split(",")):
        axis, _, number = pair.partition("=")
        if not (number.isascii() and number.isdecimal()) or len(number) > 18:
            raise KvkitError(f"{option} {text}: expected AXIS=NUMBER,..., as n=16,h=8")
        found[axis.strip()] = int(number)
    return found


def sizes(about="Lengths of axes that arrays do not show: h=8."):
    """Return the option for the lengths of axes."""
    return click.option(
        "--sizes", metavar="AXIS=N,...", help=about, callback=lambda _, __, text: parse_sizes(text)
    )


def layout(flag="--layout", name="layout", about="The layout, if the file lacks it: see kvkit list layouts."):
    """Return an option for a layout."""
    return click.option(flag, name, metavar="NAME", help=about, shell_complete=complete.layouts)


model = click.option(
    "--model", metavar="FILE", type=PATH,
    help="The model's GGUF file or config.json, which gives heads, windows and rotary embedding.",
)  # fmt: skip
rotation = click.option(
    "--rotation", metavar="NAME", help="Undo the rotation of codes: llama.cpp, hadamard, hadamard:64, vllm."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def show_result(found, as_json, style=None):
    """Print a result as JSON, or as text, with notes in the words of the shell; `style` colours a line."""
    if not as_json:
        show_text(found, style)
        return
    facts = found.to_dict()
    if "notes" in facts:
        facts["notes"] = list(map(click.get_current_context().command.in_shell, facts["notes"]))
    click.echo(json.dumps(facts, indent=2, default=str))


def show_text(found, style=None):
    """Print a result as text, with notes in the words of the shell."""
    in_shell = click.get_current_context().command.in_shell
    lines = (in_shell(line) if line.startswith(HINTS) else line for line in str(found).split("\n"))
    show.text("\n".join(lines), style)


def names(verb):
    """Add --keys and --values to a verb, or --cache for both in one array: patterns of unknown names."""
    options = (
        ("cache", "fused", "both keys and values"),
        ("values", "values", "values"),
        ("keys", "keys", "keys"),
    )
    for option, name, sides in options:
        about = f"The names of arrays of {sides}, with {{l}} for the layer's number, if they are unusual."
        verb = click.option(f"--{option}", name, metavar="PATTERN", help=about)(verb)
    return verb
