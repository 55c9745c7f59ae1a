"""Plant faults that engines have had into random caches, and count how often `diff` names them.

`python tests/scenes/planted_faults.py 200` prints a line for each kind of fault.
"""

import sys
from collections import Counter

import ml_dtypes
import numpy as np

from kvkit.tools import check, diff

NAMES = (  # of keys, of values, of their scales
    ("key_cache", "value_cache", "key_scale", "value_scale"),
    ("key", "value", "key_scale", "value_scale"),
    ("k_cache", "v_cache", "k_scale", "v_scale"),
    ("cache_k_l0", "cache_v_l0", "cache_k_l0_scale", "cache_v_l0_scale"),
    ("present.0.key", "present.0.value", "present.0.key_scale", "present.0.value_scale"),
    ("past_key_values.0.key", "past_key_values.0.value", "past_key_values.0.key_scale",
     "past_key_values.0.value_scale"),
)  # fmt: skip
DTYPES = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
LINES = "l b n h c", "l b h n c", "b l n h c", "pmx 0", "pmx 1", "pmx 2", "pmx 3"
PMX = "n l kv h c", "l n kv h c", "l kv n h c", "l kv h n c"


def quantized(x, group, how=""):
    """Return codes and scales by PMX's recipe, or with truncation or a reciprocal in it."""
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, group)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    scale = np.maximum(scale.astype(x.dtype), np.float32(1e-5).astype(x.dtype)).astype(np.float32)
    quotient = groups / scale
    if how == "reciprocal":
        quotient = groups * (np.float32(1) / scale).astype(x.dtype).astype(np.float32)
    quotient = quotient.astype(x.dtype).astype(np.float32)
    codes = np.trunc(quotient) if how == "truncation" else np.rint(quotient)
    return np.clip(codes, -127, 127).astype(np.int8).reshape(x.shape), scale[..., 0].astype(x.dtype)


