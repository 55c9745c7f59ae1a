"""Model a decode step on a machine of 64 cores: python -m benchmarks.many_cores prints its figures.

Only the speed of one core is measured. Threads take the work items of `kvkit/cpu/attention/scheduler.py` and
read their bytes; busy threads share the bandwidth of the machine. The thread that ends the last split of a
head merges its splits.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEADS, DIM, ROWS = 8, 128, 4  # key heads, elements of a head, query rows of a key head
TOKEN = 2 * DIM * 2  # bytes of a token's float16 key and value of one head
LEAST_SPLIT, SPLITS = 512, 64  # as in kvkit/cpu/attention/prepare.py
SPLIT_STATE = 4 * ROWS * (DIM + 2)  # bytes of a split's output, maximum and sum
THREADS = 1, 2, 4, 8, 16, 24, 32, 48, 64
MOST_SPLITS = 8, 16, 32, 64, 128, 256, 512, 1024
RAGGED = tuple(1024 * 2**i for i in range(8))  # 8 sequences of 1,024 to 131,072 tokens
STEPS = {
    "1 x 1,024 tokens": (2**10,),
    "1 x 8,192": (2**13,),
    "1 x 65,536": (2**16,),
    "64 x 4,096": 64 * (2**12,),
    "8 of 1,024 to 131,072": RAGGED,
}


@dataclass(frozen=True)
class Machine:
    """The speeds of a core and of memory in bytes a second, and the seconds of other work."""

    core: float = 20e9
    memory: float = 370e9  # 12 channels of DDR5-4800 at 80 %
    call: float = 12e-6  # Python, and the first thread
    wake: float = 0.1e-6  # each other thread
    item: float = 1e-6  # to begin a work item
    merge: float = 5e9  # bytes a second of splits that other cores wrote


def work_items(lengths: Sequence[int], most_splits: int = SPLITS) -> list[tuple[int, int, int]]:
    """Return (tile group, splits of the group, bytes) of each work item of a step."""
    even = -(-HEADS * sum(lengths) // most_splits)
    split = max(LEAST_SPLIT, -(-even // 64) * 64)
    items = []
    for group, length in enumerate(length for length in lengths for _ in range(HEADS)):
        splits = -(-length // split)
        items += [(group, splits, min(split, length - i * split) * TOKEN) for i in range(splits)]
    return items


def seconds(machine: Machine, threads: int, items: Sequence[tuple[int, int, int]]) -> float:
    """Return the time of a step: each free thread takes the next item, busy ones share the memory."""
    left = {group: splits for group, splits, _ in items}
    waiting, now = list(reversed(items)), machine.call + machine.wake * (threads - 1)
    pauses: list[tuple[float, tuple[int, int, int] | None]] = [(now, None)] * threads  # (until, item to read)
    reading: list[list] = []  # [bytes left, item]
    while pauses or reading:
        rate = min(machine.core, machine.memory / max(1, len(reading)))
        soonest = min((each[0] for each in pauses), default=float("inf"))
        ends = now + min((each[0] for each in reading), default=float("inf")) / rate
        then = min(soonest, ends)
        for each in reading:
            each[0] -= (then - now) * rate
        now = then
        if soonest <= ends:
            pauses.sort(key=lambda each: each[0])
            _, item = pauses.pop(0)
            if item is not None:
                reading.append([item[2], item])
            elif waiting:
                pauses.append((now + machine.item, waiting.pop()))
            continue
        done = min(reading, key=lambda each: each[0])
        reading.remove(done)
        group, splits, _ = done[1]
        left[group] -= 1
        merged = splits * SPLIT_STATE / machine.merge if splits > 1 and not left[group] else 0
        pauses.append((now + merged, None))
    return now


def speeds(machine: Machine) -> dict[str, list[float]]:
    """Return the bytes a second of each step, by the number of threads."""
    found = {}
    for name, lengths in STEPS.items():
        items = work_items(lengths)
        size = sum(item[2] for item in items)
        found[name] = [size / seconds(machine, threads, items) for threads in THREADS]
    return found


def split_times(machine: Machine) -> dict[str, list[float]]:
    """Return the seconds of each step on all threads, by the most splits that a call may have."""
    return {
        name: [seconds(machine, THREADS[-1], work_items(lengths, most)) for most in MOST_SPLITS]
        for name, lengths in STEPS.items()
    }


def measured(figures: Path) -> Machine:
    """Return the machine whose cores read at the speed that one thread was measured to have."""
    results = json.loads(figures.read_text())["results"]
    one = max((each for each in results if ", 1 threads" in each["case"]), key=lambda each: each["bytes"])
    return Machine(core=one["bytes"] / one["seconds"])


if __name__ == "__main__":
    machine = measured(Path(__file__).with_name("results") / "growth.json")
    for name, line in speeds(machine).items():
        print(f"{name:>22}, GB/s by threads:", *(f"{speed / 1e9:.0f}" for speed in line))
    for name, line in split_times(machine).items():
        print(f"{name:>22}, us by splits:", *(f"{each * 1e6:.0f}" for each in line))
