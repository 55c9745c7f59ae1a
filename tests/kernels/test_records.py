"""Records are filled by name: a wrong or missing one is an error, not a number in the wrong place."""

import functools
import operator

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kvkit
from kvkit.cpu.attention import prepare
from kvkit.cpu.attention.params import ATTENTION_PARAMS
from kvkit.cpu.copy import pieces
from kvkit.cpu.launches import Record

RECORDS = {"params": ATTENTION_PARAMS, "side": pieces.POOL_SIDE}
every = pytest.mark.parametrize("name", RECORDS)


def fields(record):
    return {name: i * 3 for i, name in enumerate(record.names)}


@every
def test_numbers_come_in_the_order_of_the_fields(name):
    record = RECORDS[name]
    shuffled = dict(reversed(fields(record).items()))
    numbers = record.filled(shuffled)
    assert_array_equal(numbers, 3 * np.arange(len(record.names)))
    assert numbers.dtype == np.int64
    view = numbers.view(record.dtype)[0]
    for field, number in shuffled.items():
        assert functools.reduce(operator.getitem, field.split("."), view) == number
    assert all(numbers[record.at[field]] == number for field, number in shuffled.items())


@every
def test_a_missing_field(name):
    record = RECORDS[name]
    for missing in record.names:
        given = fields(record)
        del given[missing]
        with pytest.raises(TypeError, match=rf"missing or unknown: {missing}$"):
            record.filled(given)


@every
def test_an_unknown_field(name):
    record = RECORDS[name]
    with pytest.raises(TypeError, match=r"missing or unknown: colour$"):
        record.filled(fields(record) | {"colour": 1})


@every
def test_a_wrong_name_in_the_place_of_a_right_one(name):
    record = RECORDS[name]
    given = fields(record)
    given["colour"] = given.pop(record.names[2])
    odd = ", ".join(sorted(("colour", record.names[2])))
    with pytest.raises(TypeError, match=f"missing or unknown: {odd}$"):
        record.filled(given)


def test_no_field_has_two_names_or_two_fields_one():
    for record in RECORDS.values():
        assert len(set(record.names)) == len(record.names)
    assert Record("a b", "c").names == ("a", "b", "c")


def test_what_a_call_has_to_say(monkeypatch):
    """A field more or less in one of the groups that make a task is an error before anything is launched."""
    query = np.ones((1, 1, 2, 16), np.float16)

    def call():
        return kvkit.multi_head_attention(query, query, query, num_heads=2, head_dim=16)

    call()
    kvkit.calls.prepared.forget_all()
    monkeypatch.setattr(prepare, "ATTENTION_PARAMS", Record(*ATTENTION_PARAMS.names, "one_more"))
    with pytest.raises(TypeError, match=r"one_more$"):
        call()
