"""Write tables and sentences about the schemes and heads of a study."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvkit.tools.studies.policies import ORACLE, RANDOM, parts_of
from kvkit.tools.studies.records import ChosenMix, StudyRecord, Summary

TextTable = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headings, and rows
NO_POLICY = " (no policy)"
COLUMNS = {  # {field: (heading, format of its numbers)}, the most important first
    "bits": ("bits", ".2f"), "entropy": ("entropy", ".2f"), "channel_entropy": ("by channel", ".2f"),
    "bytes_per_token": ("bytes a token", ",.0f"),
    "tokens_kept": ("tokens kept", ",.0f"), "weight_kept": ("weight kept", "%"),
    "perplexity": ("perplexity", ".2f"), "agreement": ("agreement", "%"),
    "worst_output": ("worst output", ".4f"), "output_error": ("output", ".4f"),
    "quartiles": ("heads 25-75 %", ".4f"), "order_holds": ("order holds", "%"), "kl": ("KL", ".2e"),
    "top_changed": ("top changed", "%"), "logit_error": ("logit", ".2e"),
    "worst_error": ("worst head", ".4f"), "key_error": ("keys", ".4f"), "value_error": ("values", ".4f"),
    "relative_rms": ("error", ".4f"), "largest_error": ("largest error", ".3g"), "cosine": ("cosine", ".5f"),
    "at_end": ("at an end", "%"), "zero": ("zero", "%"), "ratio": ("outlier ratio", ".2f"),
}  # fmt: skip
NOT_ON_TERMINALS = "largest error", "cosine", "logit"  # columns that are left out there
NOT_WITH_POLICIES = *NOT_ON_TERMINALS, "at an end", "zero"
LATEX = (
    "scheme",
    "bits",
    "bytes a token",
    "weight kept",
    "perplexity",
    "worst output",
    "output",
    "keys",
    "values",
)
ERRORS = "worst_error", "key_error", "value_error"  # of the decoded keys and values
DECIDING = (  # columns on a narrow screen: the first of these lists of which a table has all
    ("scheme", "bytes a token", "agreement", "weight kept"),
    ("scheme", "bytes a token", "weight kept", "output"),
    ("scheme", "bits", "agreement", "worst output"), ("scheme", "bits", "worst output", "KL"),
    ("scheme", "bits", "worst head", "keys", "values"),
    ("scheme", "layer", "head", "side", "output", "error"), ("scheme", "layer", "head", "side", "error"),
)  # fmt: skip


def table(summary: list[Summary], wide: bool = True) -> TextTable:
    """Return the table of schemes; `wide` adds columns for pages."""
    rows = []
    for one in summary:
        parts = parts_of(one.scheme)  # tokens that a policy keeps without a scheme have no errors
        errors = dict.fromkeys(ERRORS) if parts is not None and not parts.scheme else {}
        rows.append({"scheme": one.scheme + NO_POLICY * one.is_oracle, **cells(vars(one) | errors)})
    evicts = any(one.evicts for one in summary)
    hidden = NOT_WITH_POLICIES if evicts else () if wide else NOT_ON_TERMINALS
    return filled_columns([{name: row[name] for name in row if name not in hidden} for row in rows])


def as_csv(study: StudyRecord) -> str:
    """Return the summary as CSV: a line for each scheme, with all digits."""
    out = io.StringIO()
    lines = [asdict(one) for one in study.summary]
    names = [name for name in lines[0] if any(line[name] is not None for line in lines)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([[line[name] for name in names] for line in lines])
    return out.getvalue()


def as_latex(study: StudyRecord) -> str:
    """Return the main columns of the summary as a LaTeX table, for the package booktabs."""
    headings, rows = table(study.summary)
    wanted = [name for name in LATEX if name in headings]
    places = [headings.index(name) for name in wanted]
    escape = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#"}

    def line(cells: Sequence[str]) -> str:
        return " & ".join("".join(escape.get(sign, sign) for sign in cell) for cell in cells) + r" \\"

    body = [line([row[place] for place in places]) for row in rows]
    caption = f"% {study.source}: {len(study.layers)} layers, {study.tokens:,} tokens".replace("\n", " ")
    begin = rf"\begin{{tabular}}{{l{'r' * (len(wanted) - 1)}}}"
    parts = caption, begin, r"\toprule", line(wanted), r"\midrule", *body, r"\bottomrule", r"\end{tabular}"
    return "\n".join(parts) + "\n"


def deciding_columns(headings: tuple[str, ...]) -> tuple[str, ...]:
    """Return the headings of the columns that a narrow page shows."""
    return next((names for names in DECIDING if set(names) <= set(headings)), headings)


def table_of_heads(study: StudyRecord) -> TextTable:
    """Return the table of heads: a row for each scheme, layer, head and side (with eviction: attention)."""
    ratios = {(one["layer"], one["head"], one["side"]): one["ratio"] for one in study.outliers}
    rows = []
    for row in study.rows:
        if study.evicts and study.by_attention and row["side"] != "attention":
            continue
        at = row["layer"], row["head"], row["side"]
        names = dict(zip(("scheme", "layer", "head", "side"), (row["scheme"], *map(str, at)), strict=True))
        rows.append(names | cells(row | {"ratio": ratios.get(at)}))
    return filled_columns(rows)


def cells(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return {heading: number as text} of a row; "" for missing numbers."""
    found = {}
    for name, (heading, form) in COLUMNS.items():
        number = numbers.get(name)
        if number is None:
            found[heading] = ""
        elif isinstance(number, list):  # quartiles
            found[heading] = f"{number[0]:{form}}-{number[-1]:{form}}"
        else:
            found[heading] = f"{100 * number:.2f} %" if form == "%" else format(number, form)
    return found


