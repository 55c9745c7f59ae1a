"""A plan for pages: the bits of `paged_append` and `paged_attention`, checked once for calls of one form."""

import numpy as np
import pool_scenes
import pytest
from pool_scenes import drawn

import kvkit
from kvkit.calls.prepared import forget_all
from kvkit.checks import index_tensors, paged
from kvkit.formats.elements import BY_NAME

PAGE, LENGTHS, STARTS = 4, [6, 0, 9, 2], [0, 2, 2, 5, 7]
PAGES = [[5, 0], [], [3, 2, 4], [1]]


@pytest.fixture
def checks(monkeypatch):
    """Return a list that gets the names of calls that are checked in full; "alone" outside plans."""
    names = []
    for name in ("checked_paged_attention", "checked_append"):
        checked = getattr(paged, name)

        def check(call, planned=None, name=name, checked=checked):
            names.append(name if planned else "alone")
            return checked(call, planned)

        monkeypatch.setattr(f"kvkit.calls.pools.{name}", check)
    return names


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(
    ("engine", "name", "scale"),
    [("FlashInfer", "float16", None), ("vLLM LBHNC", "e4m3", 0.5), ("shared pages", "int8", 0.02),
     ("content apart", "bfloat16", None)],
)  # fmt: skip
def test_layers_have_the_bits_of_plain_calls(engine, name, scale, lists, rng, checks):
    """The second layer is not checked again, with results of its own or given ones."""
    table = pool_scenes.as_lists(PAGES) if lists else pool_scenes.as_table(rng, PAGES, 6)
    plan = kvkit.paged_plan(table, LENGTHS, STARTS, page_size=PAGE)
    slots = [0 * PAGE, 0 * PAGE + 1, 2 * PAGE + 2, 2 * PAGE + 3, 4 * PAGE, 1 * PAGE, 1 * PAGE + 1]
    dtype = BY_NAME[name].dtype if scale is None else np.float16
    for layer in range(3):
        pools, other = (drawn(np.random.default_rng(layer), engine, name) for _ in range(2))
        how = {"layout": pools.layout, "key_scale": scale, "value_scale": scale}
        new = [rng.standard_normal((7, 2, 16)).astype(dtype) for _ in range(2)]
        query = rng.standard_normal((7, 4, 16)).astype(dtype)
        kvkit.paged_append(*new, *other.given, slots, **how)
        expected = kvkit.paged_attention(query, *other.given, table, LENGTHS, STARTS, **how, return_lse=True)
        assert plan.paged_append(*new, *pools.given, **how) == pools.given
        assert [memory.tobytes() for memory in pools.memory] == [memory.tobytes() for memory in other.memory]
        out = [np.empty_like(array) for array in expected] if layer == 2 else None
        found = plan.paged_attention(query, *pools.given, **how, return_lse=True, out=out)
        assert out is None or all(one is other for one, other in zip(found, out, strict=True))
        for got, right in zip(found, expected, strict=True):
            assert got.tobytes() == right.tobytes()
    checks = [name for name in checks if name != "alone"]
    assert checks == ["checked_append", "checked_paged_attention", "checked_paged_attention"]


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_keys_take_the_positions_of_the_plan(name, rng, checks):
    """A layer of its own rope, and one that rotates nothing; the second of each is not checked again."""
    plan = kvkit.paged_plan(PAGES_TABLE, LENGTHS, STARTS, page_size=PAGE)
    slots, positions = [0, 1, 10, 11, 16, 4, 5], [4, 5, 6, 7, 8, 0, 1]
    scaling = {"rope_type": "linear", "factor": 2}
    ropes = [kvkit.Rope(16), kvkit.Rope(8, interleaved=True, scaling=scaling), "none"]
    for rope in [*ropes, *ropes]:
        pools, other = (drawn(np.random.default_rng(0), "flash-attn", name) for _ in range(2))
        new = [rng.standard_normal((7, 2, 16)).astype(np.float16) for _ in range(2)]
        how = {} if name == "float16" else {"key_scale": 0.02, "value_scale": 0.02}
        kvkit.paged_append(*new, *other.given, slots, **how, positions=positions, rope=rope)
        plan.paged_append(*new, *pools.given, **how, rope=rope)
        assert [memory.tobytes() for memory in pools.memory] == [memory.tobytes() for memory in other.memory]
    assert checks == ["checked_append"] * 3


def test_scales_of_tokens_and_of_heads(rng):
    """Those of tokens move with their pools, those of heads are read again."""
    plan = kvkit.paged_plan(pool_scenes.as_table(rng, PAGES, 6), LENGTHS, STARTS, page_size=PAGE)
    table = pool_scenes.as_lists(PAGES)
    query, *new = (rng.standard_normal((7, heads, 16)).astype(np.float16) for heads in (4, 2, 2))
    for layer in range(2):
        codes = [np.zeros((6, PAGE, 2, 16), np.int8) for _ in range(2)]
        of_tokens = [np.zeros((6, PAGE, 2), np.float32) for _ in range(2)]
        plan.paged_append(*new, *codes, key_scale=of_tokens[0], value_scale=of_tokens[1])
        assert all(scales.any() for scales in of_tokens)
        of_heads = [np.float32([0.5, layer + 1]) for _ in range(2)]
        for key_scale, value_scale in (of_tokens, of_heads):
            how = {"key_scale": key_scale, "value_scale": value_scale}
            expected = kvkit.paged_attention(query, *codes, table, LENGTHS, STARTS, **how)
            assert plan.paged_attention(query, *codes, **how).tobytes() == expected.tobytes()


