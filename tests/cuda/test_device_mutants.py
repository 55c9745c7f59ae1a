"""Each wait of the kernels that share memory is needed, and the machine for PTX finds it when it is gone.

A wait is a barrier of a block or a warp, or one for copies. Without it a launch is at fault, or leaves other
results, whether warps go on together or each as far as it may.
"""

import copy

import attention_scenes
import cuda_machine
import numpy as np
import pytest
from attention_scenes import BF16, FP32, INT8
from device_arrays import Array
from ptx_machine import Machine, instruction
from ptx_memory import Fault

import kvkit_cuda
from kvkit.tools.vectors.calls import LAYER
from kvkit_cuda.attention import decode, plain, prefill
from kvkit_cuda.calls import scan, tables
from kvkit_cuda.device_runtime import host

SIZES = {"dim": 32, "heads": 2, "kv_heads": 1}
CASES = {  # the kernel; its call
    "decode": (decode, SIZES | {"formats": BF16, "lengths": [(420, 1)]}),
    "decode of codes": (decode, SIZES | {"formats": INT8, "lengths": [(420, 1)]}),
    "prefill": (prefill, SIZES | {"formats": BF16, "lengths": [(70, 30)]}),
    "prefill of codes": (prefill, SIZES | {"formats": INT8, "lengths": [(70, 30)]}),
    "plain": (plain, SIZES | {"formats": FP32, "lengths": [(100, 1)], "dim": 64, "softcap": 9.0}),
}
# A wait for copies that these calls do not need: the last one is for an empty part of a context, whose
# queries are on their way still.
SPARED = {"prefill": 1, "prefill of codes": 1}
HUGE = 3e38  # so that sums overflow, and are added up once more, with care


def waits(program, votes):
    """Yield (place, replacement) of all waits; with `votes` also of those where threads vote."""
    for place, at in enumerate(program.code):
        if at.opcode[0] == "bar" and "red" in at.opcode:
            if votes:
                yield place, instruction(f"mov.pred {at.operands[0]}, {at.operands[2]}")  # a vote of one
        elif at.opcode[0] == "bar" or at.opcode[:3] in (
            ("cp", "async", "wait_group"),
            ("cp", "async", "wait_all"),
        ):
            yield place, instruction("mov.b32 %r999999, 0")


def launched(module, call, monkeypatch):
    """Return the launch of a module's kernel in a call: its program, its arguments, and its memory."""
    found, seen = [], host.launch
    wanted = module.__name__

    def launch(kernel, blocks, threads, stream, arguments, shared=0):
        if kernel.function.__module__ == wanted:
            found.append((kernel.program, blocks, threads, arguments, shared))
        seen(kernel, blocks, threads, stream, arguments, shared)

    monkeypatch.setattr(host, "launch", launch)
    call()
    (one,) = [each for each in found if any(waits(each[0], True))]
    return one


def outcome(program, blocks, threads, arguments, shared, memory, order, outputs):
    """Run a launch; return its outputs, None if it has a fault."""
    for array in outputs:
        array.view(np.uint8).fill(0xEE)
    machine = Machine(order)
    machine.memory = memory
    threads = threads if isinstance(threads, tuple) else (threads,)
    try:
        machine.launch(program, blocks, threads, host.words(arguments), shared)
    except Fault:
        return None
    return [array.tobytes() for array in outputs]


def survivors(launch, memory, outputs, votes):
    """Return the waits whose removal changes nothing."""
    program, *form = launch
    right = {order: outcome(program, *form, memory, order, outputs) for order in (0, 1, -1)}
    assert None not in right.values()
    lost = []
    for place, rest in waits(program, votes):
        mutant = copy.copy(program)
        mutant.code = [*program.code[:place], rest, *program.code[place + 1 :]]
        if all(outcome(mutant, *form, memory, order, outputs) == right[order] for order in right):
            lost.append(f"{place}: {program.code[place].text}")
    return lost


@pytest.mark.parametrize("name", CASES)
def test_attention(name, rng, monkeypatch):
    monkeypatch.setattr(tables, "LEAST_SPLIT", 10**6)  # so that a warp uses its tiles again
    module, options = CASES[name]
    call = attention_scenes.dynamic_cache(rng, layout=0, mode=0, **options)
    votes = call["scale"] is None  # for else no sum overflows
    if votes:
        call["current_value"][..., 0] = call["cache"][:, LAYER, 1, :, 0] = HUGE
    shape = call["query"].shape
    out, lse = Array(np.empty(shape, call["query"].dtype)), Array(np.empty(shape[:2], np.float32))
    given = {key: Array(call[key]) for key in ("query", "current_key", "current_value", "cache")}
    if call["scale"] is not None:
        given["scale"] = Array(call["scale"])
    launch = launched(module, lambda: call.but(**given).run(return_lse=True, out=(out, lse)), monkeypatch)
    lost = survivors(launch, cuda_machine.machine.memory, (out.array, lse.array), votes)
    assert len(lost) == SPARED.get(name, 0), lost
    assert all("cp.async.wait_all" in text for text in lost)


def test_scan(rng, monkeypatch):
    """Page tables of which several warps look at the entries, and sort the runs that are stored."""
    batch, pages, page_size, new = 8, 16, 4, 24
    table = Array(rng.permutation(batch * pages).reshape(batch, pages) * page_size)
    seqstarts, kvstarts = (np.arange(batch + 1) * length for length in (new, pages * page_size))
    start_pos, modes = np.full(batch, pages * page_size - new), {"cache_mode": 1, "page_size": page_size}
    launch = launched(
        scan,
        lambda: kvkit_cuda.dynamic_batching.plan(seqstarts, kvstarts, table, start_pos, **modes),
        monkeypatch,
    )
    assert sum(1 for _ in waits(launch[0], True)) == 3
    assert not survivors(launch, cuda_machine.machine.memory, [launch[3][-1].array], True)
