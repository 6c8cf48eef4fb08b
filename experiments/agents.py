"""Find where it pays to offload an agent's KV cache while its tool runs: a table by time of the tool and size of the cache.

    python experiments/agents.py [--page] [--jobs 2] [--kv drop --kv keep …]

Simulates experiments/agents_kv.yaml with each way of treating the cache. Points are kept in results/agents_kv. With `--page`,
the table is written into docs/agents.md.
"""

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

import simrl
from experiments.shared import Small, errors_in_a_line, markdown, shrink, write_parts

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
        RESULTS=RESULTS / "small",
    )
    with errors_in_a_line("agents.py"):
        ways = kv or list(WAYS)
        if unknown := sorted(set(ways) - set(WAYS)):
            raise simrl.InputError(f"--kv {unknown[0]}: choose of {', '.join(WAYS)}")
        table = lines(swept(ways, jobs))
        print("\n".join(table))
        if page:
            write_parts(PAGE, {"kv": table})


if __name__ == "__main__":
    typer.run(main)
