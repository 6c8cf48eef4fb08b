"""Files: a file or a folder gets its name only when it is whole, and nobody's own files are ever
deleted. What simrl wrote has a seal, by which damage and changes are noticed; Parquet files that
someone else may have written are read with a bound on their size in memory."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from simrl.errors import InputError, first_line, refuse
from simrl.interrupts import ctrl_c_ignored
from simrl.validation import right

M = TypeVar("M", bound=BaseModel)
LOCKED_WITHIN_S = 60.0  # a temporary file is locked soon after it is made
LEFT_BY_SYSTEMS = (".DS_Store", "Thumbs.db")  # file managers leave them in any folder


@contextmanager
def write_whole_file(path: Path, own: bool = False) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success rename it to `path`, on any error remove it.

    Missing folders are made; on an error they are removed again. An existing file is replaced only
    by one of its kind, by the first bytes; by any if its name is simrl's `own`. Raises `InputError`
    otherwise, where nothing can be written, and for a folder or /dev/null.
    """
    with _target(path) as target:
        if target.exists() and not target.is_file():
            raise InputError(f"{path}: is no file; name one to write")
        handle, name = tempfile.mkstemp(prefix=_temporary_name(target), dir=target.parent)
        fcntl.flock(handle, fcntl.LOCK_EX)
        temporary = Path(name)
        try:
            _remove_left(target)
            yield temporary
            kinds = (b"", _first_bytes(temporary))
            if not own and target.exists() and _first_bytes(target) not in kinds:
                raise InputError(
                    f"{path}: is another kind of file, not one that simrl would write here; name another"
                )
            temporary.chmod(0o666 & ~_umask())
            _on_disk(temporary)
            temporary.replace(target)
            _on_disk(target.parent)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(handle)


@contextmanager
def write_whole_folder(path: Path, manifest: str | re.Pattern[str]) -> Iterator[Path]:
    """Give a temporary folder beside `path` that takes the place of `path` when the block succeeds.

    The file `manifest` lists the files of the folder. An existing folder is replaced only if it is
    empty or its manifest lists every file in it, so that nobody's own files are ever deleted. For a
    folder of tables alone, `manifest` is a pattern that every file has to match, and each has to
    have simrl's seal.
    """
    with _target(path) as target:
        _refuse_to_replace(target, path, manifest)
        with _folder_beside(target) as temporary:
            try:
                yield temporary
                if isinstance(manifest, str):
                    listed = "".join(f"{file}\n" for file in [manifest, *_files(temporary)])
                    (temporary / manifest).write_text(listed, encoding="utf-8")
                temporary.chmod(0o777 & ~_umask())
                _refuse_to_replace(target, path, manifest)  # a simulation may take hours
                for place in (*(temporary / file for file in _files(temporary)), temporary):
                    _on_disk(place)
                with ctrl_c_ignored():
                    _take_place(temporary, target)
                _on_disk(target.parent)
            except (
                InputError
            ) as error:  # of a file inside: the folder is known by its own name only
                raise InputError(str(error).replace(str(temporary), str(path))) from error


def temporary_folder() -> AbstractContextManager[Path]:
    """Give an empty folder among the system's temporary ones and remove it, with those of killed
    processes."""
    return _folder_beside(Path(tempfile.gettempdir()) / "simrl")


@contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """Give a temporary folder beside `target`, locked while this process lives, and remove it at
    the end if it is there."""
    temporary = Path(tempfile.mkdtemp(prefix=_temporary_name(target), dir=target.parent))
    handle = os.open(temporary, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        _remove_left(target)
        yield temporary
    finally:
        with ctrl_c_ignored():
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(handle)


@contextmanager
def _target(path: Path) -> Iterator[Path]:
    """Make the folders above `path`, and remove those again on any error. Gives `path` with its
    links followed, so that a link stays and its target is replaced. Raises `InputError` for a full
    disk, a read-only folder and other errors of the system."""
    target = Path(os.path.realpath(path))
    missing: list[Path] = []
    try:
        missing = [folder for folder in target.parents if not folder.exists()]
        if target.is_symlink():  # still, after following
            raise InputError(f"{path}: its links go round in a circle; name another")
        for folder in target.parents:
            if folder.exists() and not folder.is_dir():
                raise InputError(
                    f"{path}: {folder.name} is no folder; name a place where you may write"
                )
        target.parent.mkdir(parents=True, exist_ok=True)
        yield target
    except BaseException as error:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            what = error.strerror or first_line(error)
            raise InputError(
                f"{path}: cannot be written ({what}); name a place where you may write and that has room"
            ) from error
        raise


def _refuse_to_replace(target: Path, path: Path, manifest: str | re.Pattern[str]) -> None:
    """Raise `InputError` for a file, and for a folder that holds anything but simrl's own files."""
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
        named = [target / file for file in files if manifest.fullmatch(file)]
        listed = {  # a device, which has no end, is no file
            str(file.relative_to(target)) for file in named if file.is_file() and _seal(file)
        }
    else:
        if files and not (target / manifest).is_file():
            raise InputError(
                f"{path}: exists and was not written by simrl (no {manifest} in it); name another output folder"
            )
        listed = (
            set((target / manifest).read_text(encoding="utf-8", errors="replace").splitlines())
            if files
            else set()
        )
    foreign = [
        file for file in files if file not in listed and Path(file).name not in LEFT_BY_SYSTEMS
    ]
    if foreign:
        raise InputError(
            f"{path}: holds {foreign[0]}, which simrl did not write; move it, or name another output folder"
        )


def _take_place(temporary: Path, target: Path) -> None:
    """Rename `temporary` to `target`. A folder there is deleted afterwards, or put back on an
    error."""
    if not target.exists():
        temporary.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=_temporary_name(target), dir=target.parent))
    target.rename(old / target.name)
    try:
        temporary.rename(target)
    except OSError:
        (old / target.name).rename(target)
        old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def _temporary_name(target: Path) -> str:
    """Return how the name of a temporary file or folder for a target begins."""
    return f".{target.name[:40]}.simrl-"


def _remove_left(target: Path) -> None:
    """Remove the temporary files and folders of killed processes, which nobody locks any more. One
    that holds what was in the target's place gives it back."""
    for left in target.parent.iterdir():
        if not left.name.startswith(_temporary_name(target)) or left.is_symlink():
            continue
        with suppress(OSError):  # another process writes there
            handle = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - left.stat().st_mtime < LOCKED_WITHIN_S:
                    continue
                if (left / target.name).exists() and not target.exists():
                    (left / target.name).rename(target)
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            finally:
                os.close(handle)


def _on_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would outlive a loss of power."""
    with suppress(OSError):  # not every file system can tell
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_no_device(path: Path) -> None:
    """Raise `InputError` for a device, which may have no end."""
    if path.is_char_device() or path.is_block_device():
        raise InputError(f"{path}: is a device; name a file")


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


def _files(folder: Path) -> list[str]:
    """Return the paths within `folder` of everything below that is no folder, sorted."""
    return sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()
    )


def _umask() -> int:
    """Return the process's file mode mask, which Python can read only by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


# Parquet. Arrow trusts a file: a few kilobytes may claim a billion rows, and a flipped bit may
# break a text or an index.
MOST_COLUMNS = 1000  # an exported log has about 50; the work grows with their square
FREE_BYTES = 1 << 28  # a table of this size is read from any file
MOST_INFLATED = 200  # bytes of a larger table for each byte of the file; lengths, the best case of real ones, reach about 50
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
FEW_ROWS = 1024  # whose texts are decoded at a time to learn how many bytes they have
TEXT_BYTES = 16  # of a text in a column of texts, on average, as an estimate before they are read


