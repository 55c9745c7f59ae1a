"""A machine for PTX: it runs the code that a GPU would get, on numpy arrays, a value a thread.

Threads of a block go on together as long as they agree where; those that are behind go first, so that they
meet again. Beyond results the machine finds what a GPU would not tell: accesses out of bounds or askew,
shared memory that is read before it is written, or that threads use without waiting for each other, copies
that nobody waited for, global memory that is read as invariant and written, stores whose order matters, warps
that are not together where they must be. Semantics are those of the PTX ISA.
"""

import re
from dataclasses import dataclass

import numpy as np
import ptx_warps
from ptx_forms import known
from ptx_memory import WARP, Fault, Log, Memory, Shared, every_byte
from ptx_operations import Type, compute, raw

SPECIAL = {
    f"%{name}.{axis}": (name, i)
    for name in ("tid", "ntid", "ctaid", "nctaid")
    for i, axis in enumerate("xyz")
}
NEVER = 2**62


# The most that a launch may have: threads of a block, along each axis; blocks; bytes of shared memory, if no
# launch asks for more, and on a device of compute capability 9.0.
THREADS, AXES = 1024, (1024, 1024, 64)
BLOCKS, SHARED, ALL_SHARED = (2**31 - 1, 2**16 - 1, 2**16 - 1), 48 << 10, 227 << 10


# Programs


@dataclass(frozen=True, slots=True)
class Instruction:
    text: str
    guard: str  # a predicate, or nothing
    negated: bool
    opcode: tuple[str, ...]
    operands: tuple  # of strings, and of tuples of strings


class Program:
    """Holds the entry of a PTX module."""

    def __init__(self, text):
        text = re.sub(r"//[^\n]*", "", text)
        head, body = re.search(r"\.entry\s[^(]*\(([^)]*)\)(.*)", text, re.S).groups()
        self.parameters = re.findall(r"\.param\s+\.(\w+)\s+(\w+)", head)
        self.shared, self.size = {}, 0
        for align, name, size in re.findall(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\]", text):
            self.size += -self.size % int(align)
            self.shared[name] = self.size
            self.size += int(size)
        for align, name in re.findall(r"\.extern\s+\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[\]", text):
            self.shared[name] = self.size + -self.size % int(align)  # where what a launch gives begins
        self.labels, self.code = {}, []
        for line in re.split(r"[;\n]", body[body.index("{") + 1 : body.rindex("}")]):
            line = line.strip().lstrip("{} \t")
            label = re.match(r"(\$?\w+):$", line)
            if label:
                self.labels[label[1]] = len(self.code)
            elif line and not line.startswith("."):
                self.code.append(instruction(line))
        self.code.append(instruction("ret"))


def instruction(line):
    guard, opcode, rest = re.fullmatch(r"(?:@(!?%\w+)\s+)?(\S+)\s*(.*)", line).groups()
    if not known(opcode, rest):
        raise Fault(f"not known: {line}")
    found = re.findall(r"\{([^}]*)\}|\[([^\]]*)\]|([^,{}\[\]|\s]+)", rest)
    operands = tuple(
        tuple(word.strip() for word in group.split(",")) if group else (place or single).strip()
        for group, place, single in found
    )
    guard = guard or ""
    return Instruction(line, guard.lstrip("!"), guard.startswith("!"), tuple(opcode.split(".")), operands)


# Launches


class Machine:
    """Runs PTX as a device whose memory is the host's.

    The warps of a block go on together, or, in an `order` (1, -1), each goes on alone as far as it may, from
    the first one or the last.
    """

    def __init__(self, order=0):
        self.memory, self.order = Memory(), order
        self.elements = {}

    def launch(self, program, blocks, threads, arguments, shared=0):
        """Run the entry of a program; arguments are numbers, one for each parameter.

        Blocks have so many bytes of `shared` memory beside what the program has.
        """
        if len(arguments) != len(program.parameters):
            raise Fault(f"{len(program.parameters)} parameters, {len(arguments)} arguments")
        blocks, threads = ((*size, 1, 1)[:3] for size in (blocks, threads))
        limits = zip((*blocks, *threads), (*BLOCKS, *AXES), strict=True)
        if not all(0 < size <= most for size, most in limits) or np.prod(threads) > THREADS:
            raise Fault(f"a launch of {blocks} blocks of {threads} threads")
        begin = max(program.shared.values(), default=0)
        size = max(program.size, begin + shared) if shared else program.size
        if program.size > SHARED or size > ALL_SHARED:
            raise Fault(f"{size} bytes of shared memory")
        parameters = {
            name: str(Type(kind).bits(argument))
            for (kind, name), argument in zip(program.parameters, arguments, strict=True)
        }
        log = Log()
        for index in np.ndindex(*blocks[::-1]):
            Block(self, program, blocks, threads, index[::-1], parameters, log, size).run()
        log.check()

    def array(self, kind):
        if kind.size not in self.elements:
            self.elements[kind.size] = Memory.elements(kind)
        return self.elements[kind.size]


