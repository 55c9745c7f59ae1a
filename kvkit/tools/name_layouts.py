"""Propose layouts by the names of separate keys and values, and say where another order of axes fits as well.

Names tell packed tokens from pages and from layers. Whether tokens or heads come first most names only
propose: transformers' ``key_cache`` is [sequences, heads, tokens, content], an engine's [blocks, rows, heads,
content].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvkit.layouts import Layout

# {number of axes: axes} of a pool or of one layer, and of packed tokens of all layers.
POOL_AXES = {3: "n h c", 4: "b n h c", 5: "l b n h c"}
TOKEN_AXES = POOL_AXES | {4: "l n h c"}
MOST_HEADS = 128  # no model has more key heads


def swapped(axes: str) -> str:
    """Return axes with tokens and heads exchanged."""
    return axes.translate(str.maketrans("nh", "hn"))


def orders_that_fit(
    axes: str, shape: Sequence[int], known: Mapping[str, int], tokens: int | None, in_pages: bool
) -> list[str]:
    """Return the orders of axes that fit a shape as well as the proposed one, which comes first.

    Parameters
    ----------
    axes : str
        The proposed axes, such as ``"b n h c"``.
    known : mapping
        Lengths of b, n and h that are known.
    tokens : int or None
        The number of tokens in each layer, if it is known.
    in_pages : bool
        Whether page tables say that the first axis is pages. Without them one b may be a batch.

    Examples
    --------
    >>> from kvkit.tools.name_layouts import orders_that_fit
    >>> orders_that_fit("b n h c", (1, 3, 100, 64), {}, None, False)
    ['b n h c', 'b h n c']
    >>> orders_that_fit("b n h c", (1, 3, 100, 64), {"h": 3}, None, False)
    ['b h n c']
    """
    lengths = {order: dict(zip(order.split(), shape, strict=True)) for order in (axes, swapped(axes))}
    fitting = [
        order
        for order, sizes in lengths.items()
        if all(known.get(axis, sizes.get(axis)) == sizes.get(axis) for axis in "bnh" if axis in sizes)
        and tokens in (None, sizes.get("b", 1) * sizes["n"])
    ]
    if len(fitting) == 1:
        return fitting
    sizes = lengths[axes]
    many = sizes.get("b") != 1 or sizes["n"] > MOST_HEADS  # else a batch of one sequence of transformers
    plain = sizes["n"] > sizes["h"] and many
    is_proposed = not fitting or plain or (in_pages and "n" not in known)
    return [axes] if is_proposed else fitting


def describe_order(axes: str, shape: Sequence[int]) -> str:
    """Describe an order of axes in words, such as 100 tokens of 3 heads."""
    sizes = dict(zip(axes.split(), shape, strict=True))
    rows = "rows" if sizes.get("b", 1) > 1 else "tokens"
    return f"{sizes['n']} {rows} of {sizes['h']} heads"


def layout_of_order(lists: tuple[str, ...], axes: str) -> Layout:
    """Return the layout of nested lists of arrays with these axes."""
    return Layout(lists, *[tuple(axes.split())] * 2)
