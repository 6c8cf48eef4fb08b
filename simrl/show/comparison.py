"""The folder of a comparison: a folder of results a run, their pictures, and one table of all.

Invariant: the folder appears, or is replaced, only when every scenario has succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from simrl.files import write_whole_folder
from simrl.result.result import Result
from simrl.result.timeline import steady_window
from simrl.scenario.model import Scenario
from simrl.show.figures.compare import comparison_figure
from simrl.show.figures.timeline import timeline_figure
from simrl.show.perfetto import write_perfetto
from simrl.show.style import save
from simrl.simulate.cache import InputCache
from simrl.study.compare import ALONE, Beside, Compared, folder_name, simulate_compared
from simrl.study.store import write_json

MANIFEST = "files.txt"


def compare_scenarios(
    scenarios: Sequence[Scenario],
    folder: Path,
    jobs: int,
    inputs: InputCache | None = None,
    beside: Beside = ALONE,
) -> Compared[None]:
    """Simulate all scenarios, and what stands beside them, write `folder`, and return them with a
    row of each.

    Raises `InputError` for a scenario that cannot be executed, `StoppedError` if a process that
    simulates is killed.
    """
    with write_whole_folder(folder, MANIFEST) as temporary:
        compared = simulate_compared(
            scenarios, jobs, inputs or InputCache(), partial(_write_run, folder=temporary), beside
        )
        _write_summary(compared.rows, compared.scenarios, temporary)
    return compared


def write_comparison(
    rows: Sequence[Mapping[str, Any]],
    scenarios: Sequence[Scenario],
    results: Sequence[Result],
    folder: Path,
) -> None:
    """Write the folder of `compare_scenarios` from rows and results that were simulated before."""
    with write_whole_folder(folder, MANIFEST) as temporary:
        for scenario, result in zip(scenarios, results, strict=True):
            _write_run(scenario, result, temporary)
        _write_summary(rows, scenarios, temporary)


def _write_run(scenario: Scenario, result: Result, folder: Path) -> None:
    """Write a run into its folder in `folder`."""
    own = folder / folder_name(scenario)
    own.mkdir()
    result.write(own)
    save(timeline_figure(result, steady_window(result)), own / "timeline.png")
    write_perfetto(result, own / "perfetto.json")


def _write_summary(
    rows: Sequence[Mapping[str, Any]], scenarios: Sequence[Scenario], folder: Path
) -> None:
    """Write the files that describe the whole comparison."""
    for name, data in (
        ("comparison", rows),
        ("scenario", [scenario.model_dump() for scenario in scenarios]),
    ):
        write_json(folder / f"{name}.json", data)
    save(comparison_figure(rows), folder / "comparison.png")
