"""Log calls of operators as KVKIT_LOG says, and write them to disk as .npy files beside a manifest.

    KVKIT_LOG=1     print the name of each operator on stderr, before it runs
    KVKIT_LOG=3     print shapes, dtypes and strides of arguments too
    KVKIT_LOG=5     print the range of their numbers too, and how many are not finite
    KVKIT_LOG=10    write each call into a folder as well, which `kvkit vectors replay` runs

A call is written before it runs, so that its dump outlives a crash. Dumps are in the folder KVKIT_LOG_FOLDER
(default kvkit_dumps). After KVKIT_LOG_CALLS calls (default 1000) or KVKIT_LOG_BYTES bytes (default 2**30)
nothing more is written.
"""

import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.typed import FilePath

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
AS_BITS = {2: np.uint16, 1: np.uint8}  # integers that hold the bits of dtypes unknown to .npy
PRIVATE = 0o700  # the mode of folders of dumps: only their owner may enter
UNLOGGED = "self", "out", "stream"
# Modules whose operators are names of `kvkit` itself.
TOP_LEVEL = "static", "merge", "paged", "planned_pages", "mla", "indexer", "compressed", "recurrent"
TOTALS = {"calls": 0, "bytes": 0, "silent": False}
RUN = {"number": 0}  # of this process among those whose dumps have its process number


def write_array(folder: FilePath, name: str, array: ArrayLike, raw: bool = False) -> dict[str, Any]:
    """Write an array below a folder; return its entry in a manifest."""
    whole = np.asarray(array)
    dtype = whole.dtype
    bits = (
        whole.view(AS_BITS[dtype.itemsize]) if dtype.kind == "V" or dtype.name not in np.sctypeDict else whole
    )
    path = Path(folder, f"{name}.{'bin' if raw else 'npy'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    if raw:
        data.write(np.ascontiguousarray(bits).tobytes())
    else:
        np.save(data, bits)
    try:
        path.write_bytes(data.getbuffer())
    except OSError as error:  # the error of a full disk does not name the file
        raise type(error)(error.errno, error.strerror, str(path)) from None
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "file": path.relative_to(folder).as_posix(),
        "dtype": dtype.name,
        "shape": list(whole.shape),
        "sha256": digest,
    }


def write_argument(folder: FilePath, name: str, value: Any, raw: bool = False) -> dict[str, Any]:
    """Return an argument's entry in a manifest: a plain value, or an array in a file (a list is stacked)."""
    if isinstance(value, np.generic):
        value = value.item()
    if hasattr(value, "describe"):  # a `Rope`, which becomes its arguments
        value = value.describe()
    if is_plain(value):
        return {"value": value}
    if isinstance(value, (list, tuple)):
        value = np.stack(value)
    if np.asarray(value).dtype.hasobject:
        raise TypeError(f"{name} is a {type(value).__name__}")
    return write_array(folder, name, value, raw)


def members(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, argument). A tuple of arrays of different shapes is yielded as NAME.0, NAME.1 ..."""
    for name, value in arguments.items():
        several = isinstance(value, tuple) and not is_plain(value)
        if several and len({np.shape(each) for each in value}) > 1:
            yield from ((f"{name}.{i}", each) for i, each in enumerate(value))
        else:
            yield name, value


def is_plain(value: object) -> bool:
    """Return whether JSON can write a value; tuples become lists."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (bool, int, float, str))


