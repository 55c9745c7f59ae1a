"""Every kernel of kvkit_cuda compiles without a device, for two generations, into what a GPU runs well.

A row of the table is a kernel: what its PTX has and lacks, and the registers that a thread may take. None
spills, calls, or computes in float64 but the angles of rotary embedding. Other forms are slow.
"""

import itertools
import re
from dataclasses import dataclass, field

import pytest
from conftest import TARGETS
from ptx_texts import (
    CACHES,
    CODES,
    FAMILIES,
    FLOATS,
    MOVED,
    REGISTERS,
    SIZES,
    assemble,
    retargeted,
    target,
    texts_for,
    way_round,
)
from sass import prologue

from kvkit.checks.records import Context
from kvkit.formats import BY_NAME
from kvkit.formats.elements import BLOCKS, FLOATS8
from kvkit_cuda import prompts, recurrent
from kvkit_cuda.attention import bias, decode, decode_forms, forms, latent, merge, params, plain, prefill
from kvkit_cuda.calls import scan
from kvkit_cuda.copy import chunks, means, pieces, transfer
from kvkit_cuda.device_runtime import device, memory, ptx
from kvkit_cuda.positions import alibi, angles, index, rotary

WIDE = r"\.v(?:2\.\w64|4\.\w32)"  # 16 bytes in one instruction
INEXACT = r"\.ftz|\.approx|div\.full"
SHUFFLE = r"shfl\.sync\.bfly"
MMA = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{0}\.{0}\.f32"
ASYNC = r"cp\.async\.{}\.shared\.global \[%r\d+\], \[%rd\d+\], {};"
SHORT = {"float16": "f16", "bfloat16": "bf16"}
FILE = 64 * 1024  # registers of a multiprocessor; those of a warp are given by so many
GRAIN = 8 * 32


@dataclass
class Kernel:
    """Describes a kernel: patterns that its PTX has and lacks, and the most registers of a thread."""

    make: object
    signature: object
    has: list = field(default_factory=list)
    lacks: list = field(default_factory=list)
    registers: int = 255
    float64: bool = False
    quick: bool = False
    first: tuple = (8, 0)  # compute capability that it runs on
    targets: list = field(default_factory=lambda: list(TARGETS))  # those that have the shared memory

    def check(self, folder, capabilities):
        capabilities = [each for each in capabilities if each >= self.first and each in self.targets]
        texts = texts_for(self.make(), self.signature, capabilities)
        for text, capability in zip(texts, capabilities, strict=True):
            assert ".target sm_{}{}\n".format(*capability) in text
            assert (".f64" in text) is self.float64
            for pattern in self.has:
                assert re.search(pattern, text), pattern
            for pattern in (r"\.local\b|\bcall\b", *self.lacks):
                assert not re.search(pattern, text), pattern
            frame, registers = assemble(text, capability, folder)
            assert frame == [0, 0, 0], capability
            assert registers <= self.registers


# Copies: a move, and codes of each width both ways, are quick

QUICK_COPIES = [
    ("load", "int8", "int8", None, 16), ("store", "float16", "int8", "float32", 8),
    ("store", "bfloat16", "int4", "float16", 2), ("load", "float16", "int4", "bfloat16", 8),
    ("store", "float16", "e4m3", "float32", 8, True), ("store", "float16", "q4_0", None, 32, False),
]  # fmt: skip
COPIES = [
    (direction, *formats, span)
    for formats in MOVED + CODES
    for direction in ("store", "load")
    for span in (chunks.widest(formats[0], formats[1]), chunks.smallest(formats[1]))
]
COPIES += [
    (direction, packed, stored, cell, span, given)
    for stored, cell, given, span in (
        ("e4m3", None, False, 8), ("e5m2", None, False, 1), ("e4m3", "float32", False, 8),
        ("e4m3", "float32", True, 8), ("e5m2", "float16", True, 1),
    )
    for packed in ("float16", "bfloat16")
    for direction in ("store", "load")
] + [
    (direction, packed, stored, None, 32, False)
    for stored in ("q8_0", "q4_0")
    for packed in ("float16", "float32")
    for direction in ("store", "load")
]  # fmt: skip


