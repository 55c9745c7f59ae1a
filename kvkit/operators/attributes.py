"""The meanings of the operators' attributes. Their order and defaults are read from signatures."""

import inspect
from dataclasses import dataclass, replace

from kvkit.operators.compression import MEANING, NEEDED, CompressType

REQUIRED = inspect.Parameter.empty  # the default of a required argument
KINDS: tuple[type, ...] = bool, int, float, tuple, str, dict
NEEDS = {mode: f"; needs {', '.join(names)}" if names else "" for mode, names in NEEDED.items()}


@dataclass(frozen=True)
class Attribute:
    """A keyword argument with a plain value of type `kind`; `modes` name an integer's values 0, 1 ..."""

    name: str
    about: str
    kind: type = int
    modes: tuple[tuple[str, str], ...] = ()  # (name, what it means)
    default: object = REQUIRED

    @property
    def names(self) -> list[str]:
        """Return the names of an integer's values."""
        return [name for name, _ in self.modes]

    def with_default(self, default: object) -> "Attribute":
        """Return the attribute with a function's default, and with the type of the default."""
        for kind in KINDS:
            if isinstance(default, kind):
                return replace(self, default=kind(default), kind=kind)
        return replace(self, default=default)


ATTRIBUTES = {
    attribute.name: attribute
    for attribute in (
        Attribute("num_layer", "layers in the cache"),
        Attribute("layer_idx", "the layer to use, 0 <= layer_idx < num_layer"),
        Attribute("quant_bit", "0 keeps floats; 8 or 4 quantizes to int8 or int4 codes"),
        Attribute("quant_format", "what a cache of bytes holds: 'e4m3', 'e5m2', 'q8_0' or 'q4_0'", str),
        Attribute("quant_group", "elements that share a scale; divides Dh, even for int4"),
        Attribute("num_repeat", "copies of each head in the outputs (grouped-query attention)"),
        Attribute("cache_mode", "0: cachestarts are offsets; 1: they are a page table"),
        Attribute("cache_layout", "axis order of cache and scale: the number before their shape"),
        Attribute("page_size", "rows in a page, for cache_mode 1"),
        Attribute("num_heads", "heads of query; 0: as the array shows"),
        Attribute("head_dim", "elements of a head of query and key; 0: as the array shows"),
        Attribute("is_causal", "a query sees no key after its own position"),
        Attribute("is_alibi", "add ALiBi biases, which are causal"),
        Attribute("num_kv_heads", "heads of key and value; 0: as the array shows"),
        Attribute("softmax_scale", "factor of the scores; 1 / sqrt(head_dim) if None", float),
        Attribute("window", "keys left and right that a query sees; -1 for no limit"),
        Attribute("softcap", "scores become softcap * tanh(score / softcap); 0 for no cap"),
        Attribute("return_lse", "return the logarithms of the softmax denominators too"),
        Attribute("return_key_weights", "return the sums of the weights that each key gets too"),
        Attribute("data_type", "dtype of the mask: float32, float16 or bfloat16"),
        Attribute("rotary_dim", "elements at the front of each head that are rotated, even; 0 for all"),
        Attribute("interleaved", "pairs are elements 2i and 2i+1; if not, i and i + rotary_dim/2", bool),
        Attribute("theta", "base of the frequencies"),
        Attribute("bypass_key", "copy keys as they are"),
        Attribute("max_position_embeddings", "end of a sequence beyond which 'dynamic' scales"),
        Attribute("scaling_type", "'linear' (slower positions), 'dynamic' (larger theta) or ''"),
        Attribute("rope", "how keys or rows are rotated: the arguments of kvkit.Rope by name", dict),
        Attribute("scaling_factor", "how much 'linear' or 'dynamic' scales"),
        Attribute(
            "compress_type",
            "which rows of a sequence are stored, by name or number",
            modes=tuple((mode.name, MEANING[mode] + NEEDS[mode]) for mode in CompressType),
        ),
        Attribute("cache_format", "'ND', or 'NZ': in groups of n0 elements, which are 32 bytes"),
        Attribute(
            "layout", "axes of a pool, outermost first: b blocks, n tokens, h heads, c elements, kv both"
        ),
        Attribute("scale", "factor of queries; None is dk ** -0.5", float),
        Attribute("value_dim", "elements of a latent row that are its value, the first ones"),
        Attribute("format", "what bytes of a latent cache mean: 'ds_mla' or 'ds_v4'", str),
        Attribute("lse_of_sinks", "the returned lse contains the sinks; in FlashMLA it does not"),
        Attribute("norm", "q and k are divided by sqrt(sum of x^2 + norm_eps) first"),
        Attribute("norm_eps", "added to the sum of squares"),
        Attribute("state_layout", "axes of a state: 'KV' is [dk, dv], 'VK' is [dv, dk]"),
        Attribute("rule", "'linear', 'gated', 'delta' or 'gated_delta'; None: by g and beta", str),
        Attribute("chunk", "tokens of a chunk; 1 runs token by token"),
        Attribute("return_states", "return the state after each token too"),
        Attribute("return_capsule", "rows of a capsule to return; states stay as they were"),
        Attribute("kind", "'gdn': decays of heads, 'kda': of channels"),
        Attribute("lower_bound", "bound of g; softplus has none", float),
        Attribute("double_beta", "beta is twice the sigmoid"),
        Attribute("ratio", "tokens of a window, which become a row"),
        Attribute("overlap", "a row also pools the tokens of the window before", bool),
        Attribute("eps", "added to the mean of squares", float),
        Attribute("activation", "'silu' or None", str),
        Attribute("empty_window", "what KVHEAD keeps if wins is 0: 'copy' all, 'skip' none"),
    )
}
