"""Files that llama.cpp wrote: version 0.5.0 (November 2026), and b8390 (March 2026) those called old.

Its models are tiny and random. The zip has states of a context that removed positions 4 to 11 (`holes`) and
went on (`filled`), of a model with a window of 4, of an image of 2 rows and 3 columns, of sequences in
streams of their own and in one, of coded keys and values, of recurrent models; and the models' first bytes.
"""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvkit import files, tools
from kvkit.errors import KvkitError
from kvkit.files import llama_writing
from kvkit.tools.model_facts import with_model
from kvkit.tools.readers import open_cache
from kvkit.tools.source import CacheSource
from kvkit_cli.main import main

pytestmark = pytest.mark.cpu
ZIP = Path(__file__).with_name("llama.cpp.zip")
STATES = sorted(name for name in zipfile.ZipFile(ZIP).namelist() if not name.endswith(".gguf"))
HEADS = {"h": 2}
MODELS = {
    "sliding": "gemma2", "hybrid": "lfm2", "recurrent": "mamba", "image": "qwen2vl", "image-old": "qwen2vl",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama.cpp")
    shutil.unpack_archive(ZIP, folder)
    return folder


def model_of(folder, name):
    return folder / f"{MODELS.get(Path(name).stem, 'llama')}.gguf"


def rows(source, **options):
    """Keys and values of all layers, [2, layers, tokens, heads, content]."""
    found = open_cache(source, **options)
    layers = [found.layer(i) for i in range(found.count)]
    return np.array([[getattr(each, side).read(slice(None)) for each in layers] for side in ("key", "value")])


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_read_by_every_tool_and_comes_back(folder, tmp_path, name):
    """Written again it has the same bytes."""
    path, again = folder / name, tmp_path / "again.bin"
    llama_writing.write(again, files.read(path))
    assert again.read_bytes() == path.read_bytes()
    found = tools.inspect(path, stats=True)
    if name == "recurrent.seq":
        assert {"recurrent.0.0", "recurrent.1.1", "recurrent_cells.positions"} <= {
            x.name for x in found.arrays
        }
        assert any("recurrent.I.1 the layer's state" in note for note in found.notes)
        return
    assert not tools.check(path).found
    assert tools.diff(path, again).equal
    source = with_model(path, model_of(folder, name))
    assert not any("how many heads" in note for note in tools.inspect(source).notes)
    studied = tools.study(source, "fp8")
    assert studied.num_kv_heads == 2
    for changes in ({"format": "float32"}, {"to_layout": "llama-cpp", "page_size": "longest"}):
        target = tmp_path / "cache.npz"
        tools.convert(source, target, **changes)
        assert tools.study(target, "fp8").layers == studied.layers
        assert tools.inspect(target).notes == tools.inspect(source).notes


def test_rows_are_in_the_order_of_positions(folder):
    whole = rows(folder / "whole.seq", sizes=HEADS)
    kept = [*range(4), *range(12, 20)]
    assert np.array_equal(rows(folder / "holes.seq", sizes=HEADS), whole[:, :, kept])
    filled = CacheSource(folder / "filled.ses")
    assert filled.arrays["cache_cells.positions"].tolist() != sorted(filled.arrays["cache_cells.positions"])
    assert np.array_equal(rows(folder / "filled.ses", sizes=HEADS)[:, :, :12], whole[:, :, kept])
    assert filled.positions.tolist() == [*kept, 20, 21, 22]
    assert "positions 0:4, 12:23" in str(tools.inspect(folder / "filled.ses"))
    for options in ({"format": "bfloat16"}, {"to_layout": "hf", "page_size": 4}):
        done = tools.convert(folder / "holes.seq", None, sizes=HEADS, **options)
        assert done.arrays["positions"].tolist() == kept


def test_streams_and_shared_cells(folder):
    """Sequences with a stream each, cells of two sequences in one."""
    one = CacheSource(folder / "streams.ses", sizes=HEADS)
    assert one.arrays["cache_cells.stream"].tolist() == [1] * 5 + [2] * 8
    assert open_cache(one).layer(0).starts == [0, 5, 13]
    alone = rows(folder / "stream1.seq", sizes=HEADS)
    for name in ("streams.ses", "streams-trans.ses"):
        found = rows(folder / name, sizes=HEADS)
        np.testing.assert_allclose(found[:, :, :5], alone, atol=2e-2)
    assert tools.inspect(folder / "shared.ses").use.lengths == [6, 6]
    shared = rows(folder / "shared.ses", sizes=HEADS)
    assert np.array_equal(shared[:, :, :4], shared[:, :, 6:10])


@pytest.mark.parametrize(("name", "window"), [("sliding.seq", 4), ("sliding.ses", 12)])
def test_both_caches_of_a_model_with_a_window(folder, tmp_path, name, window):
    path, model = folder / name, folder / "gemma2.gguf"
    source = with_model(path, model)
    assert open_cache(path, sizes=HEADS).layer(2).name == "sliding layer 1"
    assert [open_cache(source).layer(i).name for i in range(3)] == ["layer 1", "layer 0", "layer 2"]
    assert [open_cache(source).layer(i).key.tokens for i in range(3)] == [12, window, window]
    found = tools.inspect(source)
    assert (found.sizes["n"], found.sliding.sizes["n"], found.sliding.sizes["h"]) == (12, window, 2)
    assert found.sliding.use.positions == (["8:12"] if window == 4 else None)
    done = tools.convert(source, tmp_path / "both.npz", to_layout="hf", page_size="longest")
    assert [done.arrays[name][0][0].shape[2] for name in ("cache", "sliding")] == [12, window]
    assert str(done).endswith(f"with a window: l 2, b 1, n {window}, h 2, c 32): {3 + window // 2}.0 KiB")
    for layers, count in (("1", 12), ("0,2", window), ("0::2", window)):
        some = tools.convert(source, None, to_layout="hf", layers=layers)
        assert some.description.sizes["n"] == count
        assert "sliding" not in some.arrays
    for i in range(3):
        one, other = (open_cache(each).layer(i) for each in (source, tmp_path / "both.npz"))
        assert one.name == other.name
        assert np.array_equal(one.value.read(slice(None)), other.value.read(slice(None)))
    assert not tools.diff(path, tmp_path / "both.npz", sizes=HEADS).arrays


def test_cells_of_an_image_share_a_position(folder):
    for name in ("image.seq", "image-old.seq"):
        found = CacheSource(folder / name, sizes=HEADS)
        assert found.arrays["cache_cells.x"].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
        assert found.arrays["cache_cells.y"].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7]
        assert ("cache_cells.token" in found.arrays) == (name == "image.seq")
        done = tools.convert(folder / name, None, format="float32", sizes=HEADS)
        assert done.arrays["positions"].tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7]
        assert done.arrays["positions_x"].tolist() == found.arrays["cache_cells.x"].tolist()