# A seal: the SHA-256 of a file with zeros in the seal's place, among the metadata of a Parquet
# file's footer.
SEAL, ZEROS = b"simrl.sha256", b"0" * 64
_SEALED = re.compile(
    re.escape(SEAL) + rb"\x18\x40([0-9a-f]{64})"
)  # as Thrift writes a key and a value of 64 bytes
BROKEN_SEAL = "is damaged, or was changed after simrl wrote it"


def write_parquet(table: pa.Table, path: Path, key: bytes, metadata: BaseModel) -> None:
    """Write a table with `metadata` as JSON under `key` of its schema; the file appears only when
    it is whole."""
    with write_whole_file(path) as temporary:
        write_table(
            table.replace_schema_metadata({key: metadata.model_dump_json().encode()}), temporary
        )


def write_table(table: pa.Table, path: Path) -> str:
    """Write a table (zstd) with page checksums, for other readers, and return its seal."""
    with pq.ParquetWriter(
        path, table.schema, compression="zstd", write_page_checksum=True
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({SEAL: ZEROS})
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        place = _seal(path)
        assert place is not None
        file.seek(place[0])
        file.write(digest.encode())
    return digest


def seal_of(path: Path) -> str | None:
    """Return the seal of a Parquet file; None if it has none, or no footer."""
    return None if (seal := _seal(path)) is None else seal[1].decode()


def _seal(path: Path) -> tuple[int, bytes] | None:
    """Return the seal of a Parquet file and its place; None if it has none, or no footer."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 8, 0))
        start = size - 8 - int.from_bytes(file.read(4), "little")
        if file.read() != b"PAR1":  # no Parquet, or not whole
            return None
        file.seek(max(start, 0))
        seal = _SEALED.search(file.read())
    return None if seal is None else (max(start, 0) + seal.start(1), seal[1])


def _require_seal(path: Path) -> None:
    """Raise `InputError` for a Parquet file that is not what its seal says. One without a seal is
    somebody else's."""
    if (place_and_seal := _seal(path)) is None:
        return
    place, seal = place_and_seal
    digest = hashlib.sha256()
    with path.open("rb") as file:
        at = 0
        while block := file.read(1 << 20):
            low, high = max(place - at, 0), min(max(place + len(ZEROS) - at, 0), len(block))
            digest.update(
                block if low >= high else b"".join((block[:low], ZEROS[: high - low], block[high:]))
            )
            at += len(block)
    if digest.hexdigest().encode() != seal:
        raise InputError(
            f"{path}: {BROKEN_SEAL}; make it anew, or remove {SEAL.decode()} from its metadata"
        )


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data with its seal under `sha256`: the SHA-256 of the rest as JSON."""
    rest = json.loads(json.dumps({key: value for key, value in data.items() if key != "sha256"}))
    text = json.dumps(rest, sort_keys=True)
    return {**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def is_broken(data: Mapping[str, Any]) -> bool:
    """Return whether data has a seal, and is not what the seal says."""
    return "sha256" in data and data["sha256"] != sealed(data)["sha256"]


def parquet_metadata(
    table: pa.Table, path: Path, key: bytes, kind: type[M], remedy: str
) -> M | None:
    """Return the metadata that `write_parquet` wrote under `key`; None if there is none. Raises
    `InputError` with the field."""
    raw = (table.schema.metadata or {}).get(key)
    try:
        return None if raw is None else kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "(all)"
        raise InputError(f"{path}: metadata field {field}: {right(first)}; {remedy}") from error


def read_parquet(path: Path, columns: Collection[str] | None = None) -> pa.Table:
    """Return the table of a file, of these columns alone as far as it has them. Raises `InputError`
    for a file that is no Parquet, is damaged, has two columns of a name, or is far larger in memory
    than on disk."""
    require_no_device(path)
    try:
        _require_seal(path)
        with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            twice = sorted(name for name, times in Counter(names).items() if times > 1)
            if twice:
                raise InputError(f"{path}: two columns are called {twice[0]!r}; keep one")
            refuse(
                (
                    len(names) > MOST_COLUMNS,
                    f"{path}: {len(names):,} columns; at most {MOST_COLUMNS} are read: keep fewer",
                )
            )
            chosen = [name for name in names if columns is None or name in columns]
            _refuse_inflated(path, file, chosen)
            table = file.read(chosen)
        table.validate(full=True)
        plain = [
            _plain(table.column(i), f"{path}: column {name!r}") for i, name in enumerate(chosen)
        ]
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        if path.is_dir() or (path.is_file() and _first_bytes(path) not in (b"PAR1", b"")):
            kind = "a folder" if path.is_dir() else "no Parquet file"
            raise InputError(
                f"{path}: {kind}; `simrl trace import` makes a trace of CSV, JSON Lines or logs, `simrl profile derive` a "
                "profile"
            ) from error
        what = (
            error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        )
        raise InputError(f"{path}: cannot be read as Parquet ({what}); is it whole?") from error
    metadata = {key: value for key, value in (table.schema.metadata or {}).items() if key != SEAL}
    return pa.table(plain, names=chosen, metadata=metadata or None)


def _refuse_inflated(path: Path, file: pq.ParquetFile, columns: Sequence[str]) -> None:
    footer, most = file.metadata, max(FREE_BYTES, MOST_INFLATED * path.stat().st_size)
    size = footer.num_rows * footer.num_columns
    if size <= most:
        file.scan_contents()  # finds damage: asking the footer of a damaged file for its columns may end the process
        groups = map(footer.row_group, range(footer.num_row_groups))
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        read = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
        decoded = (chunk.num_values * WIDTHS.get(chunk.physical_type, TEXT_BYTES) for chunk in read)
        size = max(sum(decoded), sum(chunk.total_uncompressed_size for chunk in read))
    if size > most:
        raise InputError(
            f"{path}: says that it holds {footer.num_rows:,} rows, {size / 1e9:.1f} GB, in a file of "
            f"{path.stat().st_size / 1e6:.1f} MB; is it whole? Keep fewer rows"
        )
    for name in columns:
        if _has_bytes(file.schema_arrow.field(name).type):
            batches = file.iter_batches(FEW_ROWS, columns=[name])
            for size in accumulate(batch.get_total_buffer_size() for batch in batches):
                if size > FREE_BYTES:
                    raise InputError(
                        f"{path}: column {name!r} holds {size / 1e9:.1f} GB of texts or more; keep fewer rows"
                    )


def _has_bytes(kind: pa.DataType) -> bool:
    """Return whether a value of a type may be of any size, and is not in a dictionary."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return not (
        pa.types.is_primitive(kind) or pa.types.is_boolean(kind) or pa.types.is_dictionary(kind)
    )


def _plain(column: pa.ChunkedArray, place: str) -> pa.ChunkedArray:
    """Return a column without its dictionary. Raises `InputError` for texts that would fill the
    memory."""
    if not pa.types.is_dictionary(column.type):
        return column
    if _has_bytes(column.type.value_type):
        size = sum(
            pc.sum(pc.binary_length(c.dictionary).take(c.indices)).as_py() or 0
            for c in column.chunks
        )
        if size > FREE_BYTES:
            raise InputError(
                f"{place} holds {size / 1e9:.1f} GB of repeated texts; keep fewer rows"
            )
    return column.cast(column.type.value_type)


def is_count_like(kind: pa.DataType) -> bool:
    """Return whether values of a type may be read as numbers or texts: truth values, dates, times
    and bytes would be cast to numbers."""
    while pa.types.is_dictionary(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    types = pa.types
    odd = (
        types.is_boolean,
        types.is_temporal,
        types.is_binary,
        types.is_large_binary,
        types.is_fixed_size_binary,
    )
    return not any(is_odd(kind) for is_odd in odd)
