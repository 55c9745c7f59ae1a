"""Encode numbers as the bytes of a format and decode them, with numpy: bit for bit as engines do."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from kvkit.errors import KvkitError, argument_error, brief
from kvkit.formats import packing
from kvkit.formats.elements import BFLOAT16, E4M3, FLOAT32, FLOATS, Element
from kvkit.formats.groups import Lengths, join_groups, scale_shapes, scales_fit, split_groups, spread_scales
from kvkit.formats.known import Format, named
from kvkit.formats.rotations import rotate
from kvkit.formats.scales import SCALE_RULES, calibrate_scale, round_codes
from kvkit.typed import Array

ScaleType = TypeVar("ScaleType", Array, np.float32)

GIVEN_SCALES = ("tensor", "head", "token", "group")  # granularities of a caller's scales for floats of 8 bits
ORT_SCALES = ("tensor", "channel")  # and for onnxruntime's codes, the formats that need a scale


def encode(x: ArrayLike, format: str | Format, *, scale: Any = None, **options: Any) -> dict[str, Array]:
    """Encode numbers as a format stores them.

    Parameters
    ----------
    x : ndarray of float32, float16 or bfloat16, shape [..., D]
        D is the size of a head; formats with a scale by head or channel want [tokens, heads, D].
    format : str or Format
        A name of `NAMED`, perhaps with options: see `named`.
    scale : None, float, ndarray or str
        For e4m3, e5m2, ort_int8 and ort_int4, the factor of codes: a number, or an array [heads],
        [tokens, heads] or [tokens, heads, groups] ([heads, D] for ort_*). None is 1; ort_* refuse None.
        One of "tensor", "head", "token", "group" and "channel" computes scales, amax / largest code, for each
        of these; the name of the format may say it as an option. For nvfp4, the tensor-wide scale; None is
        amax / 448. The tensor-wide scale of mlx_nvfp4 is always 1.
    **options
        Options of the format: see `named`.

    Returns
    -------
    dict of str to ndarray
        "codes", uint8 (int8 for signed codes of 8 bits). If the format stores scales apart, also "scale",
        "minimum" or "zero", and "whole", the tensor-wide scale unless it is 1. If scales lie among the codes,
        "codes" has rows of bytes.

    Raises
    ------
    KvkitError
        If the format or an option is unknown; if a scale is missing, not above 0, not finite or of a wrong
        shape; if data have another dtype, or the head size is no multiple of the group; if a number is not
        finite and either codes cannot store it or scales are computed; if a scale overflows its dtype.

    Notes
    -----
    With a scale that the caller gives, 8-bit floats saturate (infinities, too), and NaN stays NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit import formats
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 2, 32)
    >>> formats.encode(x, "q8_0")["codes"].shape
    (1, 2, 34)
    >>> arrays = formats.encode(x, "e4m3", scale="head")
    >>> arrays["scale"].shape
    (2,)
    >>> bool(abs(formats.decode(arrays, "e4m3") - x).max() < 0.04)
    True
    """
    known = named(format, **options)
    computed = known.rule != "given" or isinstance(scale, str) or (scale is None and known.per != "")
    rows, dtype = check_numbers(x, known, computed)
    rows, tail = (rows[..., : -known.tail], rows[..., -known.tail :]) if known.tail else (rows, None)
    per, tensor_scale, offset = known.per, np.float32(1), None
    with np.errstate(over="ignore", invalid="ignore"):
        rows = rotate(rows, "hadamard") if known.hadamard else rows
        if known.rule == "given":
            per, scales = resolve_scales(known, scale, rows)
            check_positive("scale", scales)
            ratio = rows / spread_scales(scales, rows.shape, per)
        else:
            if known.rule == "nvfp4":
                tensor_scale = tensor_wide_scale(known, scale, rows)
            elif scale is not None:
                raise argument_error("scale", f"None, for {known}", brief(repr(scale)))
            if known.rule not in SCALE_RULES:
                rules = ", ".join(["given", *SCALE_RULES])
                raise argument_error("format.rule", f"one of {rules}", brief(repr(known.rule)))
            ratio, scales, offset = SCALE_RULES[known.rule](
                split_groups(rows, per, known.group), known, dtype, tensor_scale
            )
            ratio, scales = join_groups(ratio, rows.shape, per), scales[..., 0]
            offset = None if offset is None else offset[..., 0]
        codes = round_codes(ratio, known)
        scale_type = known.scale_type(dtype)
        if computed:
            check_stored(known, rows, (scales, offset, tail), scale_type, tensor_scale)
        if known.order:
            return {"codes": packing.pack_blocks(known, codes, scales, offset, tail, scale_type)}
        arrays = {"codes": packing.pack_array(known, codes)}
        if computed or scale is not None:
            arrays["scale"] = packing.store_scales(scales, scale_type)
        if offset is not None:
            arrays[known.offset] = packing.store_scales(offset, scale_type)
    if known.rule == "nvfp4" and tensor_scale != 1:
        arrays["whole"] = np.asarray(tensor_scale)
    return arrays


def decode(arrays: Mapping[str, ArrayLike] | ArrayLike, format: str | Format, **options: Any) -> Array:
    """Decode the bytes of a format to float32.

    Parameters
    ----------
    arrays : dict of str to ndarray, or ndarray
        The result of `encode`, or an engine's arrays of the same shapes. Codes may be viewed as wider words.
        A single array holds the codes.
    format : str or Format
    **options
        As in `encode`.

    Returns
    -------
    ndarray of float32, shape [..., D]
        code * scale in float32; code * scale + minimum, or (code - zero) * scale, if the format has these.

    Raises
    ------
    KvkitError
        If the format is unknown, an array is missing or has a wrong shape, or a scale is not finite.

    Notes
    -----
    Attention reads e4m3, e5m2, q8_0 and q4_0 in place (``quant_format`` of the operators). To attend to any
    other format, decode a whole layer to float32 and pass it to `multi_head_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit import formats
    >>> formats.decode(np.array([[0x38, 0x7E, 0xB8]], np.uint8), "e4m3")
    array([[  1., 448.,  -1.]], dtype=float32)
    """
    known = named(format, **options)
    parts = dict(arrays) if isinstance(arrays, dict) else {"codes": arrays}
    codes = required_array(parts, "codes", known)
    holds_numbers = codes.dtype.kind in "fcO" and codes.dtype.itemsize > 1  # not integers, nor float8
    if holds_numbers or codes.ndim < fewest_axes(known):
        wanted = f"bytes of {fewest_axes(known)} axes or more, for {known}"
        raise argument_error("codes", wanted, f"dtype {codes.dtype} and {codes.ndim} axes")
    codes = np.ascontiguousarray(codes).view(np.uint8)
    if known.order:
        return packing.decode_blocks(known, codes)
    values, per = known.code.table[packing.unpack_array(known, codes)], known.per
    if known.rule == "given":
        scale = required_array(parts, "scale", known) if per else parts.get("scale")
        per, scales = resolve_scales(known, scale, values)
    else:
        tensor_scale = single_scale("whole", parts.get("whole", 1), known)
        scales = load_scales(parts, "scale", known, values.shape) * tensor_scale
    offset = load_scales(parts, known.offset, known, values.shape) if known.offset else None
    offset = None if offset is None else spread_scales(offset, values.shape, per)
    return packing.dequantize(known, values, spread_scales(scales, values.shape, per), offset)


def fewest_axes(format: Format) -> int:
    """Return how many axes an array of numbers has at least: [heads, D] for scales by head or channel."""
    return 2 if format.per in ("head", "channel") else 1


def check_numbers(x: ArrayLike, format: Format, computed: bool) -> tuple[Array, np.dtype[Any]]:
    """Return (data as float32, their dtype); raise if they do not fit the format or computed scales."""
    x = np.asarray(x)
    if x.dtype not in [element.dtype for element in FLOATS]:
        raise argument_error("x", f"dtype {', '.join(map(str, FLOATS))}", str(x.dtype))
    if x.ndim < fewest_axes(format):
        raise argument_error("x", f"{fewest_axes(format)} axes or more, for {format}", x.ndim)
    dtype, x = x.dtype, np.ascontiguousarray(x, np.float32)
    if (computed or not format.code.significant) and not np.isfinite(x).all():
        place = tuple(np.argwhere(~np.isfinite(x))[0].tolist())
        what = "NaN" if np.isnan(x[place]) else "infinity"
        scaled = " with a computed scale" if format.rule == "given" and computed else ""
        raise argument_error("x", f"finite numbers, for {format}{scaled}", f"{what} at {place}")
    whole_bytes = packing.codes_together(format)
    by_tokens = format.along == "tokens"
    group = format.group if format.per == "group" else 1
    elements = math.lcm(group or 1, format.block or 1, 1 if by_tokens else whole_bytes)
    if (x.shape[-1] - format.tail) % elements or x.shape[-1] <= format.tail:
        more = f" and {format.tail} more" if format.tail else ""
        wanted = f"a head of a multiple of {elements} elements{more}, for {format}"
        raise argument_error("x", wanted, x.shape[-1])
    group = format.group if format.per == "channel" else 1
    tokens = math.lcm(group or 1, whole_bytes if by_tokens else 1)
    if x.shape[0] % tokens:
        raise argument_error("x", f"a multiple of {tokens} tokens, for {format}", x.shape[0])
    return x, dtype


def no_room(format: Format, x: Array, name: str, element: Element) -> KvkitError:
    """Return the error for a scale, minimum or zero that is too large for its type."""
    expected = f"numbers whose {name} {element} holds, for {format}"
    return argument_error("x", expected, f"up to {np.abs(x).max():g}")


def check_stored(
    format: Format, x: Array, parts: tuple[Array, Array | None, Array | None], scale_type: Element,
    tensor_scale: Any,
) -> None:  # fmt: skip
    """Raise if a scale, minimum, zero or tail is too large for its type, or if codes decode to inf.

    `parts` are the scales, the minima or zeros, and the tail of the numbers `x`. The type of the first two is
    `scale_type`.
    """
    names, types = ("scale", format.offset, "tail"), (scale_type, scale_type, BFLOAT16)
    stored = [
        None if part is None else packing.round_trip(part, element)
        for part, element in zip(parts, types, strict=True)
    ]
    for name, part, element in zip(names, stored, types, strict=True):
        if part is not None and not np.isfinite(part).all():
            raise no_room(format, x, name, element)
    for code in format.code.limits:
        limit = np.asarray(code, np.float32)
        if not np.isfinite(packing.dequantize(format, limit, stored[0] * tensor_scale, stored[1])).all():
            raise no_room(format, x, "codes", FLOAT32)


def resolve_scales(format: Format, scale: Any, x: Array) -> tuple[str, Any]:
    """Return (granularity, scales) for the caller's `scale`: an array, or the name of a granularity."""
    if scale is None and format.per:
        scale = format.per
    if scale is None and not format.needs_scale:
        return "tensor", np.float32(1)
    if scale is None:
        raise argument_error("scale", f"a number or an array, for {format}", "None")
    legal = scale_shapes(x.shape, format.group, ORT_SCALES if format.needs_scale else GIVEN_SCALES)
    if isinstance(scale, str):
        if scale not in legal:
            raise argument_error("scale", f"one of {', '.join(legal)}, for {format}", brief(repr(scale)))
        if scale == "group" and x.shape[-1] % format.group:
            wanted = f"a head of a multiple of {format.group} elements, for {format}"
            raise argument_error("x", wanted, x.shape[-1])
        return scale, calibrate_scale(split_groups(x, scale, format.group), format)[..., 0]
    scales = finite_scales("scale", scale)
    if scales.size == 1:
        return "tensor", scales.reshape(())
    for per in legal:
        if scales_fit(scales, x.shape, per):
            return per, scales
    by = ", ".join(f"{shape} by {per}" for per, shape in legal.items())
    raise argument_error("scale", f"shape {by}", scales.shape)


def tensor_wide_scale(format: Format, scale: Any, x: Array) -> np.float32:
    """Return the tensor-wide scale of nvfp4, which multiplies the scales of blocks."""
    if scale is not None:
        return check_positive("scale", single_scale("scale", scale, format))
    if format.whole == 1:
        if np.abs(x).max(initial=0) > format.code.limits[1] * E4M3.limits[1]:
            raise no_room(format, x, "scale", E4M3)
        return np.float32(1)
    computed = np.float32(np.abs(x).max(initial=0) / np.float32(E4M3.limits[1]))
    return computed if computed > 0 else np.float32(1)


def single_scale(name: str, scales: Any, format: Format) -> np.float32:
    """Check that a caller's scale is one finite number; return it."""
    number = finite_scales(name, scales)
    if number.size != 1:
        raise argument_error(name, f"a number, for {format}", f"shape {number.shape}")
    return np.float32(number.reshape(()))


def check_positive(name: str, scales: ScaleType) -> ScaleType:
    """Check that scales are above 0; return them."""
    if not np.all(scales > 0):
        raise argument_error(name, "numbers above 0", np.min(scales))
    return scales


def finite_scales(name: str, numbers: Any) -> Array:
    """Check that a caller's scales are finite; return them as float32."""
    try:
        scales: Array = np.asarray(numbers).astype(np.float32)
    except (TypeError, ValueError):
        raise argument_error(name, "a number or an array of floats", brief(repr(numbers))) from None
    if not np.isfinite(scales).all():
        raise argument_error(name, "finite numbers", "NaN" if np.isnan(scales).any() else "infinity")
    return scales


def required_array(arrays: Mapping[str, Any], name: str, format: Format) -> Array:
    if arrays.get(name) is None:
        raise argument_error(name, f"an array, for {format}", "None")
    return np.asarray(arrays[name])


def load_scales(arrays: Mapping[str, Any], name: str, format: Format, shape: Lengths) -> Array:
    """Return stored scales, minima or zeros as float32; raise unless they fit numbers of this shape."""
    scales = finite_scales(name, packing.load_scales(required_array(arrays, name, format), format))
    if not scales_fit(scales, shape, format.per):
        wanted = scale_shapes(shape, format.group, [format.per])[format.per]
        raise argument_error(name, f"shape {wanted}, for {format} and such codes", scales.shape)
    return scales
