"""Speed of a sweep over all systems: 8 to 4,096 GPUs, three mean lengths, 2,048 responses a step, six updates; about a thousand
points beside a bar of 10 minutes on two cores, and the CPU seconds of each system.

python experiments/bench/sweep_scale.py [--systems a,b] [--gpus 8,64] [--lengths 1000] [--jobs 2] [--ray ADDRESS] [--json]
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from experiments.shared import AsJson, bench_row, markdown, print_bench
from simrl.study.executors import TRIES, Outcomes, Processes, RayCluster, inputs_of_this_process
from simrl.study.grid import vary
from simrl.study.point import Outcome, Point, simulate_point
from simrl.study.progress import compile_kernels
from simrl.study.sweep import kept, plan, run
from simrl.systems.recipes import RECIPES

ROOT = Path(__file__).parents[2]
GPUS, LENGTHS = ",".join(str(2**i) for i in range(3, 13)), "1000,4000,12000"
POINTS_BAR_S = 600.0 / 1170  # two cores
SCENARIO = {
    "name": "scale",
    "steps": 6,
    "warmup_steps": 2,
    "model": "qwen3-14b",
    "cluster": {"gpu": "h100", "gpus": 64, "tp": 2},
    "workload": {
        "synthetic": {
            "steps": 6,
            "prompts_per_step": 128,
            "group": 16,
            "cap_tokens": 32768,
            "mean_tokens": 4000,
            "sigma": 0.9,
            "prompt_share": 0.6,
        }
    },
    "profile": {"path": str(ROOT / "profiles" / "qwen3-14b_h100_tp2.parquet")},
    "systems": ["areal"],
}


class Timed(Processes):
    """Processes that note the CPU seconds of each point."""

    def __init__(self, jobs: int) -> None:
        super().__init__(jobs)
        self.cpu_s: dict[str, float] = {}

    def outcomes(self, points: Sequence[Point]) -> Outcomes:
        for i, result in self.results(_timed, points, TRIES):
            if isinstance(result, tuple) and len(result) == 2:
                self.cpu_s[points[i].hash], result = result
            yield i, result


def _timed(point: Point) -> tuple[float, Outcome]:
    started = time.process_time()
    outcome = simulate_point(point, inputs_of_this_process())
    return time.process_time() - started, outcome


def main(
    systems: Annotated[str, typer.Option(help="names, separated by commas")] = ",".join(RECIPES),
    gpus: Annotated[str, typer.Option(help="sizes of the cluster")] = GPUS,
    lengths: Annotated[str, typer.Option(help="mean tokens of a response")] = LENGTHS,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 2,
    ray: Annotated[str | None, typer.Option(help="on this Ray cluster, without times")] = None,
    output: Annotated[
        Path | None, typer.Option(help="keep the points and the table in this folder")
    ] = None,
    as_json: AsJson = False,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        file, folder = Path(name) / "scenario.yaml", output or Path(name) / "out"
        file.write_text(yaml.safe_dump(SCENARIO))
        texts = [f"workload.synthetic.mean_tokens={lengths}", f"cluster.gpus={gpus}"]
        compile_kernels()
        timed = Timed(jobs)
        started = time.perf_counter()
        planned = plan(vary(file, [*texts, f"systems={systems}"]), None, 0)
        executor = timed if ray is None else RayCluster(ray)
        swept = run(planned, kept(planned, folder), folder, executor, {})
        swept_s = time.perf_counter() - started
    if not as_json and timed.cpu_s:
        of_system = defaultdict(list)
        for row in swept.rows:
            of_system[row["system.name"]].append((timed.cpu_s.get(row["hash"], 0.0), row))
        heads = ["system", "points", "refused", "CPU seconds", "the longest", "GPUs", "tokens"]
        lines = []
        for system, points in of_system.items():
            longest_s, at = max(points, key=lambda point: point[0])
            refused = sum(row["error"] is not None for _, row in points)
            where = at.get("cluster.gpus", ""), at.get("workload.synthetic.mean_tokens", "")
            total_s = sum(cpu_s for cpu_s, _ in points)
            lines.append(
                [system, len(points), refused, f"{total_s:.1f}", f"{longest_s:.1f}", *where]
            )
        Console(width=140).print("\n".join(markdown(heads, lines)), markup=False)
    refused = sum(row["error"] is not None for row in swept.rows)
    what = f"{len(swept.rows)} points, {refused} of them refused, {jobs} processes"
    rows = [bench_row(what, swept_s, POINTS_BAR_S * len(swept.rows))]
    if timed.cpu_s:
        cpu_s = sum(timed.cpu_s.values())
        rows.append(bench_row("CPU time of it", cpu_s, 2 * POINTS_BAR_S * len(swept.rows)))
    print_bench(rows, as_json)


if __name__ == "__main__":
    typer.run(main)
