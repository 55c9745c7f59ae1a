"""Pack codes of a few bits into bytes, and join parts (codes, scales, ...) into blocks."""

import math

import numpy as np
from numpy.typing import ArrayLike

from kvkit.errors import argument_error
from kvkit.formats.elements import BFLOAT16, Element
from kvkit.formats.known import UNKNOWN_ROWS, Format
from kvkit.formats.rotations import OUTPUT, rotate
from kvkit.formats.scales import zero_in_scale
from kvkit.typed import Array


def pack_codes(codes: Array, bits: int, format: Format) -> Array:
    """Pack codes [..., n] into uint8 [..., n * bits / 8], the first ones in the low bits."""
    if bits == 8:
        return codes
    if format.halves:
        low, high = np.split(codes, 2, -1)
        pairs: Array = low | high << 4
        return pairs
    if 8 % bits:  # codes of 3, 5 or 6 bits cross bytes
        single = np.unpackbits(codes[..., None], -1, bits, bitorder="little")  # [..., n, bits]
        return np.packbits(single.reshape(*codes.shape[:-1], codes.shape[-1] * bits), -1, bitorder="little")
    in_byte = 8 // bits
    data = codes[..., ::in_byte].copy()
    for i in range(1, in_byte):
        data |= codes[..., i::in_byte] << np.uint8(i * bits)
    return data >> 4 | data << 4 if format.high_first else data


def unpack_codes(data: Array, bits: int, format: Format) -> Array:
    """Unpack bytes into codes, uint8 [..., n]."""
    if bits == 8:
        return data
    if format.halves:
        return np.concatenate((data & 15, data >> 4), -1)
    count = data.shape[-1] * 8 // bits
    if 8 % bits:
        single = np.unpackbits(data, -1, count * bits, bitorder="little")
        return np.packbits(single.reshape(*data.shape[:-1], count, bits), -1, bitorder="little")[..., 0]
    in_byte = 8 // bits
    data = data >> 4 | data << 4 if format.high_first else data
    codes = np.empty((*data.shape[:-1], count), np.uint8)
    for i in range(in_byte):
        codes[..., i::in_byte] = data >> np.uint8(i * bits) & np.uint8((1 << bits) - 1)
    return codes


def codes_together(format: Format) -> int:
    """Return the fewest codes that fill whole bytes: 8 codes of 3 bits take 3 bytes."""
    return 8 // math.gcd(8, format.code.bits)


def to_bytes(numbers: Array, element: Element) -> Array:
    """Convert float32 [..., n] to the bytes of an element, uint8 [..., n * size]."""
    if element.name == "e8m0":  # a power of two, 2**(e - 127), is stored as e; frexp(1) gives exponent 1
        return (np.frexp(numbers)[1] + 126).astype(np.uint8)
    return np.ascontiguousarray(numbers.astype(element.dtype)).view(np.uint8)


def from_bytes(data: Array, element: Element) -> Array:
    """Convert the bytes of an element to numbers, float32 [..., n]."""
    if element.name == "e8m0":
        return element.table[data]
    return np.ascontiguousarray(data).view(element.dtype).astype(np.float32)


def round_trip(numbers: Array, element: Element) -> Array:
    """Round float32 numbers to a float of 16 or 32 bits; what is too large becomes infinite.

    Numbers of 8 bits stay as they are: the rules in `scales.py` have rounded such scales.
    """
    return numbers if element.bits == 8 else numbers.astype(element.dtype).astype(np.float32)


# Codes and scales in separate arrays


def pack_array(format: Format, codes: Array) -> Array:
    """Return codes as an array: int8 for signed codes of 8 bits, otherwise packed bytes."""
    if format.along == "tokens":
        data = np.moveaxis(pack_codes(np.moveaxis(codes, 0, -1), format.code.bits, format), -1, 0)
    else:
        data = pack_codes(codes, format.code.bits, format)
    return data.view(format.code.dtype if not format.code.significant else np.uint8)


def unpack_array(format: Format, data: Array) -> Array:
    """Undo `pack_array`: return codes as uint8 indices into the code table."""
    if format.along == "tokens":
        return np.moveaxis(unpack_codes(np.moveaxis(data, 0, -1), format.code.bits, format), -1, 0)
    return unpack_codes(data, format.code.bits, format)


def store_scales(numbers: ArrayLike, element: Element) -> Array:
    """Return scales as an array of an element; e4m3 and e8m0 are bytes."""
    numbers = np.asarray(numbers)
    if element.bits == 8:
        return to_bytes(numbers[..., None], element)[..., 0]
    return numbers.astype(element.dtype)


def load_scales(stored: Array, format: Format) -> Array:
    """Return the numbers of stored scales: bytes of e4m3 and e8m0 are decoded."""
    element = format.cell
    if element is None or element.bits != 8 or stored.itemsize != 1:
        return stored  # numbers already
    return element.table[stored.view(np.uint8)]


# Blocks: rows of bytes that hold several parts, in the order of `Format.order`. For example q5_1, 32 codes:
#     scale 2 bytes | minimum 2 | high 4: the fifth bit of each code | codes 16: the other four bits


def byte_bits(format: Format) -> int:
    """Return the bits of a code in the part "codes": without the fifth bit, if the part "high" has it."""
    return format.code.bits - ("high" in format.order)


