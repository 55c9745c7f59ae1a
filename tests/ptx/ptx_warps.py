"""What the threads of a warp do together, and copies that they begin and wait for later."""

import numpy as np
from ptx_memory import WARP, Fault, every_byte
from ptx_operations import Type


def together(block, threads, members, text):
    """Return the warps of some threads, after a check that they are complete."""
    there = (threads.reshape(-1, WARP) << np.arange(WARP)).sum(axis=1)
    for thread in np.flatnonzero(threads):
        if int(members[thread]) & ~int(there[thread // WARP]):
            raise Fault(f"threads of a warp are not together: {text}")
    return np.flatnonzero(threads.reshape(-1, WARP).any(axis=1))


def whole(block, threads, text):
    return together(block, threads, np.full(block.lanes, 2**WARP - 1), text)


def shfl(block, at, threads):
    *targets, source, lane, clamp, members = at.operands
    word, number = Type("b32"), block.value(lane, Type("u32")).astype(np.int64)
    if (block.value(clamp, word)[threads] != 31).any():
        raise Fault(f"not known: {at.text}")
    together(block, threads, block.value(members, word), at.text)
    here = block.thread % WARP
    other = {"bfly": here ^ number, "idx": number % WARP}[at.opcode[2]]
    other = block.thread - here + other
    if not threads[other[threads]].all():
        raise Fault(f"a thread that takes no part is asked: {at.text}")
    block.assign(targets[0], block.value(source, word)[other], threads)
    for flag in targets[1:]:
        block.assign(flag, np.ones(block.lanes, bool), threads)


def vote(block, at, threads):
    """vote.sync.any.pred"""
    target, flag, members = at.operands
    found = np.zeros(block.lanes, bool)
    flags = block.value(flag, Type("pred")) & threads
    for warp in together(block, threads, block.value(members, Type("b32")), at.text):
        lanes = slice(warp * WARP, (warp + 1) * WARP)
        found[lanes] = flags[lanes].any()
    block.assign(target, found, threads)


def bar(block, at, threads):
    """bar.warp.sync"""
    block.shared.forget_warps(together(block, threads, block.value(at.operands[0], Type("b32")), at.text))


def ldmatrix(block, at, threads):
    warps = whole(block, threads, at.text)
    targets, place = at.operands
    places = block.place(place)
    g, t = block.thread % WARP // 4, block.thread % 4
    # Thread 4g + t gets elements [g, 2t] and [g, 2t + 1] of a matrix, or of its transpose.
    found = np.zeros((len(targets), block.lanes), np.uint32)
    for warp in warps:
        lanes = slice(warp * WARP, (warp + 1) * WARP)
        rows = places[lanes][: 8 * len(targets)]
        read_by = block.thread[lanes][: rows.size]
        used = block.shared.use(rows, 16, read_by, False, at.text)
        matrices = block.shared.bytes[used].view(np.uint16).reshape(len(targets), 8, 8)
        for i, matrix in enumerate(matrices):
            matrix = matrix.T if "trans" in at.opcode else matrix
            low, high = matrix[g[lanes], 2 * t[lanes]], matrix[g[lanes], 2 * t[lanes] + 1]
            found[i, lanes] = low.astype(np.uint32) | high.astype(np.uint32) << 16
    for target, words in zip(targets, found, strict=True):
        block.assign(target, words, threads)


def movmatrix(block, at, threads):
    """Transpose a matrix [8, 8], of which each thread has two neighbouring elements."""
    target, source = at.operands
    words, found = block.value(source, Type("b32")), np.zeros(block.lanes, np.uint32)
    for warp in whole(block, threads, at.text):
        lanes = slice(warp * WARP, (warp + 1) * WARP)
        matrix = np.ascontiguousarray(words[lanes]).view(np.uint16).reshape(8, 8)
        found[lanes] = np.ascontiguousarray(matrix.T).view(np.uint32).ravel()
    block.assign(target, found, threads)


def mma(block, at, threads):
    warps, element = whole(block, threads, at.text), Type(at.opcode[7])
    d, *sources = at.operands
    a, b, c = (
        [block.value(name, Type(kind)) for name in names]
        for names, kind in zip(sources, ("b32", "b32", "f32"), strict=True)
    )
    found = np.zeros((4, block.lanes), np.float32)
    for warp in warps:
        lanes = slice(warp * WARP, (warp + 1) * WARP)
        left, right = np.zeros((16, 16)), np.zeros((16, 8))
        for lane in range(WARP):
            g, t = divmod(lane, 4)
            for i in range(8):
                half = np.atleast_1d(a[i // 2][lanes][lane]).view(element.dtype)[i % 2]
                left[g + (8 if 2 <= i < 4 or i >= 6 else 0), 2 * t + i % 2 + (8 if i >= 4 else 0)] = half
            for i in range(4):
                half = np.atleast_1d(b[i // 2][lanes][lane]).view(element.dtype)[i % 2]
                right[2 * t + i % 2 + (8 if i >= 2 else 0), g] = half
        product = left @ right
        for lane in range(WARP):
            g, t = divmod(lane, 4)
            for i in range(4):
                total = product[g + (8 if i >= 2 else 0), 2 * t + i % 2] + np.float64(c[i][lanes][lane])
                with np.errstate(over="ignore"):
                    found[i, warp * WARP + lane] = total
    for target, numbers in zip(d, found, strict=True):
        block.assign(target, numbers, threads)


# Copies


def cp(block, at, threads):
    word = at.opcode[2]
    if word in ("cg", "ca"):
        target, source, size, *taken = at.operands  # the last one, if it is there, is how much is not zeros
        begin(
            block, block.place(target), block.place(source), int(size),
            block.value(*(taken or [size]), Type("u32")), threads, at,
        )  # fmt: skip
    elif word == "commit_group":
        block.groups[threads] += 1
    else:
        apart = -1 if word == "wait_all" else int(at.operands[0])
        arrive(block, threads, apart, at.text)


def begin(block, targets, sources, size, taken, threads, at):
    """Begin to copy; what is not taken becomes zeros."""
    for count in np.unique(taken[threads]):
        if count not in (0, size):
            raise Fault(f"not known: {at.text}")
        some = threads & (taken == count)
        contents = np.zeros((int(some.sum()), size), np.uint8)
        if count:
            block.machine.memory.check(sources[some], size, at.text)
            places = every_byte(sources[some], size)
            block.log.invariant.append(np.unique(places))
            elements, first = block.machine.array(Type("u8"))
            contents = elements[places - first].reshape(-1, size)
        used = block.shared.use(targets[some], size, block.thread[some], True, at.text)
        block.shared.flying[used] = True
        block.copies += [
            (thread, block.groups[thread], place, content)
            for thread, place, content in zip(np.flatnonzero(some), targets[some], contents, strict=True)
        ]


def arrive(block, threads, apart, text):
    """Finish the copies that threads have begun, but for those of the last `apart` groups."""
    rest = []
    for copy in block.copies:
        thread, group, place, content = copy
        if not threads[thread] or (apart >= 0 and group >= block.groups[thread] - apart):
            rest.append(copy)
            continue
        block.shared.flying[place : place + content.size] = False
        here = np.array([place])
        used = block.shared.use(here, content.size, np.array([thread]), True, text)
        block.shared.bytes[used] = content
    block.copies = rest


INSTRUCTIONS = {
    "movmatrix": movmatrix, "shfl": shfl, "vote": vote, "bar": bar, "ldmatrix": ldmatrix, "mma": mma, "cp": cp
}  # fmt: skip
