"""Schemes on keys and values: numbers against plain numpy, bytes counted, reports that stand alone."""

import html
import html.parser
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from folder_scenes import full_disk

from kvkit import files, formats, tools
from kvkit.errors import KvkitError
from kvkit.tools.studies import measures, plots
from kvkit.tools.studies.report import markdown
from kvkit_cli.main import main

pytestmark = pytest.mark.cpu

LAYERS, TOKENS, HEADS, DIM, QUERIES = 2, 96, 3, 64, 4


@pytest.fixture
def arrays(rng):
    """Return two sequences in two layers; one head of the second layer has an outlier channel."""
    key, value = (rng.standard_normal((LAYERS, TOKENS, HEADS, DIM)).astype(np.float16) for _ in range(2))
    key[1, :, 2, 5] *= 30
    query = rng.standard_normal((LAYERS, 2, QUERIES, 2 * HEADS, DIM)).astype(np.float16)
    return {"key": key, "value": value, "query": query, "seqstarts": np.array([0, 40, TOKENS])}


def back(x, name):
    return formats.decode(formats.encode(x.astype(np.float32), name), name)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_errors_are_those_of_plain_numpy(arrays):
    found = tools.study(arrays, "e4m3,int4:g32:float16")
    for row in found.rows:
        if row["side"] == "attention":
            continue
        side = arrays["key" if row["side"] == "keys" else "value"]
        x = side[found.layers.index(row["layer"])].astype(np.float32)
        coded = back(x, row["scheme"])[:, row["head"]]
        x = x[:, row["head"]]
        assert row["relative_rms"] == pytest.approx(np.linalg.norm(coded - x) / np.linalg.norm(x), rel=1e-4)
        assert row["largest_error"] == pytest.approx(np.abs(coded - x).max(), rel=1e-6)
        cosine = (coded * x).sum(1) / np.linalg.norm(coded, axis=1) / np.linalg.norm(x, axis=1)
        assert row["cosine"] == pytest.approx(cosine.mean(), rel=1e-5)


def test_attention_is_that_of_plain_loops(arrays):
    found = tools.study(arrays, "int4:g32:float16")
    starts, scale = arrays["seqstarts"], 1 / np.sqrt(DIM)
    for layer in range(LAYERS):
        for head in range(HEADS):
            kl, changed, errors, norms = [], [], 0.0, 0.0
            for s in range(2):
                x, v = (
                    arrays[n][layer, starts[s] : starts[s + 1]].astype(np.float32) for n in ("key", "value")
                )
                coded = [back(one, "int4:g32:float16")[:, head] for one in (x, v)]
                exact = [one[:, head] for one in (x, v)]
                for i in range(QUERIES):
                    count = len(x) - QUERIES + i + 1
                    for h in (2 * head, 2 * head + 1):
                        q = arrays["query"][layer, s, i, h].astype(np.float32)
                        one, other = (softmax(k[:count] @ q * scale) for k in (exact[0], coded[0]))
                        kl.append((one * np.log(one / other)).sum())
                        changed.append(one.argmax() != other.argmax())
                        want, got = one @ exact[1][:count], other @ coded[1][:count]
                        errors, norms = errors + ((got - want) ** 2).sum(), norms + (want**2).sum()
            (row,) = (
                row
                for row in found.rows
                if (row["layer"], row["head"], row["side"]) == (f"layer {layer}", head, "attention")
            )
            assert row["kl"] == pytest.approx(np.mean(kl), rel=1e-3)
            assert row["top_changed"] == pytest.approx(np.mean(changed))
            assert row["output_error"] == pytest.approx(np.sqrt(errors / norms), rel=1e-3)


def test_bits_have_the_scales_in_them(arrays):
    found = {
        one.scheme: one
        for one in tools.study(
            arrays, "fp8,fp16,int8:g8,int4:g32,q8_0,q4_0,kivi2,mxfp4,turboquant_k3v4_nc"
        ).summary
    }
    bits = {name: one.bits for name, one in found.items()}
    assert bits == {
        "fp8": 8, "fp16": 16, "int8:g8": 10, "int4:g32": 4.5, "q8_0": 8.5, "q4_0": 4.5, "kivi2": 3,
        "mxfp4": 4.25, "turboquant_k3v4_nc": 3.5 + (2 + 4) * 8 / DIM / 2,
    }  # fmt: skip
    assert found["fp16"].bytes_per_token == LAYERS * HEADS * DIM * 2 * 2
    assert found["fp16"].worst_error == 0


