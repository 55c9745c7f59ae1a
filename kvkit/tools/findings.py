"""Hold the findings of `check`, and the table of its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from kvkit.errors import printable

Severity = Literal["error", "warning"]
Seen = tuple[Any, Callable[[Any], tuple[str, str]]] | list[tuple[str, str]] | None  # see `Rule`
FINDINGS_SHOWN = 5  # the most findings of a rule that are described; all are counted


@dataclass(frozen=True, slots=True)
class Finding:
    """Describes an error or a doubt that a rule found.

    Attributes
    ----------
    rule : str
        The rule's name in the documentation, such as "P1".
    severity : str
        "error" if it leads to wrong numbers or a crash, "warning" if it may be intended.
    where : str
        The place as a Python expression, such as ``block_tables[1, 3]``.
    message : str
        What was found.
    hint : str
        What the finding means, and what to do.
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
    """Holds the result of `check`: an iterable of `Finding`, at most five for each rule.

    Attributes
    ----------
    found : list of Finding
        The findings, in the order of the rules.
    counts : dict of str to int
        How often each rule was broken, all findings counted.
    checked : list of str
        The rules whose inputs were given.
    unchecked : dict of str to str
        The other rules, and the inputs that they lack.
    notes : tuple of str
        How the source was read: a guessed layout, arrays that no rule reads.
    """

    found: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    @property
    def errors(self) -> list[Finding]:
        """Return the findings that are errors."""
        return [finding for finding in self.found if finding.severity == "error"]

    def with_second(self, other: Findings, begin: str) -> Findings:
        """Return these findings and the findings of a second cache, whose places get the prefix `begin`."""
        found = [*self.found, *(replace(each, where=begin + each.where) for each in other.found)]
        counts = {name: self.counts.get(name, 0) + other.counts.get(name, 0)
                  for name in (*self.counts, *other.counts)}  # fmt: skip
        checked = list(dict.fromkeys((*self.checked, *other.checked)))
        unchecked = {name: lack for name, lack in self.unchecked.items() if name not in checked}
        return Findings(found, counts, checked, unchecked, (*self.notes, *other.notes))

    @property
    def rules(self) -> set[str]:
        """Return the names of the broken rules."""
        return set(self.counts)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        return {
            "errors": sum(self.counts[rule] for rule in {finding.rule for finding in self.errors}),
            "findings": [asdict(finding) for finding in self.found],
            "counts": self.counts,
            "checked": self.checked,
            "unchecked": self.unchecked,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.found]
        for rule, count in self.counts.items():
            shown = sum(finding.rule == rule for finding in self.found)
            if count > shown:
                lines.append(f"{rule}: {count - shown} more like these")
        rules = f"{len(self.checked)} rule{'s' * (len(self.checked) != 1)} checked"
        clean = "nothing found" if self.unchecked else "fine"
        count = sum(self.counts.values())
        last = f"{count} finding{'s' * (count != 1)}; {rules}" if lines else f"{clean}: {rules}"
        lines.append(last if self.checked else "nothing was checked, because no rule has its inputs")
        lacking: dict[str, list[str]] = {}
        for name, needs in self.unchecked.items():
            lacking.setdefault(needs.partition(", ")[0], []).append(name)
        if lacking:
            each = "; ".join(f"{need} ({', '.join(names)})" for need, names in lacking.items())
            lines.append(f"{len(self.unchecked)} rules not checked, because they need: {each}")
        lines += [f"note: {printable(note)}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class Rule:
    """Describes a rule of `check`.

    Attributes
    ----------
    look : callable
        The check. It returns None if its inputs are not given; else a list of (where, message), or all hits
        with a function from a hit to (where, message). Its docstring names an incident that it would have
        caught.
    needs : str
        The inputs of `look`, separated by commas; the last may be a kind of data.
    """

    name: str
    severity: Severity
    hint: str
    look: Callable[[Any], Seen]
    needs: str = ""

    def lacking(self, case: Any) -> str:
        """Return the inputs of this rule that a case lacks."""
        needs, case = self.needs.split(", "), case[0] if isinstance(case, tuple) else case  # before a call
        missing = [need for need in needs if case.has(need) is False]
        return ", ".join(missing) or needs[-1]  # data of another kind were given, such as codes for floats


RULES: dict[str, Rule] = {}


def rule(name: str, hint: str, severity: Severity = "error", *, needs: str) -> Callable[[Any], Any]:
    """Decorate a function to enter it into the table of rules."""

    def enter(look: Callable[[Any], Seen]) -> Callable[[Any], Seen]:
        RULES[name] = Rule(name, severity, hint, look, needs)
        return look

    return enter


def examine(
    case: Any, rules: dict[str, Rule], progress: Callable[[int, int], object] | None = None
) -> Findings:
    """Run the rules over a case; return the findings."""
    result = Findings()
    for done, each in enumerate(rules.values()):
        if progress is not None:
            progress(done, len(rules))
        seen = each.look(case)
        if seen is None:
            result.unchecked[each.name] = each.lacking(case)
            continue
        result.checked.append(each.name)
        hits, words = seen if isinstance(seen, tuple) else (seen, lambda hit: hit)
        if len(hits):
            result.counts[each.name] = len(hits)
            for where, message in map(words, hits[:FINDINGS_SHOWN]):
                result.found.append(Finding(each.name, each.severity, where, message, each.hint))
    return result
