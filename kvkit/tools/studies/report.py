"""Write a study to a folder: JSON, Markdown, plots, and a self-contained page."""

from __future__ import annotations

import contextlib
import html
import json
import os
from dataclasses import replace
from pathlib import Path

from kvkit.errors import argument_error, brief
from kvkit.files.paths import name_in_errors
from kvkit.files.replace import replacing
from kvkit.tools.studies import plots
from kvkit.tools.studies.records import StudyRecord
from kvkit.tools.studies.words import (
    TextTable,
    as_csv,
    as_latex,
    deciding_columns,
    table,
    table_of_heads,
    worst_heads,
)

REPORTS = "study.json", "report.md", "report.html"
CAPTIONS = {
    "errors": "Relative error by layer and head",
    "pareto": "Error of the worst head (of attention's output, if there were queries) against size. A line "
    "joins the schemes that no other scheme beats in both",
    "eviction": "Loss of attention against bytes per token of the context (kept or not). A line for each "
    "scorer, a column for each scheme of kept tokens, squares for schemes of all tokens",
    "scorers": "Error of outputs against bytes per token of the context, a panel for each scorer",
    "bits_or_tokens": "For the same bytes: fewer bits for all tokens, fewer tokens as they are, or both. A "
    "line joins the best of each kind; oracle and random are left out",
    "heads": "Error of each head with one scheme: the chosen mix, or the scheme that is advised",
    "channels": "Channels of keys: outliers are far to the right",
}
END = (
    "At an end: codes at a limit of their range. With a scale taken from a group's maximum, one code of each "
    "group is at the limit (for int8:g8 one in 8); with a scale of 1, as for fp8, they have saturated"
)
ORDER = (
    "Heads 25-75 %: the quartiles over heads of the error that the advice goes by. Order holds: the share of "
    "the other schemes that are better, or worse, in both halves of the tokens. Entropy: the bits that a "
    "lossless coder would need, with one table of codes for a layer's keys or values, or one by channel"
)
STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --paper: #ffffff; --line: #d5dbe1; --mark: #2a9d8f; }
@media (prefers-color-scheme: dark) { :root { --ink: #d7dee6; --paper: #14181d; --line: #36404a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       margin: 2rem auto; max-width: 86rem; padding: 0 1rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 14px; }
th, td { text-align: right; padding: .3rem .25rem; border-bottom: 1px solid var(--line);
         white-space: nowrap; overflow-wrap: normal; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; }
@media (min-width: 60rem) { th:first-child, td:first-child { min-width: 7rem; } }
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 2px solid var(--mark); }
figure { margin: 2rem 0; }
figure svg { max-width: 100%; height: auto; }
.dark, .narrow { display: none; }
@media (max-width: 60rem) {
  table { font-size: 13px; }
  .more { display: none; }
  .narrow { display: block; }
}
@media (prefers-color-scheme: dark) { .dark { display: block; } .light { display: none; } }
"""
SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, i) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => {
      const text = row.cells[i].textContent, number = parseFloat(text.replace(/,/g, ""));
      return i && !isNaN(number) ? number : text.replace(/\\d+/g, digits => digits.padStart(6, "0"));
    };
    const order = (a, b) => (value(a) > value(b) ? 1 : value(a) < value(b) ? -1 : 0) * (down ? -1 : 1);
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
  }));
}
"""


def check_folder(folder: Path) -> None:
    """Check that a report can be written to a folder. Callers check before long work."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise argument_error("output", "a folder that exists or can be made", brief(folder))


def write_report(study: StudyRecord, folder: Path) -> list[Path]:
    """Write all files of a report; return their paths. Without matplotlib a note replaces the pictures."""
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lacking = plots.missing()
    if lacking:
        study = replace(study, notes=(*study.notes, lacking))
    pictures, prints = ({}, {}) if lacking else plots.pictures_and_prints(study)
    drawn = {page: {name: plots.on_page(text, page) for name, text in pictures.items()} for page in plots.INK}
    texts: dict[str, str | bytes] = {f"{name}.svg": text for name, text in pictures.items()}
    texts |= prints | {"table.csv": as_csv(study), "table.tex": as_latex(study)}
    reports = json.dumps(study.to_dict(), indent=1) + "\n", markdown(study, list(pictures))
    texts |= dict(zip(REPORTS, (*reports, html_page(study, drawn)), strict=True))
    with name_in_errors(folder), contextlib.ExitStack() as files:
        # Files belong together. Reports are renamed last, so that none refers to files of another one.
        for name, text in reversed(list(texts.items())):
            file = files.enter_context(replacing(folder / name))
            file.write(text if isinstance(text, bytes) else text.encode())
            file.flush()
            os.fsync(file.fileno())
        for name in REPORTS:
            (folder / name).unlink(missing_ok=True)
    return [folder / name for name in texts]


def markdown(study: StudyRecord, pictures: list[str]) -> str:
    """Return a report in Markdown, with links to pictures."""
    heads, rows = table(study.summary)
    about = f"{len(study.layers)} layers, {study.num_kv_heads} key heads, {study.tokens:,} tokens."
    lines = [f"# {study.source}", "", about, ""]
    lines += [f"| {' | '.join(heads)} |", f"|---{'|--:' * (len(heads) - 1)}|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", f"{study.budget()[0].upper()}{study.budget()[1:]}.", ""]
    worst = [f"- {name}: {heads}" for name, heads in worst_heads(study)]
    lines += ["## The three worst heads", "", *worst] if worst else []
    lines += ["", *(f"![{caption}]({name}.svg)\n" for name, caption in CAPTIONS.items() if name in pictures)]
    lines += [f"Note: {note}.\n" for note in study.notes]
    return "\n".join(lines)


def sortable(cells: TextTable) -> str:
    """Return an HTML table that a click on a heading sorts."""
    (heads, rows), escape = cells, html.escape
    marks = ["" if name in deciding_columns(heads) else " class=more" for name in heads]  # of wide pages only
    titles = (f"<th{mark}><button>{escape(x)}</button></th>" for x, mark in zip(heads, marks, strict=True))
    lines = (
        "".join(f"<td{mark}>{escape(x)}</td>" for x, mark in zip(row, marks, strict=True)) for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{''.join(titles)}</tr></thead><tbody>{body}</tbody></table>"


def html_page(study: StudyRecord, drawn: dict[str, dict[str, str]]) -> str:
    """Return a self-contained HTML page."""
    escape = html.escape
    worst = "".join(f"<li>{escape(name)}: {escape(heads)}</li>" for name, heads in worst_heads(study))
    worst = f"<h2>The three worst heads</h2>\n<ul>{worst}</ul>" if worst else ""
    figures = "".join(
        f"<figure>{''.join(f'<div class={page}>{drawn[page][name]}</div>' for page in drawn)}"
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for name, caption in CAPTIONS.items()
        if name in drawn["light"]
    )
    notes = "".join(f"<p>Note: {escape(note)}</p>" for note in study.notes)
    title = f"{escape(study.source)}: kvkit study"
    about = f"{len(study.layers)} layers, {study.num_kv_heads} key heads, {study.tokens:,} tokens."
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(study.source)}</h1>
<p>{about} {escape(study.budget()[0].upper() + study.budget()[1:])}.</p>
{sortable(table(study.summary))}
<p class=narrow>A wider window shows more columns.</p>
{worst}
{figures}
<h2>By layer, head and side</h2>
{sortable(table_of_heads(study))}
<p>{escape(ORDER)}.</p>
<p>{escape(END)}.</p>
{notes}
<script>{SCRIPT}</script>
</body>
</html>
"""
