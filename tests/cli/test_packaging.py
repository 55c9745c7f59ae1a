"""What people install: from a clone, and from a source distribution."""

import configparser
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvkit

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.org/people/kvkit"
SEEN = """
import importlib.util
for name in ("kvkit", "kvkit_cuda"):
    print(importlib.util.find_spec(name).origin)
"""


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make here")
def test_a_script_beside_the_clone_finds_the_package(tmp_path):
    """Where the clone's folder has the name of the package."""
    environment, beside = tmp_path / "environment", tmp_path / "beside"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    subprocess.run(["make", "-C", ROOT, f"VENV={environment}", "PIP=true", environment / "kvkit"],
                   check=True, stdout=subprocess.PIPE)  # fmt: skip
    beside.mkdir()
    (beside / "kvkit").symlink_to(ROOT)
    (beside / "script.py").write_text(SEEN)
    command = [environment / "bin" / "python", beside / "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(ROOT / name / "__init__.py") for name in ("kvkit", "kvkit_cuda")]


def test_python_m_kvkit_is_kvkit():
    command = [sys.executable, "-m", "kvkit", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout == f"kvkit {kvkit.__version__}\n"


def test_another_distribution_that_owns_the_files_is_named(tmp_path):
    """PyPI's `kvkit` over this one: the folder is another project's, and the command line says so."""
    theirs = tmp_path / "kvkit"
    theirs.mkdir()
    (theirs / "__init__.py").touch()
    about = tmp_path / "kvkit-0.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvkit\nVersion: 0.3\n")
    (about / "top_level.txt").write_text("kvkit\n")
    (tmp_path / "kvkit_cli").symlink_to(ROOT / "cli")
    path = [str(tmp_path), sysconfig.get_path("purelib")]
    start = (
        f"import sys; sys.path[:0] = {path}; sys.argv[1:] = ['info']; import kvkit_cli.__main__ as program"
    )
    command = [sys.executable, "-I", "-S", "-c", f"{start}; program.start()"]  # no path of a clone
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.match(r"kvkit: No module named 'kvkit\.\w+'; kvkit-kernels ", done.stderr)
    assert f"in {theirs}, whose files kvkit owns too: pip uninstall kvkit kvkit-kernels, then" in done.stderr
    assert done.stderr.count("\n") == 1


def test_users_install_no_pinned_version():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert "==" not in setup["options"]["install_requires"]
    for name, required in setup["options.extras_require"].items():
        assert "==" not in required.replace("==13.*", ""), name  # a toolkit of CUDA 13


def test_links_and_pictures_of_readme_lead_into_the_repository():
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="not main")
    here, there = (ROOT / "README.md").read_text(), setup["absolute"]
    found = re.findall(setup["LINK"], here)
    made = there(here, REPOSITORY, "1.0")
    assert found
    assert not re.findall(setup["LINK"], made)
    for _, link in found:
        kind = "raw" if link.endswith(".svg") else "blob"
        assert f"{REPOSITORY}/{kind}/v1.0/{link}" in made
        assert (ROOT / link.partition("#")[0]).exists(), link
    assert there("[speed](#speed) [a](https://b)", REPOSITORY, "1.0") == "[speed](#speed) [a](https://b)"


@pytest.fixture
def copy(tmp_path):
    """Copy the clone without generated files."""
    made = tmp_path / "kvkit"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "_build", "dist", "demo-out")
    return shutil.copytree(ROOT, made, ignore=ignored)


@pytest.mark.slow
def test_the_source_distribution_is_whole(copy, tmp_path):
    """All that its pages link to and its tests read, in the place where they look for it."""
    pytest.importorskip("setuptools")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=copy, capture_output=True, check=True)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    pages = [path for path in copy.rglob("*.md") if "tests" not in path.parts]
    links = {os.path.relpath(page.parent / link, copy) for page in pages
             for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text())}  # fmt: skip
    assert links
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    made_by_the_build = {name for name in files if name.startswith("kvkit_kernels.egg-info")}
    assert links <= names
    assert files - made_by_the_build <= names


@pytest.mark.slow
def test_the_wheel_works_where_nothing_else_is(copy, tmp_path, monkeypatch):
    """Built as people build it, PyPI takes it, and in a new environment README's first example runs."""
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def run(*command):
        done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    settings = copy / "pyproject.toml"
    settings.write_text(settings.read_text().replace('repository = ""', f'repository = "{REPOSITORY}"'))
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", copy)
    made = list((tmp_path / "dist").iterdir())
    assert sorted(path.suffix for path in made) == [".gz", ".whl"]
    assert run(sys.executable, "-m", "twine", "check", "--strict", *made).count("PASSED") == 2
    run(sys.executable, "-m", "venv", tmp_path / "environment")
    programs = tmp_path / "environment" / ("Scripts" if sys.platform == "win32" else "bin")
    (wheel,) = (path for path in made if path.suffix == ".whl")
    pypi_takes(wheel)
    run(programs / "python", "-m", "pip", "install", "--quiet", wheel)
    shown = run(programs / "kvkit", "--help")
    assert "kvkit run" in shown
    refused = subprocess.run([programs / "kvkit", "bench"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.stderr.startswith("kvkit: kvkit bench: its suites are not installed")
    pages, texts = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "README.md"], []
    for page in pages:
        texts.append(tmp_path / page.with_suffix(".txt").name)
        texts[-1].write_text("\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S)))
    code = "import sys, doctest, kvkit; print(kvkit.__file__, *("
    code += (
        "doctest.testfile(page, False, optionflags=doctest.NORMALIZE_WHITESPACE) for page in sys.argv[1:]))"
    )
    told = run(programs / "python", "-I", "-c", code, *texts)
    assert str(tmp_path / "environment") in told
    assert told.count("failed=0") == len(pages), told
    assert told.count("attempted=0") == 1  # the index of the tutorials


def pypi_takes(wheel):
    """Check that PyPI's own reader accepts a wheel's metadata and shows the page with its pictures."""
    from packaging.metadata import Metadata
    from readme_renderer import markdown

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = Metadata.from_email(archive.read(name), validate=True)
    assert found.name == "kvkit-kernels"
    assert found.author == "kvkit developers"
    assert found.license_expression == "Apache-2.0"
    assert list(found.project_urls) == ["Homepage", "Source", "Documentation", "Issues", "Changelog"]
    assert all(address.startswith(REPOSITORY) for address in found.project_urls.values())
    shown = markdown.render(found.description)
    assert re.search(r'<img [^>]*src="https://', shown)
    assert not re.search(r'(src|href)="(?!https?:|#)', shown)


def test_pyproject_is_valid():
    api = pytest.importorskip("validate_pyproject.api")
    api.Validator()(tomllib.loads((ROOT / "pyproject.toml").read_text()))
