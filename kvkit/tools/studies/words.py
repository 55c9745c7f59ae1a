"""Put schemes and heads of a study into the cells of a table, and into words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkit.tools.studies.study import Study, Summary

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headings, and rows
WORST = 3  # heads that are named
COLUMNS = {  # of a summary or a head: its heading, and how its numbers are written; what decides is first
    "bits": ("bits", ".2f"), "bytes_per_token": ("bytes a token", ",.0f"),
    "perplexity": ("perplexity", ".2f"), "agreement": ("agreement", "%"),
    "worst_output": ("worst output", ".4f"), "output_error": ("output", ".4f"), "kl": ("KL", ".2e"),
    "top_changed": ("top changed", "%"), "logit_error": ("logit", ".2e"),
    "worst_error": ("worst head", ".4f"), "key_error": ("keys", ".4f"), "value_error": ("values", ".4f"),
    "relative_rms": ("error", ".4f"), "largest_error": ("largest error", ".3g"), "cosine": ("cosine", ".5f"),
    "at_end": ("at an end", "%"), "zero": ("zero", "%"), "ratio": ("outlier ratio", ".2f"),
}  # fmt: skip
ON_PAGES = "largest error", "cosine", "logit"  # columns too many for a terminal
DECIDING = (  # columns that a telephone shows: of the first of these that a table has all of
    ("scheme", "bits", "agreement", "worst output"), ("scheme", "bits", "worst output", "KL"),
    ("scheme", "bits", "worst head", "keys", "values"),
    ("scheme", "layer", "head", "side", "output", "error"), ("scheme", "layer", "head", "side", "error"),
)  # fmt: skip


def table(summary: list[Summary], wide: bool = True) -> Table:
    """Return headings and a row for each scheme; `wide` with the columns of pages."""
    rows = [{"scheme": one.scheme, **cells(vars(one))} for one in summary]
    return filled_columns([{name: row[name] for name in row if wide or name not in ON_PAGES} for row in rows])


def deciding_columns(headings: tuple[str, ...]) -> tuple[str, ...]:
    """Return the headings of the columns that a narrow page shows."""
    return next((names for names in DECIDING if set(names) <= set(headings)), headings)


def table_of_heads(study: Study) -> Table:
    """Return headings and a row for each scheme, layer, head and side."""
    ratios = {(one["layer"], one["head"], one["side"]): one["ratio"] for one in study.outliers}
    rows = []
    for row in study.rows:
        at = row["layer"], row["head"], row["side"]
        names = dict(zip(("scheme", "layer", "head", "side"), (row["scheme"], *map(str, at)), strict=True))
        rows.append(names | cells(row | {"ratio": ratios.get(at)}))
    return filled_columns(rows)


def cells(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers of a row as texts, by their headings; "" for those that it does not have."""
    found = {}
    for name, (heading, form) in COLUMNS.items():
        number = numbers.get(name)
        shown = "" if number is None else f"{100 * number:.2f} %" if form == "%" else format(number, form)
        found[heading] = shown
    return found


def filled_columns(rows: list[dict[str, str]]) -> Table:
    """Return a table without the columns that no row has."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    return tuple(names), [tuple(row[name] for name in names) for row in rows]


def head_in_words(row: Mapping[str, Any]) -> str:
    """Return the name of a head, with what it suffers."""
    if "kl" in row:
        return f"{row['layer']} head {row['head']} (KL {row['kl']:.2e}, output {row['output_error']:.3f})"
    return f"{row['layer']} head {row['head']} {row['side']} ({row['relative_rms']:.3f})"
