"""Compute recurrent states of models (Qwen3-Next and 3.5, Kimi Linear, ...) with kvkit's gated delta rule."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from kvkit.cache import GatedDeltaLayer
from kvkit.cache.from_configuration import gated_delta_layer
from kvkit.errors import argument_error
from kvkit.integrations.transformers.bridge import to_numpy
from kvkit.interop import numpy_to_tensor
from kvkit.models.sizes import delta_shape
from kvkit.models.words import Words
from kvkit.recurrent import causal_conv, causal_conv_update, gated_delta_rule

# transformers' functions of the rule, in the modules of its models.
RULE_FUNCTIONS = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)  # fmt: skip

# Models whose rule and convolution `wrap_functions` replaces, by their modules.
MODELS = "qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear"
# The layer of a `KvkitCache` whose state a model has asked for, until the rule or the layer's update.
ASKED: ContextVar[Any] = ContextVar("kvkit_asked", default=None)


def delta_layer(config: Any) -> GatedDeltaLayer | None:
    """Return a layer for the gated delta rule of a model; None for a model with other states."""
    if module_of(config).rpartition(".modeling_")[2] not in MODELS:
        return None
    shape = delta_shape(Words(config.to_dict()))
    return None if shape is None else gated_delta_layer(shape)


def module_of(config: Any) -> str:
    """Return the name of the module that has the model of a config."""
    return type(config).__module__.replace(".configuration_", ".modeling_")


def wrap_functions(config: Any) -> None:
    """Let a model's rule and convolution compute layers of a `KvkitCache` with kvkit, once for its module.

    With other caches they are transformers' own.
    """
    module = importlib.import_module(module_of(config))
    for each, wrap in (*((rule, cached_rule) for rule in RULE_FUNCTIONS), *CONVOLUTIONS.items()):
        function = getattr(module, each, None)
        if function is not None and not hasattr(function, "of_transformers"):
            setattr(module, each, wrap(function))


def runs_here(*tensors: torch.Tensor) -> bool:
    """Return whether tensors are on the CPU and no gradient is asked for."""
    graph = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    return not graph and all(each.device.type == "cpu" for each in tensors)


def cached_rule(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' `function` of the rule, which kvkit computes for a layer of a `KvkitCache`."""

    @functools.wraps(function)
    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        initial_state: torch.Tensor | None = None, **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        layer = ASKED.get()
        tensors = query, key, value, g, beta
        if layer is None or layer.asked is not initial_state or options.get("cu_seqlens") is not None:
            return function(*tensors, initial_state=initial_state, **options)  # type: ignore[no-any-return]
        if not runs_here(*tensors):
            return function(*tensors, initial_state=initial_state, **options)  # type: ignore[no-any-return]
        ASKED.set(None)
        q, k, v = (to_numpy("states", each.detach().to(query.dtype)) for each in tensors[:3])
        decays, gates = (to_numpy("gates", each.detach().float()) for each in (g, beta))
        norm = bool(options.get("use_qk_l2norm_in_kernel", False))
        output = layer.state.add_tokens((q, k, v), decays, gates, norm=norm)
        layer.has_run = True
        return numpy_to_tensor(output), layer.recurrent_states[0]

    run.of_transformers = function  # type: ignore[attr-defined]
    return run


def cached_conv_update(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' `function` of one token, which kvkit computes on states of its own width."""

    @functools.wraps(function)
    def run(
        hidden_states: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor,
        bias: torch.Tensor | None = None, activation: str | None = None,
    ) -> torch.Tensor:  # fmt: skip
        narrow = conv_state.shape[-1] == weight.shape[-1] - 1 and hidden_states.shape[-1] == 1
        if not narrow or activation not in (None, "silu") or not runs_here(hidden_states):
            return function(hidden_states, conv_state, weight, bias, activation)  # type: ignore[no-any-return]
        x, taps = to_numpy("hidden_states", hidden_states[..., 0].contiguous()), to_numpy("weight", weight)
        state, added = to_numpy("conv_state", conv_state), None if bias is None else to_numpy("bias", bias)
        output = causal_conv_update(x, taps, added, state=state, activation=activation)
        return numpy_to_tensor(output)[..., None]

    run.of_transformers = function  # type: ignore[attr-defined]
    return run


def cached_conv(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' `function` of many tokens, which kvkit computes for a layer of a `KvkitCache`."""

    @functools.wraps(function)
    def run(
        hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        activation: str | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        window = WINDOW.get()
        own = window is not None and window() is hidden_states
        if not own or activation not in (None, "silu") or not runs_here(hidden_states):
            return function(hidden_states, weight, bias, activation=activation, **options)  # type: ignore[no-any-return]
        past = weight.shape[-1] - 1
        array = to_numpy("hidden_states", hidden_states)
        batch, channels, count = array.shape
        rows = array[..., past:].swapaxes(1, 2).reshape(-1, channels)
        taps, added = to_numpy("weight", weight), None if bias is None else to_numpy("bias", bias)
        output, _ = causal_conv(
            rows, taps, added, state=array[..., :past].copy(), activation=activation,
            starts=[i * (count - past) for i in range(batch + 1)],
        )  # fmt: skip
        return numpy_to_tensor(output.reshape(batch, -1, channels)).transpose(1, 2)

    run.of_transformers = function  # type: ignore[attr-defined]
    return run


CONVOLUTIONS = {"causal_conv1d_update": cached_conv_update, "causal_conv1d_fn": cached_conv}
# The tensor that the latest `update_conv_state` returned.
WINDOW: ContextVar[weakref.ref[torch.Tensor] | None] = ContextVar("kvkit_window", default=None)


@contextlib.contextmanager
def compute_states(model: torch.nn.Module) -> Iterator[None]:
    """Compute a model's recurrent states with kvkit inside a ``with`` block.

    It replaces the functions of the gated delta rule in the modules of the model's classes, for all models of
    these classes. Calls on other devices than the CPU, with gradients or with packed sequences stay with
    transformers. The convolutions before stay there, too.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers with layers of the gated delta rule (GDN or KDA).

    Raises
    ------
    KvkitError
        If the model has no such layers.

    Examples
    --------
    ::

        with compute_states(model):
            model.generate(**inputs, past_key_values=KvkitCache(model.config))
    """
    modules = {sys.modules[type(each).__module__] for each in model.modules()}
    found = [(module, name) for module in modules for name in RULE_FUNCTIONS if hasattr(module, name)]
    if not found:
        wanted = "a model with layers of the gated delta rule, as Qwen3-Next and Kimi Linear have"
        raise argument_error("model", wanted, type(model).__name__)
    before = [(module, name, getattr(module, name)) for module, name in found]
    try:
        for module, name, function in before:
            setattr(module, name, rule_of(function))
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def rule_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the arguments of transformers' `function` that runs on kvkit where it can."""

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tensors = query, key, value, g, beta
        packed = options.get("cu_seqlens") is not None
        graph = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        if packed or graph or any(each.device.type != "cpu" for each in tensors):
            return function(  # type: ignore[no-any-return]
                query, key, value, g=g, beta=beta, initial_state=initial_state,
                output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **options,
            )  # fmt: skip
        q, k, v, decays, gates = (each.detach() for each in tensors)
        state = None if initial_state is None else initial_state.detach().to(torch.float32, copy=True)
        output, last = gated_delta_rule(
            q, k.to(q.dtype), v.to(q.dtype), g=decays.float(), beta=gates.float(),
            norm=use_qk_l2norm_in_kernel, state=None if state is None else state.contiguous(),
        )  # fmt: skip
        return output, last if output_final_state else None

    return run
