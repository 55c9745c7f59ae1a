"""Rotate the rows of a cache before they are stored, queries before attention, and outputs after it.

A block-diagonal Hadamard matrix, perhaps after fixed signs, rotates each row and so spreads outliers over all
channels. Formats and attention kernels do not know of it.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from kvkit.errors import argument_error, brief
from kvkit.typed import Array

# vLLM's signs, in hexadecimal: bit i (lowest bit of a byte first) is 1 if element i keeps its sign.
SIGNS = (
    "0d597365b13580806c3d44a638547f6b818ba44a41c4afab48980b32a04320fa"
    "331c6e4dcbc7a9a8da1d951b59b303986e7938300e2026cd7624a0c9b9ac9d8a"
)
STORED_ROWS, QUERY_ROWS, OUTPUT = "stored", "query", "output"  # what is rotated: see `rotate`


@dataclass(frozen=True)
class Rotation:
    """Describes a rotation of rows by Hadamard matrices along the head.

    Attributes
    ----------
    name : str
    block : tuple of int
        Sizes of the matrix for keys and for values, powers of two; 0 for the largest power of two that
        divides the head size.
    signs : bool
        Whether elements are multiplied by vLLM's signs first.
    norm : bool
        Whether the matrix of stored rows preserves lengths. If not, its entries are 1 and -1, and queries and
        outputs are divided by the block size.
    """

    name: str
    block: tuple[int, int] = (0, 0)
    signs: bool = False
    norm: bool = True

    def __str__(self) -> str:
        return self.name

    @cached_property
    def sign_factors(self) -> Array:
        """Return the signs of elements as factors, 1 or -1, float32 [512]."""
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(SIGNS), np.uint8), bitorder="little")
        return np.where(bits, np.float32(1), np.float32(-1))

    def size(self, dim: int, value: bool = False) -> int:
        """Return the block size for a head size; raise a KvkitError if there is none."""
        block = self.block[value] or dim & -dim or 1
        if not dim or dim % block or (self.signs and dim > len(self.sign_factors)):
            legal = f"at most {len(self.sign_factors)}" if self.signs else f"a multiple of {block}"
            raise argument_error("rotation", f"a head size of {legal}, for {self}", dim)
        return block

    def factors(self, dim: int, what: str = STORED_ROWS, value: bool = False) -> Array:
        """Return the factors of elements before and after a matrix of 1 and -1, float32 [2, dim].

        Signs come first. An output is rotated back, in reverse, so its signs come last. `what` is as in
        `rotate`.
        """
        block, factors = self.size(dim, value), np.ones((2, dim), np.float32)
        if self.signs:
            factors[1 if what == OUTPUT else 0] = self.sign_factors[:dim]
        if self.norm:
            factors[1] /= np.sqrt(np.float32(block))
        elif what != STORED_ROWS:
            factors[1] /= np.float32(block)
        return factors


ROTATIONS = {
    rotation.name: rotation
    for rotation in (
        Rotation("hadamard"),
        Rotation("llama.cpp", (0, 64)),
        Rotation("vllm", signs=True, norm=False),
    )
}


def rotation_named(name: str | Rotation | None) -> Rotation | None:
    """Return the rotation of a name: "hadamard", "hadamard:64" (in blocks of 64), "llama.cpp" or "vllm".

    Raises
    ------
    KvkitError
        If there is no such name.
    """
    if name is None or isinstance(name, Rotation):
        return name
    kind, _, block = str(name).partition(":")
    size = int(block) if block.isascii() and block.isdecimal() else 0
    if kind == "hadamard" and size and size & size - 1 == 0:
        return Rotation(str(name), (size, size))
    if name not in ROTATIONS:
        wanted = f"{', '.join(ROTATIONS)}, or hadamard:N with a power of two"
        raise argument_error("rotation", wanted, brief(repr(name)))
    return ROTATIONS[name]


def rotate(
    x: ArrayLike, rotation: str | Rotation | None, *, what: str = STORED_ROWS, value: bool = False
) -> Array:
    """Rotate rows in float32, in O(D log D) steps per row.

    Parameters
    ----------
    x : ndarray, shape [..., D]
    rotation : str or Rotation
        As `rotation_named` takes it.
    what : str
        "stored": keys and values before they are stored. "query": queries for rotated keys. "output": outputs
        of attention over rotated values, or such values themselves, to rotate them back.
    value : bool
        Whether to use the rotation of values, whose blocks may differ from those of keys.

    Returns
    -------
    ndarray of float32, of the shape of `x`

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.formats import rotate
    >>> rotate(np.float32([[1, 0, 0, 0]]), "hadamard")
    array([[0.5, 0.5, 0.5, 0.5]], dtype=float32)
    """
    x, known = np.asarray(x, np.float32), rotation_named(rotation)
    if what not in (STORED_ROWS, QUERY_ROWS, OUTPUT):
        raise argument_error("what", f"{STORED_ROWS!r}, {QUERY_ROWS!r} or {OUTPUT!r}", brief(repr(what)))
    if known is None:
        return x
    dim, step = x.shape[-1], 1
    block, (before, after) = known.size(dim, value), known.factors(dim, what, value)
    y = np.ascontiguousarray((x * before).reshape(x.size // block, block).T)  # [block, rows]: adds whole rows
    result, rows = np.empty_like(y), y.shape[1]
    while step < block:  # elements i and i + step become their sum and their difference; then step doubles
        pairs, sums = (each.reshape(block // (2 * step), 2, step, rows) for each in (y, result))
        np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        y, result, step = result, y, 2 * step
    rotated: Array = y.T.reshape(x.shape) * after
    return rotated
