"""Matrix products of a database of kernels without the slow occasions on which some were measured.

Tables have two levels: at random numbers of rows, 10 % (A100) to 18 % (H100) apart, in 67 to 15 %
of the rows; another measurement of the same products has them at other numbers. Two tables of one
GPU agree twice as well without the upper level (`experiments/validate_profiles.md`). An engine can
pad a product to more rows, so the invariant is: none takes longer than one of more rows.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SHAPE = ("gemm_dtype", "n", "k")  # columns that name a product, beside its rows `m`


def even_products(systems: Path, system: str, backend: str, folder: Path) -> Path:
    """Return a copy in `folder` of a database's `systems`, of which it has one, with even
    products."""
    others = {path.name for path in (systems / "data").iterdir()} - {system}
    copy = folder / "systems"
    shutil.copytree(
        systems, copy, ignore=lambda at, names: others if Path(at) == systems / "data" else ()
    )
    for path in (copy / "data" / system / "gemm" / backend).glob("*/gemm_perf.parquet"):
        pq.write_table(_evened(pq.read_table(path)), path)
    return copy


def _evened(table: pa.Table) -> pa.Table:
    """Return a table in which no product takes longer than one of more rows."""
    table = table.sort_by([(column, "ascending") for column in (*SHAPE, "m")])
    changes = np.zeros(max(table.num_rows - 1, 0), bool)
    for column in SHAPE:
        values = table[column].combine_chunks().dictionary_encode().indices.to_numpy()
        changes |= values[1:] != values[:-1]
    seconds = np.split(table["latency"].to_numpy(), np.flatnonzero(changes) + 1)
    even = np.concatenate([np.minimum.accumulate(part[::-1])[::-1] for part in seconds])
    return table.set_column(table.column_names.index("latency"), "latency", pa.array(even))
