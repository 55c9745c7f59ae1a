"""Every example that a reader sees runs as printed, and the operator table tells the truth."""

import functools
import importlib.util
import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvkit
from benchmarks import many_cores, plot
from examples import run_examples
from kvkit.operators import OPERATORS, REQUIRED
from kvkit.operators.attributes import ATTRIBUTES
from kvkit.operators.operator import IN_PYTHON
from kvkit_cli.main import main as kvkit_main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
HELPERS = kvkit.ascend.compressed_slots, kvkit.ascend.razor_windows, kvkit.ascend.slots


def test_readme_examples():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    run_examples("\n".join(blocks), "README.md")


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/gallery.md", marks=pytest.mark.slow)])
def test_commands_of_pages(page, tmp_path, monkeypatch, capsys, no_prints):
    """Each line of the shell runs and prints what stands under it; make and pip are looked at only."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    programs = set()
    for program, *words in script(ROOT / "docs" / "examples.py").commands(ROOT / page):
        programs.add(program)
        if program == "kvkit":
            with pytest.raises(SystemExit) as ended:
                kvkit_main(words, prog_name="kvkit")
            assert (ended.value.code or 0) == (words[0] in ("diff", "check"))
        elif program == "make":
            subprocess.run(["make", "-n", "-C", ROOT, *words], check=True, capture_output=True)
        elif program == "python":
            monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
            script(ROOT / words[0]).main(*words[1:])
        else:
            assert [program, *words] == ["pip", "install", "."]
    assert programs == {"kvkit", "python", *(() if "gallery" in page else ("make", "pip"))}
    assert (tmp_path / "report" / "pareto.svg").exists()
    printed = capsys.readouterr().out.splitlines()
    for line in shown(ROOT / page):
        assert any(each.startswith(line.removesuffix("…").rstrip()) for each in printed), line


def shown(page):
    """Return the lines of a page that commands print; an ellipsis stands for the rest of a line."""
    blocks = "".join(re.findall(r"```console\n(.*?)```", page.read_text(), re.S))
    return [line for line in blocks.splitlines() if line and not line.startswith("$ ")]


@pytest.mark.parametrize("op", OPERATORS.values(), ids=lambda op: op.name)
def test_table_is_the_signature(op):
    """Names, order and defaults: inputs by position, then attributes and out=, most of them by keyword."""
    parameters = list(inspect.signature(op.function()).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    inputs = [array.name for array in op.inputs if not array.keyword]
    assert positional[: len(inputs)] == inputs
    keywords |= dict.fromkeys(positional[len(inputs) :], REQUIRED)  # attributes by position, after all inputs
    if op.outputs:
        assert keywords.pop("out") is None
    for name in IN_PYTHON:  # several arrays, in Python alone
        assert keywords.pop(name, None) is None
    by_keyword = {array.name: None if array.optional else REQUIRED for array in op.inputs if array.keyword}
    assert keywords == {attribute.name: attribute.default for attribute in op.attributes} | by_keyword
    for attribute in op.attributes:
        assert attribute.default in (None, REQUIRED) or type(attribute.default) is attribute.kind


def test_every_attribute_is_one_of_an_operator():
    assert set(ATTRIBUTES) == {attribute.name for op in OPERATORS.values() for attribute in op.attributes}


@pytest.mark.parametrize("op", OPERATORS.values(), ids=lambda op: op.name)
def test_docstring_names_everything(op):
    text = inspect.getdoc(op.function())
    in_python = [name for name in IN_PYTHON if name in inspect.signature(op.function()).parameters]
    names = [each.name for each in (*op.inputs, *op.outputs, *op.attributes)] + in_python
    for name in names:
        assert re.search(rf"\b{name}\b", text), name
    for section in ("Parameters", "Returns", "Raises", "Notes", "Examples"):
        assert f"\n{section}\n---" in text


def test_modes_are_those_of_the_function():
    """The table's names are the enumeration's, and what a mode needs is what it takes and no more."""
    op = OPERATORS["ascend.reshape_and_cache"]
    modes = next(attribute for attribute in op.attributes if attribute.name == "compress_type").modes
    assert [name for name, _ in modes] == [mode.name for mode in kvkit.ascend.CompressType]
    given = {"wins": np.array([2]), "seq_lens": np.array([3]), "offset_index": np.array([0])}
    key = np.ones((3, 1, 32), np.float16)
    for number, (_, about) in enumerate(modes):
        needed = [name for name in given if name in about.partition("; needs ")[2].split(", ")]
        slots = np.array([0]) if number else np.arange(3)
        for count in range(len(given) + 1):
            for names in itertools.combinations(given, count):
                cache, more = np.zeros((1, 4, 1, 32), np.float16), {name: given[name] for name in names}
                call = functools.partial(op.function(), key, None, cache, None, slots, **more)
                if list(names) == needed:
                    assert call(compress_type=number)[0].any()
                else:
                    with pytest.raises(kvkit.KvkitError, match=r"^(wins|seq_lens|offset_index): "):
                        call(compress_type=number)


def test_public_names():
    """Every operator is where its name says, and little else."""
    folders = {kvkit: ["DeviceError", "KvkitError", "PagedPlan", "Rope", "__version__"]}
    folders[kvkit] += ["ascend", "dynamic_batching", "paged_plan", "mla_scale", *kvkit.CACHES, *kvkit.TOOLS]
    folders[kvkit.dynamic_batching] = ["Plan", "plan"]
    folders[kvkit.ascend] = ["CompressType", "Slots", *(function.__name__ for function in HELPERS)]
    for name in OPERATORS:
        *folder, last = name.split(".")
        folders[getattr(kvkit, folder[0]) if folder else kvkit].append(last)
    for module, names in folders.items():
        assert module.__all__ == sorted(names)
        assert all(hasattr(module, name) for name in names)


def script(path):
    """Return a file that is run, not imported, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("plots", [True, False], ids=["plot", "no matplotlib"])
