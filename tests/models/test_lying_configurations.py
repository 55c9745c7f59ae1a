"""Configurations that lie: each is read, or refused by name, in milliseconds."""

import copy
import json
import os
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from surroundings import budget

from kvkit import KvkitError, Rope
from kvkit.files.model_config import read_entries
from kvkit.models.configuration import read_latent_scale, read_layers
from kvkit.models.words import LAYER_WORDS, ROPE_WORDS
from kvkit.tools import size

CASES = json.loads(Path(__file__).with_name("sizes.json").read_text())
SECONDS = 2.0  # of the processor: far above what a lie takes, far below what a believed one would


def nested(depth):
    """Return brackets in brackets."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 10**9, 30_000_000, 2**63, 10**30, -(2**70)])
WORDS = ["full_attention", "sliding_attention", "linear_attention", "mamba", "conv", "auto", "yarn"]
SCALARS = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.integers(-9, 99), st.floats(), st.text(max_size=6),
    st.sampled_from(WORDS),
)  # fmt: skip
OTHERS = (
    "num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim", "model_type", "text_config",
    "rope_type", "factor", "attention", "full_attn_layers", "kda_layers", "num_nextn_predict_layers",
    "max_position_embeddings",
)  # fmt: skip
NAMES = st.sampled_from([*sorted(LAYER_WORDS | ROPE_WORDS), *OTHERS])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)
TYPES = sorted({case["config"].get("model_type", "") for case in CASES.values()})


@st.composite
def lies(draw):
    """Return a configuration of a model with some entries changed, left out or added."""
    config = copy.deepcopy(CASES[draw(st.sampled_from(sorted(CASES)))]["config"])
    part = config["text_config"] if "text_config" in config and draw(st.booleans()) else config
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(part)) if part and draw(st.booleans()) else NAMES)
        part[name] = draw(VALUES)
    if draw(st.booleans()):
        part.pop(draw(st.sampled_from(sorted(part))))
    if draw(st.integers(0, 9)) == 0:
        part["model_type"] = draw(st.sampled_from(TYPES))
    return config


@settings(max_examples=budget(1500), deadline=None, derandomize=True)
@given(lies())
def test_a_lie_is_read_or_refused_by_name(config):
    """A believed configuration has sizes that are no nonsense."""
    for read in (
        lambda: size(config, tokens=1024),
        lambda: Rope.from_config(config),
        lambda: read_latent_scale(config),
    ):
        begin = time.process_time()
        try:
            found = read()
        except KvkitError as error:
            found, message = None, str(error)
        else:
            message = ": expected "
        assert ": expected " in message
        if hasattr(found, "caches"):
            assert all(each.bytes >= 0 for each in found.caches)
        assert time.process_time() - begin < SECONDS


@pytest.mark.parametrize("value", [nested(5000), 10**5000, [10**5000]], ids="abc")
@pytest.mark.parametrize(
    "name", ["layer_types", "num_hidden_layers", "block_configs", "head_dim", "text_config"]
)
def test_what_cannot_be_printed_is_refused(name, value):
    config = CASES["Qwen3-Next-80B-A3B"]["config"] | {name: value}
    with pytest.raises(KvkitError, match=": expected"):
        read_layers(config)


@pytest.mark.parametrize(
    "value", [nested(5000), 10**5000, {"rope_type": nested(5000)}, {"rope_theta": 10**5000}], ids="abcd"
)
def test_a_rope_that_cannot_be_printed_is_refused(value):
    with pytest.raises(KvkitError, match="expected"):
        Rope.from_config(CASES["Qwen3-Next-80B-A3B"]["config"] | {"rope_parameters": value})


@pytest.mark.parametrize(
    "text", ["[" * 5000, '{"a":' * 5000, "{", "[]", "7", '{"num_hidden_layers": 1e400}', "\xff", ""]
)
def test_files_that_are_no_configuration(text, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(KvkitError):
        size(tmp_path)


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(KvkitError, match=r"config\.json: expected a regular file"):
        size(tmp_path / "config.json")
    with pytest.raises(KvkitError, match=r"config\.json: expected a regular file"):
        size(tmp_path)


@pytest.mark.parametrize("model", [None, 7, [1], b"x", object()])
def test_what_is_no_configuration_is_refused(model):
    with pytest.raises(KvkitError, match="config: expected"):
        read_layers(model)


KINDS = {0: "B", 4: "I", 5: "i", 6: "f", 7: "?", 8: "", 9: "", 10: "Q", 12: "d", 77: "B"}


FIELDS = (
    "block_count", "attention.head_count", "attention.head_count_kv", "embedding_length",
    "attention.key_length", "attention.sliding_window", "attention.sliding_window_pattern",
    "full_attention_interval", "ssm.state_size", "ssm.conv_kernel", "ssm.inner_size",
    "attention.recurrent_layers", "nextn_predict_layers", "rope.freq_base", "attention.key_length_mla",
    "attention.compress_ratios", "rope.scaling.type", "shortconv.l_cache",
)  # fmt: skip
ARCHITECTURES = "llama", "qwen3next", "gemma3", "nemotron_h", "deepseek4", "mamba", "x"
HEAD = {"block_count": 4, "attention.head_count": 8, "embedding_length": 512}


@st.composite
def headers(draw):
    """Return the bytes of a GGUF file, of fields with any names, types and lengths."""
    architecture = draw(st.sampled_from(ARCHITECTURES))
    fields = [text("general.architecture") + struct.pack("<I", 8) + text(architecture)]
    for name, value in HEAD.items():
        if draw(st.booleans()):
            fields.append(text(f"{architecture}.{name}") + struct.pack("<II", 4, value))
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(sorted(KINDS)))
        fields.append(text(f"{architecture}.{draw(st.sampled_from(FIELDS))}") + struct.pack("<I", kind))
        fields.append(draw(value_bytes(kind)))
    count = draw(st.sampled_from([len(fields), 1, 2**14, 2**62]))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, count) + b"".join(fields) + draw(st.binary(max_size=9))


def value_bytes(kind):
    """Return the bytes of a value of some type: of a number, or any."""
    if kind in (8, 9, 77):
        return st.binary(max_size=40)
    numbers = st.floats(width=32) if KINDS[kind] in "fd" else st.integers(0, 99)
    return numbers.map(lambda value: struct.pack(f"<{KINDS[kind]}", value))


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_no_configuration(tmp_path, kind):
    """The line in the message reads the file."""
    config = {"num_hidden_layers": 2, "head_dim": 8, "rope_theta": 10000.0}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(KvkitError, match=r"^config: expected a configuration.* \(json.load") as error:
        Rope.from_config(kind(path))
    line = str(error.value).partition(" (")[2].partition(" reads a file")[0]
    assert Rope.from_config(eval(line)) == Rope.from_config(config)


def text(value):
    """Return a text as GGUF files have it."""
    return struct.pack("<Q", len(value)) + value.encode()


@settings(max_examples=budget(400), deadline=None, derandomize=True)
@given(headers())
def test_a_lying_header_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("header") / "a.gguf"
    path.write_bytes(content)
    begin = time.process_time()
    try:
        entries = read_entries(path)
        read_layers(entries)
        Rope.from_config(entries)
    except KvkitError:
        pass
    assert time.process_time() - begin < SECONDS


def test_an_array_of_arrays_is_refused(tmp_path):
    inner = struct.pack("<IQ", 9, 1)
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 9) + inner * 5000
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(KvkitError, match=r"a\.gguf: neither .* type 9"):
        size(tmp_path / "a.gguf")
