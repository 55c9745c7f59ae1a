"""Index math past 2^31, and an operator on rows that lie there."""

import numba
import numpy as np
import pytest

import kvkit
from kvkit.checks.records import ENDLESS
from kvkit.formulas import index
from kvkit.formulas.index import sequence_among

FAR = 2**31


@numba.njit
def page_of(position, page_size):
    return index.page_of(position, page_size)


@numba.njit
def row_of(page_start, position, page_size):
    return index.row_of(page_start, position, page_size)


@numba.njit
def rest_of_page(position, page_size):
    return index.rest_of_page(position, page_size)


@numba.njit
def share(total, part, parts):
    return index.share(total, part, parts)


@numba.njit
def sequences_of(starts, tokens):
    return [sequence_among(starts, len(starts) - 1, token) for token in tokens]


PLACES = [
    (0, 0, 1), (5, 1, 4), (FAR, FAR + 5, 128), (7 * FAR, 3 * FAR + 127, 128), (2**40, 2**41 + 1, 3),
    (2**61, 2**61 - 1, 2**62), (0, 2**61 - 1, ENDLESS), (3, FAR + 9, 2 * FAR),
]  # fmt: skip


@pytest.mark.parametrize(("start", "position", "page_size"), PLACES)
def test_the_row_of_a_position(start, position, page_size):
    assert page_of(position, page_size) == position // page_size
    assert row_of(start, position, page_size) == start + position % page_size


@pytest.mark.parametrize(("start", "position", "page_size"), PLACES)
def test_a_page_ends_after_its_rest(start, position, page_size):
    rest = rest_of_page(position, page_size)
    assert page_of(position + rest - 1, page_size) == page_of(position, page_size)
    assert page_of(position + rest, page_size) == page_of(position, page_size) + 1
    assert row_of(start, position + rest - 1, page_size) == start + page_size - 1


