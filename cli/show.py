"""Print the results of verbs: tables on stdout, progress bars on stderr."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from kvkit.errors import printable, suggestion
from kvkit.runtime import disk_cache
from kvkit.tools.text import size

__all__ = ["code_folder_text", "console", "progress", "shape", "size", "suggestion", "table"]

NARROWER, ANY_TABLE = 72, 1000  # columns: tables become lists below the first; the second fits any table
BAR_FROM = 256 * 2**20  # bytes; fewer are written too fast for a bar


def console(stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that prints texts unchanged: `kvstarts[B]` is not markup."""
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def out(thing: Any, **style: Any) -> None:
    """Print on stdout: without padding into a pipe, and tables as lists on a narrow terminal."""
    screen = console()
    is_wide_table = isinstance(thing, Table) and len(thing.columns) > 3 and screen.width < NARROWER
    if is_wide_table and console(width=ANY_TABLE).measure(thing).maximum > screen.width:
        thing = as_list(thing)
    if screen.is_terminal:
        screen.print(thing, **style)
        return
    with screen.capture() as text:
        screen.print(thing, **style)
    click.echo("\n".join(line.rstrip() for line in text.get().split("\n")), nl=False)


def text(found: Any, style: Callable[[str], str | None] | None = None, stderr: bool = False) -> None:
    """Print a text, each line in the style that `style` gives. Control characters are escaped."""
    screen = console(stderr)
    for line in map(printable, str(found).split("\n")):
        if style is None or not screen.is_terminal:
            click.echo(line, err=stderr)
        else:
            screen.print(line, style=style(line), soft_wrap=True)


def as_list(table: Table) -> Group:
    """Return the rows of a table as a list; each cell follows the name of its column."""
    columns = [(str(column.header), *map(str, column.cells)) for column in table.columns]
    lines = [Text(str(table.title or ""), style="bold")]
    for name, *cells in list(zip(*columns, strict=True))[1:]:
        lines.append(Text(f"\n {name}"))
        for (header, *_), cell in zip(columns[1:], cells, strict=True):
            text = ", ".join(cell.split("\n"))
            lines += [Padding(f"{header}: {text}", (0, 0, 0, 4))] if text else []
    return Group(*lines, "")


def as_json(thing: Any) -> None:
    """Print JSON on stdout."""
    click.echo(json.dumps(thing, indent=1, default=str))


def table(title: str | None, *columns: str) -> Table:
    """Return an empty table. Long cells are wrapped, except in the first column; nothing is cut."""
    new_table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for i, column in enumerate(columns):
        new_table.add_column(column, overflow="fold", no_wrap=i == 0)
    return new_table


def code_folder_text(folder: Path | None) -> str:
    """Return a text: the folder of compiled code with its size, or why there is none."""
    if folder is None:
        return "off: KVKIT_CACHE_DIR is empty, or there is no home directory"
    refusal = disk_cache.refusal(folder)
    if refusal:
        return f"none is kept in {folder}: {refusal}"
    sizes = []
    for path in folder.glob("*.bin"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it since
            sizes.append(path.stat().st_size)
    return f"{folder}: {len(sizes)} files, {size(sum(sizes))}"


def shape(lengths: Iterable[int]) -> str:
    """Return a shape as text: (2, 3), and (2) for one axis."""
    return f"({', '.join(map(str, lengths))})"


@contextlib.contextmanager
def progress(what: str, total: int, quiet: bool = False) -> Iterator[Callable[[int], Any]]:
    """Yield a function that takes the bytes of each step; show a bar if `total` is large."""
    screen = console(stderr=True)
    if quiet or total < BAR_FROM or not screen.is_terminal:
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=screen, transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda count: bars.advance(task, count)


@contextlib.contextmanager
def steps(what: str, total: int, quiet: bool = False) -> Iterator[Callable[[str], Any]]:
    """Yield a function that takes the name of each finished step; show a bar, or print a line for each."""
    screen, begin, count = console(), time.perf_counter(), itertools.count(1)

    def line(name: str) -> None:
        click.echo(f"{next(count)}/{total} {name}, {time.perf_counter() - begin:.1f} s")

    if quiet or not screen.is_terminal:
        yield (lambda name: None) if quiet else line
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=screen) as bars:
        task = bars.add_task(what, total=total)
        yield lambda name: bars.update(task, advance=1, description=f"{what}: {name} is done")
        bars.update(task, description=what)


def interruptible(function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, so that Ctrl-C need not wait for a long call of numpy."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.extend((function(), None))
        except BaseException as error:
            results.extend((None, error))

    thread = threading.Thread(target=work, daemon=True)  # the process does not wait for it
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    found, error = results
    if error is not None:
        raise error
    return found


@contextlib.contextmanager
def task_bar(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], Any] | None]:
    """Yield a function that takes the numbers of finished and of all tasks; show a bar. Quiet: yield None."""
    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=screen, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
