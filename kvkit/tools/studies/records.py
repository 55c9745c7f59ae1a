"""Hold what a study has measured: a record for each scheme, and one of all."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvkit.tools.studies.policies import ORACLE, parts_of

THRESHOLD = 0.1
WORST = 3  # how many of the worst heads are named
TableRow = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """Holds the errors and sizes of one scheme over all layers and heads.

    Attributes
    ----------
    scheme : str
    bits : float
        Stored bits per number, scales included.
    bytes_per_token : float
        Bytes of a token's keys and values in all layers and heads.
    key_error, value_error : float
        Relative root mean square error of decoded keys and values, over all heads.
    worst_error : float
        Largest relative root mean square error of a head.
    largest_error : float
        Largest error of a single number.
    cosine : float
        Mean cosine similarity between a head's vector and its decoded vector.
    at_end, zero : float or None
        Shares of codes at a limit of their range, and of codes for 0; None for schemes that do not expose
        their codes. With a scale taken from a group's maximum, one code of each group is at the limit: 1 in 8
        for int8:g8. For e4m3 and e5m2 with scale 1, a code at the limit has saturated or just fits.
    kl, top_changed, output_error, logit_error : float or None
        Means over queries: divergence of the weights, in nats; how often another key has the largest weight;
        relative error of outputs; mean error of a logit. None without queries.
    worst_output : float or None
        Largest relative error of a head's outputs. None without queries.
    perplexity, agreement : float or None
        For a model that reads a text with the quantized cache: the text's perplexity, and how often the most
        likely token is the same as without quantization. None without a model.
    tokens_kept, weight_kept : float or None
        With eviction: how many tokens a head keeps on average, and their share of the weights of the judging
        queries. `scheme` is then the policy, such as "snapkv@0.5+int4:g32"; bits and bytes are divided by all
        tokens of the context, and errors of keys and values count kept tokens only.
    quartiles : list of float or None
        A quarter, half and three quarters of the heads have at most these errors: of outputs with queries,
        otherwise of keys and values.
    halves : list of float or None
        The mean of this error over the first and the second half of the tokens; with queries, of the tokens
        whose queries measure it.
    entropy, channel_entropy : float or None
        Bits per number that a lossless coder would need for codes and scales: with a table of code
        frequencies for the keys or values of a layer, or for each of their channels. Tables are not counted,
        nor more than about 2,048 tokens of a layer. None with eviction.
    order_holds : float or None
        The share of the other schemes (or policies) that are better in both halves or worse in both.
    """

    scheme: str
    bits: float
    bytes_per_token: float
    key_error: float
    value_error: float
    worst_error: float
    largest_error: float
    cosine: float
    at_end: float | None = None
    zero: float | None = None
    kl: float | None = None
    top_changed: float | None = None
    output_error: float | None = None
    logit_error: float | None = None
    perplexity: float | None = None
    agreement: float | None = None
    worst_output: float | None = None
    tokens_kept: float | None = None
    weight_kept: float | None = None
    quartiles: list[float] | None = None
    halves: list[float] | None = None
    order_holds: float | None = None
    entropy: float | None = None
    channel_entropy: float | None = None

    @property
    def evicts(self) -> bool:
        """Return whether tokens are evicted."""
        return parts_of(self.scheme) is not None

    @property
    def is_oracle(self) -> bool:
        """Return whether this is the oracle, which sees the judging queries, unlike any real policy."""
        parts = parts_of(self.scheme)
        return parts is not None and parts.scorer == ORACLE

    @property
    def advised_error(self) -> float:
        """Return the error of the worst head: of its outputs with queries, otherwise of keys and values.

        It is infinite for the oracle, and for eviction without queries, which are never advised.
        """
        if self.is_oracle or (self.evicts and self.worst_output is None):
            return float("inf")
        return self.worst_error if self.worst_output is None else self.worst_output


@dataclass(frozen=True)
class ChosenMix:
    """Holds the mix of formats that loses least at so many bits, or that needs the fewest for an error.

    An error is the root mean square, over layers, of the relative errors of a layer's attention outputs.

    Attributes
    ----------
    text : str
        The mix, as `kvkit.cache.QuantizedCache` takes it. `Summary.scheme` and rows have it, too.
    layers : tuple of (int, str, str)
        The number of each layer, and its formats of keys and of values.
    num_layers : int or None
        How many layers the model has; None if the source has only some of them.
    bits : float
        Stored bits per number, scales included.
    resolution : float
        By how many bits a number the search may miss the fewest; 0 if it is exact.
    error_assumed : float
        The error on the queries that chose the mix.
    error_measured : float
        The error on the held-back queries, which the search did not see.
    queries, held_back : int
        How many queries chose the mix, and how many measured it, of each layer.
    target : str
        What was asked for: "4.5 bits" or "an error of 5 %".
    uniform : tuple of (str, float, float), or None
        The best single format within the same bits or error: its name, bits, and error as `error_measured`.
    above_target : bool
        Whether an error was asked for, and `error_measured` is above it.
    """

    text: str
    layers: tuple[tuple[int, str, str], ...]
    num_layers: int | None
    bits: float
    resolution: float
    error_assumed: float
    error_measured: float
    queries: int
    held_back: int
    target: str
    uniform: tuple[str, float, float] | None = None
    above_target: bool = False


@dataclass(frozen=True)
class StudyRecord:
    """Holds what a study has measured.

    Attributes
    ----------
    source : str
    layers : list of str
    num_kv_heads, tokens : int
    summary : list of Summary
        One for each scheme, in the caller's order.
    rows : list of dict
        One for each scheme, layer, head and side with relative_rms, largest_error, cosine, at_end, zero; one
        for each scheme, layer and head with side "attention", logit_error, kl, output_error, top_changed.
    outliers : list of dict
        For each layer, head and side: largest mean magnitude of a channel / median of all channels.
    channels : list of dict
        For each layer: mean magnitudes of keys [heads, dim].
    notes : tuple of str
    threshold : float
        The largest error of a head that the advice accepts. It is arbitrary; models differ.
    mix : ChosenMix or None
        The mix of formats that a study with `bits` or `error` recommends.
    """

    source: str
    layers: list[str]
    num_kv_heads: int
    tokens: int
    summary: list[Summary]
    rows: list[TableRow] = field(repr=False)
    outliers: list[TableRow] = field(repr=False)
    channels: list[TableRow] = field(repr=False)
    notes: tuple[str, ...] = ()
    threshold: float = THRESHOLD
    mix: ChosenMix | None = None

    @property
    def evicts(self) -> bool:
        """Return whether the study compares policies."""
        return any(one.evicts for one in self.summary)

    @property
    def by_attention(self) -> bool:
        """Return whether there were queries; then the advice uses the outputs of attention."""
        return any(one.worst_output is not None for one in self.summary)

    @property
    def unjudged(self) -> bool:
        """Return whether there are policies but no queries, without which their cost is unknown."""
        return self.evicts and not self.by_attention

    def worst(self, scheme: str, count: int = WORST) -> list[TableRow]:
        """Return the worst heads of a scheme: by divergence if there were queries, otherwise by error."""
        own = [row for row in self.rows if row["scheme"] == scheme]
        by = "kl" if any("kl" in row for row in own) else "relative_rms"
        return sorted((row for row in own if by in row), key=lambda row: -row[by])[:count]

    @property
    def advised(self) -> Summary | None:
        """Return the smallest scheme whose worst head has an error within the threshold; None without any."""
        fine = [one for one in self.summary if one.advised_error <= self.threshold]
        return min(fine, key=lambda one: one.bits, default=None)

    def budget(self) -> str:
        """Return a line that names the smallest scheme whose worst head has an error within the threshold."""
        what = "attention output" if self.by_attention else "keys and values"
        within = f"the {what} of every head within an error of {100 * self.threshold:g} %"
        arbitrary = f"(an arbitrary limit: threshold={self.threshold:g})"
        best = self.advised
        if self.unjudged and best is None and all(one.evicts for one in self.summary):
            return "without queries no policy can be advised"
        if best is None:
            return f"no scheme keeps {within} {arbitrary}"
        return (
            f"the smallest that keeps {within}: {best.scheme}, {best.bits:.2f} bits a number, "
            f"{best.bytes_per_token:,.0f} bytes a token {arbitrary}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        channels = [row | {"means": row["means"].tolist()} for row in self.channels]
        return asdict(self) | {"channels": channels, "budget": self.budget()}
