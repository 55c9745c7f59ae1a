"""Define the rules of `check`, in files by their subject."""

from kvkit.tools import findings
from kvkit.tools.rules import data, layouts, pages, scales, slots

__all__ = ["RULES", "data", "layouts", "pages", "scales", "slots"]
RULES = dict(sorted(findings.RULES.items(), key=lambda item: ("PSLQD".index(item[0][0]), item[0])))
