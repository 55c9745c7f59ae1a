"""List every format that kvkit or an engine writes: a code table, a scale, its granularity, its placement.

A number is `code * scale`, `code * scale + minimum` or `(code - zero) * scale`. A format is data: the fields
of `Format`.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvkit.errors import argument_error, brief, unknown_name
from kvkit.formats.elements import (
    BY_DTYPE,
    BY_NAME,
    BYTE,
    E4M3,
    E5M2,
    FLOAT16,
    FLOAT32,
    INT2,
    INT4,
    INT8,
    UINT2,
    UINT4,
    UINT8,
    Element,
)

FULL_INT8 = replace(INT8, limits=(-128, 127))
FULL_INT4 = replace(INT4, dtype=BYTE, limits=(-8, 7), numbers=tuple(range(-8, 8)))  # stored as code + 8
UINT3, UINT5, UINT6 = (Element(f"uint{n}", BYTE, n, limits=(0, 2**n - 1)) for n in (3, 5, 6))
INT5 = Element("int5", BYTE, 5, limits=(-16, 15), numbers=tuple(range(-16, 16)))  # stored as code + 16
E2M1 = Element(
    "e2m1", BYTE, 4, significant=2, limits=(-6, 6),
    numbers=(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6),
)  # fmt: skip
IQ4 = Element(
    "iq4", BYTE, 4, limits=(-127, 113),
    numbers=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
)  # fmt: skip
# Lloyd-Max levels have the least squared error for normal numbers. Engines store the index of a level.
LEVELS3, LEVELS4 = (
    Element(f"levels{bits}", BYTE, bits, limits=(-positive[-1], positive[-1]),
            numbers=(*(-level for level in reversed(positive)), *positive))
    for bits, positive in (
        (3, (0.24498359, 0.75564550, 1.34318001, 2.15034955)),
        (4, (0.12842766, 0.38813779, 0.65687992, 0.94244824, 1.25625757, 1.61788176, 2.06844712, 2.73092222)),
    )
)  # fmt: skip
E8M0 = Element("e8m0", BYTE, 8, limits=(0, 254), numbers=(*(2.0 ** (e - 127) for e in range(255)), np.nan))

# Words that may follow the name of a format, as in "int4:channel" or "mxfp4:ceil".
PER = "tensor", "head", "token", "group", "channel"
EXPONENTS = "floor", "ceil"
POWER_OF_2, VLLM = "p2", "vllm"  # DeepSeek's: FlashMLA's least scale, and vLLM's
CELLS = "float32", "float16", "bfloat16"
ROUNDINGS = {"away": "away", "trunc": "trunc", "rint": "even"}  # {word: `Format.rounding`}


@dataclass(frozen=True)
class Format:
    """Describes a format of numbers [..., tokens, heads, head size], for `encode` and `decode`.

    Attributes
    ----------
    name : str
    code : Element
        The codes: their table, bits and limits.
    rule : str
        The function of `scales.py` that computes the scale of a group. "given": the caller's scale, or 1.
    cell : Element or None
        The element of scales, minima and zeros; None for the element of the data.
    offset : str
        The second number of a group: "minimum", which is added to `code * scale`, "zero", which is subtracted
        from codes, or "".
    per : str
        The granularity, as in `groups.py`: "tensor", "head", "token", "group" or "channel"; "" for no scale.
    group : int
        Elements that share a scale; tokens, if `per` is "channel". 0: all.
    rounding : str
        How a quotient becomes a code: "even" (half to even), "away" (half away from zero), "trunc" (toward
        zero), "up" (add a half and truncate), "lower" and "upper" (the nearest in the table; a tie takes the
        lower or the higher code).
    exponent : str
        The rule for scales that are powers of two: "floor", which clips the largest numbers, "ceil", "p2"
        (as "ceil", at least 2**-13), or "vllm" (as "ceil", at least 2**-22).
    order : tuple of str
        The parts of a block in order; () if codes and scales are separate arrays.
    block : int
        The elements of a block; 0 for all elements of a head.
    halves, high_first : bool
        Which of 8 codes of 4 bits are in the (low, high) nibbles of the 4 bytes: (0,4) (1,5) (2,6) (3,7) with
        `halves`, (1,0) (3,2) (5,4) (7,6) with `high_first`, otherwise (0,1) (2,3) (4,5) (6,7).
    along : str
        The axis along which codes of fewer than 8 bits are packed: "head" or "tokens".
    tail : int
        How many elements at the end of a row stay bfloat16.
    hadamard : bool
        Whether rows are rotated by a Hadamard matrix before encoding, and back after decoding.
    unit : str
        How decoded levels are divided if the scale of a row is its length: "root", by sqrt(head size);
        "length", by the length of the row of levels. Otherwise "".
    whole : float
        The tensor-wide scale, which multiplies the scales of blocks: 1, or 0 if it is computed.
    needs_scale : bool
        Whether the caller must pass the scale.
    options : tuple of str
        The options that may follow the name: see `named`. "gN" is any group size.
    source : str
        The project that defined the format.
    """

    name: str
    code: Element
    rule: str
    cell: Element | None = FLOAT32
    offset: str = ""
    per: str = "group"
    group: int = 32
    rounding: str = "even"
    exponent: str = ""
    order: tuple[str, ...] = ()
    block: int = 0
    halves: bool = False
    high_first: bool = False
    along: str = "head"
    tail: int = 0
    hadamard: bool = False
    unit: str = ""
    whole: float = 1
    needs_scale: bool = False
    options: tuple[str, ...] = ()
    source: str = "kvkit"

    def __str__(self) -> str:
        return self.name

    @property
    def computes_whole(self) -> bool:
        """Return whether a tensor-wide scale that the caller leaves out is computed from all data."""
        return self.rule == "nvfp4" and not self.whole

    @property
    def zero_in_scale(self) -> bool:
        """Return whether the lowest 4 bits of a stored scale are the zero point, and no part of the scale."""
        return self.rule == "vllm_int4"

    def scale_type(self, dtype: np.dtype[Any] = FLOAT32.dtype) -> Element:
        """Return the element of scales for data of a dtype."""
        return self.cell or BY_DTYPE[dtype]


def ggml(
    name: str, code: Element, rule: str, order: tuple[str, ...], rounding: str, cell: Element = FLOAT16,
    **fields: Any,
) -> Format:  # fmt: skip
    """Return a format of ggml: blocks of 32 numbers, two halves in the nibbles of 16 bytes."""
    common: dict[str, Any] = {"rounding": rounding, "block": 32, "halves": True, "source": "ggml"}
    return Format(name, code, rule, cell, order=order, **common | fields)


ALL = (
    # Floats of 8 bits, with the caller's scale or 1: every engine's default.
    *(
        Format(code.name, code, "given", per="", options=("gN", "tensor", "head", "token", "group", *CELLS))
        for code in (E4M3, E5M2)
    ),
    # kvkit's own codes, as the PMX operators (int8, int4) and quantized caches store them.
    *(
        Format(code.name, code, "pmx", group=8 if code is INT8 else 32, options=("gN", *PER, *CELLS))
        for code in (INT8, INT4, INT2)
    ),
    *(
        Format(code.name, code, "kvkit_minimum", offset="minimum", options=("gN", *PER, *CELLS))
        for code in (UINT8, UINT4, UINT2)
    ),
    ggml("q8_0", INT8, "ggml_largest", ("scale", "codes"), "away"),
    ggml("q4_0", FULL_INT4, "ggml_signed", ("scale", "codes"), "up"),
    ggml("q4_1", UINT4, "ggml_minimum", ("scale", "minimum", "codes"), "up", offset="minimum"),
    ggml("q5_0", INT5, "ggml_signed", ("scale", "high", "codes"), "up"),
    ggml("q5_1", UINT5, "ggml_minimum", ("scale", "minimum", "high", "codes"), "up", offset="minimum"),
    ggml("iq4_nl", IQ4, "ggml_searched", ("scale", "codes"), "upper"),
    ggml("ggml_mxfp4", E2M1, "mx_power", ("scale", "codes"), "lower", E8M0, exponent="floor"),
    # vLLM: a scale for each head of a token, after its codes.
    *(
        Format(
            f"{code}_token_head", code, "vllm_token", per="token", group=0, rounding=ROUNDINGS[words[0]],
            order=("codes", "scale"), options=words, source="vLLM",
        )
        for code, words in ((INT8, ("away", "trunc", "rint")), (E4M3, ("rint",)))
    ),
    Format("int4_token_head", UINT4, "vllm_int4", offset="zero", per="token", group=0, rounding="away",
           order=("codes", "scale"), source="vLLM, of rows that its rotation has turned"),
    # TurboQuant: keys are indices of levels with a length, values are codes with a scale and a minimum.
    *(
        Format(f"turbo_k{code.bits}{end}", code, "turbo_key", FLOAT16, per="token", group=0, rounding="upper",
               order=("codes", "scale"), hadamard=True, unit=unit, source="vLLM, TurboQuant")
        for code in (LEVELS3, LEVELS4)
        for end, unit in (("", "root"), ("_nc", "length"))
    ),
    *(
        Format(f"turbo_v{code.bits}", code, "turbo_value", FLOAT16, "minimum", per="token", group=0,
               rounding="up", order=("codes", "scale", "minimum"), source="vLLM, TurboQuant")
        for code in (UINT2, UINT3, UINT4)
    ),
    # OpenVINO: keys have a scale and a zero for each channel over 32 tokens, values for each row.
    *(
        Format(f"openvino_{side}_u{code.bits}", code, "openvino", FLOAT32, "zero", per, group,
               high_first=code is UINT4, options=words, source="OpenVINO, CPU")
        for code in (UINT8, UINT4)
        for side, per, group, words in (("key", "channel", 32, ("gN",)), ("value", "token", 0, ()))
    ),
    *(
        Format(f"lmdeploy_{code.name[1:]}", code, "lmdeploy", None, "zero", per="token", group=0,
               rounding="up", halves=True, source="LMDeploy, PyTorch engine")
        for code in (UINT8, UINT4)
    ),
    *(
        Format(f"mlx{code.bits}", code, "mlx_affine", None, "minimum", group=64,
               options=("g32", "g64", "g128"), source="MLX, affine")
        for code in (UINT2, UINT3, UINT4, UINT5, UINT6, UINT8)
    ),
    Format("mlx_mxfp4", E2M1, "mx_power", E8M0, rounding="lower", exponent="ceil", source="MLX"),
    Format("mlx_mxfp8", E4M3, "mx_power", E8M0, exponent="ceil", source="MLX"),
    Format("mlx_nvfp4", E2M1, "nvfp4", E4M3, group=16, rounding="lower", source="MLX"),
    *(
        Format(f"kivi_{side}{code.bits}", code, "kivi", FLOAT16, "minimum", per, along=along, options=("gN",),
               source="KIVI")
        for code in (UINT2, UINT4)
        for side, per, along in (("key", "channel", "tokens"), ("value", "group", "head"))
    ),
    Format("nvfp4", E2M1, "nvfp4", E4M3, group=16, whole=0, source="FlashInfer, NVIDIA"),
    Format("mxfp4", E2M1, "mx_power", E8M0, exponent="floor", options=("g16", "g32", *EXPONENTS),
           source="OCP MX"),
    Format("mxfp8", E4M3, "mx_power", E8M0, exponent="floor", options=EXPONENTS, source="OCP MX"),
    *(
        Format(f"ort_{code}", code, "given", per="", group=0, needs_scale=True, source="onnxruntime")
        for code in (FULL_INT8, FULL_INT4)
    ),
    Format("ds_mla", E4M3, "deepseek", group=128, order=("codes", "scale", "tail"), tail=64,
           options=(POWER_OF_2,), source="DeepSeek V3.2, fp8_ds_mla"),
    Format("ds_v4", E4M3, "deepseek", E8M0, group=64, exponent=POWER_OF_2,
           order=("codes", "tail", "scale", "padding"), tail=64, options=(VLLM,), source="DeepSeek V4"),
)  # fmt: skip
ALIASES = {
    "fp8": "e4m3", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32",
    "f32": "float32",
}  # fmt: skip
NAMED = {format.name: format for format in ALL}
UNREADABLE = {"nvfp4_ds_mla": "rows of 352 bytes of vLLM, whose tensor-wide scale kvkit does not know"}
UNKNOWN_ROWS = {  # {bytes of a latent row: what writes such rows, which no format reads}
    352: "nvfp4_ds_mla of vLLM, which kvkit does not know",
    528: "DeepSeek V4.1, which kvkit does not know; if they are ds_mla without a rotary part, append one of "
    "zeros: np.pad(rows, [(0, 0), (0, 0), (0, 128)])",
}
FORMAT_OPTIONS = "cell", "exponent", "group", "per", "rounding"  # the fields of `Format` that options set
OPTION_FIELDS = {  # {word: (field, value)}
    **{word: ("per", word) for word in PER},
    **{word: ("exponent", word) for word in (*EXPONENTS, POWER_OF_2, VLLM)},
    **{word: ("rounding", rounding) for word, rounding in ROUNDINGS.items()},
    **{word: ("cell", BY_NAME[word]) for word in CELLS},
}
ROUNDING_WORDS = {rounding: word for word, rounding in ROUNDINGS.items()}


def named(format: str | Format, **options: Any) -> Format:
    """Return the format of a name with options, such as "int4:g32:channel" or "mxfp4:ceil".

    Parameters
    ----------
    format : str or Format
        A name of `NAMED`, then options among its `options`, each after a colon: `g` and the group size;
        "tensor", "head", "token", "group" or "channel", the granularity of scales; "floor", "ceil", "p2" or
        "vllm", the rule of exponents; "away", "trunc" or "rint", the rounding of codes; "float32", "float16"
        or "bfloat16", the type of scales.
    **options
        The same options by keyword: the fields cell, exponent, group, per, rounding of `Format`.

    Raises
    ------
    KvkitError
        If there is no such name, or the format does not take an option.

    Examples
    --------
    >>> from kvkit import formats
    >>> formats.named("int4:g64").group
    64
    """
    words: list[str] = []
    if isinstance(format, Format):
        base = format
    else:
        if "+" in str(format):
            wanted = (
                "a format without a rotation (`formats.rotate` turns rows; QuantizedCache and study take it)"
            )
            raise argument_error("format", wanted, repr(str(format)))
        name, *words = str(format).split(":")
        name = ALIASES.get(name, name)
        if name in UNREADABLE:
            raise argument_error("format", "a format whose bytes kvkit knows", f"{name}: {UNREADABLE[name]}")
        if name not in NAMED:
            raise unknown_name("format", "a format", str(format), NAMED, name)
        base = NAMED[name]
    requested: list[tuple[str | None, str]] = [(None, word) for word in words]  # (field of a keyword, word)
    for key, value in options.items():
        if key not in FORMAT_OPTIONS:
            raise argument_error("options", f"names among {', '.join(FORMAT_OPTIONS)}", brief(repr(key)))
        word = f"g{value}" if key == "group" else ROUNDING_WORDS.get(str(value), str(value))
        requested.append((key, word))
    fields: dict[str, Any] = {}
    for keyword, word in requested:
        group = word[1:] if word[:1] == "g" and word.isascii() and word[1:].isdecimal() else ""
        field, value = OPTION_FIELDS.get(word, (None, None))
        if group and int(group):
            field, value = "group", int(group)
        legal = word in base.options or (field == "group" and "gN" in base.options)
        if field is None or not legal or keyword not in (None, field):
            wanted = f"options among {', '.join(base.options)}" if base.options else "no options"
            raise argument_error("format", f"{wanted}, for {base}", brief(repr(word)))
        fields[field] = value
    if base.rule == "given" and not base.per and "group" in fields:
        fields.setdefault("per", "group")
    return replace(base, name=":".join((base.name, *words)), **fields)
