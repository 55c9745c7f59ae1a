"""What a study writes for others: bits of a lossless coder, scales for engines, tables, pictures."""

import ast
import csv
import importlib.util
import io
import json
import re
import types
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from click.testing import CliRunner

from kvkit import files, formats, tools
from kvkit.tools.studies import plots
from kvkit.tools.studies.words import as_csv, as_latex
from kvkit_cli.main import main

pytestmark = pytest.mark.cpu

LAYERS, TOKENS, HEADS, DIM = 2, 160, 3, 64


@pytest.fixture
def arrays(rng):
    """Return keys and values whose channels differ in size, and queries of the last tokens."""
    sizes = rng.uniform(0.2, 4, (LAYERS, 1, HEADS, DIM))
    key, value = (sizes * rng.standard_normal((2, LAYERS, TOKENS, HEADS, DIM))).astype(np.float16)
    query = rng.standard_normal((LAYERS, 1, 8, 2 * HEADS, DIM)).astype(np.float16)
    return {"key": key, "value": value, "query": query}


def entropy(symbols):
    """Return the bits of symbols by their own frequencies, with the correction for few of them."""
    counts = np.unique(symbols, return_counts=True)[1]
    p = counts / counts.sum()
    bits = -(p * np.log2(p)).sum() * counts.sum() + (len(counts) - 1) / 2 / np.log(2)
    return min(bits, counts.sum() * np.log2(len(counts)))


def test_bits_of_a_lossless_coder_are_those_of_plain_numpy(arrays):
    one, stored = tools.study(arrays, "int4:g32,e4m3").summary
    expected, elements = np.zeros((2, 2)), 2 * arrays["key"].size
    for side in ("key", "value"):
        for x in arrays[side].astype(np.float32):
            encoded = formats.encode(x, "int4:g32:float16")
            codes = np.stack((encoded["codes"].view(np.uint8) & 15, encoded["codes"].view(np.uint8) >> 4), -1)
            scales = encoded["scale"].view(np.uint8).reshape(-1, 2)
            of_scales = entropy(scales[:, 0]) + entropy(scales[:, 1])
            by_channel = sum(entropy(each) for each in codes.reshape(TOKENS, -1).T)
            expected[0] += [entropy(codes) + of_scales, by_channel + of_scales]
            floats = formats.encode(x, "e4m3")["codes"].view(np.uint8)
            expected[1] += entropy(floats), sum(entropy(each) for each in floats.reshape(TOKENS, -1).T)
    for found, bits in zip((one, stored), expected / elements, strict=True):
        assert (found.entropy, found.channel_entropy) == pytest.approx(tuple(bits), rel=1e-6)
    assert one.channel_entropy < one.entropy < one.bits
    [policy, *_] = tools.study(arrays, evict="knorm@0.5").summary
    assert policy.entropy is None


def test_blocks_have_no_more_entropy_than_bits(arrays):
    for one in tools.study(arrays, "q8_0,q4_0,q5_0,q5_1,q4_1,nvfp4,mxfp4,kivi4,float16").summary:
        assert 0 < one.channel_entropy <= one.entropy * 1.01 <= one.bits * 1.02, one.scheme


def of_vllm(path, name, **names):
    """Return a function or class of vLLM's source, compiled alone; None where vLLM is not installed.

    vLLM itself imports only with all that its server needs.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    source = Path(found.submodule_search_locations[0], path)
    [own] = [each for each in ast.walk(ast.parse(source.read_text())) if getattr(each, "name", "") == name]
    exec(compile(ast.Module([own], []), str(source), "exec"), names)
    return names[name]


def vllm_remap():
    """Return vLLM's function that renames scales of a checkpoint; None where vLLM is not installed."""
    logger = types.SimpleNamespace(warning_once=print, info_once=print, warning=print)
    path = "model_executor/model_loader/weight_utils.py"
    return of_vllm(path, "maybe_remap_kv_scale_name", logger=logger, re=re)


@pytest.mark.peers
@pytest.mark.parametrize("per", ["tensor", "layer", "head"])
def test_vllms_loaders_take_the_scales(arrays, tmp_path, per):
    """Its parameter of one scale, and the loader of scales by head, hold the numbers of the file."""
    torch = pytest.importorskip("torch")
    if (remap := vllm_remap()) is None:
        pytest.skip("vLLM is not installed")
    heads = arrays["key"].shape[2]
    layer = types.SimpleNamespace(num_kv_heads=heads)
    quantization = "model_executor/layers/quantization"
    load_heads = of_vllm(
        f"{quantization}/compressed_tensors/compressed_tensors.py", "_tp_aware_loader", torch=torch,
        layer=layer, Literal=Literal, get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
        self=types.SimpleNamespace(quant_config=types.SimpleNamespace(total_num_kv_heads=heads)),
    )  # fmt: skip
    one = of_vllm(f"{quantization}/kv_cache.py", "KVCacheScaleParameter", torch=torch)
    tools.write_scales(arrays, tmp_path / "scales.safetensors", per)
    stored = files.read(tmp_path / "scales.safetensors").arrays
    for name, scale in stored.items():
        side = name[-len("k_scale")]
        loaded = name.replace("self_attn.", "self_attn.attn.")
        assert remap(name, {loaded: None}) == loaded
        if per == "head":
            parameter = torch.nn.Parameter(torch.ones(heads), requires_grad=False)
            load_heads(parameter, torch.tensor(scale), side, "scale")
        else:
            parameter = one()
            one.weight_loader(parameter, torch.tensor(scale))
        np.testing.assert_array_equal(parameter.numpy().reshape(-1), scale)
    assert len(stored) == 2 * len(arrays["key"])