def test_a_head_that_stands_out_is_named_and_a_rotation_mends_it(arrays):
    found = tools.study(arrays, "int4:g32,int4:g32+hadamard")
    plain, turned = found.summary
    assert [(row["layer"], row["head"]) for row in found.worst("int4:g32", 1)] == [("layer 1", 2)]
    assert turned.key_error < plain.key_error
    largest = max((row for row in found.outliers if row["side"] == "keys"), key=lambda row: row["ratio"])
    assert (largest["layer"], largest["head"]) == ("layer 1", 2)
    assert largest["ratio"] > 10
    assert "layer 1 head 2" in str(found)


def test_a_scheme_of_ones_own(arrays, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\n"
        "class Half:\n"
        "    def encode(self, x):\n"
        "        return {'codes': x.astype(np.float16)}\n"
        "    def decode(self, arrays):\n"
        "        return arrays['codes'].astype(np.float32)\n"
    )
    (one,) = tools.study(arrays, f"{path}:Half").summary
    assert (one.bits, one.worst_error, one.at_end) == (16, 0, None)

    @tools.scheme("signs")
    class Signs:
        def encode(self, x):
            return {"codes": np.packbits(x > 0, -1), "scale": np.abs(x).mean(-1).astype(np.float16)}

        def decode(self, arrays):
            signs = np.unpackbits(arrays["codes"], -1).astype(np.float32) * 2 - 1
            return signs * arrays["scale"][..., None].astype(np.float32)

    (one,) = tools.study(arrays, ["signs"]).summary
    assert one.bits == 1 + 16 / DIM
    [note] = [note for note in tools.study(arrays, ["signs", "fp16", "int8"]).notes if "bits of" in note]
    assert note.startswith("bits of signs: those of the arrays that encode returns, so codes of 4 bits count")
    assert 0.5 < one.key_error < 1


class Links(html.parser.HTMLParser):
    found: list[str]

    def handle_starttag(self, tag, attrs):
        sources = [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.found += [value for value in sources if not value.startswith(("#", "data:"))]


@pytest.mark.slow
def test_reports(arrays, tmp_path):
    found = tools.study(arrays, "fp8,int4:g32")
    names = {path.name for path in found.save(tmp_path)}
    drawn = {
        f"{name}.{kind}" for name in ("errors", "pareto", "heads", "channels") for kind in ("svg", "png")
    }
    assert names == {"study.json", "report.md", "report.html", "table.csv", "table.tex"} | drawn
    assert json.loads((tmp_path / "study.json").read_text())["summary"][0]["scheme"] == "fp8"
    page, links = (tmp_path / "report.html").read_text(), Links()
    links.found = []
    links.feed(page)
    assert links.found == []
    assert page.count("<svg") == 8  # four, for a light and a dark page
    assert "layer 1 head 2" in (tmp_path / "report.md").read_text()
    cells = ["int4:g32", "layer 1", "2", "keys"]
    assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}" in page
    for name in ("largest error", "cosine", "at an end", "zero", "outlier ratio", "logit"):
        assert f"<button>{name}</button>" in page


KILLED = """
import os, sys
import numpy as np
from kvkit import tools
from kvkit.tools.studies import plots
plots.pictures_and_prints = lambda study: ({"pareto": "<svg/>"}, {"pareto.png": b""})
keys = np.ones((1, 8, 2, 64), np.float16)
found = tools.study({"key": keys, "value": keys}, sys.argv[3])
names, replace = [], os.replace
def counted(source, target):
    if len(names) == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
    names.append(target)
    replace(source, target)
os.replace = counted
found.save(sys.argv[1])
"""


@pytest.fixture
def undrawn(monkeypatch):
    """Let reports have a picture that takes no time."""
    picture = {"pareto": "<svg/>"}, {"pareto.png": b""}
    monkeypatch.setattr(plots, "pictures_and_prints", lambda study: picture)


