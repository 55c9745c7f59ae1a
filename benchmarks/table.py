"""Put the figures of results/ into the pages that show them: python -m benchmarks.table

The site's page of all tables gets them when Sphinx makes it, by `filled`.
"""

import itertools
import json
import re
from pathlib import Path

from benchmarks.suites.measuring import bound_share, ratio_text, speed_ratio

HERE = Path(__file__).resolve().parent
PLACES = "layout 3", "layout 0", "pages of 16"
PEERS = "torch", "FlexAttention", "vLLM", "onnxruntime", "ggml", "ik_llama.cpp"


def about(report):
    """Return a line about the machine."""
    machine = report["machine"]
    versions = {name: machine[name] for name in ("numba", "numpy")} | report.get("peers", {})
    article = "an" if machine["cpu"][0] in "aeiou" else "a"
    yield f"{machine['threads']} threads of {article} {machine['cpu']} ({machine['vectors']}), "
    yield ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"; medians of at least {report['rounds']} runs.\n\n"


def markdown(columns, rows):
    """Return a table whose first column is text; the others are numbers."""
    yield f"| {' | '.join(columns)} |\n|---|{'--:|' * (len(columns) - 1)}\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n"


def speed(result, key):
    return f"{result[key] / result['seconds'] / 1e9:.1f}" if key in result else ""


def times(result, name):
    """Return how fast a result is beside `name`; bold where it misses its goal."""
    if name not in result.get("beside", {}):
        return ""
    ratio, goal = speed_ratio(result, name), result.get("goals", {}).get(name, 0)
    text = ratio_text(name, ratio)
    return f"**{text}**" if ratio and ratio < goal else text


def bound(result):
    """Return the share of a case's bound with a letter for it; bold where it misses the goal of a read."""
    share, name = bound_share(result)
    text = f"{share:.0%} {name[:1]}"
    return "" if not name else f", **{text}**" if share < result["goals"]["read"] else f", {text}"


def goal(result, name):
    goals = result.get("goals", {})
    return ratio_text(name, goals[name]) if name in goals else ""


def cache(report):
    """Return the results of cache operators, beside copies."""
    rows = []
    for result in report["results"]:
        copy = result.get("beside", {}).get("copy")
        cells = result["case"], f"{result['seconds'] * 1e6:,.0f}", speed(result, "bytes")
        copied = f"{result['bytes'] / copy / 1e9:.1f}" if copy else ""
        rows.append((*cells, copied, times(result, "copy"), goal(result, "copy")))
    yield from about(report)
    yield from markdown(("case", "µs", "GB/s", "copy, GB/s", "of the copy", "goal"), rows)


def attention(report, spread=False):
    """Return the results of attention or of caches, a table for each first word of a case."""
    yield from about(report)
    for word, results in itertools.groupby(report["results"], lambda result: result["case"].split()[0]):
        yield from beside(word, list(results), spread)
        yield "\n"


def decoding(report):
    """Return decoding's shares of a read and of its bound, a row for three places.

    A peer is beside the worst of them.
    """
    rows = {}
    for result in report["results"]:
        name, place = result["case"].removeprefix("decode ").rsplit(", ", 1)
        rows.setdefault(name, {})[place] = result
    lines, complete = [], {name: places for name, places in rows.items() if len(places) == len(PLACES)}
    peers = [peer for peer in PEERS if any(result["beside"].get(peer) for result in report["results"])]
    for name, places in complete.items():
        cells = [name]
        for result in (places[place] for place in PLACES):
            share = f"{times(result, 'read')} ({goal(result, 'read')})"
            cells += [share, speed(result, "bytes") + bound(result)]
        for peer in peers:
            beside = [result for result in places.values() if result["beside"].get(peer)]
            worst = min(beside, key=lambda result: speed_ratio(result, peer), default=None)
            cells.append("" if worst is None else times(worst, peer))
        lines.append(cells)
    yield from about(report)
    columns = itertools.chain.from_iterable((place, "GB/s, of the bound") for place in PLACES)
    yield from markdown(("of a read (goal)", *columns, *peers), lines)


def paired(report):
    """Return the table of a suite with the quartiles of each ratio."""
    return attention(report, spread=True)


def small(report):
    """Return the microseconds of small calls, and how many of them are Python's and machine code's."""
    yield from about(report)
    rows = []
    for result in report["results"]:
        seconds = result["seconds"], result["beside"]["machine code"], result.get("limit", 0)
        call, code, limit = (1e6 * each for each in seconds)  # microseconds
        text = f"{call:.1f}"
        missed = limit and call > limit
        rows.append((
            result["case"], f"**{text}**" if missed else text, f"{call - code:.1f}", f"{code:.1f}",
            f"{limit:.0f}" if limit else "",
        ))  # fmt: skip
    yield from markdown(("call", "µs", "Python", "machine code", "goal"), rows)


def first(report):
    """Return the CPU seconds of processes that make one call."""
    yield from about(report)
    rows = []
    for result in report["results"]:
        seconds, limit = f"{result['seconds']:.2f}", result["limit"]
        rows.append((result["case"], f"**{seconds}**" if result["seconds"] > limit else seconds, str(limit)))
    yield from markdown(("case", "CPU s", "goal"), rows)


def models(report):
    """Yield a table of milliseconds of a whole model, by context, for each cache."""
    results = [result for result in report["results"] if result["case"].startswith("step ")]
    names = [name for name in results[0]["beside"] if any(result["beside"].get(name) for result in results)]
    yield from about(report)
    rows = [
        [
            re.sub("step after | tokens", "", result["case"]),
            f"{result['seconds'] * 1e3:.0f}",
            *(f"{result['beside'][name] * 1e3:.0f}" if result["beside"].get(name) else "" for name in names),
        ]
        for result in results
    ]
    yield from markdown(("tokens", "KvkitCache", *names), rows)
    prompts = [
        f"{each['case'].removeprefix('prompt of ')} {each['seconds']:.1f} and "
        f"{each['beside']['DynamicCache']:.1f} s"
        for each in report["results"]
        if each["case"].startswith("prompt ")
    ]
    yield f"\nPrompts, 3 runs each, with KvkitCache and DynamicCache: {'; '.join(prompts)}.\n"


