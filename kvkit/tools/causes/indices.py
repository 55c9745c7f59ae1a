"""Find causes of differences between index tensors."""

from __future__ import annotations

import numpy as np

from kvkit.tools.causes.trial import Cause

MOST_ENTRIES = 3  # the most entries that are listed
CAUSES = dict.fromkeys(("block_tables", "cachestarts", "kv_indices"), "wrong id in a block table")
CAUSES["context_lens"] = "other lengths"


def index_causes(name: str, axes: tuple[str, ...], expected: np.ndarray, got: np.ndarray) -> list[Cause]:
    """Return the cause if all wrong entries differ by one number, or are few enough to be listed."""
    wrong = np.argwhere(expected != got)
    at = tuple(wrong.T)
    steps = np.unique(got[at].astype(object) - expected[at].astype(object))
    pairs = (np.ascontiguousarray(array).view(np.uint8) for array in (expected, got))
    octets = int(np.not_equal(*pairs).sum())
    if len(wrong) > MOST_ENTRIES:
        detail = f"{len(wrong)} entries {int(steps[0]):+d}"
        return [Cause(name, "indices off by a constant", detail, octets, octets)] if len(steps) == 1 else []
    places = [  # such as "page 2 of sequence 0: 7 for 3"
        f"{' of '.join(f'{axis} {i}' for axis, i in zip(axes[::-1], place[::-1], strict=True))}: "
        f"{got[tuple(place)]} for {expected[tuple(place)]}"
        for place in wrong
    ]
    return [Cause(name, CAUSES.get(name, "wrong index"), ", ".join(places), octets, octets)]
