"""The mix that `study` finds: its errors against float64, its search against all assignments, its file."""

import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvkit import tools
from kvkit.cache import QuantizedCache
from kvkit.formats.mixes import mix_named
from kvkit.tools.studies import mixes, plots
from kvkit.tools.studies.mixes import cheapest
from kvkit_cli.main import main

pytestmark = pytest.mark.cpu

LAYERS, HEADS, DIM, QUERIES, HELD_BACK = 2, 2, 32, 12, 4
STARTS = 0, 56, 96
SCHEMES = "int2:g16,int4:g16,int8:g16"


@pytest.fixture
def arrays(rng):
    """Return two sequences in two layers, which differ in how much their keys and values lose."""
    key, value = (rng.standard_normal((LAYERS, STARTS[-1], HEADS, DIM)).astype(np.float16) for _ in range(2))
    key[0] *= 2
    value[1, :, :, ::16] *= 9
    query = rng.standard_normal((LAYERS, 2, QUERIES, 2 * HEADS, DIM)).astype(np.float16)
    return {"key": key, "value": value, "query": query, "seqstarts": np.array(STARTS)}


def coded(x, format):
    """Quantize numbers in groups of 16: codes times a float16 scale, in float64. None changes nothing."""
    if format is None:
        return x
    most, groups = 2 ** (int(format[3]) - 1) - 1, x.reshape(*x.shape[:-1], -1, 16)
    scale = abs(groups).max(-1, keepdims=True) / most
    return (np.rint(groups / scale) * scale.astype(np.float16).astype(np.float64)).reshape(x.shape)


