"""The processor of this machine as the system describes it, which hypervisors leave alone."""

import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

CPUINFO, CACHES = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cache")
FIRST = 16 * 1024  # bytes of CPUINFO that hold the first processor
WINDOWS = re.compile(r"Family (\d+) Model (\d+) Stepping (\d+), (\w+)")  # of PROCESSOR_IDENTIFIER


class Processor(NamedTuple):
    """Describes a processor by its identification; "" and 0 stand for what the system does not tell."""

    vendor: str = ""  # as CPUID names it: GenuineIntel, AuthenticAMD
    family: int = 0
    model: int = 0
    stepping: int = 0
    microcode: str = ""
    name: str = ""  # the processor's own
    caches: str = ""  # sizes, the smallest first: "48K 2048K 307200K"


@functools.cache
def this_processor() -> Processor:
    """Return the processor that runs this process."""
    try:
        with open(CPUINFO, "rb", buffering=0) as stream:  # all of it takes long on machines with many cores
            found = from_cpuinfo(stream.read(FIRST).decode(errors="replace"))
    except OSError:
        found = from_identifier(os.environ.get("PROCESSOR_IDENTIFIER", ""))
    return found._replace(caches=cache_sizes())


def from_cpuinfo(text: str) -> Processor:
    """Return the first processor that a text like Linux's /proc/cpuinfo describes."""
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}

    def number(name: str) -> int:
        return int(facts[name]) if facts.get(name, "").isdecimal() else 0

    vendor = facts.get("vendor_id") or facts.get("CPU implementer", "")
    name = facts.get("model name") or facts.get("CPU part", "")
    family, model, stepping = map(number, ("cpu family", "model", "stepping"))
    return Processor(vendor, family, model, stepping, facts.get("microcode", ""), name)


def from_identifier(text: str) -> Processor:
    """Return the processor that Windows describes in the variable PROCESSOR_IDENTIFIER."""
    found = WINDOWS.search(text)
    if not found:
        return Processor(name=text)
    family, model, stepping = map(int, found.groups()[:3])
    return Processor(found[4], family, model, stepping, name=text)


def cache_sizes() -> str:
    """Return the sizes of the caches that hold data of the first core; "" if they are unknown."""
    sizes = {}
    for folder in CACHES.glob("index*"):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            sizes[level] = size
    return " ".join(sizes[level] for level in sorted(sizes))
