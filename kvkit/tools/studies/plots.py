"""Draw the pictures of a study with matplotlib, as SVG for a light or a dark page."""

from __future__ import annotations

import importlib.util
import io
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvkit.tools.studies.policies import NONE, ORACLE, RANDOM, parts_of
from kvkit.tools.studies.records import StudyRecord
from kvkit.tools.studies.schemes import EXACT
from kvkit.tools.studies.words import front_of

MEASURES = {
    "output_error": "error of outputs", "kl": "divergence (nats)", "top_changed": "other top key",
    "agreement": "agreement",
}  # fmt: skip
LOGARITHMIC = "output_error", "kl"
INK = {"light": "#1d2733", "dark": "#d7dee6"}
DPI = 300  # of pictures for print
KINDS = {"fewer bits": "#2a9d8f", "fewer tokens": "#e76f51", "both": "#7b5ea7"}
MAPS = 4  # maps in a row
LONG = 32  # signs: a longer mix has no name of its own in the picture of all schemes
WIDTH = 4.5  # inches: wider pictures have smaller letters on a phone
LETTERS = 12  # points, as large as a page's
NEAR = 10  # points: a name at this distance from its point needs no line to it
MOST_RINGS = 60  # distances to try for a name
EIGHTHS = 1, -1, 0, 7, -7, 8, 2, -2, 6, -6, 3, -3, 5, -5, 4, -4  # directions to try, in eighths of pi
Bounds = tuple[float, float, float, float]  # left, low, right, high
COLOURED = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"


def missing() -> str | None:
    """Return a note if matplotlib is not installed; otherwise None."""
    loaded = "matplotlib" in sys.modules
    found = sys.modules["matplotlib"] if loaded else importlib.util.find_spec("matplotlib")
    return None if found else "no pictures: they need matplotlib, pip install '.[plot]' in a clone"


def pictures(study: StudyRecord, page: str = "light") -> dict[str, str]:
    """Return {name: SVG} of the pictures of a study, for a light or a dark page."""
    return {name: on_page(text, page) for name, text in pictures_and_prints(study, False)[0].items()}


def on_page(text: str, page: str) -> str:
    """Return an SVG for a light page as it is on `page`: its ink has another colour."""
    return text.replace(INK["light"], INK[page])


