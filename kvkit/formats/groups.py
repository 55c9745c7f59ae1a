"""Split numbers [tokens, heads, head size] into groups that share a scale, and spread scales over them.

    per         shape of scales               a scale is shared by
    tensor      ()                            all numbers
    head        [heads]                       a head, over all tokens
    token       [tokens, heads]               a head of one token
    group       [tokens, heads, groups]       `group` neighbouring elements of a head of one token
    channel     [tokens / group, heads, D]    an element of a head, over `group` tokens
                [heads, D] if group is 0      an element of a head, over all tokens

"head" and "channel" need these three axes; the others take any axes before the last.
"""

from collections.abc import Iterable

import numpy as np

from kvkit.typed import Array

Lengths = tuple[int, ...]


def scale_shapes(shape: Lengths, group: int, pers: Iterable[str]) -> dict[str, Lengths]:
    """Return {per: shape of the scales} for numbers of a shape, without those whose axes it lacks."""
    shapes = {
        "tensor": (),
        "head": shape[-2:-1],
        "token": shape[:-1],
        "group": (*shape[:-1], shape[-1] // group if group else 1),
        "channel": (shape[0] // group, *shape[1:]) if group else shape[-2:],
    }
    return {per: shapes[per] for per in pers if per not in ("head", "channel") or len(shape) > 1}


def scales_fit(scales: Array, shape: Lengths, per: str) -> bool:
    """Return whether scales fit numbers of a shape, with groups of any size."""
    axis = {"group": len(shape) - 1, "channel": 0}.get(per)  # the axis that is divided into groups
    if axis is None or scales.ndim != len(shape):
        return scales.shape == scale_shapes(shape, 0, [per]).get(per)
    groups, size = scales.shape[axis], shape[axis]
    equal_elsewhere = scales.shape[:axis] + scales.shape[axis + 1 :] == shape[:axis] + shape[axis + 1 :]
    return equal_elsewhere and (groups == size or (groups > 0 and size % groups == 0))


def split_groups(x: Array, per: str, group: int) -> Array:
    """Split numbers into groups, [*shape of the scales, numbers that share a scale]."""
    if per == "tensor":
        return x.reshape(-1)
    if per == "head":
        return np.moveaxis(x, -2, 0).reshape(x.shape[-2], -1)  # [heads, tokens * D]
    if per == "group":
        return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)  # [tokens, heads, groups, group]
    if per == "channel" and group:
        x = x.reshape(len(x) // group, group, *x.shape[1:])
        return np.moveaxis(x, 1, -1)  # [tokens / group, heads, D, group]
    if per == "channel":
        return np.moveaxis(x.reshape(-1, *x.shape[-2:]), 0, -1)  # [heads, D, tokens]
    return x  # per token: [tokens, heads, D]


def join_groups(groups: Array, shape: Lengths, per: str) -> Array:
    """Undo `split_groups`: return numbers of this shape."""
    if per == "head":
        return np.moveaxis(groups.reshape(shape[-2], *shape[:-2], shape[-1]), 0, -2)
    return (np.moveaxis(groups, -1, 1) if per == "channel" else groups).reshape(shape)


def spread_scales(scales: Array, shape: Lengths, per: str) -> Array:
    """Return scales, minima or zeros so that they broadcast over numbers of a shape."""
    if per in ("head", "token"):
        return scales[..., None]
    if per == "group":
        return np.repeat(scales, shape[-1] // max(1, scales.shape[-1]), -1)
    if per == "channel" and scales.ndim == len(shape):
        return np.repeat(scales, shape[0] // max(1, scales.shape[0]), 0)
    return scales
