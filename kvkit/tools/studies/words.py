"""Schemes and heads as the cells of a table, and as words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkit.tools.studies.studying import Summary

WORST = 3  # heads that are named


def table(summary: list[Summary]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and a row for each scheme; columns that no scheme has are left out."""
    rows = [
        {
            "scheme": one.scheme,
            "bits": f"{one.bits:.2f}",
            "bytes a token": f"{one.bytes_per_token:,.0f}",
            "keys": f"{one.key_error:.4f}",
            "values": f"{one.value_error:.4f}",
            "worst head": f"{one.worst_error:.4f}",
            "at an end": share(one.saturated),
            "KL": "" if one.kl is None else f"{one.kl:.2e}",
            "top changed": share(one.top_changed),
            "output": "" if one.output_error is None else f"{one.output_error:.4f}",
            "perplexity": "" if one.perplexity is None else f"{one.perplexity:.2f}",
            "agreement": share(one.agreement),
        }
        for one in summary
    ]
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    return tuple(shown), [tuple(row[name] for name in shown) for row in rows]


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def worded(row: dict[str, Any]) -> str:
    """A head, and by what it is bad."""
    if "kl" in row:
        return f"{row['layer']} head {row['head']} (KL {row['kl']:.2e}, output {row['output_error']:.3f})"
    return f"{row['layer']} head {row['head']} {row['side']} ({row['relative_rms']:.3f})"
