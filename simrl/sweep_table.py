"""A sweep on the screen: its fastest points, how many there are, and what failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from simrl.sweeps import Plan, Swept

SHOWN = 10
MEASURES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "samples/s": lambda row: f"{row['samples_per_s']:.3g}",
    "speed-up": lambda row: f"{row['speedup']:.2f}×",
    "rollout bubble": lambda row: f"{row['rollout_bubble']:.0%}",
    "train idle": lambda row: f"{row['train_idle']:.0%}",
    "off-policy": lambda row: f"{row['off_policyness_mean']:.2f}",
    "GPU-h/1k": lambda row: f"{row['gpu_hours_per_1k_samples']:.3g}",
}


def print_sweep(planned: Plan, swept: Swept, console: Console) -> None:
    """The fastest points as a table; then what became of all of them."""
    best = sorted((row for row in swept.rows if row["error"] is None), key=lambda row: -row["samples_per_s"])[:SHOWN]
    if best:
        table = Table("point", *planned.keys, *MEASURES, box=None, pad_edge=False, header_style="bold")
        for row in best:
            cells = ["–" if row[key] is None else str(row[key]) for key in planned.keys]
            table.add_row(str(row["point"]), *cells, *(measure(row) for measure in MEASURES.values()))
        console.print(f"The fastest {len(best)} of {len(swept.rows)} points (speed-up over the first point)")
        console.print(table)
        console.print()
    points = len(swept.rows)
    said = [f"{points} points", f"{swept.simulated} simulated now"]
    if swept.simulated < points:
        said.append(f"{points - swept.simulated} were there")
    if planned.combinations > points:
        said.append(f"{planned.combinations} combinations, some of them the same")
    console.print(f"{', '.join(said)}.")
    failed = [row for row in swept.rows if row["error"] is not None]
    if failed:
        console.print(f"{len(failed)} failed; point {failed[0]['point']}: {failed[0]['error']}")
