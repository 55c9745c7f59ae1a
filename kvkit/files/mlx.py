"""Read and write prompt caches of MLX: safetensors files whose metadata names a class for each layer.

Tensors are called LAYER.PART, in the order of each class's state. The entries of the metadata are numbered:

    mlx-lm          entry 0                  entry 1               entry 2
    before 0.32     numbers of each layer    the user's metadata   class of each layer
    0.32            the user's metadata      class of each layer   names of numbers, which are 0-d tensors

Since 0.32 there may be unused rows after the last token. Layers of a known class become ``cache.LAYER.KV``,
with rows in the order of tokens. A CacheList of 0.32 has members: tensors of member I of layer L are called
L.I.0.PART, and L.I.1 has the letters of its class. Members of known classes are layers, too.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.errors import brief
from kvkit.files import tensors
from kvkit.files.contents import Contents, nested
from kvkit.files.description import Description, parse_description
from kvkit.files.errors import file_error
from kvkit.typed import Array, FilePath

LAYOUT = "l kv | b h n c"
LAYOUTS = {"mlx": True, "mlx-0.31": False}  # {layout: whether its prompt caches are of mlx-lm 0.32}
FLOAT_CLASS, CODED, MEMBERS = "KVCache", "QuantizedKVCache", "CacheList"
COUNTERS = {  # {class: (names of its numbers since 0.32, before)}; None if its rows cannot be ordered by them
    FLOAT_CLASS: (("offset",), ()),
    "ConcatenateKVCache": ((), ()),
    CODED: (("offset", "group", "bits"), ("offset", "group", "bits")),
    "RotatingKVCache": (("offset", "keep", "most", "next"), ("keep", "most", "offset", "next")),
    "ChunkedKVCache": (("offset", "chunk", "start"), None),
}
ARRAY_NAMES = "cache", "scales", "minima"  # the arrays of a quantized layer: words of codes, scales, minima
ENCODED = {"cache": "cache", "scales": "scale", "minima": "minimum"}  # the names of `kvkit.formats.encode`
FORMAT = re.compile(r"mlx([234568]):g(16|32|64|128)")


@dataclass(frozen=True)
class PromptLayer:
    """Holds a layer of a prompt cache."""

    # Of keys and of values: the arrays of `ARRAY_NAMES`, [batch, heads, rows, elements].
    sides: Sequence[Sequence[Array]]
    numbers: Mapping[str, int]  # by the names of `COUNTERS`

    @property
    def rows(self) -> int:
        """Return how many rows the arrays have."""
        return int(self.sides[0][0].shape[2])

    @property
    def runs(self) -> list[slice]:
        """Return the ranges of rows that hold tokens, in the order of tokens.

        With a window, the first `keep` rows stay, and a ring buffer follows, whose next row is `next`. After
        8 tokens, with 6 rows, `keep` 2 and `next` 4:

            row     0 1 | 2 3 4 5        the runs are rows 0 to 1, 4 to 5, 2 to 3
            token   0 1 | 6 7 4 5
        """
        offset, after = self.numbers.get("offset", self.rows), self.numbers.get("next")
        if after is None:
            return [slice(0, offset - self.numbers.get("start", 0))]
        keep = self.numbers["keep"]
        wrapped = after < min(offset, self.rows)
        return [slice(0, keep), slice(after, self.rows), slice(keep, after)] if wrapped else [slice(0, after)]

    @property
    def missing(self) -> int:
        """Return how many tokens the window has dropped, which were after the first `keep` ones."""
        stored: int = sum(run.stop - run.start for run in self.runs)
        return max(self.numbers.get("offset", 0) - stored, 0)

    @property
    def sound(self) -> bool:
        """Return whether all arrays have the same number of rows, which no run exceeds."""
        rows = {part.shape[2] for side in self.sides for part in side}
        return len(rows) == 1 and all(0 <= run.start <= run.stop <= self.rows for run in self.runs)


def is_cache(contents: Contents) -> bool:
    """Return whether a safetensors file is a prompt cache."""
    return "2.0" in contents.metadata and all(isinstance(text, str) for text in contents.metadata.values())


def read(path: FilePath, contents: Contents) -> Contents:
    """Return the contents of a prompt cache with kvkit's names for layers of known classes."""
    texts = contents.metadata
    since_032 = texts["2.0"] == "" and "1.0" in texts  # before, "2.0" is the class of layer 0
    group = "1." if since_032 else "2."
    classes = {name[len(group) :]: text for name, text in texts.items() if name.startswith(group)}
    if not all(name.isdecimal() and re.fullmatch(r"[A-Za-z_]\w*", text) for name, text in classes.items()):
        raise file_error(path, "a prompt cache of MLX in a format that kvkit does not know", "update kvkit")
    if classes.keys() != {str(layer) for layer in range(len(classes))}:
        raise file_error(path, "its metadata does not name the class of every layer")
    kinds = [classes[str(layer)] for layer in range(len(classes))]
    user = {name[2:]: text for name, text in texts.items() if name.startswith("0." if since_032 else "1.")}
    text = user.pop(tensors.METADATA, None)
    try:
        described = parse_description(path, json.loads(text)["description"] if text else None)
    except (LookupError, TypeError, ValueError):
        raise file_error(path, f"its metadata {tensors.METADATA} is damaged") from None
    contents = replace(contents, metadata={"classes": kinds, "metadata": user}, kind="prompt cache of MLX")
    known: dict[str, PromptLayer] = {}  # {place of the layer, its number or LAYER.MEMBER: layer}
    places = (
        places_of(contents.arrays, kinds) if since_032 else {f"{i}": (f"{i}", x) for i, x in enumerate(kinds)}
    )
    empty, others = [], set()
    for place, (begin, kind) in places.items():
        fields = COUNTERS.get(kind, (None, None))[0 if since_032 else 1]
        if fields is None:
            others.add(brief(kind))
        elif since_032 and contents.arrays.get(f"{begin}.0", np.zeros(1)).size == 0:
            empty.append(place)
        elif since_032 and contents.arrays.get(f"{begin}.1", np.zeros(1)).size == 0:
            others.add(f"{kind} without values")
        else:
            known[place] = read_layer(path, contents.arrays, texts, begin, fields, since_032)
    kinds_apart = f"layers are of class {', '.join(sorted(others))}, whose arrays kvkit does not know"
    notes = [kinds_apart] * bool(others) + [f"layers without tokens: {', '.join(empty)}"] * bool(empty)
    check_one_kind(path, {place: places[place][1] for place in known})
    if not known:
        return replace(contents, notes=tuple(notes))
    return with_layers(path, contents, known, {x: places[x][0] for x in known}, described, notes)


