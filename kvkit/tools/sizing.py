"""Compute how many bytes a model's cache takes, from the model's configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from kvkit.checks.values import integer
from kvkit.errors import argument_error, describe, hints_keywords
from kvkit.files.model_config import read_model
from kvkit.formats.elements import BY_NAME, FLOATS
from kvkit.formats.known import ALIASES
from kvkit.formats.mixes import mix_named, mix_text, split_formats
from kvkit.formats.schemes import Coded, schemes_named
from kvkit.models.description import LayerShape
from kvkit.tools.quantities import parse_bytes, token_counts
from kvkit.tools.quantized_sizes import quantized_bytes
from kvkit.tools.text import columns
from kvkit.tools.text import size as in_words

LATENT_FORMATS = "ds_mla", "ds_v4"  # their index keys are fp8 codes with a float32 scale
INDEX_SCALE_BYTES = 4
STATE_BYTES = 4  # bytes of a number of a recurrent state, which is float32
ENDLESS = 2**40  # tokens; if a cache of this length fits, the context has no limit


@dataclass(frozen=True)
class EngineRounding:
    """Computes how many rows an engine allocates for a sequence of n tokens."""

    full: Callable[[int], int]  # f(n), in a layer that keeps all tokens
    sliding: Callable[[int, int, int], int]  # f(n, window, step), in a layer with a window
    step: int  # new tokens of a step, by default


def round_up(count: int, unit: int) -> int:
    """Round a count up to a multiple of `unit`."""
    return -(-count // unit) * unit


ENGINES = {
    "exact": EngineRounding(lambda n: n, lambda n, window, step: min(n, window), 0),
    # Layers with a window keep the last window - 1 tokens for the next step.
    **dict.fromkeys(
        ("kvkit", "transformers"),
        EngineRounding(lambda n: n, lambda n, window, step: min(n, window - 1), 0),
    ),
    # Blocks have 16 tokens. With a window a sequence may have one more block, and the tokens of a step.
    "vllm": EngineRounding(
        lambda n: round_up(n, 16), lambda n, window, step: round_up(min(window - 1 + step, n), 16) + 16, 8192
    ),
    # The cache has a multiple of 256 cells. With a window it has room for a micro-batch, too.
    "llama.cpp": EngineRounding(
        lambda n: round_up(n, 256),
        lambda n, window, step: round_up(min(round_up(n, 256), window + step), 256),
        512,
    ),
}


@dataclass(frozen=True)
class SizedLayers:
    """Describes what layers of one kind store: rows of keys and values, or a state."""

    kind: str  # of `kvkit.models.description.KINDS`, or "index": the keys that choose rows of these layers
    num_layers: int
    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    state: int = 0
    ratio: int = 1  # tokens of a row

    def rows(self, tokens: int, engine: EngineRounding, step: int) -> int:
        """Return how many rows a layer has for a sequence of `tokens` tokens."""
        if self.window is not None:
            return engine.sliding(tokens, self.window, step)
        return engine.full(tokens) // self.ratio


def stored_by(layer: LayerShape, count: int) -> list[SizedLayers]:
    """Return what `count` layers of a shape store, in parts: rows, index keys, states."""
    sizes = layer.num_kv_heads, layer.key_dim, layer.value_dim
    parts = []
    if layer.kind == "compressed":
        parts.append(SizedLayers("window", count, *sizes, layer.window))
        if layer.ratio:
            parts.append(SizedLayers("compressed", count, *sizes, None, layer.state, layer.ratio))
    elif layer.kind == "both":
        parts.append(SizedLayers("full" if layer.window is None else "window", count, *sizes, layer.window))
        parts.append(SizedLayers("state", count, state=layer.state))
    else:
        parts.append(SizedLayers(layer.kind, count, *sizes, layer.window, layer.state))
    if layer.index_dim:
        parts.append(SizedLayers("index", count, 1, layer.index_dim, ratio=max(layer.ratio, 1)))
    return parts


@dataclass(frozen=True)
class SizedCache:
    """Holds the size of one cache: with `fit`, of the longest that fits."""

    tokens: int
    batch: int
    format: str
    key_bytes: int
    value_bytes: int
    state_bytes: int

    @property
    def bytes(self) -> int:
        """Return the sum of the bytes of keys, values and states."""
        return self.key_bytes + self.value_bytes + self.state_bytes


@dataclass(frozen=True)
class CacheSizes:
    """The result of `size`.

    Attributes
    ----------
    model : str
    num_layers : int
    layers : list of SizedLayers
        What layers store, by kind. A layer with rows and a state, or with index keys, is in two of them.
    caches : list of SizedCache
        One for each context length, batch and format; with ``fit`` the longest for each batch and format.
    engine : str
    fit : int, optional
        The bytes that a cache may take, without those of the weights.
    longest : int, optional
        The tokens of the longest context that the model's configuration names.
    weights : int, optional
        The bytes of the weights.
    wanted : list of SizedCache
        With ``fit``: the caches of the context lengths that were named.
    """

    model: str
    num_layers: int
    layers: list[SizedLayers]
    caches: list[SizedCache]
    engine: str
    fit: int | None = None
    longest: int | None = None
    weights: int | None = None
    wanted: list[SizedCache] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Return which wanted contexts fit; what sizes leave out: weights beside `fit`, the last position."""
        found = []
        for each in self.wanted:
            several = f", batch {each.batch}," if each.batch > 1 else ""
            fits = "fit" if each.bytes <= (self.fit or 0) else "do not fit"
            taken = in_words(each.bytes)
            found.append(f"{each.tokens} tokens{several} in {each.format} take {taken}: they {fits}")
        if self.fit is not None and self.weights is None:
            found.append("the weights are not taken off: give their size, as weights=16GB")
        if self.longest and any(self.longest < each.tokens < ENDLESS for each in self.caches):
            found.append(
                f"the model's configuration ends at {self.longest} tokens: it cannot use longer contexts"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        caches = [asdict(each) | {"bytes": each.bytes} for each in self.caches]
        return asdict(self) | {"caches": caches, "notes": self.notes}

    def __str__(self) -> str:
        def shown(number: int | None) -> str:
            return str(number) if number else ""

        heads = ["kind", "layers", "heads", "key dim", "value dim", "window", "state", "tokens a row"]
        rows = [(each.kind, *map(shown, list(asdict(each).values())[1:])) for each in self.layers]
        if all(each.ratio == 1 for each in self.layers):
            heads, rows = heads[:-1], [row[:-1] for row in rows]
        parts = [f"{self.model}: {self.num_layers} layers", columns(heads, rows, 20)]
        if self.fit is not None:
            longest = [(str(each.batch), each.format, str(each.tokens) if each.tokens < ENDLESS else "any",
                        in_words(each.bytes)) for each in self.caches]  # fmt: skip
            beside = "" if self.weights is None else f", beside {in_words(self.weights)} of weights"
            parts.append(f"the longest contexts that fit into {in_words(self.fit)}{beside}:")
            parts.append(columns(("batch", "format", "tokens", "size"), longest, 40))
        else:
            formats = list(dict.fromkeys(each.format for each in self.caches))
            table: dict[tuple[int, int], list[str]] = {}
            for each in self.caches:
                table.setdefault((each.tokens, each.batch), []).append(in_words(each.bytes))
            lines = [(str(tokens), str(batch), *sizes) for (tokens, batch), sizes in table.items()]
            parts.append(columns(("tokens", "batch", *formats), lines, 40))
        parts += ["\n".join(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n\n".join(parts)


@hints_keywords
def size(
    model: Any = None,
    *,
    num_layers: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    tokens: Sequence[int | str] | int | str | None = None,
    batch: Sequence[int] | int = 1,
    formats: Sequence[str] | str = "float16",
    engine: str = "exact",
    step: int | None = None,
    fit: int | str | None = None,
    weights: int | str | None = None,
    residual_length: int | None = None,
    sink: int | None = None,
) -> CacheSizes:
    """Compute how many bytes the cache of a model takes, by context length, batch and format.

    The model's weights are not read. A layer's size depends on its kind: full or sliding attention, latent
    rows (MLA), recurrent, or sharing the cache of another layer.

    Parameters
    ----------
    model : path, mapping or PreTrainedConfig
        A config.json of transformers, a folder that has one, a GGUF file, a configuration, or the name of one
        of the models in `kvkit.models.known`, such as ``"llama-3.1-8b"``.
    num_layers, num_kv_heads, head_dim : int, optional
        Instead of `model`: how many layers it has, heads of keys, and elements of a head.
    tokens : int, str or sequence of them, optional
        Lengths of a sequence, such as ``"4096,128k"`` (k is 1,024). None: 4,096, 32,768 and the longest
        context that the model was trained for.
    batch : int or sequence of int
        How many sequences of that length the cache has.
    formats : str or sequence of str
        Names of formats, or mixes: see `study`. Such as ``"float16,q8_0,int8@0,-1/int4:g32"``. Scales are
        counted.
    engine : {"exact", "kvkit", "transformers", "vllm", "llama.cpp"}
        The engine that rounds lengths up to pages and windows. "exact" counts the tokens attention can read.
        "kvkit" counts what a `DynamicCache` takes, and for formats a `QuantizedCache`: its sinks, recent
        tokens and layers with a window stay 16-bit floats. Copies by which the last step can be undone (one
        token, or one group of tokens) are not counted.
    step : int, optional
        The most new tokens of a step. vLLM (8,192 by default) and llama.cpp (512) keep room for them.
    fit : int or str, optional
        Bytes, such as ``"24GiB"``. Find the longest contexts that fit into them; notes say
        whether those of ``tokens`` do.
    weights : int or str, optional
        Bytes of ``fit`` that the model's weights take, such as ``"16GB"``.
    residual_length, sink : int, optional
        As in `QuantizedCache`, for engine "kvkit": by default 128 recent tokens and 4 sinks.

    Returns
    -------
    CacheSizes

    Raises
    ------
    KvkitError
        If the configuration lacks a number, or has layers of a type that kvkit does not know.

    Examples
    --------
    >>> from kvkit.tools import size
    >>> size(num_layers=32, num_kv_heads=8, head_dim=128, tokens=4096).caches[0].bytes // 2**20
    512
    """
    sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    given = sum(number is not None for number in sizes.values())
    if given != (len(sizes) if model is None else 0):
        found = "both" if model is not None else "not all of them" if given else "neither"
        raise argument_error("model", f"a model, or {', '.join(sizes)} instead", found)
    if model is None:
        heads = integer("num_kv_heads", num_kv_heads, 1)
        model = {"num_hidden_layers": num_layers, "num_attention_heads": heads, "head_dim": head_dim}
    shape = read_model(model)
    if engine not in ENGINES:
        raise argument_error("engine", f"one of {', '.join(ENGINES)}", describe(engine))
    rounding = ENGINES[engine]
    step = rounding.step if step is None else integer("step", step, 0)
    distinct: dict[LayerShape, list[int]] = {}
    for i, layer in enumerate(shape.layers):
        distinct.setdefault(replace(layer, source=None), []).append(i)
    parts = [(each, own) for layer, own in distinct.items() for each in stored_by(layer, len(own))]
    layers, numbers = [part for part, _ in parts], [own for _, own in parts]
    names = [name for text in several(formats) for name in split_formats(text)]
    unquantized = {"residual_length": residual_length, "sink": sink}
    unquantized = {name: value for name, value in unquantized.items() if value is not None}
    if engine != "kvkit" and unquantized:
        wanted = "None but for engine 'kvkit', which has such tokens"
        raise argument_error(next(iter(unquantized)), wanted, next(iter(unquantized.values())))

    def count_of(name: str) -> Count:
        if engine == "kvkit" and BY_NAME.get(ALIASES.get(name, name)) not in FLOATS:
            return quantized_count(layers, name, **unquantized)
        return plain_count(row_bits(name, layers))

    counts: dict[str, Count] = {}
    for name in names:
        mix = mix_named(name)
        if mix.by_layer:
            counts[name] = mixed_count(mix.of_layers(len(shape.layers)), numbers, count_of)
        else:
            counts[name] = count_of(mix.text)
    batches = [integer("batch", each, 1) for each in several(batch)]

    def sized(tokens: int, batch: int, format: str) -> SizedCache:
        keys = values = states = 0.0
        for i, layer in enumerate(layers):
            times = batch * layer.num_layers
            of_keys, of_values = counts[format](i, layer, layer.rows(tokens, rounding, step))
            keys, values = keys + times * of_keys, values + times * of_values
            states += times * layer.state * STATE_BYTES
        return SizedCache(tokens, batch, format, int(keys), int(values), int(states))

    most, of_weights = bytes_of_cache(fit, weights)
    usual = [n for n in (4096, 32768, shape.longest) if n and most is None]
    lengths = usual if tokens is None else token_counts("tokens", tokens)
    caches = [sized(n, b, f) for n in sorted(set(lengths)) for b in batches for f in counts]
    named: list[SizedCache] = []
    if most is not None:
        named = caches
        caches = [longest(partial(sized, batch=b, format=f), most) for b in batches for f in counts]
    return CacheSizes(
        shape.name, len(shape.layers), layers, caches, engine,
        fit=most, longest=shape.longest, weights=of_weights, wanted=named,
    )  # fmt: skip


def bytes_of_cache(fit: int | str | None, weights: int | str | None) -> tuple[int | None, int | None]:
    """Return how many bytes a cache may take beside the weights, and how many these take."""
    if fit is None:
        if weights is not None:
            raise argument_error("weights", "fit beside them: the bytes of both", "None")
        return None, None
    most = parse_bytes("fit", fit)
    if weights is None:
        return most, None
    taken = parse_bytes("weights", weights)
    if taken > most:
        raise argument_error("weights", f"at most the {in_words(most)} of fit", weights)
    return most - taken, taken


def several(value: Any) -> list[Any]:
    """Return a sequence as a list, and any other value (also a text) as a list of one."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def row_bits(format: str, layers: list[SizedLayers]) -> list[tuple[float, float]]:
    """Return for each part (bits of a token's keys, bits of its values), scales included."""
    element = BY_NAME.get(ALIASES.get(format, format))
    schemes = None if element in FLOATS else schemes_named(format)

    def bits(layer: SizedLayers, side: int) -> float:
        heads, dim = layer.num_kv_heads, (layer.key_dim, layer.value_dim)[side]
        if schemes is None or not heads * dim:
            return heads * dim * (element.bits if element else 0)
        if not isinstance(scheme := schemes[side], Coded):
            raise argument_error("formats", "floats and formats, no registered scheme", repr(format))
        if layer.kind == "index" and format.partition(":")[0] in LATENT_FORMATS:
            return 8 * (dim + INDEX_SCALE_BYTES)
        zeros = np.zeros((scheme.step, heads, dim), np.float32)
        coded = scheme.over([zeros])
        return coded.stored(coded.encode(zeros), 16, first=False) / len(zeros)

    return [(bits(layer, 0), bits(layer, 1)) for layer in layers]


# f(number of a part, its layers, rows) -> (bytes of keys, of values) that a sequence has in one layer
Count = Callable[[int, SizedLayers, int], tuple[float, float]]


def plain_count(bits: list[tuple[float, float]]) -> Count:
    """Return the bytes of rows that are all alike; `bits` is of `row_bits`."""
    return lambda i, layer, rows: (rows * bits[i][0] / 8, rows * bits[i][1] / 8)


def mixed_count(
    formats: Sequence[tuple[str, str]], numbers: Sequence[Sequence[int]], count_of: Callable[[str], Count]
) -> Count:
    """Return the mean bytes of rows in the layers of a part, whose `numbers` say which formats they have."""
    counts = {pair: count_of(mix_text([pair])) for pair in set(formats)}

    def count(i: int, layer: SizedLayers, rows: int) -> tuple[float, float]:
        keys, values = np.mean([counts[formats[number]](i, layer, rows) for number in numbers[i]], 0)
        return float(keys), float(values)

    return count


def quantized_count(layers: list[SizedLayers], format: str, **unquantized: Any) -> Count:
    """Return the bytes of rows in a `QuantizedCache`, which codes those of layers without a window."""
    for layer in layers:
        if layer.kind not in ("full", "window", "state", "conv", "shared", "none"):
            wanted = f"floats for layers of kind {layer.kind}, which a QuantizedCache does not have"
            raise argument_error("formats", wanted, repr(format))
    floats, coded = plain_count(row_bits("float16", layers)), quantized_bytes(format, **unquantized)

    def count(i: int, layer: SizedLayers, rows: int) -> tuple[float, float]:
        if layer.kind != "full":
            return floats(i, layer, rows)
        keys = coded(0, rows, layer.num_kv_heads, layer.key_dim)
        return keys, coded(1, rows, layer.num_kv_heads, layer.value_dim)

    return count


def longest(sized: Callable[[int], SizedCache], most: int) -> SizedCache:
    """Find the longest cache of at most `most` bytes by bisection; 0 tokens if one token does not fit."""
    low, high = 0, ENDLESS + 1  # `low` tokens fit (or it is 0); `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sized(middle).bytes <= most else (low, middle)
    return sized(low)
