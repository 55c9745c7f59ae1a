"""`kvkit`: find the verb, load its module, and turn errors into one line and an exit code.

Exit codes: 0 success; 1 the machine failed (disk, permissions, memory, device), or a tool found errors or
differences; 2 a wrong command, file or input; 130 interrupted. A traceback is a bug.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import click

VERBS = {  # {verb: (module, first line of its help)}
    "run": ("kvkit_cli.run", "Run an operator on the arrays of a file."),
    "describe": ("kvkit_cli.describe", "Show the inputs, attributes and outputs of an operator."),
    "info": ("kvkit_cli.info", "Show versions, the CPU, threads, compiled code and backends."),
    "warm": ("kvkit_cli.warm", "Compile code ahead of the calls that need it."),
    "list": (
        "kvkit_cli.listing",
        "List formats, schemes, scorers, layouts, rules, models or ops (operators).",
    ),
    "inspect": ("kvkit_cli.inspect", "List what is in a file: arrays, layout, tables, numbers."),
    "convert": ("kvkit_cli.convert", "Move a cache to another layout, bit for bit, or to another format."),
    "edit": ("kvkit_cli.edit", "Remove, keep, move and add tokens of a saved cache."),
    "study": ("kvkit_cli.study", "Measure what quantization and eviction cost a cache, head by head."),
    "size": ("kvkit_cli.size", "Compute how many bytes the cache of a model takes."),
    "draw": ("kvkit_cli.draw", "Draw a layout, or the rows of a saved cache by sequence."),
    "check": ("kvkit_cli.check", "Find errors in page tables, slots, layouts, scales and data."),
    "diff": ("kvkit_cli.diff", "Find where two caches or outputs differ, and why."),
    "vectors": ("kvkit_cli.vectors", "Make, verify, replay, compare and export packs of golden vectors."),
    "clean": (
        "kvkit_cli.clean",
        "Remove the compiled code of every version of kvkit. Calls compile it again.",
    ),
    "bench": (
        "kvkit_cli.bench",
        "Measure operators beside plain copies or reads, and beside other libraries.",
    ),
}
SECTIONS = {
    "Tools for caches": "check diff study size inspect list draw convert edit vectors",
    "Operators": "run describe",
    "This machine": "info warm clean bench",
}
RENAMED = {"cache": "clean", "layouts": "list layouts", "ops": "list ops"}  # verbs of before
ARGUMENTS = {  # {name of an argument in the help: what to give, for the error that it is missing}
    "OP": "an operator that kvkit list ops prints",
    "KIND": "formats, schemes, scorers, layouts, rules, models or ops",
    "FILE": "a file with a cache",
    "FILE|LAYOUT": "a file with a cache, or a layout that kvkit list layouts prints",
    "IN": "files with caches, in front of OUT",
    "OUT": "the file to write",
    "A": "the file with the expected arrays",
    "B": "the file that is compared with A",
    "MODEL": "a config.json, its folder, or a GGUF file",
    "FOLDER": "the folder of a pack",
    "RESULTS": "the folder of a device's results",
    "TARGET": "the folder to write",
}


class Verbs(click.Group):
    """Imports a verb when it is called, not when verbs are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the verbs."""
        return list(VERBS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read `kvkit help VERB` as `kvkit VERB --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import a verb; for an unknown name fail with a suggestion."""
        if name not in VERBS:
            if not ctx.resilient_parsing:
                ctx.fail(f"no verb {name!r}{correction(name)}")
            return None
        module = importlib.import_module(VERBS[name][0])
        return with_quiet(getattr(module, VERBS[name][0].rpartition(".")[2]))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs, by sections."""
        for section, verbs in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(verb, VERBS[verb][1]) for verb in verbs.split()])

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the program and exit; errors become a line on stderr."""
        try:
            code = super().main(*args, **(extra | {"standalone_mode": False}))
        except Exception as error:
            message, code = explain(error)
            if code is None:
                raise
            line = " ".join(message.split())  # a message may quote anything in a file
            line = "".join(sign if sign.isprintable() else "\ufffd" for sign in line)
            click.echo(f"kvkit: {line}", err=True)
        sys.exit(code)


def with_quiet(verb: click.Command) -> click.Command:
    """Add the option -q to a verb, and to the verbs of a group, unless it has one."""
    if isinstance(verb, click.Group):
        for member in verb.commands.values():
            with_quiet(member)
    elif not any("--quiet" in param.opts for param in verb.params):
        flag = {"is_flag": True, "expose_value": False, "callback": silence}
        verb.params.append(click.Option(["-q", "--quiet"], help="Print no results, only errors.", **flag))
    return verb


def silence(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    """Discard what a verb prints on stdout; errors still go to stderr."""
    if wanted and not ctx.resilient_parsing:
        ctx.with_resource(contextlib.redirect_stdout(io.StringIO()))


def correction(name: str) -> str:
    """Return the end of the error about an unknown verb: what to type instead."""
    if name in RENAMED:
        return f": it is kvkit {RENAMED[name]}"
    if Path(name).exists():
        return f", but a file: kvkit inspect {name}"

    from kvkit.operators import OPERATORS
    from kvkit_cli.show import suggestion

    if name in OPERATORS:
        return f", but an operator: kvkit run {name} IN.npz -o OUT.npz"
    return suggestion(name, VERBS) or f"; there are {', '.join(VERBS)}"


def explain(error: Exception) -> tuple[str, int | None]:
    """Return the message and the exit code of an error. An error without an exit code is a bug."""
    if isinstance(error, click.UsageError):
        verb, message = error.ctx.command_path if error.ctx else "kvkit", error.format_message()
        if isinstance(error, click.MissingParameter) and isinstance(error.param, click.Argument):
            name = error.param.human_readable_name
            message = f"missing {name}: {ARGUMENTS[name.rstrip('.')]}"
        if error.ctx and isinstance(error.ctx.command, click.Group) and "Usage:" in message:
            message = f"expected one of the commands {', '.join(error.ctx.command.list_commands(error.ctx))}"
        return f"{message} (see {verb} --help)", 2
    if isinstance(error, click.Abort):
        return "interrupted", 130
    if isinstance(error, OSError):
        return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part), 1
    if isinstance(error, MemoryError):
        return f"out of memory {error}", 1
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "kvkit":
        from kvkit_cli import ownership

        return f"{error}; {ownership.owners()}", 1
    if isinstance(error, ValueError):
        from kvkit.errors import DeviceError, KvkitError

        if isinstance(error, KvkitError):
            return str(error), 1 if isinstance(error, DeviceError) else 2
    return "", None


def print_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    """Print kvkit's version, read from its file so that the package is not imported."""
    if not wanted or ctx.resilient_parsing:
        return
    import runpy

    package = importlib.util.find_spec("kvkit")
    assert package is not None  # it is in the same distribution
    assert package.origin is not None
    found = runpy.run_path(str(Path(package.origin).with_name("version.py")))
    click.echo(f"kvkit {found['__version__']}")
    ctx.exit()


@click.group(cls=Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version)
@click.pass_context
def main(ctx: click.Context) -> Any:
    """Inspect, convert and compare KV caches in files, and run operators on .npz files.

    \b
    Examples:
      kvkit check step.npz
      kvkit describe key_value_cache
      kvkit run key_value_cache IN.npz -o OUT.npz
      kvkit help run
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
