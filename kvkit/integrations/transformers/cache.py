"""Define `KvkitCache`, by which models of transformers and `generate` use a cache of kvkit."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import get_layer_types_and_kwargs

from kvkit.cache import (
    DynamicCache,
    GatedDeltaLayer,
    IndexedLayer,
    PagedCache,
    QuantizedCache,
    StateLayer,
    StaticCache,
)
from kvkit.cache.base import BaseCache, MovableTokens, NoArray
from kvkit.cache.layers.compressed import check_drafts
from kvkit.cache.layers.pooled import PooledLayer
from kvkit.cache.layers.positions import PLANS
from kvkit.errors import KvkitError, add_keyword_hint, argument_error, describe
from kvkit.integrations.transformers import pending
from kvkit.integrations.transformers.attention import NAME
from kvkit.integrations.transformers.bridge import as_cast, to_numpy, without_gradient
from kvkit.integrations.transformers.compressed import KvkitCompressedLayer
from kvkit.integrations.transformers.evicting import Eviction
from kvkit.integrations.transformers.layer import KvkitLayer
from kvkit.integrations.transformers.models import HYBRID, geometry, has_compressed_rows, make_cache
from kvkit.integrations.transformers.rotations import rotations_of
from kvkit.integrations.transformers.states import (
    KvkitDeltaLayer,
    KvkitHybridLayer,
    KvkitStateLayer,
    check_state,
)
from kvkit.interop import numpy_to_tensor
from kvkit.rope import NO_ROTATION

KINDS = {"dynamic": DynamicCache, "static": StaticCache, "quantized": QuantizedCache, "paged": PagedCache}
GEOMETRY = "num_kv_heads", "head_dim", "dtype"  # options of a paged cache that its first keys determine
P = ParamSpec("P")
Make = functools.partial  # makes a cache of a kind


def pass_on(method: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[KvkitCache, P], None]:
    """Return a method of `KvkitCache` that calls the method of this name of the wrapped cache."""

    @functools.wraps(method)
    def call(self: KvkitCache, *arguments: P.args, **options: P.kwargs) -> None:
        named = self.named_arguments(method.__name__, *arguments, **options)
        getattr(self.movable(), method.__name__)(**named)

    return call


class KvkitCache(NoArray, Cache):
    """Wraps a cache of kvkit for a model of transformers.

    Under ``attn_implementation="kvkit"`` attention reads the cache in place. Under others each update returns
    tensors of the context. They are views of the cache unless it is quantized or paged.

    `remove`, `shift` and so on find in the model's config and code how its keys are rotated. After
    ``remove(..., close=True)`` pass the positions of the next tokens to the model, because `generate` counts
    removed tokens too.

    Parameters
    ----------
    config : PreTrainedConfig, optional
        The model's config: it has the number and kinds of layers and the attention in use. Without it layers
        are made on first use, all with full attention.
    kind : str
        ``"dynamic"``, ``"static"``, ``"quantized"`` or ``"paged"``.
    evict : str, dict or Decoding, optional
        How to evict tokens. Once, after a prompt that is read in one forward pass: ``"snapkv@0.5"``,
        ``"snapkv(window=32)@0.5"``, or arguments of `kvkit.cache.Cache.compress` such as
        ``{"scorer": "snapkv", "keep": 0.5, "budget": "ada"}``. During generation: a result of
        `kvkit.eviction.decoding`. A prompt with no more tokens than the scorer always keeps (its window, or
        sinks) stays whole. Attention provides queries and weights; it must be ``"kvkit"``, because others
        do not know the stored positions.
    drafts : int
        How many of the last tokens `crop` can take back in a model with compressed rows (DeepSeek V4).
    **options
        Other arguments of the kind of cache: ``offload`` (a folder), except for paged ones; ``max_cache_len``
        for `kvkit.cache.StaticCache`; ``key``, ``value``, ``residual_length``, ``sink`` and ``read_back`` for
        `QuantizedCache`; ``num_blocks``, ``page_size``, ``format`` and so on for `PagedCache`, whose sizes
        and dtype are those of the first keys unless they are passed.

    Attributes
    ----------
    cache : kvkit.cache.Cache or kvkit.cache.PagedCache
        The wrapped cache, with `save`, `reserve` and `close`. With kind "paged" it is an empty dynamic cache
        until the first keys show their size and dtype.
    report : kvkit.cache.CompressionReport
        The report of the latest eviction; None if there was none.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from kvkit.cache import QuantSpec
    >>> from kvkit.integrations.transformers import KvkitCache
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, attn_implementation="kvkit")
    >>> model = LlamaForCausalLM(config).eval()
    >>> cache = KvkitCache(config, "quantized", format="int8:g8", residual_length=2)
    >>> ids = model.generate(torch.arange(12)[None], past_key_values=cache, max_new_tokens=4, do_sample=False)
    >>> ids.shape, cache.get_seq_length()
    (torch.Size([1, 16]), 15)
    >>> cache = KvkitCache(config, evict="knorm@0.5")
    >>> ids = model.generate(torch.arange(12)[None], past_key_values=cache, max_new_tokens=4, do_sample=False)
    >>> cache.report.tokens, cache.get_seq_length(), cache.layers[0].stored_tokens
    ([6, 6], 15, 9)
    """

    _an_array = "cache.cache.layers[0].keys"
    eviction: Eviction | None
    _make: functools.partial | None  # makes the paged cache once the first tokens show its geometry

    def __init__(
        self, config: Any = None, kind: str = "dynamic", *, evict: Any = None, drafts: int = 0, **options: Any
    ) -> None:
        if kind not in KINDS:
            hint = " (offload=FOLDER keeps any of them in files)" if "offload" in str(kind) else ""
            raise argument_error("kind", " or ".join(map(repr, KINDS)), describe(kind) + hint)
        if config is not None and not hasattr(config, "get_text_config"):
            raise argument_error("config", "a model's configuration, as model.config", type(config).__name__)
        eviction = None if evict is None else Eviction(evict)
        check_drafts(drafts, config is not None and has_compressed_rows(config))
        if config is not None:
            options = geometry(config, kind) | options
        make = functools.partial(KINDS[kind], **options)
        unknown = [name for name in GEOMETRY if name not in options] if kind == "paged" and config else []
        try:
            inspect.signature(KINDS[kind]).bind(**options | dict.fromkeys(unknown))
        except TypeError as error:
            wanted = f"the arguments of {KINDS[kind].__name__} for kind {kind!r}"
            add_keyword_hint(error, KINDS[kind], options)
            said = str(error).removeprefix("got ").replace("missing a required argument:", "no")
            raise argument_error("KvkitCache", wanted, said) from None
        if unknown:
            placeholder = DynamicCache(options["num_layers"])
            for i, layer in options.get("others", {}).items():
                placeholder.layers[i] = layer
            self._wrap(placeholder, config)
            self._make = make
        else:
            self._wrap(make_cache(KINDS[kind], config, kind, options, drafts), config)
        if eviction is not None:
            check_evictable(self.cache, config, kind, options, eviction.wants_weights)
        self.eviction = eviction

    @classmethod
    def of(cls, cache: Any, config: Any = None) -> KvkitCache:
        """Wrap a cache of kvkit that was loaded, opened, or constructed."""
        if not isinstance(cache, BaseCache):
            raise argument_error("cache", "a cache of kvkit.cache", describe(cache))
        wrapper = cls.__new__(cls)
        cls._wrap(wrapper, cache, config)
        return wrapper

    def _wrap(self, cache: Any, config: Any) -> None:
        self.cache, self.config = cache, None if config is None else config.get_text_config(decoder=True)
        self._make = None
        self.eviction = None
        self.report: Any = None
        self._reads_in_place: bool | None = None  # whether the model uses kvkit's attention; None before use
        self._stored = pending.Records()  # the last update of each layer
        self._readers: dict[int, int] = {}  # how many layers have not attended yet to the rows of each layer
        self.new_tokens = 1  # tokens of the present step, as `get_mask_sizes` was told
        super().__init__(layers=layers_of(self, cache, self.config))

    def __deepcopy__(self, memo: dict[int, Any]) -> KvkitCache:
        copied = type(self).of(copy.deepcopy(self.cache, memo), self.config)
        copied.eviction, copied.report = copy.deepcopy((self.eviction, self.report), memo)
        copied._make = self._make
        return copied

    def __reduce__(self) -> tuple[Any, ...]:  # for `pickle`; layers are made again
        state = {"eviction": self.eviction, "report": self.report, "_make": self._make}
        return type(self).of, (self.cache, self.config), state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cache!r})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = f": it is cache.cache.{name} here" if hasattr(self.__dict__.get("cache"), name) else ""
            what = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise AttributeError(what, name=name, obj=self)

    # Adding tokens

    @torch.compiler.disable
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        cache_position: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values [B, Hkv, q, D] of new tokens to a layer.

        Returns
        -------
        keys, values : Tensor
            Pass them to attention. With ``"kvkit"`` they are the arguments (views of them, if they stand for
            another update already), and stand for all tokens.
            Otherwise they hold past and new tokens; `get_mask_sizes` says how many.

        Raises
        ------
        KvkitError
            If an argument is wrong, or if kvkit's attention did not read the layer's last update: then the
            model uses another attention than `config` says, and does not see past tokens.
        """
        last = self._stored.get(layer_idx)
        if last is not None and last.is_lost():
            wanted = f"{NAME!r} in the model that uses this cache, as its config says"
            found = f"attention that has not read the cache in layer {layer_idx}; {pending.USE_OTHERS}"
            raise argument_error("attn_implementation", wanted, found)
        if layer_idx == 0 or self._reads_in_place is None:  # once a step, because configs answer slowly
            self._reads_in_place = self.config is not None and self.config._attn_implementation == NAME
            if self._reads_in_place and self.cache.layers and isinstance(self.cache.layers[0], PooledLayer):
                wanted = "'eager', because the model joins its compressed rows with the window's"
                raise argument_error("attn_implementation", wanted, repr(NAME))
        if not self._reads_in_place and (why := self._why_kvkit(layer_idx)):
            wanted = f"{NAME!r}, because {why}, and other attention counts rows as positions"
            found = "none" if self.config is None else repr(self.config._attn_implementation)
            raise argument_error("attn_implementation", wanted, found)
        if self._make is not None:
            self._take_geometry(self._make, key_states, value_states)
        layers = self.cache.layers
        begin = layers[layer_idx].get_seq_length() if layer_idx < len(layers) else 0
        if cache_position is not None:
            cache_position = np.asarray(cache_position)
        new_keys, new_values = as_cast(key_states, value_states)
        arrays = to_numpy("key_states", new_keys), to_numpy("value_states", new_values)
        keys, values = self.cache.update(*arrays, layer_idx, cache_position)
        if layer_idx == len(self.layers):
            self.layers.append(KvkitLayer(self, layer_idx))
        layer = self.cache.layers[layer_idx]
        if layer.latent_dim:  # transformers calls the latent part of a row keys, the rotated part values
            rows = np.asarray(keys)
            keys, values = rows[..., : layer.latent_dim], rows[..., layer.latent_dim :]
        returned = pending.unique_tensors(key_states, value_states, last)
        references = weakref.ref(returned[0]), weakref.ref(returned[1])
        stored = pending.Stored(layer, keys, values, begin, *references)
        if self._reads_in_place:
            if self.eviction is not None and not self.eviction.done and layer.window is None:
                stored.after_attention = functools.partial(self._record_and_evict, layer_idx)
                shared = sum(each._of == layer_idx for each in self.cache.layers)
                self._readers[layer_idx] = shared + 1
                stored.wants_weights = self.eviction.wants_weights
            pending.remember(layer_idx, stored, returned[0], self._stored)
            return returned
        keys, values = map(numpy_to_tensor, stored.arrays())
        return without_gradient(keys, key_states), without_gradient(values, value_states)

    def _why_kvkit(self, layer_idx: int) -> str:
        """Return why only kvkit's attention can read a layer; an empty text if other attention can."""
        if self.eviction is not None:
            return "the cache evicts tokens"
        layers = self.cache.layers[layer_idx : layer_idx + 1]
        moved = any(layer._row_positions is not None for layer in layers)
        return "tokens of the cache were removed or moved" if moved else ""

    def _record_and_evict(
        self, layer_idx: int, queries: np.ndarray, weights: np.ndarray | None, padding: np.ndarray | None
    ) -> None:
        """Pass queries and weights to the eviction; evict after the last layer that reads what can go."""
        eviction, shared = self.eviction, sum(each._of == layer_idx for each in self.cache.layers)
        if eviction is not None:
            if self._readers.get(layer_idx, 0) > shared:  # the layer itself, before those that read its rows
                eviction.record(layer_idx, queries, weights)
            self._readers[layer_idx] = self._readers.get(layer_idx, 0) - 1
            last = max(i for i, x in enumerate(self.cache.layers) if x.window is None and x._why_kept is None)
            is_after_last = layer_idx >= last or (shared and self._readers.get(last, 0) <= 0)
            if is_after_last and max(self._readers.values()) <= 0:  # every layer has read the rows
                self.report = eviction.run(self.movable(), padding) or self.report

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store the index keys [B, q, D] of the latest tokens; return the index keys of all tokens."""
        layer = self.cache.layers[layer_idx]
        if not isinstance(layer, IndexedLayer):
            raise argument_error("layer_idx", "a layer with index keys", layer_idx)
        return numpy_to_tensor(layer.update_index(to_numpy("indexer_key_states", indexer_key_states)))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a convolution's state, which the model may change in place; None before the first token.

        The model calls this once in a step, so it counts the step's token. Read `layers[i].conv_states` to
        look at the state without counting.
        """
        layer = check_state(self.layers[layer_idx], layer_idx)
        if state_idx == 0:
            layer.begin_step()
        return layer.conv_states[state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state; None before the first token."""
        layer = check_state(self.layers[layer_idx], layer_idx)
        return layer.ask() if isinstance(layer, KvkitDeltaLayer) else layer.recurrent_states[state_idx]

    def _take_geometry(self, make: Make, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make a paged cache with the sizes of its first keys, because configs name these differently."""
        latent = make.keywords.get("latent_dim", 0)
        if value_states.shape != key_states.shape and not latent:
            shapes = f"{tuple(key_states.shape)} and {tuple(value_states.shape)}"
            wanted = "keys and values of one shape, for a paged cache"
            found = f"{shapes}; use a dynamic one, with attn_implementation 'sdpa' or 'eager'"
            raise argument_error("key_states", wanted, found)
        _, heads, _, dim = key_states.shape
        dim += value_states.shape[3] if latent else 0
        dtype = to_numpy("key_states", *as_cast(key_states)).dtype
        sizes: dict[str, Any] = dict(zip(GEOMETRY, (heads, dim, dtype), strict=True))
        others = {i: self.cache.layers[i] for i in make.keywords.get("others", ())}  # with their states
        self.cache, self._make = make(**sizes | make.keywords | {"others": others}), None

    # Sizes and positions

    @torch.compiler.disable
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens a layer has seen; a recurrent layer counts as the first layer with keys."""
        return self.cache.get_seq_length(self._layer_with_keys(layer_idx))

    def _layer_with_keys(self, layer_idx: int) -> int:
        """Return the number of a layer, or of the first one with keys if it only has a state."""
        layers = self.cache.layers
        if layer_idx >= len(layers) or not isinstance(layers[layer_idx], StateLayer):
            return layer_idx
        return next((i for i, layer in enumerate(layers) if not isinstance(layer, StateLayer)), layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the most tokens that a layer can hold; without `layer_idx`, any layer. -1 means no limit."""
        return self.cache.get_max_length(layer_idx)

    @torch.compiler.disable
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset): how many keys the next update returns, and the first position.

        Unused rows of a static layer do not count.
        """
        layer_idx, self.new_tokens = self._layer_with_keys(layer_idx), int(query_length)
        kv_length, kv_offset = self.cache.get_mask_sizes(query_length, layer_idx)
        used_rows = self.get_seq_length(layer_idx) + query_length - kv_offset
        return min(kv_length, used_rows), kv_offset

    @property
    def positions(self) -> np.ndarray:
        """Return the positions of the tokens that the first layer stores, one for each row of its keys."""
        return self.cache.layers[0].positions

    @property
    def rope_shifts(self) -> np.ndarray:
        """Return the rope shifts of the first layer's keys: [pieces, 3] of (first row, end row, shift)."""
        return self.cache.layers[0].rope_shifts

    # Removing tokens and changing the batch. After an error no layer has changed

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens: a negative number says how many, a positive number how many stay."""
        before = self.get_seq_length()
        self.cache.crop(int(tokens_to_remove))
        if self.eviction is not None:
            self.eviction.drop(before - self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row b of the batch by a copy of row ``beam_idx[b]``."""
        self._change_batch(np.asarray(beam_idx))

    def _change_batch(self, rows: np.ndarray) -> None:
        self.cache.reorder(rows)
        if self.eviction is not None:
            self.eviction.change_batch(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch only."""
        self._change_batch(np.asarray(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch: rows A, B become A, A, B, B."""
        rows = self.cache.layers[0].batch_size if self.cache.layers else 0
        self.cache.repeat(repeats)
        if self.eviction is not None:
            self.eviction.change_batch(np.repeat(np.arange(rows), repeats))

    remove = pass_on(MovableTokens.remove)
    retain = pass_on(MovableTokens.retain)
    shift = pass_on(MovableTokens.shift)
    divide = pass_on(MovableTokens.divide)
    flatten = pass_on(MovableTokens.flatten)

    @functools.wraps(MovableTokens.can)
    def can(self, call: str, *arguments: Any, **options: Any) -> str | None:
        if call not in PLANS:
            return self.cache.can(call, *arguments, **options)
        try:
            cache, named = self.movable(), self.named_arguments(call, *arguments, **options)
        except (KvkitError, TypeError) as error:
            return str(error)
        return cache.can(call, **named)

    def movable(self) -> Any:
        """Return the cache, or the rows of a paged one, whose methods remove and move tokens of the batch."""
        if self._make is not None:
            raise argument_error("cache", "tokens, because it is paged", "none yet")
        return self.cache.rows if isinstance(self.cache, PagedCache) else self.cache

    def named_arguments(self, call: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return a call's arguments by name; a missing rope that the call needs is that of the config."""
        method = inspect.signature(getattr(MovableTokens, call))
        named = method.bind(self, *arguments, **options).arguments
        del named["self"]
        paged = isinstance(self.cache, PagedCache)
        known = self.cache._ropes(self.cache.rope) if paged else [layer.rope for layer in self.cache.layers]
        is_unknown = named.get("rope") is None and None in known
        # `remove` moves the tokens after a hole only with `close`; `retain`, without a rope, moves none.
        moves_tokens = named.get("close", False) if call == "remove" else "rope" in method.parameters
        if is_unknown and moves_tokens:
            ropes = [] if self.config is None else rotations_of(self.config)
            states = len(known) - len(ropes)  # of hybrid layers, which come last
            named["rope"] = ropes + [NO_ROTATION] * states if ropes else None
        return named

    def reset(self) -> None:
        """Remove all tokens."""
        self.cache.reset()

    def activate_past_recording(self) -> None:
        """Keep tokens that layers would drop or encode until the next `crop`."""
        self.cache.activate_past_recording()


def check_evictable(cache: Any, config: Any, kind: str, options: dict[str, Any], wants_weights: bool) -> None:
    """Raise for a cache that cannot lose tokens while `generate` counts positions.

    `wants_weights` says whether the scorer reads weights of attention.
    """
    if kind == "static":
        wanted = "another kind with evict, because a static cache keeps no holes between positions"
        raise argument_error("kind", wanted, repr(kind))
    if any(isinstance(layer, IndexedLayer) for layer in cache.layers):
        raise argument_error("evict", "a model without an indexer, which numbers rows", "index keys")
    if wants_weights and (options.get("latent_dim") or any(layer.latent_dim for layer in cache.layers)):
        wanted = "a scorer of keys or of the last queries, for a model with latent rows"
        raise argument_error("evict", wanted, "weights of all queries")
    if kind == "paged" and options.get("others"):
        wanted = "'dynamic' with evict, for a model with states or shared layers"
        raise argument_error("kind", wanted, repr(kind))
    if kind == "paged" and config is not None:
        _, arguments = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        if any("sliding_window" in each for each in arguments):
            wanted = "full attention in all layers of a paged cache, because they lose the same tokens"
            raise argument_error("evict", wanted, "a window")


def layers_of(owner: KvkitCache, cache: Any, config: Any) -> list[Any]:
    """Wrap the layers of a cache, which has the states of hybrid layers after all other layers.

    With two hybrid layers::

        layers of the model    0 hybrid    1 full    2 hybrid
        layers of the cache    0 keys      1 keys    2 keys      3 state of 0    4 state of 2
    """
    names: list[str] = []
    arguments: list[dict[str, Any]] = []
    if config is not None:
        names, arguments = get_layer_types_and_kwargs(config)
    count = len(cache) - sum(name in HYBRID for name in names)
    fits_config = count == len(names)  # a cache that was loaded may be of another model
    layers: list[Any] = []
    for i, layer in enumerate(cache.layers[: count if fits_config else None]):
        number_of_states = arguments[i].get("number_of_states", 1) if i < len(arguments) else 1
        if isinstance(layer, GatedDeltaLayer):
            layers.append(KvkitDeltaLayer(owner, i))
        elif isinstance(layer, StateLayer):
            layers.append(KvkitStateLayer(owner, i, number_of_states))
        elif fits_config and names[i] in HYBRID:
            state_layer = count + sum(name in HYBRID for name in names[:i])
            layers.append(KvkitHybridLayer(owner, i, state_layer, number_of_states))
        elif isinstance(layer, PooledLayer):
            layers.append(KvkitCompressedLayer(owner, i))
        else:
            layers.append(KvkitLayer(owner, i))
    return layers