def part_widths(format: Format, elements: int, scale: Element) -> dict[str, int]:
    """Return {part: bytes} of a block of `elements` numbers, in the order of the parts."""
    bits, count = byte_bits(format), elements // format.group if format.group else 1
    widths = {
        "codes": elements * bits // 8, "high": elements // 8, "scale": scale.bytes(count),
        "minimum": scale.bytes(count), "tail": BFLOAT16.bytes(format.tail), "padding": 1,
    }  # fmt: skip
    return {part: widths[part] for part in format.order}


def pack_blocks(
    format: Format, codes: Array, scales: Array, offset: Array | None, tail: Array | None, scale: Element
) -> Array:
    """Return rows of blocks, uint8 [..., bytes]."""
    *outer, dim = codes.shape
    elements = format.block or dim
    codes = codes.reshape(*outer, dim // elements, elements)
    groups = (*codes.shape[:-1], elements // (format.group or elements))
    parts = {
        "codes": pack_codes(codes & np.uint8(2 ** byte_bits(format) - 1), byte_bits(format), format),
        "scale": to_bytes(scales.reshape(groups), scale),
    }
    if "high" in format.order:
        parts["high"] = np.packbits(codes >> 4, -1, bitorder="little")
    if "padding" in format.order:
        parts["padding"] = np.zeros((*codes.shape[:-1], 1), np.uint8)
    if tail is not None:
        parts["tail"] = to_bytes(tail[..., None, :], BFLOAT16)
    if offset is not None:
        parts["minimum"] = to_bytes(offset.reshape(groups), scale)
    blocks = np.concatenate([parts[name] for name in format.order], -1)
    return blocks.reshape(*outer, blocks.shape[-2] * blocks.shape[-1])


def count_elements(format: Format, width: int) -> int:
    """Return how many elements a row of `width` bytes encodes."""
    if format.block:
        size = sum(part_widths(format, format.block, format.scale_type()).values())
        elements, rest = width // size * format.block, width % size
    else:
        # A row is one block: bytes for the whole row, such as a tail, and bytes for each group of codes.
        group = format.group or codes_together(format)
        fixed = sum(part_widths(format, 0, format.scale_type()).values())
        each = sum(part_widths(format, group, format.scale_type()).values()) - fixed
        elements, rest = (width - fixed) // each * group, (width - fixed) % each
    if rest or elements < 0:
        raise argument_error("codes", f"rows of whole blocks, for {format}", bytes_of_row(width, format))
    return elements


def bytes_of_row(width: int, format: Format) -> str:
    """Describe the bytes of a row that a format does not read: their number, and who writes so many."""
    writer = UNKNOWN_ROWS.get(width) if format.tail else None
    return f"{width} bytes" + (f" (as of {writer})" if writer else "")


def split_blocks(format: Format, rows: Array) -> dict[str, Array]:
    """Return {part: bytes [..., blocks, width]} of rows of blocks, with unpacked codes."""
    dim = count_elements(format, rows.shape[-1])
    elements = format.block or dim
    outer, sizes = rows.shape[:-1], part_widths(format, elements, format.scale_type())
    blocks = rows.reshape(*outer, dim // elements if elements else 0, sum(sizes.values()))
    ends = np.cumsum([*sizes.values()])[:-1]
    parts = dict(zip(sizes, np.split(blocks, ends, -1), strict=True))
    codes = unpack_codes(parts["codes"], byte_bits(format), format)
    if "high" in parts:
        codes = codes | np.unpackbits(parts["high"], -1, bitorder="little") << 4
    return parts | {"codes": codes}


def decode_blocks(format: Format, rows: Array) -> Array:
    """Return the numbers of rows of blocks."""
    parts = split_blocks(format, rows)
    codes = parts["codes"]
    spread = {}  # the scale, and the minimum, of each element
    for name in parts.keys() & {"scale", "minimum"}:
        numbers = from_bytes(parts[name], format.scale_type())
        spread[name] = np.repeat(numbers, codes.shape[-1] // max(1, numbers.shape[-1]), -1)
    with np.errstate(over="ignore", invalid="ignore"):
        levels = format.code.table[codes]
        if format.unit == "root":
            levels = levels / np.sqrt(np.float32(levels.shape[-1]))
        elif format.unit:
            levels = levels / np.linalg.norm(levels, axis=-1, keepdims=True)
        if format.zero_in_scale:
            spread["scale"], spread["minimum"] = zero_in_scale(spread["scale"])
        values = dequantize(format, levels, spread["scale"], spread.get("minimum"))
    values = values.reshape(*rows.shape[:-1], count_elements(format, rows.shape[-1]))
    if format.hadamard:
        values = rotate(values, "hadamard", what=OUTPUT)
    if format.tail:
        values = np.concatenate((values, from_bytes(parts["tail"], BFLOAT16)[..., 0, :]), -1)
    return values


def dequantize(format: Format, values: Array, scale: Array, offset: Array | None) -> Array:
    """Return numbers of the code table, scaled, with the minimum added or the zero subtracted."""
    if format.offset == "zero":
        return (values - offset) * scale
    return values * scale + offset if format.offset else values * scale
