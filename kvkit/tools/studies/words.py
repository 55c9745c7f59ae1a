"""Schemes and heads as the cells of a table, and as words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkit.tools.studies.studying import Study, Summary

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headings, and rows
WORST = 3  # heads that are named


def table(summary: list[Summary], wide: bool = True) -> Table:
    """Headings and a row for each scheme, without columns that no scheme has; `wide` ones for pages."""
    rows = [
        {
            "scheme": one.scheme,
            "bits": f"{one.bits:.2f}",
            "bytes a token": f"{one.bytes_per_token:,.0f}",
            "keys": f"{one.key_error:.4f}",
            "values": f"{one.value_error:.4f}",
            "worst head": f"{one.worst_error:.4f}",
            "largest error": f"{one.largest_error:.3g}" if wide else "",
            "cosine": f"{one.cosine:.5f}" if wide else "",
            "at an end": share(one.at_end),
            "zero": share(one.zero),
            "logit": "" if one.logit_error is None or not wide else f"{one.logit_error:.2e}",
            "KL": "" if one.kl is None else f"{one.kl:.2e}",
            "top changed": share(one.top_changed),
            "output": "" if one.output_error is None else f"{one.output_error:.4f}",
            "perplexity": "" if one.perplexity is None else f"{one.perplexity:.2f}",
            "agreement": share(one.agreement),
        }
        for one in summary
    ]
    return shown(rows)


def by_head(study: Study) -> Table:
    """The same of each head and side of each layer: errors, codes, outliers; what attention makes of it."""
    ratios = {(one["layer"], one["head"], one["side"]): one["ratio"] for one in study.outliers}
    rows = []
    for row in study.rows:
        at = row["layer"], row["head"], row["side"]
        rows.append(
            {
                "scheme": row["scheme"],
                "layer": row["layer"],
                "head": str(row["head"]),
                "side": row["side"],
                "error": number(row, "relative_rms", ".4f"),
                "largest error": number(row, "largest_error", ".3g"),
                "cosine": number(row, "cosine", ".5f"),
                "at an end": share(row.get("at_end")),
                "zero": share(row.get("zero")),
                "outlier ratio": f"{ratios[at]:.2f}" if at in ratios else "",
                "logit": number(row, "logit_error", ".2e"),
                "KL": number(row, "kl", ".2e"),
                "top changed": share(row.get("top_changed")),
                "output": number(row, "output_error", ".4f"),
            }
        )
    return shown(rows)


def shown(rows: list[dict[str, str]]) -> Table:
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    return tuple(names), [tuple(row[name] for name in names) for row in rows]


def number(row: dict[str, Any], name: str, form: str) -> str:
    return format(row[name], form) if name in row else ""


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def worded(row: dict[str, Any]) -> str:
    """A head, and by what it is bad."""
    if "kl" in row:
        return f"{row['layer']} head {row['head']} (KL {row['kl']:.2e}, output {row['output_error']:.3f})"
    return f"{row['layer']} head {row['head']} {row['side']} ({row['relative_rms']:.3f})"