def test_razor_attention(plots, tmp_path, capsys, monkeypatch):
    """The errors are those of plain float64 loops over the same tokens."""
    if plots:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys, "argv", ["razor_attention.py", str(tmp_path / "made")])
    script(ROOT / "examples" / "razor_attention.py").main()
    out = capsys.readouterr().out
    rows = {words[0]: words[1:] for words in map(str.split, out.splitlines()) if len(words) == 5}
    assert rows["retrieval"] == ["4", "100%", "0.00%", "0.00%"]
    assert rows["compressed"][:2] == ["8", "61%"]
    assert rows["all"][:2] == ["12", "74%"]
    for kind, expected in {"compressed": (26.89, 28.84), "all": (19.59, 21.02)}.items():
        assert [float(word.rstrip("%")) for word in rows[kind][2:]] == pytest.approx(expected, abs=0.02)
    plot = tmp_path / "made" / "razor_attention.png"
    assert plot.exists() == plots == (f"The plot is {plot}." in out)
    assert ("pip install '.[plot]' in a clone" in out) == (not plots)


def test_engine_layouts(tmp_path, capsys, monkeypatch):
    """A cache moves through engines' layouts and comes back equal, bit for bit; codes are a little off."""
    monkeypatch.setattr(sys, "argv", ["engine_layouts.py", str(tmp_path)])
    script(ROOT / "examples" / "engine_layouts.py").main()
    out = capsys.readouterr().out
    assert "vLLM and PMX agree bit for bit: True\n" in out
    assert "the cache is what it was: True\n" in out
    errors = [float(word.rstrip("%")) for word in out.split() if word.endswith("%")]
    assert errors == pytest.approx([0.022, 0.022, 0.9], abs=0.1)


@pytest.mark.parametrize(
    ("name", "package", "extras"),
    [
        ("smollm2", "gguf", "data"),
        ("what_to_keep", "matplotlib", "transformers,data,plot"),
        ("quantized_agreement", "torch", "transformers"),
    ],
)
def test_examples_name_the_extra_that_is_missing(name, package, extras, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.delitem(sys.modules, "smollm2_model", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended:
        script(ROOT / "examples" / f"{name}.py")
    assert ended.value.code == f"{package} is not installed: pip install '.[{extras}]'"


def test_figures_of_schemes_are_not_typed():
    """The table of the page is what the study of the committed data gives."""
    example = script(ROOT / "examples" / "study_smollm2.py")
    study = example.studied()
    for path, page in example.updated(study).items():
        for shown, made in zip(path.read_text().splitlines(), page.splitlines(), strict=True):
            numbers = [
                [float(number) for number in re.findall(r"[0-9.]+(?=%)", line)] for line in (shown, made)
            ]
            assert numbers[0] == pytest.approx(numbers[1], abs=0.11), shown  # of the last digit, elsewhere
            assert re.sub(r"[0-9.]+%", "", shown) == re.sub(r"[0-9.]+%", "", made)


@pytest.mark.parametrize("name", plot.PICTURES)
def test_the_plot_shows_the_committed_figures(name):
    """`benchmarks/plot.py` drew it of those; another matplotlib draws it otherwise."""
    for page in ("light", "dark"):
        assert plot.digest(name) in (plot.FOLDER / f"{name}-{page}.svg").read_text()
    pytest.importorskip("matplotlib")
    assert plot.digest(name) in plot.draw_svg(name, page)


def test_the_model_of_many_cores_reads_all_bytes_at_its_bounds():
    """One item a thread, and one thread: what the formulas give; never faster than cores or memory."""
    machine = many_cores.Machine(core=2e9, memory=8e9, call=1, wake=0, item=0, merge=1e3)
    items = [(0, 2, 4 * 10**9), (0, 2, 4 * 10**9)]
    merged = 2 * many_cores.SPLIT_STATE / machine.merge
    assert many_cores.seconds(machine, 1, items) == pytest.approx(1 + 4 + merged)
    assert many_cores.seconds(machine, 2, items) == pytest.approx(1 + 2 + merged)
    assert many_cores.seconds(machine, 64, 64 * [(0, 1, 10**9)]) == pytest.approx(1 + 64 / 8)
    assert [len(many_cores.work_items((length,))) for length in (512, 2**10, 2**16)] == [8, 16, 64]


def test_benchmark_figures_are_not_typed():
    """Every table is what `benchmarks/table.py` makes of the committed results."""
    table = script(ROOT / "benchmarks" / "table.py")
    for path in (table.README, table.TRANSFORMERS):
        page = path.read_text()
        assert table.filled(path, page) == page
        assert "\n|---|" in page
    assert table.TABLES.read_text().count("\n|---|") == 0  # the site's page gets them from the same function
    assert table.filled(table.TABLES, table.TABLES.read_text()).count("\n|---|") == 20
