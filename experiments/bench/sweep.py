"""How fast sweeps are, each figure beside its bar: points of 64 GPUs and 5 steps, what a point takes besides its simulation,
and a query of a table of 100,000 points.

python experiments/bench/sweep.py [--points 1000] [--jobs 2] [--json]
"""

import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import pandas as pd
import typer
import yaml
from rich.console import Console
from rich.table import Table

from simrl.comparison import compile_kernels
from simrl.dimensions import vary
from simrl.executors import Executor, Here, Processes
from simrl.simulate import prepare, simulate_prepared
from simrl.sweeps import kept, plan, run, write_table

ROOT = Path(__file__).parents[2]
ROWS = 100_000
SYSTEMS = ["verl_colocated", "one_step_off", "{name: areal, eta: 1}", "{name: areal, eta: 8}"]
OVERHEAD_POINTS = 200
SCENARIO = {
    "name": "bench",
    "steps": 5,
    "warmup_steps": 1,
    "model": "qwen3-14b",
    "cluster": {"gpu": "h100", "gpus": 64, "tp": 2},
    "workload": {
        "synthetic": {
            "steps": 5,
            "prompts_per_step": 24,
            "group": 16,
            "cap_tokens": 16384,
            "mean_tokens": 5000,
            "sigma": 0.9,
            "prompt_share": 0.6,
        }
    },
    "profile": {"path": str(ROOT / "profiles" / "qwen3-14b_h100_tp2.parquet")},
    "systems": ["areal"],
}


def sweep_s(file: Path, folder: Path, points: int, executor: Executor) -> float:
    """Seconds of a sweep, from its text to its table."""
    started = time.perf_counter()
    seeds = -(-points // len(SYSTEMS)) - 1  # each has a trace of its own
    planned = plan(vary(file, [f"seed=0..{seeds}", f"systems={','.join(SYSTEMS)}"]), None, 0)
    swept = run(planned, kept(planned, folder), folder, executor, {})
    assert not any(row["error"] for row in swept.rows) and len(swept.rows) >= points
    return time.perf_counter() - started


def cpu_s() -> float:
    """Of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def overhead_s(file: Path, folder: Path) -> float:
    """What a point of a sweep takes besides its simulation, in one process: a sweep in which every point has the result of the
    first at once. The median of three."""
    text = f"training.mfu={','.join(f'{0.2 + i / 1000:g}' for i in range(OVERHEAD_POINTS))}"
    first = simulate_prepared(prepare(plan(vary(file, [text]), None, 0).points[0].scenario))
    seconds = []
    for attempt in range(3):
        with patch("simrl.points.simulate_prepared", return_value=first):
            started = time.perf_counter()
            run(plan(vary(file, [text]), None, 0), {}, folder / f"overhead-{attempt}", Here(), {})
            seconds.append((time.perf_counter() - started) / OVERHEAD_POINTS)
    return sorted(seconds)[1]


def query_s(folder: Path) -> float:
    """Seconds to open a table of so many points and to find the fastest of each system and cluster: the median of three."""
    columns = pd.read_parquet(folder / "out" / "table").drop(columns=["error"])
    rows = columns.iloc[[i % len(columns) for i in range(ROWS)]].astype({"system.name": str})
    rows = rows.assign(point=range(ROWS), **{"cluster.gpus": [64 * (1 + i % 16) for i in range(ROWS)]}, error=None)
    (folder / "large").mkdir()
    write_table(rows.astype(object).where(rows.notna(), None).to_dict("records"), folder / "large")
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        found = pd.read_parquet(folder / "large")
        fastest = found.groupby(["system.name", "cluster.gpus"], observed=True)["samples_per_s"].max()
        seconds.append(time.perf_counter() - started)
        assert len(found) == ROWS and len(fastest) > 16
    return sorted(seconds)[1]


def main(
    points: Annotated[int, typer.Option(min=4, help="of the sweep")] = 1000,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table (stable)")] = False,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "scenario.yaml"
        file.write_text(yaml.safe_dump(SCENARIO))
        compile_kernels()
        sweep_s(file, folder / "first", 2 * len(SYSTEMS), Processes(jobs))  # compiles what systems need besides
        cpu_before_s = cpu_s()
        swept_s = sweep_s(file, folder / "out", points, Processes(jobs))
        used_s = cpu_s() - cpu_before_s
        resumed_s = sweep_s(file, folder / "out", points, Processes(jobs))
        rows = [
            {"what": f"{points} points, 64 GPUs × 5 steps, {jobs} processes", "value": swept_s, "bar": 0.3 * points},
            {"what": "CPU time of it, on all cores", "value": used_s, "bar": 0.3 * points * jobs},
            {"what": "the same again: all points are there", "value": resumed_s, "bar": 0.02 * points},
            {"what": "a point, besides its simulation", "value": overhead_s(file, folder), "bar": 0.02},
            {"what": f"a query of {ROWS:,} points", "value": query_s(folder), "bar": 1.0},
        ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("what", "measured", "bar", "measured / bar")
    for row in rows:
        value, bar = float(str(row["value"])), float(str(row["bar"]))
        table.add_row(str(row["what"]), f"{value:.4g} s", f"{bar:g} s", f"{value / bar:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
