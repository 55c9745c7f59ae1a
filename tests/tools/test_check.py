"""`check`: legal tables are left alone, and every rule finds what breaks it, every time."""

import itertools
import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import table_reference
import table_scenes
from verbs import kvkit

from kvkit import compressed_slots, files, layouts
from kvkit.cache import PagedCache, QuantizedCache
from kvkit.errors import KvkitError
from kvkit.files import npz
from kvkit.tools import check
from kvkit.tools.names import SIDES
from kvkit.tools.rules import RULES

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def fine(arrays):
    found = check(arrays)
    assert not found.errors, str(found)
    assert found.rules <= {"P6"}, str(found)  # which warns of tails
    return found


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_legal_tables_are_left_alone(rng, count):
    looked = set()
    for _ in range(count):
        looked |= set(fine(table_scenes.legal(rng)).checked)
    assert looked >= {"P1", "P2", "P3", "P4", "P5", "P6", "P7", "S1", "S2", "S3", "S5", "S6", "S7"}


@pytest.mark.parametrize("count", [200, pytest.param(5_000, marks=pytest.mark.slow)])
def test_tables_are_judged_as_by_comparing_everything(rng, count):
    """Small numbers, so that most tables break some rule in more than one way."""
    seen = set()
    for _ in range(count):
        least, most = (-1, 9) if rng.random() < 0.5 else (1, 8)
        sequences = [
            rng.integers(least, most, int(rng.integers(0, 5))).tolist()
            for _ in range(int(rng.integers(0, 4)))
        ]
        if rng.random() < 0.5 and len(sequences) > 1:
            sequences[1] = sequences[0][:2] + sequences[1]
        blocks, placeholder = int(rng.choice([8, 2**40])), (0 if rng.random() < 0.5 else None)
        if placeholder == 0:
            sequences = [[0] * int(rng.integers(0, 3)) + pages for pages in sequences]
        starts = np.cumsum([0, *map(len, sequences)])
        pages = np.array([page for pages in sequences for page in pages], np.int64)
        arrays = {"kv_indptr": starts, "kv_indices": pages, "context_lens": np.diff(starts), "page_size": 1}
        arrays |= {"num_blocks": blocks, "placeholder": placeholder}
        expected = table_reference.wrong_entries(sequences, blocks, placeholder)
        compared = {"P1", "P2"} if "P1" in expected else {"P1", "P2", "P3"}  # what is behind no page is open
        assert check(arrays).rules & compared == expected & compared, sequences
        seen.add(frozenset(expected))
    assert len(seen) > 4


# Mutations: each takes a fair case and breaks one rule


def tables():
    """Return tables of three sequences, two of which share two pages, and the step of the last tokens."""
    return {
        "block_tables": np.array([[7, 3, 9, -1], [7, 3, 5, 8], [2, 6, -1, -1]], np.int32),
        "context_lens": np.array([10, 14, 8], np.int32), "num_blocks": 12, "page_size": 4,
        "slot_mapping": np.array([37, 33, 27], np.int64), "slot_sequences": np.array([0, 1, 2]),
        "slot_positions": np.array([9, 13, 7]),
    }  # fmt: skip


def packed():
    return {
        "kv_indptr": np.array([0, 2, 3], np.int32), "kv_indices": np.array([4, 2, 1], np.int32),
        "kv_last_page_len": np.array([1, 4], np.int32), "num_blocks": 8, "page_size": 4,
    }  # fmt: skip


def rows():
    return {
        "cachestarts": np.array([[28, 12], [8, 24]]),
        "kvstarts": np.array([0, 8, 15]),
        "num_blocks": 12,
        "page_size": 4,
    }


def cache(seed=5, dtype=np.float16):
    rng = np.random.default_rng(seed)
    key, value = (rng.standard_normal((12, 4, 2, 8)).astype(dtype) for _ in range(2))
    key[..., 1] += 6  # a channel that keys have
    return tables() | {"key_cache": key, "value_cache": value}


