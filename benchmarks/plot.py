"""Draw how cost grows, and how long others take: python -m benchmarks.plot (needs matplotlib)

`growth` shows results/growth.json and shapes.json, `threads` the model of many_cores.py, `rivals` the
cases of rivals.json, and `models` the steps of models.json.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import many_cores
from benchmarks.table import PEERS
from kvkit.tools.studies import plots

HERE = Path(__file__).resolve().parent
GROWTH, SHAPES, RIVALS, MODELS = (
    HERE / "results" / f"{name}.json" for name in ("growth", "shapes", "rivals", "models")
)
FOLDER = HERE.parent / "docs" / "pictures"
STEP = re.compile(
    r"decode (?P<kind>\w+), (?P<batch>\d+) x (?P<tokens>[\d,]+) tokens, (?P<threads>\d+) threads"
)
HEADS = re.compile(r"decode (?P<kind>\w+), (?P<heads>\d+) kv heads")
PAGES = re.compile(r"pages of (?P<page>\d+), (?P<kind>\w+)")
COLOURS = {"float16": "#2f7fd1", "int8": "#d1722f"}
LOOKS = ("-", "o"), ("--", "s"), (":", "^"), ("-.", "v")  # of lines in one colour
FLOOR = "a plain read"  # of the same bytes, dotted

Lines = dict[str, list[tuple[int, float, float]]]  # (x, cost, floor) of each point, by line
NANOSECONDS, MILLISECONDS = "ns for a kilobyte", "ms of a step"


def results() -> list[dict[str, Any]]:
    """Return the committed results."""
    return [result for path in (GROWTH, SHAPES) for result in json.loads(path.read_text())["results"]]


def lines(pattern: re.Pattern[str], x: str, unit: str = NANOSECONDS, **wanted: int) -> Lines:
    """Return what the cases that match cost, and what a plain read of their bytes costs.

    `x` names the group of the pattern for the axis, `wanted` the values that other groups must have.
    """
    found: Lines = {}
    for result in results():
        if match := pattern.fullmatch(result["case"]):
            facts = {name: text.replace(",", "") for name, text in match.groupdict().items()}
            if all(int(facts[name]) == number for name, number in wanted.items()):
                threads = facts.get("threads")
                name = facts["kind"] + (f", {threads} thread{'s' * (threads != '1')}" if threads else "")
                scale = 1e3 if unit == MILLISECONDS else 1e12 / result["bytes"]
                costs = (seconds * scale for seconds in (result["seconds"], result["beside"]["read"]))
                found.setdefault(name, []).append((int(facts[x]), *costs))
    return {name: sorted(points) for name, points in found.items()}


def panels() -> Iterator[tuple[str, str, Lines]]:
    """Yield the labels of both axes and the lines of each panel of `growth`."""
    steps = [match for result in results() if (match := STEP.fullmatch(result["case"]))]
    length = int(next(match["tokens"] for match in steps if int(match["batch"]) > 1).replace(",", ""))
    threads = max(int(match["threads"]) for match in steps)
    contexts = {  # the length of the batches has no case on one thread
        name: [point for point in points if point[0] != length]
        for name, points in lines(STEP, "tokens", batch=1).items()
    }
    batches = lines(STEP, "batch", tokens=length, threads=threads)
    yield "tokens of one sequence", NANOSECONDS, contexts
    yield f"sequences of {length:,} tokens", NANOSECONDS, batches
    yield "key heads, for 32 query heads, 1 thread", MILLISECONDS, lines(HEADS, "heads", MILLISECONDS)
    yield "tokens of a page, 1 thread", NANOSECONDS, lines(PAGES, "page")


def draw_growth(figure: Any) -> None:
    """Draw a panel for each thing that grows, with the floor of each line."""
    for axes, (label, unit, shown) in zip(figure.subplots(4, 1), panels(), strict=True):
        for name, points in shown.items():
            x, cost, floor = zip(*points, strict=True)
            look = {"color": COLOURS[name.split(",")[0]], "linestyle": "--" if ", 1 thread" in name else "-"}
            axes.plot(x, cost, "o", markersize=4, **look, label=name)
            axes.plot(x, floor, ":", color=look["color"], linewidth=1)
        axes.plot([], [], ":", color="gray", linewidth=1, label=FLOOR)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(label)
        axes.set_ylim(0, None)
        axes.set_ylabel(unit)
        plots.legend_above(axes, 2)


def draw_threads(figure: Any) -> None:
    """Draw the modelled speed by threads, with the most that memory gives, and the time by splits."""
    machine = many_cores.measured(GROWTH)
    by_threads, by_splits = figure.subplots(2, 1)
    for name, speeds in many_cores.speeds(machine).items():
        by_threads.plot(many_cores.THREADS, [speed / 1e9 for speed in speeds], "o-", markersize=3, label=name)
    bound = [min(count * machine.core, machine.memory) / 1e9 for count in many_cores.THREADS]
    by_threads.plot(many_cores.THREADS, bound, ":", color="gray", label="cores' reads, then memory")
    by_threads.set(xlabel="threads", ylabel="GB/s of the cache", ylim=(0, None))
    plots.legend_above(by_threads)
    for name, times in many_cores.split_times(machine).items():
        of_the_best = [seconds / min(times) for seconds in times]
        by_splits.plot(many_cores.MOST_SPLITS, of_the_best, "o-", markersize=3, label=name)
    by_splits.set(xlabel="most splits of a call, 64 threads", ylabel="time, of the best", ylim=(0.9, 3))
    by_splits.set_xscale("log", base=2)


def draw_rivals(figure: Any) -> None:
    """Draw the time of a step of decoding with 8 key heads as a bar for kvkit and each peer, by case."""
    axes, y, longest = figure.subplots(), 0, 0.0
    for result in json.loads(RIVALS.read_text())["results"]:
        if ", 8 kv heads" not in result["case"]:
            continue
        case = (
            result["case"].removeprefix("decode ").replace(", layout 3", "").replace("kv heads", "key heads")
        )
        axes.text(0, y, case, va="center", fontweight="bold")
        y += 1
        for name, seconds in {"kvkit": result["seconds"], **result["beside"]}.items():
            if seconds and name in ("kvkit", *PEERS):
                ours = name == "kvkit"
                axes.barh(y, seconds * 1e3, 0.8, color=COLOURS["float16" if ours else "int8"])
                axes.text(seconds * 1e3, y, f" {name} {seconds * 1e3:.3g} ms", va="center")
                longest, y = max(longest, seconds * 1e3), y + 1
        y += 1
    axes.set(xlabel="ms of a step of one layer", xlim=(0, 1.8 * longest), ylim=(y - 1, -1))  # names need room
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def draw_models(figure: Any) -> None:
    """Draw the time of a step of a whole model against its context, a line for each cache."""
    axes, shown = figure.subplots(), {}
    for result in json.loads(MODELS.read_text())["results"]:
        if re.fullmatch("step .* tokens", result["case"]):  # in float32
            tokens = int(result["case"].split()[2].replace(",", ""))
            for name, seconds in ({"KvkitCache": result["seconds"]} | result["beside"]).items():
                if seconds:
                    shown.setdefault(name, []).append((tokens, seconds * 1e3))
    looks = {True: iter(LOOKS), False: iter(LOOKS)}
    for name, points in sorted(shown.items(), key=lambda item: -item[1][-1][1]):  # as they end, from above
        ours = name.startswith("Kvkit")
        line, marker = next(looks[ours])
        axes.plot(
            *zip(*points, strict=True), line, marker=marker, markersize=5,
            color=COLOURS["float16" if ours else "int8"], label=name,
        )  # fmt: skip
    ticks = [tokens for tokens, _ in shown["KvkitCache"]]
    most = max(height for points in shown.values() for _, height in points)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks[-1::-2], [f"{tokens:,}" for tokens in ticks[-1::-2]])
    heights = [2**i for i in range(5, 12) if 2**i < most]
    axes.set_yticks(heights, [str(height) for height in heights])
    axes.set_ylim(32, None)
    axes.set(xlabel="tokens of the context", ylabel="ms of a step")
    plots.legend_above(axes, 2)


PICTURES = {
    "growth": (draw_growth, 13),
    "threads": (draw_threads, 8),
    "rivals": (draw_rivals, 8),
    "models": (draw_models, 5),
}  # and their heights in inches
SOURCES = {
    "growth": (GROWTH, SHAPES),
    "threads": (GROWTH, HERE / "many_cores.py"),
    "rivals": (RIVALS,),
    "models": (MODELS,),
}


def draw_svg(name: str, page: str) -> str:
    """Return a picture as SVG, for a light or a dark page, with a digest of the figures it came from."""
    import matplotlib
    from matplotlib.figure import Figure

    draw, height = PICTURES[name]
    with matplotlib.rc_context(plots.style(plots.INK[page])):
        figure = Figure(figsize=(plots.WIDTH, height), layout="constrained")
        draw(figure)
        return plots.svg(figure).replace("</svg>", f"<desc>{digest(name)}</desc>\n</svg>")


def digest(name: str) -> str:
    """Return a digest of the figures that a picture shows."""
    sources = SOURCES[name]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


if __name__ == "__main__":
    for name, page in itertools.product(PICTURES, ("light", "dark")):
        if all(path.exists() for path in SOURCES[name]):  # they were measured
            (FOLDER / f"{name}-{page}.svg").write_text(draw_svg(name, page))
