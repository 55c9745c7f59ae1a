"""Break kvkit on purpose, a line at a time, and see whether the tests of that line's room notice.

    python tests/mutants.py                       every room, some minutes a mutant
    python tests/mutants.py --room layouts -n 5   five of a room
    python tests/mutants.py --only runs.py:77     one line, by its room's tests

A rule chooses the mutants, so that they follow the code: in each room the lines with a comparison, a sum, an
`and` or a `not` are put in an order that depends on their text alone, at most as many of a file as of any
other, and the first ones are changed. Each is tried in a copy of the checkout by the tests of its room, up to
the first failure. What waits, or breaks the import, is caught too. Those that change nothing one can see are
listed with the reason, and not counted. Waits of kernels on devices have mutants of their own
(cuda/test_device_mutants.py).
"""

import argparse
import ast
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HOUSE = Path(__file__).parents[1]
# By room: the files that are broken, how many mutants, and the tests that have to notice, the quickest first;
# what begins with -- is an option of pytest.
ROOMS = {
    "checks": (
        "kvkit/checks",
        28,
        "operators/test_checks.py operators/test_refusals.py operators/test_wrong_calls.py "
        "operators/test_key_value_cache_errors.py "
        "ascend operators/test_paged_append.py operators/test_plan.py operators/test_steps.py "
        "operators/test_merge.py operators/test_paged_attention.py tools/test_validate.py "
        "operators/test_messages.py operators/test_random_calls.py",
    ),
    "layouts": (
        "kvkit/layouts",
        22,
        "layouts tools/test_draw.py tools/test_examples.py operators/test_messages.py "
        "operators/test_paged_attention.py tools/test_check.py tools/test_diff.py cli/test_verbs.py "
        "cli/test_cache_verbs.py cli/test_cli.py",
    ),
    "formats": ("kvkit/formats", 20, "formats "
                "tools/test_recoding.py tools/test_reading.py tools/test_study.py"),
    "caches": (
        "kvkit/cache",
        32,
        "cache/test_cache_refusals.py cache/test_caches.py cache/test_cache_properties.py "
        "cache/test_blocks*.py cache/test_cache_of_layers.py cache/test_cache_files*.py cache "
        "operators/test_cache_attention.py",
    ),
    "files": ("kvkit/files", 14, "files cache/test_cache_files.py cache/test_cache_files_refused.py "
              "cache/test_offload.py cli/test_npz.py cli/test_verbs.py "
              "cli/test_cache_verbs.py cli/test_cli.py tools/test_size.py"),
    "kernels": (
        "kvkit/formulas kvkit/cpu",
        26,
        "kernels/test_numeric.py kernels/test_index.py operators/test_pmx_vectors.py "
        "ascend/test_ascend_vectors.py kernels operators/test_attention_vectors.py "
        "operators/test_random_calls.py operators/test_positions.py ascend "
        "operators/test_merge.py operators/test_attention_numbers.py "
        "formats/test_stored_formats.py cache/test_quantized_cache_codes.py "
        "cache/test_quantized_cache_attention.py layouts/test_compare.py layouts/test_conversion.py",
    ),
    "devices": (
        "kvkit_cuda",
        16,
        "--backend=simulator cuda/test_device_cache.py cuda/test_device_positions.py "
        "cuda/test_device_scan.py cuda/test_device_paged.py cuda/test_device_tensor_cores.py "
        "cuda/test_device_decode.py "
        "cuda/test_device_prefill.py cuda/test_device_attention.py cuda/test_device_arrays.py "
        "cuda/test_device_ascend.py cuda/test_device_random.py formats/test_stored_formats.py",
    ),
}  # fmt: skip
# Which instructions are used changes no result; a simulated device has neither driver nor types.
LEFT_OUT = ("simd", "machine.py", "prefetching.py", "__init__.py", "device_runtime", "print_stubs.py")
# Of file and changed line: why nothing that one can see is changed.
EQUAL = {
    ("kvkit/cpu/copy/minifloats.py", "vector = group % LANES == 0 and plain"):
        "the plain form runs, whose bytes are the vector form's",
    ("kvkit_cuda/attention/fragments.py", "if top > np.float32(0) or state.m[r] == numeric.MINUS_INF:"):
        "weights, their sums and m change by the same power of 2",
}  # fmt: skip
MARKS = "not slow and not model and not transformers and not peers and not site and not perf"
OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is",
         "+": "-", "-": "+", "//": "%", "%": "//", "and": "or", "or": "and", "not ": ""}  # fmt: skip


