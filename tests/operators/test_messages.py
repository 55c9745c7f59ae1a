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
    "list": LONG, "array in a list": [np.zeros(1000)], "dict": dict.fromkeys(range(100_000), 1.5),
    "text": "\x1b[31m" * 100_000, "bytes": bytes(1_000_000), "number": 10**6000, "numbers": [1.5] * 9,
    "something else": type("Odd", (), {"__repr__": lambda self: "\n" * 1000})(),
    "a tensor": type("Tensor", (), {"dtype": "float8", "shape": (7, 9)})(),
}  # fmt: skip


@pytest.mark.parametrize("name", ["a tensor", *ODD])
@pytest.mark.parametrize("op", OPERATORS.values(), ids=list(OPERATORS))
def test_no_contents_in_messages(op, name):
    """Each array argument given as something else."""
    required = {array.name: np.zeros((2, 2, 2, 8), np.float32) for array in op.inputs
                if not array.keyword or not array.optional}  # fmt: skip
    needed = {a.name for a in op.attributes if a.default is REQUIRED}
    some = {"num_heads": 2, "head_dim": 8, "softmax_scale": 1.0, "ratio": 2, "overlap": False, "rope": {}}
    attributes = {name: value for name, value in some.items() if name in needed}
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
        "list": "got list of 2 elements", "array in a list": "got list of 1 elements",
        "dict": "got dict of 100000 elements", "number": "got a number of 19932 bits",
        "numbers": "got list of 9 elements", "a tensor": "got Tensor of float8 and shape (7, 9)",
    }  # fmt: skip
    for name, text in expected.items():
        with pytest.raises(KvkitError, match=r"^current_key: expected a numpy array, got") as caught:
            kvkit.key_value_cache(ODD[name], np.zeros(1), 0, np.zeros(1))
        assert str(caught.value).endswith(text)


QUERY, KEY = np.ones((1, 4, 8, 16), np.float32), np.ones((1, 4, 2, 16), np.float32)
POOL, TOKEN = np.zeros((4, 4, 2, 16), np.float32), np.zeros((1, 4, 16), np.float32)
CACHE, NEW = np.zeros((1, 1, 2, 64, 2, 16), np.float32), np.ones((7, 2, 16), np.float32)
HEADS = {"num_heads": 8, "head_dim": 16}
PAGES = {"cache_mode": 1, "page_size": 4}


def packed(cachestarts, kvstarts=(0, 5, 7), start_pos=(0, 0), **more):
    """Return a call of two sequences, of 5 and 2 new tokens."""
    kvkit.dynamic_batching.key_value_cache(
        NEW, NEW, [0, 5, 7], kvstarts, cachestarts, start_pos, None, None,
        np.zeros((64, 1, 2, 2, 16), np.float32), **more,
    )  # fmt: skip