def pictures_and_prints(study: StudyRecord, prints: bool = True) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return ({name: SVG}, {file name: PNG for print}) for a light page; no PNGs without `prints`.

    There are channels of keys, errors by layer and head, and error against size. With eviction, pictures of
    policies take the place of the last two.
    """
    import matplotlib
    from matplotlib.figure import Figure

    ink = INK["light"]
    with matplotlib.rc_context(style(ink)):
        if study.evicts and study.by_attention:
            drawn = {
                "eviction": eviction(study, Figure, ink), "scorers": scorer_panels(study, Figure, ink),
                "bits_or_tokens": bits_or_tokens(study, Figure, ink),
            }  # fmt: skip
        else:
            drawn = {"errors": error_maps(study, Figure), "pareto": pareto(study, Figure, ink)}
        mix, advised = study.mix, study.advised
        if name := mix.text if mix else advised.scheme if advised else None:
            drawn["heads"] = head_map(study, name, Figure)
        drawn["channels"] = channels(study, Figure)
        texts = {name: svg(figure) for name, figure in drawn.items()}
        made: dict[str, bytes] = {}
        how = {"format": "png", "dpi": DPI, "facecolor": "white", "bbox_inches": "tight"}
        for name, figure in drawn.items() if prints else ():
            figure.set_layout_engine("none")  # prints keep the places that the SVGs have found
            out = io.BytesIO()
            figure.savefig(out, metadata={"Software": None}, **how)  # equal figures give equal bytes
            made[f"{name}.png"] = out.getvalue()
        return texts, made


def size_in_words(study: StudyRecord) -> str:
    """Return how much a study has measured."""
    return f"{len(study.layers)} layers, {study.tokens:,} tokens"


def head_map(study: StudyRecord, scheme: str, Figure: Any) -> Any:
    """Draw the error of each layer and key head with one scheme; of a mix, also the formats of layers."""
    measure, sides = ("output_error", {"attention"}) if study.by_attention else ("relative_rms", set())
    table = np.zeros((len(study.layers), study.num_kv_heads))
    line_of_layer = {layer: i for i, layer in enumerate(study.layers)}
    for row in study.rows:
        if row["scheme"] == scheme and (row["side"] in sides or not sides):
            at = line_of_layer[row["layer"]], row["head"]
            table[at] = max(table[at], row[measure])
    figure = Figure(
        figsize=(3.6 + 0.2 * study.num_kv_heads, 1.6 + 0.21 * len(study.layers)), layout="constrained"
    )
    ax = figure.subplots()
    image = ax.imshow(100 * table, cmap="viridis", vmin=0, aspect="auto", interpolation="nearest")
    ax.set_yticks(range(len(study.layers)), [name.removeprefix("layer ") for name in study.layers])
    ax.set_xticks(range(0, study.num_kv_heads, -(-study.num_kv_heads // 8)))
    ax.set_xlabel("key head")
    ax.set_ylabel("layer")
    if study.mix is not None and study.mix.text == scheme:
        formats = [key if key == value else f"{key} / {value}" for _, key, value in study.mix.layers]
        right = ax.secondary_yaxis("right")
        right.set_yticks(range(len(formats)), formats)
        right.tick_params(length=0)
    ax.set_title(f"{scheme if study.mix is None else 'the chosen mix'};\n{size_in_words(study)}")
    what = "outputs" if study.by_attention else "keys or values"
    figure.colorbar(image, ax=ax, label=f"error of {what} (%)")
    return figure


def bits_or_tokens(study: StudyRecord, Figure: Any, ink: str) -> Any:
    """Draw the error of outputs against bytes for fewer bits, fewer tokens, and both: the best of each."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    ax = figure.subplots()
    kinds: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    for one in study.summary:
        parts = parts_of(one.scheme)
        if parts is not None and parts.scorer in (RANDOM, ORACLE):
            continue
        whole = parts is not None and parts.scheme in ("", *EXACT, "fp16", "bf16", "fp32")
        kind = "fewer bits" if parts is None else "fewer tokens" if whole else "both"
        kinds[kind].append((one.bytes_per_token, one.output_error or 0.0))
    for (kind, points), colour in zip(kinds.items(), KINDS.values(), strict=True):
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=colour, markersize=3, alpha=0.35)
            line = {"color": colour, "markersize": 4, "linewidth": 1.4, "clip_on": False}
            ax.plot(*zip(*best_of(points), strict=True), "o-", label=kind, **line)
    ax.set_xscale("log")
    shown = [error for points in kinds.values() for _, error in points if error > 0]
    if shown:
        scale_from_zero(ax, min(shown), 1.6 * max(shown))
    readable_bytes(ax)
    turn_ticks(ax)
    ax.set_xlabel(f"bytes per token of the context;\n{size_in_words(study)}")
    ax.set_ylabel("relative error of outputs")
    legend_above(ax)
    return figure


def scorer_panels(study: StudyRecord, Figure: Any, ink: str) -> Any:
    """Draw a panel for each scorer: its errors of outputs against bytes, before those of all others."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in study.summary:
        if (parts := parts_of(one.scheme)) is not None:
            lines.setdefault(parts.scorer, []).append((one.bytes_per_token, one.output_error or 0.0))
    wide, high = min(len(lines), MAPS), -(-len(lines) // MAPS)
    figure = Figure(figsize=(1.9 * wide + 0.9, 1.8 * high + 1.2), layout="constrained")
    axes = figure.subplots(high, wide, sharex=True, sharey=True, squeeze=False).ravel()
    for ax, name in itertools.zip_longest(axes, lines):
        if name is None:
            ax.set_axis_off()
            continue
        for points in lines.values():
            ax.plot(*zip(*sorted(points), strict=True), ".", color=ink, alpha=0.18, markersize=4)
        ax.plot(*zip(*lines[name], strict=True), "o", color="#2a9d8f", markersize=3)
        ax.plot(*zip(*best_of(lines[name]), strict=True), color="#2a9d8f", linewidth=1.2)
        ax.set_title(name)
    axes[0].set_xscale("log")
    if min(error for points in lines.values() for _, error in points) > 0:
        scale_logarithmic(axes[0])
    readable_bytes(axes[0])
    for ax in axes:
        turn_ticks(ax)
    figure.supxlabel(f"bytes per token of the context;\n{size_in_words(study)}", fontsize=LETTERS)
    figure.supylabel("relative error of outputs", fontsize=LETTERS)
    return figure


def best_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (bytes, error) whose error is below that of all with fewer bytes, in order."""
    best: list[tuple[float, float]] = []
    for at in sorted(points):
        if not best or at[1] < best[-1][1]:
            best.append(at)
    return best