def write_manifest(folder: FilePath, cases: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write the manifest of some cases atomically."""
    manifest = {"format_version": FORMAT_VERSION, **more, "cases": cases}
    temporary = Path(folder, f".{MANIFEST}")
    temporary.write_text(json.dumps(manifest, indent=1, default=str) + "\n")
    os.replace(temporary, Path(folder, MANIFEST))


def limit(name: str, default: int) -> int:
    """Return the number in an environment variable, or the default."""
    number = os.environ.get(name, "")
    return int(number) if number.isdecimal() else default


level = limit("KVKIT_LOG", 0)  # read once: reading the environment takes longer than the call's wrapper


def operator_path(operator: Callable[..., Any]) -> str:
    """Return the path of an operator inside the package."""
    room, path = operator.__module__.split(".")[1], operator.__qualname__
    return path if room in (*TOP_LEVEL, operator.__name__) else f"{room}.{path}"


def operator_of(path: str) -> str:
    """Return the path of the operator that a path of an operator, or of a plan's method, stands for."""
    return re.sub(r"\w*Plan\.", "", path)


def log_operator(name: str, arguments: Mapping[str, Any], read: Callable[[str, Any], Any]) -> None:
    """Log an operator and its arguments, in the detail that KVKIT_LOG asks for.

    `read(name, value)` converts an argument's arrays to numpy. An error of the log is printed, not raised.
    """
    plan = arguments.get("self")  # if the operator is a method of a plan
    given = {key: value for key, value in arguments.items() if key not in UNLOGGED and value is not None}
    print(f"kvkit: {name}", file=sys.stderr)
    try:
        if level >= 5:
            given = {key: read(key, value) for key, value in given.items()}
        if level >= 3:
            lines = [f"  {key}: {describe_value(value, level >= 5)}" for key, value in given.items()]
            print("\n".join(lines), file=sys.stderr)
        if level >= 10 and not name.endswith("plan"):
            operator = operator_of(name)  # a plan's method is written as a call of its operator
            write_call(operator, (plan.step.sequences.tensors(operator) if plan else {}) | given)
    except Exception as error:
        print(f"kvkit: no dump of {name}: {error}", file=sys.stderr)


def describe_value(value: Any, numbers: bool) -> str:
    """Describe an argument in words."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return repr(value)[:80]
    strides = f", strides {value.strides}" if isinstance(value, np.ndarray) else ""
    text = f"{value.dtype} {tuple(value.shape)}{strides}"
    if not numbers or not isinstance(value, np.ndarray) or not value.size:
        return text
    wide = value.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    span = f", {finite.min():.6g} to {finite.max():.6g}, mean {finite.mean():.6g}" if finite.size else ""
    return f"{text}{span}, {wide.size - finite.size} not finite, {int((wide == 0).sum())} zeros"


def new_folder(root: Path, name: str) -> Path:
    """Make a folder for a call: its name begins with the number of the process.

    In containers processes of several runs have one number; the later ones get .1, .2 and so on.
    """
    while True:
        run = f".{RUN['number']}" if RUN["number"] else ""
        folder = root / f"{os.getpid()}{run}-{name}"
        try:
            folder.mkdir(PRIVATE)  # keys and values reveal the text of a user
        except FileExistsError:
            RUN["number"] += 1
        else:
            return folder


def write_call(name: str, given: Mapping[str, Any]) -> None:
    """Write a call, unless the limits are reached."""
    size = sum(value.nbytes for value in given.values() if isinstance(value, np.ndarray))
    calls, volume = limit("KVKIT_LOG_CALLS", 1000), limit("KVKIT_LOG_BYTES", 2**30)
    if TOTALS["calls"] >= calls or TOTALS["bytes"] + size > volume:
        if not TOTALS["silent"]:
            print(f"kvkit: dumps are at their limit of {calls} calls and {volume} bytes", file=sys.stderr)
        TOTALS["silent"] = True
        return
    TOTALS["calls"] += 1
    TOTALS["bytes"] += size
    root = Path(os.environ.get("KVKIT_LOG_FOLDER") or "kvkit_dumps")
    root.mkdir(PRIVATE, parents=True, exist_ok=True)
    folder = new_folder(root, f"{TOTALS['calls']:06d}-{name}")
    arguments = {key: write_argument(folder, key, value) for key, value in members(given)}
    case = {"name": folder.name, "operator": name, "arguments": arguments}
    write_manifest(folder, [case | {"outputs": {}, "after": {}}], producer="KVKIT_LOG")
    for path in folder.iterdir():
        path.chmod(PRIVATE & 0o666)
