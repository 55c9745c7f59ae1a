"""Schemes and heads as the cells of a table, and as words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkit.tools.studies.studying import Summary

WORST = 3  # heads that are named


def headings(asked: bool) -> tuple[str, ...]:
    heads = "scheme", "bits", "bytes a token", "keys", "values", "worst head", "at an end"
    return heads + (("KL", "top changed", "output") if asked else ())


def cells(one: Summary, asked: bool) -> tuple[str, ...]:
    found = (
        one.scheme,
        f"{one.bits:.2f}",
        f"{one.bytes_per_token:,.0f}",
        f"{one.key_error:.4f}",
        f"{one.value_error:.4f}",
        f"{one.worst_error:.4f}",
        share(one.saturated),
    )
    if not asked:
        return found
    return (*found, f"{one.kl:.2e}", share(one.top_changed), f"{one.output_error:.4f}")


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def worded(row: dict[str, Any]) -> str:
    """A head, and by what it is bad."""
    if "kl" in row:
        return f"{row['layer']} head {row['head']} (KL {row['kl']:.2e}, output {row['output_error']:.3f})"
    return f"{row['layer']} head {row['head']} {row['side']} ({row['relative_rms']:.3f})"
