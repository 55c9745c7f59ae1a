"""Define `GatedDeltaLayer`, which computes its recurrent state with the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from kvkit.cache.base import one_call_at_a_time
from kvkit.cache.layers import requests
from kvkit.cache.layers.changes import whole
from kvkit.cache.layers.state import StateLayer, state_span, up_to
from kvkit.cache.stores.states import NO_STATE, StateForms
from kvkit.checks.arguments import ConvArguments
from kvkit.checks.recurrent import KINDS, WIDEST_CONV, checked_conv
from kvkit.checks.values import checked_format, flag, integer, text
from kvkit.errors import argument_error, check_shape, describe, multiples
from kvkit.formats import FLOATS
from kvkit.interop import returns_input_kind
from kvkit.recurrent import causal_conv, delta_gates, gated_delta_replay, gated_delta_rule
from kvkit.typed import Array, Pair


class Recording(NamedTuple):
    """Holds what a recorded step did: enough to be at any of its tokens again."""

    capsule: Array  # [B, T, numbers], see `gated_delta_rule`
    inputs: Array  # [B, channels, K - 1 + T]: the convolution's inputs, those before the step first


class GatedDeltaLayer(StateLayer):
    """A layer of the gated delta rule (Qwen3-Next, Kimi Linear): convolution, gates and rule in one `step`.

    Its state is the arrays ``recurrent`` [B, heads, dk, dv] and ``conv`` [B, channels, K - 1]. While the past
    is recorded, a step is a checkpoint and a capsule of its last tokens, so `crop` can take back any of them.
    Recordings are not saved.

    Parameters
    ----------
    num_heads : int
        Heads of values.
    dk, dv : int
        Elements of a head of keys and of values.
    conv_channels : int
        2 * key heads * dk + heads * dv: queries, keys and values, in this order.
    conv_width : int
        Taps K of the convolution.
    kind : str
        ``"gdn"``: a decay for each head. ``"kda"``: for each channel of keys.
    norm : bool
        Whether queries and keys are normed, as the models do.
    drafts : int
        How many tokens at the end of a recorded step have a capsule, 24 KB a token in Qwen3-Next. Of a longer
        step (a prompt) all tokens can be taken back, those at its end, or none.
    checkpoint_every, max_checkpoints : int
        As in `StateLayer`.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import GatedDeltaLayer
    >>> rng, layer = np.random.default_rng(0), GatedDeltaLayer(2, 4, 4, 16, 4)
    >>> qkv, weight = rng.standard_normal((1, 5, 16), np.float32), np.ones((16, 4), np.float32)
    >>> a, b = rng.standard_normal((2, 1, 5, 2), np.float32)
    >>> zeros = np.zeros(2, np.float32)
    >>> layer.step(qkv, a, b, weight, gates=(zeros, zeros)).shape
    (1, 5, 2, 4)
    >>> layer.get_seq_length(), layer.states["recurrent"].shape
    (5, (1, 2, 4, 4))
    """

    _attributes = StateLayer._attributes.extended("_recordings")

    def __init__(
        self,
        num_heads: int,
        dk: int,
        dv: int,
        conv_channels: int,
        conv_width: int,
        *,
        kind: str = "gdn",
        norm: bool = True,
        drafts: int = 64,
        checkpoint_every: int = 0,
        max_checkpoints: int = 4,
    ) -> None:
        self.num_heads, self.dk, self.dv = (
            integer(name, size, 1) for name, size in (("num_heads", num_heads), ("dk", dk), ("dv", dv))
        )
        self.conv_channels = integer("conv_channels", conv_channels, 1)
        self.conv_width = integer("conv_width", conv_width, 1, WIDEST_CONV)
        self.kind, self.norm = text("kind", kind, KINDS), flag("norm", norm)
        self.drafts = integer("drafts", drafts, 1)
        keys, rest = divmod(self.conv_channels - self.num_heads * self.dv, 2 * self.dk)
        if rest or keys < 1 or self.num_heads % keys:
            wanted = (
                f"2 * key heads * {self.dk} + {self.num_heads * self.dv}, key heads dividing {self.num_heads}"
            )
            raise argument_error("conv_channels", wanted, self.conv_channels)
        self.key_heads = keys
        self._recordings: dict[int, Recording] = {}  # by the tokens before the step
        self._window: Array | None = None  # the convolution's inputs in the last `add_inputs`
        super().__init__(checkpoint_every, max_checkpoints)

    def _describe(self) -> dict[str, Any]:
        names = "dk", "dv", "conv_channels", "conv_width", "kind", "norm", "drafts"
        own = {"heads": self.num_heads} | {name: getattr(self, name) for name in names}
        return own | super()._describe()

    # Computing

    @returns_input_kind
    @one_call_at_a_time
    @whole
    def step(
        self,
        qkv: Array,
        a: Array,
        b: Array,
        conv_weight: Array,
        conv_bias: Array | None = None,
        *,
        gates: Pair,
        lower_bound: float | None = None,
        double_beta: bool = False,
        chunk: SupportsIndex = 64,
    ) -> Array:
        """Compute the outputs of new tokens, and the state after them.

        Parameters
        ----------
        qkv : ndarray, shape [B, T, conv_channels]
            Projected queries, keys and values, before the convolution; float32, float16 or bfloat16.
        a : ndarray, shape [B, T, heads], or [B, T, heads, dk] for ``"kda"``
            Raw decays.
        b : ndarray, shape [B, T, heads]
            Raw gates of writing.
        conv_weight, conv_bias : ndarray, shapes [conv_channels, K] and [conv_channels]
        gates : tuple (a_log [heads], dt_bias [heads] or [heads, dk])
        lower_bound, double_beta
            As in `kvkit.delta_gates`.
        chunk : int
            As in `kvkit.gated_delta_rule`.

        Returns
        -------
        ndarray, shape [B, T, heads, dv]
            In the dtype of `qkv`.

        Raises
        ------
        KvkitError
            If an argument is wrong. Then the layer has not changed.
        """
        fmt = checked_format("qkv", qkv, FLOATS, 3)
        batch, tokens, channels = qkv.shape
        sizes = self.batch_size or multiples(1), None, self.conv_channels
        check_shape("qkv", qkv, sizes, ("batch", "tokens", "channels"))
        inner = (self.num_heads, self.dk) if self.kind == "kda" else (self.num_heads,)
        for name, array, shape in (("a", a, inner), ("b", b, inner[:1])):
            checked_format(name, array, FLOATS, 2 + len(shape))
            axes = ("batch", "tokens", "heads", "dim")[: array.ndim]
            check_shape(name, array, (batch, tokens, *shape), axes)
        if not isinstance(gates, (tuple, list)) or len(gates) != 2:
            raise argument_error("gates", "a pair (a_log, dt_bias)", describe(gates))
        g, beta = delta_gates(a, b, *gates, kind=self.kind, lower_bound=lower_bound, double_beta=double_beta)
        integer("chunk", chunk, 1, 256)
        starts = np.arange(batch + 1) * tokens
        rows = qkv.reshape(-1, channels)
        check_shape("conv_weight", conv_weight, (channels, self.conv_width), ("channels", "width"))
        checked_conv(ConvArguments(rows, conv_weight, conv_bias, None, None, "silu", starts))
        before = self.span.length
        arrays = self._begin_step(StateForms(batch, self._state_forms(fmt.dtype)), tokens)
        self._overwrites()
        window = np.concatenate([arrays["conv"], np.swapaxes(qkv, 1, 2)], axis=2)
        mixed, _ = causal_conv(rows, conv_weight, conv_bias, state=arrays["conv"], starts=starts)
        return self._run(self._parted(mixed, batch), g, beta, arrays, chunk, before, window)

    @one_call_at_a_time
    @whole
    def advance(self, tokens: SupportsIndex) -> dict[str, Array]:
        self._window = None
        return (
            {} if self.store is None else self._begin_step(self.store.geometry, integer("tokens", tokens, 0))
        )

    @one_call_at_a_time
    @whole
    def add_inputs(self, inputs: Array, tokens: SupportsIndex) -> Array:
        """Count tokens whose convolution the caller computes; return its inputs, those before them first.

        Parameters
        ----------
        inputs : ndarray, shape [B, conv_channels, T]
        tokens : int
            How many of them to count now: T, or 0 after `advance`.

        Returns
        -------
        ndarray, shape [B, conv_channels, K - 1 + T]
        """
        fmt = checked_format("inputs", inputs, FLOATS, 3)
        if inputs.shape[1] != self.conv_channels or len(inputs) != (self.batch_size or len(inputs)):
            wanted = f"shape [{self.batch_size or 'B'}, {self.conv_channels}, tokens]"
            raise argument_error("inputs", wanted, describe(inputs))
        count, forms = integer("tokens", tokens, 0), StateForms(len(inputs), self._state_forms(fmt.dtype))
        arrays = self._begin_step(forms, count) if count else self.states
        self._overwrites()
        self._window = np.concatenate([arrays["conv"], inputs], axis=2)
        arrays["conv"][...] = self._window[..., inputs.shape[2] :]
        return self._window

    @one_call_at_a_time
    @whole
    def add_tokens(self, tokens: tuple[Array, Array, Array], g: Array, beta: Array, *, norm: bool) -> Array:
        """Compute the outputs of tokens that are counted, after their convolution, and the state after them.

        Parameters
        ----------
        tokens : tuple of ndarray, shapes [B, T, key heads, dk] twice and [B, T, heads, dv]
            Queries, keys and values of the last step.
        g, beta, norm
            As in `kvkit.gated_delta_rule`.

        Returns
        -------
        ndarray, shape [B, T, heads, dv]
        """
        before, self.norm = self.span.length - tokens[2].shape[1], norm
        self._overwrites()
        return self._run(tokens, g, beta, self.states, 64, before, self._window)

    def _state_forms(self, dtype: Any) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return the shapes of the arrays of a state, without the batch, and their dtypes."""
        return {
            "recurrent": ((self.num_heads, self.dk, self.dv), np.dtype(np.float32)),
            "conv": ((self.conv_channels, self.conv_width - 1), np.dtype(dtype)),
        }

    def _begin_step(self, forms: StateForms, tokens: int) -> dict[str, Array]:
        """Count tokens; return the state's arrays to change in place, copied if a checkpoint has them."""
        if self.store is None:
            self._change_store(forms)
        elif self.store.geometry != forms:
            raise argument_error("qkv", f"a state of {self.store.geometry}", str(forms))
        store, before = self.store, self.span.length
        if self._record_past and store.current != NO_STATE:
            store.checkpoints = {**store.checkpoints, before: store.current}
        return self._advance(tokens, {})

    def _parted(self, mixed: Array, batch: int) -> tuple[Array, Array, Array]:
        """Return queries, keys and values [B, T, heads, dim] of convolved rows."""
        keys = self.key_heads * self.dk
        parts = mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]
        q, k = (part.reshape(batch, -1, self.key_heads, self.dk) for part in parts[:2])
        return q, k, parts[2].reshape(batch, -1, self.num_heads, self.dv)

    def _run(
        self, tokens: tuple[Array, ...], g: Array, beta: Array, arrays: dict[str, Array], chunk: Any,
        before: int, window: Array | None,
    ) -> Array:  # fmt: skip
        """Run the rule over the state; keep what a recorded step did."""
        state, count = arrays["recurrent"], tokens[2].shape[1]
        options: dict[str, Any] = {"g": g, "beta": beta, "state": state, "norm": self.norm}
        if not self._record_past or not count or window is None:
            return gated_delta_rule(*tokens, chunk=chunk, **options)[0]
        early = max(count - self.drafts, 0)
        outputs: list[Array] = []
        if early:
            parts = [
                [each[:, rows] for each in (*tokens, g, beta)] for rows in (np.s_[:early], np.s_[early:])
            ]
            (*first, options["g"], options["beta"]), (*tokens, g, beta) = parts  # type: ignore[assignment]
            outputs.append(gated_delta_rule(*first, chunk=chunk, **options)[0])
            before, window = before + early, window[..., early:]
            state = self._checkpoint(before, window)
            options |= {"g": g, "beta": beta, "state": state}
        output, _, capsule = gated_delta_rule(*tokens, return_capsule=count - early, **options)
        gated_delta_replay(state, capsule, [count - early] * len(state))
        self._recordings = {**self._recordings, before: Recording(capsule, window)}
        return np.concatenate([*outputs, output], axis=1)

    def _checkpoint(self, length: int, window: Array) -> Array:
        """Copy the present state as a checkpoint, with the convolution's inputs there; return the state."""
        version = self.store.free()
        if version == NO_STATE:
            self._change_store(self.store.geometry)
            version = self.store.free()
        arrays, state = self.store.arrays, self.states["recurrent"]
        arrays["recurrent"][version] = state
        arrays["conv"][version] = window[..., : self.conv_width - 1]
        self.store.checkpoints = {**self.store.checkpoints, length: version}
        return state

    # Removing tokens and changing the batch

    def _length_after_crop(self, length: int, call: str = "crop") -> int:
        left = requests.length_after_crop(length, self.span.length)
        return left if self._recorded(left) is not None else self._checked_length(left)

    def _recorded(self, left: int) -> int | None:
        """Return the tokens before the recorded step that a length lies in; None if it lies in none."""
        if self.store is None or left in (0, self.span.length) or left in self.store.checkpoints:
            return None
        begin = max((at for at in self._recordings if at < left), default=None)
        if begin is None or left > begin + self._recordings[begin].capsule.shape[1]:
            return None
        return begin if begin == 0 or begin in self.store.checkpoints else None

    def _return_to(self, left: int) -> None:
        begin = self._recorded(left)
        if begin is not None:
            recording, base = self._recordings[begin], self.store.checkpoints.get(begin, NO_STATE)
            version = self.store.free()
            if version == NO_STATE:
                self._change_store(self.store.geometry)
                version, base = self.store.free(), self.store.checkpoints.get(begin, NO_STATE)
            arrays = {name: array[version] for name, array in self.store.arrays.items()}
            arrays["recurrent"][...] = 0 if base == NO_STATE else self.store.arrays["recurrent"][base]
            accepted = [left - begin] * self.store.geometry.batch
            gated_delta_replay(arrays["recurrent"], recording.capsule, accepted)
            end = self.conv_width - 1 + left - begin
            arrays["conv"][...] = recording.inputs[..., left - begin : end]
            self._commit_version(state_span(left), version, up_to(left, self.store.checkpoints))
        super()._return_to(left)
        self._recordings = {}  # the tokens before are settled

    def _rearrange(self, plan: Any) -> None:
        self._recordings = {}  # positions change
        super()._rearrange(plan)

    def _take_rows(self, indices: Array) -> None:
        super()._take_rows(indices)
        self._recordings = {
            at: Recording(*(x[indices] for x in each)) for at, each in self._recordings.items()
        }

    def _forget_rows(self) -> None:
        self._recordings = {}
        super()._forget_rows()

    def _fill(self, arrays: Mapping[str, Array], length: int) -> None:
        super()._fill(arrays, length)
        self._recordings = {}
