"""The machine that runs PTX finds what it claims to find. That it computes rightly, kernels on it show."""

import numpy as np
import pytest
from ptx_machine import Machine, Program
from ptx_memory import Fault

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


EXCHANGE = """
    st.shared.u32 [%rd6], %r1;
    {wait}
    xor.b32 %r2, %r1, {other};
    mul.wide.u32 %rd7, %r2, 4;
    add.s64 %rd8, %rd5, %rd7;
    ld.shared.u32 %r3, [%rd8];
    st.global.u32 [%rd4], %r3;
"""


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


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name):
    body, threads, text = FAULTS[name]
    with pytest.raises(Fault, match=text):
        run(body, words(64 if threads == 64 else 32), threads)