def coded():
    rng = np.random.default_rng(6)
    key, value = (rng.integers(-126, 127, (12, 4, 2, 8)).astype(np.int8) for _ in range(2))
    scale = rng.uniform(0.01, 0.02, (12, 4, 2, 1)).astype(np.float16)
    return tables() | {
        "key_cache": key, "value_cache": value, "key_scale": scale, "value_scale": scale.copy(),
    }  # fmt: skip


def eights():
    rng = np.random.default_rng(7)
    key, value = (rng.standard_normal((12, 4, 2, 8)).astype(np.float32).astype(E4M3) for _ in range(2))
    return tables() | {"key_cache": key, "value_cache": value, "key_scale": np.float32([0.02, 0.03]),
                       "value_scale": np.float32([0.02, 0.03])}  # fmt: skip


def log_sums(base=1.0, empty=-np.inf):
    """Return lse for two contexts, one of them perhaps empty, in another base, as engines have them."""
    rng = np.random.default_rng(8)
    keys, query = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 1, 8), (2, 2, 8)))
    scores = [[sum(q * k) / np.sqrt(8) for k in keys[[1, 0]].reshape(8, 8)[:6]] for q in query[0]]
    lse = np.array([[np.log(sum(np.exp(s) for s in row)) for row in scores], [empty, empty]]) * base
    return {
        "block_tables": np.array([[1, 0], [-1, -1]]), "context_lens": np.array([6, 0]),
        "key_cache": keys, "query": query, "lse": np.where(np.isfinite(lse), lse, empty),
    }  # fmt: skip


def put(make, name, where, value):
    def mutated():
        arrays = make()
        arrays[name] = np.array(arrays[name])
        arrays[name][where] = value
        return arrays

    return mutated


def times(make, name, where, factor):
    return lambda: put(make, name, where, make()[name][where] * factor)()


def but(make, **changes):
    return lambda: {name: value for name, value in (make() | changes).items() if value is not None}


def swapped():
    arrays = cache()
    return arrays | {"key_cache": arrays["value_cache"], "value_cache": arrays["key_cache"]}


def layers_twice():
    """Return two layers of which the second one has the values of the first."""
    arrays = cache()
    arrays["key_cache"] = np.stack([arrays["key_cache"], arrays["key_cache"][::-1]])
    return arrays | {"value_cache": np.stack([arrays["value_cache"]] * 2)}


def copied_page():
    """Return a cache in which the page of a sequence's second column was copied to another sequence."""
    arrays = cache()
    for side in ("key_cache", "value_cache"):
        arrays[side][2] = arrays[side][3]
    return arrays


def of_pages(numbers):
    def mutated():
        arrays = tables()
        return arrays | {"slot_mapping": numbers(arrays)}

    return mutated


def pooled(ratios=(0, 4, 8)):
    """Return a step of two sequences with padding, and the caches of two layers that pool tokens."""
    positions = np.array([2, 3, 4, 14, 15, 16, -1])
    arrays = {"slot_positions": positions, "compress_ratios": np.array(ratios),
              "context_lens": np.array([5, 17]), "layers.1.entry_count.compressor": np.array([1, 4]),
              "layers.2.compressed_kv.compressor": np.zeros((2, 2, 8), np.float16),
              "layers.1.compressor_state": np.zeros((2, 8, 2, 16), np.float32),
              "window_ring": np.zeros((2, 17, 8), np.float16)}  # fmt: skip
    for layer in (1, 2):
        slots = compressed_slots(
            positions, [[7, 3], [2, 5]], 2, ratio=ratios[layer], sequence_of_token=[0, 0, 0, 1, 1, 1, 0]
        )
        arrays[f"layers.{layer}.compressed_slot_mapping"] = slots
    return arrays