@pytest.mark.skipif(os.name != "posix", reason="there is no SIGKILL")
@pytest.mark.usefixtures("undrawn")
def test_a_killed_report_is_not_beside_figures_of_another(arrays, tmp_path):
    """Old or new, or figures alone."""
    found = tools.study(arrays, "fp8")
    found.save(tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, "2", "int8:g8"], check=False)
    assert done.returncode == -9
    assert not [path.name for path in tmp_path.iterdir() if path.stem in ("report", "study")]
    found.save(tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.usefixtures("undrawn")
def test_a_report_on_a_full_disk_keeps_the_old_one(arrays, tmp_path, monkeypatch):
    tools.study(arrays, "fp8").save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left on device") as caught:
        tools.study(arrays, "int8:g8").save(tmp_path)
    assert caught.value.filename == str(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_report_without_matplotlib(arrays, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    names = {path.name for path in tools.study(arrays, "fp8").save(tmp_path / "new")}
    assert names == {"study.json", "report.md", "report.html", "table.csv", "table.tex"}
    for name in ("report.md", "report.html"):
        assert "no pictures: they need matplotlib" in (tmp_path / "new" / name).read_text()


def test_an_output_that_is_no_folder_is_refused_before_the_work(arrays, tmp_path):
    (tmp_path / "file").touch()
    np.savez(tmp_path / "kv.npz", **arrays)
    command = ["study", str(tmp_path / "kv.npz"), "--schemes", "none", "-o", str(tmp_path / "file" / "in")]
    shown = CliRunner().invoke(main, command)
    assert "output: expected a folder that exists or can be made" in shown.stderr


def test_default_schemes_that_do_not_fit_the_heads_are_left_out():
    key = np.ones((1, 8, 2, 16), np.float32)
    found = tools.study({"key": key, "value": key})
    assert [one.scheme for one in found.summary] == ["fp8", "int8:g8"]
    reason = "expected a head of a multiple of 32 elements, for int4:g32, got 16"
    assert found.notes[0] == f"int4:g32 is left out ({reason})"


def test_the_verb(arrays, tmp_path):
    path = tmp_path / "kv.npz"
    np.savez(path, **arrays)
    shown = CliRunner().invoke(main, ["study", str(path), "--schemes", "fp8,q4_0"])
    assert shown.exit_code == 0, shown.output
    assert "q4_0" in shown.stdout
    assert "the 3 worst heads" in shown.stdout
    told = CliRunner().invoke(main, ["study", str(path), "--schemes", "fp8", "--json"])
    assert json.loads(told.stdout)["summary"][0]["bits"] == 8


def test_advice_goes_by_attention_where_there_are_queries(rng):
    """Weights that are nearly equal average the errors of values away, which 4 bits have."""
    key, value = rng.standard_normal((2, 1, 64, 2, 32)).astype(np.float32)
    query = rng.standard_normal((1, 1, 4, 2, 32)).astype(np.float32) / 16
    arrays, schemes = {"key": key, "value": value / 4 + 1}, "int4:g32,int8:g32,float16"
    plain = tools.study(arrays, schemes, threshold=0.05)
    seen = tools.study(arrays | {"query": query}, schemes, threshold=0.05)
    assert [one.worst_output for one in plain.summary] == [None] * 3
    for one in seen.summary:
        rows = [row for row in seen.rows if (row["scheme"], row["side"]) == (one.scheme, "attention")]
        assert one.worst_output == one.advised_error == max(row["output_error"] for row in rows)
    smallest = "the smallest that keeps the {} of every head within an error of 5 %: {}, "
    assert plain.budget().startswith(smallest.format("keys and values", "int8:g32"))
    assert seen.budget().startswith(smallest.format("attention output", "int4:g32"))
    assert seen.budget().endswith("(an arbitrary limit: threshold=0.05)")
    least = min(one.worst_output for one in seen.summary) / 2
    none = tools.study(arrays | {"query": query}, schemes, threshold=least).budget()
    assert none.startswith("no scheme keeps the attention output of every head within an error of ")


def test_quartiles_and_halves_are_those_of_plain_numpy(arrays):
    """Errors of heads in a half of the tokens; with queries, of the tokens whose queries measure them."""
    keys = {name: arrays[name] for name in ("key", "value")}
    names = "int4:g32,q4_0,int8:g32,int4:g32+hadamard"
    found = tools.study(keys, names)
    for one in found.summary:
        own = [row["relative_rms"] for row in found.rows if row["scheme"] == one.scheme]
        assert one.quartiles == np.percentile(own, (25, 50, 75)).tolist()
        for half, part in enumerate((slice(None, TOKENS // 2), slice(TOKENS // 2, None))):
            [cut] = tools.study({name: each[:, part] for name, each in keys.items()}, one.scheme).rows[::12]
            [row] = [row for row in found.rows if row["scheme"] == one.scheme][::12]
            assert row["halves"][half] == pytest.approx(cut["relative_rms"], rel=1e-5)
    halves = np.array([one.halves for one in found.summary])
    for i, one in enumerate(found.summary):
        order = [np.sign(halves[i] - other) for j, other in enumerate(halves) if i != j]
        assert one.order_holds == np.mean([first == second for first, second in order])
    seen = tools.study(arrays, names)
    for half, part in enumerate((slice(0, 1), slice(1, 2))):  # of two sequences with as many queries
        begin, end = ((0, 40), (40, TOKENS))[half]
        cut = {name: each[:, begin:end] for name, each in keys.items()}
        alone = tools.study(cut | {"query": arrays["query"][:, part]}, names)
        for one, other in zip(seen.summary, alone.summary, strict=True):
            assert one.halves[half] == pytest.approx(other.output_error, rel=1e-4)
    assert "contexts have 40 tokens or more: short contexts rank schemes badly" in seen.notes
    headings = markdown(seen, []).splitlines()[4]
    assert "heads 25-75 %" in headings
    assert "order holds" in headings


BROWSER = "chromium", "--headless", "--no-sandbox", "--disable-gpu"
MANY = "fp8,fp16,int8:g8,int8:g32,uint8:g32,q8_0,q4_0,q4_1,q5_1,iq4_nl,int4:g32,int4:g32+hadamard,nvfp4,mxfp4"
LOOK = """<script>const all = what => [...document.querySelectorAll(what)];
const box = one => one.getBoundingClientRect();
const seen = one => one.checkVisibility();
const names = all("[id^=name-]").filter(seen).map(box);
const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
document.title = JSON.stringify({ width: innerWidth, page: document.documentElement.scrollWidth,
  inside: all("body *").filter(seen).every(one => one.closest("svg") || box(one).right <= innerWidth),
  scrolled: all("table").filter(one => one.scrollWidth > one.clientWidth).length, names: names.length,
  apart: names.every((a, i) => names.slice(i + 1).every(b => !meet(a, b))),
  heads: all("table").map(one => [...one.querySelectorAll("th")].filter(seen).map(th => th.innerText)) });
parent.postMessage(document.title, "*");</script></body>"""
FRAME = """<iframe src="looked.html" style="width: {}px; height: 900px; border: 0"></iframe><pre></pre>
<script>
addEventListener("message", told => document.querySelector("pre").textContent = told.data)</script>"""


def in_browser(page):
    """Return what a page is once its scripts have run."""
    command = [*BROWSER, "--dump-dom", "--virtual-time-budget=5000", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_page_in_a_browser(arrays, tmp_path):
    """It sorts; no column is cut and nothing overflows, on a screen and on a telephone; names are apart."""
    replace(tools.study(arrays, MANY), source="/a/long/path" * 12).save(tmp_path)
    page = (tmp_path / "report.html").read_text()
    click = "<script>document.querySelectorAll('th button')[1].click()</script></body>"
    (tmp_path / "clicked.html").write_text(page.replace("</body>", click))
    shown = in_browser(tmp_path / "clicked.html")
    order = [shown.index(f"<td>{name}</td>") for name in ("int4:g32", "fp8", "q8_0")]
    assert order == sorted(order)
    (tmp_path / "looked.html").write_text(page.replace("</body>", LOOK))
    for width in 1400, 390:
        (tmp_path / "frame.html").write_text(FRAME.format(width))
        shown = in_browser(tmp_path / "frame.html").partition("<pre>")[2].partition("</pre>")[0]
        found = json.loads(html.unescape(shown))
        assert (found["width"], found["inside"], found["scrolled"]) == (width, True, 0)
        assert found["page"] <= width
        assert (found["names"], found["apart"]) == (MANY.count(",") + 1, True)
        summary, heads = found["heads"]
        assert summary[:2] == ["scheme", "bits"]
        assert {"worst output", "KL"} <= set(summary)
        assert {"scheme", "layer", "head", "side", "output", "error"} <= set(heads)
        assert (len(summary) > 5) == (width == 1400)


@pytest.mark.slow
def test_a_layer_is_studied_in_less_than_twice_its_memory(rng, tmp_path):
    """Also where a scale spans all tokens, and with queries; what is mapped is the file's."""
    states = rng.standard_normal((2, 4096, 8, 128), np.float32).astype(np.float16)
    query = rng.standard_normal((1, 1, 16, 16, 128), np.float32).astype(np.float16)
    files.write(tmp_path / "kv.npz", {"key": states[:1], "value": states[1:], "query": query})
    small = {"key": states[:1, :64], "value": states[1:, :64], "query": query}
    layer, schemes = states.nbytes, "nvfp4,int4:g32"
    del states
    tools.study(small, schemes)  # makes tables
    tracemalloc.start()
    try:
        tools.study(tmp_path / "kv.npz", schemes)
        assert tracemalloc.get_traced_memory()[1] < 2 * layer
    finally:
        tracemalloc.stop()


def test_parts_have_the_scales_of_the_whole(rng, monkeypatch):
    arrays = {name: rng.standard_normal((1, 100, 3, 64)).astype(np.float16) for name in ("key", "value")} | {
        "query": rng.standard_normal((1, 1, 4, 6, 64)).astype(np.float16)
    }
    schemes = "nvfp4,e4m3:head,int4:tensor,nvfp4+hadamard,kivi2"
    expected = tools.study(arrays, schemes)
    monkeypatch.setattr(measures, "ELEMENTS", 32 * 3 * 64)
    found = tools.study(arrays, schemes)
    for one, other in zip(expected.rows, found.rows, strict=True):
        assert one.keys() == other.keys()
        for name, number in one.items():
            assert number == (
                other[name] if isinstance(number, str) else pytest.approx(other[name], rel=1e-3)
            )
    assert [one.bits for one in found.summary] == [one.bits for one in expected.summary]


def test_latent_rows(rng):
    """A row is coded once, as key and value: errors of the row, of scores and outputs by float64."""
    rows = rng.standard_normal((2, 40, 576), np.float32)
    query, scale = rng.standard_normal((2, 1, 5, 3, 576), np.float32), 192**-0.5
    decoded = formats.decode(formats.encode(rows, "ds_mla"), "ds_mla")
    arrays = {"latent": rows, "query": query, "softmax_scale": np.array(scale)}
    found = tools.study(arrays, "ds_mla")
    [one] = found.summary
    error = np.linalg.norm(decoded - rows) / np.linalg.norm(rows)
    np.testing.assert_allclose((one.key_error, one.value_error), error, rtol=1e-5)
    assert (one.bytes_per_token, {row["side"] for row in found.rows}) == (2 * 656, {"latent", "attention"})

    def outputs(rows, layer):
        for i in range(5):
            seen = rows[layer, : 36 + i].astype(float)
            scores = query[layer, 0, i] @ seen.T * scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            yield weights / weights.sum(-1, keepdims=True) @ seen[:, :512]

    expected = []
    for layer in range(2):
        exact, coded = (np.array(list(outputs(each, layer))) for each in (rows, decoded))
        expected.append(np.linalg.norm(coded - exact) / np.linalg.norm(exact))
    np.testing.assert_allclose(one.output_error, np.mean(expected), rtol=1e-4)


def test_latent_blocks_are_made_of_rows_and_rows_of_blocks(rng):
    """By `convert --to`, bit for bit, into pages of another size; floats have to be encoded first."""
    rows = {"cache": [rng.standard_normal((3, 10, 512), np.float32)]}
    coded = tools.convert(rows, None, from_layout="vllm-mla", format="ds_v4")
    source = files.Contents(coded.arrays, {}, description=coded.description)
    blocks = tools.convert(source, None, to_layout="flashmla-ds-v4", page_size=4, verify=True)
    assert [each.shape for each in blocks.arrays["cache"]] == [(9, 5 * 576)]
    assert (blocks.description.format, blocks.description.sizes) == ("ds_v4", {"l": 1, "b": 9, "n": 4})
    arrays = blocks.arrays | {"cache.0": blocks.arrays["cache"][0]}
    del arrays["cache"]
    others = arrays | {"cache.0": arrays["cache.0"].copy()}
    others["cache.0"][8, 3 * 576 + 5] ^= 1
    one, two = (files.Contents(each, {}, description=blocks.description) for each in (arrays, others))
    assert "c 584" in str(tools.inspect(one))
    assert tools.diff(one, one).equal
    first = tools.diff(one, two).arrays[0].first
    assert [first[axis] for axis in ("page", "position", "element")] == [8, 3, 5]
    back = tools.convert(
        files.Contents(arrays, {}, description=blocks.description), None, to_layout="vllm-ds-mla",
        page_size="longest", verify=True,
    )  # fmt: skip
    np.testing.assert_array_equal(back.arrays["cache"][0], coded.arrays["cache.0"])
    with pytest.raises(KvkitError, match=r"cache: expected rows of 584 bytes \(format ds_v4\)"):
        tools.convert(rows, None, from_layout="vllm-mla", to_layout="flashmla-ds-v4")
