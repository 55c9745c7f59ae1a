"""Machine code of a GPU: the fewest instructions of a way round a kernel's main loop."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

# What each way round does: products of matrices, copies of the next tile, or its codes, widened.
WORK = "HMMA", "LDGSTS", "STS"


def disassembler():
    """Return the path of nvdisasm, from the package nvidia-cuda-nvdisasm or a toolkit."""
    packages = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in packages.submodule_search_locations] if packages else []
    found = [path for folder in folders for path in folder.glob("*/bin/nvdisasm")]
    return str(found[0]) if found else shutil.which("nvdisasm")


def instructions(cubin):
    """Return the instructions of a kernel, and the places of its labels."""
    done = subprocess.run([disassembler(), "-c", cubin], capture_output=True, text=True, check=True)
    code, labels = [], {}
    for line in done.stdout.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(found[1].strip())
    return code, labels


def main_loop(cubin):
    """Return the instructions of the smallest loop with the most products of matrices.

    Of the ways round that do all the work the shortest one counts: it leaves out masks, sums that shrink and
    what is done once more with care. Loops inside are gone through once.
    """
    code, labels = instructions(cubin)
    jumps, begin, end = loop_of(code, labels)
    best = {begin: (0, ())}  # by place: less work, the instructions before it
    for place in range(begin, end + 1):
        if place not in best:
            continue
        text, (work, before) = code[place], best[place]
        here = work - any(word in text for word in WORK), (*before, text)
        if place == end:
            return here[1]
        conditional = text.startswith("@") or re.match(r"BRA !?U?P\d", text)
        following = [jumps[place]] if begin < jumps.get(place, -1) <= end and jumps[place] > place else []
        if (place not in jumps and not text.startswith(("EXIT", "RET"))) or conditional:
            following.append(place + 1)
        for each in following:
            best[each] = min(best.get(each, here), here, key=lambda found: (found[0], len(found[1])))
    raise AssertionError("no way round")


def loop_of(code, labels):
    """Return the jumps of a kernel, and the first and last place of the smallest loop with most products."""
    jumps = {}
    for place, text in enumerate(code):
        target = re.search(r"\bBRA\b(?!\.DIV).*`\((\.L_\w+)\)", text)
        if target:
            jumps[place] = labels[target[1]]
    loops = [(target, place) for place, target in jumps.items() if target <= place]
    begin, end = min(loops, key=lambda loop: (-products(code[loop[0] : loop[1] + 1]), loop[1] - loop[0]))
    return jumps, begin, end


def prologue(cubin):
    """Return how many instructions lie before the main loop."""
    return loop_of(*instructions(cubin))[1]


def products(code):
    return sum("HMMA" in text for text in code)