MUTATIONS = {
    "P1": [
        put(tables, "block_tables", (1, 3), 12), put(tables, "block_tables", (0, 0), -1),
        put(packed, "kv_indices", 2, 8), put(rows, "cachestarts", (1, 0), 48),
    ],
    "P2": [
        put(tables, "block_tables", (1, 3), 5), put(tables, "block_tables", (1, 2), 7),
        put(packed, "kv_indices", 1, 4), put(rows, "cachestarts", (0, 1), 28),
    ],
    "P3": [
        put(tables, "block_tables", (2, 0), 5), put(tables, "block_tables", (2, 1), 3),
        put(tables, "block_tables", (0, 0), 1), put(packed, "kv_indices", 2, 2),
        but(tables, block_tables=np.array([[7, 0, 9, -1], [1, 0, 9, 8], [2, 6, -1, -1]]), placeholder=0),
    ],
    "P4": [
        but(tables, block_tables=np.array([[7, 3, 9, -1], [7, 3, 9, 8], [2, 6, -1, -1]], np.int32)),
        but(tables, slot_mapping=np.array([28]), slot_sequences=None, slot_positions=None),
    ],
    "P5": [
        but(tables, context_lens=np.array([10, 17, 8])), but(tables, context_lens=np.array([10, 14])),
        but(tables, context_lens=np.array([10, 14, -8])),
        put(packed, "kv_last_page_len", 0, 5), put(packed, "kv_last_page_len", 0, 0),
        put(packed, "kv_indptr", 1, 4), put(packed, "kv_indptr", 0, 1), put(packed, "kv_indptr", 2, 9),
        but(packed, context_lens=np.array([7, 4])), but(packed, context_lens=np.array([13, 4])),
    ],
    "P6": [put(tables, "block_tables", (0, 3), 4), put(rows, "kvstarts", 2, 12)],
    "P7": [
        but(tables, block_tables=tables()["block_tables"].astype(np.int64) + 4096),
        but(tables, block_tables=np.array([[7, 3, 9, -1], [7, 3, 5, 8], [2**31 + 2, 6, -1, -1]])),
    ],
    "S1": [put(tables, "slot_mapping", 1, 35), but(tables, slot_positions=np.array([9, 12, 7]))],
    "S2": [put(tables, "slot_mapping", 2, 33), but(tables, slot_mapping=np.array([5, 5]),
                                                   slot_sequences=None, slot_positions=None)],
    "S3": [put(tables, "slot_mapping", 0, 48)],
    "S4": [but(tables, reserved_block=9), but(tables, reserved_block=0, slot_mapping=np.array([0, 33, 27]))],
    "S5": [
        but(tables, slot_mapping=np.array([37, 33, 27, -1]).view(np.int32), slot_sequences=None,
            slot_positions=None),
        but(tables, slot_mapping=np.array([37, 33], np.int32).view(np.int64), slot_sequences=None,
            slot_positions=None),
        but(tables, block_tables=tables()["block_tables"].astype(np.int64).view(np.int32)),
    ],
    "S6": [
        but(tables, slot_mapping=np.array([5], np.int32), slot_sequences=None, slot_positions=None,
            num_blocks=2**31),
        but(cache, index_type="int32", value_cache=None,
            key_cache=np.broadcast_to(np.int32(0), (12, 4, 2, 2**25))),
    ],
    "S7": [
        of_pages(lambda arrays: np.array([9, 8, 6])), of_pages(lambda arrays: np.array([10, 9, 9])),
        but(tables, block_tables=np.maximum(tables()["block_tables"], 0) * 4),
        but(rows, cachestarts=np.array([[7, 3], [2, 6]])),
    ],
    "R1": [lambda: {"state_indices": np.array([3, 0, 3, -1, -1])}],
    "R2": [
        lambda: {"state_indices": np.array([3, 0]), "recurrent_state": np.zeros((3, 2, 4, 4), np.float32)},
        lambda: {"state_indices": np.array([3, 0]), "free_slots": np.array([1, 0])},
        lambda: {"state_indices": np.array([-2, 0]), "conv_states": np.zeros((3, 2, 4), np.float16)},
    ],
    "R3": [lambda: {"state_indices": np.array([3, -1, 0, -1])}],
    "R4": [
        lambda: {"ssm_state": np.array([[0, np.nan], [1, 2]], np.float32)},
        lambda: {"recurrent_states": np.full((2, 1, 1), np.inf), "state_indices": np.array([1])},
    ],
    "C1": [
        put(pooled, "layers.1.compressed_slot_mapping", 2, 9),
        put(pooled, "layers.2.compressed_slot_mapping", 1, 14),
        put(pooled, "layers.1.compressed_slot_mapping", 6, 0), put(pooled, "compress_ratios", 1, 0),
        lambda: {"cmp_slot_mapping": np.array([-1, 4]), "slot_positions": np.array([126, 128]),
                 "compress_ratios": np.array(128)},
    ],
    "C2": [put(pooled, "layers.1.compressed_slot_mapping", 4, -1),
           put(pooled, "layers.2.compressed_slot_mapping", 4, -1)],
    "C3": [
        but(pooled, window_ring=np.zeros((2, 16, 8))), but(pooled, window=18, context_lens=None),
        lambda: {"window_ring": np.zeros((1, 127, 4), np.float16)},
    ],
    "C4": [
        but(pooled, **{"layers.1.compressor_state": np.zeros((2, 8, 2, 16), np.float16)}),
        lambda: {"compress_state": np.zeros((2, 8, 16), BF16)},
        lambda: {"layers.0.states.indexer": np.zeros((2, 8, 2, 16), np.float64)},
    ],
    "C5": [
        put(pooled, "layers.1.entry_count.compressor", 1, 3), put(pooled, "context_lens", 0, 8),
        put(pooled, "layers.1.entry_count.compressor", 0, 2), but(pooled, context_lens=np.array([5, 24])),
        but(pooled, compress_ratios=np.array([0, 4, 128])),
    ],
    "L1": [
        but(cache, layout="b h n c"), but(cache, layout="b n h c", num_blocks=11),
        lambda: {"cache.0": np.zeros((12, 2, 4, 2, 8)), "layout": "l | kv b n h c"},
        lambda: {"cache.0": np.zeros((2, 12, 2, 4, 8)).swapaxes(2, 3), "layout": "l | kv b n h c"},
    ],
    "L2": [lambda: {"cache.0": np.zeros((6, 4, 2, 16), np.float16)},
           lambda: {"cache.0": np.zeros((3, 5, 7), np.float16), "num_blocks": 2}],
    "L3": [swapped],
    "Q1": [put(coded, "key_scale", (7, 0, 1, 0), np.inf), put(eights, "value_scale", 0, np.nan)],
    "Q2": [but(eights, key_scale=np.ones(2, np.float32)), but(eights, value_scale=np.float32(1))],
    "Q3": [put(coded, "value_cache", (slice(0, 8), slice(None), 1), 127),
           put(eights, "key_cache", (7, 1, 0, 3), -448.0)],
    "Q4": [
        put(coded, "key_scale", (9, 0, 0, 0), 0), put(coded, "value_scale", (9, 0, 0, 0), -0.01),
        but(eights, key_scale=np.float32([0, 1])),
    ],
    "Q5": [
        times(coded, "key_scale", 5, 20), times(coded, "value_scale", 8, 1 / 20),
        times(coded, "value_scale", 7, 16.5),
    ],
    "D1": [put(cache, "key_cache", (6, 3, 1, 2), np.nan), put(cache, "value_cache", (9, 1, 0, 0), -np.inf),
           put(eights, "key_cache", (9, 1, 0, 0), np.nan)],
    "D2": [put(cache, "key_cache", (9, 2, 1, 2), np.nan), put(eights, "value_cache", (9, 3, 0, 0), np.nan)],
    "D4": [put(cache, "key_cache", (6, 3), 0), put(coded, "value_cache", (9, slice(0, 2), 1), 0)],
    "D5": [but(cache, value_cache=cache()["key_cache"]), but(coded, value_cache=coded()["key_cache"])],
    "D6": [layers_twice],
    "D7": [put(coded, "value_cache", (slice(None), slice(None), 1), coded()["value_cache"][:, :, 0])],
    "D8": [copied_page, lambda: copied_page() | {"block_tables": np.array([[7, 3, 9], [7, 3, 5], [6, 2, 8]])},
           ],
    "D3": [lambda: log_sums(1 / np.log(2)), lambda: log_sums(-1.0), lambda: log_sums(empty=np.inf)],
}  # fmt: skip
LINES = {
    "l | kv b n h c": lambda key, value: {"cache.0": np.stack([key, value])},
    "l | b h n (kv c)": lambda key, value: {
        "cache.0": np.concatenate([key, value], -1).swapaxes(1, 2).copy()
    },
    "| l kv h b n c": lambda key, value: {
        "cache": np.array([key, value]).transpose(0, 3, 1, 2, 4)[None].copy()
    },
}
FAIR = (tables, packed, rows, cache, coded, eights, log_sums, pooled)