RMS = {"q8_0-q4_0": (0.006, 0.09), "q5_0": (0.045, 0.045), "f16-q8_0": (0.0003, 0.006)}


@pytest.mark.parametrize("name", RMS)
def test_the_rotation_of_codes_is_undone(folder, tmp_path, name):
    """Of the first layer, whose input is that of floats; without it numbers are others, which a note says."""
    path, floats = folder / f"{name}.seq", rows(folder / "float.seq", sizes=HEADS)[:, 0]

    def errors(source, **options):
        found = rows(source, **options)[:, 0].astype(np.float32)
        return [
            float(np.sqrt(np.square(x - y).mean() / np.square(y).mean()))
            for x, y in zip(found, floats, strict=True)
        ]

    assert all(
        error < most
        for error, most in zip(errors(path, sizes=HEADS, rotation="llama.cpp"), RMS[name], strict=True)
    )
    assert errors(path, sizes=HEADS)[1] > 1
    target = tmp_path / "cache.npz"
    done = tools.convert(path, target, format="float32", sizes=HEADS)
    assert "note: since April 2026 llama.cpp" in str(done)
    assert any("Hadamard" in note for note in files.read(target).notes)
    done = tools.convert(path, target, format="float32", sizes=HEADS, rotation="llama.cpp")
    assert "Hadamard" not in str(done)
    assert (files.read(target).description.rotation, files.read(target).notes) == ("none", ())
    assert errors(target)[1] < RMS[name][1]
    assert not any("Hadamard" in x for x in tools.study(path, "fp8", sizes=HEADS, rotation="llama.cpp").notes)
    with pytest.raises(KvkitError, match=r"rotation: expected none, as the file says, got llama\.cpp"):
        tools.convert(target, None, format="float32", rotation="llama.cpp")


