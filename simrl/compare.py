"""Comparison: several scenarios simulated side by side, one folder of results, one table.

Invariant: the output folder appears, or is replaced, only when every scenario has succeeded. Rows come in the order of the
scenarios, whichever finished first.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from simrl.errors import InputError
from simrl.files import write_whole_folder
from simrl.scenario import Scenario

MARKER = "scenario.json"


def compare_scenarios(scenarios: Sequence[Scenario], folder: Path, jobs: int) -> list[dict[str, Any]]:
    """Simulates all, writes `folder`, returns a row a scenario (`simrl.metrics.summary` and the speed-ups).

    `speedup` is samples/s over the first row's; `speedup_in_variant` over the first row with the same variant (cluster).
    """
    names = [folder_name(scenario) for scenario in scenarios]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{scenarios[0].name}: two runs are called {twice}; leave one out")
    with write_whole_folder(folder, MARKER) as temporary:
        work = [(scenario, temporary / name) for scenario, name in zip(scenarios, names, strict=True)]
        rows = _simulate_all(work, min(jobs, len(work)))
        first_in: dict[str, float] = {}
        for row, name in zip(rows, names, strict=True):
            first = first_in.setdefault(row["variant"], row["samples_per_s"])
            row["speedup"] = row["samples_per_s"] / rows[0]["samples_per_s"]
            row["speedup_in_variant"] = row["samples_per_s"] / first
            row["folder"] = name
        (temporary / "comparison.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        resolved = [scenario.model_dump() for scenario in scenarios]
        (temporary / MARKER).write_text(json.dumps(resolved, indent=1, ensure_ascii=False) + "\n")
        from simrl.plots import plot_comparison

        plot_comparison(rows, temporary / "comparison.png")
    return rows


def folder_name(scenario: Scenario) -> str:
    """The run's folder: its variant, system and parameters in characters that every file system takes."""
    parameters = [f"{key}-{value}" for key, value in scenario.system.parameters.items()]
    text = "_".join([*re.split(r", ", scenario.variant), scenario.system.name, *parameters]).strip("_")
    return re.sub(r"[^A-Za-z0-9.]+", "-", text.replace("_", "-")).strip("-")


def _simulate_all(work: list[tuple[Scenario, Path]], jobs: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any] | None] = [None] * len(work)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("simulating", total=len(work))
        if jobs == 1:
            for i, (scenario, folder) in enumerate(work):
                progress.update(task, description=folder.name)
                rows[i] = _simulate_one(scenario, folder)
                progress.advance(task)
        else:
            with ProcessPoolExecutor(
                jobs, mp_context=get_context("spawn"), initializer=_leave_ctrl_c_to_parent
            ) as pool:
                futures: dict[Future[dict[str, Any]], int] = {
                    pool.submit(_simulate_one, *w): i for i, w in enumerate(work)
                }
                try:
                    for future in as_completed(futures):
                        rows[futures[future]] = future.result()
                        progress.advance(task)
                except BaseException:
                    for process in list((pool._processes or {}).values()):
                        process.terminate()
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
    return [row for row in rows if row is not None]


def _leave_ctrl_c_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _simulate_one(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """One scenario, simulated, drawn and written into its own folder."""
    from simrl.metrics import summary
    from simrl.perfetto import write_perfetto
    from simrl.plots import plot_timeline
    from simrl.simulate import simulate

    result = simulate(scenario)
    folder.mkdir()
    result.write(folder)
    plot_timeline(result, folder / "timeline.png")
    write_perfetto(result, folder / "perfetto.json")
    return summary(result, scenario.warmup_steps, scenario.cluster.cost_per_gpu_hour)


def print_comparison(rows: Sequence[dict[str, Any]], scenarios: Sequence[Scenario], folder: Path) -> None:
    """The table on the screen, what it rests on, and where the files are."""
    first, console = scenarios[0], Console()
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    priced = rows[0]["cost_per_1k_samples"] is not None
    table = Table(
        title=f"{first.name}: {first.model}, steps {first.warmup_steps + 1} to {first.steps}", title_justify="left"
    )
    table.add_column("system", no_wrap=True)
    headings = [
        "GPUs",
        "samples/s",
        "tokens/s",
        "step s",
        "rollout\nbubble",
        "train\nidle",
        "off-policyness\nmean / max",
    ]
    headings += ["GPU-h per\n1k samples"] + (["cost per\n1k samples"] if priced else []) + ["speed-up"]
    headings += ["same\nGPUs"] if len(variants) > 1 else []
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for variant in variants:
        best = max(row["samples_per_s"] for row in rows if row["variant"] == variant)
        for row in (r for r in rows if r["variant"] == variant):
            cells = [
                row["system"],
                str(row["gpus"]),
                f"{row['samples_per_s']:.2f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['step_s']:.1f}",
                f"{row['rollout_bubble']:.0%}",
                f"{row['train_idle']:.0%}",
                f"{row['off_policyness_mean']:.2f} / {row['off_policyness_max']}",
                f"{row['gpu_hours_per_1k_samples']:.2f}",
                *([f"{row['cost_per_1k_samples']:.2f}"] if priced else []),
                f"{row['speedup']:.2f}×",
                *([f"{row['speedup_in_variant']:.2f}×"] if len(variants) > 1 else []),
            ]
            table.add_row(*cells, style="bold" if row["samples_per_s"] == best else "")
        table.add_section()
    console.print(table)
    console.print(_provenance(folder / rows[0]["folder"]))
    console.print(
        f"Written to {folder}/: comparison.png, and a folder a row with timeline.png, perfetto.json (open it at"
    )
    console.print(
        "https://ui.perfetto.dev), Parquet tables and result.json. Bold: the most samples/s on the same GPUs."
    )


def _provenance(folder: Path) -> str:
    """What the numbers rest on, in two lines."""
    metadata = json.loads((folder / "result.json").read_text())
    profile, trace = metadata["profile"], metadata["trace"]
    return (
        f"Step times: {profile['model']} on {profile['gpu']} tp{profile['tp']}, {profile['kind']} ({profile['source']}).\n"
        f"Rollouts: {trace['name']}, {trace['kind']}. "
        f"Training: mfu {metadata['scenario']['training']['mfu']}, assumed unless you measured it."
    )