@pytest.mark.parametrize("make", FAIR)
def test_fair_cases(make):
    found = check(make())
    assert not found.found, str(found)


@pytest.mark.parametrize("make", [each for cases in MUTATIONS.values() for each in cases])
def test_every_mutation_is_found(make):
    """And said in full."""
    rule = next(rule for rule, cases in MUTATIONS.items() if make in cases)
    found = check(make())
    assert rule in found.rules, str(found)
    finding = next(each for each in found if each.rule == rule)
    assert finding.where
    assert finding.message
    assert finding.hint.endswith(".")
    warnings = "P6", "S4", "R3", "C4", "Q2", "Q5", "D2", "D5", "D6", "D7", "D8", "L2"
    assert finding.severity == ("warning" if rule in warnings else "error")


def test_slots_of_compressed_rows_are_judged_as_the_operator_computes_them(rng):
    """A step of any ratio passes; with one slot set or missing, that token alone is named."""
    for ratio in (2, 3, 4, 7, 128):
        positions = rng.integers(-1, 5 * ratio, 40)
        positions[:3] = -1, ratio - 2, ratio - 1
        slots = compressed_slots(positions, [[3, 1, 4, 0, 2]], 1, ratio=ratio)
        step = {"slot_positions": positions, "compress_ratios": np.array(ratio)}
        assert check(step | {"compressed_slot_mapping": slots}).checked == ["C1", "C2"]
        for token in (0, 1, 2, int(rng.integers(3, 40))):
            wrong = slots.copy()
            wrong[token] = -1 if slots[token] >= 0 else 3
            found = check(step | {"compressed_slot_mapping": wrong})
            assert [(each.rule, each.where) for each in found] == [
                ("C2" if slots[token] >= 0 else "C1", f"compressed_slot_mapping[{token}]")
            ]
        assert not check(step | {"compressed_slot_mapping": slots}).found


