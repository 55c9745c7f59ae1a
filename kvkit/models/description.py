"""Describe a model's layers: their kinds, sizes, windows, states and rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "full": "keys and values of all tokens",
    "window": "keys and values of the last `window` tokens",
    "chunk": "keys and values of the current chunk of `window` tokens",
    "latent": "one row of `key_dim` numbers for each token (MLA)",
    "compressed": "rows of the last `window` tokens, and one row for each `ratio` tokens (DeepSeek V4)",
    "state": "a recurrent state, and no rows",
    "conv": "the last inputs of a short convolution, and no rows",
    "both": "keys and values, and a state beside them",
    "shared": "nothing: it reads the rows of layer `source`",
    "none": "nothing, as an MLP",
}


@dataclass(frozen=True)
class DeltaShape:
    """Describes the state of a layer of the gated delta rule, see `kvkit.cache.GatedDeltaLayer`.

    Attributes
    ----------
    num_heads, dk, dv : int
        Heads of values, and elements of a head of keys and of values.
    conv_channels, conv_width : int
        Channels and taps of the convolution of queries, keys and values.
    kind : str
        ``"gdn"``: a decay for each head. ``"kda"``: for each channel of keys.
    """

    num_heads: int
    dk: int
    dv: int
    conv_channels: int
    conv_width: int
    kind: str

    @property
    def numbers(self) -> int:
        """Return how many numbers the state of a sequence has."""
        return self.num_heads * self.dk * self.dv + self.conv_channels * (self.conv_width - 1)


@dataclass(frozen=True)
class LayerShape:
    """Describes what one layer of a model keeps of a sequence.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    num_kv_heads, key_dim, value_dim : int
        Key heads, and elements of a key and of a value. Of a latent or compressed row: 1, its elements, 0.
    window : int or None
        How many tokens a layer with a window attends to, or how many tokens a chunk has.
    state : int
        How many numbers the state of a sequence has, the inputs of convolutions included.
    index_dim : int
        Elements of the index key beside each row, which chooses rows for sparse attention. 0: there is none.
    latent_dim : int
        How many elements of a latent row are its value.
    ratio : int
        How many tokens share a compressed row. 0: there are none.
    source : int or None
        The layer whose rows a shared layer reads.
    delta : DeltaShape or None
        The sizes of a state of the gated delta rule; None for other states.
    """

    kind: str
    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    state: int = 0
    index_dim: int = 0
    latent_dim: int = 0
    ratio: int = 0
    source: int | None = None
    delta: DeltaShape | None = None


@dataclass(frozen=True)
class ModelShape:
    """Describes what the layers of a model keep.

    Attributes
    ----------
    name : str
    layers : tuple of LayerShape
        One for each layer of the model.
    longest : int
        The longest context that the model was trained for, 0 if unknown.
    """

    name: str
    layers: tuple[LayerShape, ...]
    longest: int


@dataclass(frozen=True)
class RopeWords:
    """Holds the arguments of a `kvkit.Rope`, as a configuration states them."""

    rotary_dim: int
    theta: float
    interleaved: bool | None  # None: the configuration does not say it
    scaling: dict[str, object]
    begin: int = 0
