"""Prefill and decode pools of simrl beside AISimulate's disaggregated mode: the same requests, workers, limits and database of
measured kernels, no host time.

    python experiments/pools_aisimulate.py [--aisimulate PROGRAM] [--write] [--json]

Needs what `beside_aisimulate.py` needs. All requests are there at t = 0, responses as there, each prompt of its own. A KV cache
crosses a link of 50 GB/s a worker. Nothing is tuned to agree. AISimulate's norms of queries and keys, which make all of its
passes longer, are taken over (`priced_as_there`), so that pools are compared and not kernels; the errors without that are
given, too.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import simpy
import typer
import yaml

from experiments import beside_aisimulate as beside
from experiments.bench.one_engine import responses
from experiments.shared import AsJson, errors_in_a_line, markdown_of, write_parts
from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.rules import DISPATCHES
from simrl.engine.state import Limits
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import Tables
from simrl.profile.profilers.aiconfigurator import derive
from simrl.result.result import Lane
from simrl.runtime.agents import PLAIN, Agents
from simrl.runtime.recorder import Recorder
from simrl.runtime.simulated_worker import simulated_workers
from simrl.runtime.worker import WorkerCosts
from simrl.trace.trace import Response, Sample

BYTES_PER_S, REQUESTS = 50e9, 256
PAGE = beside.PAGE


class Pools(NamedTuple):
    """A case: an engine, and workers that prefill and decode with it."""

    case: beside.Case
    prefill: int
    decode: int

    @property
    def name(self) -> str:
        return f"{self.case.name}, prompts of {self.case.prompt_tokens:,}, {self.prefill} : {self.decode}"


CASES = [
    Pools(case._replace(prompt_tokens=prompt_tokens), prefill, decode)
    for case in (beside.CASES[0], beside.CASES[4])
    for prompt_tokens in (512, 4096)
    for prefill, decode in ((1, 1), (1, 3), (2, 2))
]


def aisimulate_s(pools: Pools, program: str) -> float:
    """Return when AISimulate's last response ends."""
    written = beside.aisimulate_config

    def config(case: beside.Case, folder: Path, timing: dict[str, Any] | None) -> Path:
        path = written(case, folder, timing)
        data = yaml.safe_load(path.read_text())
        engine, worker = data["engine"], data["engine"]["workers"].pop("aggregated")
        engine["mode"] = "disaggregated"
        for role, replicas in (("prefill", pools.prefill), ("decode", pools.decode)):
            parallelism = {**worker["parallelism"], "replicas": replicas}
            engine["workers"][role] = {**worker, "parallelism": parallelism}
        engine["kv_transfer"] = {
            "bandwidth_gb_per_second": BYTES_PER_S / 1e9,
            "timing_mode": "full_prompt",
        }
        path.write_text(yaml.safe_dump(data))
        return path

    with patch.multiple(beside, aisimulate_config=config, REQUESTS=REQUESTS):
        return float(beside.predicted(pools.case, program)["duration_ms"]) / 1e3


def simulated_s(pools: Pools, tables: Tables, limits: Limits) -> float:
    """Return when the last response of simrl's pools ends."""
    env, model = simpy.Environment(), model_shape(pools.case.model)
    known = {i: Response(tokens, 1.0, ()) for i, tokens in enumerate(responses(REQUESTS))}
    record = Recorder([Lane(f"rollout-{i}", 2) for i in range(pools.prefill + pools.decode)])
    agents, about = Agents(env, PLAIN), (tables, limits, WorkerCosts(0.0), known, record)
    decode = simulated_workers(env, pools.decode, *about, agents=agents)
    prefill = simulated_workers(env, pools.prefill, *about, decode_lanes=pools.decode)
    agents.pool = Dispatcher(env, prefill, DISPATCHES["least_requests"], record)
    agents.kv_s_per_token = model.kv_bytes_per_token / BYTES_PER_S
    front = Dispatcher(env, decode, DISPATCHES["least_requests"], record)
    samples = [Sample(i, 0, 0, i, 0, pools.case.prompt_tokens) for i in known]
    env.run(simpy.AllOf(env, front.submit(samples)))
    return float(env.now)


def row_of(pools: Pools, program: str) -> dict[str, Any]:
    """Return the figures of a case."""
    tables = derive(model_shape(pools.case.model), beside.GPU, pools.case.setup).tables
    priced = beside.priced_as_there(tables, beside.norms_s(pools.case), mixed=False)
    there_s = aisimulate_s(pools, program)
    makespan_s, with_norms_s = (simulated_s(pools, t, pools.case.limits) for t in (tables, priced))
    return {
        "case": pools.name,
        "makespan_s": makespan_s,
        "with_norms_s": with_norms_s,
        "aisimulate_s": there_s,
        "apart": makespan_s / there_s - 1,
        "apart_with_norms": with_norms_s / there_s - 1,
    }


def table_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table, and a line with the median error, its sign and the worst."""
    errors = [row["apart_with_norms"] for row in rows]
    below = sum(error < 0 for error in errors)
    return [
        *markdown_of(
            [
                {
                    "engine, prefill : decode workers": row["case"],
                    "simrl": f"{row['makespan_s']:.1f} s",
                    "with its norms": f"{row['with_norms_s']:.1f} s",
                    "AISimulate": f"{row['aisimulate_s']:.1f} s",
                    "apart": f"{row['apart']:+.1%}",
                    "apart, with its norms": f"{row['apart_with_norms']:+.1%}",
                }
                for row in rows
            ]
        ),
        "",
        f"n = {len(errors)}, median {median(errors):+.1%} ({below} below AISimulate, {len(errors) - below} above), worst "
        f"{max(errors, key=abs):+.1%}.",
    ]


def main(
    aisimulate: beside.Program = "aisimulate",
    write: beside.Write = False,
    as_json: AsJson = False,
) -> None:
    if (program := beside.program_of(aisimulate, "pools_aisimulate")) is None:
        return
    with errors_in_a_line("pools_aisimulate"):
        rows = [row_of(pools, program) for pools in CASES]
        lines = table_of(rows)
        print(json.dumps(rows, indent=1) if as_json else "\n".join(lines))
        if write:
            write_parts(PAGE, {"pools": lines})


if __name__ == "__main__":
    typer.run(main)