def squared_error(arrays, layer, formats, chooses):
    """Return |o' - o|^2 / |o|^2 of a layer's outputs for the queries that choose, or for those held back."""
    wrong = squares = 0.0
    rows = slice(0, QUERIES - HELD_BACK) if chooses else slice(QUERIES - HELD_BACK, QUERIES)
    for s, (begin, end) in enumerate(itertools.pairwise(STARTS)):
        end = end - HELD_BACK if chooses else end
        exact = [arrays[name][layer, begin:end].astype(np.float64) for name in ("key", "value")]
        lossy = [coded(x, format) for x, format in zip(exact, formats, strict=True)]
        queries = arrays["query"][layer, s, rows].astype(np.float64)
        for i, h in np.ndindex(queries.shape[:2]):
            outputs = []
            for keys, values in (exact, lossy):
                seen = end - begin - len(queries) + i + 1
                weights = np.exp(keys[:seen, h // 2] @ queries[i, h] / np.sqrt(DIM))
                outputs.append(weights / weights.sum() @ values[:seen, h // 2])
            wrong += ((outputs[1] - outputs[0]) ** 2).sum()
            squares += (outputs[0] ** 2).sum()
    return wrong / squares


def test_errors_are_those_of_float64(arrays):
    mix = tools.study(arrays, SCHEMES, bits=6, judge=HELD_BACK).mix
    pairs = [pair for _, *pair in mix.layers]
    assert mix_named(mix.text).of_layers(LAYERS) == [tuple(pair) for pair in pairs]
    assert len({format for pair in pairs for format in pair}) > 1
    for chooses, got in ((True, mix.error_assumed), (False, mix.error_measured)):
        squared = [squared_error(arrays, i, pair, chooses) for i, pair in enumerate(pairs)]
        assert got == pytest.approx(np.sqrt(np.mean(squared)), rel=1e-3)
    assert mix.bits == np.mean([int(format[3]) + 1 for pair in pairs for format in pair])
    assert (mix.queries, mix.held_back, mix.resolution) == (QUERIES - HELD_BACK, HELD_BACK, 0)


def all_assignments(arrays):
    """Return (bits, error on the queries that choose) of every mix, in float64."""
    pairs = list(itertools.product(SCHEMES.split(","), repeat=2))
    loss = {(i, pair): squared_error(arrays, i, pair, True) for i in range(LAYERS) for pair in pairs}
    for mix in itertools.product(pairs, repeat=LAYERS):
        bits = np.mean([int(format[3]) + 1 for pair in mix for format in pair])
        yield bits, np.sqrt(np.mean([loss[own] for own in enumerate(mix)]))


def test_the_search_is_the_best_of_all_assignments(arrays):
    known = list(all_assignments(arrays))
    for bits in (3, 3.6, 5, 6.25, 8.5, 9):
        mix = tools.study(arrays, SCHEMES, bits=bits, judge=HELD_BACK).mix
        best = min((error, own) for own, error in known if own <= bits)
        assert (mix.error_assumed, mix.bits) == (pytest.approx(best[0], rel=1e-3), best[1])
    for error in (0.02, 0.1, 0.4):
        mix = tools.study(arrays, SCHEMES, error=error, judge=HELD_BACK).mix
        assert mix.bits == min(bits for bits, own in known if own <= error)
        assert mix.error_assumed <= error


@given(st.data())
def test_choices_are_the_cheapest(data):
    items, formats = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    numbers = st.lists(st.integers(0, 50), min_size=formats, max_size=formats)
    bits, losses = (np.array(data.draw(st.lists(numbers, min_size=items, max_size=items))) for _ in range(2))
    losses = losses.astype(np.float64)
    sums = [
        (bits[range(items), own].sum(), losses[range(items), own].sum())
        for own in map(list, itertools.product(range(formats), repeat=items))
    ]
    most = data.draw(st.integers(int(bits.min(1).sum()), 300))
    choices, rounded = cheapest(bits, losses, most)
    found = bits[range(items), choices].sum(), losses[range(items), choices].sum()
    assert rounded == 0
    assert (found[1], found[0]) == min((loss, own) for own, loss in sums if own <= most)
    limit = data.draw(st.integers(int(losses.min(1).sum()), 300))
    choices, _ = cheapest(bits, losses, limit=limit)
    assert bits[range(items), choices].sum() == min(own for own, loss in sums if loss <= limit)
    assert losses[range(items), choices].sum() <= limit


@pytest.mark.parametrize("cells", [4, 7, 16, 2**16])
def test_a_search_that_rounds_says_by_how_much(cells, rng, monkeypatch):
    """No mix is left out with room for what is rounded up; with room for all bits the best is found."""
    monkeypatch.setattr(mixes, "CELLS", cells)
    for top in (9, 50, 10**9) * 10:
        bits, losses = rng.integers(0, top, (4, 3)), rng.random((4, 3))
        every = [[*each] for each in itertools.product(range(3), repeat=4)]
        own = np.array([(bits[range(4), each].sum(), losses[range(4), each].sum()) for each in every])
        for most in (*rng.integers(bits.min(1).sum(), bits.max(1).sum() + 1, 3), bits.max(1).sum()):
            choices, rounded = cheapest(bits, losses, int(most))
            assert bits[range(4), choices].sum() <= most
            reached = most - (rounded if most < bits.max(1).sum() else 0)
            assert losses[range(4), choices].sum() <= own[own[:, 0] <= reached, 1].min(initial=9) + 1e-9
        for limit in own[rng.integers(len(own), size=3), 1] + 1e-9:
            choices, rounded = cheapest(bits, losses, limit=limit)
            assert losses[range(4), choices].sum() <= limit
            assert bits[range(4), choices].sum() <= own[own[:, 1] <= limit, 0].min() + rounded


def test_held_back_tokens_do_not_change_the_mix(arrays):
    first = tools.study(arrays, SCHEMES, bits=5, judge=HELD_BACK).mix
    for end in STARTS[1:]:
        for name in ("key", "value"):
            arrays[name][:, end - HELD_BACK : end] *= 3
    arrays["query"][:, :, -HELD_BACK:] *= 2
    second = tools.study(arrays, SCHEMES, bits=5, judge=HELD_BACK).mix
    assert (first.text, first.error_assumed) == (second.text, second.error_assumed)
    assert first.error_measured != second.error_measured


def test_the_mix_is_a_row_of_the_table(arrays):
    found = tools.study(arrays, SCHEMES, bits=6, judge=HELD_BACK)
    last = found.summary[-1]
    assert (last.scheme, last.bits) == (found.mix.text, found.mix.bits)
    again = tools.study(arrays, f"int8:g16,{found.mix.text}")
    assert [one.scheme for one in again.summary] == ["int8:g16", found.mix.text]
    assert again.summary[1].key_error == last.key_error
    heads = [(row["layer"], row["head"]) for row in found.rows
             if (row["scheme"], row["side"]) == (found.mix.text, "attention")]  # fmt: skip
    assert heads == [(f"layer {i}", h) for i in range(LAYERS) for h in range(HEADS)]
    assert str(found).splitlines()[2].startswith(f"for 6 bits: {found.mix.text}, 6.00 bits a number, error ")
    name, bits, error = found.mix.uniform
    assert (name, bits) == ("int4:g16", 5)
    assert error > found.mix.error_measured
    assert found.to_dict()["mix"]["text"] == found.mix.text


def test_a_mix_that_does_not_pay_is_not_praised(arrays):
    """Held-back tokens that the search did not see may rank a single format before the mix."""
    found = tools.study(arrays, SCHEMES, bits=6, judge=HELD_BACK)
    name, _, error = found.mix.uniform
    assert "does not pay" not in str(found)
    for bits, measured, pays in ((6.0, error / 99, False), (6.0, 99 * error, True), (6.5, error / 99, True)):
        other = replace(found, mix=replace(found.mix, uniform=(name, bits, measured)))
        assert ("does not pay" in str(other)) is not pays
    tight = tools.study(arrays, SCHEMES, error=found.mix.error_assumed, judge=HELD_BACK)
    assert ("above the error that was asked for" in str(tight)) is (
        tight.mix.error_measured > found.mix.error_assumed
    )


def test_one_format_may_be_the_mix(arrays):
    found = tools.study(arrays, SCHEMES, bits=3, judge=HELD_BACK)
    assert (found.mix.text, len(found.summary)) == ("int2:g16", 3)
    assert "best single format" not in str(found)
    assert tools.study(arrays, SCHEMES, error=1e-4 + found.mix.error_assumed, judge=HELD_BACK).mix.bits == 3


def test_a_mix_of_some_layers_of_a_model(arrays):
    arrays |= {"layers": np.array([3, 9])}
    mix = tools.study(arrays, SCHEMES, bits=6, judge=HELD_BACK).mix
    assert ([number for number, *_ in mix.layers], mix.num_layers) == ([3, 9], None)
    assert "@3" in mix.text or "@9" in mix.text
    assert "unmeasured" in str(tools.study(arrays, SCHEMES, bits=6))


def test_a_mix_goes_to_a_file_and_into_a_cache(arrays, tmp_path):
    source, path = tmp_path / "dump.npz", tmp_path / "mix.json"
    np.savez(source, **arrays)
    ran = CliRunner().invoke(
        main, ["study", str(source), "--schemes", SCHEMES, "--bits", "6", "--judge", "4", "-o", str(path)]
    )
    assert ran.exit_code == 0, ran.output
    held = json.loads(path.read_text())
    found = tools.study(source, SCHEMES, bits=6, judge=4).mix
    assert (held["kvkit_mix"], held["num_layers"], held["bits"]) == (found.text, LAYERS, found.bits)
    cache = QuantizedCache.from_file(path)
    assert [[spec.bits for spec in layer.specs] for layer in cache.layers] == [
        [int(format[3]) for format in pair] for _, *pair in found.layers
    ]
    again = tools.study(source, str(path), judge=4)
    assert (again.summary[0].scheme, again.summary[0].bits) == (str(path), found.bits)
    for share in ("5%", "0.05"):
        ran = CliRunner().invoke(main, ["study", str(source), "--error", share, "--json"])
        assert json.loads(ran.stdout)["mix"]["target"] == "an error of 5 %", ran.output


def test_judging_queries_measure_schemes_too(arrays):
    """`judge` measures the same queries whether or not a mix is chosen."""
    own = tools.study(arrays, SCHEMES, judge=HELD_BACK)
    with_mix = tools.study(arrays, SCHEMES, bits=6, judge=HELD_BACK)
    assert own.summary == with_mix.summary[:3]
    assert own.summary[0].output_error != tools.study(arrays, SCHEMES).summary[0].output_error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--error", "5"], "--error: expected a share below 1, as 5% or 0.05, got 5"),
        (["--error", "0%"], "--error: expected a share below 1"),
        (["-o", "mix.json"], "--output: expected a folder, or --bits or --error for a mix, got mix.json"),
        (["--bits", "2"], "bits: expected what a mix of these formats reaches: 3.00 bits at the least"),
    ],
)
def test_commands_refused(arrays, options, words, tmp_path):
    np.savez(tmp_path / "dump.npz", **arrays)
    ran = CliRunner().invoke(main, ["study", str(tmp_path / "dump.npz"), "--schemes", SCHEMES, *options])
    assert ran.exit_code != 0
    assert words in ran.output


def test_a_report_has_the_file_of_the_mix(arrays, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "pictures_and_prints", lambda study: ({}, {}))  # which takes seconds
    found = tools.study(arrays, SCHEMES, bits=6, judge=HELD_BACK)
    written = [path.name for path in found.save(tmp_path)]
    assert written[-1] == "mix.json"
    assert mix_named(str(tmp_path / "mix.json")).text == found.mix.text
    assert json.loads((tmp_path / "study.json").read_text())["mix"]["text"] == found.mix.text


def test_layers_are_studied_in_other_processes(arrays, tmp_path):
    """What a mapper sends has no reader and no scheme, only their recipes."""
    np.savez(tmp_path / "dump.npz", **arrays)

    def mapper(function, *arguments):
        return map(pickle.loads(pickle.dumps(function)), *arguments)

    own, other = (
        tools.study(tmp_path / "dump.npz", SCHEMES, bits=6, judge=HELD_BACK, mapper=each)
        for each in (map, mapper)
    )
    assert (own.mix, own.summary) == (other.mix, other.summary)


def test_other_schemes_are_compared_and_stay_out_of_the_mix(arrays):
    found = tools.study(arrays, f"nvfp4,{SCHEMES}", bits=6, judge=HELD_BACK)
    assert [one.scheme for one in found.summary] == ["nvfp4", *SCHEMES.split(","), found.mix.text]