def copy(variant):
    direction, packed, stored, cell, span, *_ = variant
    has = []
    if span == chunks.widest(packed, stored) and not BY_NAME[stored].block:
        sides = (packed, stored) if direction == "store" else (stored, packed)
        for side, access in zip(sides, (r"ld\.global\.nc", r"st\.global"), strict=True):
            has += [access + WIDE] * (chunks.access(side, span)[0] == 16)
    if cell and direction == "store":
        has += [r"div\.rn\.f32", *[SHUFFLE] * (variant[-1] is not True)]
    return Kernel(
        lambda: transfer.copy_tokens(*variant), transfer.SIGNATURE, has, [INEXACT], REGISTERS,
        quick=variant in QUICK_COPIES,
    )  # fmt: skip


# Ascend's pieces and means, the scan of index tensors


def moves():
    variants = [(size,) for size in (16, 8, 4, 2, 1)]
    variants += [("float16", "e4m3", "float32", 8, True), ("bfloat16", "int8", "float16", 8, False)]
    rotated = [("float16", "float16", None, 8, False, True), ("bfloat16", "e4m3", "float32", 8, True, False)]
    rotated += [("float16", "int8", "float32", 8, False, True), ("float32", "float32", None, 1, False, False)]
    variants += rotated
    for variant in variants:
        has = [r"ld\.global\.nc" + WIDE, r"st\.global" + WIDE] if variant == (16,) else []
        has += [r"mul\.rn\.f32"] * (variant in rotated)
        make = lambda variant=variant: pieces.copy_pieces(variant)  # noqa: E731
        yield variant, Kernel(make, pieces.SIGNATURE, has, [INEXACT], REGISTERS, quick=variant in (
            (16,), ("bfloat16", "int8", "float16", 8, False), *rotated[:2]))  # fmt: skip
    yield "bias", Kernel(lambda: bias.copy_bias, bias.SIGNATURE, [r"mul\.rn\.f32"], [INEXACT], REGISTERS,
                         quick=True)  # fmt: skip
    ahead = rf"(?s)(ld\.global\.nc.*){{{means.AHEAD + 1}}}"  # of one element before the next
    for element in FLOATS:
        make = lambda element=element: means.average_rows(element)  # noqa: E731
        yield element, Kernel(make, means.SIGNATURE, [r"div\.rn\.f32", ahead], [INEXACT, r"\bfma\."],
                              REGISTERS, quick=element == "float16")  # fmt: skip


