"""Comparison: several scenarios simulated side by side, one folder of results, one table.

Invariant: the output folder appears, or is replaced, only when every scenario has succeeded, and nothing is simulated before
all of them are found to be possible. Rows come in the order of the scenarios, whichever finished first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn

from simrl.errors import InputError, StoppedError
from simrl.files import write_whole_folder
from simrl.interrupts import ctrl_c_ignored, ctrl_c_waits
from simrl.metrics import summary
from simrl.perfetto import write_perfetto
from simrl.plots import plot_comparison, plot_timeline
from simrl.processes import main_left_alone
from simrl.result import Result
from simrl.scenario import Scenario
from simrl.simulate import Inputs, compile_engine, compile_training, prepare, simulate, simulate_prepared

MANIFEST = "files.txt"
T = TypeVar("T")
OnStep = Callable[[int], None]  # hears of each policy update
Task = Callable[[Scenario, OnStep | None], T]
LONGEST_NAME = 100  # of a run's folder; file systems take 255 bytes


def compare_scenarios(scenarios: Sequence[Scenario], folder: Path, jobs: int) -> list[dict[str, Any]]:
    """Simulates all, writes `folder`, returns a row a scenario (`comparison_rows`).

    Raises `InputError` for a scenario that cannot be, `StoppedError` if a process that simulates is killed.
    """
    names = _checked(scenarios, Inputs())
    with write_whole_folder(folder, MANIFEST) as temporary:
        tasks = [partial(_simulate_and_write, folder=temporary / name) for name in names]
        rows = _with_speedups(_simulate_all(scenarios, names, tasks, jobs), names)
        _write_summary(rows, scenarios, temporary)
    return rows


def simulate_scenarios(scenarios: Sequence[Scenario], jobs: int, inputs: Inputs) -> list[Result]:
    """Simulates all and writes nothing. `inputs` go to the processes that simulate. Raises as `compare_scenarios` does."""
    names = _checked(scenarios, inputs)
    tasks = [partial(_simulate_with, inputs=inputs)] * len(names)
    return _simulate_all(scenarios, names, tasks, jobs)


def comparison_rows(scenarios: Sequence[Scenario], results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row a scenario: `simrl.metrics.summary`, the speed-ups, and the name of its folder.

    `speedup` is samples/s over the first row's; `speedup_in_variant` over the first row with the same variant (cluster).
    """
    rows = [_summary(scenario, result) for scenario, result in zip(scenarios, results, strict=True)]
    return _with_speedups(rows, [folder_name(scenario) for scenario in scenarios])


def write_comparison(
    scenarios: Sequence[Scenario], results: Sequence[Result], rows: Sequence[dict[str, Any]], folder: Path
) -> None:
    """Writes the folder that `compare_scenarios` would have written, of what was simulated before."""
    with write_whole_folder(folder, MANIFEST) as temporary:
        for row, result in zip(rows, results, strict=True):
            _write_run(result, temporary / row["folder"])
        _write_summary(rows, scenarios, temporary)


def _checked(scenarios: Sequence[Scenario], inputs: Inputs) -> list[str]:
    """The folders of their runs, once all are found to be possible."""
    names = [folder_name(scenario) for scenario in scenarios]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InputError(f"{scenarios[i].file}: two runs are called {name}; leave one out")
    with progress_bar() as progress:
        for scenario in progress.track(scenarios, description="checking"):
            _check(scenario, inputs)
    return names


