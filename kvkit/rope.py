"""Describe a model's rotary position embedding, and rotate or move keys with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from kvkit.checks.values import finite_number, flag, integer, positive_number
from kvkit.errors import KvkitError, argument_error, describe, hints_keywords
from kvkit.formats.elements import FLOATS
from kvkit.interop import integers, returns_input_kind
from kvkit.models.configuration import read_ropes
from kvkit.models.description import RopeWords
from kvkit.models.rotations import NO_ROTATION
from kvkit.typed import Array

FLOAT_DTYPES = {np.dtype(np.float64), *(each.dtype for each in FLOATS)}
# What error messages expect
DYNAMIC = "a fixed base: dynamic NTK scaling computes it from the length of each call"
AXES = "one position for each token, or text_only=True where all axes are equal"
LONGROPE = "long=True or long=False, the list that all keys were made with"


@hints_keywords
@dataclass(frozen=True)
class Rope:
    """The rotary position embedding of a model's keys.

    Pair i of ``rotary_dim`` elements is rotated by ``position * frequencies[i]``. The elements before
    ``begin`` and after the pairs are left alone.

    Parameters
    ----------
    rotary_dim : int
        How many elements of a head are rotated, an even number.
    theta : float
        The base: pair i has the frequency ``theta ** (-2 * i / rotary_dim)`` before scaling.
    interleaved : bool
        Whether a pair is two neighbours; else it is elements i and i + rotary_dim / 2.
    scaling : mapping, optional
        As ``rope_parameters`` of transformers: ``rope_type`` is ``"default"``, ``"linear"``, ``"llama3"``,
        ``"yarn"``, ``"longrope"`` or ``"proportional"`` (Gemma 4), with its parameters. For longrope,
        ``long`` says whether all keys were rotated with the long list. A model with several position axes
        (``mrope_section``) needs ``text_only=True``: positions on all axes are equal, as in text.
    begin : int
        The first rotated element of a head: 128 in DeepSeek's keys, 512 in latent rows.

    Attributes
    ----------
    frequencies : ndarray of float64, shape [rotary_dim / 2]
    attention_factor : float
        The factor that `rotate` multiplies keys with. `shift` does not, because keys get it once.

    Raises
    ------
    KvkitError
        If an argument is wrong, or if such keys cannot be moved later, as with dynamic NTK scaling.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> rope, keys = kvkit.Rope(4), np.array([[1., 2, 3, 4]])
    >>> at_three = rope.rotate(keys, 3)
    >>> bool(np.allclose(rope.shift(at_three, -2), rope.rotate(keys, 1)))
    True
    """

    rotary_dim: int
    theta: float = 1e4
    interleaved: bool = False
    scaling: Mapping[str, Any] | None = field(default=None, compare=False)
    begin: int = 0
    frequencies: Array = field(init=False, repr=False, compare=False)
    attention_factor: float = field(init=False, repr=False)
    _frequency_bytes: bytes = field(init=False, repr=False)  # the frequencies, for == and hash

    def __post_init__(self) -> None:
        if integer("rotary_dim", self.rotary_dim, 2) % 2:
            raise argument_error("rotary_dim", "an even number", self.rotary_dim)
        if positive_number("theta", self.theta) <= 1:
            raise argument_error("theta", "a number above 1", self.theta)
        flag("interleaved", self.interleaved)
        integer("begin", self.begin, 0)
        if self.scaling is not None and not isinstance(self.scaling, Mapping):
            raise argument_error("scaling", "a mapping, or None", describe(self.scaling))
        numbers = copy.deepcopy(dict(self.scaling or {}))
        if self.scaling is not None:
            object.__setattr__(self, "scaling", numbers)  # a copy, because the caller may change its mapping
        kind = numbers.get("rope_type", numbers.get("type", "default"))
        if "mrope_section" in numbers and numbers.get("text_only") is not True:
            raise argument_error("scaling", AXES, f"mrope_section {numbers['mrope_section']}")
        if kind == "dynamic":
            raise argument_error("scaling", DYNAMIC, "rope_type 'dynamic'")
        kind = "default" if kind == "mrope" else kind
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise argument_error("scaling", f"a rope_type of {', '.join(SCALINGS)}", repr(kind))
        inverse = self.theta ** (-2 * np.arange(self.rotary_dim // 2) / self.rotary_dim)
        frequencies, factor = SCALINGS[kind](self, inverse, numbers)
        frequencies.flags.writeable = False
        object.__setattr__(self, "frequencies", frequencies)
        object.__setattr__(self, "attention_factor", factor)
        object.__setattr__(self, "_frequency_bytes", frequencies.tobytes())

    @returns_input_kind
    def rotate(self, states: Array, positions: ArrayLike) -> Array:
        """Rotate queries or keys [..., tokens, dim] by their positions; multiply with `attention_factor`.

        Parameters
        ----------
        states : ndarray, shape [..., tokens, dim]
            float64, float32, float16 or bfloat16; or a torch tensor of these.
        positions : array_like of int
            One for each token, or one for all; any shape that broadcasts to that of ``states`` without dim.

        Returns
        -------
        ndarray
            Of the shape and dtype of ``states``; float64 is computed as such, other dtypes in float32.
        """
        return self._rotated(states, "positions", positions, self.attention_factor)

    @returns_input_kind
    def shift(self, states: Array, delta: ArrayLike) -> Array:
        """Move rotated queries or keys [..., tokens, dim] by `delta` positions, by rotating them further.

        Parameters
        ----------
        states : ndarray, shape [..., tokens, dim]
        delta : array_like of int
            The number of positions, for each token or for all.

        Returns
        -------
        ndarray
            Of the shape and dtype of ``states``.
        """
        return self._rotated(states, "delta", delta, 1.0)

    def _rotated(self, states: Array, name: str, positions: ArrayLike, factor: float) -> Array:
        if not isinstance(states, np.ndarray) or states.dtype not in FLOAT_DTYPES:
            raise argument_error("states", "an array of floats", describe(states))
        shape = states.shape[:-1]
        if states.ndim == 0 or states.shape[-1] < self.end:
            raise argument_error("states", f"heads of {self.end} elements or more", f"shape {states.shape}")
        positions = integers(name, positions)
        sizes = zip(positions.shape[::-1], shape[::-1], strict=False)
        if positions.ndim > len(shape) or any(size not in (1, tokens) for size, tokens in sizes):
            wanted = f"one for each token of states, {shape}, or one for all"
            raise argument_error(name, wanted, f"shape {positions.shape}")
        dtype = np.float64 if states.dtype == np.float64 else np.float32
        rotated: Array = np.empty_like(states, dtype, subok=False)
        self.write_rotated(states.astype(dtype, copy=False), *self.cos_sin(positions, dtype, factor), rotated)
        return rotated.astype(states.dtype, copy=False)

    def cos_sin(self, positions: ArrayLike, dtype: DTypeLike, factor: float = 1.0) -> tuple[Array, Array]:
        """Return the cosines and the sines [..., pairs] that `write_rotated` takes, for some positions."""
        angles = np.asarray(positions, np.float64)[..., None] * self.frequencies  # [tokens, pairs]
        return (np.cos(angles) * factor).astype(dtype), (np.sin(angles) * factor).astype(dtype)

    def angles(self, positions: ArrayLike) -> Array:
        """Return the cosine and the sine of every pair's angle, times `attention_factor`, in float32.

        Parameters
        ----------
        positions : array_like of int

        Returns
        -------
        ndarray of float32, shape [..., rotary_dim / 2, 2]
        """
        positions = integers("positions", positions)
        return np.stack(self.cos_sin(positions, np.float32, self.attention_factor), -1)

    def write_rotated(self, states: Array, cosines: Array, sines: Array, out: Array) -> None:
        """Write states [..., dim] to `out`: their pairs rotated, all other elements as they are."""
        out[..., : self.begin] = states[..., : self.begin]
        out[..., self.end :] = states[..., self.end :]
        first, second = self.pairs()
        x, y = states[..., first], states[..., second]
        rotated_x, rotated_y = out[..., first], out[..., second]
        np.multiply(x, cosines, out=rotated_x)
        np.subtract(rotated_x, y * sines, out=rotated_x)
        np.multiply(x, sines, out=rotated_y)
        np.add(rotated_y, y * cosines, out=rotated_y)

    def pairs(self) -> tuple[slice, slice]:
        """Return where the first and the second elements of pairs lie in a head."""
        begin, half = self.begin, self.begin + self.rotary_dim // 2
        if self.interleaved:
            return slice(begin, self.end, 2), slice(begin + 1, self.end, 2)
        return slice(begin, half), slice(half, self.end)

    @property
    def end(self) -> int:
        """Return the index of the first element after the rotated ones."""
        return self.begin + self.rotary_dim

    def describe(self) -> dict[str, Any]:
        """Return the arguments of the constructor as values that a file can hold."""
        scaling = {name: np.asarray(value).tolist() for name, value in (self.scaling or {}).items()}
        arguments = {"rotary_dim": self.rotary_dim, "theta": self.theta, "interleaved": self.interleaved}
        begin = {"begin": self.begin} if self.begin else {}
        return arguments | {"scaling": scaling or None} | begin

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        long: bool | None = None,
        text_only: bool = False,
        interleaved: bool | None = None,
        expanded: bool = False,
    ) -> list[Self | str]:
        """Read from a model's configuration how each layer rotates its keys.

        Parameters
        ----------
        config : mapping or PreTrainedConfig
            The entries of a config.json, or an object that has them as attributes.
        long : bool, optional
            For longrope: whether all keys were rotated with the long list.
        text_only : bool
            For models with several position axes: whether positions on all axes are equal.
        interleaved : bool, optional
            Whether a pair is two neighbours. Configs do not say this: without it, the `model_type` decides
            (True for Cohere, GLM, GPT-J and others, else False). DeepSeek's weights rotate neighbours;
            transformers reorders them to halves before it caches a key.
        expanded : bool
            For latent models: whether keys are [qk_nope_head_dim, qk_rope_head_dim]. Else they are rows of a
            `LatentLayer`, whose rotated elements follow the latent vector.

        Returns
        -------
        list of Rope or "none"
            An entry for each layer; ``"none"`` for a layer that rotates nothing, or has no keys.

        Raises
        ------
        KvkitError
            If the config does not show it, as for GPT-2, whose positions are added to the embeddings; if an
            entry about positions was not used, or if two disagree.
        """
        options = {"long": long} if long is not None else {}
        options |= {"text_only": True} if text_only else {}

        def rope_of(words: RopeWords | str) -> Self | str:
            if isinstance(words, str):
                return words
            pairs = words.interleaved if interleaved is None else interleaved
            if pairs is None:
                wanted = "True or False for this model, whose config does not say which elements are pairs"
                raise argument_error("interleaved", wanted, "None")
            scaling = words.scaling | options
            return cls(words.rotary_dim, words.theta, pairs, scaling, words.begin)

        return [rope_of(words) for words in read_ropes(config, expanded=expanded)]


def as_rope(rope: object) -> Rope | str | None:
    """Return a checked `rope` argument: a `Rope`, also made from its arguments by name, "none" or None."""
    if isinstance(rope, Mapping):
        try:
            return Rope(**rope)
        except (TypeError, KvkitError) as error:
            raise argument_error("rope", "arguments of kvkit.Rope", f"{describe(rope)} ({error})") from None
    if rope is None or isinstance(rope, Rope):
        return rope
    if isinstance(rope, str) and rope == NO_ROTATION:
        return rope
    raise argument_error("rope", "a kvkit.Rope, its arguments by name, 'none' or None", describe(rope))


Scaled = tuple[Array, float]  # frequencies, and the factor of keys (`attention_factor`)
Scaling = Callable[[Rope, Array, Mapping[str, Any]], Scaled]
SCALINGS: dict[str, Scaling] = {}  # by rope_type


def scaling(rule: Scaling) -> Scaling:
    """Decorate the function that scales frequencies, whose name is a rope_type."""
    SCALINGS[rule.__name__] = rule
    return rule


def number_of(numbers: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a positive number of a scaling by its name; a number without a default is required."""
    value = numbers.get(name)
    value = default if value is None else value
    if value is None:
        raise argument_error("scaling", f"a number {name}", "none")
    return positive_number(name, value)