@pytest.mark.parametrize("lists", [False, True])
def test_calls_without_a_plan_are_checked_once_for_equal_index_tensors(lists, rng, checks, monkeypatch):
    """Tensors are compared by their contents: they may change in place, or be others with the same."""
    table = pool_scenes.as_lists(PAGES) if lists else pool_scenes.as_table(rng, PAGES, 6)
    lengths, starts = np.array(LENGTHS), np.array(STARTS)
    query = rng.standard_normal((7, 4, 16)).astype(np.float16)

    def call(count):
        """Return a call with arrays, and the same with lists, which is always checked."""
        tables, pools = (table if lists else (table,)), drawn(rng, "FlashInfer", "float16")
        copies = [np.array(each) for each in tables]
        how = {"layout": pools.layout, "return_lse": True}
        checks.clear()
        found = kvkit.paged_attention(query, *pools.given, tuple(copies) if lists else copies[0], lengths,
                                      starts, **how)  # fmt: skip
        assert checks == ["alone"] * count
        again = kvkit.paged_attention(query, *pools.given, table, lengths.tolist(), starts, **how)
        for got, right in zip(found, again, strict=True):
            assert got.tobytes() == right.tobytes()

    for count in (1, 0, 0):
        call(count)
    lengths[2] -= 1
    call(0)  # the tensors alone are checked
    pages = table[1] if lists else table
    pages[pages == 5] = 1
    call(0)
    monkeypatch.setattr(index_tensors, "VALIDATES", True)
    forget_all()
    call(1)
    monkeypatch.undo()
    pages[pages == 1] = 77
    with pytest.raises(kvkit.KvkitError, match="a block from 0 to 5"):
        call(1)


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("engine", ["FlashInfer", "content apart", "shared pages", "flash-attn"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_calls_follow_any_contents_of_their_index_tensors(engine, lists, dtype, rng, checks):
    """Random contexts in arrays of one form have the bits of calls in lists, which are always checked."""
    pools = drawn(rng, engine, "float16")
    given = pools.given
    if engine == "flash-attn":  # with a gap after each page of values, which have a table of their own
        given = given[0], np.pad(given[1], ((0, 0), (0, 1), (0, 0), (0, 0)))[:, :PAGE]
    query = rng.standard_normal((7, 4, 16)).astype(np.float16)
    lengths, starts, ends = np.zeros(4, dtype), np.zeros(5, dtype), np.zeros(5, dtype)
    table = np.zeros(12 if lists else (4, 3), dtype)
    tables, how = (ends, table) if lists else table, {"layout": pools.layout, "return_lse": True}
    for turn in range(40):
        lengths[:] = rng.integers(0, 13, 4)
        starts[1:] = [*np.sort(rng.integers(0, 8, 3)), 7] if turn > 20 else STARTS[1:]
        held = -(-lengths // PAGE)
        ends[:] = [0, *np.cumsum(held)] if lists else 0
        table[...] = rng.integers(0, 6, table.shape)
        if turn % 3 == 2:  # a wrong number
            wrong = ((lengths, 1, -1), (starts, 4, 6), (table, (0, 0) if table.ndim == 2 else 0, 6))[
                turn // 3 % 3
            ]
            lengths[0] = max(lengths[0], 1)
            wrong[0][wrong[1]] = wrong[2]
        calls = ((tables, lengths, starts), ((tuple if lists else list)(each.tolist() for each in tables),
                 lengths.tolist(), starts.tolist()))  # fmt: skip
        texts = []
        for tensors in calls[:1] * (1 + turn % 4) + calls[1:]:  # some run without Python, after an error too
            try:
                texts.append([x.tobytes() for x in kvkit.paged_attention(query, *given, *tensors, **how)])
            except kvkit.KvkitError as error:
                texts.append(str(error))
        assert texts[1:] == texts[:-1]
        assert isinstance(texts[0], str) == (turn % 3 == 2)
    # Those in lists; the first one, wrong ones, again, and the next; other query rows need other launches.
    assert 40 < len(checks) <= 40 + 1 + 2 * 7 + 20 + 20


@pytest.mark.parametrize("lists", [False, True])
def test_tensors_that_change_during_a_call_are_another_call(lists, rng, monkeypatch):
    """Another thread may change them once they have been checked."""
    pools, query = drawn(rng, "FlashInfer", "float16"), rng.standard_normal((7, 4, 16)).astype(np.float16)
    lengths, starts = np.array(LENGTHS), np.array(STARTS)
    table = pool_scenes.as_lists(PAGES) if lists else pool_scenes.as_table(rng, PAGES, 6)
    pages, how = table[1] if lists else table, {"layout": pools.layout}

    def change(array, at):
        array[at] = 1

    for array, at in ((lengths, 0), (starts, 1), (pages, 0 if lists else (0, 0))):
        with monkeypatch.context() as patch:
            patch.setattr(
                "kvkit.calls.pools.checked_paged_attention",
                lambda call, planned=None, array=array, at=at: (
                    paged.checked_paged_attention(call, planned), change(array, at)
                )[0],
            )  # fmt: skip
            forget_all()
            kvkit.paged_attention(query, *pools.given, table, lengths, starts, **how)
        found = kvkit.paged_attention(query, *pools.given, table, lengths, starts, **how)
        forget_all()
        expected = kvkit.paged_attention(query, *pools.given, table, lengths, starts, **how)
        assert found.tobytes() == expected.tobytes()


def test_calls_that_overlap_or_do_not_fit_are_refused_after_others_were_prepared(rng):
    plan, pools = (
        kvkit.paged_plan(PAGES_TABLE, LENGTHS, STARTS, page_size=PAGE),
        drawn(rng, "flash-attn", "float16"),
    )
    query, new = rng.standard_normal((7, 4, 16)).astype(np.float16), np.ones((7, 2, 16), np.float16)
    read_only = pools.keys.copy()
    read_only.flags.writeable = False
    tokens = pools.keys.reshape(-1, 2, 16)[:7]
    plan.paged_append(new, new, *pools.given)
    plan.paged_attention(query, *pools.given)
    past = kvkit.paged_plan([[5], [1]], [1, 1], [0, 1, 3], page_size=PAGE)  # lengths without the new tokens
    for call, text in (
        (
            lambda: plan.paged_append(new, new, read_only, pools.values),
            "key_cache: expected a writeable array",
        ),
        (
            lambda: past.paged_append(new[:3], new[:3], *pools.given),
            r"context_lens\[1\]: expected at least 2, as lengths include the new tokens, got 1",
        ),
        (lambda: plan.paged_append(tokens, new, *pools.given), "key_cache: expected memory apart from key"),
        (
            lambda: plan.paged_append(new[:6], new[:6], *pools.given),
            "key: expected the 7 tokens of the plan, got 6",
        ),
        (
            lambda: plan.paged_attention(query[:6], *pools.given),
            "query: expected the 7 tokens of the plan, got 6",
        ),
        (
            lambda: plan.paged_attention(query, pools.keys[:5], pools.values[:5]),
            "at least the 6 pages that the plan",
        ),
        (
            lambda: plan.paged_append(new, new, pools.keys[:, :2], pools.values[:, :2]),
            "pages of 4 tokens, as the plan",
        ),
        (
            lambda: plan.paged_attention(query, *pools.given, out=query.astype(np.float32)),
            "out: expected dtype",
        ),
    ):
        with pytest.raises(kvkit.KvkitError, match=text):
            call()


PAGES_TABLE = np.array([[5, 0, -1], [9, 9, 9], [3, 2, 4], [1, -1, -1]])


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (([[0]], [5]), "block_tables: expected 2 blocks"),
        (([[-1]], [1]), r"block_tables\[0, 0\]: expected a block"),
        (([[0]], [1], [0, 1, 1]), "query_starts: expected 2 entries"),
        (([[0]], [1], [1, 1]), "query_starts: expected to begin with 0"),
        (([[0]], [-1]), "context_lens: expected no length below 0"),
    ],
)
def test_wrong_index_tensors(tensors, text):
    with pytest.raises(kvkit.KvkitError, match=text):
        kvkit.paged_plan(*tensors, page_size=PAGE)


@pytest.mark.parametrize("size", [0, -1, 2**31 + 1, 2**63 - 1, 2**63, 2**64, 2**64 + 16, 2**70])
def test_wrong_sizes_of_pages(size):
    """A size that no integer of a kernel holds is not taken for another one."""
    table, wanted = np.zeros((1, 1), np.int64), "page_size: expected an integer from 1 to 2147483648, got"
    for call in (
        lambda: kvkit.paged_plan(table, [1], page_size=size),
        lambda: kvkit.compressed_slots([3], table, size, ratio=4),
        lambda: kvkit.topk_rows(np.zeros((1, 1), np.float32), 1, table, page_size=size),
    ):
        with pytest.raises(kvkit.KvkitError, match=wanted):
            call()


def test_new_tokens_in_one_slot_are_refused_by_appends_alone(rng):
    pools, new = drawn(rng, "flash-attn", "float16"), np.ones((2, 2, 16), np.float16)
    plan = kvkit.paged_plan([[1], [1]], [2, 2], page_size=PAGE)
    plan.paged_attention(new, *pools.given)
    with pytest.raises(kvkit.KvkitError, match="a slot for one row only"):
        plan.paged_append(new, new, *pools.given)
