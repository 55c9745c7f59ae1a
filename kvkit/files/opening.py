"""Read and write files of any kind.

The first bytes of a file decide its kind, not its name. Only chunks of LMCache are recognised by their names.
"""

import contextlib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvkit.errors import argument_error, brief
from kvkit.files import file_kinds, llama, lmcache, mlx, npy, npz, pt, tensors
from kvkit.files.contents import CACHE, Contents, flat
from kvkit.files.description import Description
from kvkit.files.errors import file_error
from kvkit.files.paths import check_source
from kvkit.typed import FilePath

PACKAGE = Path(__file__).parents[1]
WRITTEN = ".npz", ".npy", ".safetensors"
READS = (
    f"give {', '.join(WRITTEN)}, a file of torch.save, a prompt cache of MLX, a session or state of "
    "llama.cpp, or a chunk of LMCache under its own name"
)


def example() -> Path:
    """Return the path of a small file: keys, values and queries of SmolLM2-135M, for two texts.

    Returns
    -------
    Path

    Examples
    --------
    >>> from kvkit import files
    >>> files.read(files.example()).arrays["current_key"].shape     # [layers, tokens, heads, dim]
    (4, 145, 3, 64)
    """
    installed, clone = (PACKAGE / "data", PACKAGE.parent / "examples" / "data")
    return (installed if installed.is_dir() else clone) / "smollm2_kv.npz"


def read(path: FilePath) -> Contents:
    """Read the arrays of a file, its description and its metadata.

    Parameters
    ----------
    path : path
        A .npz, .npy or .safetensors file, a file of torch.save (plain tensors), a prompt cache of MLX, a
        session or sequence state of llama.cpp, or a chunk of LMCache. Only a chunk is recognised by its name.

    Returns
    -------
    Contents
        ``arrays`` by name, ``description`` (layout, sizes, format, rotation), ``metadata``, ``kind``, and
        ``notes`` on facts that the file lacks. Large files are mapped copy-on-write.

    Raises
    ------
    KvkitError
        If the file is of another kind or damaged, or if its kind needs a package that is missing.

    Examples
    --------
    >>> import os, tempfile, numpy as np
    >>> from kvkit import files
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "cache.npz")
    ...     said = files.Description(layout="| b kv n h c")
    ...     files.write(path, np.zeros((4, 2, 16, 3, 8), np.float16), said)
    ...     found = files.read(path)
    >>> found.kind, found.description.layout, found.arrays["cache"].shape
    ('.npz', '| b kv n h c', (4, 2, 16, 3, 8))
    """
    check_source(path)
    fields = lmcache.parse_name(path)
    with open(path, "rb") as file:
        begin = file.read(9)
        file.seek(0)
        if begin.startswith(b"PK") and (not fields or zipfile.is_zipfile(file)):
            of_torch = None
            with contextlib.suppress(Exception), zipfile.ZipFile(file) as archive:
                of_torch = file_kinds.kind_of_archive(archive.namelist())
            return pt.read(path) if of_torch else npz.read(path)  # which words an error of the archive
        if fields:  # raw elements: the first bytes may be any
            return lmcache.read(path, fields)
        kind = file_kinds.kind_of_file(file)
    if begin[:4] in llama.MAGICS:
        return llama.read(path)
    if begin.startswith(npy.MAGIC):
        return npy.read(path)
    if kind == file_kinds.SAFETENSORS:
        contents = tensors.read(path)
        return mlx.read(path, contents) if mlx.is_cache(contents) else contents
    if kind:
        raise file_error(path, *kind)
    if not begin:
        raise file_error(path, "it is empty")
    raise file_error(path, f"it begins with {brief(begin)}, like no kind of file that kvkit reads", READS)


def write(
    path: FilePath,
    arrays: Any,
    description: Description | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
    advance: Callable[[int], object] | None = None,
    compress: str | None = None,
) -> None:
    """Write arrays to a .npz, .npy or .safetensors file. An existing file is replaced in one step.

    Parameters
    ----------
    path : path
        The file. Its name ends in .npz, .npy or .safetensors. A .safetensors file with the layout "mlx" or
        "mlx-0.31" is written as a prompt cache of mlx-lm.
    arrays : array, nested lists of arrays, or mapping
        The cache, an array or nested lists as its layout says; or arrays and lists by name, with it as
        ``"cache"``.
    description : Description, optional
        The description to store with the cache. A .npy file has neither a description nor metadata.
    metadata : mapping, optional
        Other metadata to store, as JSON.
    advance : callable, optional
        A function that is called with the number of bytes of each part that has been written.
    compress : {"zstd"}, optional
        Compress the arrays of a .npz file without loss (the extra ``zstd``). `read` unpacks them.

    Raises
    ------
    KvkitError
        If the name has another suffix, or such a file cannot hold the arrays. Nothing has been written.

    Examples
    --------
    >>> import os, tempfile, numpy as np
    >>> from kvkit import files
    >>> layer = [np.zeros((1, 3, 5, 8)), np.ones((1, 3, 5, 8))]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "cache.npz")
    ...     files.write(path, {"cache": [layer, layer]}, files.Description("hf"))
    ...     sorted(files.read(path).arrays)
    ['cache.0.0', 'cache.0.1', 'cache.1.0', 'cache.1.1']
    """
    if not hasattr(arrays, "items"):
        arrays = {CACHE: arrays}
    whole = flat(arrays)
    about = dict(metadata or {})
    if description is not None and description.to_dict():
        about["description"] = description.to_dict()
    advance = advance or (lambda count: None)
    suffix = Path(path).suffix
    if compress is not None and suffix != ".npz":
        raise argument_error("compress", "a .npz file, the only kind whose arrays are compressed", suffix)
    if suffix == ".npz":
        npz.write(path, whole, about, advance, compress)
    elif suffix == ".npy":
        npy.write(path, whole, advance)
    elif suffix == ".safetensors" and description is not None and description.layout in mlx.LAYOUTS:
        mlx.write(path, whole, about, description, advance)
    elif suffix == ".safetensors":
        tensors.write(path, whole, about, advance)
    else:
        kind = suffix or "files without a suffix"
        raise file_error(path, f"kvkit writes no {kind}", f"give a name in {', '.join(WRITTEN)}")
