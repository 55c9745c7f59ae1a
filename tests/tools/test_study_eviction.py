"""Policies that evict tokens, in a study: numbers against plain loops, and what scorers may see."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from kvkit import Rope, eviction, formats, tools
from kvkit.tools.readers import open_cache
from kvkit.tools.studies import evicting, policies
from kvkit.tools.studies.report import markdown
from kvkit.tools.studies.words import worst_heads
from kvkit_cli.main import main

pytestmark = pytest.mark.cpu

TOKENS, HEADS, DIM, STARTS, ROWS, JUDGE = 96, 3, 32, (0, 40, 96), 16, 4
CODES = "int4:g32:float16"


@pytest.fixture
def arrays(rng):
    """Return two layers of two sequences, with the queries of the last 16 tokens of each."""
    key, value = (rng.standard_normal((2, TOKENS, HEADS, DIM)).astype(np.float16) for _ in range(2))
    query = 2 * rng.standard_normal((2, 2, ROWS, 2 * HEADS, DIM)).astype(np.float16)
    return {"key": key, "value": value, "query": query, "seqstarts": np.array(STARTS)}


def back(x):
    return formats.decode(formats.encode(x, CODES), CODES)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def plain(arrays, layer, head, share, coded):
    """Return the error that knorm causes in attention, by float64 loops over queries."""
    found = {name: [] for name in ("kl", "top_changed", "weight_kept")}
    errors = norms = 0.0
    for s, (begin, end) in enumerate(itertools.pairwise(STARTS)):
        keys, values = (arrays[name][layer, begin:end, head].astype(np.float32) for name in ("key", "value"))
        before = end - begin - JUDGE
        order = np.argsort(np.linalg.norm(keys[:before], axis=1), kind="stable")
        rows = np.append(np.sort(order[: int(before * share)]), np.arange(before, end - begin))
        own = [back(side[rows, None])[:, 0] if coded else side[rows] for side in (keys, values)]
        for i, query in enumerate(arrays["query"][layer, s, -JUDGE:].astype(np.float64)):
            seen = before + i + 1
            for q in query[2 * head : 2 * head + 2] / np.sqrt(DIM):
                p, stays = softmax(keys[:seen] @ q), rows[rows < seen]
                kept = p[stays].sum()
                other = softmax(own[0][: len(stays)] @ q)
                left = p[stays] / kept
                found["kl"].append(-np.log(kept) + (left * np.log(left / other)).sum())
                found["top_changed"].append(p.argmax() != stays[other.argmax()])
                found["weight_kept"].append(kept)
                want, got = p @ values[:seen], other @ own[1][: len(stays)]
                errors, norms = errors + ((want - got) ** 2).sum(), norms + (want**2).sum()
    return {name: np.mean(each) for name, each in found.items()} | {"output_error": np.sqrt(errors / norms)}


@pytest.mark.parametrize("code", ["", f"+{CODES}"])
def test_attention_is_that_of_plain_loops(arrays, code):
    found = tools.study(arrays, evict=f"knorm@0.25{code}", judge=JUDGE)
    rows = [row for row in found.rows if (row["scheme"], row["side"]) == (f"knorm@0.25{code}", "attention")]
    assert len(rows) == 2 * HEADS
    for row in rows:
        expected = plain(arrays, found.layers.index(row["layer"]), row["head"], 0.25, bool(code))
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert row["tokens_kept"] == 9 + JUDGE + 13 + JUDGE
    one = found.summary[0]
    stored = 2 * DIM * (4.5 if code else 16) * (9 + 13 + 2 * JUDGE) * HEADS * 2
    assert one.bytes_per_token == pytest.approx(stored / 8 / TOKENS)
    assert one.bits == pytest.approx(stored / (2 * TOKENS * HEADS * DIM * 2))
    assert (one.key_error > 0.05) == bool(code)


def test_all_tokens_kept_are_the_scheme_alone(arrays):
    found = tools.study(arrays, evict=[CODES, f"keydiff@1+{CODES}", "none", "keydiff@1"])
    for one, other in ((0, 1), (2, 3)):
        one, other = vars(found.summary[one]), vars(found.summary[other])
        whole = {"entropy", "channel_entropy"}  # of a scheme of all tokens, whatever stays
        for name in one.keys() - {"scheme", "perplexity", "agreement", "at_end", "zero", *whole}:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def test_no_scorer_sees_a_judging_query(arrays):
    """Other judging queries and tokens change nothing of what is kept; a function sees what is before."""
    seen = []

    def mine(layer, keys, values, queries):
        seen.append((layer, keys.shape, values.shape, queries))
        return -np.abs(values).sum(-1)

    tools.study(arrays, evict=[(mine, 0.5)], judge=JUDGE)
    assert [(layer, *shapes) for layer, *shapes, _ in seen] == [
        (layer, (1, HEADS, count, DIM), (1, HEADS, count, DIM)) for layer in (0, 1) for count in (36, 52)
    ]
    before = arrays["query"][1, 0, :-JUDGE].swapaxes(0, 1)[None]
    np.testing.assert_array_equal(seen[2][3], before)
    changed = {name: array.copy() for name, array in arrays.items()}
    changed["query"][:, :, -JUDGE:] *= -3
    for end in STARTS[1:]:
        for name in ("key", "value"):
            changed[name][:, end - JUDGE : end] += 1
    names = [name for name, each in eviction.SCORERS.items() if each.scored == "tokens"]
    names = [f"{name}@0.5" for name in names if name not in ("kvzip", "critical", "qfilter", "h2o", "finch")]
    names = [name for name in names if not name.startswith(("non_causal", "compactor"))]  # need all queries
    plan = policies.make_plan(
        None, [*names, "h2o(recent=4)@0.5", "finch(window=4)@0.5"], "uniform", JUDGE, Rope(DIM)
    )
    for group in plan.groups():
        found = [list(kept_by(source, group, plan)) for source in (arrays, changed)]
        same = all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
        assert same == (group[0].scorer != "oracle"), group[0].name


def kept_by(source, group, plan):
    contexts = list(evicting.contexts_of(open_cache(source).layer(1), JUDGE))
    for _, groups in evicting.kept_rows(contexts, group, plan, (1, 2)):
        for of_context in groups:
            yield from (rows for _, rows in of_context)


def test_budgets(arrays):
    one = tools.study(arrays, evict="keydiff@0.5", budget="ada")
    counts = [
        row["tokens_kept"] for row in one.rows if (row["scheme"], row["side"]) == ("keydiff@0.5", "keys")
    ]
    assert len(set(counts)) > 1
    assert sum(counts) == 2 * HEADS * (18 + 26 + 2 * JUDGE)
    assert one.summary[0].tokens_kept == pytest.approx(np.mean(counts))
    key = np.random.default_rng(0).standard_normal((2, 1000, 1, 8)).astype(np.float32)
    two = tools.study({"key": key, "value": key}, evict="knorm@0.5", budget="pyramid")
    counts = [row["tokens_kept"] for row in two.rows if (row["scheme"], row["side"]) == ("knorm@0.5", "keys")]
    assert counts == eviction.budgets("pyramid", layers=2, tokens=1000, keep=0.5).tolist()


@pytest.mark.parametrize("scheme", ["int4:g32", "q8_0", "e4m3", "mxfp4", "int4:g32+hadamard"])
@pytest.mark.parametrize("budget", ["uniform", "ada"])
def test_tokens_that_are_encoded_once_give_what_new_prompts_give(arrays, monkeypatch, scheme, budget):
    """A scheme that encodes each token by itself needs no new prompt for every policy; nor far-off scores."""
    arrays["key"][0, 3] *= 40  # the tokens that most queries look at, and that knorm evicts
    evict = [f"{name}@{share}+{scheme}" for name in ("knorm", "snapkv(window=4)") for share in (0.5, 0.2)]
    found = tools.study(arrays, evict=[*evict, "knorm@0.5"], budget=budget, judge=JUDGE)
    monkeypatch.setattr(evicting, "by_token", lambda policy: policy.schemes is policies.UNCODED)
    prompts = tools.study(arrays, evict=[*evict, "knorm@0.5"], budget=budget, judge=JUDGE)
    assert [one.bits for one in found.summary] == [one.bits for one in prompts.summary]
    for one, other in zip(sorted_rows(found), sorted_rows(prompts), strict=True):
        for name, number in one.items():
            close = pytest.approx(number, rel=1e-4, abs=1e-5) if isinstance(number, (float, list)) else number
            assert other[name] == close, name


def sorted_rows(found):
    return sorted(found.rows, key=lambda row: (row["scheme"], row["layer"], row["side"], row["head"]))


def test_schemes_go_with_every_policy(arrays):
    found = tools.study(arrays, "float16,int8:g32", evict="none,knorm@0.5,keydiff@0.5+q8_0")
    assert [one.scheme for one in found.summary] == [
        "float16", "int8:g32", "knorm@0.5+float16", "knorm@0.5+int8:g32", "keydiff@0.5+q8_0",
        "random@0.5+float16", "oracle@0.5+float16",
    ]  # fmt: skip


def test_without_queries(arrays):
    found = tools.study({"key": arrays["key"], "value": arrays["value"]}, evict="knorm@0.5,random@0.5,q8_0")
    assert [one.scheme for one in found.summary] == ["knorm@0.5", "random@0.5", "q8_0"]
    assert {one.output_error for one in found.summary} == {None}
    assert found.summary[0].tokens_kept == 48
    assert ": q8_0, 8.50 bits" in found.budget()
    assert str(found).split("\n\n")[1].startswith("note: without queries the cost of eviction is unknown")
    assert [name for name, _ in worst_heads(found)] == ["q8_0"]
    alone = tools.study({"key": arrays["key"], "value": arrays["value"]}, evict="knorm@0.5")
    assert alone.budget() == "without queries no policy can be advised"
    assert "worst heads" not in str(alone) + markdown(alone, [])
    assert "keys" not in str(alone).split("\n\n")[3]  # kept tokens that are not coded have no errors


def test_shares_have_all_their_digits():
    """Two shares that agree in six digits are two, and a share has one `random`, however it is written."""
    plan = policies.make_plan(None, [(np.mean, "0.5"), (np.mean, 1 / 3), "knorm@0.333333", "random@.5"])
    assert plan.names == [
        "mean@0.5", f"mean@{1 / 3}", "knorm@0.333333", "random@.5", "oracle@0.5", f"random@{1 / 3}",
        f"oracle@{1 / 3}", "random@0.333333", "oracle@0.333333",
    ]  # fmt: skip


def test_paths_with_the_signs_of_entries(tmp_path):
    """The scorer, and the scheme that references take over, may be in a folder with @, + and parentheses."""
    folder = tmp_path / "a@b+(c)"
    folder.mkdir()
    (folder / "s.py").write_text(
        "from kvkit.tools.studies.policies import Uncoded as S\ndef f(*_):\n    return 0\n"
    )
    scorer, scheme = f"{folder}/s.py:f", f"{folder}/s.py:S"
    plan = policies.make_plan(None, [f"snapkv(window=4)@0.5+{scheme}", f"{scorer}@0.25", scheme])
    assert plan.names == [
        f"snapkv(window=4)@0.5+{scheme}", f"{scorer}@0.25", scheme, f"random@0.5+{scheme}",
        f"oracle@0.5+{scheme}", "random@0.25", "oracle@0.25",
    ]  # fmt: skip
    assert policies.parts_of(plan.names[0]) == ("snapkv(window=4)", 0.5, scheme)
    assert policies.parts_of(plan.names[1]) == (scorer, 0.25, "")
    assert policies.parts_of(scheme) is None


def test_what_was_understood_of_queries(arrays):
    assert "queries: the last 16 tokens, 6 heads" in tools.study(arrays, "fp8").notes
    wide = arrays | {"query": arrays["query"][:, :, :6].repeat(3, axis=3)}
    assert (
        tools.study(wide, "fp8")
        .notes[0]
        .endswith(
            "the last 6 tokens, 18 heads; if they are 18 tokens and 6 heads, exchange axes 2 and 3 of query"
        )
    )
    assert str(tools.study(wide, "fp8")).splitlines()[2].startswith("note: queries: the last 6 tokens")


def test_the_verb_and_its_report(arrays, tmp_path, no_prints):
    path, source = tmp_path / "kv.npz", tmp_path / "mine.py"
    np.savez(path, **arrays)
    source.write_text(
        "def last(layer, keys, values, queries):\n    return keys[..., 0] * 0 + range(keys.shape[2])\n"
    )
    entries = f"snapkv(window=8,pool=max)@0.5,int4:g32,knorm@0.25+int4:g32,expected@0.5,{source}:last@0.5"
    command = ["study", str(path), "--evict", entries, "--rope", f"rotary_dim={DIM}", "--judge", "2"]
    done = CliRunner().invoke(main, [*command, "--json", "-o", str(tmp_path / "report")])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["summary"]
    assert [one["scheme"] for one in found[:2]] == ["snapkv(window=8,pool=max)@0.5", "int4:g32"]
    assert found[4]["tokens_kept"] == 19 + 27 + 4
    page = (tmp_path / "report" / "report.html").read_text()
    assert "oracle@0.5 (no policy)" in page
    assert page.count("<svg") == 8  # three of eviction and one of channels, for a light and a dark page
    wrong = CliRunner().invoke(main, ["study", str(path), "--evict", "snapk@0.5"])
    assert (wrong.exit_code, "--evict: expected a scorer" in wrong.stderr) == (2, True)


def test_a_window_is_no_longer_than_the_queries(arrays):
    found, explicit = (
        tools.study(arrays, evict=[f"snapkv{window}@0.5"], judge=JUDGE) for window in ("", "(window=12)")
    )
    assert replace(found.summary[0], scheme="") == replace(explicit.summary[0], scheme="")
    assert "note: snapkv has a window of 12: there are no more queries" in str(found)
