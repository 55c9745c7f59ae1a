"""Compute recurrent states of models (Qwen3-Next and 3.5, Kimi Linear, ...) with kvkit's gated delta rule."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvkit.errors import argument_error
from kvkit.recurrent import gated_delta_rule

# transformers' functions of the rule, in the modules of its models.
RULES = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)  # fmt: skip


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
    found = [(module, name) for module in modules for name in RULES if hasattr(module, name)]
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
