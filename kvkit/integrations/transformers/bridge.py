"""The same memory as a torch tensor and as a numpy array."""

import numpy as np
import torch

from kvkit.checks.words import wrong
from kvkit.formats import BFLOAT16


def to_numpy(name, tensor):
    """An array of a tensor's memory, with its strides."""
    if not tensor.is_cpu:
        raise wrong(name, "a tensor on the CPU", f"one on {tensor.device}")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:  # which numpy has not, so that it crosses as 16-bit integers
        return tensor.view(torch.int16).numpy().view(BFLOAT16.dtype)
    return tensor.numpy()


def to_torch(array):
    """A tensor of an array's memory, with its strides."""
    if array.dtype == BFLOAT16.dtype:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