def readable_bytes(ax: Any) -> None:
    """Write the bytes on a logarithmic axis in digits."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
    ax.xaxis.set_minor_formatter(NullFormatter())


def scale_from_zero(ax: Any, least: float, most: float) -> None:
    """Make the vertical axis logarithmic from `least` on, with zero below it."""
    ax.set_yscale("symlog", linthresh=least, linscale=0.5)
    ax.set_ylim(0, most)
    powers = 10.0 ** np.arange(np.ceil(np.log10(least)), np.log10(most))
    ax.set_yticks([0, *powers])  # those below `least` would touch the zero's number


def scale_logarithmic(ax: Any) -> None:
    """Make the vertical axis logarithmic, with numbers that do not touch."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if high < 12 * low else (1,)))
    ax.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def turn_ticks(ax: Any) -> None:
    """Turn the numbers below an axis, which would touch each other."""
    ax.tick_params(axis="x", labelrotation=45)


def legend_above(ax: Any, columns: int = 1) -> None:
    """Write the legend above the axes, where no line passes."""
    ax.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, frameon=False, borderpad=0,
        handlelength=1.6, columnspacing=1,
    )  # fmt: skip


def style(ink: str) -> Any:
    """Return the settings of all pictures. The salt makes equal figures give equal texts."""
    return {
        "svg.hashsalt": "kvkit", "svg.fonttype": "path", "font.size": LETTERS, "axes.titlesize": LETTERS,
        "axes.spines.top": False, "axes.spines.right": False, **dict.fromkeys(COLOURED, ink),
    }  # fmt: skip


