"""Parquet that somebody else may have written: read whole and checked, or refused in one line.

Invariant: a table that comes back is what its file lets expect. Arrow takes a file at its word, so a few kilobytes may say that
they are a billion rows, and a flipped bit may make a text that is none or an index beyond its dictionary: the first is found
before anything is allocated, from the footer; the second by looking at every value.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from simrl.errors import InputError, first_line

FREE_BYTES = 1 << 28  # a table of so many is read, whatever its file has
MOST_INFLATED = 200  # beyond, times the bytes of the file: lengths, the best case of real ones, come to some 50
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
TEXT_BYTES = 16  # of a text in a column of texts: where it stands, and a little of it


def read_parquet(path: Path) -> pa.Table:
    """The table of a file, its columns of texts as dictionaries. Raises `InputError` for what is no Parquet, is damaged, has
    two columns of a name, or is far larger than its file."""
    try:
        with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            _refuse_inflated(path, file)
        names = schema.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"{path}: two columns are called {twice[0]!r}; keep one")
        texts = [
            field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        ]
        with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True, read_dictionary=texts) as file:
            table = file.read()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise InputError(f"{path}: cannot be read as Parquet ({what}); is it whole?") from error
    return table


def decoded(column: pa.ChunkedArray, place: str) -> pa.ChunkedArray:
    """A column of texts without its dictionary. Raises `InputError` where that would make a huge one."""
    if not pa.types.is_dictionary(column.type):
        return column
    size = 0
    for chunk in column.chunks:
        if pa.types.is_string(chunk.type.value_type) or pa.types.is_large_string(chunk.type.value_type):
            lengths = pc.binary_length(chunk.dictionary)
            size += pc.sum(lengths.take(chunk.indices)).as_py() or 0
    if size > FREE_BYTES:
        raise InputError(f"{place} holds {size / 1e9:.1f} GB of texts, most of them the same; keep fewer rows")
    return column.cast(column.type.value_type)


def _refuse_inflated(path: Path, file: pq.ParquetFile) -> None:
    footer, most = file.metadata, max(FREE_BYTES, MOST_INFLATED * path.stat().st_size)
    size = footer.num_rows * footer.num_columns
    if size <= most:
        file.scan_contents()  # finds what is damaged: to ask the footer for its columns without that may end the process
        groups = map(footer.row_group, range(footer.num_row_groups))
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        size = sum(chunk.num_values * WIDTHS.get(chunk.physical_type, TEXT_BYTES) for chunk in chunks)
    if size > most:
        raise InputError(
            f"{path}: says that it holds {footer.num_rows:,} rows, {size / 1e9:.1f} GB, in a file of "
            f"{path.stat().st_size / 1e6:.1f} MB; is it whole? Keep fewer rows"
        )
