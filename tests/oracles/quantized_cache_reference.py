"""Oracle of the quantized layer: lists of tokens, loops over groups and elements, nothing checked."""

import numpy as np


def sym_group(x, bits, param):
    """Return (codes, stored scale) of the elements of a group."""
    kind, most = x.dtype, 2 ** (bits - 1) - 1
    largest = max(abs(float(v)) for v in x)
    scale = np.float32(np.float32(largest) / np.float32(most)).astype(kind)
    scale = max(scale, np.float32(1e-5).astype(kind))
    codes = []
    for v in x:
        ratio = np.float32(np.float32(v) / np.float32(scale)).astype(kind)
        codes.append(int(min(max(np.rint(np.float32(ratio)), -most), most)))
    return codes, scale.astype(param)


def asym_group(x, bits, param):
    """Return (codes, stored scale, stored minimum) of the elements of a group."""
    most = 2**bits - 1
    values = [np.float32(v) for v in x]
    low = min(values).astype(param)
    low = abs(low) if low == 0 else low
    span = np.float32(max(values) - np.float32(low))
    scale = np.float32(max(span / np.float32(most), np.float32(1e-5))).astype(param)
    codes = []
    for v in values:
        ratio = np.float32(np.float32(v - np.float32(low)) / np.float32(scale))
        codes.append(int(min(max(np.rint(ratio), 0), most)))
    return codes, scale, low


def group(x, spec):
    """Return (codes, parameters, the numbers that the codes stand for) of a group."""
    if spec.scheme == "sym":
        codes, scale = sym_group(x, spec.bits, np.dtype(spec.param_dtype))
        numbers = [np.float32(np.float32(c) * np.float32(scale)).astype(scale.dtype) for c in codes]
        return codes, [scale], [n.astype(x.dtype) for n in numbers]
    codes, scale, low = asym_group(x, spec.bits, np.dtype(spec.param_dtype))
    numbers = [np.float32(np.float32(c) * np.float32(scale)) + np.float32(low) for c in codes]
    return codes, [scale, low], [np.float32(n).astype(x.dtype) for n in numbers]


def pack(codes, bits):
    """Return the bytes of a row of codes, the first one in the lowest bits."""
    row = []
    for first in range(0, len(codes), 8 // bits):
        byte = 0
        for place, code in enumerate(codes[first : first + 8 // bits]):
            byte |= (code % 2**bits) << (bits * place)
        row.append(byte)
    return row


def block(x, spec, axis):
    """Return (bytes of each token, scales then minima, numbers) of a block [tokens, D] of a head."""
    tokens, dim = x.shape
    codes, numbers = np.zeros((tokens, dim), int), np.zeros_like(x)
    cells = []
    if axis == "channel":
        for d in range(dim):
            codes[:, d], cell, numbers[:, d] = group(x[:, d], spec)
            cells.append(cell)
    else:
        assert tokens == 1
        for d in range(0, dim, spec.group):
            end = d + spec.group
            codes[0, d:end], cell, numbers[0, d:end] = group(x[0, d:end], spec)
            cells.append(cell)
    ordered = [cell[0] for cell in cells] + [cell[1] for cell in cells if len(cell) == 2]
    return [pack(list(row), spec.bits) for row in codes], ordered, numbers


class Side:
    """Keys or values, one token after the other; everything [B, H, D] a token."""

    def __init__(self, spec, axis, sink, residual, read_back=False):
        spec = spec.of_side(axis == "token") if hasattr(spec, "of_side") else spec
        self.spec, self.axis, self.sink, self.residual = spec, axis, sink, residual
        self.read_back, self.recording = read_back, False
        self.tokens, self.numbers, self.bytes = [], {}, {}  # originals; of coded positions
        self.blocks, self.seen = [], set()  # (positions, cells)

    def copy(self):
        other = Side(self.spec, self.axis, self.sink, self.residual, self.read_back)
        other.recording, other.tokens = self.recording, list(self.tokens)
        other.numbers, other.bytes = dict(self.numbers), dict(self.bytes)
        other.blocks, other.seen = list(self.blocks), set(self.seen)
        return other

    def end(self):
        return min(self.sink, len(self.tokens)) + len(self.numbers)

    def update(self, states):
        self.seen = set(self.numbers)
        for t in range(states.shape[2]):
            self.tokens.append(states[:, :, t].copy())
        if not self.recording:
            self.evict()
        if self.read_back:
            self.seen = set(self.numbers)

    def evict(self):
        size = self.spec.group if self.axis == "channel" else 1
        while len(self.tokens) - self.residual - self.end() >= size:
            self.encode(range(self.end(), self.end() + size))

    def encode(self, positions):
        x = np.stack([self.tokens[p] for p in positions], axis=2)  # [B, H, tokens, D]
        planes = [(b, h) for b in range(x.shape[0]) for h in range(x.shape[1])]
        done = {plane: block(x[plane], self.spec, self.axis) for plane in planes}

        def gathered(of_plane):
            rows = [[of_plane(done[b, h]) for h in range(x.shape[1])] for b in range(x.shape[0])]
            return np.array(rows)

        for t, p in enumerate(positions):
            self.numbers[p] = gathered(lambda plane, t=t: plane[2][t])
            self.bytes[p] = gathered(lambda plane, t=t: plane[0][t])
        self.blocks.append((list(positions), gathered(lambda plane: plane[1])))

    def crop(self, length):
        self.tokens = self.tokens[:length]
        self.numbers = {p: x for p, x in self.numbers.items() if p < length}
        self.bytes = {p: x for p, x in self.bytes.items() if p < length}
        cut = [([p for p in positions if p < length], cells) for positions, cells in self.blocks]
        self.blocks = [each for each in cut if each[0]]
        self.evict()
        self.seen = set(self.numbers)

    def take(self, index):
        self.tokens = [x[index] for x in self.tokens]
        self.numbers = {p: x[index] for p, x in self.numbers.items()}
        self.bytes = {p: x[index] for p, x in self.bytes.items()}
        self.blocks = [(positions, cells[index]) for positions, cells in self.blocks]
        self.seen = set(self.numbers)

    def view(self, seen=None):
        """Return the tokens [B, H, n, D], coded ones as their codes say."""
        seen = self.seen if seen is None else seen
        rows = [self.numbers[p] if p in seen else x for p, x in enumerate(self.tokens)]
        return np.stack(rows, axis=2)

    def stored(self):
        return self.view(set(self.numbers))
