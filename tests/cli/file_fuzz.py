"""Runs the command line on mutated files, in this process: `python file_fuzz.py FOLDER COUNT SEED`.

Every run ends with code 0 and a whole file of results, or with code 2, one printable line and no file. Half
of the files are broken as they are, half in a member of a whole archive. Prints the number of runs by code.
"""

import collections
import contextlib
import io
import json
import resource
import sys
import zipfile
from pathlib import Path

import numpy as np

from kvkit.files import npz
from kvkit_cli.main import main

MOST_MEMORY = 8 * 2**30  # a file of kilobytes that asks for more has found something
FIELDS = {b"PK\x01\x02": (8, 10, 16, 20, 24, 28, 30, 42), b"PK\x03\x04": (6, 8, 14, 18, 22, 26, 28),
          b"PK\x05\x06": (8, 10, 12, 16)}  # fmt: skip
TEXTS = (
    b"NUMPY", b"descr", b"<f4", b"|V2", b"shape", b"fortran_order", b"False", b"(2,", b"version", b"dtypes",
)  # fmt: skip


def seeds(folder):
    """Return files written by kvkit, by numpy, deflated, and of another operator's results."""
    rng = np.random.default_rng(0)
    new = rng.standard_normal((2, 2, 2, 6)).astype(np.float32)
    arrays = {"current_key": new, "current_value": new, "start_pos": np.array(3), "num_layer": np.array(1),
              "cache": rng.standard_normal((3, 1, 2, 7, 2, 6)).astype(np.float32)}  # fmt: skip
    path = folder / "seed.npz"
    npz.write(path, arrays, {"operator": "key_value_cache", "attributes": {"num_layer": 1}})
    yield path.read_bytes()
    for save in (np.savez, np.savez_compressed):
        save(path, **arrays)
        yield path.read_bytes()
    path.unlink()


def mutated(rng, data):
    """Return bytes with one to three kinds of damage."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        kind, at = rng.integers(8), int(rng.integers(len(data)))
        if kind == 0:
            data[at] = rng.integers(256)
        elif kind == 1:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            del data[at : at + int(rng.integers(1, 200))]
        elif kind == 3:
            data[at:at] = rng.bytes(int(rng.integers(1, 200)))
        elif kind == 4:
            other = int(rng.integers(len(data)))
            data[at : at + 64] = data[other : other + 64]
        elif kind in (5, 6):
            mark = list(FIELDS)[rng.integers(len(FIELDS))]
            places = [i for i in range(len(data)) if data[i : i + 4] == mark]
            if places:
                place = places[rng.integers(len(places))] + int(rng.choice(FIELDS[mark]))
                value = int(
                    rng.choice([0, 1, 8, 255, 65535, 2**31, 2**32 - 1, len(data), rng.integers(2**32)])
                )
                data[place : place + 4] = value.to_bytes(4, "little")
        else:
            text = TEXTS[rng.integers(len(TEXTS))]
            place = data.find(text, at)
            if place >= 0:
                data[place : place + len(text)] = bytes(rng.integers(32, 127, len(text)).astype(np.uint8))
        if not data:
            data = bytearray(b"P")
    return bytes(data)


def mutated_within(rng, data):
    """Return a whole archive with damage in one member."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        hit = rng.integers(len(old.infolist()))
        for i, info in enumerate(old.infolist()):
            content = old.read(info)
            new.writestr(info.filename, mutated(rng, content) if i == hit else content, info.compress_type)
    return made.getvalue()


def run(source, output):
    """Run a command; return (code, stdout, stderr)."""
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["run", "key_value_cache", str(source), "-o", str(output), "--quiet"], prog_name="kvkit")
        except SystemExit as error:
            code = error.code or 0
    return code, out.getvalue(), err.getvalue()


def fuzz(folder, count, seed):
    rng, codes = np.random.default_rng(seed), collections.Counter()
    source, output = folder / "in.npz", folder / "out.npz"
    whole = list(seeds(folder))
    for data in whole:
        source.write_bytes(data)
        assert run(source, output) == (0, "", "")
    for i in range(count):
        npz.MAX_COPIED = (-1, 2**24)[i % 2]  # mapped or copied
        mutate = mutated_within if i % 4 < 2 else mutated
        source.write_bytes(data := mutate(rng, whole[i % len(whole)]))
        output.unlink(missing_ok=True)
        code, out, err = run(source, output)
        codes[code] += 1
        found = source.read_bytes() == data and out == "" and code in (0, 2)
        if code == 0:
            found = found and not err and {"key", "value", "cache"} <= set(npz.read(output).arrays)
        else:
            line = err.removesuffix("\n")
            found = found and line.startswith("kvkit: ") and line.isprintable() and len(line) < 1000
            found = found and not output.exists()
        found = found and {path.name for path in folder.iterdir()} <= {"in.npz", "out.npz"}
        assert found, (i, code, out, err)
    return dict(codes)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    print(json.dumps(fuzz(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
