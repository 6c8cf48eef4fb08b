"""Predictions of published rows: each paper's rows, run for the middle and for a sample of its inputs' ranges.

Invariant: no outcome is read here: this module and the papers' modules do not import `score`. A set of inputs under which a
row cannot be simulated costs only this row and this set; a mistake of the author ends the prediction in one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

from experiments.reproduce import (
    areal,
    real_agent_opd,
    real_hf_async_lora,
    real_marin_async,
    real_nemo_rl,
    real_rlinf_verl,
    real_verl_fsdp,
    real_verl_v1,
    rhymerl,
    rollpacker,
    specactor,
    tlt,
    verl,
)
from experiments.reproduce.lab import GIVEN, Lab, Level
from experiments.reproduce.ledger import (
    PLACE,
    Asked,
    Inputs,
    MissingInputError,
    PaperError,
    read_ledger,
)
from simrl.errors import InputError, meant
from simrl.study.executors import Processes, each

# Those that take longest first: what is done last should end soon.
PAPERS: dict[str, ModuleType] = {
    "rhymerl": rhymerl,
    "specactor": specactor,
    "areal": areal,
    "tlt": tlt,
    "verl": verl,
    "rollpacker": rollpacker,
}
# Families of real runs, one setup of which may have several modes.
FAMILIES: dict[str, ModuleType] = {
    "real_agent_opd": real_agent_opd,
    "real_verl_fsdp": real_verl_fsdp,
    "real_nemo_rl": real_nemo_rl,
    "real_rlinf_verl": real_rlinf_verl,
    "real_verl_v1": real_verl_v1,
    "real_hf_async_lora": real_hf_async_lora,
    "real_marin_async": real_marin_async,
}


LEFT_OUT = -1


class Found(NamedTuple):
    """The elements of a row, or why there are none; the inputs that were asked for; and the levels of its runs."""

    elements: list[float] | InputError
    asked: frozenset[str]
    levels: tuple[Level, ...] = ()


class Task(NamedTuple):
    """Rows of one paper, under one set of its inputs."""

    paper: str
    rows: Mapping[str, int]  # how many elements each has; not which
    number: int  # of the set; 0 is the middle, LEFT_OUT the middle without what the rows gave
    inputs: Inputs


class Prediction(NamedTuple):
    """The elements of a row under each possible set of inputs, the middle first; empty if the middle is impossible. `refused`
    has the reasons of the other sets. `asked` are the inputs that any of them asked for. `left_out` are the elements of the
    task LEFT_OUT, if there is one. `levels` are the runs' at the middle."""

    elements: list[list[float]]
    inputs: list[Inputs]
    refused: list[str]
    asked: frozenset[str]
    left_out: list[float] | None = None
    levels: tuple[Level, ...] = ()


def paper_of(row: str) -> str | None:
    """Return the paper that predicts a row; None if none does."""
    return next((name for name, paper in PAPERS.items() if row in paper.ROWS), None)


def left_out() -> dict[str, str]:
    """Return the rows that a paper's module leaves out on purpose, and why."""
    return {
        row: why for paper in PAPERS.values() for row, why in getattr(paper, "LEFT_OUT", {}).items()
    }


def tasks(
    rows: Mapping[str, int],
    samples: int,
    papers: Mapping[str, ModuleType] | None = None,
    **given: str,
) -> list[Task]:
    """Return the tasks for these rows (each with its number of elements): the middle and `samples` points of each paper's
    ranges. `given` are inputs that no ledger has: the folder with logs of real runs."""
    found = []
    for name, paper in (PAPERS if papers is None else papers).items():
        wanted = {row: count for row, count in rows.items() if row in paper.ROWS}
        if wanted:
            sets = read_ledger(name).sample(samples)
            found += [Task(name, wanted, i, {**inputs, **given}) for i, inputs in enumerate(sets)]
    return found


