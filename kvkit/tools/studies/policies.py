"""Parse the entries of a study of eviction: a scorer with the share of tokens to keep, a scheme, or both."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvkit.checks.values import finite_number, integer, text
from kvkit.errors import argument_error, brief, describe, unknown_name
from kvkit.eviction import SCORERS
from kvkit.formats.mixes import join_mixes
from kvkit.tools.studies.schemes import (
    MixedScheme,
    key_and_value_schemes,
    list_schemes,
    load_object,
    mixable_schemes,
    of_layer,
)
from kvkit.typed import Array

POLICY_FORM = "SCORER@SHARE or SCORER@SHARE+SCHEME, as snapkv@0.5+int4:g32, or a scheme"
# snapkv(window=32)@0.5+int4:g32 has scorer snapkv, options window=32, share 0.5 and scheme int4:g32. The path
# of a Python file may have any of these signs. A share begins with a digit or a dot.
POLICY = re.compile(
    r"(?P<scorer>.+?\.py:\w+|[^@(]+?)(?:\((?P<options>.*)\))?@(?P<share>[\d.][^@+:/\\]*)(?:\+(?P<scheme>.+))?"
)
COMMAS = re.compile(r",(?![^(]*\))")  # commas outside of parentheses
NONE, RANDOM, ORACLE = "none", "random", "oracle"
SEEDS = range(3)  # of `random`, whose results are averaged
SHARE = "a share above 0 and at most 1, as snapkv@0.5"
OPTIONS_FORM = "options as in snapkv(window=32,pool=max)@0.5"
BY_SHARE = "budget", "keep", "blend"  # a policy's share fills these options of scorers
BUDGET_NAMES = "uniform", "ada", "pyramid"
SchemePair = tuple[str, Any, Any]  # a name, the scheme of keys, the scheme of values


class Uncoded:
    """Stores numbers unchanged, as a scheme."""

    def encode(self, x: Array) -> dict[str, Array]:
        """Return the numbers unchanged."""
        return {"x": x}

    def decode(self, arrays: Mapping[str, Array]) -> Array:
        """Return the numbers unchanged."""
        return arrays["x"]

    def stored(self, arrays: Mapping[str, Array], bits: int, first: bool = True) -> int:
        """Count the bits of numbers, each of which has `bits` bits in the source."""
        return int(arrays["x"].size) * bits


UNCODED = Uncoded(), Uncoded()


@dataclass(frozen=True)
class Policy:
    """Names a scorer that keeps a share of the tokens, and schemes that encode these, if any."""

    name: str
    scorer: Any  # of `SCORERS`, "oracle", or a function (layer, keys, values, queries) -> scores
    keep: float  # the share of tokens that stay
    options: Mapping[str, Any]  # of the scorer
    schemes: tuple[Any, Any] = UNCODED  # of keys and of values

    @property
    def key(self) -> Any:
        """Return a key that is equal for policies with the same scores."""
        name = self.scorer
        by_share = name in SCORERS and not set(BY_SHARE).isdisjoint(SCORERS[name].options)
        return name, repr(sorted(self.options.items())), self.keep if by_share else None


@dataclass(frozen=True)
class Target:
    """Says what a mix must reach: at most so many bits a number, or at most an error."""

    bits: float | None = None
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.bits:g} bits" if self.error is None else f"an error of {100 * self.error:g} %"


def make_target(bits: Any, error: Any) -> Target | None:
    """Check the bits, or the error, that a mix must reach; None for neither."""
    if bits is None and error is None:
        return None
    if bits is not None and error is not None:
        raise argument_error("bits", "bits or an error, not both", f"{bits} and {error}")
    name, value = ("bits", bits) if error is None else ("error", error)
    if not finite_number(name, value) > 0:
        raise argument_error(name, "a number above 0", value)
    if error is not None and not error < 1:
        raise argument_error("error", "a number below 1, as 0.05 for 5 %", error)
    return Target(bits, error)


@dataclass(frozen=True)
class StudyPlan:
    """Lists the schemes and policies that a study compares."""

    schemes: list[SchemePair]
    policies: list[Policy]
    names: list[str]  # of schemes and policies, in the caller's order
    budget: str = "uniform"  # how the kept tokens are distributed over heads or layers
    judge: int | None = None  # how many of the last queries measure the error; None: a quarter
    rope: Any = None  # the rotary embedding of keys, for scorers that need it
    target: Target | None = None  # what a mix of formats must reach
    candidates: Sequence[str] = ()  # the schemes among which that mix is chosen

    @property
    def holds_back(self) -> bool:
        """Return whether only the last queries measure errors, which choose no tokens and no mix."""
        return bool(self.policies or self.target or self.judge)

    def at_layer(self, i: int, numbers: Sequence[int], num_layers: int | None) -> StudyPlan:
        """Return the plan for a layer, in which mixes are the schemes of that layer."""

        place = i, num_layers, numbers
        schemes = [(name, *of_layer(both, *place)) for name, *both in self.schemes]
        policies = [
            replace(each, schemes=of_layer(each.schemes, *place))
            if isinstance(each.schemes[0], MixedScheme)
            else each
            for each in self.policies
        ]
        return replace(self, schemes=schemes, policies=policies)

    def fitting(self, queries: Any, no_queries: str = "none") -> StudyPlan:
        """Return the plan for a layer with these queries: without any, there is no oracle."""
        if queries is not None:
            return self
        if self.target is not None:
            wanted = (
                "queries, because a mix is chosen by the errors of attention's outputs (an array `query`, or "
                "their names, queries='q_{l}')"
            )
            raise argument_error("source", wanted, no_queries)
        if self.judge is not None:
            raise argument_error("judge", "None, as the source has no queries", self.judge)
        oracles = {each.name for each in self.policies if each.scorer == ORACLE}
        policies = [each for each in self.policies if each.name not in oracles]
        return replace(self, policies=policies, names=[name for name in self.names if name not in oracles])

    def groups(self) -> list[list[Policy]]:
        """Return the policies in groups of equal scores."""
        found: dict[Any, list[Policy]] = {}
        for policy in self.policies:
            found.setdefault(policy.key, []).append(policy)
        return list(found.values())


def make_plan(
    schemes: Any,
    evict: Any = None,
    budget: str = "uniform",
    judge: Any = None,
    rope: Any = None,
    *,
    target: Target | None = None,
    mix: str | None = None,
) -> StudyPlan:
    """Return the plan of a study: of `schemes`, or of the entries of `evict` combined with `schemes`.

    With a target it chooses a mix of schemes; then `mix` is that mix, which alone is measured.
    """
    judge = None if judge is None else integer("judge", judge, 1)
    if evict is None:
        chosen = list_schemes(schemes if mix is None else [mix])
        names = [name for name, *_ in chosen]
        candidates = () if target is None else names if mix else mixable_schemes(names)
        return StudyPlan(chosen, [], names, judge=judge, target=target, candidates=candidates)
    if target is not None:
        raise argument_error("evict", f"None, because a mix for {target} is chosen", describe(evict))
    text("budget", budget, BUDGET_NAMES)
    if not isinstance(evict, (str, Sequence)):
        raise argument_error("evict", f"a text or a sequence, of {POLICY_FORM}", describe(evict))
    items = join_mixes(COMMAS.split(evict)) if isinstance(evict, str) else evict
    items = [each.strip() if isinstance(each, str) else each for each in items]
    entries: list[SchemePair | Policy] = [
        entry_of(each) for each in items if not isinstance(each, str) or each
    ]
    if schemes is not None:
        chosen = list_schemes(schemes)
        entries = [each for entry in entries for each in combined(entry, chosen)]
    policies = [each for each in entries if isinstance(each, Policy)]
    if not policies:
        wanted = "at least one SCORER@SHARE, as snapkv@0.5, beside schemes"
        raise argument_error("evict", wanted, describe(evict))
    entries += references(policies)
    names = [each.name if isinstance(each, Policy) else each[0] for each in entries]
    once = {(each.key, each.keep, scheme_of(each)) for each in policies}
    if len(set(names)) < len(names) or len(once) < len(policies):
        raise argument_error("evict", "each entry once", ", ".join(names))
    schemes = [each for each in entries if not isinstance(each, Policy)]
    policies = [each for each in entries if isinstance(each, Policy)]
    return StudyPlan(schemes, policies, names, budget, judge, rope)


def entry_of(item: Any) -> SchemePair | Policy:
    """Parse an entry into a policy or a scheme; "none" is the scheme that stores numbers unchanged."""
    if isinstance(item, tuple) and len(item) == 2 and callable(item[0]):
        function, share = item[0], share_of(item[1], item)
        name = getattr(function, "__name__", type(function).__name__)
        return Policy(f"{name}@{share_text(share)}", function, share, {})
    if not isinstance(item, str):
        raise argument_error("evict", f"{POLICY_FORM}; or (function, share)", describe(item))
    if item == NONE:
        return (NONE, *UNCODED)
    found = POLICY.fullmatch(item)
    if found is None:
        word = re.split("[(@]", item)[0]
        if word in SCORERS or word in (ORACLE, RANDOM):
            wanted = SHARE if "@" in item else f"a share of the tokens to keep, as {word}@0.5"
            wanted = wanted if item.count("(") == item.count(")") else OPTIONS_FORM
            raise argument_error("evict", wanted, brief(item))
        return (item, *key_and_value_schemes(item))
    share, scheme = share_of(found["share"], item), found["scheme"]
    schemes = UNCODED if scheme is None else key_and_value_schemes(scheme)
    scorer = found["scorer"]
    known = [ORACLE, *(name for name, each in SCORERS.items() if each.scored == "tokens")]
    path, _, function = scorer.rpartition(":")
    if path.endswith(".py"):
        scorer = load_object(path, function, "function")
    elif scorer not in known:
        raise unknown_name("evict", "a scorer of tokens", scorer, known)
    options = options_of(found["options"], item)
    if scorer == ORACLE and options:
        raise argument_error("evict", f"{ORACLE} without options", brief(item))
    return Policy(item, scorer, share, options, schemes)


def share_of(share: Any, item: Any) -> float:
    """Return a share as a number; raise unless it is above 0 and at most 1."""
    try:
        number = float(share)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number <= 1:
        raise argument_error("evict", SHARE, brief(item))
    return number


def share_text(share: float) -> str:
    """Return a share as text, in six digits if they are exact."""
    return f"{share:g}" if float(f"{share:g}") == share else repr(share)


def options_of(words: str | None, item: str) -> dict[str, Any]:
    """Parse the options between parentheses, such as window=32,pool=max."""
    found = {}
    for part in filter(None, (words or "").split(",")):
        name, sign, value = (each.strip() for each in part.partition("="))
        if not sign or not name.isidentifier():
            raise argument_error("evict", OPTIONS_FORM, brief(item))
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def combined(entry: SchemePair | Policy, schemes: Sequence[SchemePair]) -> list[SchemePair | Policy]:
    """Return what an entry of `evict` becomes with schemes such as int8 and int4.

    knorm@0.5 becomes knorm@0.5+int8 and knorm@0.5+int4; "none" becomes int8 and int4; others stay.
    """
    if isinstance(entry, Policy):
        if entry.schemes is not UNCODED:
            return [entry]
        return [replace(entry, name=f"{entry.name}+{name}", schemes=(*both,)) for name, *both in schemes]
    return list(schemes) if entry[0] == NONE else [entry]


def references(policies: Sequence[Policy]) -> list[Policy]:
    """Return for each share the policies random and oracle, to compare with, unless the caller named them.

    They have the scheme of the first policy with this share.
    """
    first = {each.keep: each for each in reversed(policies)}
    known, found = {(each.scorer, each.keep, scheme_of(each)) for each in policies}, []
    for share in sorted(first, reverse=True):
        scheme = scheme_of(first[share])
        for scorer in (RANDOM, ORACLE):
            if (scorer, share, scheme) not in known:
                name = f"{scorer}@{share_text(share)}{'+' * bool(scheme)}{scheme}"
                found.append(Policy(name, scorer, share, {}, first[share].schemes))
    return found


def scheme_of(policy: Policy) -> str:
    """Return the name of a policy's scheme; "" for none."""
    parts = parts_of(policy.name)
    return parts.scheme if parts else ""


class PolicyParts(NamedTuple):
    """Holds the parts of a policy's name."""

    scorer: str  # with its options
    share: float
    scheme: str  # "" for none


def parts_of(name: str) -> PolicyParts | None:
    """Return the parts of a policy's name; None for other names, such as those of schemes."""
    found = POLICY.fullmatch(name)
    try:
        scorer = found and name[: found.start("share") - 1]
        return found and PolicyParts(scorer or "", float(found["share"]), found["scheme"] or "")
    except ValueError:
        return None
