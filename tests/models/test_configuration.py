"""Configurations by their published words: bytes computed by hand, and every word that is not used named.

`sizes.json` has them: rows of 2-byte numbers, float32 states, convolutions with K - 1 columns.
"""

import json
from pathlib import Path

import pytest

from kvkit import KvkitError
from kvkit.models.configuration import read_layers
from kvkit.models.words import LAYER_WORDS, ROPE_WORDS
from kvkit.tools import size

CASES = json.loads(Path(__file__).with_name("sizes.json").read_text())
PLAIN = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_computed_by_hand(name):
    case = CASES[name]
    (found,) = size(case["config"], tokens=case["tokens"]).caches
    assert (found.key_bytes + found.value_bytes, found.state_bytes) == (case["rows"], case["states"])


@pytest.mark.parametrize(("format", "expected"), [("ds_v4", 4_040_494_080), ("bfloat16", 7_219_838_976)])
def test_rows_of_deepseek_v4_as_engines_store_them(format, expected):
    case = CASES["DeepSeek-V4-Flash"]
    (found,) = size(case["config"], tokens=case["tokens"], formats=format).caches
    assert found.key_bytes + found.value_bytes == expected


# Words that a plain model of full attention reads, or whose value changes nothing
READ = {
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query", "num_attention_groups", "kv_channels",
    "attention_head_dim", "v_head_dim", "sliding_window", "sliding_window_size", "layer_types",
    "layers_block_type", "per_layer_config", "kv_source_layers", "num_kv_shared_layers", "global_head_dim",
    "use_sliding_window", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern",
    # They give layers a kind whose sizes are missing.
    "attn_layer_period", "full_attention_interval", "layer_group_size", "global_attn_every_n_layers",
    "kv_lora_rank", "num_global_key_value_heads",
}  # fmt: skip
VALUES = {
    "linear_attn_config": {},
    "sparse_attention_config": {},
    "compress_rates": {},
    "index_topk_pattern": "F",
}
UNKNOWN = (
    "my_layer_types", "block_type_list", "attention_pattern", "state_interval", "attn_mode", "the_attn_kind",
    "linear_rank", "mamba_size", "ssm_heads", "kda_rank", "swa_layers", "sliding_step", "local_size",
    "global_every", "compress_factor", "index_width", "sparse_blocks", "my_kv_shared_rows", "new_chunk_size",
    "conv_L_size", "my_rope_kind", "layer_rope_kind",
)  # fmt: skip


@pytest.mark.parametrize("word", sorted(LAYER_WORDS - READ) + list(UNKNOWN))
def test_a_word_that_was_not_used_is_an_error_that_names_it(word):
    with pytest.raises(KvkitError, match=rf"^{word}"):
        read_layers(PLAIN | {word: VALUES.get(word, 3)})


@pytest.mark.parametrize(
    "word", ["attn_logit_softcapping", "attention_dropout", "mlp_layer_types", "moe_layer_freq"]
)
def test_words_that_say_nothing_about_a_cache_are_read_over(word):
    assert read_layers(PLAIN | {word: 3}) == read_layers(PLAIN)


def test_a_null_entry_is_as_good_as_absent():
    nulls = dict.fromkeys([*LAYER_WORDS - PLAIN.keys(), *ROPE_WORDS, *UNKNOWN])
    assert read_layers(PLAIN | nulls) == read_layers(PLAIN)