def check_one_kind(path: FilePath, kinds: Mapping[str, str]) -> None:
    """Refuse layers of codes beside layers of floats, which one description cannot tell."""
    coded = [place for place, kind in kinds.items() if kind == CODED]
    plain = [place for place, kind in kinds.items() if kind != CODED]
    if coded and plain:
        what = f"it has layers of codes ({brief(', '.join(coded))}) and of floats ({brief(', '.join(plain))})"
        raise file_error(path, what, "quantize all layers (to_quantized of mlx-lm), or none")


def places_of(arrays: Mapping[str, Array], kinds: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return {place: (begin of the names of its tensors, class)} of layers, and of the members of lists."""
    found: dict[str, tuple[str, str]] = {}
    for number, kind in enumerate(kinds):
        member = 0
        while kind == MEMBERS and (letters := arrays.get(f"{number}.{member}.1")) is not None:
            name = bytes(letters.astype(np.uint8).ravel()).decode("ascii", "replace")
            found[f"{number}.{member}"] = f"{number}.{member}.0", name
            member += 1
        if not member:
            found[f"{number}"] = f"{number}", kind
    return found


def read_layer(
    path: FilePath, arrays: Mapping[str, Array], texts: Mapping[str, str], number: str, fields: Sequence[str],
    since_032: bool,
) -> PromptLayer:  # fmt: skip
    """Return a layer. Its numbers are tensors of the file since mlx-lm 0.32, before they were texts."""
    numbers = {}
    for i, field in enumerate(fields):
        name = f"{number}.{i + 2}" if since_032 else f"0.{number}.{i}"
        text = str(arrays[name]) if since_032 and name in arrays else texts.get(name, "")
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise file_error(path, f"layer {number} has no {field}: {name} is {brief(text) or 'missing'}")
        numbers[field] = int(text)
    suffixes = (".0", ".1", ".2") if "bits" in numbers else ("",)  # of the arrays of `ARRAY_NAMES`
    sides = [[find_tensor(path, arrays, f"{number}.{kv}{end}", 4) for end in suffixes] for kv in range(2)]
    layer = PromptLayer(sides, numbers)
    if not layer.sound:
        raise file_error(path, f"layer {number} has {layer.rows} rows, which contradicts {numbers}")
    return layer


def with_layers(
    path: FilePath,
    contents: Contents,
    known: Mapping[str, PromptLayer],
    begins: Mapping[str, str],
    described: Description,
    notes: list[str],
) -> Contents:
    """Return the contents with known layers renamed, their rows in the order of tokens."""
    arrays = {}  # PART.LAYER.KV
    for number, layer in enumerate(known.values()):
        for kv, side in enumerate(layer.sides):
            for name, part in zip(ARRAY_NAMES, side, strict=False):
                runs = [part[:, :, run] for run in layer.runs]
                arrays[f"{name}.{number}.{kv}"] = runs[0] if len(runs) == 1 else np.concatenate(runs, 2)
    renamed = tuple(f"{begins[place]}.{i}." for place, x in known.items() for i in range(2 + len(x.numbers)))
    renamed += tuple(f"{place}.1." for place in known if "." in place)  # the class of a member
    others = {name: array for name, array in contents.arrays.items() if not f"{name}.".startswith(renamed)}
    numbers = [int(place.partition(".")[0]) for place in known]
    if len(set(numbers)) < len(numbers):
        notes.append(f"layers are counted as they lie in lists: {', '.join(known)}")
    elif numbers != list(range(len(known))):
        others["layers"] = np.array(numbers)
    for place, layer in known.items():
        if layer.missing:
            keep = layer.numbers.get("keep", 0)
            notes.append(f"layer {place} has a window: row {keep} is token {keep + layer.missing}")
    sizes, metadata, format = sizes_of(arrays, len(known)), contents.metadata, str(arrays["cache.0.0"].dtype)
    coding = {f"mlx{layer.numbers.get('bits')}:g{layer.numbers.get('group')}" for layer in known.values()}
    if "scales.0.0" in arrays:
        if len(coding) != 1 or not (match := FORMAT.fullmatch(format := min(coding))):
            raise file_error(path, f"it has codes of {', '.join(sorted(coding))}, not of one known format")
        bits, group = map(int, match.groups())
        metadata = metadata | {"bits": bits, "group": group, "head_dim": sizes.get("c", 0) * 32 // bits}
        sizes = {axis: count for axis, count in sizes.items() if axis not in "cv"}  # c and v count words
        coded = f"values are code x scale + minimum, in groups of {group}: words of 32 bits, low codes first"
        notes.append(coded)
    described = replace(described, layout=LAYOUT, sizes=sizes, format=format, rope_applied=True)
    arrays |= others
    return replace(contents, arrays=arrays, metadata=metadata, description=described, notes=tuple(notes))


def find_tensor(path: FilePath, arrays: Mapping[str, Array], name: str, axes: int) -> Array:
    """Return the tensor of a name; raise unless it has so many axes."""
    if name not in arrays:
        raise file_error(path, f"tensor {name} is missing")
    if arrays[name].ndim != axes:
        raise file_error(path, f"tensor {name} has {arrays[name].ndim} axes, not {axes}")
    return arrays[name]


def sizes_of(arrays: Mapping[str, Array], layers: int) -> dict[str, int]:
    """Return {axis: size} of a cache; only the number of layers if their shapes differ."""
    shapes = {(kv, arrays[f"cache.{layer}.{kv}"].shape) for layer in range(layers) for kv in range(2)}
    sizes = {"l": layers}
    if len(shapes) == 2:
        (_, keys), (_, values) = sorted(shapes)
        sizes |= dict(zip("bhnc", keys, strict=True))
        if values[3] != keys[3]:
            sizes["v"] = values[3]
    return sizes


def write(
    path: FilePath, arrays: Mapping[str, ArrayLike], metadata: Mapping[str, Any], description: Description,
    advance: Callable[[int], object],
) -> None:  # fmt: skip
    """Write a prompt cache: of mlx-lm 0.32 for the layout "mlx", of older versions for "mlx-0.31".

    mlx-lm refuses files with other arrays, and its sequences have equal lengths.
    """
    coded = FORMAT.fullmatch(description.format or "")
    names = ARRAY_NAMES[: 3 if coded else 1]
    sources = [nested(arrays, name if nested(arrays, name) is not None else ENCODED[name]) for name in names]
    if any(part is None for part in sources) or not is_whole(arrays, sources[0]):
        what = "a prompt cache of MLX has all tokens of each b, in order, and nothing else"
        raise file_error(path, what, "convert with --page-size longest, or to .npz")
    since_032, made, texts = LAYOUTS[str(description.layout)], {}, {}
    for layer, parts in enumerate(zip(*sources, strict=True)):
        for kv in range(2):
            for i, part in enumerate(parts):
                array = np.asarray(part[kv])
                name = f"{layer}.{kv}.{i}" if coded else f"{layer}.{kv}"
                made[name] = array.view(np.uint32) if coded and i == 0 else array
        numbers = [np.shape(parts[0][0])[2]]  # rows; of codes then group and bits
        numbers += [int(number) for number in coded.groups()[::-1]] if coded else []
        texts[f"{'1' if since_032 else '2'}.{layer}"] = CODED if coded else FLOAT_CLASS
        if since_032:
            made |= {f"{layer}.{i}": np.array(number, np.int32) for i, number in enumerate(numbers, 2)}
        elif coded:
            texts |= {f"0.{layer}.{i}": str(number) for i, number in enumerate(numbers)}
        else:
            texts[f"0.{layer}"] = ""
    if since_032:  # name the numbers, and their type
        scalars = [name for name, array in made.items() if array.ndim == 0]
        texts["2.0"] = ""
        for i, name in enumerate(scalars, 1):
            texts |= {f"2.{i}.0": name, f"2.{i}.1": "scalar"}
    texts[f"{'0' if since_032 else '1'}.{tensors.METADATA}"] = tensors.text_of(metadata)
    tensors.write_tensors(path, made, texts, advance)


def is_whole(arrays: Mapping[str, ArrayLike], cache: Any) -> bool:
    """Return whether arrays are only a cache in which each block b is one sequence that fills the block."""
    blocks, _, rows, _ = np.shape(cache[0][0])
    pages, lengths = (np.ravel(np.asarray(arrays.get(name, ()))) for name in ("block_tables", "context_lens"))
    others = {name.partition(".")[0] for name in arrays} - {*ARRAY_NAMES, *ENCODED.values()}
    only_a_cache = others <= {"block_tables", "context_lens", "page_size"}
    return only_a_cache and set(lengths.tolist()) <= {rows} and pages.tolist() in ([], [*range(blocks)])
