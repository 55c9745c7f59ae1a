"""How Sphinx makes the site: `make docs`."""

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

from sphinx.errors import ExtensionError
from sphinx.ext.autodoc.mock import mock

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import pictures  # noqa: E402

import examples  # noqa: E402
import kvkit  # noqa: E402
from benchmarks import table  # noqa: E402
from kvkit.layouts.named import NAMED  # noqa: E402
from kvkit.operators import OPERATORS  # noqa: E402
from kvkit.tools.causes import CAUSES  # noqa: E402
from kvkit.tools.rules import RULES  # noqa: E402
from kvkit.version import __version__  # noqa: E402
from kvkit_cli import listing  # noqa: E402
from kvkit_cli.listing import first_line  # noqa: E402

project, author, release = "kvkit", "kvkit developers", __version__
copyright = author
extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_parser"]
exclude_patterns = ["_build"]
default_role = "py:obj"
autodoc_typehints = "none"
# The site needs none of the libraries that kvkit.integrations imports.
INTEGRATED = ("dask", "distributed", "onnx", "torch", "transformers")
autodoc_mock_imports = [name for name in INTEGRATED if importlib.util.find_spec(name) is None]
numpydoc_show_class_members = False
myst_heading_anchors = 3
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # specifications number their sections as their sources do

html_theme = "pydata_sphinx_theme"
html_title = f"kvkit {release}"
html_static_path, html_css_files = ["_static"], ["kvkit.css"]
html_favicon = "_static/logo.svg"
myst_html_meta = {
    "description": "Kernels for the KV caches of language models, on numpy arrays, and tools for caches"
}
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_show_search_summary = False  # which a browser may not read from a disk
ALONE = (
    "concepts",
    "gallery",
    "install",
    "benchmarks",
    "benchmark_tables",
    "comparison",
    "design",
    "changelog",
)
html_sidebars = {page: [] for page in ALONE}  # which have no pages below them
html_theme_options = {
    "logo": {
        "text": html_title,
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo.svg",
        "alt_text": "kvkit",
    },
    "show_prev_next": False,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 8,
    "footer_start": ["copyright"],
    "footer_end": [],
}

ROOMS = (  # each a page of the reference
    "kvkit",
    "kvkit.dynamic_batching",
    "kvkit.ascend",
    "kvkit.cache",
    "kvkit.eviction",
    "kvkit.layouts",
    "kvkit.layouts.tables",
    "kvkit.formats",
    "kvkit.files",
    "kvkit.tools",
    "kvkit.tools.draw",
    "kvkit.tools.vectors",
    "kvkit.integrations.dask",
    "kvkit.integrations.onnx",
    "kvkit.integrations.transformers",
)

# PMX's operators by the short names that the specification gives them.
PMX = {
    f"{kind}-{short}": f"{prefix}{name}"
    for short, name in (
        ("KVC", "key_value_cache"),
        ("MHA", "multi_head_attention"),
        ("MHCA", "multi_head_cache_attention"),
    )
    for kind, prefix in (("S", ""), ("D", "dynamic_batching."))
}


def public(room):
    """The names in `__all__`; of a room without one, its own things that have an example.

    Caches and tools that `kvkit` has at hand are on the pages of their rooms.
    """
    if hasattr(room, "__all__"):
        elsewhere = {*kvkit.CACHES, *kvkit.TOOLS} if room is kvkit else ()
        return [name for name in room.__all__ if name not in elsewhere]
    things = {name: getattr(room, name) for name in dir(room)}
    own = {
        name: thing
        for name, thing in things.items()
        if (getattr(thing, "__module__", None) or "").startswith(room.__name__)
    }
    return [name for name, thing in own.items() if ">>>" in (thing.__doc__ or "")]


def reference(app):
    """A page for each room, with what is public in it, from the docstrings."""
    firsts = []
    for path in (DOCS / "reference").glob("kvkit*"):
        path.unlink()
    for name in ROOMS:
        with mock(autodoc_mock_imports):
            room = importlib.import_module(name)
        head = [name, "=" * len(name), "", summary(room.__doc__), "", f".. currentmodule:: {name}", ""]
        listed, lines = [".. list-table::", "   :widths: 2 3", ""], []
        for each in public(room):
            thing = getattr(room, each)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                listed += [f"   * - :obj:`{each} <{name}.{each}>`", f"     - {summary(thing.__doc__)}"]
            if inspect.isclass(thing):
                lines += [
                    f".. autoclass:: {name}.{each}",
                    "   :members:",
                    "   :inherited-members: Exception, int, tuple, dict",
                    "",
                ]
            elif inspect.isroutine(thing):
                lines += [f".. autofunction:: {name}.{each}", ""]
        body = [*listed, "", *lines] if lines else [f".. automodule:: {name}"]
        (DOCS / "reference" / f"{name}.rst").write_text("\n".join([*head, *body]))
        firsts.append((name, summary(room.__doc__)))
    rows = "".join(f"| [{name}]({name}.rst) | {line} |\n" for name, line in firsts)
    tree = "".join(f"{name}\n" for name, _ in firsts)
    table = f"| module | what it has |\n|---|---|\n{rows}\n```{{toctree}}\n:hidden:\n\n{tree}```\n"
    (DOCS / "reference" / "kvkit-modules.txt").write_text(table)


