"""Every system on three workloads and three cluster sizes: writes systems.md and its pictures beside this file.

python experiments/systems.py ../shared/data      (the folder with verl_run/; without it, the two synthetic workloads)

Takes a quarter of an hour on two cores. Sentences are made from the figures of the tables above them.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from experiments.shared import Small, errors_in_a_line, line, shrink, verl_trace
from simrl.errors import InputError
from simrl.result.metrics import summary
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.show.figures.compare import comparison_figure
from simrl.show.style import save
from simrl.simulate.prepare import prepare
from simrl.simulate.run import compile_engine, compile_training, simulate

HERE = Path(__file__).resolve().parent
PICTURES = HERE / "systems"
ROWS = PICTURES / "rows.json"
TRACE = HERE.parent / "results" / "verl_run.parquet"
GPUS = (64, 256, 1024)
OVERRIDES: list[str] = []
WORKLOADS = {
    "systems_math": "Synthetic math, 16K",
    "systems_code": "Synthetic code, 16K",
    "systems_verl": "A real verl run",
}
HEADINGS = (
    *("system", "tokens/s", "×", "GPUs", "step [s]", "rollout bubble", "train idle"),
    *("off-policyness mean / max", "dropped", "moved"),
)
Row = Mapping[str, Any]

INTRODUCTION = """\
# Every system on three workloads

Made by `python experiments/systems.py ../shared/data`; all numbers are simulated. Each system has its recipe's defaults
(`simrl systems show NAME`), so none is tuned to the workload or to the cluster; no system drafts. Averages omit the first
half of the updates (for the real run, the first third). *On-policy* means that no token was older than the weights that
trained on it. × compares trained tokens a second and GPU with verl_colocated's: over few updates, systems that defer long
responses train on shorter ones. † marks off-policyness that was still changing. *dropped* is the share of generated tokens
that were discarded, *moved* the share of samples that ran on more than one worker. The pictures show samples a second.

How to read it: where a system's trainer never waits (train idle 0 %) and its rollout GPUs do, its default split (75 %
roll out) limits it, not its rule; try `adapt_split_every` or another `rollout_share`. "Fastest" is no recommendation:
stale tokens have a cost in learning that is not simulated. A step of verl_fully_async is a quarter of the others'. Where
no response exceeds partial_rollout's budget of 8,192 tokens (the real run), it equals verl_colocated. The number of
requests in flight differs, too: AReaL runs four batches at once by default (`max_concurrent`), Laminar at least a group on
every worker (`sub_batch`, assumed): on large clusters these are many batches, and explain most of its lead and staleness.

