"""Define the tool `check`: find errors in page tables, slots, states, layouts, scales and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvkit.errors import argument_error, hints_keywords
from kvkit.interop import integers
from kvkit.tools.case import Case
from kvkit.tools.contents import Source
from kvkit.tools.findings import Findings, examine
from kvkit.tools.rules import RULES, layouts, states
from kvkit.tools.source import SLIDING


@hints_keywords
def check(
    source: Source,
    after: Source | None = None,
    slots: Any = None,
    *,
    layout: Any = None,
    sizes: Mapping[str, int] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Findings:
    """Find errors in the page tables, slots, scales and data of a cache.

    Only table entries in use are checked: -1, 0 and stale ids after the end of a sequence are legal. A rule
    runs if its inputs are given. ``findings.checked`` lists the rules that ran, ``findings.unchecked`` the
    others with the inputs that they lack.

    Parameters
    ----------
    source : path or dict of arrays
        A file of any kind that kvkit reads, or arrays by name:

        - ``block_tables`` int [B, M] with ``context_lens`` int [B]; or ``kv_indptr``, ``kv_indices`` and
          ``kv_last_page_len``; or PMX's ``cachestarts`` [B, M] (first rows) with ``kvstarts``; the names that
          vLLM, FlashAttention and FlashInfer use (``block_table``, ``seq_lens``...) are taken too;
        - ``num_blocks``, ``page_size`` int: needed without a cache whose shape shows them;
        - ``placeholder`` int: an id that stands for no page and may repeat (evicted pages);
        - ``slot_mapping`` int [tokens], with ``slot_sequences`` and ``slot_positions`` to compare it with the
          table; ``reserved_block`` int: the page in which an engine stores padding;
        - ``key_cache``, ``value_cache`` [blocks, rows, heads, content], or [layers, ...] of that: floats or
          codes, with ``format`` str where the dtype does not name it ("e4m3", "mlx"...); ``key_scale``,
          ``value_scale`` of any shape; ``index_type`` str: the type of a kernel's addresses, int32, uint32 or
          int64;
        - ``recurrent_state`` [slots, heads, dk, dv] with ``state_indices``; beside `after` also
          ``state_layout``, ``k``, ``v``, ``g`` and ``beta`` of a step, for which all orders are tried;
        - ``compressed_slot_mapping`` int [tokens] with ``slot_positions`` and ``compress_ratios``, one or
          by layer (``layers.2.compressed_slot_mapping``); ``entry_count`` or ``compressed_kv`` with
          ``context_lens`` and ratios; ``window_ring`` [sequences, rows, dim] with ``window``;
          ``compressor_state``;
        - ``lse`` [B, heads] with ``query`` [B, heads, content] and ``softmax_scale``.
    after : path or dict of arrays, optional
        The caches after a call. Only rows of ``slots`` may differ from `source`.
    slots : array of int, optional
        The slots that the call wrote. By default they are ``slot_mapping`` of `after` or `source`; without
        one, the rows in the tables of `after` that are not in the tables of `source`. Then rows that were in
        use before, such as a prefix that two sequences share, must not change.
    layout : str or Layout, optional
        The layout of the caches.
    sizes : mapping, optional
        Lengths of axes l, b, n, h, c that the shapes do not determine.
    progress : callable, optional
        A function that is called with (rules done, all rules).

    Returns
    -------
    Findings
        Iterable of `Finding` (rule, severity, where, message, hint).

    Raises
    ------
    KvkitError
        If an argument is neither a table nor a cache.

    Examples
    --------
    >>> import numpy as np, kvkit.tools
    >>> tables = {"block_tables": np.array([[4, 2], [4, 1]]), "context_lens": np.array([8, 8])}
    >>> found = kvkit.tools.check(tables | {"num_blocks": 8, "page_size": 4})
    >>> len(found), found.checked, found.unchecked["S1"]
    (0, ['P1', 'P2', 'P3', 'P5', 'P6', 'P7', 'S5', 'S7'], 'slot_mapping, slot_sequences, slot_positions')
    >>> tables["block_tables"][1, 1] = 9
    >>> print(kvkit.tools.check(tables | {"num_blocks": 8, "page_size": 4}).found[0])
    error P1 block_tables[1, 1]: page 9 is outside the pool, 0 to 7
        A kernel reads or writes outside the cache. Check num_blocks, and the code that filled the table.
    """
    case = Case(source, layout, sizes)
    if after is None:
        found = replace(examine(case, RULES, progress), notes=case.notes)
        if case.source.sliding is None:
            return found
        return found.with_second(examine(Case(case.source.sliding), RULES, progress), f"{SLIDING} ")
    later = Case(after, layout, sizes)
    if slots is None:
        slots = later.given.get("slot_mapping", case.given.get("slot_mapping"))
    if "state_layout" in case.given:
        return examine((case, later, slots), {"W2": states.STATE_IN_OTHER_ORDER}, progress)
    if slots is None:
        tables = [each.block_tables(each.page_size()) for each in (case.source, later.source)]
        rows = [each[1].rows() for each in tables if each is not None]
        if len(rows) < 2:
            raise argument_error("slots", "the slots that were written, or tables before and after", "None")
        slots = np.setdiff1d(rows[1], rows[0])  # those that only the tables after the call have
    if [side.array.shape for side in case.sides] != [side.array.shape for side in later.sides]:
        raise argument_error("after", "caches of the same shapes", "others")
    slots = integers("slots", slots).reshape(-1).astype(np.int64)
    return examine((case, later, slots), {"W1": layouts.WRITTEN_ELSEWHERE}, progress)
