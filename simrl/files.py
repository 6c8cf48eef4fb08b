"""Nothing half-written: a file or a folder gets its name only when it is whole. Nobody's own files are ever deleted."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from simrl.errors import InputError, first_line
from simrl.interrupts import ctrl_c_ignored

LEFT_BY_SYSTEMS = (".DS_Store", "Thumbs.db")  # in any folder that somebody has looked at


@contextmanager
def write_whole_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`; on success it is renamed to `path`, on any error it is removed.

    Missing folders are made; on an error they are removed again. An existing file is replaced only by one of its kind, told
    by the first bytes. Raises `InputError` otherwise, where nothing can be written, and for a folder or /dev/null.
    """
    with _plainly_told(path), _made_folders(path) as target:
        if target.exists() and not target.is_file():
            raise InputError(f"{path}: is no file; name one to write")
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:40]}.", dir=target.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            if target.exists() and _first_bytes(target) not in (b"", _first_bytes(temporary)):
                raise InputError(f"{path}: is another kind of file, not one that simrl would write here; name another")
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def write_whole_folder(path: Path, manifest: str | re.Pattern[str]) -> Iterator[Path]:
    """Gives a temporary folder beside `path` that takes the place of `path` when the block succeeds.

    The files in it are listed in the file `manifest`. An existing folder is replaced only if it is empty or its manifest
    lists every file in it, so that nobody's own files are ever deleted. A folder that may hold nothing but data has a pattern
    in place of a manifest, which every file in it has to match.
    """
    with _plainly_told(path), _made_folders(path) as target:
        _refuse_to_replace(target, path, manifest)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}.", dir=target.parent))
        try:
            yield temporary
            if isinstance(manifest, str):
                (temporary / manifest).write_text(
                    "".join(f"{file}\n" for file in [manifest, *_files(temporary)]), encoding="utf-8"
                )
            temporary.chmod(0o777 & ~_umask())
            _refuse_to_replace(target, path, manifest)  # a simulation may take hours
            with ctrl_c_ignored():
                _take_place(temporary, target)
        except InputError as error:  # of a file inside: the folder is known by its own name only
            raise InputError(str(error).replace(str(temporary), str(path))) from error
        finally:
            with ctrl_c_ignored():
                shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _plainly_told(path: Path) -> Iterator[None]:
    """Turns a disk that is full, a folder that is read-only and the like into one line."""
    try:
        yield
    except OSError as error:
        what = error.strerror or first_line(error)
        raise InputError(
            f"{path}: cannot be written ({what}); name a place where you may write and that has room"
        ) from error


@contextmanager
def _made_folders(path: Path) -> Iterator[Path]:
    """Makes the folders above `path`; on any error removes again those it made. Gives `path` with its links followed, so
    that not a link is replaced but what it points to."""
    target = Path(os.path.realpath(path))
    missing = [folder for folder in target.parents if not folder.exists()]
    if target.is_symlink():  # still, after following
        raise InputError(f"{path}: its links go round in a circle; name another")
    for folder in target.parents:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{path}: {folder.name} is no folder; name a place where you may write")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield target
    except BaseException:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise


def _refuse_to_replace(target: Path, path: Path, manifest: str | re.Pattern[str]) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise InputError(f"{path}: is a file; name another output folder")
    if target.is_mount() or Path.cwd().is_relative_to(target):
        raise InputError(
            f"{path}: cannot be replaced (the current folder, one above it, or a mount); name a folder in it"
        )
    files = _files(target)
    if isinstance(manifest, re.Pattern):
        listed = {file for file in files if manifest.fullmatch(file)}
    else:
        if files and not (target / manifest).is_file():
            raise InputError(
                f"{path}: exists and was not written by simrl (no {manifest} in it); name another output folder"
            )
        listed = set((target / manifest).read_text(encoding="utf-8").splitlines()) if files else set()
    foreign = [file for file in files if file not in listed and Path(file).name not in LEFT_BY_SYSTEMS]
    if foreign:
        raise InputError(
            f"{path}: holds {foreign[0]}, which simrl did not write; move it, or name another output folder"
        )


def _take_place(temporary: Path, target: Path) -> None:
    """Renames `temporary` to `target`; what is there is deleted afterwards, or back in its place on an error."""
    if not target.exists():
        temporary.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}.old.", dir=target.parent))
    target.rename(old / target.name)
    try:
        temporary.rename(target)
    except OSError:
        (old / target.name).rename(target)
        old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


def _files(folder: Path) -> list[str]:
    """Everything below that is no folder, as paths within `folder`, sorted."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())


def _umask() -> int:
    """The process's file mode mask, which Python can read only by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
