"""Draw how cost grows, from results/growth.json: python benchmarks/plot.py (needs matplotlib)"""

import hashlib
import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIGURES = HERE / "results" / "growth.json"
FOLDER = HERE.parent / "docs" / "pictures"
CASE = re.compile(r"decode (\w+), ([\d,]+) x ([\d,]+) tokens, (\d+) threads")
COLOURS = {"float16": "#2f7fd1", "int8": "#d1722f"}
MARKS = {True: ("o", "-"), False: ("s", "--")}  # for all threads, for one thread


def points(results):
    """Yield (kind, sequences, tokens of each, threads, nanoseconds per kilobyte) of each step."""
    for result in results:
        found = CASE.fullmatch(result["case"])
        if found:
            kind, *numbers = found.groups()
            pace = result["seconds"] / result["bytes"] * 1e12
            yield kind, *(int(number.replace(",", "")) for number in numbers), pace


def drawn(page):
    """Return the picture as SVG, for a light or a dark page, with a digest of its figures."""
    import matplotlib
    from matplotlib.figure import Figure

    from kvkit.tools.studies import plots

    results = json.loads(FIGURES.read_text())["results"]
    found = [*points(results)]
    most, each = max(threads for *_, threads, _ in found), min(n for _, b, n, *_ in found if b > 1)
    with matplotlib.rc_context(plots.style(plots.INK[page])):
        figure = Figure(figsize=(4.8, 6), layout="constrained")
        lengths, sequences = figure.subplots(2, 1)
        for axes, label, shown in (
            (
                lengths,
                "tokens of one sequence",
                [(k, t, n, y) for k, b, n, t, y in found if b == 1 and n != each],
            ),
            (
                sequences,
                f"sequences of {each:,} tokens",
                [(k, t, b, y) for k, b, n, t, y in found if n == each],
            ),
        ):
            for kind, threads in dict.fromkeys((kind, threads) for kind, threads, *_ in shown):
                line = [(x, y) for *of, x, y in shown if of == [kind, threads]]
                mark, dashes = MARKS[threads == most]
                name = f"{kind}, {threads} thread{'s' * (threads > 1)}"
                axes.plot(*zip(*line, strict=True), mark, linestyle=dashes, color=COLOURS[kind], label=name)
            axes.set_xscale("log", base=2)
            axes.set_xlabel(label)
            axes.set_ylim(bottom=0)
            axes.set_ylabel("ns for a kilobyte of the cache")
        lengths.legend(frameon=False)
        return plots.svg(figure).replace("</svg>", f"<desc>{digest()}</desc>\n</svg>")


def digest():
    """Return a digest of the figures that are shown."""
    return hashlib.sha256(FIGURES.read_bytes()).hexdigest()


if __name__ == "__main__":
    if FIGURES.exists():  # it was measured
        for page in ("light", "dark"):
            (FOLDER / f"growth-{page}.svg").write_text(drawn(page))