class Block:
    """Runs the threads of a block."""

    def __init__(self, machine, program, blocks, threads, index, parameters, log, size):
        self.machine, self.program, self.parameters, self.log = machine, program, parameters, log
        self.count = int(np.prod(threads))
        self.lanes = self.count + -self.count % WARP
        thread = np.arange(self.lanes)
        self.thread = thread
        self.index, self.phase = int(np.ravel_multi_index(index, blocks)), 0
        x, y, _ = threads
        position = thread % x, thread // x % y, thread // (x * y)
        values = {"tid": position, "ntid": threads, "ctaid": index, "nctaid": blocks}
        self.special = {
            text: np.broadcast_to(np.asarray(values[name][axis], np.uint32), self.lanes)
            for text, (name, axis) in SPECIAL.items()
        }
        self.special["%laneid"] = (thread % WARP).astype(np.uint32)
        self.registers, self.known = {}, {}  # by name: bits, and which threads have written them
        self.active = thread < 0
        self.shared = Shared(size)
        self.copies, self.groups = [], np.zeros(self.lanes, np.int64)
        self.live = thread < self.count
        warps = thread // WARP == np.arange(self.lanes // WARP)[:, None]
        parts = self.live & warps if machine.order else [self.live]
        self.parts = [(part.copy(), {}) for part in parts][:: machine.order or 1]
        self.waiting = {}
        self.resume(0, self.live)

    # Threads

    def run(self):
        while any(ready for _, ready in self.parts):
            for _, ready in self.parts:
                self.ready = ready
                while ready:
                    pc = min(ready)
                    self.follow(pc, ready.pop(pc))
        if self.waiting:
            raise Fault(f"threads wait at different barriers: {sorted(self.waiting)}")
        if self.copies:
            raise Fault("copies that nobody waited for")

    def resume(self, pc, threads):
        for part, ready in self.parts:
            here = threads & part
            if here.any():
                ready[pc] = ready[pc] | here if pc in ready else here

    def follow(self, pc, active):
        """Let threads go on until they part, wait or end."""
        code, labels = self.program.code, self.program.labels
        behind = min(self.ready, default=NEVER)
        while True:
            if pc == behind:
                active = active | self.ready.pop(pc)
                behind = min(self.ready, default=NEVER)
            at = code[pc]
            chosen = active
            if at.guard:
                self.active = active
                chosen = active & (self.value(at.guard, Type("pred")) ^ at.negated)
            name = at.opcode[0]
            if name == "bra":
                target, rest = labels[at.operands[0]], active & ~chosen
                self.resume(target, chosen)
                self.resume(pc + 1, rest)
                return
            if name in ("ret", "exit"):
                self.live &= ~chosen
                self.resume(pc + 1, active & ~chosen)
                self.open_barriers()
                return
            if name == "bar" and "warp" not in at.opcode:
                if (chosen != active).any():
                    raise Fault(f"a barrier for some: {at.text}")
                there = active.reshape(-1, WARP)
                if (there.any(axis=1)[:, None] & (there != self.live.reshape(-1, WARP))).any():
                    raise Fault(f"a barrier for part of a warp: {at.text}")
                waiting = self.waiting.get(pc)
                self.waiting[pc] = active if waiting is None else waiting | active
                self.open_barriers()
                return
            if chosen.any():
                self.execute(at, chosen)
            pc += 1

    def open_barriers(self):
        for pc, threads in list(self.waiting.items()):
            if (threads == self.live).all():
                del self.waiting[pc]
                at = self.program.code[pc]
                if "red" in at.opcode:
                    self.active = threads
                    votes = self.value(at.operands[2], Type("pred"))[threads]
                    reduce = {"or": np.any, "and": np.all}[at.opcode[2]]
                    self.assign(at.operands[0], np.full(self.lanes, reduce(votes)), threads)
                self.shared.forget()
                self.phase += 1
                self.resume(pc + 1, threads)

    # Operands

    def value(self, name, kind):
        """Return the values of an operand, one for each thread."""
        if name in self.special:
            raw = self.special[name]
        elif name.startswith("%"):
            if name not in self.registers or (self.active & ~self.known[name]).any():
                raise Fault(f"{name} is read before it is written")
            raw = self.registers[name]
        elif name in self.program.shared:
            raw = np.full(self.lanes, self.program.shared[name], np.uint64)
        else:
            return kind.constant(name, self.lanes)
        return kind.of(raw)

    def assign(self, name, values, threads):
        if name == "_":
            return
        bits, known = raw(values, name), threads
        if not threads.all():
            old = self.registers.get(name)
            bits = np.where(threads, bits, np.zeros_like(bits) if old is None else old)
            known = threads | self.known[name] if name in self.known else threads.copy()
        self.registers[name], self.known[name] = bits, known

    def place(self, operand):
        """Return the address of an operand for each thread."""
        name, _, offset = operand.partition("+")
        offset = int(offset or 0)
        if name.startswith("%"):
            return (
                self.value(name, Type("b64" if name.startswith("%rd") else "b32")).astype(np.int64) + offset
            )
        if name in self.program.shared:
            return np.full(self.lanes, self.program.shared[name] + offset, np.int64)
        return np.full(self.lanes, int(name, 0) + offset, np.int64)

    # Instructions

    def execute(self, at, threads):
        name, self.active = at.opcode[0], threads
        if name in self.INSTRUCTIONS:
            self.INSTRUCTIONS[name](self, at, threads)
            return
        target, *sources = at.operands
        self.assign(target, compute(at.opcode, sources, self.value), threads)

    def mov(self, at, threads):
        target, source = at.operands
        kind = Type(at.opcode[-1])
        if not isinstance(target, tuple):
            self.assign(target, compute(at.opcode, [source], self.value), threads)
            return
        word, part = self.value(source, kind), Type(f"b{8 * kind.size // len(target)}")
        for i, name in enumerate(target):  # the first part is the lowest one
            self.assign(name, part.of(word >> np.array(8 * part.size * i, kind.dtype)), threads)

    def ld(self, at, threads):
        space, kind = at.opcode[1], Type(at.opcode[-1])
        targets = at.operands[0] if isinstance(at.operands[0], tuple) else (at.operands[0],)
        if space == "param":
            value = self.parameters[at.operands[1]]
            self.assign(targets[0], kind.constant(value, self.lanes), threads)
            return
        places = self.place(at.operands[1])[threads]
        size = kind.size * len(targets)
        if space == "shared":
            self.shared.use(places, size, self.thread[threads], False, at.text)
        else:
            self.machine.memory.check(places, size, at.text)
            if "nc" in at.opcode:
                self.log.invariant.append(np.unique(every_byte(places, size)))
            else:
                self.log.read.append(self.logged(places, size, threads))
        for i, target in enumerate(targets):
            found = np.zeros(self.lanes, f"u{kind.size}")
            if space == "shared":
                parts = self.shared.bytes[(places + i * kind.size)[:, None] + np.arange(kind.size)]
                found[threads] = parts.view(f"u{kind.size}")[:, 0]
            else:
                elements, first = self.machine.array(kind)
                found[threads] = elements[(places + i * kind.size - first) // kind.size]
            self.assign(target, found.view(kind.dtype), threads)

    def st(self, at, threads):
        space, kind = at.opcode[1], Type(at.opcode[-1])
        sources = at.operands[1] if isinstance(at.operands[1], tuple) else (at.operands[1],)
        places = self.place(at.operands[0])[threads]
        values = [self.value(source, kind).view(f"u{kind.size}")[threads] for source in sources]
        self.store(space, places, kind, values, threads, at.text)

    def store(self, space, places, kind, values, threads, text):
        size = kind.size * len(values)
        contents = np.stack(values, axis=1).view(np.uint8)
        if space == "shared":
            self.shared.bytes[self.shared.use(places, size, self.thread[threads], True, text)] = (
                contents.ravel()
            )
            return
        self.machine.memory.check(places, size, text)
        used = self.logged(places, size, threads, contents.ravel())
        self.log.written.append(used)
        elements, first = self.machine.array(Type("u8"))
        elements[used[0] - first] = contents.ravel()

    def logged(self, places, size, threads, values=0):
        at = every_byte(places, size)
        used = self.index, self.phase, np.repeat(self.thread[threads], size), values
        return np.stack([at, *(np.broadcast_to(row, at.shape) for row in used)])

    def atom(self, at, threads):
        kind, operation = Type(at.opcode[-1]), at.opcode[2]
        target, place, operand = at.operands
        places, values = self.place(place), self.value(operand, kind)
        self.machine.memory.check(places[threads], kind.size, at.text)
        elements, first = self.machine.array(kind)
        self.log.atomic.append(self.logged(places[threads], kind.size, threads))
        found = np.zeros(self.lanes, kind.dtype)
        for i in np.flatnonzero(threads):
            here = (places[i] - first) // kind.size
            old = elements[here : here + 1].view(kind.dtype)
            found[i] = old[0]
            old[0] = {"add": np.add, "max": np.maximum, "min": np.minimum}[operation](old[0], values[i])
        self.assign(target, found, threads)

    INSTRUCTIONS = {"mov": mov, "ld": ld, "st": st, "atom": atom} | ptx_warps.INSTRUCTIONS