def trained_length(numbers: Mapping[str, Any]) -> float:
    """Return the context length that the model was trained for before its positions were scaled."""
    names = "original_max_position_embeddings", "max_position_embeddings"
    lengths = [numbers[name] for name in names if numbers.get(name) is not None]
    return positive_number(names[0], lengths[0]) if lengths else number_of(numbers, names[0])


@scaling
def default(rope: Rope, inverse: Array, numbers: Mapping[str, Any]) -> Scaled:
    """Return the frequencies as they are."""
    return inverse, 1.0


@scaling
def linear(rope: Rope, inverse: Array, numbers: Mapping[str, Any]) -> Scaled:
    """Return frequencies divided by the factor that positions are scaled down with."""
    return inverse / number_of(numbers, "factor"), 1.0


@scaling
def llama3(rope: Rope, inverse: Array, numbers: Mapping[str, Any]) -> Scaled:
    """Return frequencies divided by the factor for long waves, unchanged for short, blended between."""
    factor = number_of(numbers, "factor")
    low = number_of(numbers, "low_freq_factor", 1)
    high, trained = number_of(numbers, "high_freq_factor", 4), trained_length(numbers)
    if low >= high:
        raise argument_error("low_freq_factor", f"a number below high_freq_factor, {high}", low)
    wave = 2 * np.pi / inverse  # tokens of a full turn
    smooth = (trained / wave - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    frequencies = np.where(wave > trained / low, inverse / factor, blended)
    return np.where(wave < trained / high, inverse, frequencies), 1.0


@scaling
def yarn(rope: Rope, inverse: Array, numbers: Mapping[str, Any]) -> Scaled:
    """Return frequencies that pass from unscaled to scaled over a ramp of pairs, and the factor of keys."""
    trained = trained_length(numbers)
    if numbers.get("factor") is None and numbers.get("max_position_embeddings"):
        factor = number_of(numbers, "max_position_embeddings") / trained
    else:
        factor = number_of(numbers, "factor")
    fast, slow = number_of(numbers, "beta_fast", 32), number_of(numbers, "beta_slow", 1)
    dim, log_theta = rope.rotary_dim, math.log(rope.theta)
    # The ramp goes from the pair that makes `fast` turns over the trained length to that of `slow` turns.
    ends = [dim * math.log(trained / (2 * math.pi * turns)) / (2 * log_theta) for turns in (fast, slow)]
    if numbers.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    scaled = inverse / factor * ramp + inverse * (1 - ramp)
    if numbers.get("attention_factor") is not None:
        return scaled, finite_number("attention_factor", numbers["attention_factor"])
    mscale, all_dims = (finite_number(name, numbers.get(name) or 0) for name in ("mscale", "mscale_all_dim"))
    mscale, all_dims = (mscale, all_dims) if mscale and all_dims else (1, 0)
    log_factor = math.log(factor) if factor > 1 else 0.0
    return scaled, (0.1 * mscale * log_factor + 1) / (0.1 * all_dims * log_factor + 1)


@scaling
def longrope(rope: Rope, inverse: Array, numbers: Mapping[str, Any]) -> Scaled:
    """Return frequencies divided by the long or the short list, which `long` chooses for all keys."""
    long = numbers.get("long")
    if not isinstance(long, bool):
        raise argument_error("scaling", LONGROPE, "neither: models choose by the length of each call")
    name = "long_factor" if long else "short_factor"
    try:
        factors = np.asarray(numbers.get(name, ()), np.float64)
    except (TypeError, ValueError):
        raise argument_error(name, f"{len(inverse)} positive numbers", describe(numbers[name])) from None
    if factors.shape != inverse.shape or not ((factors > 0) & (factors < np.inf)).all():
        raise argument_error(name, f"{len(inverse)} positive numbers", factors.shape)
    factor = numbers.get("attention_factor")
    if factor is None:
        trained = trained_length(numbers)
        if trained <= 1:
            raise argument_error("original_max_position_embeddings", "a number above 1", trained)
        longest = number_of(numbers, "max_position_embeddings", trained)
        stretch = number_of(numbers, "factor", longest / trained)
        factor = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
    return inverse / factors, finite_number("attention_factor", factor)


@scaling
def proportional(rope: Rope, inverse: Array, numbers: Mapping[str, Any]) -> Scaled:
    """Return the frequencies of the first pairs of a head, a share of all, and 0 for the others."""
    share = number_of(numbers, "partial_rotary_factor", 1)
    if share > 1:
        raise argument_error("partial_rotary_factor", "a share of at most 1", share)
    rotated = np.arange(len(inverse)) < int(share * rope.rotary_dim // 2)
    return np.where(rotated, inverse, 0.0) / number_of(numbers, "factor", 1), 1.0
