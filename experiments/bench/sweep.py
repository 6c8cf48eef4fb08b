"""Speed of sweeps, each figure beside its bar: points of 64 GPUs and 5 steps, a point without its simulation, and the plan and
a query of 100,000 points.

python experiments/bench/sweep.py [--points 1000] [--jobs 2] [--json]
"""

import resource
import tempfile
import time
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import pandas as pd
import typer
import yaml

from experiments.shared import AsJson, bench_row, print_bench
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.study.executors import Executor, Here, Processes
from simrl.study.grid import vary
from simrl.study.progress import compile_kernels
from simrl.study.sweep import kept, plan, run, write_table

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
    started = time.perf_counter()
    seeds = -(-points // len(SYSTEMS)) - 1  # each has a trace of its own
    planned = plan(vary(file, [f"seed=0..{seeds}", f"systems={','.join(SYSTEMS)}"]), None, 0)
    swept = run(planned, kept(planned, folder), folder, executor, {})
    assert not any(row["error"] for row in swept.rows) and len(swept.rows) >= points
    return time.perf_counter() - started


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def overhead_s(file: Path, folder: Path) -> float:
    """Return the seconds of a point of a sweep apart from its simulation, in one process: every point has the result of the
    first at once. The median of three."""
    text = f"training.mfu={','.join(f'{0.2 + i / 1000:g}' for i in range(OVERHEAD_POINTS))}"
    first = simulate_prepared(prepare(plan(vary(file, [text]), None, 0).points[0].scenario))
    seconds = []
    for attempt in range(3):
        with patch("simrl.study.point.simulate_prepared", return_value=first):
            started = time.perf_counter()
            run(plan(vary(file, [text]), None, 0), {}, folder / f"overhead-{attempt}", Here(), {})
            seconds.append((time.perf_counter() - started) / OVERHEAD_POINTS)
    return sorted(seconds)[1]


def query_s(folder: Path) -> float:
    """Return the seconds to open a table of `ROWS` points and find the fastest of each system and cluster, median of three."""
    columns = pd.read_parquet(folder / "out" / "table").drop(columns=["error"])
    rows = columns.iloc[[i % len(columns) for i in range(ROWS)]].astype({"system.name": str})
    rows = rows.assign(
        point=range(ROWS), **{"cluster.gpus": [64 * (1 + i % 16) for i in range(ROWS)]}, error=None
    )
    (folder / "large").mkdir()
    write_table(rows.astype(object).where(rows.notna(), None).to_dict("records"), folder / "large")
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        found = pd.read_parquet(folder / "large")
        fastest = found.groupby(["system.name", "cluster.gpus"], observed=True)[
            "samples_per_s"
        ].max()
        seconds.append(time.perf_counter() - started)
        assert len(found) == ROWS and len(fastest) > 16
    return sorted(seconds)[1]


def plan_s(file: Path) -> float:
    started = time.perf_counter()
    planned = plan(
        vary(file, [f"seed=1..{ROWS // len(SYSTEMS)}", f"systems={','.join(SYSTEMS)}"]), None, 0
    )
    assert len(planned.points) == ROWS
    return time.perf_counter() - started


def main(
    points: Annotated[int, typer.Option(min=4, help="of the sweep")] = 1000,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 2,
    as_json: AsJson = False,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "scenario.yaml"
        file.write_text(yaml.safe_dump(SCENARIO))
        compile_kernels()
        sweep_s(
            file, folder / "first", 2 * len(SYSTEMS), Processes(jobs)
        )  # compiles the other kernels of the systems
        cpu_before_s = cpu_s()
        swept_s = sweep_s(file, folder / "out", points, Processes(jobs))
        used_s = cpu_s() - cpu_before_s
        resumed_s = sweep_s(file, folder / "out", points, Processes(jobs))
        rows = [
            bench_row(
                f"{points} points, 64 GPUs × 5 steps, {jobs} processes", swept_s, 0.06 * points
            ),
            bench_row("CPU time of it, on all cores", used_s, 0.06 * points * jobs),
            bench_row("repeated: all points are stored", resumed_s, 0.02 * points),
            bench_row("a point, without its simulation", overhead_s(file, folder), 0.02),
            bench_row(f"the plan of {ROWS:,} points", plan_s(file), 5.0),
            bench_row(f"a query of {ROWS:,} points", query_s(folder), 1.0),
        ]
    print_bench(rows, as_json)


if __name__ == "__main__":
    typer.run(main)
