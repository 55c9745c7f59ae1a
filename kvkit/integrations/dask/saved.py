"""The folder of a saved cache: a file a shard, and a manifest, which says which files are the last save."""

import json
import re
import secrets
import shutil
from pathlib import Path

from kvkit.checks.words import wrong
from kvkit.files.replace import replacing

VERSION = 1
MANIFEST = "sharded.json"


class Folder:
    """Where a cache is saved; `path` is seen by all workers."""

    def __init__(self, path):
        self.path = Path(path).absolute()

    def files(self, save, count):
        """The file of each shard."""
        return [str(self.path / save / f"shard-{i}.npz") for i in range(count)]

    def manifest(self):
        """What the last save says: its name, `length`, `batch`, and the arguments of the `cache`."""
        try:
            said = json.loads((self.path / MANIFEST).read_bytes())
            version = said["format_version"]
            if version == VERSION and not said.keys() >= {"save", "length", "batch", "cache"}:
                raise KeyError(*said)
            if version == VERSION and not re.fullmatch("[0-9a-f]{12}", said["save"]):
                raise ValueError(said["save"])  # a folder elsewhere, which the next save would remove
        except FileNotFoundError:
            raise wrong(str(self.path), f"a folder with {MANIFEST}", "one without") from None
        except (ValueError, KeyError, TypeError) as error:
            raise wrong(str(self.path), f"a {MANIFEST} that kvkit wrote", "another file") from error
        if version != VERSION:
            raise wrong(str(self.path), f"{MANIFEST} of version {VERSION}", version)
        return said

    def save(self, write, count, said):
        """`write` files of shards, then say so; what was saved before stays until then."""
        self.path.mkdir(parents=True, exist_ok=True)
        obsolete = self.manifest()["save"] if (self.path / MANIFEST).exists() else None
        name = secrets.token_hex(6)
        try:
            write(self.files(name, count))
            with replacing(self.path / MANIFEST) as file:
                said = {"format_version": VERSION, "save": name} | said
                file.write(json.dumps(said, indent=2).encode() + b"\n")
        except BaseException:
            obsolete = name
            raise
        finally:
            if obsolete:
                shutil.rmtree(self.path / obsolete, ignore_errors=True)