class Scene:
    """Holds a cache [side, layer, page, position, head, element] with two sequences in some of its pages."""

    def __init__(self, seed, coded=None):
        self.rng = rng = np.random.default_rng(seed)
        self.layers, self.pages, self.page = (int(rng.choice(of)) for of in ((1, 2, 3), (6, 9), (4, 8)))
        self.heads, self.dim = int(rng.choice((1, 2, 3))), int(rng.choice((16, 32, 64)))
        self.dtype = DTYPES[rng.integers(3)]
        self.coded = bool(rng.integers(2)) if coded is None else coded
        counts = [int(rng.integers(2, 2 * self.page + 1)) for _ in range(2)]
        order = rng.permutation(self.pages - 1)
        self.table = order[:4].reshape(2, 2)
        self.slots = [self.table[i, np.arange(n) // self.page] * self.page + np.arange(n) % self.page
                      for i, n in enumerate(counts)]  # fmt: skip
        self.used = np.concatenate(self.slots)
        shape = 2, self.layers, self.pages * self.page, self.heads, self.dim
        self.x = (rng.standard_normal(shape) * rng.choice((0.1, 1, 8))).astype(self.dtype)
        self.x[0] = self.x[0] * self.dtype.type(1.5)  # keys and values are not of one distribution
        self.fill = self.dtype.type(rng.choice((0.0, np.nan)))
        self.old = np.full(shape, self.fill, self.dtype)
        if rng.integers(4) == 0 and not self.coded:  # other bytes in each row where no token is
            self.old = rng.standard_normal(shape).astype(self.dtype)
        self.line = LINES[rng.integers(len(LINES))]
        self.names = NAMES[rng.integers(len(NAMES))]

    def parts(self, how=""):
        """Return arrays [2, layers, rows, heads, n] that a right kernel leaves, before their layout."""
        written = np.zeros(self.x.shape[2], bool)
        written[self.used] = True
        at = written[:, None, None]
        if not self.coded:
            return {"": np.where(at, self.x, self.old)}
        codes, scales = quantized(self.x, 8, how)
        return {
            "": np.where(at, codes, 0).astype(np.int8),
            "scale": np.where(at, scales, 0).astype(self.dtype),
        }

    def laid(self, parts):
        """Return arrays by name, in the layout's axes."""
        pages = (self.pages, self.page)
        found = {}
        for part, array in parts.items():
            if self.line.startswith("pmx"):
                line = PMX[int(self.line[-1])].split()
                moved = array.transpose([("kv", "l", "n", "h", "c").index(axis) for axis in line])
                found[part or "cache"] = np.ascontiguousarray(moved)
                continue
            line = self.line.split()
            for side in range(2):
                x = array[side].reshape(self.layers, *pages, *array.shape[-2:])
                x = x.transpose(["lbnhc".index(axis) for axis in line])
                found[self.names[side + 2 * bool(part)]] = np.ascontiguousarray(x)
        return found

    def compared(self, got, **more):
        """Return the report of `diff` for right and wrong parts."""
        pmx = self.line.startswith("pmx")
        axes = None if pmx else self.line  # PMX's names tell their axes
        return diff(self.laid(self.parts()), self.laid(got), axes=axes, **more)


def some_sides(scene):
    return [[0], [1], [0, 1]][scene.rng.integers(3)]


def background(scene, name):
    """Return the contents of rows that nothing was written to."""
    return np.zeros((*scene.x.shape[:-1], scene.dim // (8 if name else 1))) if scene.coded else scene.old


def not_written(scene):
    parts = scene.parts()
    tokens = scene.rng.choice(scene.used, int(scene.rng.integers(1, 3)), replace=False)
    sides = some_sides(scene)
    layers = [slice(None), scene.rng.integers(scene.layers)][scene.rng.integers(2)]
    for name, array in parts.items():
        for side in sides:
            array[side, layers, tokens] = background(scene, name)[side, layers, tokens]
    before = {} if scene.coded else scene.laid({"": scene.old})
    return scene.compared(parts, like={f"before_{name}": x for name, x in before.items()} or None)


def moved(scene, targets):
    """Return parts whose tokens of some rows are in other rows, with background where they should be."""
    parts = scene.parts()
    for name, array in parts.items():
        old, sources = array.copy(), np.array(list(targets))
        array[:, :, sources] = background(scene, name)[:, :, sources]
        for source, target in targets.items():
            if target < array.shape[2]:
                array[:, :, target] = old[:, :, source]
    return parts


def off_by_one(scene):
    step = int(scene.rng.choice((1, -1)))
    rows = scene.used if scene.rng.integers(2) else np.array([slots[-1] for slots in scene.slots])
    return scene.compared(moved(scene, {int(r): int(r) + step for r in rows if r + step >= 0}))


def page_for_row(scene):
    scene.line = LINES[scene.rng.integers(3)]
    rows = {int(r): int(r // scene.page + r % scene.page) for r in scene.used if r >= scene.page}
    return scene.compared(moved(scene, rows))


def sides_swapped(scene):
    parts = scene.parts()
    layer = scene.rng.integers(scene.layers)
    layers = slice(None) if scene.rng.integers(2) else slice(layer, layer + 1)
    for array in parts.values():
        array[:, layers] = array[::-1, layers].copy()
    return scene.compared(parts)


def coding(how):
    def fault(scene):
        groups = scene.rng.integers(-254, 255, (*scene.x.shape[:-1], scene.dim // 8, 8)) / 2
        groups[..., 0] = 127  # so that codes are ties of a scale
        scales = scene.rng.standard_normal((*groups.shape[:-1], 1))
        scene.x = (groups * scales).reshape(scene.x.shape).astype(scene.dtype)
        like = scene.laid({"": scene.x})
        return scene.compared(scene.parts(how), like=like)

    return fault


def wrong_id(scene):
    name = str(scene.rng.choice(("block_tables", "cachestarts", "kv_indices")))
    table = np.arange(40).reshape(4, 10).astype((np.int32, np.int64)[scene.rng.integers(2)])
    table = table.reshape(-1) if name == "kv_indices" else table
    got = table.copy()
    at = int(scene.rng.integers(table.size))
    got.reshape(-1)[at] += int(scene.rng.choice((-1, 1, 2, 17)))
    return diff({name: table}, {name: got})


def scale_factor(scene):
    parts = scene.parts()
    number = float(scene.rng.choice((2, 0.5, 16, 1 / 127, 127, 1 / np.sqrt(scene.dim), 1.1)))
    head = scene.rng.integers(scene.heads)
    heads = slice(None) if scene.rng.integers(2) else slice(head, head + 1)
    scale = parts["scale"]
    scale[some_sides(scene), ..., heads, :] *= scale.dtype.type(number)
    return scene.compared(parts)


def kept_first(scene):
    rng = scene.rng
    lengths, heads, size = rng.integers(4, 20, 3), scene.heads, scene.page
    wins = np.array([rng.integers(1, n) for n in np.repeat(lengths, heads)])
    x = rng.standard_normal((lengths.sum(), heads, 32)).astype(scene.dtype)
    slots = np.cumsum(np.r_[0, wins])[:-1] + np.arange(len(wins))
    cache = np.full(((slots[-1] + 20 + size) // size, size, 1, 32), scene.fill, scene.dtype)
    right, wrong = cache.copy(), cache.copy()
    starts = np.cumsum(lengths) - lengths
    for i, (slot, window) in enumerate(zip(slots, wins, strict=True)):
        own = x[starts[i // heads] :][: lengths[i // heads], i % heads]
        right.reshape(-1, 32)[slot : slot + window] = own[len(own) - window :]
        wrong.reshape(-1, 32)[slot : slot + window] = own[:window]
    like = {"key": x, "wins": wins, "seq_lens": lengths, "slot_mapping": slots}
    return diff({"key_cache": right}, {"key_cache": wrong}, like=like)


def heads_for_tokens(scene):
    scene.line = LINES[scene.rng.integers(3)]
    parts = scene.parts()
    for name, array in parts.items():
        pages = array.reshape(2, scene.layers, scene.pages, scene.page, *array.shape[-2:])
        swapped = np.ascontiguousarray(pages.swapaxes(3, 4))
        parts[name] = swapped.reshape(array.shape)
    return scene.compared(parts)


def overwritten(scene):
    """Return parts with random bytes, which nothing explains."""
    parts = scene.parts()
    rows = scene.rng.choice(scene.used, int(scene.rng.integers(1, len(scene.used) + 1)), replace=False)
    array = parts[""]
    noise = scene.rng.standard_normal(array[:, :, rows].shape) * (40 if scene.coded else 1)
    array[:, :, rows] = noise.astype(array.dtype)
    return scene.compared(parts)


FAULTS = {  # the cause that must be named first and alone ("" for none): what plants it, and of which caches
    "old bytes: not written": (not_written, None),
    "row off by one": (off_by_one, None),
    "page number for row": (page_for_row, None),
    "keys and values swapped": (sides_swapped, None),
    "truncation": (coding("truncation"), True),
    "reciprocal instead of division": (coding("reciprocal"), True),
    "wrong id in a block table": (wrong_id, None),
    "a factor": (scale_factor, True),
    "first rows kept for last ones": (kept_first, None),
    "heads and tokens swapped": (heads_for_tokens, None),
    "": (overwritten, None),
}


def some_rows_of_zeros(rng, sides, rows):
    """Clear a run of rows, of some heads, in the keys or the values of a layer."""
    side, layer = rng.choice(list(sides)), rng.integers(len(sides["key"]))
    heads = slice(rng.integers(sides["key"].shape[2]), None)
    begin = rng.integers(1, len(rows) - 1)
    sides[side][layer, rows[begin : begin + rng.integers(1, len(rows) - begin)], heads] = 0


def one_side_twice(rng, sides, rows):
    layer = rng.integers(len(sides["key"]))
    sides["value"][layer, rows] = sides["key"][layer, rows]


def one_layer_twice(rng, sides, rows):
    side, (one, two) = rng.choice(list(sides)), rng.permutation(len(sides["key"]))[:2]
    sides[side][one, rows] = sides[side][two, rows]


def one_head_twice(rng, sides, rows):
    side, (one, two) = rng.choice(list(sides)), rng.permutation(sides["key"].shape[2])[:2]
    sides[side][:, rows, one] = sides[side][:, rows, two]


COPIES = {"D4": some_rows_of_zeros, "D5": one_side_twice, "D6": one_layer_twice, "D7": one_head_twice}


def checked_copies(rule, seed, dump=None):
    """Return the rules that `check` names for a cache with one fault of `COPIES`, or without one (None).

    The cache is random, in pages with tables; or `dump`, {side: [layers, tokens, heads, dim]}, as
    transformers lays it out, in one of four cases with rows of zeros before and after it.
    """
    rng = np.random.default_rng(seed)
    if dump is None:
        scene = Scene(seed, coded=bool(seed % 2))
        scene.layers, scene.heads, scene.line, scene.names = 3, 3, "l b n h c", NAMES[0]
        shape = 2, 3, scene.pages * scene.page, 3, scene.dim
        scene.x = rng.standard_normal(shape).astype(scene.dtype)
        scene.old = np.full(shape, scene.fill, scene.dtype)
        parts, rows = scene.parts(), scene.used
        if rule:
            COPIES[rule](rng, dict(zip(("key", "value"), parts[""], strict=True)), rows)
        lengths = [len(slots) for slots in scene.slots]
        return check(scene.laid(parts) | {"block_tables": scene.table, "context_lens": lengths})
    sides = {name: array.copy() for name, array in dump.items()}
    if rule:
        COPIES[rule](rng, sides, np.arange(sides["key"].shape[1]))
    room = rng.permutation([0, 0, 3, 5])[:2]
    return check({
        f"past_key_values.{i}.{name}": np.pad(x, [room, (0, 0), (0, 0)]).swapaxes(0, 1)[None]
        for name, layers in sides.items() for i, x in enumerate(layers)
    })  # fmt: skip


def judged(kind, seed):
    """Return whether the right cause is first, is alone, a wrong one explains 90 %, and the report."""
    plant, coded = FAULTS[kind]
    scene = Scene(seed, coded)
    if kind == "heads and tokens swapped":
        scene.heads = max(scene.heads, 2)
        scene.x = np.resize(scene.x, (*scene.x.shape[:3], scene.heads, scene.dim))
        scene.x = scene.rng.standard_normal(scene.x.shape).astype(scene.dtype)
    found = plant(scene)
    named = [cause.name for cause in found.causes]
    wrong = any(cause.name != kind and cause.explained >= 0.9 * cause.differing for cause in found.causes)
    if not kind:
        return not named, not named, wrong, found
    explained = {cause.array for cause in found.causes} == {array.name for array in found.arrays}
    return named[:1] == [kind], set(named) == {kind} and explained, wrong, found


def main(count=200, first=0):
    """Print how many of so many faults are named."""
    totals = Counter()
    for kind in FAULTS:
        each = -(-count // (len(FAULTS) - 1))
        results = [judged(kind, 1000 * seed + len(kind)) for seed in range(first, first + each)]
        sums = [sum(result[i] for result in results) for i in range(3)]
        if kind:
            totals.update(faults=each, first=sums[0], alone=sums[1])
        totals.update(wrong=sums[2])
        print(f"{kind or 'no cause'}: first {sums[0]}, alone {sums[1]}, wrong at 90 % {sums[2]} of {each}")
    print(dict(totals))
    return totals


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
