"""Predictions of published rows: each paper's rows, run for the middle and for a sample of its inputs' ranges.

Invariant: nothing here has seen an outcome: this module and those of the papers do not import `score`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from types import ModuleType
from typing import NamedTuple

from simrl.interrupts import ctrl_c_ignored
from simrl.published import areal, rhymerl, rollpacker, specactor, verl
from simrl.published.lab import Lab
from simrl.published.ledger import Inputs, read_ledger

PAPERS: dict[str, ModuleType] = {
    "areal": areal,
    "rhymerl": rhymerl,
    "rollpacker": rollpacker,
    "specactor": specactor,
    "verl": verl,
}
Predicted = dict[str, list[list[float]]]  # by row, for each set of inputs: the elements


class Task(NamedTuple):
    """Rows of one paper, under one set of its inputs."""

    paper: str
    rows: tuple[str, ...]
    number: int  # of the set; 0 is the middle
    inputs: Inputs


def paper_of(row: str) -> str | None:
    """The paper that predicts a row; None if none does."""
    return next((name for name, paper in PAPERS.items() if row in paper.ROWS), None)


def tasks(rows: Sequence[str], samples: int) -> list[Task]:
    """What is to be run for these rows: the middle and `samples` points of each paper's ranges."""
    found = []
    for name, paper in PAPERS.items():
        wanted = tuple(row for row in rows if row in paper.ROWS)
        if wanted:
            found += [Task(name, wanted, i, inputs) for i, inputs in enumerate(read_ledger(name).sample(samples))]
    return found


def run(task: Task) -> dict[str, list[float]]:
    """The elements of a task's rows."""
    lab = Lab()
    return {row: PAPERS[task.paper].ROWS[row](lab, task.inputs) for row in task.rows}


def predict(todo: Sequence[Task], jobs: int, on_task: Callable[[], None] = lambda: None) -> Predicted:
    """All tasks, by as many processes; the same whatever their number. Raises what a task raises."""
    done: dict[tuple[str, int], dict[str, list[float]]] = {}
    for task, found in _outcomes(todo, jobs):
        done[task.paper, task.number] = found
        on_task()
    return {row: [done[t.paper, t.number][row] for t in todo if row in t.rows] for t in todo for row in t.rows}


def _outcomes(todo: Sequence[Task], jobs: int) -> Iterator[tuple[Task, dict[str, list[float]]]]:
    if min(jobs, len(todo)) <= 1:
        yield from ((task, run(task)) for task in todo)
        return
    with ProcessPoolExecutor(min(jobs, len(todo)), get_context("spawn")) as pool:
        try:
            with ctrl_c_ignored():  # a process starts when work is submitted
                futures = {pool.submit(run, task): task for task in todo}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            with ctrl_c_ignored():
                for process in list((pool._processes or {}).values()):
                    process.kill()
                pool.shutdown(wait=True, cancel_futures=True)
            raise


def drivers(paper: str, samples: Sequence[Inputs], values: Sequence[float]) -> list[tuple[str, float]]:
    """The open inputs by how much they move a value: the rank correlation over the sample, the strongest first."""
    from scipy.stats import spearmanr

    ledger = read_ledger(paper)
    found = []
    for name in ledger.open:
        drawn = [inputs[name] for inputs in samples]
        places = [sorted(set(map(str, drawn))).index(str(x)) for x in drawn] if isinstance(drawn[0], str) else drawn
        if len(set(places)) > 1 and len(set(values)) > 1:
            found.append((name, float(spearmanr(places, values).statistic)))
    return sorted(found, key=lambda pair: -abs(pair[1]))
