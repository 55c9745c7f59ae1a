"""The machine that runs PTX: it computes as the ISA says, and finds what it claims to find."""

import re
from fractions import Fraction

import numpy as np
import pytest
from ptx_machine import Machine, Program
from ptx_memory import Fault
from ptx_operations import OPERATIONS, compute

THREAD = """
    mov.u32 %r1, %tid.x;
    cvt.u64.u32 %rd1, %r1;
    ld.param.u64 %rd2, [a];
    shl.b64 %rd3, %rd1, 2;
    add.s64 %rd4, %rd2, %rd3;
    mov.u64 %rd5, s;
    add.s64 %rd6, %rd5, %rd3;
"""  # %rd4 and %rd6: the thread's word in memory and in shared memory


def run(body, words, threads=32, allowed=None, order=0):
    """Run a kernel whose threads have a word of memory each, and 1 KB of shared memory."""
    threads = threads if isinstance(threads, tuple) else (threads,)
    text = (
        f".visible .entry f(\n.param .u64 a\n)\n{{\n.shared .align 16 .b8 s[1024];\n{THREAD}{body}\nret;\n}}"
    )
    machine = Machine(order)
    machine.memory.allow(words.ctypes.data, words.nbytes if allowed is None else allowed)
    machine.launch(Program(text), (1,), threads, [words.ctypes.data])
    return words


def words(count=64):
    return np.arange(100, 100 + count, dtype=np.uint32)


