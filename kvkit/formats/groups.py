"""What shares a scale: numbers [tokens, heads, head size] by groups, and scales back over them.

    per         scales                        of
    tensor      ()                            all
    head        [heads]                       a head of all tokens
    token       [tokens, heads]               a head of a token
    group       [tokens, heads, groups]       `group` neighbouring elements of it
    channel     [tokens / group, heads, D]    an element of the head, of `group` tokens; [heads, D] of all

All but "head" and "channel" do with any axes before the last.
"""

import numpy as np


def shapes(shape, group, pers):
    """By what shares a scale, the shape of the scales of numbers of a shape, as far as it has the axes."""
    known = {
        "tensor": (),
        "head": shape[-2:-1],
        "token": shape[:-1],
        "group": (*shape[:-1], shape[-1] // group if group else 1),
        "channel": (shape[0] // group, *shape[1:]) if group else shape[-2:],
    }
    return {per: known[per] for per in pers if per not in ("head", "channel") or len(shape) > 1}


def fits(cells, shape, per):
    """Whether scales are those of numbers of a shape, whatever the size of groups."""
    cut = {"group": len(shape) - 1, "channel": 0}.get(per)
    if cut is None or cells.ndim < len(shape):
        return cells.shape == shapes(shape, 0, [per]).get(per)
    parts, whole = cells.shape[cut : cut + 1], shape[cut]
    others = cells.shape[:cut] + cells.shape[cut + 1 :] == shape[:cut] + shape[cut + 1 :]
    return others and (parts == (whole,) or (parts > (0,) and whole % parts[0] == 0))


def grouped(x, per, group):
    """[*scales, members]"""
    if per == "tensor":
        return x.reshape(-1)
    if per == "head":
        return np.moveaxis(x, -2, 0).reshape(x.shape[-2], -1)
    if per == "group":
        return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    if per == "channel" and group:
        return np.moveaxis(x.reshape(len(x) // group, group, *x.shape[1:]), 1, -1)
    return np.moveaxis(x.reshape(-1, *x.shape[-2:]), 0, -1) if per == "channel" else x


def ungrouped(groups, shape, per):
    """What `grouped` parted, in its shape."""
    if per == "head":
        return np.moveaxis(groups.reshape(shape[-2], *shape[:-2], shape[-1]), 0, -2)
    return (np.moveaxis(groups, -1, 1) if per == "channel" else groups).reshape(shape)


def spread(cells, shape, per):
    """Scales, or what is beside them, as they multiply numbers of a shape."""
    if per in ("head", "token"):
        return cells[..., None]
    if per == "group":
        return np.repeat(cells, shape[-1] // max(1, cells.shape[-1]), -1)
    if per == "channel" and cells.ndim == len(shape):
        return np.repeat(cells, shape[0] // max(1, cells.shape[0]), 0)
    return cells
