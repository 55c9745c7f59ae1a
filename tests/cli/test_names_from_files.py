"""Names from files reach no terminal as commands, and no file as a path."""

import json
import os
import pty
import subprocess
import sys

import numpy as np
import pytest

from kvkit.errors import KvkitError
from kvkit.tools import svg, vectors

EVIL = "\x1b]0;title\x07\x1b[31m\x1b[2Jred\u202egnp.\nfine: 9 rules\r\x9b1m"
VERBS = (
    "inspect evil.npz", "inspect evil.npz --stats", "diff evil.npz other.npz", "diff other.npz evil.npz",
    "diff evil.npz changed.npz", "vectors verify pack", "vectors replay pack", "vectors diff pack pack",
    "check evil.npz", "convert evil.npz out.npz --to hf", "draw evil.npz", "study evil.npz",
    "run merge_attention_states evil.npz -o out.npz",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    arrays = {f"key.{EVIL}": np.ones((2, 3, 4), np.float32), "x": np.ones(3, np.float32)}
    np.savez(tmp_path / "evil.npz", **arrays)
    np.savez(tmp_path / "changed.npz", **{name: array * 2 for name, array in arrays.items()})
    np.savez(tmp_path / "other.npz", x=np.zeros(3, np.float32))
    vectors.make(tmp_path / "pack", operator="merge_attention_states")
    (tmp_path / "pack" / EVIL.replace("/", "")).write_text("")
    manifest = json.loads((tmp_path / "pack" / "manifest.json").read_text())
    manifest["cases"][0]["note"] = EVIL
    (tmp_path / "pack" / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


# Every verb in turn, in one process, behind a line that names it.
ALL_VERBS = """
import contextlib, sys
from kvkit_cli.main import main
for verb in sys.argv[1:]:
    print("verb:", verb, flush=True)
    with contextlib.suppress(SystemExit):
        main(verb.split(), prog_name="kvkit")
"""


def through_pty(command, folder):
    """Return the text that a command writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=folder, stdout=theirs, stderr=theirs, stdin=theirs) as process:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 65536):
                said += piece
        except OSError:  # the other end is closed
            pass
        process.wait()
    os.close(ours)
    return said.decode()


@pytest.mark.slow
def test_no_name_reaches_a_terminal(folder):
    command = [sys.executable, "-c", ALL_VERBS, *VERBS]
    piped = subprocess.run(command, cwd=folder, capture_output=True, check=True)
    for text in (through_pty(command, folder), (piped.stdout + piped.stderr).decode()):
        assert "Traceback" not in text
        for verb in VERBS:
            assert f"verb: {verb}" in text
        for sign in ("\x1b]", "\x1b[2J", "\x1b[31mred", "\x07", "\u202e", "\x9b", "\nfine: 9 rules"):
            assert sign not in text, (sign, text)


@pytest.mark.parametrize("name", ["../evil", "/tmp", "a/b", "", ".", "..", "\x1b[31m", "a\nb"])
def test_names_of_cases_are_no_paths(tmp_path, name):
    vectors.make(tmp_path / "pack", operator="multi_head_attention")
    path = tmp_path / "pack" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["cases"][0]["name"] = name
    path.write_text(json.dumps(manifest))
    for act in (
        lambda: vectors.replay(tmp_path / "pack"),
        lambda: vectors.export(tmp_path / "pack", tmp_path / "x"),
    ):
        with pytest.raises(KvkitError, match="no name of a case"):
            act()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["pack"]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("arguments", "lses", "shape"), [1e999]), (("arguments", "lses", "file"), 3),
        (("outputs", "lse", "tolerance"), None), (("outputs", "lse", "tolerance"), {"atol": "x"}),
        (("unchanged",), "x"), (("unchanged",), [3]), (("arguments", "more"), {"value": 1}),
        (("after", "more"), {"file": "x.npy"}), (("arguments", "lses", "file"), "."),
    ],
)  # fmt: skip
def test_odd_manifests_are_refused(tmp_path, at, value):
    vectors.make(tmp_path / "pack", operator="merge_attention_states")
    path = tmp_path / "pack" / "manifest.json"
    manifest = json.loads(path.read_text())
    place = manifest["cases"][0]
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(KvkitError):
        vectors.replay(tmp_path / "pack")


def test_no_name_reaches_a_picture():
    cell = svg.Cell(f"<{EVIL}", "key", 3, EVIL)
    drawn = svg.picture(EVIL, [(EVIL, [cell]), (EVIL, [])])
    assert all(sign.isprintable() or sign == "\n" for sign in drawn)
    assert "&lt;\\x1b" in drawn