SCANS = {
    "copy of int32": Kernel(lambda: scan.copy(4), scan.COPY, registers=FILE // 256, quick=True),
    "copy of int64": Kernel(lambda: scan.copy(8), scan.COPY, registers=FILE // 256, quick=True),
    "scan": Kernel(lambda: scan.scan, scan.SCAN, registers=FILE // 1024, quick=True),
}

# Positions: sums are not fused

MASKS = (None, "bool", *FLOATS)
QUICK_POSITIONS = [
    ("rotary", "float16", 8), ("rotary", "bfloat16", 2), ("alibi", "float32", None, 4),
    ("alibi", "bfloat16", "float16", 8),
]  # fmt: skip
POSITIONS = [("rotary", element, span) for element in FLOATS for span in (rotary.widest(element), 2)]
POSITIONS += [("rotary", element, span, True) for element in FLOATS for span in (rotary.widest(element), 1)]
POSITIONS += [("alibi", e, mask, span) for e in FLOATS for mask in MASKS for span in (rotary.widest(e), 1)]
EXACT = [INEXACT, r"fma\.\w+\.f32"]


def position(variant):
    module, *form = variant
    span, has = form[-1] if form[-1] is not True else form[-2], [r"mul\.rn\.f32"]
    if span >= 4:
        has += [access + WIDE for access in (r"ld\.global", r"ld\.global\.nc") if module == "rotary"]
        has += [r"st\.global" + WIDE]
    make, signature = {
        "rotary": (rotary.rotate_tokens, rotary.SIGNATURE), "alibi": (alibi.write_mask, alibi.SIGNATURE)
    }[module]  # fmt: skip
    quick = variant in QUICK_POSITIONS
    return Kernel(lambda: make(*form), signature, has, EXACT, REGISTERS, quick=quick)


TABLES = {
    "angles": Kernel(lambda: angles.compute_table, angles.SIGNATURE, [], EXACT, REGISTERS, True, True),
    "look up": Kernel(lambda: angles.look_up, angles.LOOK_UP, [], EXACT, REGISTERS, quick=True),
    "position index": Kernel(
        lambda: index.write_positions, index.SIGNATURE, [], EXACT, REGISTERS, quick=True
    ),
}

# States: both in float32; of a prompt, whose blocks have 45 KB of shared memory, three run at once

STATES = {
    "step of states": Kernel(
        lambda: recurrent.step_kernel("bfloat16", "float32", "bfloat16"), recurrent.SIGNATURE, registers=96,
    ),
    "prompt of states": Kernel(
        lambda: prompts.prompt_kernel("bfloat16", "bfloat16"), prompts.SIGNATURE, registers=FILE // 3 // 128,
        quick=True,
    ),
}  # fmt: skip

# Attention for any call; what most calls take is quick, with the registers of the target that takes most


def form_of(packed, stored, cell, rows, dim=128, group=8, general=0, **more):
    """Return the form that a call with aligned arrays takes."""
    context = Context(packed, stored, cell, group, 2, dim, dim, (), 0, 0, **more)
    return forms.form_of(params.AttentionParams(general=general), context, rows)


PAGES = form_of("float16", "float16", None, 4, general=1)
QUICK_FORMS = {
    form_of("float16", "float16", None, 4): 200, form_of("float16", "int8", "float16", 4): 255, PAGES: 224,
}  # fmt: skip
FORMS = {
    form_of(*formats, rows) for formats in MOVED + CODES if formats[0] != "int8" for rows in (1, 2, 4, 8)
}
FORMS |= {
    form_of(stored, stored, None, rows, dim)
    for stored in FLOATS
    for rows in (1, 8)
    for dim in (64, 256, 17, 576)
}
FORMS |= {
    form_of(*formats, rows, 128, group)
    for formats in (("float16", "int8", "float16"), ("bfloat16", "int4", "float32"))
    for rows in (1, 8)
    for group in (4, 128)
}
FORMS |= {
    *QUICK_FORMS, form_of("float16", "int8", "float32", 4, general=1, as_loaded=False),
    form_of("float16", "e4m3", "float32", 4, group=0), form_of("bfloat16", "e5m2", None, 8),
    form_of("float16", "q8_0", None, 4), form_of("bfloat16", "q4_0", None, 1),
    form_of("float32", "bfloat16", None, 8, general=1, as_loaded=False, value_format="float32"),
    form_of("float16", "float16", None, 8, 72, general=1, as_loaded=False, elements=(32, 32)),
}  # fmt: skip
BITS = {"float32": 32, "int8": 8, "int4": 4, "e4m3": 8, "e5m2": 8}  # others have 16


def any_call(form):
    *sides, cell_bits = (
        BITS.get(element, 16) for element in (form.cache_format, form.value_format, form.scale_format)
    )
    bits = 0 if form.in_blocks else max(sides)  # whose bytes lie anywhere
    wide, apart = [r"ld\.global\.nc" + WIDE], [SHUFFLE]
    has, lacks = [r"fma\.rn\.f32"], []
    (has if 128 in (form.span * bits, form.chunk_scales * cell_bits) else lacks).extend(wide)
    (has if form.lanes > 1 else lacks).extend(apart)
    return Kernel(
        lambda: plain.attend(form), plain.SIGNATURE, has, lacks, QUICK_FORMS.get(form, 255),
        quick=form == PAGES,
    )  # fmt: skip


def summing(form):
    return Kernel(
        lambda: plain.sum_weights(form), plain.WEIGHTS_SIGNATURE, [SHUFFLE], registers=255, float64=True
    )


MERGES = {
    f"{what} {packed}": Kernel(lambda make=make, packed=packed: make(packed), signature, registers=most,
                               quick=packed == "float16")
    for packed in FLOATS
    for what, make, signature, most in (
        ("splits", merge.merge_splits, merge.SIGNATURE, 64),
        ("states", merge.merge_states, merge.OF_STATES, 128),
    )
}  # fmt: skip

# Decode: with up to 8 rows 3 blocks of 128 threads share a multiprocessor, with more rows 2 of them


def decode_form(
    element="float16", cell=None, stored="{}", group=8, dim=128, value_dim=None, rows=4, has_bias=False,
    unit=16, native=True,
):  # fmt: skip
    stored, sizes = stored.format(element), (dim, value_dim or dim)
    return decode_forms.form(element, stored, cell, group, *sizes, rows, has_bias, unit, native)


OTHER_VALUES = ((192, 128), (64, 256), (256, 16))
QUICK_DECODE = decode_form(cell="float16", stored="int8")
DECODE = [
    QUICK_DECODE,
    decode_form("bfloat16", dim=64, rows=1, has_bias=True),
    decode_form("bfloat16", cell="float32", stored="int4", group=32, rows=16),
    *(
        decode_form(element, *cache, has_bias=has_bias)
        for element in ("float16", "bfloat16")
        for cache in CACHES
        for has_bias in (0, 1)
    ),
    *(decode_form(dim=dim, rows=rows)
      for dim in SIZES for rows in (8, 16) if rows == 8 or dim <= decode_forms.DIM),
    *(decode_form("bfloat16", "bfloat16", "int8", 16, dim) for dim in SIZES if dim % 32 == 0),
    *(decode_form(*cache, 32, rows=rows, has_bias=has_bias, unit=4)
      for cache in (("bfloat16", "float16", "int4"), ("float16", "bfloat16", "int8"))
      for rows, has_bias in ((4, 0), (16, 1))),
    *(decode_form(stored=stored, group=0, native=False) for stored in ("e4m3", "e5m2")),
    decode_form("bfloat16", stored="float16"),
    decode_form("bfloat16", stored="float16", rows=16, has_bias=True),
    *(decode_form(element, "float32", stored, 0, unit=4)
      for element in ("float16", "bfloat16") for stored in ("e4m3", "e5m2")),
    *(decode_form("float16", "float16", "int8", group, 240) for group in (24, 48, 80)),
    *(decode_form(dim=dim, value_dim=value_dim) for dim, value_dim in OTHER_VALUES),
    *(
        decode_form(element, stored=stored, group=0, rows=rows, has_bias=has_bias)
        for element in ("float16", "bfloat16")
        for stored in ("e4m3", "e5m2", "int8")
        for rows, has_bias in ((4, 0), (16, 1))
    ),
]  # fmt: skip


def first_of(cache_format, native):
    """Return the first compute capability of a form, later if it converts floats of 8 bits."""
    return ptx.MINIFLOATS if native and BY_NAME[cache_format].minifloat else (8, 0)


def decoding(form):
    has = [MMA.format(SHORT[form.element]), r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16"]
    has += [ASYNC.format("cg", 16), rf"cp\.async\.wait_group {form.stages - 1};"]
    if form.keys.minifloat and form.keys.native:
        has += [rf"cvt\.rn\.f16x2\.{form.keys.cache_format}x2"]
    if form.sliced:
        has += [rf"ldmatrix\.sync\.aligned\.m8n8\.x4{how}\.shared\.b16" for how in ("", r"\.trans")]
    if form.keys.scale_format and form.keys.unit == 4:  # scales in words
        has += [ASYNC.format("ca", 4)]
    usual = max(form.keys.dim, form.values.dim) <= decode_forms.DIM
    most = {8: 168, 16: 255}[form.rows] if usual else 255
    return Kernel(
        lambda: decode.attend(form), decode.SIGNATURE, has, registers=most, quick=form == QUICK_DECODE,
        first=first_of(form.keys.cache_format, form.keys.native),
    )  # fmt: skip


def test_every_size_of_decode_fits():
    for dim, value_dim, cache in itertools.product(SIZES, SIZES, CACHES):
        form = decode_form("float16", *cache, dim=dim, value_dim=value_dim)
        assert form.shared_bytes <= 48 * 1024  # of a block, without asking for more
        assert form.stages >= 1


# Prefill: each tile of rows and tokens, each element, and each kind of cache


def prefill_form(
    element="float16",
    cell=None,
    stored="{}",
    dim=128,
    value_dim=None,
    has_bias=False,
    native=True,
    room=device.SHARED_MEMORY,
    tokens=False,
):
    sizes = dim, value_dim or dim
    return prefill.form(element, stored.format(element), cell, *sizes, has_bias, native, room, tokens)


QUICK_PREFILL = prefill_form(cell="float16", stored="int4", has_bias=True)
PREFILL = [
    QUICK_PREFILL,
    prefill_form("bfloat16", "float32", "int8", 256),
    *(
        prefill_form(element, *cache, has_bias=has_bias)
        for element in ("float16", "bfloat16")
        for cache in CACHES
        for has_bias in (0, 1)
    ),
    *(prefill_form(dim=dim, has_bias=has_bias) for dim in SIZES for has_bias in (0, 1)),
    *(prefill_form("bfloat16", "bfloat16", "int8", dim) for dim in SIZES),
    *(prefill_form(dim=dim, value_dim=value_dim) for dim, value_dim in OTHER_VALUES),
    *(
        prefill_form(element, stored=stored)
        for element in ("float16", "bfloat16")
        for stored in ("e4m3", "e5m2", "int8")
    ),
    *(prefill_form("bfloat16", stored=stored, native=False) for stored in ("e4m3", "e5m2")),
    *(
        prefill_form(element, "float32", stored, dim, tokens=True)
        for element in ("float16", "bfloat16")
        for stored in ("e4m3", "int8")
        for dim in (96, 128, 256)
    ),
    *(prefill_form(element, "float32", "int8", has_bias=True, tokens=True) for element in SHORT),
    prefill_form("bfloat16", "bfloat16", "int4", tokens=True),
    prefill_form("float16", "float16", "e5m2", native=False, tokens=True),
    prefill_form(room=163 * 1024),
]


def filling(form):
    loads = [rf"ldmatrix\.sync\.aligned\.m8n8\.x4{how}\.shared\.b16" for how in ("", r"\.trans")]
    has = [MMA.format(SHORT[form.element]), *loads, ASYNC.format("cg", 16), r"st\.global" + WIDE]
    if form.cache_format != form.element:
        wide = r"v2\.\w32|\w64" if form.cache_format == "int4" else r"v2\.\w64|v4\.\w32"
        has += [rf"ld\.global\.nc\.({wide})", r"st\.shared" + WIDE]
    most = FILE // prefill.WARPS // GRAIN * GRAIN // 32
    return Kernel(
        lambda: prefill.attend(form), prefill.SIGNATURE, has, registers=most, quick=form == QUICK_PREFILL,
        first=first_of(form.cache_format, form.native),
        targets=[each for each in TARGETS if form.shared_bytes <= room_of(each)],
    )  # fmt: skip


def test_every_size_of_prefill_fits():
    for dim, value_dim in itertools.product(SIZES, SIZES):
        for cell, has_bias in itertools.product((None, "float16"), (0, 1)):
            stored = "int4" if cell else "float16"
            form = prefill_form(cell=cell, stored=stored, dim=dim, value_dim=value_dim, has_bias=has_bias)
            assert form.shared_bytes <= device.SHARED_MEMORY
            assert not form.tile_bytes % memory.LINE


def test_every_device_has_the_shared_memory():
    """CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": KiB of a block."""
    most = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    assert set(most) == set(TARGETS)
    assert min(most.values()) * 1024 == device.SHARED_MEMORY
    assert {each: room_of(each) // 1024 for each in TARGETS} == most


# Latent rows: DeepSeek's, in the forms that devices have room for; 256 threads take all registers


def room_of(capability):
    return device.MORE_SHARED_MEMORY.get(capability, device.SHARED_MEMORY)


def latent_form(heads=64, capability=(9, 0), element="bfloat16"):
    return latent.form(element, 576, 512, heads, room_of(capability))


LATENT = {latent_form(heads, each, element) for each in TARGETS for heads in (16, 32, 64)
          for element in ("float16", "bfloat16")}  # fmt: skip


def latent_rows(form):
    loads = [rf"ldmatrix\.sync\.aligned\.m8n8\.x4{how}\.shared\.b16" for how in ("", r"\.trans")]
    has = [MMA.format(SHORT[form.element]), *loads, ASYNC.format("cg", 16), r"st\.global" + WIDE]
    targets = [each for each in TARGETS if form.shared_bytes <= room_of(each)]
    return Kernel(
        lambda: latent.attend(form), latent.SIGNATURE, has, quick=form == latent_form(16, (12, 0)),
        targets=targets,
    )  # fmt: skip


# All of them

KERNELS = {f"{name}": kernel for name, kernel in (TABLES | SCANS | MERGES | STATES).items()}
for room, variants, make in (
    ("copy", COPIES, copy), ("position", POSITIONS + QUICK_POSITIONS, position), ("plain", FORMS, any_call),
    ("weights", QUICK_FORMS, summing),
    ("decode", DECODE, decoding), ("prefill", PREFILL, filling), ("latent", LATENT, latent_rows),
):  # fmt: skip
    KERNELS |= {f"{room} {variant}": make(variant) for variant in sorted(variants, key=str)}
KERNELS |= {f"piece {name}": kernel for name, kernel in moves()}


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.quick])
def test_kernel(name, tmp_path, capabilities):
    KERNELS[name].check(tmp_path, capabilities)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if not kernel.quick])
def test_every_other_kernel(name, tmp_path):
    KERNELS[name].check(tmp_path, TARGETS)


def test_families(tmp_path):
    """What is compiled for one compute capability of a family is what is compiled for each.

    numba-cuda asks for features of the very device from 9.0 on, as in sm_90a: they change nothing.
    """
    kernel = transfer.copy_tokens("load", "int8", "int8", None, 16)
    launched = [(*each, "a") for each in TARGETS if each >= (9, 0)]
    every = TARGETS + launched
    texts = dict(zip(every, device.ptx(kernel, transfer.SIGNATURE, every), strict=True))
    for each, text in texts.items():
        first = max(first for first in FAMILIES if first <= each)
        assert text == retargeted(texts[first], each)
    for each in launched:
        assert f".target {target(each)}\n" in texts[each]
        assert assemble(texts[each], each, tmp_path) == assemble(texts[each[:2]], each[:2], tmp_path)


def test_all_copies_are_known():
    """A format that is new to the package is new to these tests."""
    assert len(set(COPIES)) == len(COPIES) == 2 * 2 * (10 + 18) + 2 * 2 * 5 + 2 * 2 * 2
    assert set(QUICK_COPIES) < set(COPIES)
    assert set(chunks.ENCODE) == {*FLOATS, *map(str, FLOATS8), "int8"}
    assert {name for variant in COPIES for name in variant[1:3]} == {*chunks.DECODE, *map(str, BLOCKS)}


# Instructions of a GPU in the main loop, for a warp: heads of 128, 16 tokens with scales of 8 codes each in
# decode, 32 rows and 32 tokens in prefill.
LOOPS = {
    "decode float16": (decode, decode_form(), 16, 260),
    "decode int8": (decode, decode_form(cell="float16", stored="int8"), 16, 600),
    "decode int4": (decode, decode_form(cell="float16", stored="int4"), 16, 445),
    "decode e4m3": (decode, decode_form(stored="e4m3", group=0), 16, 360),
    "decode e4m3, bfloat16": (decode, decode_form("bfloat16", stored="e4m3", group=0), 16, 360),
    "decode int8 of heads": (decode, decode_form(stored="int8", group=0), 24, 320),
    "decode e4m3 of tokens": (decode, decode_form("bfloat16", "float32", "e4m3", 0, unit=4), 16, 360),
    "decode int8 of tokens": (decode, decode_form(cell="float32", stored="int8", group=128, unit=4), 24, 360),
    "decode int8 in 64, bfloat16": (decode, decode_form("bfloat16", "bfloat16", "int8", 64, unit=4), 24, 360),
    "decode int4 in 32, bfloat16": (decode, decode_form("bfloat16", "bfloat16", "int4", 32, unit=4), 24, 360),
    "prefill": (prefill, prefill_form(), 128, 500),
    "prefill e4m3, bfloat16": (prefill, prefill_form("bfloat16", stored="e4m3"), 128, 620),
    "prefill e4m3 of tokens": (prefill, prefill_form("bfloat16", "float32", "e4m3", tokens=True), 128, 720),
    "latent": (latent, latent_form(), 272, 800),
}


@pytest.mark.slow
@pytest.mark.perf
@pytest.mark.parametrize("name", LOOPS)
def test_instructions(name, tmp_path):
    module, form, expected, most = LOOPS[name]
    code = way_round(module.attend(form), module.SIGNATURE, tmp_path)
    assert sum("HMMA" in text for text in code) == expected
    assert len(code) <= most


@pytest.mark.slow
@pytest.mark.perf
@pytest.mark.parametrize(("form", "most"), [(decode_form(), 180), (decode_form(stored="int8", group=0), 220)])
def test_a_block_of_decode_comes_soon_to_its_loop(form, most, tmp_path):
    way_round(decode.attend(form), decode.SIGNATURE, tmp_path)
    assert prologue(tmp_path / "kernel.cubin") <= most


# An H100 or H800: multiprocessors, clock, products of two bfloat16 numbers in a cycle. mma.sync reaches
# 62.9 % of them (Luo et al., "Dissecting the NVIDIA Hopper Architecture", 2025).
HOPPER = {"multiprocessors": 132, "hertz": 1.755e9, "products": 2048 * 0.629, "schedulers": 4}
SHARED_CYCLES = {"LDSM": 4, "LDGSTS": 4, "LDS": 1, "STS": 1}  # 128 bytes of shared memory in a cycle


def cycles(code, warps):
    """Return the cycles of tensor cores, shared memory or issued instructions, whichever is largest."""
    words = [text.split()[text.startswith("@")].split(".")[0] for text in code]
    tensor = words.count("HMMA") * 16 * 8 * 16 / HOPPER["products"]
    shared = sum(SHARED_CYCLES.get(word, 0) for word in words)
    return warps * max(tensor, shared, len(code) / HOPPER["schedulers"])


@pytest.mark.slow
@pytest.mark.perf
def test_latent_rows_are_predicted_at_two_fifths_of_flash_mla(tmp_path):
    """Of 660 TFLOP/s: warps hide each other's work between barriers, and none across; latencies apart."""
    form, parts = latent_form(), [[]]
    for text in way_round(latent.attend(form), latent.SIGNATURE, tmp_path):
        parts[-1].append(text)
        if text.startswith("BAR"):
            parts.append([])
    parts[0] = parts.pop() + parts[0]
    assert len(parts) == 3
    taken = sum(cycles(part, latent.WARPS) for part in parts)
    operations = 2 * form.rows * form.tile * (form.dim + form.value_dim)
    assert operations * HOPPER["multiprocessors"] * HOPPER["hertz"] / taken > 0.4 * 660e12