def run(task: Task) -> dict[str, Found]:
    """Return the elements of a task's rows."""
    lab, found = Lab(), {}
    for row, count in task.rows.items():
        try:
            rows = {**FAMILIES, **PAPERS}[task.paper].ROWS
            found[row] = _elements(rows[row], lab, task.inputs, count)
        except MissingInputError as error:
            (name,) = error.args
            raise PaperError(
                f"{PLACE}/{task.paper}.py: row {row} asks for the input {name!r}, which {PLACE}/ledgers/{task.paper}.yaml "
                f"does not have{meant(name, task.inputs)}; add it there"
            ) from error
        except PaperError as error:
            raise PaperError(f"{PLACE}/{task.paper}.py: row {row}: {error}") from error
    return found


def _elements(
    row: Callable[[Lab, Inputs], list[float]], lab: Lab, inputs: Inputs, count: int
) -> Found:
    asked = Asked(inputs, set())
    lab.levels.clear()
    try:
        returned = row(lab, asked)
        if len(returned) != count:
            raise PaperError(
                f"returns a list of {len(returned)}, and {count} elements of it are published; return one for each, GIVEN for "
                "one that is an input"
            )
        found = [float(value) for value in returned]
        if any(not math.isfinite(value) and value is not GIVEN for value in found):
            raise InputError(f"the simulation gives no number for it: {', '.join(map(str, found))}")
    except PaperError:
        raise
    except InputError as error:
        return Found(error, frozenset(asked.names))
    return Found(found, frozenset(asked.names), tuple(lab.levels.values()))


def predict(
    todo: Sequence[Task], jobs: int, on_task: Callable[[], None] = lambda: None
) -> dict[str, Prediction]:
    """Run all tasks in up to `jobs` processes, whose number changes nothing. Raise `StoppedError` if a process is killed."""
    done: dict[int, dict[str, Found]] = {}
    with Processes(jobs, stay=True) as pool:
        for i, found in each(run, todo, pool if min(jobs, len(todo)) > 1 else None):
            done[i] = found
            on_task()
    return {
        row: _prediction(row, [(t, done[i][row]) for i, t in enumerate(todo) if row in t.rows])
        for task in todo
        for row in task.rows
    }


def _prediction(row: str, all_found: Sequence[tuple[Task, Found]]) -> Prediction:
    found = [(task, outcome) for task, outcome in all_found if task.number != LEFT_OUT]
    left_out = None
    for _, outcome in (pair for pair in all_found if pair[0].number == LEFT_OUT):
        if isinstance(outcome.elements, InputError):
            raise PaperError(f"row {row}, its constants left out: {outcome.elements}")
        left_out = outcome.elements
    refused = [
        str(outcome.elements) for _, outcome in found if isinstance(outcome.elements, InputError)
    ]
    can_be = [
        (task, outcome.elements)
        for task, outcome in found
        if not isinstance(outcome.elements, InputError)
    ]
    if not can_be or can_be[0][0].number != 0:
        can_be = []
    asked = frozenset[str]().union(*(outcome.asked for _, outcome in found))
    return Prediction(
        [elements for _, elements in can_be],
        [task.inputs for task, _ in can_be],
        refused,
        asked,
        left_out,
        all_found[0][1].levels if can_be else (),
    )


def drivers(
    paper: str, samples: Sequence[Inputs], values: Sequence[float], asked: frozenset[str]
) -> list[tuple[str, float]]:
    """Return the open inputs that a row asks for, by their rank correlation with its value over the sample, the strongest
    first. Other inputs correlate only by chance."""
    from scipy.stats import spearmanr

    ledger = read_ledger(paper)
    found = []
    for name in (name for name in ledger.open if name in asked):
        drawn = [inputs[name] for inputs in samples]
        places = (
            [sorted(set(map(str, drawn))).index(str(x)) for x in drawn]
            if isinstance(drawn[0], str)
            else drawn
        )
        if len(set(places)) > 1 and len(set(values)) > 1:
            found.append((name, float(spearmanr(places, values).statistic)))
    return sorted(found, key=lambda pair: -abs(pair[1]))
