"""Read and write the folder of a saved cache: files of shards, and a manifest that names the last save.

The files in a folder::

    sharded.json                {"format_version": 1, "save": "0f3a...", "length": 96, "batch": 2, ...}
    0f3a.../shard-0.npz, ...    the shards of this save
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkit.checks.values import integer
from kvkit.errors import argument_error
from kvkit.files.replace import replacing
from kvkit.integrations.dask.checks import checked_sizes
from kvkit.typed import FilePath

VERSION = 1
MANIFEST = "sharded.json"


def check_manifest(*, save: Any, length: Any, batch: Any, cache: Any, format_version: int) -> None:
    """Raise if a manifest has values that no save writes."""
    if not re.fullmatch("[0-9a-f]{12}", save):
        raise ValueError(save)  # it could name any folder, and the next save would remove that
    integer("length", length, 0)
    integer("batch", batch, 1 if length else 0)
    checked_sizes(cache)


class ShardFolder:
    """Reads and writes the saves of a cache in a folder that all workers see."""

    def __init__(self, path: FilePath) -> None:
        self.path = Path(path).absolute()

    def shard_files(self, save: str, count: int) -> list[str]:
        """Return the file of each shard in a save."""
        return [str(self.path / save / f"shard-{i}.npz") for i in range(count)]

    def read_manifest(self) -> dict[str, Any]:
        """Return the last save's name, ``length``, ``batch``, and the arguments of its ``cache``."""
        try:
            manifest = json.loads((self.path / MANIFEST).read_bytes())
            version = manifest["format_version"]
            if version == VERSION:
                check_manifest(**manifest)  # a TypeError for other names
                last = f"shard-{manifest['cache']['shards'] - 1}.npz"
                if not (self.path / manifest["save"] / last).exists():
                    raise ValueError(last)
        except FileNotFoundError:
            raise argument_error(str(self.path), f"a folder with {MANIFEST}", "one without") from None
        except (ValueError, KeyError, TypeError) as error:
            raise argument_error(str(self.path), f"a {MANIFEST} that kvkit wrote", "another file") from error
        if version != VERSION:
            raise argument_error(str(self.path), f"{MANIFEST} of version {VERSION}", version)
        return manifest

    def write_save(self, write: Callable[[list[str]], Any], count: int, manifest: dict[str, Any]) -> None:
        """Write the files of shards with ``write``, then the manifest; then remove the previous save."""
        self.path.mkdir(parents=True, exist_ok=True)
        obsolete = self.read_manifest()["save"] if (self.path / MANIFEST).exists() else None
        save = secrets.token_hex(6)
        try:
            write(self.shard_files(save, count))
            with replacing(self.path / MANIFEST) as file:
                manifest = {"format_version": VERSION, "save": save} | manifest
                file.write(json.dumps(manifest, indent=2).encode() + b"\n")
        except BaseException:
            obsolete = save  # the previous one stays
            raise
        finally:
            if obsolete:
                shutil.rmtree(self.path / obsolete, ignore_errors=True)
