"""Word errors about files in one form."""

import contextlib
import errno
import warnings
from collections.abc import Iterator

from kvkit.errors import KvkitError, brief
from kvkit.typed import FilePath


class FileError(KvkitError):
    """Says which file is wrong, what is wrong with it, and what to do."""


def file_error(path: FilePath, what: str, cure: str = "save or copy the file again") -> FileError:
    """Return an error about a file, in the common form."""
    return FileError(f"{path}: {what}: {cure}")


def quoted(name: str) -> str:
    """Quote a name from a file for a message."""
    return f"'{brief(name)}'"


@contextlib.contextmanager
def reading_errors(path: FilePath, what: str) -> Iterator[None]:
    """Raise `FileError` in place of exceptions that zipfile, numpy and json raise for bad bytes."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except (MemoryError, FileError):
        raise
    except Exception as error:
        # A seek beyond all limits means a bad file; any other OSError comes from the machine.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise file_error(path, f"{what} ({brief(str(error) or type(error).__name__)})") from error
