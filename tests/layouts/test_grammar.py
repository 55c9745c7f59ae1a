"""Lines parse and print back; names of engines, vLLM and LMCache; what is no line."""

import pytest

from kvkit import KvkitError
from kvkit.layouts import NAMED, parse

# Every line of the table of engines, by names of vLLM and LMCache, in the words of its registry.
REGISTRY = {
    "NB_NL_TWO_BS_NH_HS": "| b l kv n h c", "NL_X_TWO_NB_BS_NH_HS": "l | kv b n h c",
    "NL_X_NB_TWO_BS_NH_HS": "l | b kv n h c", "NL_X_NB_BS_HS": "l | b n c",
    "TWO_X_NL_X_NBBS_NH_HS": "kv l | (b n) h c", "NL_X_NBBS_ONE_HS": "l | (b n) 1 c",
    "NL_X_TWO_NB_NH_BS_HS": "l | kv b h n c", "NL_X_NB_TWO_NH_BS_HS": "l | b kv h n c",
    "NB_NL_TWO_NH_BS_HS": "| b l kv h n c", "TWO_X_NL_X_NB_BS_NH_HS": "kv l | b n h c",
    "NL_X_NB_NH_BS_TWO_HS": "l | b h n kv c", "NL_X_NB_BS_NH_TWO_HS": "l | b n h kv c",
    "NL_X_NB_NH_BS_CS": "l | b h n (kv c)", "NL_X_NB_BS_NH_CS": "l | b n h (kv c)",
    "NL_X_NB_BS_NH_HS": "l | b n h c", "NL_X_NP_X_NB_BS_ONE_HS": NAMED["vllm-ascend-mla"].line,
    "KV_2LTD": "| kv l n (h c)", "NL_X_NB_BSV_BSS": "l | b (n c + n s)",
    "NL_X_TWO_NB_NH_ONE_BS_HS": "l | kv b h 1 n c", "NL_X_TWO_X_NB_BS_NH_HS": "l kv | b n h c",
    "NL_X_TWO_X_NB_BS_HS": "l kv | b n c", "LBNHC": "l | b n h (kv c)", "LBHNC": "l | b h n (kv c)",
    "LHBNC": "| l h b n (kv c)", "BLHNC": "| b l h n (kv c)", "BLNHC": "| b l n h (kv c)",
    "BHLNC": "| b h l n (kv c)",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_named_line_prints_back(name):
    layout = parse(name)
    assert str(layout) == NAMED[name].line
    assert parse(str(layout)) == layout
    assert NAMED[name].mark in "ASTK"
    assert NAMED[name].engine
    assert NAMED[name].source


@pytest.mark.parametrize("alias", REGISTRY)
def test_names_of_vllm_and_lmcache(alias):
    assert str(parse(alias)) == REGISTRY[alias]


def test_aliases_name_one_layout():
    aliases = [alias for named in NAMED.values() for alias in named.aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(NAMED)
    assert set(REGISTRY) | {"ND", "NHSD", "NZ"} == set(aliases)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "an axis of content"), ("nhd", "a line, such as"), (None, "a line, such as"),
        (7, "a line, such as"), ("l | b n h", "an axis of content"), ("l | b n d c", "axes among"),
        ("l | b n n c", "the axis n once"), ("l | l b n c", "in lists or in the array"),
        ("l l | b n c", "each axis once"), ("l | b | n c", "one bar"), ("l | b n c1", "the axis c once"),
        ("l | b c0[8] n", "the axis c once"), ("l | b n c1 c0", "for an inner one"),
        ("l | b n c1[2] c0[8]", "for an outer part"), ("l | b n c1 c0[0]", "axes among"),
        ("l | b b (n c + n s)", "the axis b once"), ("l | b (n c + n s s)", "the axis s once"),
        ("l | b (n c + n s) (h c)", "the axis c once"), ("l | b (n c + n c)", "and scale groups"),
        ("l | b n c s", "not both"), ("l | kv1 b n c kv0[2]", "axes among|a whole axis kv"),
        ("l | (b n c", "a parenthesis that closes"), ("l | b n) c", "in parentheses"),
        ("l | b () n c", "in parentheses"), ("l | b n + c", "in parentheses"),
        ("l | b (n c +)", "in parentheses"), ("l kv | b n c ; b n c", "other axes"),
        ("l kv | b n c ; b h n c", "the same axes"), ("l | b n c ; b c n", "an axis kv"),
        ("l1 | b n c", "whole axes left of the bar"),
    ],
)  # fmt: skip
def test_what_is_no_line(text, expected):
    with pytest.raises(KvkitError, match=f"layout: expected .*({expected})"):
        parse(text)
