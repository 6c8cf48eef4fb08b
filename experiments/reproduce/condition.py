"""Conditioning: draws of a paper's inputs, of which those are kept whose baseline agrees with what the paper says of it.

Invariant: no outcome is read here. Tolerances and the rule that widens them are fixed; they see misfits of the baseline alone.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from experiments.reproduce.lab import Lab
from experiments.reproduce.ledger import PaperError, read_ledger
from experiments.reproduce.predict import PAPERS, Task, run
from simrl.errors import InputError
from simrl.files import write_table, write_whole_file
from simrl.study.code_digest import code_digest, source_digest
from simrl.study.executors import Processes, each

LEAST_KEPT = 24
LEAST_SHARE_ALONE = 0.1  # of the draws that a descriptor has to leave by itself
WIDER = 1.25  # by which tolerances are multiplied until enough draws are kept
SAVE_EVERY_S = 20.0

Row = tuple[
    str, int, str, float
]  # paper, draw, name, value: of a descriptor, or ROW/ELEMENT that is predicted


class Kept(NamedTuple):
    """The draws whose baseline agrees, in their order, and by how much each descriptor's tolerance had to be widened."""

    draws: list[int]
    factors: dict[str, float]


class Draws(NamedTuple):
    """The table of draws: its rows, and by what and in how many seconds of one core it was made."""

    values: dict[tuple[str, int, str], float]
    made_by: dict[str, str]
    seconds: float

    def of(self, paper: str) -> list[int]:
        """Return the draws of a paper whose baseline was run."""
        names = set(read_ledger(paper).descriptors)
        return sorted({draw for of, draw, name in self.values if of == paper and name in names})


def conditioned() -> list[str]:
    """Return the papers whose ledgers describe a baseline. Raise `PaperError` for a descriptor that no run answers."""
    found = []
    for paper, module in PAPERS.items():
        descriptors, answers = read_ledger(paper).descriptors, getattr(module, "BASELINE", {})
        for name in {*descriptors} ^ {*answers}:
            where = f"ledgers/{paper}.yaml" if name in answers else f"{paper}.py"
            raise PaperError(
                f"experiments/reproduce/{where}: {name} is a descriptor in one of ledger and BASELINE; name it in both"
            )
        if descriptors:
            found.append(paper)
    return found


def describe(task: Task) -> tuple[float, dict[str, float]]:
    """Return the seconds it took, and for each descriptor what the baseline's run has; nan if it cannot be."""
    started_s, module = time.process_time(), PAPERS[task.paper]
    lab, found = Lab(getattr(module, "MORE", None)), {}
    for name, answer in module.BASELINE.items():
        try:
            (found[name],) = map(float, answer(lab, task.inputs))
        except PaperError:
            raise
        except InputError:
            found[name] = math.nan
    return time.process_time() - started_s, found


def elements(task: Task) -> tuple[float, dict[str, float]]:
    """Return the seconds it took, and each element of the task's rows, by ROW/ELEMENT; nan for rows that cannot be."""
    started_s, found = time.process_time(), dict[str, float]()
    for row, outcome in run(task).items():
        values = (
            [math.nan] * task.rows[row]
            if isinstance(outcome.elements, InputError)
            else outcome.elements
        )
        found |= {f"{row}/{i}": value for i, value in enumerate(values, start=1)}
    return time.process_time() - started_s, found


def keep(paper: str, values: Mapping[tuple[str, int, str], float], draws: Sequence[int]) -> Kept:
    """Return the draws that agree with all descriptors in use; what cannot be simulated agrees with none."""
    used = {name: of for name, of in read_ledger(paper).descriptors.items() if not of.unused}
    misfits = np.array(
        [[used[name].misfit(values[paper, draw, name]) for name in used] for draw in draws]
    )
    misfits = np.where(np.isnan(misfits), np.inf, misfits).reshape(len(draws), len(used))
    wanted = min(LEAST_KEPT, int(np.isfinite(misfits).all(axis=1).sum()))
    alone = max(wanted, LEAST_SHARE_ALONE * len(draws))
    factors = np.array([_factor(column, alone) for column in misfits.T])
    worst = (misfits / factors).max(axis=1).tolist()
    joint = _factor(np.array(worst), wanted)
    kept = [draw for draw, misfit in zip(draws, worst, strict=True) if misfit <= joint]
    return Kept(
        kept, {name: float(factor) * joint for name, factor in zip(used, factors, strict=True)}
    )


