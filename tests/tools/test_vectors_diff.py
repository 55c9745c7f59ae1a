"""`kvkit.tools.vectors.diff` prints as `diff` does, in the words of each operator, and finds its causes."""

import numpy as np
import pytest
from pack_scenes import answers
from planted_faults import quantized

from kvkit.errors import KvkitError
from kvkit.tools import vectors
from kvkit.tools.vectors import packs
from kvkit.tools.vectors.replaying import stored_floats


def first_rows(case, given, name, array):
    """Return a cache in which KVHEAD kept the first tokens of a window, not the last."""
    if given.get("compress_type") != 1 or not name.endswith("_cache"):
        return array
    x, heads = given[name.removesuffix("_cache")], given["key"].shape[1]
    starts = np.cumsum(given["seq_lens"]) - given["seq_lens"]
    rows = array.reshape(-1, array.shape[-1])
    for i, (slot, window) in enumerate(zip(given["slot_mapping"], given["wins"], strict=True)):
        if slot >= 0:
            rows[slot : slot + window] = x[starts[i // heads] :][:window, i % heads]
    return array


def truncated(case, given, name, array):
    """Return codes of 8 bits that were truncated, not rounded."""
    if given.get("quant_bit") != 8 or name != "cache" or case.get("refused"):
        return array
    x = stored_floats(case, {key: value for key, value in given.items() if isinstance(value, np.ndarray)})
    x = x["cache"]
    with np.errstate(invalid="ignore"):
        codes = quantized(x, given.get("quant_group", 8), "truncation")[0]
    return np.where(np.isnan(x), array, codes)


def one_head(case, given, name, array):
    if name == "lse" and array.ndim == 2:
        array[:, 1] += 1
    return array


def one_group(case, given, name, array):
    if given.get("cache_format") == "NZ" and name == "key_cache":
        array[0, 1] = 0
    return array


@pytest.mark.parametrize(
    ("suite", "operator", "edit", "words"),
    [
        (
            "ascend",
            "ascend.reshape_and_cache",
            first_rows,
            "key_cache: first rows kept for last ones explains",
        ),
        ("ascend", "ascend.reshape_and_cache", one_group, "by column group: 1: "),
        ("pmx", "dynamic_batching.multi_head_attention", one_head, "first: token 0, head 1: "),
        ("pmx", "key_value_cache", truncated, "cache: truncation explains"),
        ("pmx", "dynamic_batching.key_value_cache", truncated, "cache: truncation explains"),
    ],
)
def test_words_and_causes(tmp_path, suite, operator, edit, words):
    vectors.make(tmp_path / "pack", suite=suite, operator=operator)
    answers(tmp_path / "pack", tmp_path / "results", edit)
    said = str(vectors.diff(tmp_path / "pack", tmp_path / "results", operator=operator))
    assert f"\n  {words}" in said or f"\n    {words}" in said, said
    lines = said.splitlines()
    assert lines[0].endswith(f"({operator}):")
    assert "elements differ" in lines[1]
    assert lines[2].startswith("    first: ")


def test_cases_without_results_are_one_line_and_cases_are_chosen(tmp_path):
    pack, results = tmp_path / "pack", tmp_path / "results"
    vectors.make(pack, operator="merge_attention_states")
    names = [case["name"] for case in packs.manifest(pack)["cases"]]
    said = str(vectors.diff(pack, results)).splitlines()
    assert said[0].startswith("3 cases have no results, the first is ")
    assert said[1:] == ["3 failed"]
    assert [each.case for each in vectors.diff(pack, results, case=names[1]).cases] == [names[1]]
    assert len(vectors.diff(pack, results, case="*").cases) == 3
    with pytest.raises(KvkitError, match=f"case: expected a case or .*{names[0]}.*, got nothing"):
        vectors.diff(pack, results, case="nothing")
