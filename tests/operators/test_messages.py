"""Messages are short and printable, whatever they are about."""

import time

import numpy as np
import pytest

import kvkit
from kvkit import KvkitError
from kvkit.errors import brief
from kvkit.operators import OPERATORS, REQUIRED

LONG = np.zeros((2, 3, 4000)).tolist()
ODD = {
    "list": LONG,
    "array in a list": [np.zeros(1000)],
    "dict": dict.fromkeys(range(100_000), 1.5),
    "text": "\x1b[31m" * 100_000,
    "bytes": bytes(1_000_000),
    "number": 10**6000,
    "numbers": [1.5] * 9,
    "something else": type("Odd", (), {"__repr__": lambda self: "\n" * 1000})(),
    "a tensor": type("Tensor", (), {"dtype": "float8", "shape": (7, 9)})(),
}


@pytest.mark.parametrize("name", ["a tensor", *ODD])
@pytest.mark.parametrize("op", OPERATORS.values(), ids=list(OPERATORS))
def test_no_contents_in_messages(op, name):
    """Each array argument given as something else."""
    required = {array.name: np.zeros((2, 2, 2, 8), np.float32) for array in op.inputs if not array.keyword}
    needed = {a.name for a in op.attributes if a.default is REQUIRED}
    attributes = {name: value for name, value in {"num_heads": 2, "head_dim": 8}.items() if name in needed}
    for array in op.inputs:
        begin = time.perf_counter()
        with pytest.raises(KvkitError) as caught:
            op.function()(**required | attributes | {array.name: ODD[name]})
        text = str(caught.value)
        assert len(text) < 300, text[:1000]
        assert text.isprintable()
        assert time.perf_counter() - begin < 5


def test_what_is_said_of_things():
    expected = {
        "list": "got list of 2 elements",
        "array in a list": "got list of 1 elements",
        "dict": "got dict of 100000 elements",
        "number": "got a number of 19932 bits",
        "numbers": "got list of 9 elements",
        "a tensor": "got Tensor of float8 and shape (7, 9)",
    }
    for name, text in expected.items():
        with pytest.raises(KvkitError, match=r"^current_key: expected a numpy array, got") as caught:
            kvkit.key_value_cache(ODD[name], np.zeros(1), 0, np.zeros(1))
        assert str(caught.value).endswith(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("plain", "plain"), ("a\nb\x1b[0m", r"a\nb\x1b[0m"), ("x" * 81, "x" * 77 + "..."), ("x" * 80, "x" * 80),
     ("\x00" * 40, r"\x00" * 19 + r"\..."), ("\udcff é", r"\udcff é"), (7, "7")],
)  # fmt: skip
def test_brief(text, expected):
    assert brief(text) == expected