def _factor(misfits: NDArray[np.float64], wanted: float) -> float:
    """Return the least power of `WIDER` within which as many misfits lie as are wanted, or all finite ones."""
    finite = np.sort(misfits[np.isfinite(misfits)])
    if not len(finite) or not wanted:
        return 1.0
    needed = finite[min(math.ceil(wanted), len(finite)) - 1]
    return (
        float(WIDER ** max(math.ceil(math.log(needed) / math.log(WIDER) - 1e-9), 0))
        if needed > 1
        else 1.0
    )


def digests() -> dict[str, str]:
    """Return a digest of all code that makes the table, and one of each ledger."""
    folder = files("experiments.reproduce")
    names = sorted({*conditioned(), "lab", "ledger"})
    code = [code_digest(), *(source_digest((folder / f"{name}.py").read_bytes()) for name in names)]
    texts = {paper: (folder / "ledgers" / f"{paper}.yaml").read_bytes() for paper in conditioned()}
    return {
        "code": _short("".join(code).encode()),
        **{paper: _short(text) for paper, text in texts.items()},
    }


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def stale(draws: Draws) -> str | None:
    """Return in one line what has changed since the table was made; None if nothing has."""
    now = digests()
    changed = [
        name if name == "code" else f"ledgers/{name}.yaml"
        for name in now
        if draws.made_by.get(name) != now[name]
    ]
    return (
        f"{', '.join(changed)} changed since the draws were made; make them anew with --anew"
        if changed
        else None
    )


def read_draws(path: Path) -> Draws:
    """Return the table; an empty one if there is none."""
    if not path.exists():
        return Draws({}, digests(), 0.0)
    table = pq.read_table(path)
    known = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    rows = zip(
        *(table.column(name).to_pylist() for name in ("paper", "draw", "name", "value")),
        strict=True,
    )
    return Draws({row[:3]: row[3] for row in rows}, known, float(known.pop("seconds", "0")))


def write_draws(draws: Draws, path: Path) -> None:
    """Write the table, in the order of papers, draws and names."""
    papers, numbers, names = (
        zip(*sorted(draws.values), strict=True) if draws.values else ((), (), ())
    )
    columns = {
        "paper": pa.array(papers, pa.string()),
        "draw": pa.array(numbers, pa.int16()),
        "name": pa.array(names, pa.string()),
        "value": pa.array(
            [float(f"{draws.values[key]:.6g}") for key in sorted(draws.values)], pa.float32()
        ),
    }
    table = pa.table(columns).replace_schema_metadata(
        {**draws.made_by, "seconds": f"{draws.seconds:.0f}"}
    )
    with write_whole_file(path) as temporary:
        write_table(table, temporary)


def extend(
    draws: Draws,
    todo: Sequence[Task],
    work: Callable[[Task], tuple[float, dict[str, float]]],
    jobs: int,
    until: float = math.inf,
) -> Generator[Draws, None, None]:
    """Do the tasks, and yield the table with what is there, from time to time and at the end. What is not done at `until`
    (`time.monotonic`) is left out."""
    values, seconds, saved_s = dict(draws.values), draws.seconds, time.monotonic()
    with (
        Processes(jobs, stay=True) as pool,
        closing(each(work, todo, pool if jobs > 1 else None)) as results,
    ):
        for i, (took_s, found) in results:
            seconds += took_s
            values |= {
                (todo[i].paper, todo[i].number, name): value for name, value in found.items()
            }
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                saved_s = time.monotonic()
                yield Draws(dict(values), draws.made_by, seconds)
            if time.monotonic() > until:
                break
    yield Draws(values, draws.made_by, seconds)