@pytest.mark.parametrize("total", [0, 1, 2, 7, 100, 1000003, 5 * FAR + 3, 2**62 - 1])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64, 1000])
def test_shares_cover_everything_once(total, parts):
    begins = [share(total, part, parts) for part in range(parts + 1)]
    sizes = np.diff(begins)
    assert begins[0] == 0
    assert begins[-1] == total
    assert set(sizes.tolist()) <= {total // parts, total // parts + 1}


@pytest.mark.parametrize(
    "lengths",
    [[1], [3, 2, 5], [0, 0, 2, 0, 0, 0, 3, 0], [0, 1], [1, 0], [1, 0, 0, 0, 1], [FAR, 0, 3, 5 * FAR, 1]],
    ids=str,
)
def test_the_sequence_of_a_token(lengths):
    starts = np.cumsum([0, *lengths])
    first, last = starts[:-1], starts[1:] - 1
    used = np.flatnonzero(lengths)
    assert sequences_of(starts, first[used]) == used.tolist()
    assert sequences_of(starts, last[used]) == used.tolist()


def test_the_sequence_of_every_token():
    rng = np.random.default_rng(5)
    for _ in range(50):
        lengths = rng.integers(0, 4, rng.integers(1, 40))
        starts = np.cumsum([0, *lengths])
        tokens = np.arange(starts[-1])
        if len(tokens):
            assert sequences_of(starts, tokens) == np.repeat(np.arange(len(lengths)), lengths).tolist()


# Rows past 2^31, in a file with holes


@pytest.fixture
def sparse(tmp_path):
    """Yield a maker of arrays of zeros of any size, of which only touched pages exist."""
    files = []

    def make(shape, dtype):
        path = tmp_path / f"array{len(files)}"
        path.touch()
        files.append(path)
        with path.open("r+b") as file:
            file.truncate(int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize)
        return np.memmap(path, dtype, "r+", shape=shape)

    yield make
    assert sum(path.stat().st_blocks * 512 for path in files) < 2**22


FAR_ROWS = 2**31 + 100
FAR_SHAPES = [(FAR_ROWS, 1, 2, 1, 1), (1, FAR_ROWS, 2, 1, 1), (1, 2, FAR_ROWS, 1, 1), (1, 2, 1, FAR_ROWS, 1)]


def dynamic(tokens, rows, cache, scale=None, **attrs):
    counts = np.arange(len(rows) + 1)
    steps = counts, counts, rows, 0 * rows, None, None
    return kvkit.dynamic_batching.key_value_cache(tokens, -tokens, *steps, cache, scale, **attrs)


@pytest.mark.parametrize("layout", range(4), ids="layout{}".format)
def test_rows_past_two_to_the_31(sparse, layout):
    """Wrapped to 32 bits, the first two rows would meet rows 4 and 5, the others lie before the cache."""
    cache = sparse(FAR_SHAPES[layout], np.int8)
    rows = np.array([4, 5, 2**31 + 4, 2**31 + 5, 2**31 - 1])
    tokens = np.arange(1, 6, dtype=np.int8).reshape(5, 1, 1)
    key, value = dynamic(tokens, rows, cache, cache_layout=layout)
    assert key.ravel().tolist() == [1, 2, 3, 4, 5]
    assert value.ravel().tolist() == [-1, -2, -3, -4, -5]
    by_row = np.moveaxis(cache, FAR_SHAPES[layout].index(FAR_ROWS), 0).reshape(FAR_ROWS, 2)
    assert by_row[rows].tolist() == [[i, -i] for i in range(1, 6)]
    for row in (0, 3, 6, 2**31, 2**31 + 3, 2**31 + 6, FAR_ROWS - 1):
        assert by_row[row].tolist() == [0, 0]


def test_a_page_table_past_two_to_the_31(sparse):
    cache = sparse(FAR_SHAPES[0], np.int8)
    tokens = np.arange(1, 8, dtype=np.int8).reshape(7, 1, 1)
    table = np.array([[2**31 + 90, 10, 2**31 + 20, -1]])
    key, _ = kvkit.dynamic_batching.key_value_cache(
        tokens, tokens, np.array([0, 7]), np.array([0, 7]), table, np.array([0]), None, None, cache,
        cache_mode=1, page_size=3,
    )  # fmt: skip
    assert key.ravel().tolist() == [1, 2, 3, 4, 5, 6, 7]
    rows = [2**31 + 90, 2**31 + 91, 2**31 + 92, 10, 11, 12, 2**31 + 20]
    assert cache[rows, 0, 0, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_scales_past_two_to_the_32_bytes(sparse):
    far = 2**29 + 7
    cache, scale = sparse((far + 3, 1, 2, 1, 1), np.int8), sparse((far + 3, 1, 2, 1, 1), np.float32)
    tokens = np.array([127, 254], np.float32).reshape(2, 1, 1)
    key, value = dynamic(tokens, np.array([7, far]), cache, scale, quant_bit=8, quant_group=1)
    assert scale.nbytes > 2**32
    assert key.ravel().tolist() == [127, 254]
    assert value.ravel().tolist() == [-127, -254]
    assert scale[[7, far], 0, :, 0, 0].tolist() == [[1, 1], [2, 2]]
    assert cache[[7, far], 0, :, 0, 0].tolist() == [[127, -127], [127, -127]]


@pytest.mark.parametrize("layout", [0, 1], ids="layout{}".format)
def test_static_sequences_past_two_to_the_31(sparse, layout):
    length = 2**30 + 1
    shape = (2, 1, 2, length, 1, 1) if layout == 0 else (1, 2, 2, 1, length, 1)
    cache = sparse(shape, np.int8)
    tokens = np.array([3, 4], np.int8).reshape(2, 1, 1, 1)
    key, value = kvkit.key_value_cache(tokens, -tokens, 0, cache, cache_layout=layout)
    assert key.ravel().tolist() == [3, 4]
    assert value.ravel().tolist() == [-3, -4]
    by_sequence = cache.reshape(2, 2, length)
    assert by_sequence[:, :, 0].tolist() == [[3, -3], [4, -4]]
    assert not by_sequence[:, :, 1].any()


def test_the_last_row_is_the_last(sparse):
    cache = sparse(FAR_SHAPES[0], np.int8)
    token = np.ones((1, 1, 1), np.int8)
    dynamic(token, np.array([FAR_ROWS - 1]), cache)
    assert cache[-1].ravel().tolist() == [1, -1]
    with pytest.raises(kvkit.KvkitError, match=rf"cachestarts\[0\].*{FAR_ROWS}"):
        dynamic(token, np.array([FAR_ROWS]), cache)
