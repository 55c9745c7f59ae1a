"""A layout is one line of the table: with a fifth dynamic one everything that names layouts follows."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvkit"
LAST = '    "pmx-dynamic-3"'
FIFTH = '    "pmx-dynamic-4": Named("| h l kv n c", "PMX", "cache_layout 4, dynamic", *PMX),\n'
USE = Path(__file__).parents[1] / "scenes" / "one_more_layout.py"


@pytest.fixture
def package(tmp_path):
    """Return a copy of the package with one layout more."""
    shutil.copytree(PACKAGE, tmp_path / "kvkit", ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "kvkit" / "layouts" / "named.py"
    text = table.read_text()
    assert text.count(LAST) == 1
    end = text.index("\n", text.index(LAST)) + 1
    table.write_text(text[:end] + FIFTH + text[end:])
    return tmp_path


def test_a_layout_is_one_line(package):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), *sys.path])}
    done = subprocess.run([sys.executable, USE], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["file"]).parent == package / "kvkit"
    assert found["stored"]
    assert found["loaded"]
    assert found["away"] < 1e-5
    assert found["message"] == "cache_layout: expected an integer from 0 to 4, got 5"
    for shape in ("3: (L, 2, H, MaxT, Dh)", "4: (H, L, 2, MaxT, Dh)"):
        assert shape in found["help"]
        assert "".join(shape.split()) in "".join(found["described"].split())
