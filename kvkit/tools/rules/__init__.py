"""Define the rules of `check`, in files by their subject."""

from kvkit.tools import findings
from kvkit.tools.rules import compressed, copies, data, layouts, pages, scales, slots, states

__all__ = ["RULES", "compressed", "copies", "data", "layouts", "pages", "scales", "slots", "states"]
RULES = dict(sorted(findings.RULES.items(), key=lambda item: ("PSRCLQD".index(item[0][0]), item[0])))
