"""Chunks of LMCache: files named, and headers written, by lmcache 0.5.6; ranks joined to a whole cache."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from verbs import kvkit as run

from kvkit import KvkitError, files
from kvkit.tools import convert

WRITTEN = Path(__file__).parents[1] / "files" / "written"
RAW = [WRITTEN / f"org-model@2@{rank}@1234abcd@half.pt" for rank in (0, 1)]
HEADED = [WRITTEN / f"org-SEP-model@2@{rank}@1234abcd@half.data" for rank in (0, 1)]
LAYERS, TOKENS, HEADS, DIM = 2, 5, 4, 8
SIZES = {"l": LAYERS, "h": HEADS // 2, "c": DIM}


def rows():
    """Keys and values of all heads, [kv, layers, tokens, heads, content]."""
    x = np.random.default_rng(5).standard_normal((2, LAYERS, TOKENS, HEADS, DIM))
    return x.astype(np.float16)


def test_names_say_what_bytes_do_not(tmp_path):
    by_layer = tmp_path / "org-model@2@0@1234abcd@half@1.pt"
    pair = np.stack((rows()[0, 1], rows()[1, 1]), 1)  # a layer apart: tokens, kv, heads
    by_layer.write_bytes(pair.tobytes())
    found = convert(by_layer, None, to_layout="l kv | b n h c", sizes={"h": HEADS, "c": DIM})
    np.testing.assert_array_equal(found.arrays["cache"][0][1][0], rows()[1, 1])
    other = tmp_path / "org-SEP-model@0x02010201@0@1234abcd.data"  # of LMCache's distributed storage
    shutil.copy(RAW[0], other)
    assert "these are its bytes" in files.read(other).notes[0]
    assert files.read(other).arrays["bytes"].tobytes() == RAW[0].read_bytes()
    by_layer.write_bytes(b"PK" + pair.tobytes()[2:])  # as a zip archive begins
    assert files.read(by_layer).arrays["cache"].tobytes() == by_layer.read_bytes()
    shutil.copy(RAW[0], tmp_path / "chunk.pt")
    with pytest.raises(KvkitError, match=r"like no kind of file that kvkit reads.* chunk of LMCache"):
        files.read(tmp_path / "chunk.pt")


def test_ranks_make_a_whole_file(tmp_path):
    sizes = ",".join(f"{axis}={size}" for axis, size in SIZES.items())
    how = "--axis", "h", "--to", "hf"
    code, out, err = run("convert", *RAW, tmp_path / "x.npz", *how, "--sizes", sizes, "--verify")
    assert (code, out.partition(":")[0], err) == (0, "l kv | b n h c -> hf (l 2, b 1, n 5, h 4, c 8)", "")
    for layer, sides in enumerate(files.nested(files.read(tmp_path / "x.npz").arrays)):
        for side, x in zip(sides, rows(), strict=True):
            np.testing.assert_array_equal(side[0].swapaxes(0, 1), x[layer])
    for wrong, what in (
        ((*RAW, "--axis", "x"), "--axis: expected 'h', the heads, or 'n', the tokens, got 'x'"),
        ((RAW[0], RAW[0], "--axis", "h"), "--axis: expected IN that differ"),
        ((*RAW, "--axis", "h", "--dask", "local"), "--axis: expected IN that differ, and no --dask"),
        ((*HEADED, "--axis", "h", "--sizes", "h=3"), f"{HEADED[0]}: "),
    ):
        code, _, err = run("convert", *wrong[:2], tmp_path / "y.npz", "--to", "hf", *wrong[2:])
        assert (code, what in err) == (2, True), err
    assert not (tmp_path / "y.npz").exists()