def test_pairs_of_keys(folder, tmp_path):
    path, model = folder / "whole.seq", folder / "llama.gguf"
    source, keys = with_model(path, model), rows(path, sizes=HEADS)[0]
    halves = np.concatenate([keys[..., ::2], keys[..., 1::2]], -1)
    for options in ({"to_layout": "hf"}, {"format": "float16"}):
        done = tools.convert(source, tmp_path / "halves.npz", rope_pairs="halves", **options)
        assert (done.description.rope_pairs, done.description.rope_base) == ("halves", 10000)
        assert np.array_equal(rows(tmp_path / "halves.npz")[0], halves)
        tools.convert(tmp_path / "halves.npz", tmp_path / "back.npz", rope_pairs="neighbours", **options)
        assert np.array_equal(rows(tmp_path / "back.npz")[0], keys)
    with pytest.raises(
        KvkitError, match="from_rope_pairs: expected the pairs that keys have, as the file does not"
    ):
        tools.convert(path, None, to_layout="hf", rope_pairs="halves", sizes=HEADS)
    given = {"rope_pairs": "halves", "from_rope_pairs": "neighbours", "sizes": HEADS}
    assert tools.convert(path, None, to_layout="hf", **given).description.rope_pairs == "halves"
    with pytest.raises(KvkitError, match="rope_pairs: expected halves or neighbours, got some"):
        tools.convert(path, None, to_layout="hf", rope_pairs="some", sizes=HEADS)
    with pytest.raises(
        KvkitError, match="rope_pairs: expected floats, or a format instead of the layout, got uint8"
    ):
        tools.convert(folder / "q5_0.seq", None, to_layout="llama-cpp", **given)


def test_tokens_are_removed_as_llama_does(folder, tmp_path):
    """From whole it makes the memory of holes, byte for byte; both are cut where layers have a window."""
    out = tmp_path / "out.bin"
    ways = ["--remove", "4:12"], ["--retain", "0:4,12:"], ["--remove", "4:10", "--remove", "9:12"]
    for options in ways:
        shown = CliRunner().invoke(main, ["edit", str(folder / "whole.seq"), *options, "-o", str(out)])
        assert shown.output == "12 tokens at 0:4,12:20, the next at 20\n"
        ends = [path.read_bytes()[12 + 4 * n :] for path, n in ((out, 12), (folder / "holes.seq", 20))]
        assert ends[0] == ends[1]
        assert files.read(out).arrays["token_ids"].tolist() == [1, 2, 3, 4, *range(13, 21)]
    for name, kept, window in (("sliding.ses", 8, 8), ("streams-trans.ses", 5, None), ("q5_0.seq", 4, None)):
        shown = CliRunner().invoke(
            main, ["edit", str(folder / name), "--remove", "2:6", "-o", str(out), "--json"]
        )
        assert json.loads(shown.output)["tokens"] == kept - (name == "streams-trans.ses")
        found = tools.inspect(out)
        assert sum(found.use.lengths) == (kept if name != "streams-trans.ses" else 6)
        assert window is None or found.sliding.use.lengths == [window]
    for name, options, message in (
        ("whole.seq", ["--shift", "4::-2"], "expected --remove or --retain, got moves"),
        ("whole.seq", ["--remove", "4:5", "--close"], "expected --remove or --retain, got moves"),
        ("whole.seq", ["--remove", ":"], "expected tokens that stay, got none"),
        ("hybrid.seq", ["--remove", "1:2"], "got recurrent ones, whose state has all tokens in it"),
    ):
        shown = CliRunner().invoke(
            main, ["edit", str(folder / name), *options, "-o", str(tmp_path / "no.bin")]
        )
        assert (shown.exit_code, (tmp_path / "no.bin").exists()) == (2, False)
        assert message in shown.stderr


