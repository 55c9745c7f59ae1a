"""How verbs speak: tables on stdout, a progress bar on stderr, sizes for people."""

import contextlib
import difflib

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from kvkit.tools.text import size

__all__ = ["console", "progress", "shape", "size", "suggestion", "table", "times"]

BOUNDS = "copy", "read", "contiguous", "matmul"  # what speeds are shares of
BAR_FROM = 256 * 2**20  # bytes; what is smaller is written before a bar can be read


def console(stderr=False, width=None):
    """A console that takes texts as they are: shapes such as `kvstarts[B]` are no markup."""
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def table(title, *columns):
    """An empty table; no cell is ever cut: long ones are folded, but for names in the first column."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=i == 0)
    return made


def shape(array):
    """A shape as the specification writes it."""
    return f"({', '.join(map(str, array.shape))})"


def suggestion(name, known):
    """` (did you mean ...?)` if a known name is like this one."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


@contextlib.contextmanager
def progress(what, total, quiet=False):
    """A function to call with each number of bytes done; a terminal shows a bar if there is much to do."""
    screen = console(stderr=True)
    if quiet or total < BAR_FROM or not screen.is_terminal:
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=screen, transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda count: bars.advance(task, count)


def times(name, ratio):
    """How fast something is beside `name`: a share of what bounds it, or how many times a peer's speed."""
    if ratio is None:
        return "not installed"
    return f"{ratio:.0%}" if name in BOUNDS else f"{ratio:.1f}x"
