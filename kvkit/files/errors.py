"""The words of errors about files: one form for all of them."""

import contextlib
import errno
import warnings
from collections.abc import Iterator

from kvkit.errors import KvkitError, brief
from kvkit.typed import FilePath

AGAIN = "save or copy the file again"


class FileError(KvkitError):
    """A file is not what it should be: path, what is wrong, what to do."""


def file_error(path: FilePath, what: str, cure: str = AGAIN) -> FileError:
    """Return an error about a file, in the one form of all."""
    return FileError(f"{path}: {what}: {cure}")


def quoted(name: str) -> str:
    """Return a name in a file as a message may hold it."""
    return f"'{brief(name)}'"


@contextlib.contextmanager
def reading_errors(path: FilePath, what: str) -> Iterator[None]:
    """Raise `FileError` for the dozen exceptions by which zipfile, numpy and json refuse bytes."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except (MemoryError, FileError):
        raise
    except Exception as error:
        # A seek to an absurd place is the file's fault; any other OSError is the machine's.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise file_error(path, f"{what} ({brief(str(error) or type(error).__name__)})") from error
