"""CompressedLayer (DeepSeek V4): the specification's layers, prompts in any parts, drafts, files, codes."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import v4_scenes

import kvkit
from kvkit import KvkitError, reference
from kvkit.cache import Cache, CompressedLayer, load
from kvkit.rope import Rope

LAYERS = {kind: v4_scenes.Layer(kind) for kind in v4_scenes.RATIOS}
kinds = pytest.mark.parametrize("kind", LAYERS)


def made(kind, **options):
    """Return an empty layer of a kind, with its weights."""
    layer = LAYERS[kind]
    index = {"index_dim": v4_scenes.INDEX_DIM, "index_topk": v4_scenes.TOP} if kind == "csa" else {}
    cached = CompressedLayer(
        v4_scenes.DIM, v4_scenes.ROPE, v4_scenes.WINDOW, layer.ratio, **index, **options
    )  # fmt: skip
    return with_weights(cached, kind)


def with_weights(cached, kind):
    layer = LAYERS[kind]
    cached.rope = layer.rope
    if kind != "window":
        pairs = [(layer.ape, layer.c_norm)] + ([(layer.iape, layer.i_norm)] if kind == "csa" else [])
        pairs = [tuple(x.astype(np.float32) for x in pair) for pair in pairs]
        cached.set_weights(*pairs)
    return cached


def step(cached, kind, begin, end, dtype=np.float32, batch=1, change=0.0):
    """Append tokens begin..end and attend; return outputs [q, H, D], rotated back, and lse."""
    inputs = LAYERS[kind].inputs(v4_scenes.X + change).part(begin, end, dtype)

    def of_all(pair):
        return None if pair is None else tuple(np.repeat(x[None], batch, 0) for x in pair)

    row, query = (np.repeat(x[None], batch, 0) for x in (inputs.row[None], inputs.q.swapaxes(0, 1)))
    more = {"indexer": of_all(inputs.indexer)} if kind == "csa" else {}
    cached.update(row, of_all(inputs.compressor), **more)
    sinks = LAYERS[kind].sinks.astype(np.float32)
    output, lse = cached.attend(query, index=of_all(inputs.index), sinks=sinks, return_lse=True)
    for each in output[1:]:
        np.testing.assert_array_equal(each, output[0])
    back = kvkit.rope_back(output[0].swapaxes(0, 1), np.arange(begin, end), LAYERS[kind].rope)
    return back, lse[0].T


def run(cached, kind, cuts, end=v4_scenes.TOKENS, begin=0, **options):
    parts = [step(cached, kind, a, b, **options) for a, b in itertools.pairwise((begin, *cuts, end))]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def rows_of(cached):
    """Return what the layer stores, as arrays."""
    return [x for x in (cached.window_rows, cached.rows, cached.index_keys, *cached.states) if x is not None]


@pytest.mark.parametrize("cuts", [(), (10, 17), (1, 2, 3, 8), tuple(range(1, 21))], ids=len)
@kinds
def test_layers_of_the_specification(kind, cuts):
    cached = made(kind)
    out, lse = run(cached, kind, cuts)
    v4_scenes.check_sums(kind, out, lse, cached.rows, cached.index_keys, 2e-5)
    if kind == "csa":
        np.testing.assert_allclose(out[20], v4_scenes.CSA_20, atol=2e-5)
    whole = made(kind)
    out_of_one, _ = run(whole, kind, ())
    np.testing.assert_allclose(out, out_of_one, atol=2e-5)
    for one, other in zip(rows_of(cached), rows_of(whole), strict=True):
        np.testing.assert_array_equal(one, other)
    assert cached.nbytes == whole.nbytes
    assert cached.get_seq_length() == 21
    assert cached.positions.tolist() == [16, 17, 18, 19, 20]


@kinds
def test_against_the_reference(kind):
    """Of 300 random tokens in chunks; the float64 reference gets the stored rows."""
    rng, layer, cached = np.random.default_rng(0), LAYERS[kind], made(kind)
    dim, width = v4_scenes.DIM, v4_scenes.DIM * (2 if kind == "csa" else 1)
    row, q = rng.standard_normal((300, dim), np.float32), rng.standard_normal((300, 2, dim), np.float32)
    kv, gate, ikv, igate = (rng.standard_normal((300, n), np.float32) for n in (width, width, 16, 16))
    index = rng.standard_normal((300, 2, 8), np.float32), rng.standard_normal((300, 2), np.float32)
    outputs = []
    for a, b in itertools.pairwise((0, 100, 101, 228, 229, 300)):
        more = {"indexer": (ikv[None, a:b], igate[None, a:b])} if kind == "csa" else {}
        cached.update(row[None, None, a:b], (kv[None, a:b], gate[None, a:b]) if layer.ratio else None, **more)
        chosen = tuple(x[None, a:b] for x in index) if kind == "csa" else None
        outputs.append(cached.attend(q[None, a:b].swapaxes(1, 2), index=chosen)[0].swapaxes(0, 1))
    more = {"ratio": layer.ratio, "window": v4_scenes.WINDOW}
    if kind == "csa":
        more |= {"index": index, "index_keys": cached.index_keys[0], "index_topk": v4_scenes.TOP}
    rows = np.zeros((0, dim)) if kind == "window" else cached.rows[0]
    wanted, _ = reference.compressed_attention(q, row, rows, range(300), **more)
    np.testing.assert_allclose(np.concatenate(outputs), wanted, atol=2e-5)


@kinds
def test_speculative_decoding(kind):
    """Steps of one true token and 3 drafts, of which some are true."""
    cached, whole, rng = made(kind, drafts=3), made(kind), np.random.default_rng(0)
    wanted, _ = run(whole, kind, ())
    at = 0
    while at < 21:
        true = min(int(rng.integers(1, 5)), 21 - at)
        inputs, end = LAYERS[kind].inputs(), min(at + 4, 21)
        x = v4_scenes.X.copy()
        x[at + true :] += 1
        parts = LAYERS[kind].inputs(x).part(at, end, np.float32)
        more = {"indexer": tuple(y[None] for y in parts.indexer)} if kind == "csa" else {}
        pair = None if parts.compressor is None else tuple(y[None] for y in parts.compressor)
        cached.update(parts.row[None, None], pair, **more)
        index = None if parts.index is None else tuple(y[None] for y in parts.index)
        sinks = LAYERS[kind].sinks.astype(np.float32)
        out = cached.attend(parts.q.swapaxes(0, 1)[None], index=index, sinks=sinks)[0].swapaxes(0, 1)
        got = kvkit.rope_back(out[:true], np.arange(at, at + true), LAYERS[kind].rope)
        np.testing.assert_allclose(got, wanted[at : at + true], atol=2e-5)
        if at + true < end:
            cached.crop(at + true)
        at += true
        assert inputs.row.shape[0] == 21
    for one, other in zip(rows_of(cached)[1:], rows_of(whole)[1:], strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_of_other_dtypes_are_refused_at_once():
    layer = CompressedLayer(8, 4, ratio=4)
    wanted = r"^compressor\[1\]: expected dtype float32 or float16 or bfloat16, got float64"
    with pytest.raises(KvkitError, match=wanted):
        layer.set_weights((np.ones((4, 8), np.float32), np.ones(8)))
    assert layer.weights == ()


@kinds
def test_recorded_past(kind):
    cached, other = made(kind), made(kind)
    run(cached, kind, (), 10)
    cached.activate_past_recording()
    run(cached, kind, range(11, 21), 21, begin=10)
    cached.crop(10)
    cached._stop_past_recording()
    out, _ = run(cached, kind, (13,), begin=10)
    wanted, _ = run(other, kind, ())
    np.testing.assert_allclose(out, wanted[10:], atol=2e-5)


@kinds
def test_crop_says_what_can_stay(kind):
    cached = made(kind, drafts=2)
    run(cached, kind, (5,))
    assert "expected 0 or at least 19 tokens to stay (drafts=2" in cached.can("crop", 18)
    assert "moves no tokens (compressed rows hold tokens of a window)" in cached.can("shift", 3, None, 2)
    assert cached.can("remove", 20) is None
    assert "moves no tokens" in cached.can("remove", 3, 5)  # which have left the window
    assert "moves no tokens" in cached.can("retain", range(15, 21))
    cached.crop(19)
    assert cached.can("crop", 18) is not None
    cached.crop(-19)
    assert cached.get_seq_length() == 0
    out, _ = run(cached, kind, (5,))
    np.testing.assert_allclose(out, run(made(kind), kind, ())[0], atol=2e-5)


@kinds
def test_files_and_batches(kind, tmp_path):
    """A loaded cache goes on as the saved one; batches are reordered with all arrays."""
    cache = Cache([made(kind, drafts=2)])
    run(cache.layers[0], kind, (6, 9), 14, batch=2)
    cache.save(tmp_path / "a.npz")
    loaded = load(tmp_path / "a.npz")
    for one, other in zip(rows_of(cache.layers[0]), rows_of(loaded.layers[0]), strict=True):
        np.testing.assert_array_equal(one, other)
    cache.reorder([1, 0, 1])
    wanted = run(made(kind), kind, ())[0][14:]
    for each, batch in ((cache, 3), (loaded, 2)):
        layer = each.layers[0]
        layer.crop(-1)
        out, _ = run(layer, kind, (15, 16), begin=13, batch=batch)
        np.testing.assert_allclose(out[1:], wanted, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@kinds
def test_other_floats(kind, dtype):
    cached, tolerance = made(kind), 0.05 if dtype is np.float16 else 0.4
    out, _ = run(cached, kind, (9,), dtype=dtype)
    assert cached.window_rows.dtype == dtype
    wanted, _ = run(made(kind), kind, ())
    if kind != "csa":  # whose choice of rows may differ
        assert np.abs(out.astype(np.float64) - wanted).max() < tolerance


def test_rows_of_584_bytes():
    """Rows are coded once: those of tokens one by one are those of a prompt, and the vectors' bytes."""
    rng, rope = np.random.default_rng(0), Rope(64, 16e4, interleaved=True)
    row, kv, gate = (rng.standard_normal((1, 150, n), np.float32) for n in (512, 1024, 1024))
    ikv, igate = (rng.standard_normal((1, 150, 256), np.float32) for _ in range(2))
    weights = (rng.standard_normal((4, 1024), np.float32), np.ones(512, np.float32))
    index_weights = (rng.standard_normal((4, 256), np.float32), np.ones(128, np.float32))
    layers = [
        CompressedLayer(ratio=4, index_dim=128, index_topk=8, format=f) for f in ("ds_v4", "ds_v4", None)
    ]
    for layer, cuts in zip(layers, [(0, 150), range(151), (0, 150)], strict=True):
        layer.set_weights(weights, index_weights, rope=rope)
        for a, b in itertools.pairwise(cuts):
            layer.update(row[:, None, a:b], (kv[:, a:b], gate[:, a:b]), indexer=(ikv[:, a:b], igate[:, a:b]))
    one, two, plain = layers
    for got, again in zip(rows_of(one), rows_of(two), strict=True):
        np.testing.assert_array_equal(got, again)
    coded = kvkit.formats.encode(plain.rows.reshape(-1, 512), "ds_v4")["codes"]
    np.testing.assert_array_equal(one._arrays()["rows"].reshape(-1, 584), coded)
    np.testing.assert_allclose(one.index_keys, plain.index_keys, atol=np.abs(plain.index_keys).max() / 16)
    assert one.nbytes == (127 + 37) * 584 + 37 * 132 + 65_536 + 16_384
    query = rng.standard_normal((1, 64, 1, 512), np.float32)
    index = rng.standard_normal((1, 1, 64, 128), np.float32), rng.standard_normal((1, 1, 64), np.float32)
    window = np.zeros((150, 512), np.float32)
    window[22:] = one.store.window.read(np.arange(22, 150) % one.store.window.rows)[0]
    more = {"index": [x[0] for x in index], "index_keys": one.index_keys[0], "index_topk": 8}
    q = query[0].swapaxes(0, 1)
    wanted, _ = reference.compressed_attention(q, window, one.rows[0], [149], ratio=4, **more)
    np.testing.assert_allclose(one.attend(query, index=index)[0, :, 0], wanted[0], atol=2e-5)


def test_refusals():
    layer = CompressedLayer(8, 4, 6, 4, 8, 2)
    row, pair = np.zeros((1, 1, 2, 8), np.float32), (np.zeros((1, 2, 16), np.float32),) * 2
    wrong = [
        ((row,), {}), ((row, pair), {}), ((row[..., :7], pair), {"indexer": pair}),
        ((row, pair[:1]), {"indexer": pair}), ((row, (pair[0], pair[0][:, :1])), {"indexer": pair}),
        ((row, pair, [5, 6]), {"indexer": pair}),
    ]  # fmt: skip
    for arguments, options in wrong:
        with pytest.raises(KvkitError):
            layer.update(*arguments, **options)
    assert layer.get_seq_length() == 0
    with pytest.raises(KvkitError, match="call set_weights first"):
        layer.update(row, pair, indexer=pair)
    with_weights(layer, "csa")
    layer.update(row, pair, indexer=pair)
    query = np.zeros((1, 2, 2, 8), np.float32)
    with pytest.raises(KvkitError, match="index: expected a pair"):
        layer.attend(query)
    with pytest.raises(KvkitError, match="attn_mask: expected None"):
        layer.attend(query, np.ones((1, 2), bool))