def test_every_rule_has_a_mutation_and_names_an_incident():
    assert set(MUTATIONS) == set(RULES)
    for rule in RULES.values():
        assert "#" in (rule.look.__doc__ or ""), rule.name


# Before and after


def test_rows_outside_the_slots(rng):
    before = coded()
    after = {name: np.array(array) for name, array in before.items()}
    slots = np.array([37, 33, -1])
    for name in ("key_cache", "value_cache", "key_scale"):
        after[name].reshape(48, *after[name].shape[2:])[slots[:2]] = 1
    assert not check(before, after, slots).found
    assert not check(before, after).found  # slot_mapping has more
    after["value_scale"][0, 1, 0, 0] = np.nan
    found = check(before, after, slots)
    assert [(each.rule, each.where) for each in found] == [("W1", "value_scale[0, 1]")]
    with pytest.raises(KvkitError, match="after: expected caches of the same shapes"):
        check(before, tables(), slots)
    with pytest.raises(KvkitError, match="slots: expected"):
        check(but(coded, slot_mapping=None, block_tables=None)(), but(coded, slot_mapping=None)())


def test_a_shared_prefix_stays_while_sequences_take_turns(rng, tmp_path):
    """A, then B on A's first two pages, then A again: without slots tables say which rows are new."""
    pool = rng.standard_normal((2, 8, 4, 2, 16)).astype(np.float16)
    steps = [([[5, 2, 7]], [10]), ([[5, 2, 7], [5, 2, 1]], [10, 11]), ([[5, 2, 7], [5, 2, 1]], [12, 11])]
    paths, new = [], ((), (4, 5, 6), (30, 31))  # rows of B behind the prefix, then of A
    for i, ((tables, lengths), rows) in enumerate(zip(steps, new, strict=True)):
        pool = pool.copy()
        pool.reshape(2, 32, 2, 16)[:, list(rows)] = i
        arrays = {"key_cache": pool[0], "value_cache": pool[1], "page_size": np.array(4)}
        paths.append(tmp_path / f"{i}.npz")
        files.write(paths[-1], arrays | {"block_tables": np.array(tables), "context_lens": np.array(lengths)})
    for before, after in itertools.pairwise(paths):
        assert check(before, after).checked == ["W1"]
        assert not check(before, after).found
        assert kvkit(f"check --before {before} --after {after}")[0] == 0
    broken = dict(files.read(paths[2]).arrays)
    broken["value_cache"] = broken["value_cache"].copy()
    broken["value_cache"][2, 1] += 1  # a row of the prefix
    files.write(paths[2], broken)
    [found] = check(paths[1], paths[2]).found
    assert (found.rule, found.where) == ("W1", "value_cache[2, 1]")
    code, out, _ = kvkit(f"check --before {paths[1]} --after {paths[2]}")
    assert (code, "error W1 value_cache[2, 1]" in out) == (1, True)
    assert "expected --after beside it, got none" in kvkit(f"check --before {paths[1]}")[2]


