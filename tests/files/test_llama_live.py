"""States of llama.cpp, written and read by its library while the test runs."""

import os

import numpy as np
import pytest
from verbs import kvkit as run

from kvkit import tools
from kvkit.tools.readers import open_cache

pytestmark = pytest.mark.peers
TOKENS = np.arange(1, 21)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    pytest.importorskip("gguf")
    if not (folder := os.environ.get("KVKIT_LLAMA_CPP")):
        pytest.skip("KVKIT_LLAMA_CPP names no folder with llama.cpp's libraries")
    import llama_engine

    model = tmp_path_factory.mktemp("model") / "tiny.gguf"
    llama_engine.write_model(model, np.random.default_rng(0))
    found = llama_engine.Engine(folder, model)
    found.path = model
    return found


def test_a_cache_comes_back_to_llama(engine, tmp_path):
    """By way of vLLM's pages: its next logits are bit for bit those of the context that wrote it."""
    context, state = engine.context(), tmp_path / "whole.seq"
    engine.run(context, TOKENS)
    engine.save(context, state, TOKENS)
    pool, back = tmp_path / "pool.npz", tmp_path / "back.bin"
    how = "--to", "vllm-lbnhc", "--page-size", 4, "--model", engine.path
    assert run("convert", state, pool, *how)[0] == 0
    assert run("convert", pool, back, "--to", "llama-cpp")[0] == 0
    other = engine.context()
    engine.load(other, back)
    assert engine.run(other, [7]).tobytes() == engine.run(context, [7]).tobytes()


def test_tokens_are_removed_as_llama_removes_them(engine, tmp_path):
    context, state, edited, own = engine.context(), *(tmp_path / f"{name}.seq" for name in ("a", "b", "c"))
    engine.run(context, TOKENS)
    engine.save(context, state, TOKENS)
    assert run("edit", state, "--remove", "4:12", "-o", edited.with_suffix(".bin"))[0] == 0
    assert engine.memory_seq_rm(engine.get_memory(context), 0, 4, 12)
    kept = np.delete(TOKENS, slice(4, 12))
    engine.save(context, own, kept)
    assert edited.with_suffix(".bin").read_bytes() == own.read_bytes()
    other = engine.context()
    assert engine.load(other, edited.with_suffix(".bin")) == kept.tolist()
    logits = [engine.run(each, [7]) for each in (other, context)]  # cells lie elsewhere: sums differ a little
    np.testing.assert_allclose(*logits, atol=1e-3)


def test_codes_are_rotated(engine, tmp_path):
    """Turned back, those of the first layer are the floats to 8 bits: no coded cache changed its input."""
    found = {}
    for kind in "f16", "q8_0":
        context, path = engine.context(kind), tmp_path / f"{kind}.seq"
        engine.run(context, TOKENS)
        engine.save(context, path, TOKENS)
        rotation = "llama.cpp" if kind == "q8_0" else None
        layer = open_cache(path, sizes={"h": 2}, rotation=rotation).layer(0)
        found[kind] = [side.read(slice(None)).astype(np.float32) for side in (layer.key, layer.value)]
    for one, other in zip(*found.values(), strict=True):
        assert 0 < np.linalg.norm(one - other) < 0.01 * np.linalg.norm(one)
    assert any("Hadamard" in note for note in tools.inspect(path, sizes={"h": 2}).notes)