def from_code(app):
    """The tables that pages include, of what code knows."""
    write_table("specifications/layouts", ("name", "line", "engine"), (
        (f"`{name}`", f"`{each.line}`", f"{each.engine} {each.versions}") for name, each in NAMED.items()
    ))  # fmt: skip
    write_table("specifications/pmx-inputs", ("input", "", *PMX), pmx_inputs())
    write_table("specifications/pmx-attributes", ("attribute", "", *PMX), pmx_attributes())
    write_table("tools/rules", ("rule", "what it does", "what to do"), (
        (name + ", a warning" * (rule.severity == "warning"), first_line(rule.look).split(". ")[0], rule.hint)
        for name, rule in RULES.items()
    ))  # fmt: skip
    write_table("tools/causes", ("cause", "what B is"), (
        (name, " ".join((look.__doc__ or "").partition("\n\n")[0].split())) for name, look in CAUSES.items()
    ))  # fmt: skip
    for kind, last in (("scorers", "needs"), ("formats", "options")):
        write_table(f"tools/{kind}", ("name", "what it does" if kind == "scorers" else "what it is", last), (
            (f"`{each['name']}`", each["about"], ", ".join(each[last])) for each in listing.KINDS[kind]()
        ))  # fmt: skip


def write_table(name, titles, rows):
    """Write a table in Markdown into a file that a page includes."""
    rows = [[cell.replace("|", r"\|").replace("*", r"\*") for cell in row] for row in rows]
    lines = [titles, ["---"] * len(titles), *rows]
    path = DOCS / f"{name}-table.txt"
    path.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


def pmx_inputs():
    """The inputs of PMX's operators: their types, and their place in each operator's list."""
    places = {name: {each.name: each for each in OPERATORS[name].inputs} for name in PMX.values()}
    for name in dict.fromkeys(name for inputs in places.values() for name in inputs):
        found = [list(inputs).index(name) + 1 if name in inputs else None for inputs in places.values()]
        optional = [inputs[name].optional if name in inputs else False for inputs in places.values()]
        about = next(inputs[name].about for inputs in places.values() if name in inputs)
        cells = (f"[{n}]" * o or f"{n or ''}" for n, o in zip(found, optional, strict=True))
        yield f"`{name}`", about, *cells


def pmx_attributes():
    """The attributes of PMX's operators, and their default in each."""
    operators = [{each.name: each for each in OPERATORS[name].attributes} for name in PMX.values()]
    for name in dict.fromkeys(name for attributes in operators for name in attributes):
        about = next(attributes[name].about for attributes in operators if name in attributes)
        yield f"`{name}`", about, *(str(each[name].default) if name in each else "" for each in operators)


def summary(doc):
    """The first sentence of a docstring, on a line."""
    paragraph = " ".join((doc or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z`])", paragraph)[0].replace("*", r"\*")


def without_empty_ends(app, name, source):
    """Examples end with an empty line, which doctest needs and a reader does not."""
    source[0] = re.sub(r"\n\n+```\n", "\n```\n", source[0])


def tables(app, name, source):
    """The tables of the benchmarks, from their committed results."""
    source[0] = table.filled(DOCS / f"{name}.md", source[0])


def current(app):
    """Pictures are as their program draws them, and examples come out as printed."""
    for path, text in pictures.drawn().items():
        if not path.exists() or path.read_text() != text:
            raise ExtensionError(f"{path} is not what docs/pictures.py draws: run it")
    for path in examples.pages():
        said = examples.failures(path)
        if said:
            raise ExtensionError(said)


def setup(app):
    app.connect("builder-inited", reference)
    app.connect("builder-inited", from_code)
    app.connect("builder-inited", current)
    app.connect("source-read", without_empty_ends)
    app.connect("source-read", tables)