def test_threads_that_part_meet_again():
    body = """
        mov.u32 %r2, 0;
        mov.u32 %r3, 0;
    $again:
        setp.ge.u32 %p1, %r3, %r1;
        @%p1 bra $done;
        add.s32 %r2, %r2, %r3;
        add.s32 %r3, %r3, 1;
        bra.uni $again;
    $done:
        shfl.sync.bfly.b32 %r4|%p2, %r2, 1, 31, -1;
        st.global.u32 [%rd4], %r4;
    """
    thread = np.arange(32) ^ 1
    assert (run(body, words(32)) == thread * (thread - 1) // 2).all()


EXCHANGE = """
    st.shared.u32 [%rd6], %r1;
    {wait}
    xor.b32 %r2, %r1, {other};
    mul.wide.u32 %rd7, %r2, 4;
    add.s64 %rd8, %rd5, %rd7;
    ld.shared.u32 %r3, [%rd8];
    st.global.u32 [%rd4], %r3;
"""


@pytest.mark.parametrize(
    ("wait", "other"), [("bar.sync 0;", 1), ("bar.sync 0;", 32), ("bar.warp.sync -1;", 1)]
)
def test_shared_memory(wait, other):
    assert (run(EXCHANGE.format(wait=wait, other=other), words(), 64) == np.arange(64) ^ other).all()


def test_memory_that_a_warp_uses_again():
    """By other threads each time, which wait for each other."""
    again = "bar.warp.sync -1; xor.b32 %r4, %r1, 2; shl.b32 %r4, %r4, 2; cvt.u64.u32 %rd9, %r4;"
    again += "add.s64 %rd9, %rd5, %rd9; st.shared.u32 [%rd9], %r1; bar.warp.sync -1;"
    body = EXCHANGE.format(wait="bar.warp.sync -1;", other=1) + again + "ld.shared.u32 %r5, [%rd6];"
    assert (run(body + "st.global.u32 [%rd4], %r5;", words(32)) == np.arange(32) ^ 2).all()
    with pytest.raises(Fault, match="wait for each other"):
        run(body.replace("bar.warp.sync -1; xor", "xor") + "st.global.u32 [%rd4], %r5;", words(32))


COPY = "and.b32 %r2, %r1, 3; setp.ne.s32 %p1, %r2, 0; cvt.u32.u64 %r3, %rd6;" + (
    "@!%p1 cp.async.cg.shared.global [%r3], [%rd4], 16, {size};"
)
LOAD = "ld.shared.u32 %r4, [%rd6]; st.global.u32 [%rd4], %r4;"


def test_memory_that_a_launch_gives():
    program = Program(
        ".extern .shared .align 128 .b8 d[];\n.visible .entry f(\n.param .u64 a\n)\n{\n"
        ".shared .align 16 .b8 s[16];\nmov.b32 %r1, 7;\nst.shared.u32 [d+60], %r1;\nret;\n}"
    )
    Machine().launch(program, (1,), (32,), [0], 64)
    for given, message in ((60, "out of bounds"), (227 * 1024, "shared memory")):
        with pytest.raises(Fault, match=message):
            Machine().launch(program, (1,), (32,), [0], given)


@pytest.mark.parametrize("wait", ["cp.async.wait_all;", "cp.async.commit_group; cp.async.wait_group 0;"])
def test_copies(wait):
    keep = "bar.sync 0; ld.shared.u32 %r4, [%rd6]; shl.b32 %r4, %r4, 1; add.s64 %rd9, %rd4, 128;"
    body = COPY.format(size=16) + wait + keep + "st.global.u32 [%rd9], %r4;"
    assert (run(body, words(64))[32:] == 2 * np.arange(100, 132)).all()
    body = COPY.format(size=0) + wait + keep + "st.global.u32 [%rd9], %r4;"
    assert not run(body, words(64))[32:].any()


FAULTS = {
    "load out of bounds": ("ld.global.u32 %r2, [%rd4+4];", 32, "out of bounds"),
    "store out of bounds": ("st.global.u32 [%rd4+-4], %r1;", 32, "out of bounds"),
    "copy out of bounds": (COPY.format(size=16).replace("[%rd4]", "[%rd4+16]"), 32, "out of bounds"),
    "shared out of bounds": ("st.shared.u32 [%rd6+1000], %r1;", 32, "out of bounds"),
    "not aligned": ("ld.global.v2.u32 {%r2, %r3}, [%rd4];", 16, "not aligned"),
    "shared not aligned": ("st.shared.u16 [%rd6+1], %r1;", 32, "not aligned"),
    "not written": ("ld.shared.u32 %r2, [%rd6];", 32, "before it is written"),
    "no register": ("add.s32 %r2, %r3, 1;", 32, "before it is written"),
    "no barrier": (EXCHANGE.format(wait="", other=1), 32, "wait for each other"),
    "a barrier of warps": (EXCHANGE.format(wait="bar.warp.sync -1;", other=32), 64, "wait for each other"),
    "read, then written": (
        EXCHANGE.format(wait="bar.sync 0;", other=1) + "st.shared.u32 [%rd6], %r3;",
        32, "wait for each other",
    ),
    "a warp's turn, then another's": (
        EXCHANGE.format(wait="bar.warp.sync -1;", other=1)
        + "bar.warp.sync -1; setp.eq.u32 %p1, %r1, 40; @%p1 st.shared.u32 [%rd5], %r1;",
        64, "wait for each other",
    ),
    "no wait": (COPY.format(size=16) + LOAD, 32, "has not arrived"),
    "no wait at all": (COPY.format(size=16), 32, "nobody waited"),
    "no group": (COPY.format(size=16) + "cp.async.wait_group 0;" + LOAD, 32, "has not arrived"),
    "one group too few": (
        COPY.format(size=16) + "cp.async.commit_group; cp.async.wait_group 1;" + LOAD, 32, "has not arrived",
    ),
    "a copy for others": (COPY.format(size=16) + "cp.async.wait_all;" + LOAD, 32, "wait for each other"),
    "not invariant": ("ld.global.nc.u32 %r2, [%rd4]; st.global.u32 [%rd4], %r2;", 32, "invariant"),
    "two values": ("st.global.u32 [%rd2], %r1;", 32, "different values"),
    "two values of a phase": (
        "st.global.u32 [%rd4], %r1; bar.sync 0; st.global.u32 [%rd2], %r1;", 32, "different values",
    ),
    "loaded too early": (
        "st.global.u32 [%rd4], %r1; ld.global.u32 %r2, [%rd2];", 32, "load what others store",
    ),
    "half a warp": (
        "setp.lt.u32 %p1, %r1, 16; @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;", 32, "not together",
    ),
    "half a barrier": ("setp.lt.u32 %p1, %r1, 16; @%p1 bar.sync 0;", 32, "barrier for some"),
    "two barriers": (
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra $low; bar.sync 0; ret;\n$low:\nbar.sync 0;",
        64, "different barriers",
    ),
    "two barriers of a warp": (
        "setp.lt.u32 %p1, %r1, 16; @%p1 bra $low; bar.sync 0; ret;\n$low:\nbar.sync 0;",
        32, "a barrier for part of a warp",
    ),
    "lanes that wrote nothing": (
        "setp.eq.u32 %p1, %r1, 31; @%p1 mov.u32 %r9, 1; st.global.u32 [%rd4], %r9;",
        32, "before it is written",
    ),
    "a guard that lanes have not": (
        "setp.eq.u32 %p1, %r1, 31; @%p1 setp.eq.u32 %p2, %r1, 31; @%p2 st.global.u32 [%rd4], %r1;",
        32, "before it is written",
    ),
    "too many threads": ("", (1024, 2), "a launch of"),
    "changed at once, and stored": (
        "mov.u32 %r3, 1; atom.global.add.u32 %r4, [%rd2], %r3; setp.eq.u32 %p1, %r1, 0;"
        "@%p1 st.global.u32 [%rd2], %r3;",
        32, "change at once",
    ),
    "changed at once, and loaded": (
        "mov.u32 %r3, 1; atom.global.add.u32 %r4, [%rd2], %r3; ld.global.u32 %r5, [%rd2];",
        64, "change at once",
    ),
    "no such thread": (
        "setp.lt.u32 %p1, %r1, 16; @%p1 shfl.sync.bfly.b32 %r2, %r1, 16, 31, 65535;", 32, "takes no part",
    ),
}  # fmt: skip


def test_threads_that_leave_a_loop_at_two_places_meet_at_a_barrier():
    body = """
        setp.lt.u32 %p1, %r1, 16;
        mov.u32 %r2, 0;
    $again:
        @%p1 bra $done;
        setp.eq.u32 %p2, %r2, 1;
        @%p2 bra $done;
        mov.u32 %r2, 1;
        bra $again;
    $done:
        bar.sync 0;
        st.global.u32 [%rd4], %r2;
    """
    assert (run(body, words(32)) == np.arange(32) // 16).all()


def test_memory_that_threads_take_in_turn():
    """Each phase has a thread of its own that stores a word, which all load in the next one."""
    body = """
        setp.eq.u32 %p1, %r1, 3;
        @%p1 st.global.u32 [%rd2], %r1;
        bar.sync 0;
        ld.global.u32 %r2, [%rd2];
        bar.sync 0;
        st.global.u32 [%rd4], %r2;
    """
    assert (run(body, words(32)) == 3).all()


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name):
    body, threads, text = FAULTS[name]
    with pytest.raises(Fault, match=text):
        run(body, words(64 if threads == 64 else 32), threads)


UNKNOWN = """
    sin.approx.f32 %f2, %f1
    add.rz.f32 %f2, %f1, %f1
    add.sat.f32 %f2, %f1, %f1
    add.s32 %r2, %r1, %r1, %r1
    add.cc.u32 %r2, %r1, %r1
    add.u64 %rd7, [%rd4], 1
    max.NaN.f32 %f2, %f1, %f1
    min.xorsign.abs.f32 %f2, %f1, %f1
    fma.rn.ftz.f32 %f2, %f1, %f1, %f1
    fma.rn.relu.f16x2 %r2, %r1, %r1, %r1
    mul.ftz.f32 %f2, %f1, %f1
    mul.wide.s64 %rd7, %rd1, %rd1
    mad.hi.s32 %r2, %r1, %r1, %r1
    div.full.f32 %f2, %f1, %f1
    sqrt.rz.f32 %f2, %f1
    rcp.rn.f64 %fd2, %fd1
    setp.lt.ftz.f32 %p1, %f1, %f1
    setp.lt.and.s32 %p1, %r1, %r1, %p2
    setp.lt.b32 %p1, %r1, %r1
    setp.lt.s32 %p1|%p2, %r1, %r1
    shl.wrap.b32 %r2, %r1, 1
    bfi.b32 %r2, %r1, %r1, %r1, 4
    prmt.b32.f4e %r2, %r1, %r1, %r1
    lop3.or.b32 %p1, %r1, %r1, %r1, 128, %p2
    mov.foo.b32 %r2, %r1
    selp.foo.b32 %r2, %r1, %r1, %p1
    cvta.local.u64 %rd7, %rd1
    cvt.rn.ftz.f32.f32 %f2, %f1
    cvt.rz.f16.f32 %h1, %f1
    cvt.sat.s8.s32 %r2, %r1
    cvt.rn.relu.bf16x2.f32 %r2, %f1, %f1
    ld.volatile.global.u32 %r2, [%rd4]
    ld.relaxed.gpu.global.u32 %r2, [%rd4]
    ld.shared.nc.u32 %r2, [%rd6]
    ld.local.u32 %r2, [%rd6]
    ld.u32 %r2, [%rd4]
    ld.global.v2.u32 %r2, [%rd4]
    ld.param.u64 %rd7, [a+4]
    st.volatile.shared.u32 [%rd6], %r1
    st.global.wt.u32 [%rd4], %r1
    atom.acq_rel.gpu.global.add.u32 %r2, [%rd4], %r1
    atom.global.add.f32 %f2, [%rd4], %f1
    atom.global.cas.b32 %r2, [%rd4], %r1, %r1
    red.global.add.u32 [%rd4], %r1
    bar.sync 1
    bar.sync 0, 32
    bar.arrive 0, 64
    bar.red.popc.u32 %r2, 0, %p1
    bar.red.or.pred %p1, 0, 32, %p2
    barrier.sync 0
    membar.gl
    vote.sync.uni.pred %p1, %p2, -1
    shfl.sync.up.b32 %r2, %r1, 1, 0, -1
    shfl.sync.bfly.foo.b32 %r2, %r1, 1, 31, -1
    shfl.bfly.b32 %r2, %r1, 1, 31
    mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2}, {%r3}, {%f1,%f2,%f3,%f4}
    mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r2,%r3}, {%r1,%r1,%r1,%r1}, {%r1,%r1}, {%r1,%r1}
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r2,%r3}, [%rd6]
    movmatrix.sync.aligned.m8n8.b16 %r2, %r1
    cp.async.cg.shared.global [%r3], [%rd4], 8
    cp.async.ca.shared.global.L2::128B [%r3], [%rd4], 16
    cp.async.mbarrier.arrive.shared.b64 [%rd6]
    bra.foo $end
    ret.uni
    call f
"""


@pytest.mark.parametrize("line", UNKNOWN.strip().splitlines())
def test_what_is_unknown_is_said(line):
    """Even where no thread gets."""
    with pytest.raises(Fault, match="not known: " + re.escape(line.strip())):
        run(f"ret; {line};\n$end:\n", words(32))


@pytest.mark.parametrize(
    "line", ["shfl.sync.bfly.b32 %r2, %r1, 1, 15, -1", "cp.async.cg.shared.global [%r1], [%rd2], 16, 8"]
)
def test_operands_that_are_unknown_are_said(line):
    with pytest.raises(Fault, match="not known: " + re.escape(line)):
        run(line, words(32))


def test_instructions_in_braces():
    body = "{ mov.b32 %r2, 7; }\n{ // of its own\n .reg .b32 %r3; st.global.u32 [%rd4], %r2; }"
    assert (run(body, words(32)) == 7).all()


@pytest.mark.parametrize("order", [1, -1])
def test_an_order_of_warps(order):
    """Each goes on alone as far as it may."""
    body = "mov.u32 %r2, %tid.x; shr.u32 %r2, %r2, 5; bar.sync 0; st.global.u32 [%rd4], %r2;"
    assert (run(body, words(), 64, order=order) == np.arange(64) // 32).all()
    turn = "mov.u32 %r2, 1; atom.global.add.u32 %r3, [%rd2], %r2; st.global.u32 [%rd4+128], %r3;"
    turns = run(turn, words(96), 64, order=order)[32:].astype(int)
    assert (turns[:32].max() < turns[32:].min()) == (order == 1)


def computed(text, *operands):
    """Return the result of an operation on arrays."""
    opcode = tuple(text.split("."))
    names = dict(zip("abcd", operands, strict=False))

    def value(name, kind):
        return kind.of(names[name].view(f"u{names[name].itemsize}"))

    return compute(opcode, list(names), value)


def nearest(exact):
    """Return the float32 next to a fraction, ties to even."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def test_fused_products_are_rounded_once():
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(4000).astype(np.float32) for _ in range(2))
    c = (rng.standard_normal(4000) * 10.0 ** rng.integers(-12, 3, 4000)).astype(np.float32)
    # Halfway between two float32 numbers but for a last bit that float64 loses.
    a[:2], b[:2], c[:2] = 1 + 2.0**-12, 1 + 2.0**-12, [2.0**-80, -(2.0**-80)]
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)
    ]
    assert (computed("fma.rn.f32", a, b, c) == [nearest(x) for x in exact]).all()
    down = computed("fma.rm.f32", a, b, c)
    assert all(Fraction(float(x)) <= y for x, y in zip(down, exact, strict=True))
    above = np.nextafter(down, np.float32(np.inf))
    assert all(Fraction(float(x)) > y for x, y in zip(above, exact, strict=True))


def test_integers():
    a, b = np.array([7, -7, 7, -7, 5]), np.array([2, 2, -2, -2, 0])
    assert computed("div.s64", a, b)[:4].tolist() == [3, -3, -3, 3]
    assert computed("rem.s64", a, b)[:4].tolist() == [1, -1, 1, -1]
    x = np.array([0x80000001, 3], np.uint32)
    assert computed("shr.s32", x, np.array([40, 1])).view(np.int32).tolist() == [-1, 1]
    assert computed("shr.u32", x, np.array([32, 1])).tolist() == [0, 1]
    assert computed("shl.b32", x, np.array([32, 31])).tolist() == [0, 0x80000000]
    assert computed("mul.wide.s32", x, x).tolist() == [(2**31 - 1) ** 2, 9]
    assert computed(
        "prmt.b32", np.array([0x33221100]), np.array([0x77665584]), np.array([0xC704])
    ).tolist() == [0xFF770084]
    assert computed("bfi.b32", np.array([0xF]), np.array([0]), np.array([30]), np.array([4])).tolist() == [
        0xC0000000
    ]
    opcode, table = ("lop3", "b32"), 0b11101010  # (a & b) | c
    sources = {"a": 0b1100, "b": 0b1010, "c": 0b0001}
    found = OPERATIONS["lop3"](opcode, [*sources, str(table)], lambda n, _: np.array([sources[n]], np.uint32))
    assert found.tolist() == [0b1001]


def test_roundings():
    whole = np.array([16777219, -16777219, 16777216, 5], np.int32)
    assert computed("cvt.rz.f32.s32", whole).view(np.uint32).tolist()[:2] == [0x4B800001, 0xCB800001]
    assert computed("cvt.rn.f32.s32", whole).tolist() == [16777220, -16777220, 16777216, 5]
    wide = np.array([1 + 2.0**-24, 1 - 2.0**-30, -1 - 2.0**-23.5, 1e300, 0.5])
    largest = float(np.finfo(np.float32).max)
    assert computed("cvt.rz.f32.f64", wide).tolist() == [1, 1 - 2.0**-24, -1, largest, 0.5]


def test_floats():
    halves = np.array([1 + 2**-11, 65520, -1e-8], np.float32), np.array([2.0, -0.0, np.inf], np.float32)
    words = computed("cvt.rn.f16x2.f32", *halves)  # the first one is the upper half
    assert (words >> 16).tolist() == [0x3C00, 0x7C00, 0x8000]
    assert (words & 0xFFFF).tolist() == [0x4000, 0x8000, 0x7C00]
    small = np.array([0x7E01, 0xFF80], np.uint16)  # 448 and 2^-9, NaN and -0
    pair = computed("cvt.rn.f16x2.e4m3x2", small).view(np.float16).reshape(2, 2)
    assert pair[0].tolist() == [2.0**-9, 448]
    assert np.signbit(pair[1, 0])
    assert np.isnan(pair[1, 1])
    nan, one = np.array([np.nan, 2], np.float32), np.array([1, 1], np.float32)
    assert computed("max.f32", nan, one).tolist() == [1, 2]
    zeros = np.array([0, -0.0, 0, -0.0], np.float32), np.array([-0.0, 0, 0, -0.0], np.float32)
    assert np.signbit(computed("max.f32", *zeros)).tolist() == [False, False, False, True]
    assert np.signbit(computed("min.f32", *zeros)).tolist() == [True, True, False, True]
    assert computed("setp.gtu.f32", nan, one).tolist() == [True, True]
    assert computed("setp.gt.f32", nan, one).tolist() == [False, True]
    assert computed("setp.num.f32", nan, one).tolist() == [False, True]
    assert computed("cvt.sat.f32.f32", np.array([np.nan, -1, 0.5, 2], np.float32)).tolist() == [0, 0, 0.5, 1]
    assert computed("cvt.rni.s32.f32", np.array([2.5, -3.5, 3e9], np.float32)).tolist() == [2, -4, 2**31 - 1]
    assert computed("cvt.rzi.u32.f32", nan).tolist() == [0, 2]
    assert computed("cvt.rzi.u64.f32", nan).tolist() == [2**63, 2]
    assert computed("cvt.rzi.s32.f64", np.float64(nan)).tolist() == [-(2**31), 2]
    assert computed("ex2.approx.ftz.f32", np.array([-127, 3], np.float32)).tolist() == [0, 8]
    pairs = np.array([[3, 65504], [0.1, -1]], np.float16).view(np.uint32).ravel()
    product = computed("mul.rn.f16x2", pairs, pairs).view(np.float16).reshape(2, 2)
    assert product.tolist() == [[9, np.inf], [float(np.float16(0.1) * np.float16(0.1)), 1]]
    parts = ([1024 + 240, 1], [0.0625, 1 + 2**-10], [-72, 2**-11 + 2**-22])
    parts = (np.array(each, np.float16).view(np.uint32) for each in parts)
    assert computed("fma.rn.f16x2", *parts).view(np.float16).tolist() == [7, 1 + 2**-9]
    assert computed("copysign.f32", -one, nan[1:].repeat(2)).tolist() == [-2, -2]
