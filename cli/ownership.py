"""Find which distributions own the files of `kvkit`: PyPI has another project with this import name."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

OURS = "kvkit-kernels"
REPAIR = f"pip uninstall kvkit {OURS}, then pip install . in a clone"


def owners() -> str:
    """Return a text: where `kvkit` is imported from, and how to repair it if several distributions own it."""
    spec = importlib.util.find_spec("kvkit")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else "nowhere"
    names = sorted({name for name in packages_distributions().get("kvkit", []) if name != OURS})
    try:
        own = version(OURS)
    except PackageNotFoundError:
        own = "(not installed)"
    text = f"{OURS} {own} in {folder}"
    return f"{text}, whose files {', '.join(names)} owns too: {REPAIR}" if names else text
