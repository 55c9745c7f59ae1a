"""Put the figures of results/cpu.json into README.md beside this file: python benchmarks/table.py"""

import json
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"


def figures(report):
    """The results as a Markdown table, below a line about the machine."""
    about = report["machine"]
    yield f"{about['threads']} threads of a {about['cpu']} ({about['vectors']}), numba {about['numba']}, "
    yield f"numpy {about['numpy']}; medians of {report['rounds']} runs.\n\n"
    yield "| case | µs | GB/s | copy, GB/s | of the copy | goal |\n|---|--:|--:|--:|--:|--:|\n"
    for result in report["results"]:
        cells = [result["case"], f"{result['seconds'] * 1e6:,.0f}", "", "", "", ""]
        if "bytes" in result:
            speed, copy = (result["bytes"] / result[key] / 1e9 for key in ("seconds", "copy_seconds"))
            goal = f"{result['goal']:.0%}" if result["goal"] else ""
            missed = result["goal"] and speed / copy < result["goal"]
            share = f"**{speed / copy:.0%}**" if missed else f"{speed / copy:.0%}"
            cells[2:] = f"{speed:.1f}", f"{copy:.1f}", share, goal
        yield f"| {' | '.join(cells)} |\n"


def text(readme, report):
    head, rest = readme.split(BEGIN)
    return head + BEGIN + "".join(figures(report)) + END + rest.split(END)[1]


if __name__ == "__main__":
    path = HERE / "README.md"
    path.write_text(text(path.read_text(), json.loads((HERE / "results" / "cpu.json").read_text())))