LISTS = [["full_attention"] * 3 + ["linear_attention"], ["linear_attention"] * 3 + ["full_attention"]]
QWEN = CASES["Qwen3-Next-80B-A3B"]["config"] | {"num_hidden_layers": 4}
REFUSED = {
    "two lists": (QWEN | {"layer_types": LISTS[0]}, "full_attention_interval: full in layer 0"),
    "two names": (PLAIN | {"num_kv_heads": 4}, "num_kv_heads: int 2, as num_key_value_heads says"),
    "a list of 3": (PLAIN | {"layer_types": ["full_attention"] * 3}, "layer_types: 4 members"),
    "a new type": (PLAIN | {"layer_types": ["moon"] * 4}, r"layer_types\[0\]: a type of"),
    "a type with no name": (PLAIN | {"layer_types": [None] * 4}, r"layer_types\[0\]: a type of"),
    "a list by a number": (PLAIN | {"layer_types": 7}, "layer_types: a list"),
    "no window": (PLAIN | {"layer_types": ["sliding_attention"] * 4}, "sliding_window: a whole number"),
    "a window of NaN": (PLAIN | {"sliding_window": float("nan")}, "sliding_window: a whole number"),
    "a negative number": (PLAIN | {"num_key_value_heads": -2}, "num_key_value_heads: a whole number"),
    "true for a number": (PLAIN | {"head_dim": True}, "head_dim: a whole number"),
    "heads that do not divide": (PLAIN | {"num_key_value_heads": 3}, "num_key_value_heads: a divisor"),
    "millions of layers": (PLAIN | {"num_hidden_layers": 30_000_000}, "num_hidden_layers: at most 1024"),
    "no layers": (PLAIN | {"num_hidden_layers": 0}, "num_hidden_layers: a whole number from 1"),
    "a part by a number": ({"text_config": 3}, "text_config: a mapping"),
    "a hybrid without a list": (PLAIN | {"model_type": "jamba"}, "layer_types: the type of each layer"),
    "another ratio": (
        CASES["V4, 4 layers"]["config"] | {"compress_ratios": [0, 1, 4, 128]},
        r"compress_ratios\[1\]: 0, 4",
    ),
    "a picture's layers": (PLAIN | {"cross_attention_layers": [1]}, "cross_attention_layers: a model whose"),
    "an encoder": (PLAIN | {"is_encoder_decoder": True}, "model_type: a model whose layers"),
    "all shared": (PLAIN | {"num_kv_shared_layers": 4}, "num_kv_shared_layers: a number below 4"),
    "a state without sizes": (PLAIN | {"layer_types": ["mamba"] * 4}, "mamba_d_state: a whole number"),
    "no head size": (
        {"num_hidden_layers": 1, "num_attention_heads": 7, "hidden_size": 64},
        "head_dim: elements of a head",
    ),
    "one window for all and none": (
        PLAIN | {"use_sliding_window": False, "sliding_window": 8, "layer_types": ["sliding_attention"] * 4},
        "use_sliding_window: true",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    config, message = REFUSED[name]
    word, _, expected = message.partition(": ")
    with pytest.raises(KvkitError, match=f"^{word}: expected {expected}"):
        read_layers(config)


def kinds(config):
    return " ".join(layer.kind for layer in read_layers(config).layers)


def test_lists_of_layers_are_cut_where_drafts_begin():
    types = ["full_attention"] * 3 + ["sliding_attention"] * 2
    config = PLAIN | {"layer_types": types, "num_nextn_predict_layers": 1, "sliding_window": 8}
    assert kinds(config) == "full full full window"


def test_a_shared_layer_names_the_layer_that_it_reads():
    types = ["sliding_attention", "full_attention"] * 2
    config = PLAIN | {"layer_types": types, "sliding_window": 8, "num_kv_shared_layers": 2}
    assert [layer.source for layer in read_layers(config).layers] == [None, None, 0, 1]


def test_some_layers_have_no_index_keys_of_their_own():
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 4}
    for words in ({"index_topk_pattern": "FSSF"}, {"indexer_types": ["full", "shared", "shared", "full"]}):
        assert [layer.index_dim for layer in read_layers(PLAIN | latent | words).layers] == [128, 0, 0, 128]
    config = PLAIN | latent | {"index_topk_freq": 2, "index_skip_topk_offset": 2}
    assert [layer.index_dim for layer in read_layers(config).layers] == [128, 128, 0, 128]


def test_heads_of_single_layers():
    config = PLAIN | {"per_layer_config": {"02": {"head_dim": 32, "num_key_value_heads": 1}}}
    assert [(layer.num_kv_heads, layer.key_dim) for layer in read_layers(config).layers] == [
        (2, 64), (2, 64), (1, 32), (2, 64),
    ]  # fmt: skip
    step = {"attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 12,
                                        "num_attention_groups": 4, "head_dim": 32}}  # fmt: skip
    config = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 64,
              "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8} | step  # fmt: skip
    assert [(layer.num_kv_heads, layer.key_dim) for layer in read_layers(config).layers] == [(2, 64), (4, 32)]