MISTAKES = {
    "more key heads": (
        lambda: kvkit.multi_head_attention(QUERY, KEY, KEY, **HEADS, num_kv_heads=8),
        "key: expected shape (1, 4, 8, 16), got (1, 4, 2, 16): for grouped queries give num_kv_heads=2",
    ),
    "more key heads, over a cache": (
        lambda: kvkit.multi_head_cache_attention(QUERY, KEY, KEY, 0, CACHE, **HEADS, num_kv_heads=8),
        "shape (1, 4, 8, 16), got (1, 4, 2, 16): for grouped queries give num_kv_heads=2",
    ),
    "other heads": (
        lambda: kvkit.multi_head_attention(QUERY, KEY[:, :, [0, 1, 1]], KEY, **HEADS),
        "key: expected shape (1, 4, 8, 16), got (1, 4, 3, 16)",
    ),
    "a page table for cache_mode 0": (
        lambda: packed([[16, 32], [0, -1]]),
        "got shape (2, 2) (cache_mode 0 takes offsets [B]; cache_mode=1 takes a page table)",
    ),
    "offsets for cache_mode 1": (
        lambda: packed([16, 0], cache_mode=1),
        "got shape (2,) (cache_mode 1 takes a page table [B, MaxP])",
    ),
    "page numbers": (
        lambda: packed([[1, 2], [0, 3]], **PAGES),
        "sequences 1 and 0 both store (a page begins at its number * page_size, which is 4)",
    ),
    "a page written while it is read": (
        lambda: packed([[8, 16, 12], [0, 4, 12]], (0, 9, 20), (4, 9), **PAGES),
        "row 12, which holds position 8 of sequence 1 and would get position 8 of sequence 0 "
        "(a page begins at its number * page_size, which is 4)",
    ),
    "new tokens on a past one, at offsets": (
        lambda: packed([10, 14], (0, 9, 17), (4, 6)),
        "row 14, which holds position 0 of sequence 1 and would get position 4 of sequence 0",
    ),
    "page_size of another engine": (
        lambda: packed([[60, 32], [0, -1]], cache_mode=1, page_size=16),
        "position 4 is in row 64 (a page begins at its number * page_size, which is 16)",
    ),
    "table without a page": (
        lambda: kvkit.paged_attention(TOKEN, POOL, POOL, [[1, -1]], [7]),
        "block_tables[0, 1]: expected a block from 0 to 3, one of 2 for 7 tokens of sequence 0, got -1",
    ),
    "two rows for one length": (
        lambda: kvkit.paged_attention(TOKEN, POOL, POOL, [[1], [2]], [3]),
        "block_tables: expected 1 rows, one for each length, got 2",
    ),
    "list of scales": (
        lambda: kvkit.paged_attention(TOKEN, POOL, POOL, [[1]], [3], key_scale=[1.0, 2.0]),
        "key_scale: expected a number, or a numpy array, got list [1.0, 2.0]",
    ),
    "compress_type by name": (
        lambda: kvkit.ascend.reshape_and_cache(NEW, None, NEW, None, [0], compress_type="kvhead"),
        "compress_type: expected ascend.CompressType.UNDEFINED or ascend.CompressType.KVHEAD or "
        "ascend.CompressType.KVHEAD_ROPE or ascend.CompressType.OMNI, or its number, got str 'kvhead'",
    ),
    "float64": (
        lambda: kvkit.key_value_cache(KEY.astype(float), KEY.astype(float), 0, CACHE),
        "got float64: array.astype(np.float32) converts it (tensor.float() of torch)",
    ),
    "uint16": (
        lambda: kvkit.key_value_cache(KEY.astype(np.uint16), KEY.astype(np.uint16), 0, CACHE),
        "got uint16: array.view(ml_dtypes.bfloat16), if it holds the bits of bfloat16",
    ),
    "a cache of uint16": (
        lambda: kvkit.key_value_cache(KEY, KEY, 0, CACHE.astype(np.uint16)),
        "got uint16: array.view(ml_dtypes.bfloat16), if it holds the bits of bfloat16",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_common_mistakes_are_told_what_to_do(name):
    call, text = MISTAKES[name]
    with pytest.raises(KvkitError) as caught:
        call()
    assert str(caught.value).endswith(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("plain", "plain"), ("a\nb\x1b[0m", r"a\nb\x1b[0m"), ("x" * 81, "x" * 77 + "..."), ("x" * 80, "x" * 80),
     ("\x00" * 40, r"\x00" * 19 + r"\..."), ("\udcff é", r"\udcff é"), (7, "7")],
)  # fmt: skip
def test_brief(text, expected):
    assert brief(text) == expected


def test_starts_without_the_first_0_are_named():
    x = np.zeros((7, 1, 8), np.float32)
    with pytest.raises(KvkitError, match="seqstarts: expected to begin with 0, got 5"):
        kvkit.dynamic_batching.multi_head_attention(
            x, x, x, [5, 7], [0, 5, 7], 0, None, None, num_heads=1, head_dim=8
        )
