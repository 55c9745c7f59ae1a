"""Define `Attributes`, the names of what a change of a layer may change."""

from __future__ import annotations

import operator


class Attributes:
    """Names the attributes by which an object counts rows; ``read(object)`` returns their values.

    A copy of ``__dict__`` would do, but Python then reads all attributes of the object more slowly.
    """

    def __init__(self, *names: str) -> None:
        self.names, self.read = names, operator.attrgetter(*names)

    def extended(self, *names: str) -> Attributes:
        """Return these attributes and more."""
        return Attributes(*self.names, *names)
