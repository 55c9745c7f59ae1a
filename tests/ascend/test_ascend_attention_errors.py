"""Calls of `paged_attention` that are refused; each argument alone is broken in `test_refusals.py`."""

import numpy as np
import pytest
from ascend_attention_scenes import apart_or_not, call_of, run
from ascend_block_scenes import refused

INT64_MAX, INT64_MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min


@pytest.fixture
def call(apart):
    """2 sequences of 4 query and 2 key heads, in blocks of 4 rows."""
    return call_of(np.random.default_rng(1), apart=apart, lengths=[9, 6], razor=True, sinks=True)


def check(call, names, **changes):
    """The error begins with one of the names; given outputs keep their bytes."""
    out = np.full((2, 4, 16), 7, np.float32)
    refused(lambda: run({"out": out} | call | changes), names, out)


@apart_or_not
def test_legal(call):
    """Otherwise the others would prove nothing."""
    out = np.full((2, 4, 16), 7, np.float32)
    assert run(call, out=out) is out
    assert (out != 7).all()


@apart_or_not
@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "razor_offset"])
def test_another_float_type(call, name):
    array = call[name].astype(np.float16)
    check(call, "" if name == "query" else name, **{name: array})


@apart_or_not
def test_sizes(call):
    key, value, query = call["key_cache"], call["value_cache"], call["query"]
    check(call, "key_cache", key_cache=key[..., 1:])
    check(call, "key_cache", key_cache=key[:0])
    check(call, "value_cache", value_cache=value[..., :0])
    check(call, "value_cache", value_cache=value[1:])
    check(call, "value_cache", value_cache=value[:, 1:])
    check(call, "value_cache", value_cache=np.concatenate([value, value], 2))
    check(call, "razor_offset", razor_offset=call["razor_offset"][1:])
    check(call, "razor_offset", razor_offset=call["razor_offset"][:, 1:])
    check(call, "sinks", sinks=call["sinks"][1:])
    for array in (query[:, :0], query[..., :0]):
        check(call, "query", query=array)
    check(call, "", query=query[:, :3])
    check(call, "context_lens", query=np.concatenate([query, query[:1]]))
    check(call, "context_lens", query=query[:0])


@apart_or_not
def test_blocks_that_are_not_there(call):
    """Those behind the last block of a context are garbage in every call."""
    for entry, length in enumerate(call["context_lens"]):
        for column in range(-(-length // 4)):
            for block in (-1, len(call["key_cache"]), 2**40, INT64_MAX, INT64_MIN):
                table = call["block_tables"].copy()
                table[entry, column] = block
                check(call, f"block_tables[{entry}, {column}]", block_tables=table)


@apart_or_not
def test_lengths(call):
    room = call["block_tables"].shape[1] * 4
    for length in (-1, INT64_MIN):
        lengths = call["context_lens"].copy()
        lengths[1] = length
        check(call, "context_lens", context_lens=lengths)
    for length in (room + 1, 2**40, INT64_MAX):
        lengths = call["context_lens"].copy()
        lengths[1] = length
        check(call, "block_tables", context_lens=lengths)


def test_entries_of_neither_form():
    """One context for each sequence, or one for each of its key heads, of which there is one in the cache."""
    rng = np.random.default_rng(2)
    query, cache = rng.random((2, 6, 8), np.float32), rng.random((3, 4, 1, 8), np.float32)

    def call_with(entries, caches=cache, queries=query):
        tables, lens = np.zeros((entries, 1), np.int64), np.full(entries, 3)
        first = dict(zip(("query", "key_cache", "value_cache"), (queries, caches, caches), strict=True))
        return lambda: run(first | {"block_tables": tables, "context_lens": lens})

    for entries in (2, 4, 6, 12):
        call_with(entries)()
    for entries in (0, 1, 3, 5, 8, 10, 14, 24):
        refused(call_with(entries), "context_lens")
    call_with(0, queries=query[:0])()
    refused(call_with(3, queries=query[:0]), "context_lens")
    two = np.concatenate([cache, cache], 2)
    call_with(2, two)()
    for entries in (0, 1, 4):
        refused(call_with(entries, two), "context_lens")
    refused(call_with(2, np.concatenate([two, two], 2)), "query")