def filled_columns(rows: list[dict[str, str]]) -> TextTable:
    """Return a table of rows {heading: cell}, without columns that are empty in all rows."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    return tuple(names), [tuple(row[name] for name in names) for row in rows]


def front_of(summary: list[Summary]) -> list[Summary]:
    """Return the schemes that no other scheme beats in both bits and the advised error, by their bits."""
    front: list[Summary] = []
    for one in sorted(summary, key=lambda each: (each.bits, each.advised_error)):
        if one.advised_error < (front[-1].advised_error if front else float("inf")):
            front.append(one)
    return front


def in_short(study: StudyRecord) -> list[str]:
    """Return at most ten lines: what is recommended, what else is best, and how far to believe it."""
    front = front_of(study.summary)
    shown = front if len(front) <= 6 else [front[i * (len(front) - 1) // 5] for i in range(6)]
    lines = [study.budget()]
    if not study.by_attention:
        more = "errors of attention's outputs are not known, and often larger: add an array query"
        lines.append(f"  without queries {more}")
    what = "outputs" if study.by_attention else "keys and values"
    lines += [
        f"  {one.scheme}: {one.bits:.2f} bits, {what} of the worst head {one.advised_error:.2%}"
        for one in shown
    ]
    if holds := [one.order_holds for one in study.summary if one.order_holds is not None]:
        lines.append(
            f"the order is the same in both halves of the tokens for {np.mean(holds):.0%} of the pairs"
        )
    best = study.advised
    if best and best.channel_entropy:
        lines.append(
            f"a lossless coder would need {best.channel_entropy:.2f} bits a number for {best.scheme}"
        )
    return ["\n".join(lines)]


def mix_in_words(mix: ChosenMix | None) -> list[str]:
    """Return what is recommended, its errors, and what the best single format has instead, if anything."""
    if mix is None:
        return []
    rounded = f", to {mix.resolution:.2g} bits" if mix.resolution else ""
    lines = [
        f"for {mix.target}: {mix.text}, {mix.bits:.2f} bits a number, error {mix.error_measured:.2%}",
        f"that is the error of attention's outputs for the last {mix.held_back:,} queries of a sequence, "
        "which were held back",
        f"the {mix.queries:,} queries before them chose the mix: error {mix.error_assumed:.2%}, if squared "
        f"errors of layers add{rounded}",
    ]
    if mix.above_target:
        lines.append("so it is above the error that was asked for: the held-back tokens lose more")
    if mix.uniform is None:
        lines.append("no single format reaches that")
    elif mix.uniform[0] != mix.text:
        name, bits, error = mix.uniform
        better = error <= mix.error_measured and bits < mix.bits + 0.05  # of so many bits only
        advice = ", so the mix does not pay" * better
        lines.append(f"the best single format: {name}, {bits:.2f} bits a number, error {error:.2%}{advice}")
    if mix.num_layers is None:
        numbers = ", ".join(str(number) for number, *_ in mix.layers)
        lines.append(f"the source has layers {numbers} only: other layers get the last format, unmeasured")
    return ["\n".join(lines)]


def worst_heads(study: StudyRecord) -> list[tuple[str, str]]:
    """Return (scheme, its worst heads in words), except for random, the oracle, and unjudged policies."""
    hidden = f"{RANDOM}@", f"{ORACLE}@"
    shown = (one for one in study.summary if not (study.unjudged and one.evicts))
    own = [one.scheme for one in shown if not one.scheme.startswith(hidden)]
    lines = {}
    for name in own:
        rows = [(f"{row['layer']} head {row['head']}", row) for row in study.worst(name)]
        lines[name] = ", ".join(
            f"{head} (KL {row['kl']:.2e}, output {row['output_error']:.3f})"
            if "kl" in row
            else f"{head} {row['side']} ({row['relative_rms']:.3f})"
            for head, row in rows
        )
    return [*lines.items()]
