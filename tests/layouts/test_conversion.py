"""From line to line: all pairs, through tables, on bad input."""

import itertools
import tracemalloc

import engine_caches
import numpy as np
import pytest
from engine_caches import NAMES

from kvkit import KvkitError, layouts
from kvkit.layouts import tables

LATENT = {name for name in NAMES if engine_caches.kinds_of(name) == 1}
PAIRS = [pair for pair in itertools.product(NAMES, NAMES) if (pair[0] in LATENT) == (pair[1] in LATENT)]
TILES = {"vllm-cpu-amx"}  # blocks of 16 tokens, contents of 16


def sizes_of_pair(pair, **sizes):
    if set(pair) & TILES:
        sizes["N"] = -(-sizes["N"] // 16) * 16
    return engine_caches.sizes_for(*pair, **sizes)


def check(pair, sizes, dtype=np.uint16):
    """Convert to the second engine's layout and back, and check both."""
    before, after = pair
    data = engine_caches.values(sizes, engine_caches.kinds_of(before), dtype)
    source = engine_caches.filled(before, sizes, data)
    expected = engine_caches.filled(after, sizes, data)
    known = [engine_caches.said(name, sizes) for name in pair]
    out = engine_caches.empty(engine_caches.engine_layouts.make(**sizes)[after], dtype)
    layouts.convert(source, before, after, sizes=known[0], to_sizes=known[1], out=out)
    assert engine_caches.same(out, expected)
    back = engine_caches.empty(engine_caches.engine_layouts.make(**sizes)[before], dtype)
    layouts.convert(out, after, before, sizes=known[1], to_sizes=known[0], out=back, verify=True)
    assert engine_caches.same(back, source)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_pairs(name):
    for pair in PAIRS:
        if pair[0] == name:
            for changes in ({}, {"N": 2}, {"N": 1, "H": 1}):
                check(pair, sizes_of_pair(pair, **{"N": 32, **changes}))


LINES = ["vllm-lbnhc", "flashinfer-hnd", "pmx-dynamic-3", "ascend-nz", "vllm-v0", "lmdeploy-turbomind", "jax"]


def random_pages(rng, lengths, page_size, blocks):
    """Return pages of sequences in random blocks, with random entries after them."""
    used = -(-lengths // page_size)
    numbers = rng.permutation(blocks)
    table = rng.integers(-5, 10**6, (len(lengths), used.max() + 2))
    for b, count in enumerate(used):
        table[b, :count], numbers = numbers[:count], numbers[count:]
    return tables.from_blocks(table, lengths, page_size)


@pytest.mark.parametrize("after", LINES)
@pytest.mark.parametrize("pages", [(4, 16), (16, 4), (5, 1), (3, 7)], ids=str)
def test_through_tables(after, pages, rng):
    """Every token is where the target's table says, with its elements, and the other rows are 0."""
    lengths = np.array([9, 0, 23, 1])
    old, to = (random_pages(rng, lengths, size, 40) for size in pages)
    sizes = engine_caches.sizes_for("hf", after, B=40, N=pages[0])
    data = engine_caches.values(sizes) + np.uint16(1)
    source = engine_caches.filled("hf", sizes, data)
    there = layouts.convert(
        source, "hf", after, tables=(old, to),
        to_sizes={"b": 40, "n": pages[1]} if after != "pmx-dynamic-3" else {"n": 40 * pages[1]}, verify=True,
    )  # fmt: skip
    expected = np.zeros((sizes["L"], 2, 40, pages[1], sizes["H"], sizes["C"]), np.uint16)
    for b, length in enumerate(lengths):
        for t in range(length):
            from_, at = (int(each.table[b, t // each.page_size]) + t % each.page_size for each in (old, to))
            expected[:, :, at // pages[1], at % pages[1]] = data[:, :, from_ // pages[0], from_ % pages[0]]
    target = sizes | {"N": pages[1]}
    known = engine_caches.said(after, target)
    plain = engine_caches.filled(after, target, expected)
    assert b"".join(engine_caches.flat(there)) == b"".join(engine_caches.flat(plain))
    back = layouts.convert(
        there, after, "hf", sizes=known, to_sizes={"b": 40, "n": pages[0]}, tables=(to, old)
    )
    rows = np.isin(np.arange(40 * pages[0]), old.rows()).reshape(40, pages[0])
    assert engine_caches.same(
        back, engine_caches.filled("hf", sizes, data * rows[:, :, None, None].astype(np.uint16))
    )


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "V3", "float8_e5m2", "float8_e4m3fn"])
def test_elements_of_any_size(dtype, rng):
    source = [
        tuple(
            rng.integers(0, 256, (3, 2, 5, 12 * np.dtype(dtype).itemsize), np.uint8).view(dtype)
            for _ in range(2)
        )
    ]
    for line in ("vllm-lbnhc", "llama-cpp-v-trans", "l kv | b h c1 n c0[4] ; b h c n"):
        there = layouts.convert(source, "hf", line, verify=True)
        back = layouts.convert(there, line, "hf", sizes={"n": 5, "h": 2, "c": 12})
        assert engine_caches.same(back, [list(pair) for pair in source])


def test_values_of_their_own_size(rng):
    keys, values = (rng.standard_normal((4, 8, 2, size)).astype(np.float16) for size in (12, 8))
    there = layouts.convert((keys, values), "flash-attn", "flashinfer-hnd-pair", verify=True)
    assert np.array_equal(there[0], keys.transpose(0, 2, 1, 3))
    assert np.array_equal(there[1], values.transpose(0, 2, 1, 3))
    with pytest.raises(KvkitError, match="to_layout: expected arrays of their own for values"):
        layouts.convert((keys, values), "flash-attn", "flashinfer-nhd")


@pytest.mark.parametrize("planes", ["vllm-ascend-planes", "vllm-ascend-mla", "l kv | n b c"])
@pytest.mark.parametrize("whole", ["vllm-mla", "sglang-mla", "| l n b c"])
def test_two_planes_of_a_latent_row_are_joined_and_split(planes, whole, rng):
    """Through new pages, too: the latent part is first, then the rotated one."""
    source = [rng.integers(0, 9999, (3, 4, 14)).astype(np.uint16) for _ in range(2)]
    lying = layouts.convert(source, "vllm-mla", whole)
    pair = layouts.convert(lying, whole, planes, sizes={"b": 3, "n": 4, "v": 4}, verify=True)
    for layer, parts in zip(source, layouts.convert(pair, planes, "l kv | b n c"), strict=True):
        np.testing.assert_array_equal(np.concatenate(parts, axis=2), layer)
    pages = tables.from_blocks([[2, 0]], [7], 4), tables.from_blocks([[1, 0, 2, 3]], [7], 2)
    found = layouts.convert(pair, planes, whole, tables=pages, verify=True)
    moved = layouts.convert(found, whole, "l | b n c", sizes={"n": 2, "b": 4})
    for layer, old in zip(moved, source, strict=True):
        tokens = np.concatenate((old[2], old[0]))[:7]
        np.testing.assert_array_equal(np.concatenate(layer[[1, 0, 2, 3]])[:7], tokens)


def test_keys_and_values_of_their_own_types(rng):
    """As Ascend's NZ may have: codes of 8 bits in groups of 32, values of 16 bits in groups of 16."""
    keys = rng.integers(-128, 128, (3, 4, 2, 32)).astype(np.int8)
    values = rng.standard_normal((3, 4, 2, 16)).astype(np.float16)
    there = layouts.convert((keys, values), "ascend-nd", "ascend-nz", verify=True)
    assert np.array_equal(there[0], keys.reshape(3, 4, 2, 32).transpose(0, 2, 1, 3))
    assert np.array_equal(there[1], values.reshape(3, 4, 2, 16).transpose(0, 2, 1, 3))
    back = layouts.convert(there, "ascend-nz", "ascend-nd", sizes={"h": 2, "c": 32, "v": 16})
    assert engine_caches.same(back, [keys, values])


def test_progress_tells_all_bytes():
    source = [np.ones((2, 6, 4, 2, 8), np.float16) for _ in range(3)]
    told = []
    layouts.convert(source, "vllm-flash-attention", "vllm-lbhnc", progress=lambda *each: told.append(each))
    total = sum(array.nbytes for array in source)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_conversion_takes_little_memory():
    """Beside its caches, whose block here has 1 MB: a scratch to verify in, and index tensors."""
    source = [np.ones((2, 8, 256, 8, 128), np.float16) for _ in range(2)]
    out = [np.zeros((8, 256, 8, 256), np.float16) for _ in range(2)]
    convert = lambda: layouts.convert(source, "vllm-flash-attention", "vllm-lbnhc", out=out, verify=True)  # noqa: E731
    convert()
    tracemalloc.start()
    try:
        convert()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20 < source[0].nbytes // 4


CACHE = np.arange(4 * 2 * 3 * 2 * 8, dtype=np.uint16).reshape(4, 2, 3, 2, 8)  # flashinfer-nhd, pages of 3
OLD = tables.from_blocks([[3, 1]], [5], 3)


def refused(message, source=CACHE, before="flashinfer-nhd", after="flashinfer-hnd", out=None, **keywords):
    """Check that a call is refused, and that nothing is written."""
    out = np.full((4, 2, 2, 3, 8), 9, np.uint16) if out is None else out
    copy = np.array(out)
    with pytest.raises(KvkitError, match=message):
        layouts.convert(source, before, after, out=out, **keywords)
    assert np.array_equal(out, copy)


def test_what_is_refused():
    refused("source: expected the shape of", CACHE[0])
    refused("source: expected two arrays, keys and values", CACHE, "flash-attn")
    refused(r"source: expected the shape of .*: 2 for kv, not 3", CACHE, "pmx-static-1")
    refused("out: expected 2 heads of 8 elements of uint16", out=np.zeros((4, 2, 2, 3, 8), np.int16))
    refused("out: expected the shape of", out=np.zeros((4, 2, 3, 3, 8), np.uint16))
    refused("out: expected 12 rows", out=np.zeros((3, 2, 2, 3, 8), np.uint16))
    refused("sizes: expected sizes of l, b, n, h, c", sizes={"x": 1})
    refused(r"sizes\['h'\]: expected a positive integer", sizes={"h": 0})
    refused("source: expected .* 4 for h, not 2", sizes={"h": 4})
    refused(r"to_sizes\['h'\]: expected 2, as in the source, got 4", to_sizes={"h": 4})
    refused("tables: expected two BlockTables", tables=OLD)
    refused("tables: expected two BlockTables", tables=(OLD, [[1, 2]]))
    refused(
        r"tables\[0\]: expected rows within the 12 of source",
        tables=(tables.from_blocks([[4, 1]], [5], 3), OLD),
    )
    refused(
        r"tables\[1\]: expected rows within the 12 of out", tables=(OLD, tables.from_blocks([[3, 4]], [5], 3))
    )
    refused(r"tables\[1\]: expected the lengths", tables=(OLD, tables.from_blocks([[3, 1]], [4], 3)))
    refused(r"tables\[1\]: expected a row for each", tables=(OLD, tables.from_blocks([[3, 3]], [5], 3)))
    refused("layout: expected a line", after="nhd")
    refused("to_layout: expected an axis kv", after="b n h c")
    refused("layout: expected elements of one kind", before="vllm-dsa-indexer")
    refused(
        "tables: expected tables, because neither of the block sizes 3 and 2 divides",
        out=np.zeros((6, 2, 2, 2, 8), np.uint16),
    )
    read_only = np.zeros((4, 2, 2, 3, 8), np.uint16)
    read_only.flags.writeable = False
    refused("out: expected arrays that can be written", out=read_only)


def test_out_in_one_place():
    pool = np.zeros((4, 3, 2, 16), np.uint16)
    with pytest.raises(KvkitError, match="out: expected arrays apart from each other"):
        layouts.convert([CACHE, CACHE], "vllm-flashinfer-nhd", "vllm-lbnhc", out=[pool, pool])
    assert not pool.any()


def test_no_tokens():
    none = tables.from_blocks(np.zeros((2, 0), np.int64), [0, 0], 3)
    there = layouts.convert(CACHE, "flashinfer-nhd", "flashinfer-hnd", tables=(none, none), verify=True)
    assert there.shape[1:] == (2, 2, 3, 8)
    assert not there.any()


def test_out_apart_from_source():
    memory = np.zeros(8 * CACHE.size // 4, np.uint16)
    source = memory[: CACHE.size].reshape(CACHE.shape)
    refused("out: expected memory apart", source, out=memory[8 : CACHE.size + 8].reshape(4, 2, 2, 3, 8))
    layouts.convert(
        source, "flashinfer-nhd", "flashinfer-hnd", out=memory[CACHE.size :].reshape(4, 2, 2, 3, 8)
    )


def test_targets_that_cannot_be():
    with pytest.raises(KvkitError, match="to_layout: expected a size of c that 16 divides"):
        layouts.convert(CACHE, "flashinfer-nhd", "ascend-nz")
    with pytest.raises(KvkitError, match="to_layout: expected an axis h, as the source has 2"):
        layouts.convert(CACHE, "flashinfer-nhd", "vllm-ascend-planes")
    with pytest.raises(KvkitError, match="to_layout: expected an axis l, as the source has 2"):
        layouts.convert([CACHE, CACHE], "vllm-flashinfer-nhd", "flashinfer-nhd")
