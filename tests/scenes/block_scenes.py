"""Make allocators of blocks with sequences, and describe their whole state."""

import pickle

import pytest

from kvkit import KvkitError

P = 4


def run(blocks, *sequences):
    """Run a step to its end."""
    with blocks.begin_step(sequences) as step:
        return step


def filled(blocks, token_ids):
    """Return a new sequence whose tokens are in the cache."""
    seq = blocks.add(token_ids)
    run(blocks, (seq, len(token_ids) - seq.length))
    return seq


def state(blocks, *sequences):
    """Return the state that an error must not change."""
    held = [
        (seq.blocks, seq.length, seq.token_ids.tolist(), seq._pending, list(seq._chain)) for seq in sequences
    ]
    return pickle.dumps(vars(blocks._pool)), held, blocks.open_step


def refused(blocks, action, *arguments, sequences=(), **more):
    """Return the message of the error that an action raises, after a check that it changed nothing."""
    before = state(blocks, *sequences)
    with pytest.raises(KvkitError) as error:
        action(*arguments, **more)
    assert state(blocks, *sequences) == before
    return str(error.value)
