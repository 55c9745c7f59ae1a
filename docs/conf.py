"""How Sphinx makes the site: `make docs`."""

import importlib
import inspect
import sys
from pathlib import Path

from sphinx.errors import ExtensionError

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import pictures  # noqa: E402

import examples  # noqa: E402
from kvkit.version import __version__  # noqa: E402

project, author, release = "kvkit", "the authors of kvkit", __version__
copyright = author
extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_parser"]
exclude_patterns = ["_build"]
default_role = "py:obj"
autodoc_typehints = "none"
numpydoc_show_class_members = False
myst_heading_anchors = 3
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # specifications number their sections as their sources do

html_theme = "pydata_sphinx_theme"
html_title = "kvkit"
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_show_search_summary = False  # which a browser may not read from a disk
ALONE = "concepts", "good_to_know", "benchmarks", "comparison", "design", "changelog"
html_sidebars = {page: [] for page in ALONE}  # which have no pages below them
html_theme_options = {
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


def public(room):
    """The names in `__all__`; of a room without one, its own things that have an example."""
    if hasattr(room, "__all__"):
        return room.__all__
    things = {name: getattr(room, name) for name in dir(room)}
    own = {
        name: thing
        for name, thing in things.items()
        if (getattr(thing, "__module__", None) or "").startswith(room.__name__)
    }
    return [name for name, thing in own.items() if ">>>" in (thing.__doc__ or "")]


def reference(app):
    """A page for each room, with what is public in it, from the docstrings."""
    for path in (DOCS / "reference").glob("kvkit*.rst"):
        path.unlink()
    for name in ROOMS:
        try:
            room = importlib.import_module(name)
        except ImportError:
            continue
        lines = [name, "=" * len(name), "", f".. currentmodule:: {name}", ""]
        for each in public(room):
            thing = getattr(room, each)
            if inspect.isclass(thing):
                lines += [
                    f".. autoclass:: {name}.{each}",
                    "   :members:",
                    "   :inherited-members: Exception, int, tuple, dict",
                    "",
                ]
            elif inspect.isroutine(thing):
                lines += [f".. autofunction:: {name}.{each}", ""]
        if lines[5:]:
            (DOCS / "reference" / f"{name}.rst").write_text("\n".join(lines))


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
    app.connect("builder-inited", current)