def svg(figure: Any) -> str:
    """Return a figure as SVG."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None}, bbox_inches="tight")
    text = out.getvalue()
    return text[text.index("<svg") :]


def error_maps(study: StudyRecord, Figure: Any) -> Any:
    """Draw a map for each scheme: keys and values by layer and head."""
    count = len(study.summary)
    wide, high = min(count, MAPS), -(-count // MAPS)
    figure = Figure(figsize=(2.2 * wide + 1.8, (1.2 + 0.21 * len(study.layers)) * high), layout="constrained")
    axes = figure.subplots(high, wide, sharey=True, squeeze=False).ravel()
    for ax in axes[count:]:
        ax.set_axis_off()
    line_of_layer = {layer: i for i, layer in enumerate(study.layers)}
    maps = []
    for one in study.summary:
        table = np.zeros((len(study.layers), 2 * study.num_kv_heads))  # keys to the left, values to the right
        for row in study.rows:
            if row["scheme"] == one.scheme and row["side"] != "attention":
                column = row["head"] + study.num_kv_heads * (row["side"] == "values")
                table[line_of_layer[row["layer"]], column] = row["relative_rms"]
        maps.append(table)
    most = max(table.max() for table in maps) or 1.0
    for ax, one, table in zip(axes, study.summary, maps, strict=False):
        image = ax.imshow(table, cmap="viridis", vmin=0, vmax=most, aspect="auto", interpolation="nearest")
        ax.axvline(study.num_kv_heads - 0.5, color="white", linewidth=1)
        ax.set_title(one.scheme)
        ax.set_xticks([study.num_kv_heads / 2 - 0.5, study.num_kv_heads * 1.5 - 0.5], ["keys", "values"])
    axes[0].set_yticks(range(len(study.layers)), study.layers)
    figure.colorbar(image, ax=axes, label="relative error")
    return figure


def pareto(study: StudyRecord, Figure: Any, ink: str) -> Any:
    """Draw error against bits; a line joins the schemes that no other scheme beats in both."""
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    ax = figure.subplots()
    mix = None if study.mix is None or len(study.mix.text) < LONG else study.mix.text
    names = {one.scheme: "the chosen mix" if one.scheme == mix else one.scheme for one in study.summary}
    points = sorted((one.bits, one.advised_error, names[one.scheme]) for one in study.summary)
    front = [(one.bits, one.advised_error) for one in front_of(study.summary)]
    if len(front) > 1:
        ax.plot(*zip(*front, strict=True), color="#2a9d8f", linewidth=1)
    for bits, error, _ in points:
        best = (bits, error) in front
        ax.plot(bits, error, "o", color="#2a9d8f" if best else "#e76f51", zorder=4 if best else 3)
    ax.margins(0.1)
    if all(error > 0 for _, error, _ in points):
        scale_logarithmic(ax)
    ax.set_xlabel(f"bits a number, scales and all;\n{size_in_words(study)}")
    ax.set_ylabel("relative error of the worst head" + ",\noutputs" * study.by_attention)
    # Names of the front come first, and so are the nearest to their points.
    label_points(figure, {ax: sorted(points, key=lambda point: point[:2] not in front)}, ink)
    return figure


def eviction(study: StudyRecord, Figure: Any, ink: str, wanted: Sequence[str] = tuple(MEASURES)) -> Any:
    """Draw errors, divergence and changed top keys against bytes: a line for each scorer, points for codes.

    Each scheme of kept tokens has a column; the first column also has the codes of all tokens. Lines end
    where all tokens stay.
    """
    # A scheme of all tokens counts as a policy without a scorer.
    parts = [(parts_of(one.scheme) or ("", 1.0, one.scheme), one) for one in study.summary]
    columns = list(dict.fromkeys(scheme for (scorer, _, scheme), _ in parts if scorer))
    scorers = list(dict.fromkeys(scorer for (scorer, *_), _ in parts if scorer))
    measures = [name for name in wanted if all(vars(one)[name] is not None for _, one in parts)]
    figure = Figure(figsize=(3.0 * len(columns) + 1.5, 2.6 * len(measures) + 1.8), layout="constrained")
    axes = figure.subplots(len(measures), len(columns), sharex=True, sharey="row", squeeze=False)
    named: dict[Any, list[tuple[float, float, str]]] = {}
    for (row, measure), (column, scheme) in itertools.product(enumerate(measures), enumerate(columns)):
        ax = axes[row, column]
        points = [(part, (one.bytes_per_token, vars(one)[measure])) for part, one in parts]
        whole = [at for (scorer, _, own), at in points if not scorer and own == (scheme or NONE)]
        for number, scorer in enumerate(scorers):
            line = sorted([at for (name, _, own), at in points if (name, own) == (scorer, scheme)])
            if line:
                ax.plot(*zip(*line, *whole, strict=True), label=scorer, **line_of(scorer, number, ink))
        for (scorer, _, own), at in points:
            if not scorer and (not column or own == scheme):
                ax.plot(*at, "s", color=ink, markersize=4, zorder=3)
                named.setdefault(ax, []).append((*at, own))
        if not row:
            ax.set_title(f"coded as {scheme}" if scheme else "as the source has them")
        turn_ticks(ax)
    for (measure, label), ax in zip(((name, MEASURES[name]) for name in measures), axes[:, 0], strict=True):
        numbers = [vars(one)[measure] for (scorer, *_), one in parts if scorer]
        if measure in LOGARITHMIC and min(numbers) > 0:  # leave room for codes of smaller or no cost
            scale_from_zero(ax, min(numbers), 1.6 * max(numbers))
        ax.set_ylabel(label)
    axes[0, 0].set_xscale("log")
    readable_bytes(axes[0, 0])
    axes[0, 0].margins(x=0.12)
    found = (ax.get_legend_handles_labels() for ax in axes[0])
    lines = {name: line for pair in found for line, name in zip(*pair, strict=True)}
    columns_of_names = max(2, int(figure.get_figwidth() / 1.6))
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=columns_of_names, frameon=False)
    figure.supxlabel(f"bytes per token of the context ({study.tokens:,} tokens)", fontsize=LETTERS)
    label_points(figure, named, ink)
    return figure


def line_of(scorer: str, number: int, ink: str) -> dict[str, Any]:
    """Return the style of a scorer's line: `random` and `oracle` have broken lines in the colour of texts."""
    if scorer in (RANDOM, ORACLE):
        return {"color": ink, "linestyle": ":" if scorer == RANDOM else "--", "linewidth": 1.2}
    marker = "o^Dv<>P*X"[number % 9]
    return {"color": f"C{number % 10}", "marker": marker, "markersize": 4, "linewidth": 1.2}


