"""Show what schemes of quantization cost a language model's keys and values: a table and pictures.

`kvkit.tools.study` of data/smollm2_kv.npz, what SmolLM2-135M-Instruct computed for two texts
(make_smollm2_kv.py). The table goes into docs/tools/study.md, the pictures into docs/pictures, and a report
that stands alone into a folder.

    pip install '.[plot]'
    python examples/study_smollm2.py [FOLDER for the report, demo-out/study if not given]
"""

import sys
from pathlib import Path

from kvkit import tools

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "examples" / "data" / "smollm2_kv.npz"
SCHEMES = "fp8,int8:g8,q8_0,int4:g32,int4:g32+hadamard,q4_0,nvfp4,kivi4,kivi2"
PAGE = ROOT / "docs" / "tools" / "study.md"
BEGIN, END = "<!-- schemes -->\n", "<!-- end of schemes -->\n"


def studied():
    return tools.study(DATA, SCHEMES)


def table(study):
    """Return a study's summary in Markdown, without the less important columns."""
    lines = ["| scheme | bits per number | keys | values | worst head | attention | other top key |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|"]
    for row in study.summary:
        errors = row.key_error, row.value_error, row.worst_error, row.output_error, row.top_changed
        words = f"`{row.scheme}`", f"{row.bits:.2f}", *(f"{error:.1%}" for error in errors)
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join([*lines, ""])


def updated(study):
    """Return the page with the new table, by its path."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    return {PAGE: "".join([head, BEGIN, table(study), END, rest.partition(END)[2]])}


def pictures(study):
    """Return the pictures of a report for light and dark pages, by their paths."""
    from kvkit.tools.studies import plots

    return {
        ROOT / "docs" / "pictures" / f"study-{name}-{page}.svg": text
        for page in ("light", "dark")
        for name, text in plots.pictures(study, page).items()
        if name != "errors"  # which is too wide for a page
    }


def main():
    folder = Path(*(sys.argv[1:] or ["demo-out/study"])).resolve()
    study = studied()
    for path, text in (updated(study) | pictures(study)).items():
        path.write_text(text)
    study.save(folder)
    print(study)
    print(f"\nThe report is {folder / 'report.html'}.")


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed: pip install '.[plot]'")
