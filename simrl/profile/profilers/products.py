"""Matrix products of a database of kernels without the slow occasions on which some were measured.

Tables have two levels: at random numbers of rows, 10 % (A100) to 18 % (H100) apart, in 67 to 15 %
of the rows; another measurement of the same products has them at other numbers. Two tables of one
GPU agree twice as well without the upper level (`experiments/validate_profiles.md`). An engine can
pad a product to more rows, so the invariant is: none takes longer than one of more rows.
"""

import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.parquet as pq

SHAPE = ("gemm_dtype", "n", "k")  # columns that name a product, beside its rows `m`


def even_products(package: ModuleType, system: str, backend: str, folder: Path) -> Path:
    """Return a copy, in `folder`, of the folder `systems` of a database's package with one system,
    in which no matrix product takes longer than one of more rows."""
    systems = Path(str(package.__file__)).with_name("systems")
    others = {path.name for path in (systems / "data").iterdir()} - {system}
    copy = Path(shutil.copytree(systems, folder / "s", ignore=lambda *_: others))
    for path in (copy / "data" / system / "gemm" / backend).glob("*/gemm_perf.parquet"):
        table = pq.read_table(path).sort_by([(key, "ascending") for key in (*SHAPE, "m")])
        codes = [table[key].combine_chunks().dictionary_encode().indices for key in SHAPE]
        begins = np.flatnonzero(np.any([np.diff(each) for each in codes], axis=0)) + 1
        products = np.split(table["latency"].to_numpy(), begins)
        even = np.concatenate([np.minimum.accumulate(each[::-1])[::-1] for each in products])
        pq.write_table(table.drop_columns("latency").append_column("latency", [even]), path)
    return copy
