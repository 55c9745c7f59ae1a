"""The same memory as a torch tensor and as a numpy array."""

import torch

from kvkit.errors import argument_error
from kvkit.interop import of_tensor


def to_numpy(name, tensor):
    """An array of a tensor's memory, with its strides."""
    if not tensor.is_cpu:
        raise argument_error(name, "a tensor on the CPU", f"one on {tensor.device}")
    return of_tensor(tensor.detach() if tensor.requires_grad else tensor)


def as_cast(tensor):
    """The tensor as autocast, if on, hands it to a product: there keys and values may differ in dtype."""
    return tensor.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else tensor


class _NoGradient(torch.autograd.Function):
    """A tensor that depends on others, as far as autograd knows: to ask for their gradients is an error."""

    @staticmethod
    def forward(ctx, tensor, *others):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, *gradients):
        raise argument_error(
            "backward", "tensors that have gradients", "what kvkit made, for inference alone"
        )


def without_gradient(tensor, *others):
    """The tensor; where gradients are switched on, backward through it says that there are none."""
    if torch.is_grad_enabled() and any(other.requires_grad for other in others):
        return _NoGradient.apply(tensor, *others)
    return tensor