Inputs: for the synthetic workloads, a 14B model on H100, two GPUs a rollout worker, step times from measured
kernels (profiles/README.md) with 1 ms of host time between passes; lengths with the stability of rank that the RhymeRL
paper reports, at which responses of a prompt are so similar that there are few outliers: HistoPipe migrates less here
than the 1.5-3.5 % of the paper. For the real run, its logged lengths (experiments/verl_run.md), a 3B model, and step
times from data sheets, which are too fast for that run's agent loop: only the relations between systems are
meaningful there; its steps have 512 responses, too few for 1,024 GPUs, and it has one epoch, so no length history.
Training times are computed from the operations. All are inputs of the scenarios `systems_*.yaml` beside this page.
"""


def main(
    data: Annotated[Path | None, typer.Argument(help="the folder with verl_run/")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="simultaneous simulations")] = os.cpu_count()
    or 1,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="write the page from rows.json, without simulating")
    ] = False,
    small: Small = False,
) -> None:
    few = ["steps=2", "warmup_steps=1", "systems=[verl_colocated, one_step_off]"]
    shrink(globals(), small, GPUS=(64,), OVERRIDES=few)
    with errors_in_a_line("systems"):
        names = list(WORKLOADS)
        if data is None:
            names.remove("systems_verl")
        else:
            verl_trace(data, TRACE)
        scenarios = {
            (name, gpus): load_scenarios(
                HERE / f"{name}.yaml", [f"cluster.gpus={gpus}", *OVERRIDES]
            )
            for name in names
            for gpus in GPUS
        }
    work = [scenario for group in scenarios.values() for scenario in group]
    done = json.loads(ROWS.read_text()) if redraw else simulate_all(work, jobs)
    rows = iter(done)
    page = "\n".join(
        write_page({key: [next(rows) for _ in group] for key, group in scenarios.items()})
    )
    (HERE / "systems.md").write_text(page, encoding="utf-8")
    print(f"Written: {HERE / 'systems.md'} and {len(scenarios)} pictures in {PICTURES}")


def simulate_all(work: Sequence[Scenario], jobs: int) -> list[dict[str, Any]]:
    """Return a row for each scenario, also kept in rows.json."""
    compile_engine()
    compile_training()
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        console = Console(stderr=True)
        rows = list(
            track(pool.map(simulate_one, work), total=len(work), console=console, transient=True)
        )
    PICTURES.mkdir(exist_ok=True)
    ROWS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def simulate_one(scenario: Scenario) -> dict[str, Any]:
    """Return a row of a table, or the reason why the system cannot run on this workload and cluster."""
    try:
        prepare(scenario)
    except InputError as error:
        return {"system": scenario.system.name, "refused": str(error)}
    return summary(simulate(scenario), scenario.warmup_steps)


def write_page(tables: Mapping[tuple[str, int], Sequence[Row]]) -> Iterator[str]:
    """Yield the lines of the page, and draw its pictures."""
    yield INTRODUCTION
    yield "## The fastest, in one table\n"
    heads = (
        "workload",
        "GPUs",
        "fastest",
        "×",
        "off-policyness mean / max",
        "fastest with off-policyness ≤ 1",
        "×",
    )
    yield line((*heads, "fastest on-policy", "×"))
    yield "|---" * 9 + "|"
    for (name, gpus), all_rows in tables.items():
        rows = [row for row in all_rows if "refused" not in row]
        first, best, strict = rows[0], fastest(rows), fastest([r for r in rows if on_policy(r)])
        bounded = fastest([r for r in rows if r["off_policyness_max"] <= 1])
        named = (f"{row['system']} | {times(row, first)}" for row in (bounded, strict))
        yield line(
            (WORKLOADS[name], f"{gpus:,}", best["system"], times(best, first), ages(best), *named)
        )
    for (name, gpus), all_rows in tables.items():
        rows = [row for row in all_rows if "refused" not in row]
        picture = PICTURES / f"{name.removeprefix('systems_')}_{gpus}.png"
        save(comparison_figure([with_speedups(row, rows[0]) for row in rows]), picture)
        yield f"\n## {WORKLOADS[name]}, {gpus:,} GPUs\n"
        yield from table(rows)
        for row in all_rows:
            if "refused" in row:
                yield f"\nLeft out: {row['system']} ({row['refused']})."
        best = fastest(rows)
        leads = f"{best['system']} trains the most samples a second, {times(best, rows[0])} {rows[0]['system']}'s"
        yield f"\n![A bar a system, {WORKLOADS[name]} on {gpus:,} GPUs: {leads}]({PICTURES.name}/{picture.name})\n"
        yield reading(rows)
    yield ""


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield line(HEADINGS)
    yield "|---" * len(HEADINGS) + "|"
    for row in rows:
        rate = f"{row['tokens_per_s']:,.0f}"
        speed = (
            f"**{rate}**" if row is fastest(rows) else rate,
            times(row, rows[0]),
            f"{row['gpus']:,}",
        )
        shares = (
            f"{row['step_s']:.1f}",
            f"{row['rollout_bubble']:.0%}",
            f"{row['train_idle']:.0%}",
            ages(row),
        )
        yield line(
            (
                row["system"],
                *speed,
                *shares,
                f"{row['dropped_share']:.1%}",
                f"{row['migrated_share']:.1%}",
            )
        )


def reading(rows: Sequence[Row]) -> str:
    """Return two sentences on a table: the fastest system and its price, and where the others lose their time."""
    first, best, strict = rows[0], fastest(rows), fastest([r for r in rows if on_policy(r)])
    last = min(rows, key=per_gpu)
    if best is strict:
        lead = f"{best['system']} trains most, {times(best, first)} {first['system']}, and stays on-policy."
    else:
        aged = f"on tokens that are {ages(best)} updates old (mean / at most)"
        lead = (
            f"{best['system']} trains most, {times(best, first)} {first['system']}, {aged}; of those on-policy, "
            f"{strict['system']} does, with {times(strict, first)}."
        )
    trainer = f" (its trainer {best['train_idle']:.0%})" if best["train_idle"] else ""
    waits = (
        f"{first['system']}'s GPUs wait {first['rollout_bubble']:.0%} of their rollout time, {best['system']}'s "
        f"{best['rollout_bubble']:.0%}{trainer}"
    )
    return f"{lead} {waits}; {last['system']} is last with {times(last, first)}, {loss(last)}."


def loss(row: Row) -> str:
    causes = {
        f"rollout GPUs waiting {row['rollout_bubble']:.0%} of their time": row["rollout_bubble"],
        # a quarter of all GPUs
        f"its trainer's GPUs waiting {row['train_idle']:.0%} of theirs": row["train_idle"] * 0.25,
        f"{row['dropped_share']:.0%} of its tokens dropped": row["dropped_share"],
    }
    return max(causes, key=lambda cause: causes[cause])


def fastest(rows: Sequence[Row]) -> Row:
    return max(rows, key=per_gpu)


def per_gpu(row: Row) -> float:
    """Return trained tokens a second and GPU, which charges a system for additional GPUs."""
    return float(row["tokens_per_s"] / row["gpus"])


def on_policy(row: Row) -> bool:
    return bool(row["off_policyness_max"] == 0 and row["carried_share"] == 0)


def times(row: Row, first: Row) -> str:
    return f"{per_gpu(row) / per_gpu(first):.2f}×"


def ages(row: Row) -> str:
    return f"{row['off_policyness_mean']:.2f} / {row['off_policyness_max']}" + (
        "" if row["settled"] else " †"
    )


def with_speedups(row: Row, first: Row) -> dict[str, Any]:
    ratio = row["samples_per_s"] / first["samples_per_s"]
    return {**row, "speedup": ratio, "speedup_in_variant": ratio}


if __name__ == "__main__":
    typer.run(main)