@pytest.mark.parametrize("per", ["tensor", "head", "layer"])
def test_scales_are_those_that_vllm_loads(arrays, tmp_path, per):
    """float32 [1] or [key heads] as model.layers.N.self_attn.{k,v}_scale, and the entry of config.json."""
    numbered = arrays | {"layers": np.array([3, 7])}
    path = tmp_path / "scales.safetensors"
    tools.write_scales(numbered, path, per)
    found, remap = files.read(path), vllm_remap()
    names = [f"model.layers.{number}.self_attn.{side}_scale" for number in (3, 7) for side in "kv"]
    assert sorted(found.arrays) == sorted(names)
    for i, number in enumerate((3, 7)):
        largest = {
            s: np.abs(arrays[side][i].astype(float)).max((0, 2))
            for s, side in zip("kv", ("key", "value"), strict=True)
        }
        for side in "kv":
            name = f"model.layers.{number}.self_attn.{side}_scale"
            own = largest[side] if per == "head" else largest[side].max(keepdims=True)
            own = np.maximum(largest["k"].max(), largest["v"].max())[None] if per == "layer" else own
            np.testing.assert_array_equal(found.arrays[name], (own / 448).astype(np.float32))
            assert found.arrays[name].dtype == np.float32
            low, high = found.metadata["range"][name]
            assert max(-np.min(low), np.max(high)) == largest[side].max()
            if remap is not None:
                loaded = f"model.layers.{number}.self_attn.attn.{side}_scale"
                assert remap(name, {loaded: None}) == loaded
    scheme = found.metadata["quantization_config"]["kv_cache_scheme"]
    strategy = "attn_head" if per == "head" else "tensor"
    assert scheme == {
        "num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False,
    }  # fmt: skip
    assert found.metadata["tokens"] == TOKENS


def test_the_verb_writes_scales(arrays, tmp_path):
    path = tmp_path / "scales.safetensors"
    np.savez(tmp_path / "kv.npz", **arrays)
    done = CliRunner().invoke(
        main, ["study", str(tmp_path / "kv.npz"), "--write-scales", str(path), "--per", "head"]
    )
    assert done.exit_code == 0, done.output
    assert files.read(path).arrays["model.layers.1.self_attn.v_scale"].shape == (HEADS,)


def test_tables_for_papers(arrays):
    found = tools.study(arrays, "int4:g32,q8_0")
    lines = list(csv.DictReader(io.StringIO(as_csv(found))))
    for line, one in zip(lines, found.summary, strict=True):
        assert (line["scheme"], float(line["output_error"])) == (one.scheme, one.output_error)
    latex = as_latex(found)
    assert r"q8\_0 & 8.50" in latex
    assert latex.count(r"\\") == 3
    assert "2 layers, 160 tokens" in latex


def test_a_terminal_has_the_recommendation_first(arrays):
    lines = str(tools.study(arrays, "int4:g32,q8_0,int8:g8,fp8,kivi4", threshold=0.02)).splitlines()
    assert lines[2].startswith("the smallest that keeps the attention output of every head within an error")
    assert lines[3].startswith("  ")
    assert next(i for i, line in enumerate(lines) if line.startswith("scheme ")) <= 13


@pytest.mark.slow
def test_pictures_of_policies_and_of_heads(arrays, tmp_path):
    evict = "int4:g32,int8:g32,knorm@0.5,snapkv@0.5,knorm@0.5+int4:g32,snapkv@0.25+int8:g32"
    names = {path.name for path in tools.study(arrays, evict=evict, judge=4, threshold=5).save(tmp_path)}
    for name in ("eviction", "scorers", "bits_or_tokens", "heads", "channels"):
        assert {f"{name}.svg", f"{name}.png"} <= names
        assert (tmp_path / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "report.html").read_text().count("<svg") == 10
    assert json.loads((tmp_path / "study.json").read_text())["budget"]


@pytest.mark.parametrize("threshold", [0.012, 0.02, 0.2])
def test_the_advice_is_what_the_measured_table_says(arrays, tmp_path, threshold, monkeypatch):
    """The first line names the smallest scheme of the printed table whose worst head is within the limit."""
    monkeypatch.setattr(plots, "pictures_and_prints", lambda study: ({}, {}))  # which takes seconds
    np.savez(tmp_path / "kv.npz", **arrays)
    command = [
        "study",
        str(tmp_path / "kv.npz"),
        "--threshold",
        str(threshold),
        "-o",
        str(tmp_path / "report"),
    ]
    done = CliRunner().invoke(main, [*command, "--schemes", "int4:g32,q8_0,int8:g8,fp8,kivi4"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("scheme "))
    names = re.split(r"  +", lines[heading].strip())
    rows = [
        dict(zip(names, re.split(r"  +", line.strip()), strict=False)) for line in lines[heading + 1 :][:5]
    ]
    within = [row for row in rows if float(row["worst output"]) <= threshold]
    best = min(within, key=lambda row: float(row["bits"]))
    advice = f"{best['scheme']}, {best['bits']} bits a number, {best['bytes a token']} bytes a token"
    assert advice in lines[2]
    with (tmp_path / "report" / "table.csv").open() as file:
        [stored] = [line for line in csv.DictReader(file) if line["scheme"] == best["scheme"]]
    assert float(stored["worst_output"]) <= threshold
    front = [line.strip().partition(": ")[0] for line in lines[3:heading] if line.startswith("  ")]
    for row in rows:  # each scheme beside the front is beaten by one of it in both
        by = [each for each in rows if each["scheme"] in front]
        assert any(
            float(each["bits"]) <= float(row["bits"])
            and float(each["worst output"]) <= float(row["worst output"])
            for each in by
        )