@pytest.mark.parametrize("line", LINES)
def test_caches_of_engines(line):
    """Whatever a cache lies in, the row is named by its page."""
    arrays = cache()
    arrays |= LINES[line](arrays.pop("key_cache"), arrays.pop("value_cache")) | {"layout": line}
    assert not check(arrays).found
    assert {"L1", "L3", "D1", "D2"} <= set(check(arrays).checked)
    name = next(name for name in arrays if name.startswith("cache"))
    views = layouts.view([arrays[name]] if "." in name else arrays[name], arrays["layout"])
    views.values[0][6, 3, 1, 2] = np.nan
    assert [(each.rule, each.where) for each in check(arrays)] == [("D1", "value_cache[6, 3]")]


# Words


def test_scales_below_0_are_as_their_format_says():
    """MLX's affine scales are negative where the largest magnitude is."""
    rng = np.random.default_rng(0)
    arrays = tables() | {"key_cache": rng.integers(0, 99, (12, 4, 2, 2), np.uint32), "format": "mlx4",
                         "key_scale": np.full((12, 4, 2, 1), -0.1, np.float16)}  # fmt: skip
    assert "Q4" in check(arrays).checked
    assert not check(arrays).found


def test_a_report(tmp_path):
    arrays = tables()
    arrays["block_tables"][1] = [50, 51, 52, 3]
    arrays["slot_mapping"] = np.arange(50, 70)
    arrays |= {"slot_sequences": None, "slot_positions": None}
    found = check(arrays)
    said = json.loads(json.dumps(found.to_dict()))
    assert said["counts"]["S3"] == 20
    assert len([each for each in said["findings"] if each["rule"] == "S3"]) == 5
    assert said["errors"] == sum(found.counts.values())
    assert "S3: 15 more like these" in str(found)
    path = tmp_path / "step.npz"
    npz.write(path, tables())
    said = str(check(path)).splitlines()
    assert said[0] == "nothing found: 13 rules checked"
    assert said[1].startswith(f"{len(RULES) - 13} rules not checked, because they need: ")
    assert "lse (D3)" in said[1]
    found = check(but(tables, slot_sequences=None)())
    assert found.unchecked["S1"] == "slot_sequences"
    assert set(found.checked) | set(found.unchecked) == set(RULES)


