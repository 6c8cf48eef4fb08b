"""Find where it pays to offload an agent's KV cache while its tool runs: a table by time of the tool and size of the cache;
and what admission by the room of KV caches gains over a fixed number of trajectories.

    python experiments/agents.py [--page] [--jobs 2] [--kv drop --kv keep …]

Simulates experiments/agents_kv.yaml with each way of treating the cache. Points are kept in results/agents_kv. With `--page`,
the tables are written into docs/agents.md.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

import simrl
from experiments.shared import Small, errors_in_a_line, markdown, shrink, write_parts
from simrl.result.metrics import summary
from simrl.scenario.load import load_scenarios
from simrl.simulate.run import simulate

SCENARIO = Path(__file__).parent / "agents_kv.yaml"
PAGE = Path(__file__).parents[1] / "docs" / "agents.md"
RESULTS = Path("results") / "agents_kv"
TOOL_S = [1, 5, 20, 60]  # median
KV_TOKENS = [100_000, 200_000, 300_000, 400_000]  # of a worker
HOST_BYTES = 512e9  # of a worker: a quarter of a node's 2 TB
WAYS: dict[str, dict[str, Any]] = {
    "drop": {"engine.prefix_caching": False},
    "cache": {"engine.prefix_caching": True},
    "keep": {"engine.prefix_caching": True},
    "offload": {"engine.prefix_caching": True, "agents.host_memory_bytes": HOST_BYTES},
}
ADMISSIONS: dict[str, dict[str, Any]] = {
    "fewest requests": {"systems.0.dispatch": "least_requests"},
    "at most 160": {"systems.0.dispatch": "least_requests", "agents.max_concurrent": 160},
    "at most 80": {"systems.0.dispatch": "least_requests", "agents.max_concurrent": 80},
    "programs": {"systems.0.dispatch": "programs"},
    "programs, weight 0.5": {"systems.0.dispatch": "programs", "agents.acting_token_weight": 0.5},
}
SEEDS = [7, 8, 9]
SMALLER: dict[str, Any] = {}  # overrides of a small run
PAYS = 1.02  # times the throughput of the next best: less is not told apart


def swept(ways: list[str], jobs: int) -> pd.DataFrame:
    """Return the samples a second by (tool_s, kv_tokens), a column per way."""
    columns = {}
    for way in ways:
        varied = {
            "workload.synthetic.tools.tool.median_s": TOOL_S,
            "engine.kv_cache_tokens": KV_TOKENS,
        }
        overrides = {**WAYS[way], "agents.kv_while_tool_runs": way, **SMALLER}
        table = simrl.sweep(
            SCENARIO, varied, overrides=overrides, jobs=jobs, folder=RESULTS / way
        ).table
        columns[way] = table.set_index(list(varied))["samples_per_s"]
    return pd.DataFrame(columns).rename_axis(["tool_s", "kv_tokens"])


def lines(rates: pd.DataFrame) -> list[str]:
    """Return the table in Markdown: samples a second of each way, and offloading over the best other one."""
    heads = ["tool, median s", "KV tokens of a worker", *rates.columns]
    offloads = "offload" in rates.columns and len(rates.columns) > 1
    rows = []
    for (tool_s, kv_tokens), of_point in rates.iterrows():
        row = [f"{tool_s:g}", f"{kv_tokens:,}", *(f"{rate:.3f}" for rate in of_point)]
        if offloads:
            gain = of_point["offload"] / of_point.drop("offload").max()
            row.append(f"**{gain:.2f}×**" if gain >= PAYS else f"{gain:.2f}×")
        rows.append(row)
    return markdown([*heads, *(["offload over the best other"] if offloads else [])], rows)


def admitted() -> list[str]:
    """Return a table of admissions by the size of the KV cache: means over `SEEDS`."""
    rows = []
    for kv_tokens in KV_TOKENS:
        for name, overrides in ADMISSIONS.items():
            keys = {**overrides, "engine.kv_cache_tokens": kv_tokens, **SMALLER}
            runs = [_figures({**keys, "seed": seed}) for seed in SEEDS]
            rate, found, computed, waited, moves = np.mean(runs, axis=0)
            spread = np.ptp([run[0] for run in runs]) / rate
            cells = f"{rate:.3f} (±{spread / 2:.0%})", f"{found:.0%}", f"{computed:,.0f}"
            rows.append([f"{kv_tokens:,}", name, *cells, f"{waited:,.0f}", f"{moves:,.0f}"])
    heads = ["KV tokens of a worker", "admission", "samples/s", "context found in the cache"]
    heads += ["tokens computed a response", "wait for room of a response, s", "moves"]
    return markdown(heads, rows)


def _figures(overrides: dict[str, Any]) -> tuple[float, ...]:
    """Return the samples a second, the share of the context that was found, the tokens computed and the seconds waited by a
    response, and the moves."""
    on = ("engine.prefix_caching=true", *(f"{key}={value}" for key, value in overrides.items()))
    (scenario,) = load_scenarios(SCENARIO, on)
    result = simulate(scenario)
    cache, agents = result.metadata["prefix_cache"], result.metadata["agents"]
    begun = len(result.samples)
    return (
        summary(result, scenario.warmup_steps, 0.0)["samples_per_s"],
        cache["hit_tokens"] / cache["lookup_tokens"],
        cache["prefill_tokens"] / begun,
        agents.get("waiting_for_room_s", 0.0) / begun,
        agents.get("moves", 0),
    )


def main(
    page: Annotated[
        bool, typer.Option("--page", help="write the table into docs/agents.md")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 2,
    kv: Annotated[
        list[str] | None,
        typer.Option(help="ways of treating the cache: drop, cache, keep, offload"),
    ] = None,
    small: Small = False,
) -> None:
    prompts = {"steps": 1, "warmup_steps": 0, "workload.synthetic.prompts_per_step": 2}
    shrink(
        globals(),
        small,
        TOOL_S=[1, 5],
        KV_TOKENS=[100_000, 200_000],
        SMALLER=prompts,
        SEEDS=[7],
        RESULTS=RESULTS / "small",
    )
    with errors_in_a_line("agents.py"):
        ways = kv or list(WAYS)
        if unknown := sorted(set(ways) - set(WAYS)):
            raise simrl.InputError(f"--kv {unknown[0]}: choose of {', '.join(WAYS)}")
        tables = {"kv": lines(swept(ways, jobs)), "programs": admitted()}
        print("\n\n".join("\n".join(table) for table in tables.values()))
        if page:
            write_parts(PAGE, tables)


if __name__ == "__main__":
    typer.run(main)
