"""`diff` and `vectors.diff` name mistakes of attention, from the inputs of the call, and nothing else."""

from collections import Counter
from copy import deepcopy

import ml_dtypes
import numpy as np
import pytest

from kvkit.reference import REFERENCE
from kvkit.tools import diff, vectors
from kvkit.tools.vectors import packs

D = 32


def attend(query, key, value, scale=D**-0.5, interleaved=False, missing=slice(None), causal=True):
    """Return outputs [batch, heads, tokens, dim] and log-sum-exps of arrays in transformers' order."""
    heads, of = np.arange(query.shape[1]), key.shape[1]
    of_head = heads % of if interleaved else heads // (len(heads) // of)
    q, k, v = query.astype(float), *(x.astype(float)[:, of_head, missing] for x in (key, value))
    scores = q @ k.swapaxes(-1, -2) * scale
    tokens, context = scores.shape[-2:]
    if causal:
        seen = np.arange(context) <= np.arange(tokens)[:, None] + context - tokens
        scores = np.where(seen, scores, -np.inf)
    lse = np.logaddexp.reduce(scores, axis=-1)
    return np.exp(scores - lse[..., None]) @ v, lse


MISTAKES = {
    "another softmax_scale (1, none for 0.1768)": {"scale": 1.0},
    "another softmax_scale (0.03125, 1 / head_dim for 0.1768)": {"scale": 1 / D},
    "another softmax_scale (0.14 for 0.1768)": {"scale": 0.14},
    "query heads read other key heads (head h reads head h % 2, not h // 3)": {"interleaved": True},
    "contexts one token short (the last one is missing)": {"missing": slice(None, -1)},
    "contexts one token short (the first one is missing)": {"missing": slice(1, None)},
    "later tokens (read, as without a causal mask)": {"causal": False},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("words", [*MISTAKES, None])
def test_mistakes_of_attention(rng, words, dtype):
    """Of queries of several tokens and of one; noise as large as a mistake has no cause."""
    for tokens in (5,) if words and "later" in words else (5, 1):
        query = rng.standard_normal((2, 6, tokens, D)).astype(dtype)
        key, value = rng.standard_normal((2, 2, 2, 40, D)).astype(dtype)
        right, wrong = attend(query, key, value), attend(query, key, value, **MISTAKES.get(words, {}))
        if words is None:
            wrong = [x + rng.standard_normal(x.shape) / 8 for x in right]
        for turned in (False, True):  # as eager attention of transformers returns it
            sides = [
                {
                    "attn_output": (o.swapaxes(1, 2) if turned else o).astype(dtype),
                    "lse": lse.astype(np.float32),
                }
                for o, lse in (right, wrong)
            ]
            found = diff(*sides, like={"query": query, "key": key, "value": value})
            got = {
                (each.array, str(each).partition(": ")[2].partition(" explains")[0]) for each in found.causes
            }
            assert got == ({(name, words) for name in sides[0]} if words else set()), str(found)
            assert all(each.explained > 0.95 * each.differing for each in found.causes)


@pytest.mark.parametrize(
    ("own", "scale", "tokens"),
    [
        (D**-0.5, 0.0125, 5), (D**-0.5, 0.0235, 5),  # powers of two explain bfloat16 nearly as well
        (D**-0.5, 32 * D**-0.5, 1),  # a few keys have all of the weight
        (-0.2, -0.27, 5),
    ],
)  # fmt: skip
def test_a_scale_is_named_closely(own, scale, tokens, rng):
    query = rng.standard_normal((2, 6, tokens, D)).astype(ml_dtypes.bfloat16)
    key, value = rng.standard_normal((2, 2, 2, 40, D)).astype(ml_dtypes.bfloat16)
    right, wrong = (
        {"attn_output": attend(query, key, value, each)[0].astype(ml_dtypes.bfloat16)}
        for each in (own, scale)
    )
    like = {"query": query, "key": key, "value": value, "softmax_scale": np.array(own)}
    [found] = diff(right, wrong, like=like).causes
    assert found.name == "another softmax_scale"
    assert float(found.detail.partition(" ")[0].strip(",")) == pytest.approx(scale, rel=0.02)


def test_bases_of_log_sum_exps(rng):
    lse = rng.standard_normal((3, 8)) + 2
    lse[1] = -np.inf  # an empty context
    for factor, words in ((1 / np.log(2), "base 2"), (-1.0, "sign reversed"), (1 / np.log(10), "base 10")):
        found = diff(
            {"lse": lse.astype(np.float32)},
            {"lse": np.where(np.isfinite(lse), lse * factor, lse).astype(np.float32)},
        )
        assert [(each.name, each.detail) for each in found.causes] == [("log-sum-exp in another base", words)]
        assert found.causes[0].explained == found.causes[0].differing


def scaled(operator, given):
    return {"softmax_scale": 1.5 * (given.get("softmax_scale") or given["query"].shape[-1] ** -0.5)}


def shortened(operator, given):
    return {"context_lens": np.maximum(given["context_lens"] - 1, 0)}


@pytest.mark.parametrize(
    ("operator", "change", "cause"),
    [
        ("multi_head_attention", scaled, "another softmax_scale"),
        ("dynamic_batching.multi_head_attention", scaled, "another softmax_scale"),
        ("paged_attention", scaled, "another softmax_scale"),
        ("ascend.paged_attention", scaled, "another softmax_scale"),
        *(
            pytest.param(operator, scaled, "another softmax_scale", marks=pytest.mark.slow)
            for operator in (
                "multi_head_cache_attention", "dynamic_batching.multi_head_cache_attention", "mla_attention",
            )
        ),
        ("paged_attention", shortened, "contexts one token short"),
        ("ascend.paged_attention", shortened, "contexts one token short"),
    ],
)  # fmt: skip
def test_mistakes_of_a_device(tmp_path, operator, change, cause):
    """The device is the reference with a mistake in it."""
    vectors.make(tmp_path / "pack", operator=operator)
    for case in packs.manifest(tmp_path / "pack")["cases"]:
        given, results = packs.arguments(tmp_path / "pack", case), {}
        if not case["refused"]:
            inputs = deepcopy(given) | change(operator, given)
            inputs.pop("return_lse", None)
            outputs = REFERENCE[operator](**inputs)
            results = dict(
                zip(case["outputs"], outputs if isinstance(outputs, tuple) else [outputs], strict=False)
            )
        (tmp_path / "results" / case["name"]).mkdir(parents=True)
        for group, name, entry in packs.entries(case):
            if group != "arguments":
                right = packs.array(tmp_path / "pack", entry)
                dtype = np.dtype(getattr(ml_dtypes, packs.result_dtype(entry), packs.result_dtype(entry)))
                array = np.asarray(results.get(name, right)).astype(dtype)
                array = array if dtype.kind in "iuf" else array.view(f"u{dtype.itemsize}")
                np.save(tmp_path / "results" / case["name"] / f"{name}.npy", array)
    counts, words = Counter(), {}
    for case in packs.manifest(tmp_path / "pack")["cases"]:
        named = change(operator, packs.arguments(tmp_path / "pack", case)).get("softmax_scale")
        words[case["name"]] = f"{cause} ({named:.3g} for" if named else cause  # near 1 / log(2) of its own
    for each in vectors.diff(tmp_path / "pack", tmp_path / "results").cases:
        if each.status == "failed":
            assert "attn_output: " in each.why, each.why
            counts[cause if words[each.case] in each.why else each.why] += 1
    assert counts[cause] >= 0.9 * counts.total()


def test_queries_without_elements():
    """They explain nothing."""
    inputs = {name: np.zeros((1, 2, 3, 0), np.float32) for name in ("query", "key", "value")}
    lse, errors = np.random.default_rng(0).standard_normal((2, 1, 2, 3), np.float32)
    found = diff({"lse": lse}, {"lse": lse + errors}, like=inputs)
    assert [array.name for array in found.arrays] == ["lse"]
    assert not found.causes