@pytest.mark.parametrize("name", ["holes.seq", "sliding.seq", "image.seq", "q8_0-q4_0.seq"])
def test_a_cache_is_written_as_a_state(folder, tmp_path, name):
    """From another layout, and from floats; llama.cpp 0.5.0 read these files."""
    source, other, state = (
        with_model(folder / name, model_of(folder, name)),
        tmp_path / "a.npz",
        tmp_path / "b.bin",
    )
    tools.convert(source, other, to_layout="llama-cpp", page_size="longest")
    targets = [{"to_layout": "llama-cpp"}] + [{"format": "float32"}] * ("q8" not in name)
    for target in targets:
        tools.convert(other, state, **target)
        found, was = (open_cache(each) for each in (with_model(state, model_of(folder, name)), other))
        for i in range(was.count):
            for side in ("key", "value"):
                one, two = (getattr(each.layer(i), side).read(slice(None)) for each in (found, was))
                assert np.array_equal(one, two)
        assert CacheSource(state).positions is None or CacheSource(state).positions.tolist() == list(
            CacheSource(other).positions
        )
    with pytest.raises(
        KvkitError, match=r"source: expected one sequence, as a state of llama\.cpp has, got 2"
    ):
        tools.convert(folder / "shared.ses", state, format="float16", sizes=HEADS)
    with pytest.raises(
        KvkitError, match=r"format: expected floats, for a state of llama\.cpp, which rotates codes"
    ):
        tools.convert(folder / "whole.seq", state, format="q8_0", sizes=HEADS)


def test_a_model_of_other_layers_is_refused(folder):
    with pytest.raises(
        KvkitError, match="model: expected a model of 2 layers of attention, as the file has, got tiny lf"
    ):
        tools.inspect(with_model(folder / "whole.seq", folder / "lfm2.gguf"))


def test_the_shell_reads_states(folder, tmp_path):
    """--model, --rotation, --rope-pairs, --layers, and sizes where no model is at hand."""
    state, model, out = str(folder / "q8_0-q4_0.seq"), str(folder / "llama.gguf"), str(tmp_path / "out.npz")
    whole, sliding = str(folder / "whole.seq"), str(folder / "sliding.seq")
    for verb in (
        ["inspect", state, "--model", model], ["check", state, "--sizes", "h=2"], ["check", state],
        ["diff", whole, whole, "--sizes", "h=2"], ["diff", whole, whole, "--model", model],
        ["study", state, "--model", model, "--rotation", "llama.cpp", "--schemes", "fp8"],
        ["convert", state, out, "--format", "float16", "--rotation", "llama.cpp", "--model", model],
        ["convert", whole, out, "--to", "hf", "--rope-pairs", "halves", "--model", model],
        ["convert", sliding, out, "--to", "hf", "--layers", "0,2:", "--sizes", "h=2"],
    ):  # fmt: skip
        shown = CliRunner().invoke(main, verb)
        assert shown.exit_code == 0, (verb, shown.output)
    shown = CliRunner().invoke(
        main, ["convert", whole, out, "--to", "hf", "--sizes", "h=2", "--rope-pairs", "halves"]
    )
    assert "whole.seq: --from-rope-pairs: expected the pairs that keys have" in shown.stderr