def _with_speedups(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    first_in: dict[str, float] = {}
    for row in rows:
        first_in.setdefault(row["variant"], row["samples_per_s"])
    return [
        {
            **row,
            "speedup": row["samples_per_s"] / rows[0]["samples_per_s"],
            "speedup_in_variant": row["samples_per_s"] / first_in[row["variant"]],
            "folder": name,
        }
        for row, name in zip(rows, names, strict=True)
    ]


def _write_summary(rows: Sequence[dict[str, Any]], scenarios: Sequence[Scenario], folder: Path) -> None:
    """What is of all runs."""
    _write_json(folder / "comparison.json", rows)
    _write_json(folder / "scenario.json", [scenario.model_dump() for scenario in scenarios])
    plot_comparison(rows, folder / "comparison.png")


def folder_name(scenario: Scenario) -> str:
    """The run's folder: its variant, system and parameters in characters that every file system takes."""
    parameters = [f"{key}-{value}" for key, value in scenario.system.parameters.items()]
    text = "-".join([*scenario.variant.split(", "), scenario.system.name, *parameters])
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def run_names(scenarios: Sequence[Scenario]) -> str:
    """The runs as a message lists them: their systems, and of runs of one system what they differ in."""
    systems = [scenario.system.name for scenario in scenarios]
    found = []
    for scenario in scenarios:
        same = [s for s in scenarios if s.system.name == scenario.system.name]
        differs = [
            f"{key}={value['name'] if isinstance(value, Mapping) and 'name' in value else value}"
            for key, value in scenario.system.parameters.items()
            if any(s.system.parameters.get(key) != value for s in same)
        ]
        said = ", ".join([*differs, *([scenario.variant] if scenario.variant and len(same) > 1 else [])])
        found.append(f"{scenario.system.name} with {said}" if said else scenario.system.name)
    return (", " if len(set(systems)) == len(systems) else "; ").join(found)


def _check(scenario: Scenario, inputs: Inputs) -> None:
    try:
        prepare(scenario, inputs)
    except InputError as error:
        run = ", ".join(part for part in (scenario.system.name, scenario.variant) if part)
        raise InputError(f"{scenario.file} ({run}): {error}") from error


def _simulate_all(scenarios: Sequence[Scenario], names: Sequence[str], tasks: Sequence[Task[T]], jobs: int) -> list[T]:
    """What each task makes of its scenario."""
    if min(jobs, len(scenarios)) > 1:
        return _simulate_in_processes(scenarios, tasks, jobs)
    return _simulate_here(scenarios, names, tasks)


def _simulate_here(scenarios: Sequence[Scenario], names: Sequence[str], tasks: Sequence[Task[T]]) -> list[T]:
    """One after the other, in this process."""
    made = []
    compile_kernels()
    with progress_bar() as progress:
        for i, (scenario, name, task) in enumerate(zip(scenarios, names, tasks, strict=True)):
            bar = progress.add_task(f"{i + 1}/{len(names)} {name}: updates", total=scenario.steps)
            made.append(task(scenario, partial(_advance, progress, bar)))
            progress.remove_task(bar)
    return made


def _advance(progress: Progress, task: TaskID, step: int) -> None:
    progress.update(task, completed=step + 1)


def _simulate_in_processes(scenarios: Sequence[Scenario], tasks: Sequence[Task[T]], jobs: int) -> list[T]:
    """By as many processes as `jobs` says. Whatever goes wrong in one, or Ctrl-C, ends them all."""
    processes = min(jobs, len(scenarios))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            with ctrl_c_ignored(), main_left_alone():  # a process starts when work is submitted
                started = [pool.submit(compile_training) for _ in range(processes)]
            compile_kernels()  # once here, while the processes start, and not in each of them
            for start in started:
                start.result()
            # The most GPUs first: they take longest, and what starts last should end soon.
            order = sorted(range(len(scenarios)), key=lambda i: -scenarios[i].cluster.gpus)
            futures = {i: pool.submit(tasks[i], scenarios[i], None) for i in order}
            with progress_bar() as progress:
                bar = progress.add_task("runs simulated", total=len(scenarios))
                for future in as_completed(futures.values()):
                    future.result()
                    progress.advance(bar)
            return [futures[i].result() for i in range(len(scenarios))]
        except BaseException as error:
            with ctrl_c_ignored():
                for process in list((pool._processes or {}).values()):
                    process.kill()
                pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise StoppedError(
                    "a process that simulates was killed, perhaps for want of memory; nothing was written; try fewer --jobs"
                ) from error
            raise


def _simulate_with(scenario: Scenario, on_step: OnStep | None, inputs: Inputs) -> Result:
    return simulate_prepared(prepare(scenario, inputs), on_step)


def _simulate_and_write(scenario: Scenario, on_step: OnStep | None, folder: Path) -> dict[str, Any]:
    """One scenario, simulated, drawn and written into its own folder. Returns its summary."""
    result = simulate(scenario, on_step)
    _write_run(result, folder)
    return _summary(scenario, result)


def _write_run(result: Result, folder: Path) -> None:
    folder.mkdir()
    result.write(folder)
    plot_timeline(result, folder / "timeline.png")
    write_perfetto(result, folder / "perfetto.json")


def _summary(scenario: Scenario, result: Result) -> dict[str, Any]:
    return summary(result, scenario.warmup_steps, scenario.cluster.cost_per_gpu_hour)


def compile_kernels() -> None:
    """All that a simulation runs compiled, or loaded where this machine has it compiled before."""
    with progress_bar() as progress, ctrl_c_waits():
        task = progress.add_task("compiling, once on this machine", total=1)
        compile_engine()
        progress.advance(task)


def progress_bar(*more: ProgressColumn, speed_over_s: float = 30.0) -> Progress:
    """A bar on stderr while it is a terminal, gone when it is done. A time left, if one of the columns, is told from the speed
    of the last `speed_over_s` seconds."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(
        *columns,
        *more,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=speed_over_s,
    )


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
