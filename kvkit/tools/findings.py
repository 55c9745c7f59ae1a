"""What `check` finds, rule by rule, and how a rule is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning"]
SHOWN = 5  # findings of a rule that are described; all are counted


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a rule says is wrong.

    Attributes
    ----------
    rule : str
        Its name, as in the documentation: "P1".
    severity : str
        "error" for what gives wrong numbers or a crash, "warning" for what may be meant.
    where : str
        The place, as it would be written in Python: ``block_tables[1, 3]``.
    message : str
        What is there.
    hint : str
        What it means, and what to do.
    """

    rule: str
    severity: Severity
    where: str
    message: str
    hint: str

    def __str__(self) -> str:
        return f"{self.severity} {self.rule} {self.where}: {self.message}\n    {self.hint}"


@dataclass(frozen=True)
class Findings:
    """What `check` found: an iterable of `Finding`, of each rule no more than the first five.

    Attributes
    ----------
    found : list of Finding
        In the order of the rules.
    counts : dict of str to int
        How often each rule was broken.
    checked : list of str
        The rules that had something to look at.
    """

    found: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    @property
    def errors(self) -> list[Finding]:
        """Those that are no warnings."""
        return [finding for finding in self.found if finding.severity == "error"]

    @property
    def rules(self) -> set[str]:
        """The names of the rules that are broken."""
        return set(self.counts)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "errors": sum(self.counts[rule] for rule in {finding.rule for finding in self.errors}),
            "findings": [asdict(finding) for finding in self.found],
            "counts": self.counts,
            "checked": self.checked,
        }

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.found]
        for rule, count in self.counts.items():
            shown = sum(finding.rule == rule for finding in self.found)
            if count > shown:
                lines.append(f"{rule}: {count - shown} more like these")
        rules = f"{len(self.checked)} rules looked at what was given"
        return "\n".join(
            [*lines, f"{sum(self.counts.values())} findings; {rules}" if lines else f"fine: {rules}"]
        )


@dataclass(frozen=True)
class Rule:
    """A rule: `look` gives nothing where there is nothing to look at, else all hits and words for one of
    them.

    Its docstring says which incident it would have caught.
    """

    name: str
    severity: Severity
    hint: str
    look: Callable[[Any], tuple[Sequence, Callable[[Any], tuple[str, str]]] | None]


RULES: dict[str, Rule] = {}


def rule(name: str, hint: str, severity: Severity = "error"):
    """Enter a function into the table of rules: a decorator."""

    def enter(look):
        RULES[name] = Rule(name, severity, hint, look)
        return look

    return enter


def examine(case: Any, rules: dict[str, Rule]) -> Findings:
    """What the rules find in a case."""
    result = Findings()
    for each in rules.values():
        seen = each.look(case)
        if seen is None:
            continue
        result.checked.append(each.name)
        hits, words = seen
        if len(hits):
            result.counts[each.name] = len(hits)
            result.found.extend(
                Finding(each.name, each.severity, *words(hit), each.hint) for hit in hits[:SHOWN]
            )
    return result
