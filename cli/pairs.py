"""Options that are lists of pairs: n=16,h=8."""

from kvkit.errors import KvkitError


def sizes_of(text, option="--sizes"):
    """{axis: length} of a text; what axes there are, whoever takes them says."""
    found = {}
    for pair in filter(None, (text or "").split(",")):
        axis, _, number = pair.partition("=")
        if not (number.isascii() and number.isdecimal()) or len(number) > 18:
            raise KvkitError(f"{option} {text}: expected AXIS=NUMBER,..., as n=16,h=8")
        found[axis.strip()] = int(number)
    return found
