"""No label of a picture that matplotlib draws lies on a line, a bar, a marker or another label."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

from benchmarks import plot
from kvkit import tools

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.figure import Figure  # noqa: E402

ROOT = Path(__file__).parents[2]
EVICT = "int4:g32,int8:g32,knorm@0.5,snapkv@0.5,knorm@0.5+int4:g32,snapkv@0.25+int8:g32,streaming@0.25"
SCHEMES = "fp8,int8:g8,q8_0,int4:g32,int4:g32+hadamard,q4_0,nvfp4,kivi4,kivi2"

pytestmark = pytest.mark.cpu


def labels_of(figure):
    """Return (text, box) of each label that is seen."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    found += [text for text in (figure._supxlabel, figure._supylabel) if text is not None]
    for axes in (ax for ax in figure.axes if ax.axison):
        found += [*axes.texts, axes.title, axes._left_title, axes._right_title]
        found += [] if axes.get_legend() is None else axes.get_legend().get_texts()
        for axis in (axes.xaxis, axes.yaxis, *(getattr(each, "yaxis", None) for each in axes.child_axes)):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            found.append(axis.label)
            found += [
                text for tick in ticks if low <= tick.get_loc() <= high for text in (tick.label1, tick.label2)
            ]
    seen = dict.fromkeys(text for text in found if text.get_visible() and text.get_text().strip())
    # An annotation's own line is no part of its words.
    return [(text.get_text(), matplotlib.text.Text.get_window_extent(text).padded(-1)) for text in seen]


def places_of(axes):
    """Return the places of lines, of edges of bars and steps, and of markers, a pixel apart."""
    paths, places = [], [np.empty((0, 2))]
    for line in (line for line in axes.lines if line.get_visible()):
        path, half = line.get_transform().transform_path(line.get_path()).vertices, line.get_markersize() / 2
        paths += [path] if line.get_linestyle() != "None" else []
        if line.get_marker() not in ("None", "", None):
            half *= axes.figure.dpi / 72
            places += [path + half * np.array(side) for side in ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))]
    paths += [patch.get_transform().transform_path(patch.get_path()).vertices for patch in axes.patches]
    spines = [spine for spine in axes.spines.values() if spine.get_visible() and axes.axison]
    paths += [spine.get_transform().transform_path(spine.get_path()).vertices for spine in spines]
    for begin, end in (pair for path in paths for pair in itertools.pairwise(path)):
        if np.isfinite([begin, end]).all():
            places.append(np.linspace(begin, end, 2 + int(np.hypot(*(end - begin)))))
    return np.concatenate(places)


def overlaps(figure):
    """Return what each label lies on: a line, or the other label."""
    figure.draw_without_rendering()
    labels = labels_of(figure)
    found = [
        (one[0], other[0]) for one, other in itertools.combinations(labels, 2) if one[1].overlaps(other[1])
    ]
    for axes in (ax for ax in figure.axes if ax.axison):
        places = places_of(axes)
        for text, box in labels:
            if ((places > box.min) & (places < box.max)).all(1).any():
                found.append((text, "line"))
    return found


@pytest.fixture
def drawn(monkeypatch):
    """Yield a list which gets, for each SVG that is written, the overlaps in its figure; PNGs stay empty."""
    found, save = [], Figure.savefig

    def measured(figure, *args, **kwargs):
        if kwargs.get("format") != "png":
            save(figure, *args, **kwargs)
            found.append(overlaps(figure))

    monkeypatch.setattr(Figure, "savefig", measured)
    return found


@pytest.mark.parametrize("name", plot.PICTURES)
def test_pictures_of_results(drawn, name):
    plot.draw_svg(name, "light")
    assert drawn == [[]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"schemes": SCHEMES}, {"evict": EVICT, "judge": 4}], ids=["schemes", "evict"]
)
def test_pictures_of_a_study(drawn, options, rng, tmp_path):
    """The shown caches are of 4 layers: as many as a reader can tell apart."""
    key, value = rng.standard_normal((2, 4, 160, 3, 64)).astype(np.float16) * rng.uniform(0.2, 4, 64).astype(
        "f2"
    )
    query = rng.standard_normal((4, 1, 8, 6, 64)).astype(np.float16)
    tools.study({"key": key, "value": value, "query": query}, threshold=5, **options).save(tmp_path)
    assert drawn == [[]] * len(drawn)
    assert len(drawn) >= 4


def test_pictures_of_differences(drawn, rng, tmp_path):
    key = rng.standard_normal((4, 2, 256, 8))
    other = key.copy()
    other[2, :, 40:60] += 1
    tools.diff(
        {"key_cache": key},
        {"key_cache": other},
        layout_a="l h n c",
        layout_b="l h n c",
        plot=tmp_path / "map.svg",
    )
    assert drawn == [[]]


def test_a_picture_of_an_example(drawn, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples")
    for needed in "click", "gguf", "tokenizers":
        pytest.importorskip(needed)
    spec = importlib.util.spec_from_file_location("endless", ROOT / "examples" / "endless.py")
    spec.loader.exec_module(endless := importlib.util.module_from_spec(spec))
    losses = [np.array([2.5])] * 64
    found = {"sliding": (losses, [2048] * 64), "growing": (losses, [*range(512, 64 * 512 + 1, 512)])}
    endless.plot(found, 8192, tmp_path / "endless.svg")
    assert drawn == [[]]


@pytest.mark.parametrize(
    ("plant", "wanted"),
    [
        (lambda axes: axes.text(0.5, 0.5, "label", ha="center"), ("label", "line")),
        (lambda axes: axes.text(0.8, 0.3, "label") and axes.text(0.82, 0.3, "other"), ("label", "other")),
        (lambda axes: axes.text(0.1, 0.7, "label") and axes.plot(0.13, 0.72, "o"), ("label", "line")),
        (lambda axes: axes.text(0.1, 0.7, "label") and axes.bar(0.13, 0.72, 0.4), ("label", "line")),
        (lambda axes: axes.set_xticks([0.5, 0.51], ["label", "other"]), ("label", "other")),
    ],
)
def test_planted_overlaps_are_found(plant, wanted):
    figure = Figure(figsize=(4, 3))
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.plot([0, 1], [0, 1])
    assert overlaps(figure) == []
    plant(axes)
    assert wanted in overlaps(figure)
