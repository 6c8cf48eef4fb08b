"""Nothing half-written: a file or a folder gets its name only when it is whole."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simrl.errors import InputError


@contextmanager
def write_whole_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`; on success it is renamed to `path`, on any error it is removed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); name a folder you may write to") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def write_whole_folder(path: Path, marker: str) -> Iterator[Path]:
    """Gives a temporary folder beside `path` that takes the place of `path` when the block succeeds.

    An existing folder is replaced only if it holds the file `marker`, so that nobody's own files are ever deleted.
    """
    if path.exists() and not (path / marker).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path}: exists and was not written by simrl (no {marker} in it); name another output folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); name a folder you may write to") from error
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            path.rename(old / path.name)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    """The process's file mode mask, which Python can read only by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