def spans(node, line):
    """Yield the columns of operators that a node has in its line."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node.left.end_col_offset, node.comparators[0].col_offset
    elif isinstance(node, ast.BinOp) and '"' not in line:
        yield node.left.end_col_offset, node.right.col_offset
    elif isinstance(node, ast.BoolOp):
        yield node.values[0].end_col_offset, node.values[1].col_offset
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.col_offset, node.operand.col_offset


def changed_lines(path):
    """Yield (line number, line, changed line) of every change that the rule knows in a file."""
    lines = path.read_text().splitlines()
    seen = Counter(line.strip() for line in lines)
    for node in ast.walk(ast.parse("\n".join(lines))):
        number = getattr(node, "lineno", 0)
        if not number or number != node.end_lineno or not lines[number - 1].isascii():
            continue
        line = lines[number - 1]
        if seen[line.strip()] > 1 or "raise" in line or "TYPE_CHECKING" in line:
            continue
        for begin, end in spans(node, line):
            other = OTHER.get(line[begin:end] if line[begin:end] == "not " else line[begin:end].strip())
            if other is not None:
                middle = f" {other} " if other and line[begin:end] != "not " else other
                yield number, line, line[:begin] + middle + line[end:]


def choose(room):
    """Return the mutants of a room: (path below the house, line number, line, changed line)."""
    tops, count, _ = ROOMS[room]
    found = []
    for top in tops.split():
        for path in sorted((HOUSE / top).rglob("*.py")):
            if not set(path.parts) & set(LEFT_OUT):
                each = sorted(set(changed_lines(path)), key=lambda m: digest(m[1], m[2]))
                found += [(i, digest(m[1], m[2]), path.relative_to(HOUSE), *m) for i, m in enumerate(each)]
    mutants = [each[2:] for each in sorted(found, key=lambda each: each[:2])]
    equal = [m for m in mutants if reason(m)]
    return equal + [m for m in mutants if not reason(m)][:count]


def reason(mutant):
    """Return why a mutant is equal in effect, or ""."""
    path, _, _, changed = mutant
    return EQUAL.get((path.as_posix(), changed.strip()), "")


def digest(*lines):
    return hashlib.sha256("\n".join(line.strip() for line in lines).encode()).hexdigest()


def tests_of(room):
    """Return the test files and folders of a room that exist."""
    names = ROOMS[room][2].split()
    found = [sorted((HOUSE / "tests").glob(name)) for name in names if not name.startswith("--")]
    options = [name for name in names if name.startswith("--")]
    return options + [str(path.relative_to(HOUSE)) for paths in found for path in paths]


@contextlib.contextmanager
def broken(house, mutant):
    """Break a line of a copy of the house for a while."""
    path, number, line, changed = mutant
    before = (house / path).read_text()
    lines = before.splitlines(keepends=True)
    assert lines[number - 1].rstrip("\n") == line
    lines[number - 1] = changed + "\n"
    (house / path).write_text("".join(lines))
    try:
        yield
    finally:
        (house / path).write_text(before)


def copy_house(house):
    """Copy the checkout."""
    shutil.copytree(HOUSE, house, ignore=shutil.ignore_patterns(".git", ".venv", "_build", "__pycache__"))


def caught_by(house, mutant, room, seconds):
    """Return what notices a mutant in a copy of the house: a test or a broken run; "" if nothing does."""
    try:
        with broken(house, mutant):
            done = tested(house, tests_of(room), seconds, "-x")
    except subprocess.TimeoutExpired:
        return f"nothing went on for {seconds} s"
    if not done.returncode:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else "the run broke off"


def tested(house, tests, seconds, *options):
    """Return the run of some tests in a copy of the house."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS, *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(house), "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        command, cwd=house, env=environment, capture_output=True, text=True, timeout=seconds
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", choices=ROOMS, action="append", help="only these")
    parser.add_argument("-n", type=int, help="at most so many of a room")
    parser.add_argument("--seconds", type=int, default=900, help="after which a run counts as caught")
    parser.add_argument("--only", help="FILE:LINE, the end of a path and a line's number")
    parser.add_argument("--list", action="store_true", help="only say which mutants there are")
    options = parser.parse_args()
    total = Counter()
    with tempfile.TemporaryDirectory() as folder:
        house = Path(folder) / "house"
        copy_house(house)
        for room in options.room or ROOMS:
            whole = tested(house, tests_of(room), options.seconds, "--collect-only")
            assert not whole.returncode, f"{room}: {whole.stdout}{whole.stderr}"
            for mutant in choose(room)[: options.n]:
                path, number, line, changed = mutant
                if options.only and not f"{path}:{number}".endswith(options.only):
                    continue
                by = reason(mutant)
                state = "equal" if by else "listed"
                if not by and not options.list:
                    by = caught_by(house, mutant, room, options.seconds)
                    state = "caught" if by else "SURVIVED"
                total[room, state] += 1
                print(f"{state}: {path}:{number}: {line.strip()} -> {changed.strip()} ({by})", flush=True)
    for (room, state), count in total.items():
        print(f"{room}: {count} {state}")


if __name__ == "__main__":
    main()