def test_saved_layers(tmp_path):
    """A group whose scale is beyond float16 is found in a file; a file without any input is not passed."""
    cache, states = QuantizedCache(num_layers=1, residual_length=16), np.ones((1, 2, 100, 32), np.float32)
    states[0, 1, 40, 3] = 1e9
    cache.update(states, states, 0)
    cache.save(tmp_path / "cache.npz")
    found = check(tmp_path / "cache.npz")
    assert found.checked == ["Q1", "D1"]
    assert [each.where.partition("[")[0] for each in found] == [f"layers.0.{x}s.cells" for x in SIDES]
    nothing = check({"num_blocks": 8})
    assert str(nothing).startswith("nothing was checked, because no rule has its inputs\n39 rules not")
    npz.write(tmp_path / "nothing.npz", {"num_blocks": np.array(8)})
    assert kvkit("check", tmp_path / "nothing.npz")[0] == 2


def test_tables_have_the_names_of_engines(tmp_path):
    pages, lengths = np.array([[0, 9]]), np.array([20])
    for names in (("block_table", "seq_lens"), ("page_table", "cache_seqlens")):
        found = check(dict(zip(names, (pages, lengths), strict=True)) | {"num_blocks": 4, "block_size": 16})
        assert [each.where for each in found] == ["block_tables[0, 1]"]
    flat = {"indptr": np.array([0, 2]), "indices": pages[0], "last_page_len": np.array([4])}
    arrays = {f"paged_kv_{name}": array for name, array in flat.items()}
    npz.write(tmp_path / "step.npz", arrays | {"num_blocks": np.array(4), "page_size": np.array(16)})
    assert check(tmp_path / "step.npz").found[0].where == "kv_indices[1] (sequence 0, page 1)"


POOL = {"cache": np.zeros((2, 2, 4, 16, 1, 8), np.float16), "block_tables": np.array([[0]])}


def test_scales_of_blocks_and_constant_values():
    """A scale may be one of a block; constant values say nothing; other dtypes after a call are named."""
    keys = np.random.default_rng(0).standard_normal((3, 16, 2, 8)).astype(np.float32)
    pages = {"block_tables": np.array([[0, 1]]), "context_lens": np.array([30])}
    assert not check(pages | {"key_cache": keys, "value_cache": np.ones_like(keys)}).found
    before = {"key_cache": keys, "key_scale": np.ones((3, 1, 2), np.float32)}
    after = {"key_cache": keys, "key_scale": before["key_scale"] + np.float32([[[0]], [[0]], [[1]]])}
    assert not check(before, after, slots=[35]).found
    assert "block 2 has changed" in str(check(before, after, slots=[3]))
    with pytest.raises(KvkitError, match="key_cache after the call: expected float32, as before"):
        check(before, before | {"key_cache": keys.astype(np.float16)}, slots=[35])
    with pytest.raises(KvkitError, match="slots: expected integers"):
        check(before, after, slots=[1.5])


def test_forks_of_a_paged_cache_that_lost_tokens_share_rows(tmp_path):
    """Shared rows are legal, unless a row has two token ids; sequences of steps are read from a file."""
    paged = PagedCache(16, 4, num_layers=1, num_kv_heads=1, head_dim=8, dtype=np.float16)
    seq, x = paged.blocks.add(range(16)), np.ones((16, 1, 8), np.float16)
    with paged.begin_step([(seq, 16)]) as step:
        step.update(x, x, 0)
    fork, part = paged.blocks.fork(seq), paged.blocks.fork(seq, 4, 8)
    path = tmp_path / "forks.npz"
    paged.remove(fork, 4, 8)
    paged.save(path, [seq, fork, part])
    assert not check(path).errors
    saved = files.read(path)
    arrays = {name: np.array(array) for name, array in saved.arrays.items()}
    arrays["sequences.1.token_ids"][5] = 77
    (error,) = check(replace(saved, arrays=arrays)).errors
    assert (error.rule, error.where) == ("P3", "sequence 1, token 5")
    assert error.message == "row 9 has token 9 of sequence 0, which has another id"
    with pytest.raises(KvkitError, match=r"source: expected a file of cache\.save\(path, sequences\)"):
        check(paged)


