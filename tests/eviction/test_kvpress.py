"""Scorers, budgets and selection beside kvpress, on random tensors, where the definitions agree.

kvpress 0.5 asks for transformers < 5.3, so `make test-peers` gives it an environment of its own.
"""

import types

import numpy as np
import pytest

from kvkit import Rope, eviction
from kvkit.eviction.selection import Kept

pytestmark = pytest.mark.peers
HEADS, GROUP, TOKENS, DIM, WIDTH = 2, 3, 150, 16, 24
ROPE = Rope(DIM)
SCORERS = [  # kvkit's name and options; kvpress's class and options
    ("knorm", {}, "KnormPress", {}),
    ("keydiff", {}, "KeyDiffPress", {}),
    ("snapkv", {"window": 16, "kernel": 5}, "SnapKVPress", {"window_size": 16, "kernel_size": 5}),
    ("tova", {}, "TOVAPress", {}),
    ("observed", {}, "ObservedAttentionPress", {}),
    ("finch", {"window": 12}, "FinchPress", {"window_size": 12}),
    ("streaming", {"budget": 75}, "StreamingLLMPress", {"compression_ratio": 0.5}),
    *(("lagkv", {"lag": 32, "cross": cross}, "LagKVPress", {"lag_size": 32, "cross_scoring": cross})
      for cross in (False, True)),
    ("lagkv", {}, "LagKVPress", {}),
    *(("cur", {"leverage": kind}, "CURPress", {"leverage_type": kind})
      for kind in ("kv_product", "kv_avg", "key", "value")),
    ("non_causal", {"chunk": 50}, "NonCausalAttnPress", {"chunk_size": 50}),
    *(("expected", {"future": 40, "covariance": cov, "vnorm": norm, "eps": 0.5 * norm},
       "ExpectedAttentionPress",
       {"n_future_positions": 40, "use_covariance": cov, "use_vnorm": norm, "epsilon": 0.5 * norm})
      for cov in (False, True) for norm in (False, True)),
]  # fmt: skip


@pytest.fixture
def scene(rng, monkeypatch):
    """kvpress, tensors of a layer, and a stand-in for the layer whose queries are given."""
    kvpress, torch = pytest.importorskip("kvpress"), pytest.importorskip("torch")
    shapes = HEADS * GROUP, HEADS, HEADS
    plain, keys, values = (rng.standard_normal((1, h, TOKENS, DIM)).astype(np.float32) for h in shapes)
    positions = np.arange(TOKENS)
    angles = np.tile(positions[:, None] * ROPE.frequencies, 2).astype(np.float32)
    embeddings = torch.tensor(np.cos(angles))[None], torch.tensor(np.sin(angles))[None]
    for name in ("non_causal_attention_press", "expected_attention_press"):
        of_last = lambda module, states: torch.tensor(plain[:, :, -states.shape[1] :])  # noqa: E731
        monkeypatch.setattr(f"kvpress.presses.{name}.get_prerope_query_states", of_last)
    config = types.SimpleNamespace(
        num_attention_heads=HEADS * GROUP, num_key_value_heads=HEADS, head_dim=DIM, hidden_size=WIDTH,
        num_hidden_layers=4, _attn_implementation="sdpa",
    )  # fmt: skip
    output = torch.tensor(rng.standard_normal((WIDTH, HEADS * GROUP * DIM)).astype(np.float32))
    module = types.SimpleNamespace(
        config=config, head_dim=DIM, num_key_value_groups=GROUP, layer_idx=0,
        o_proj=types.SimpleNamespace(weight=output), rotary_emb=lambda x, at: rotary(torch, at),
    )  # fmt: skip
    queries = ROPE.rotate(plain, positions)
    logits = np.einsum("bhgqd,bhkd->bhgqk", queries.reshape(1, HEADS, GROUP, TOKENS, DIM), keys) / DIM**0.5
    hidden = ~np.tri(TOKENS, dtype=bool)
    weights = torch.softmax(torch.tensor(np.where(hidden, -np.inf, logits)), -1).flatten(1, 2).float()
    theirs = [torch.tensor(keys), torch.tensor(values), weights, {"position_embeddings": embeddings}]
    return types.SimpleNamespace(
        kvpress=kvpress, module=module, keys=keys, values=values, queries=queries, plain=plain,
        theirs=[module, torch.zeros(1, TOKENS, WIDTH), *theirs], output=output.numpy(),
    )  # fmt: skip


