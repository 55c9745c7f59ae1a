"""Read packs: check their manifests, and load their arrays."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvkit.errors import brief
from kvkit.files import npy
from kvkit.files.contents import CACHE
from kvkit.files.errors import FileError
from kvkit.files.paths import no_such_file
from kvkit.runtime.call_log import FORMAT_VERSION, MANIFEST
from kvkit.typed import Array, FilePath

CaseEntry = dict[str, Any]  # a case of a manifest
# {(operator, an argument's name in older packs): its name}
OLDER_NAMES = {(each, "scale"): "softmax_scale" for each in ("mla_attention", "indexer_scores")}
ARRAY_GROUPS = "arguments", "outputs", "after"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")  # names become file names


def manifests(folder: FilePath) -> list[Path]:
    """Return the folders with a manifest: this folder, or its subfolders, as KVKIT_LOG=10 writes them."""
    folder = Path(folder)
    if not folder.is_dir():
        raise no_such_file(folder, "folder")
    if (folder / MANIFEST).exists():
        return [folder]
    inner = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    if not inner:
        raise FileError(f"{folder}: there is no {MANIFEST}: give the folder of a pack")
    return inner


def manifest(folder: FilePath) -> dict[str, Any]:
    """Read the manifest of a pack and check its form."""
    path = Path(folder) / MANIFEST
    if not Path(folder).is_dir():
        raise no_such_file(folder, "folder")
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileError(f"{path}: no such file: give the folder of a pack") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: no JSON ({brief(error)}): make the pack again") from None
    if not isinstance(found, dict) or not isinstance(found.get("cases"), list):
        raise FileError(f"{path}: it lists no cases: make the pack again")
    version = found.get("format_version")
    if version != FORMAT_VERSION:
        got = "no format_version" if version is None else f"format_version {brief(repr(version))}"
        cure = "make it with this version of kvkit, or update kvkit"
        raise FileError(f"{path}: {got}, not {FORMAT_VERSION}: {cure}")
    for case in found["cases"]:
        wrong = wrong_in_case(case)
        if wrong:
            raise FileError(f"{path}: {wrong}: make the pack again")
    return found


def wrong_in_case(case: Any) -> str:
    """Return what is wrong with the form of a case; "" if nothing is."""
    parts: list[Any] = [case.get(key) for key in ARRAY_GROUPS] if isinstance(case, dict) else [None]
    if not all(isinstance(part, dict) and all(isinstance(v, dict) for v in part.values()) for part in parts):
        return "a case without arguments, outputs or after"
    if not isinstance(case.get("name"), str) or not isinstance(case.get("operator"), str):
        return "a case without a name or an operator"
    for name in (case["name"], *(name for part in parts for name in part)):
        if not FILE_NAME.fullmatch(name):
            return f"{brief(repr(name))} is no name of a case or an array"
    unchanged = case.get("unchanged", [])
    if not isinstance(unchanged, list) or not all(isinstance(name, str) for name in unchanged):
        return f"case {case['name']}: unchanged is no list of names"
    lost = next((name for name in case["after"] if name not in case["arguments"]), None)
    if lost is not None:
        return f"case {case['name']}: {lost} is after the call, but no argument"
    for part in parts:
        for name, entry in part.items():
            if not isinstance(entry.get("file", ""), str):
                return f"case {case['name']}: the file of {name} is no path"
            limits = entry.get("tolerance", {})
            kinds = {"atol": (int, float), "rtol": (int, float)}
            if not isinstance(limits, dict) or not all(
                isinstance(each, kinds.get(key, (int, float, str))) for key, each in limits.items()
            ):
                return f"case {case['name']}: the tolerance of {name} has no numbers"
    return ""


def entries(case: CaseEntry) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (group, name, entry) of every array of a case."""
    for group in ARRAY_GROUPS:
        for name, entry in case.get(group, {}).items():
            if "file" in entry:
                yield group, name, entry


def result_dtype(entry: dict[str, Any]) -> str:
    """Return the dtype that a result must have. The expected array may be float64 instead."""
    return str(entry.get("result_dtype", entry.get("dtype")))


def inside(folder: FilePath, name: str) -> Path:
    """Return the path of a file in a manifest; raise if it is outside the folder."""
    folder = Path(folder).resolve()
    path = (folder / str(name)).resolve()
    if not path.is_relative_to(folder):
        raise FileError(f"{folder / MANIFEST}: file {brief(repr(name))} is outside the pack: make it again")
    return path


def array(folder: FilePath, entry: dict[str, Any], path: Path | None = None) -> Array:
    """Load an array of a pack with the dtype and shape that the manifest names."""
    path = inside(folder, entry["file"]) if path is None else path
    try:
        dtype = np.dtype(getattr(ml_dtypes, entry["dtype"], entry["dtype"]))
        shape = tuple(int(size) for size in entry["shape"])
        if path.suffix == ".bin":
            bits = np.frombuffer(path.read_bytes(), np.uint8)
        else:
            bits = npy.read(path).arrays[CACHE]
        found = bits if bits.dtype == dtype else np.ascontiguousarray(bits).reshape(-1).view(dtype)
        if found.size != math.prod(shape):
            raise ValueError(f"{found.size} elements, not {math.prod(shape)}")
        return found.reshape(shape).copy()
    except (KeyError, TypeError, ValueError, OverflowError, EOFError, IsADirectoryError) as error:
        what = f"no array of {entry.get('dtype')} {entry.get('shape')} ({brief(error)})"
        raise FileError(f"{path}: {what}: make it again") from None
    except FileNotFoundError:
        raise FileError(f"{path}: no such file: make the pack again") from None


def arguments(folder: FilePath, case: CaseEntry) -> dict[str, Any]:
    """Load the arguments of a case by name; NAME.0, NAME.1 and so on become a tuple."""
    found: dict[str, Any] = {}
    for stored, entry in case["arguments"].items():
        name = OLDER_NAMES.get((case["operator"], stored), stored)
        value = array(folder, entry) if "file" in entry else plain(entry.get("value"))
        whole, _, number = name.partition(".")
        if number.isdecimal():
            found[whole] = (*found.get(whole, ()), value)
        else:
            found[name] = value
    return found


def plain(value: Any) -> Any:
    """Convert a list of JSON to the tuple that it was before."""
    return tuple(value) if isinstance(value, list) else value