def beside(word, results, spread):
    names = list(dict.fromkeys(name for result in results for name in result.get("beside", {})))
    key, unit = ("operations", "GFLOP/s") if word == "prefill" else ("bytes", "GB/s")
    rows = []
    for result in results:
        milliseconds = result["seconds"] * 1e3
        cells = [result["case"], f"{milliseconds:.{2 if milliseconds >= 1 else 3}f}", speed(result, key)]
        for name in names:
            form = result.get("forms", {}).get(name, "").split(",")[0]
            wanted = goal(result, name) if name in result.get("beside", {}) else ""
            cells.append(times(result, name) + (f" ({wanted})" if wanted else ""))
            if spread and name in result.get("pairs", {}):
                low, _, high = (ratio_text(name, ratio) for ratio in result["pairs"][name])
                cells[-1] += f" {low} to {high}"
            if form and name.startswith("torch") and name != "torch same type":
                cells[-1] += f" {form}"
        rows.append(cells)
    yield from markdown(("case", "ms", unit, *names), rows)


def cases(report):
    """Return GB/s and shares of a read, a row for each format, a column for each number of key heads."""
    results = {result["case"]: result for result in report["results"]}
    heads = 32, 8, 4
    rows = []
    for kind in dict.fromkeys(case.removeprefix("decode ").rsplit(", ", 2)[0] for case in results):
        row = [kind]
        for place, count in itertools.product(("layout 3", "pages of 16"), heads):
            result = results.get(f"decode {kind}, {count} kv heads, {place}")
            row.append(f"{speed(result, 'bytes')} ({times(result, 'read')})" if result else "")
        rows.append(row)
    yield from about(report)
    yield "GB/s of decoding, and its share of a plain read, with 32 query heads over so many key heads:\n\n"
    columns = (f"{count}{', pages of 16' if paged else ''}" for paged in (0, 1) for count in heads)
    yield from markdown(("format", *columns), rows)


def rivals(report):
    """Return how fast kvkit is beside each peer over all cases of decoding."""
    rows = []
    for peer in PEERS:
        ratios = sorted(
            speed_ratio(result, peer) for result in report["results"] if result["beside"].get(peer)
        )
        if ratios:
            ahead = sum(ratio >= 1 for ratio in ratios)
            texts = (f"{ratio:.1f}x" for ratio in (ratios[0], ratios[len(ratios) // 2], ratios[-1]))
            rows.append((peer, f"{ahead} of {len(ratios)}", *texts))
    yield from markdown(("", "kvkit is as fast or faster in", "worst", "median", "best"), rows)


def losses(report):
    """Return the cases of decoding in which a peer is ahead, and how many miss the share of a read."""
    rows = [
        (
            result["case"].removeprefix("decode "), f"{result['seconds'] * 1e3:.2f}",
            f"{peer} {result['forms'][peer].split(',')[0]}", times(result, peer),
        )
        for result in report["results"]
        for peer in PEERS
        if result["beside"].get(peer) and speed_ratio(result, peer) < 1
    ]  # fmt: skip
    yield from markdown(("a peer is ahead in", "ms", "peer", "its time"), rows)
    results = [result for result in report["results"] if "read" in result.get("goals", {})]
    missed = [result for result in results if speed_ratio(result, "read") < result["goals"]["read"]]
    bound = sum(bound_share(result)[0] >= result["goals"]["read"] for result in missed)
    yield f"\nOf {len(results)} cases of decoding {len(missed)} miss their share of a read; "
    yield f"{bound} of these are as near to their bound by products.\n"


DOCS = HERE.parent / "docs"
README, TRANSFORMERS, TABLES = (
    HERE / "README.md",
    DOCS / "tools" / "transformers.md",
    DOCS / "benchmark_tables.md",
)
PLACES_OF_TABLES = [  # (page, name in its comments, suite of the figures, function that makes the table)
    (README, "cases", "decoding", cases),
    (README, "rivals", "decoding", rivals),
    (README, "losses", "decoding", losses),
    (README, "rivals of today", "rivals", attention),
    (TRANSFORMERS, "models", "models", models),
    (TABLES, "decoding figures", "decoding", decoding),
    (TABLES, "attention figures", "attention", attention),
    (TABLES, "figures", "cpu", cache),
    (TABLES, "caches figures", "caches", paired),
    (TABLES, "latent figures", "latent", paired),
    (TABLES, "tiles figures", "tiles", paired),
    (TABLES, "growth figures", "growth", paired),
    (TABLES, "shapes figures", "shapes", paired),
    (TABLES, "small figures", "small", small),
    (TABLES, "first figures", "first", first),
]


def with_table(page, name, table):
    """Return a page with a new table between the comments of a name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    head, rest = page.split(begin)
    return head + begin + table + end + rest.split(end)[1]


def filled(path, page):
    """Return the page of this path with the tables of the committed results."""
    for where, name, suite, make in PLACES_OF_TABLES:
        results = HERE / "results" / f"{suite}.json"
        if where == path and results.exists():  # they were measured
            page = with_table(page, name, "".join(make(json.loads(results.read_text()))))
    return page


if __name__ == "__main__":
    for shown in (README, TRANSFORMERS):
        shown.write_text(filled(shown, shown.read_text()))
