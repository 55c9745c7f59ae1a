"""Records: named numbers that kernels read where they lie, filled by name."""

import operator

import numpy as np


class Record:
    """A record of int64 fields, whose names come in lines, and of records, with fields `member.field`."""

    def __init__(self, *lines, **members):
        own = [name for line in lines for name in line.split()]
        inner = [f"{member}.{name}" for member, form in members.items() for name in form.names]
        self.names = (*own, *inner)
        self.at = {name: i for i, name in enumerate(self.names)}
        kinds = [(member, form.dtype) for member, form in members.items()]
        self.dtype = np.dtype([(name, np.int64) for name in own] + kinds)
        self._in_order = operator.itemgetter(*self.names)

    def filled(self, fields):
        """Return the numbers of a record, of a mapping that has each of its fields and no other."""
        return np.array(self.in_order(fields), np.int64)

    def in_order(self, fields):
        """Return the fields of such a mapping in the order of the record."""
        try:
            numbers = self._in_order(fields)
        except KeyError:
            numbers = ()
        if len(fields) != len(numbers):
            odd = sorted(fields.keys() ^ self.at.keys())
            raise TypeError(f"a record of {len(self.names)} fields, missing or unknown: {', '.join(odd)}")
        return numbers