def label_points(figure: Any, named: dict[Any, list[tuple[float, float, str]]], ink: str) -> None:
    """Write the name of each point (x, y, name) of axes at the nearest place that is empty."""
    figure.draw_without_rendering()  # computes the layout, and so the places of points
    figure.set_layout_engine("none")
    scale = figure.dpi / 72
    number = itertools.count()
    for ax, points in named.items():
        taken = boxes_of_lines(ax, scale)
        for x, y, name in points:
            label = ax.annotate(
                name, (x, y), xytext=(0, 0), textcoords="offset points", color=ink, va="bottom", zorder=5,
                arrowprops={"arrowstyle": "-", "color": ink, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3},
            )  # fmt: skip
            label.set_gid(f"name-{next(number)}")
            box = label.get_window_extent()
            at, frame = ax.transData.transform((x, y)), (*ax.bbox.min, *ax.bbox.max)
            place = free_place(at[0], at[1], box.width, box.height, taken, frame, scale)
            if place is None:  # a table beside the picture has all names
                label.remove()
                continue
            offset = np.subtract(place[:2], at)
            label.set_position(tuple(offset / scale))
            label.arrow_patch.set_visible(np.hypot(*offset) > NEAR * scale + box.width)
            taken = np.append(taken, [place], 0)


def boxes_of_lines(ax: Any, scale: float) -> np.ndarray:
    """Return small boxes [count, 4] along the lines of axes, and one for each marker."""
    boxes = [np.empty((0, 4))]
    for line in ax.lines:
        path = line.get_transform().transform(np.column_stack(line.get_data()))
        if line.get_marker() not in ("None", "", None):
            half = (line.get_markersize() / 2 + 2) * scale
            boxes.append(np.hstack([path - half, path + half]))
        if line.get_linestyle() != "None":
            for begin, end in itertools.pairwise(path):
                steps = np.linspace(begin, end, 2 + int(np.hypot(*(end - begin)) / (2 * scale)))
                boxes.append(np.hstack([steps - scale, steps + scale]))
    return np.concatenate(boxes)


def free_place(
    x: float, y: float, width: float, height: float, taken: np.ndarray, frame: Bounds, scale: float
) -> Bounds | None:
    """Return the box nearest to a point, in the frame, that overlaps none of `taken`; None without any."""
    gap = 5 * scale
    for ring in range(MOST_RINGS):
        far = gap + ring * height / 2
        for eighths in EIGHTHS:
            dx, dy = far * np.cos(eighths * np.pi / 8), far * np.sin(eighths * np.pi / 8)
            left = x + dx - (width if dx < 0 else 0)
            low = y + dy - height / 2
            low += height / 2 * np.sin(eighths * np.pi / 8)
            box = left, low, left + width, low + height
            inside = frame[0] <= box[0] and box[2] <= frame[2] and frame[1] <= box[1] and box[3] <= frame[3]
            if inside and not ((box[:2] < taken[:, 2:]) & (taken[:, :2] < box[2:])).all(1).any():
                return box
    return None


def channels(study: StudyRecord, Figure: Any) -> Any:
    """Draw histograms of key channels by mean magnitude / median of their head, a line for each layer."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    ax = figure.subplots()
    for row in study.channels:
        middle = np.median(row["means"], 1, keepdims=True)
        ratio = (row["means"] / np.where(middle > 0, middle, 1)).ravel()
        counts, edges = np.histogram(ratio, bins=np.geomspace(0.05, max(20.0, ratio.max() * 1.01), 40))
        ax.stairs(counts, edges, linewidth=1, label=row["layer"] if len(study.channels) <= 6 else None)
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=1)
    ax.set_xlabel(f"mean magnitude of a key channel /\nmedian of its head; {size_in_words(study)}")
    ax.set_ylabel("channels")
    if len(study.channels) <= 6:
        legend_above(ax, 2)
    return figure
