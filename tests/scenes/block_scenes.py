"""Allocators of blocks with sequences, and all that can be seen of them."""

import pickle

import pytest

from kvkit import KvkitError

P = 4


def run(blocks, *sequences):
    """A whole step."""
    with blocks.begin_step(sequences) as step:
        return step


def filled(blocks, token_ids):
    """A sequence of tokens that are in the cache."""
    seq = blocks.add(token_ids)
    run(blocks, (seq, len(token_ids) - seq.length))
    return seq


def state(blocks, *sequences):
    """All that an error must leave alone."""
    held = [
        (seq.blocks, seq.length, seq.token_ids.tolist(), seq.pending, list(seq.chain)) for seq in sequences
    ]
    return pickle.dumps(vars(blocks._pool)), held, blocks.open_step


def refused(blocks, action, *arguments, sequences=(), **more):
    """The message of an error that changes nothing."""
    before = state(blocks, *sequences)
    with pytest.raises(KvkitError) as error:
        action(*arguments, **more)
    assert state(blocks, *sequences) == before
    return str(error.value)