def rotary(torch, positions):
    angles = np.tile(positions.numpy()[..., None] * ROPE.frequencies, 2).astype(np.float32)
    return torch.tensor(np.cos(angles)), torch.tensor(np.sin(angles))


@pytest.mark.parametrize(("name", "options", "press", "arguments"), SCORERS)
def test_scores(scene, name, options, press, arguments):
    scorer = getattr(scene.kvpress, press)()
    for argument, value in arguments.items():
        setattr(scorer, argument, value)
    theirs = scorer.score(*scene.theirs).numpy()
    statistics = {"rope": ROPE} if name == "expected" else {}
    queries = scene.plain if statistics else scene.queries
    ours = eviction.scores(name, scene.keys, scene.values, queries=queries, **options, **statistics)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_a_learnt_filter_and_the_norm_of_outputs(scene, rng):
    filters = rng.standard_normal((HEADS, DIM)).astype(np.float32)
    press = scene.kvpress.QFilterPress()
    press.q_filters = scene.theirs[2].new_tensor(filters[None])
    ours = eviction.scores("qfilter", scene.keys, filters=filters)
    np.testing.assert_allclose(ours, press.score(*scene.theirs).numpy(), rtol=2e-5, atol=2e-6)
    theirs = scene.kvpress.CriticalKVPress(scene.kvpress.KnormPress(0.5)).score(*scene.theirs).numpy()
    weights = scene.output.T.reshape(HEADS * GROUP, DIM, WIDTH)
    first = eviction.scores("knorm", scene.keys)
    ours = eviction.scores(
        "critical", scene.keys, scene.values, scores=first, output_weights=weights, keep=0.5
    )
    best = theirs == np.finfo(np.float32).max
    np.testing.assert_array_equal(np.isinf(ours), best)
    np.testing.assert_allclose(ours[~best], theirs[~best], rtol=2e-5)


def test_budgets_and_chunks(scene):
    press = scene.kvpress.AdaKVPress(scene.kvpress.KnormPress(0.6))
    press.compress(*scene.theirs)
    gone = np.zeros((HEADS, TOKENS), bool)
    gone[tuple(index.numpy() for index in scene.module.masked_key_indices[1:])] = True
    first = eviction.scores("knorm", scene.keys)
    kept = eviction.select(first, keep=0.4, budget="ada")
    assert isinstance(kept, Kept)
    for h in range(HEADS):
        rows = kept.rows[kept.starts[h] : kept.starts[h + 1]]
        np.testing.assert_array_equal(rows, np.flatnonzero(~gone[h]))
    press = scene.kvpress.ChunkKVPress(scene.kvpress.KnormPress(0.6), chunk_length=20)
    theirs, _ = press.compress(*scene.theirs[:4], None, scene.theirs[5])
    rows = eviction.chunks(first, 20, keep=0.4)
    np.testing.assert_array_equal(np.take_along_axis(scene.keys, rows[..., None], 2), theirs.numpy())
    for ratio, window in ((0.5, 64), (0.75, 64), (0.9, 512)):
        press = scene.kvpress.PyramidKVPress(compression_ratio=ratio, window_size=window)
        counts = []
        for layer in range(4):
            scene.module.layer_idx = layer
            counts.append(press.get_layer_budget(scene.module, 1000))
        keep = round(1 - ratio, 6)
        assert eviction.budgets("pyramid", layers=4, tokens=1000, keep=keep, window=window).tolist() == counts