def test_tables_of_lists_and_without_sequences():
    """Two lists of one length are two sequences; a faulty kv_indptr is named, also beside slots."""
    sizes = {"num_blocks": 4, "page_size": 2}
    assert not check({"block_tables": [[0, 1], [2, 3]], "context_lens": [4, 4], **sizes}).found
    slots = {f"slot_{name}": [0] for name in ("mapping", "sequences", "positions")}
    for starts in ([0], [0, 5], [0, 2, 1]):
        lens = [2] * (len(starts) - 1)
        found = check(slots | {"kv_indptr": starts, "kv_indices": [0, 1], "context_lens": lens, **sizes})
        assert ("P5" in str(found)) == (len(starts) > 1)


FLOAT_TYPES = [
    *("float64", "longdouble", "float32", "float16", "complex64", "bfloat16", "float8_e4m3fn"),
    *(
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e4m3b11fnuz",
        "float8_e4m3",
        "float8_e3m4",
    ),
]


@pytest.mark.parametrize("name", FLOAT_TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_found_in_every_float_type(name, value):
    """In rows in use (D1), and behind the last token (D2). A cast of infinity is NaN in types without it."""
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    for row, rule in ((2, "D1"), (3, "D2")):
        keys = np.ones((4, 8, 2, 16), np.float32)
        keys[1, row, 1, 5] = value
        with np.errstate(invalid="ignore"):
            keys = keys.astype(dtype)
        tables = {"block_tables": np.array([[1]]), "context_lens": np.array([3])}
        found = check({"key_cache": keys, "value_cache": np.ones_like(keys)} | tables)
        assert [(each.rule, each.where) for each in found] == [(rule, f"key_cache[1, {row}]")]


REFUSED = [
    *((message, pooled() | changes) for message, changes in (
        ("layers.1.*_mapping: expected 3 entries, as slot_positions", {"slot_positions": np.arange(3)}),
        ("ratios: expected the ratio of layers.2.*got 2 ratios", {"compress_ratios": np.array([0, 4])}),
        ("compress_ratios: expected 0, or at least 2 .*got 1", {"compress_ratios": np.array([0, 1, 8])}),
        ("ratio of compressed_slot_mapping: .*beside layers", {"compressed_slot_mapping": np.zeros(7, int)}),
        (r"window_ring: expected shape \[sequences, rows, dim\]", {"window_ring": np.zeros((17, 8))}),
        (r"compressed_kv: expected shape \[sequences, rows", {"layers.2.compressed_kv": np.zeros((17, 8))}),
        ("entry_count: expected 2 counts, as context_.*got 3",
         {"layers.2.entry_count": np.array([1, 2, 3])}))),
    ("layout: expected the layout of cache .fits: .*, or num_blocks and page_size with block_t", POOL),
    ("arrays: expected tables, slots or a cache by name .*, got colour", {"colour": np.zeros(3)}),
    ("page_size: expected a number", {"block_tables": np.zeros((2, 2), int), "num_blocks": 3}),
    ("page_size: expected at least 1, got 0", {"slot_mapping": [0], "num_blocks": 1, "page_size": 0}),
    *((message, but(tables, **changes)()) for message, changes in (
        ("context_lens: expected the tokens of each sequence, got None", {"context_lens": None}),
        ("block_tables: expected integers of 2 axes", {"block_tables": np.zeros(3)}),
        ("slot_positions: expected 3 entries", {"slot_positions": np.zeros(2, int)}),
        ("page_size: expected at least 1, got 0", {"page_size": 0}),
        ("num_blocks: expected at least 0, got -1", {"num_blocks": -1}),
        (r"block_tables\[1\]: expected integers of 1 axis", {"block_tables": ([0, 2], [0.5, 1.7])}),
        ("block_tables: expected an array, or lists of equal length", {"block_tables": [[0, 1], [2]]}),
        ("kv_indptr: expected where each sequence begins", {"block_tables": None, "kv_indices": [0]}))),
    ("index_type: expected 'int32' or 'uint32' or 'int64', got", but(cache, index_type="int16")()),
    (r"key_cache: expected \[blocks, rows, heads, content\]", but(cache, key_cache=np.zeros(3))()),
]  # fmt: skip


@pytest.mark.parametrize(("message", "arrays"), REFUSED)
def test_refused(message, arrays):
    with pytest.raises(KvkitError, match=message):
        check(arrays)
