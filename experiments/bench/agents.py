"""Speed of simulating agents: 10,000 trajectories of 30 turns each, beside the bar of a minute.

python experiments/bench/agents.py [MODE ...] [--json]
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.shared import AsJson, bench_row, print_bench
from simrl.scenario.model import Scenario
from simrl.simulate.prepare import prepare
from simrl.simulate.run import compile_engine, simulate_prepared
from simrl.trace.trace import Trace, TraceMetadata, write_trace

STEPS, PROMPTS, GROUP, TURNS = 10, 125, 8, 30
BAR_S = 60.0
OFFLOAD = {"kv_while_tool_runs": "offload", "host_memory_bytes": 5e11}
MODES = {
    "cache": {},
    "keep": {"kv_while_tool_runs": "keep"},
    "drop": {"kv_while_tool_runs": "drop"},
    "offload": OFFLOAD,
}


def agents_trace() -> Trace:
    """Return trajectories that write 200 tokens a turn, call tools for 10 s and read 300 tokens, all on average."""
    rng, rows = np.random.default_rng(0), STEPS * PROMPTS * GROUP
    tokens = rng.integers(50, 351, (rows, TURNS))
    seconds = 10 * np.exp(rng.normal(-0.5, 1.0, (rows, TURNS - 1)))
    read = rng.integers(50, 551, (rows, TURNS - 1))
    columns = {
        "step": np.repeat(np.arange(STEPS), PROMPTS * GROUP),
        "epoch": np.zeros(rows, int),
        "prompt_id": np.tile(np.repeat(np.arange(PROMPTS), GROUP), STEPS),
        "sample": np.tile(np.arange(GROUP), STEPS * PROMPTS),
        "prompt_tokens": np.full(rows, 2000),
        "response_tokens": tokens.sum(axis=1),
        "turn_tokens": tokens.tolist(),
        "turn_environment_s": seconds.tolist(),
        "turn_observation_tokens": read.tolist(),
    }
    metadata = TraceMetadata(
        name="agents", kind="synthetic", source="agents.py", tokenizer="none", cap_tokens=20000
    )
    return Trace.from_columns(columns, metadata)


def scenario(trace: Path, mode: str, steps: int) -> Scenario:
    """Return a 32B model on 64 H200, one batch after the other, so that a run of 10 steps has exactly 10,000 trajectories."""
    data = {
        "name": "agents",
        "steps": steps,
        "model": "qwen2.5-32b",
        "cluster": {"gpu": "h200", "gpus": 64, "tp": 4},
        "workload": {"trace": str(trace)},
        "profile": {"roofline": {}},
        "agents": MODES[mode],
        "system": {"name": "verl_colocated"},
    }
    if mode == "cache":
        data["engine"] = {"prefix_caching": True}
    return Scenario.model_validate(data)


def main(
    modes: Annotated[list[str] | None, typer.Argument()] = None, as_json: AsJson = False
) -> None:
    compile_engine()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.parquet"
        write_trace(agents_trace(), path)
        for mode in modes or MODES:
            simulate_prepared(prepare(scenario(path, mode, 1)))  # compiles what is not on disk
            prepared = prepare(scenario(path, mode, STEPS))
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            result = simulate_prepared(prepared)
            seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            what = f"{result.samples.num_rows} trajectories × {TURNS} turns, {cpu_s:.1f} s of processor"
            rows.append(bench_row(f"{mode} ({what})", seconds, BAR_S))
    print_bench(rows, as_json)


if __name__ == "__main__":
    typer.run(main)
