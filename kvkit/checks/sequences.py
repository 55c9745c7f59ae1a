"""How the sequences of a call lie in its arrays: all that tells static operators from dynamic ones.

A static cache is offset mode with a stride between sequences, so nothing below the checks tells them apart.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvkit.checks import index_tensors
from kvkit.checks.masks import dynamic_mask, static_mask
from kvkit.checks.records import Steps
from kvkit.checks.tensors import packed_tokens
from kvkit.checks.values import integer
from kvkit.layouts import pmx
from kvkit.layouts.places import ENDLESS

KEYS = "seqstarts", "kvstarts", "max_seqlen", "max_kvlen"
INDEX = (*KEYS, "cachestarts", "start_pos", "cache_mode", "page_size")


@dataclass(frozen=True, slots=True)
class Static:
    """Sequences of one length, [B, S, ..], each with a part of the cache of its own."""

    start_pos: object = 0  # checked when it is used
    steps: Steps | None = None  # of new tokens from there on, if they are made already
    decoding: ClassVar[int] = 0
    axes: ClassVar[int] = 4  # of tokens
    layouts: ClassVar[tuple] = pmx.STATIC

    def over_keys(self, query, key):
        """The steps of queries that attend to a whole context."""
        batch, seqlen, *_ = query.shape
        return index_tensors.equal(batch, seqlen, key.shape[1])

    def over_cache(self, name, tokens, layer):
        """The steps of new tokens, whose array has a name, that a layer of a cache has room for."""
        batch, seqlen, *_ = tokens.shape
        start = integer("start_pos", self.start_pos, 0)
        index_tensors.has_room(batch, seqlen, start, layer)
        return index_tensors.equal(batch, seqlen, start + seqlen) if self.steps is None else self.steps

    def outer(self, query):
        """The outer axes of whole contexts; None is free."""
        return query.shape[0], None

    def contexts(self, steps):
        """The outer axes of gathered contexts."""
        return len(steps.start_pos), steps.rows

    def mask(self, fmt, attn_mask, query, steps):
        batch, seqlen, num_heads, _ = query.shape
        return static_mask(fmt, attn_mask, batch, num_heads, seqlen, steps.rows)


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of any lengths, one after the other, [tokens, ..], which share a pool of rows."""

    steps: Steps  # checked, but for arrays
    decoding: int = 0
    axes: ClassVar[int] = 3
    layouts: ClassVar[tuple] = pmx.DYNAMIC

    def index(self):
        """The index tensors that these are of, by name."""
        steps, paged = self.steps, self.steps.page_size != ENDLESS
        table = np.asarray(steps.table)
        found = {name: getattr(steps, name) for name in ("seqstarts", "kvstarts", "start_pos")}
        found["cachestarts"] = table if paged else table[:, 0]
        return found | ({"cache_mode": 1, "page_size": steps.page_size} if paged else {})

    def over_keys(self, query, key):
        index_tensors.ends_with("seqstarts", self.steps.tokens, ("query", len(query)))
        index_tensors.ends_with("kvstarts", self.steps.context, ("key", len(key)))
        return self.steps

    def over_cache(self, name, tokens, layer):
        index_tensors.fits(self.steps, (name, len(tokens)), layer)
        return self.steps

    def outer(self, query):
        return (None,)

    def contexts(self, steps):
        return (steps.context,)

    def mask(self, fmt, attn_mask, query, steps):
        return dynamic_mask(fmt, attn_mask, query.shape[1], steps.tokens, steps.context)


def in_cache(name, given):
    """Packed sequences of a call, whose index tensors are taken out of what is `given`; `name` has tokens."""
    index = {each: given.pop(each) for each in INDEX}
    decoding_batches = given.pop("decoding_batches", 0)
    return planned(packed_tokens(name, given[name]), decoding_batches, **index)


def planned(tokens, decoding_batches, **index):
    """Packed sequences in a cache, of an array of so many tokens if that is known."""
    steps = index_tensors.dynamic(tokens, **index)
    return Packed(steps, decoding(decoding_batches, steps))


def with_keys(given):
    """Packed sequences whose contexts are packed too, taken likewise."""
    steps = index_tensors.packed(*(given.pop(each) for each in KEYS))
    return Packed(steps, decoding(given.pop("decoding_batches"), steps))


def decoding(decoding_batches, steps):
    """How many sequences the causal mask leaves alone."""
    return integer("decoding_batches", decoding_batches, 0, len(steps.start_pos))
