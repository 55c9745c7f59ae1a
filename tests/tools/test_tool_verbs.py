"""`kvkit check`, `kvkit diff` and `kvkit vectors`: what they print, and their exit codes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import kvkit
import kvkit.tools
from kvkit.files import npz

ROOT = Path(kvkit.__file__).parents[1]
PACK = ROOT / "examples/packs/pmx"


@pytest.fixture
def run(capfd):
    from kvkit_cli.main import main

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return call


@pytest.fixture
def files(tmp_path):
    table = {"block_tables": np.array([[1, 2], [3, 0]]), "context_lens": np.array([8, 4])}
    table |= {"num_blocks": np.array(4), "page_size": np.array(4)}
    wrong = table | {"block_tables": np.array([[1, 2], [2, 0]])}
    key = np.arange(1, 65, dtype=np.float16).reshape(4, 2, 8)
    arrays = {"fine": table, "wrong": wrong, "a": {"key": key}, "b": {"key": np.roll(key, 1, axis=0)}}
    arrays |= {"other": {"x": key}, "whole": {"cache": np.zeros((6, 4, 2, 16), np.float16)}}
    for name, each in arrays.items():
        npz.write(tmp_path / f"{name}.npz", each)
    (tmp_path / "broken.npz").write_bytes(b"PK no archive")
    return tmp_path


def test_check(run, files):
    assert run("check", files / "fine.npz")[:2] == (0, "fine: 8 rules looked at what was given\n")
    code, out, _ = run("check", files / "wrong.npz")
    assert (code, out.splitlines()[0][:33]) == (1, "error P3 block_tables[1, 0]: page")
    code, out, _ = run("check", files / "wrong.npz", "--json")
    assert (code, json.loads(out)["counts"]) == (1, {"P3": 1})


def test_diff(run, files):
    assert run("diff", files / "a.npz", files / "a.npz")[:2] == (0, "equal: 128 bytes\n")
    code, out, _ = run("diff", files / "a.npz", files / "b.npz")
    assert code == 1
    assert "first: position 0, head 0, element 0: expected 1.0, got 49.0" in out
    assert "row off by one (row +1) explains" in out
    code, out, _ = run("diff", files / "a.npz", files / "b.npz", "--json")
    assert (code, json.loads(out)["causes"][0]["name"]) == (1, "row off by one")
    assert run("diff", files / "a.npz", files / "b.npz", "--atol", 100)[0] == 0


def test_vectors(run, tmp_path):
    assert run("vectors", "verify", PACK)[0] == 0
    code, out, _ = run("vectors", "replay", PACK, "--operator", "merge_attention_states")
    assert (code, out) == (0, "3 passed\n")
    code, out, _ = run("vectors", "make", tmp_path / "p", "--suite", "ascend", "--json")
    assert (code, json.loads(out)["cases"]) == (0, 29)
    assert run("vectors", "diff", tmp_path / "p", tmp_path)[0] == 1
    (tmp_path / "p" / "more").write_text("")
    assert run("vectors", "verify", tmp_path / "p")[0] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "nothing.npz"], ["check", "broken.npz"], ["check", "other.npz"],
        ["check", "fine.npz", "--after", "other.npz"],
        ["diff", "a.npz", "broken.npz"], ["diff", "a.npz", "nothing.npz"], ["diff", "a.npz", "fine.npz"],
        ["diff", "a.npz", "b.npz", "--layout-a", "colour"], ["diff", "a.npz", "b.npz", "--ulp", "-1"],
        ["vectors", "replay", "nothing"], ["vectors", "make", "."], ["vectors", "export", ".", "x"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_use_is_one_line(run, files, monkeypatch, arguments):
    monkeypatch.chdir(files)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kvkit: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study", "whole.npz"], "--layout: expected a layout, as the file does not say its own"),
        (["convert", "whole.npz", "x.npz", "--to", "hf"], "whole.npz: --from: expected a layout, as"),
        (["convert", "whole.npz", "x.npz"], "whole.npz: --to: expected a layout, or a format in its place"),
        (
            ["convert", "whole.npz", "x.npz", "--format", "q8_0", "--page-size", "4"],
            "--page-size: expected no",
        ),
        (["study", "fine.npz"], "FILE: expected an array 'cache' and its layout"),
        (["inspect", "whole.npz", "--layout", "nope"], "--layout: expected a line, such as"),
        (["layouts", "hf", "--sizes", "q=1"], "--sizes: expected positive integers"),
        (["diff", "a.npz", "fine.npz"], "B: expected some array of key"),
        (["diff", "whole.npz", "a.npz", "--layout-b", "n h c"], "--layout-a: expected a layout"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_messages_name_options_of_the_shell(run, files, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    assert f"kvkit: {message}" in run(*arguments)[2].replace("whole.npz: --p", "--p")


def test_findings_name_options_of_the_shell(run, files):
    assert "layout=NAME" in str(kvkit.tools.check(files / "whole.npz"))
    for how in [], ["--json"]:
        assert "Say which it is: --layout NAME" in run("check", files / "whole.npz", *how)[1]


def test_importing_the_room_loads_no_tool():
    import subprocess

    script = (
        "import sys, kvkit.tools; print([m for m in sys.modules if m.startswith(('kvkit.tools.', 'numba'))])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
