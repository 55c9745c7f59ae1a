"""Exchange torch tensors and numpy arrays that share memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from kvkit import cpu
from kvkit.errors import argument_error
from kvkit.interop import tensor_to_numpy
from kvkit.typed import Array

OF_NUMPY = frozenset({torch.float32, torch.float16, torch.bool})  # dtypes that need no view of integers


def share_threads() -> None:
    """Let kernels run in torch's OpenMP threads, because other threads would compete with them for the cores.

    After an operator torch's threads wait for the next one awake, which takes the cores from other threads.
    """
    compiled = sys.modules.get("torch._C")  # not there while pages are made without torch
    library = compiled and ctypes.CDLL(compiled.__file__)
    parallel = getattr(library, "GOMP_parallel", None)  # absent from other compilers' OpenMP
    cpu.launches.parallel = ctypes.cast(parallel, ctypes.c_void_p).value or 0 if parallel else 0


def to_numpy(name: str, tensor: torch.Tensor) -> Array:
    """Return an array over a tensor's memory, with its strides."""
    if tensor.dtype in OF_NUMPY:
        try:
            array: Array = tensor.numpy()
            return array
        except (RuntimeError, TypeError):  # of a tensor that has a gradient, or is on a device
            pass
    if not tensor.is_cpu:
        raise argument_error(name, "a tensor on the CPU", f"one on {tensor.device}")
    return tensor_to_numpy(tensor.detach() if tensor.requires_grad else tensor)


def as_cast(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return tensors in the dtype of autocast, if that is on, because keys and values may differ in it."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    return [tensor.to(torch.get_autocast_dtype("cpu")) for tensor in tensors]


class _NoGradient(torch.autograd.Function):
    """Connects a tensor to others in autograd, so that asking for their gradients raises an error."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        wanted = "tensors that have gradients"
        raise argument_error("backward", wanted, "a result of kvkit, which is for inference only")


def without_gradient(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return the tensor; if gradients are enabled, one that raises an error in the backward pass."""
    if torch.is_grad_enabled() and any(other.requires_grad for other in others):
        return _NoGradient.apply(tensor, *others)
    return tensor
