"""Holds the engine against two real vLLM runs: 300 requests with recorded arrivals, on two models and tensor-parallel sizes.

    python experiments/validate_engine.py ../shared/data [--json]

The data folder has `vllm_runs/` (what was measured) and `kernel_profiles/` (the kernel times of that GPU, measured apart). A
step time is composed of kernel times, and for TP2 of ring all-reduces at the link's configured figures (those of
`serving_config.json`; they were not measured on that machine). One number is in
neither: the pause between two forward passes. It is calibrated on the Llama-3.1-8B run (so that its mean TPOT agrees) and
used unchanged to predict the Qwen3-32B run, which nothing is fitted to.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import simpy
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq

from simrl.engine.state import Limits
from simrl.errors import InputError
from simrl.hardware import gpu, model_shape
from simrl.profilers.collectives import read_link
from simrl.profilers.kernel_tables import compose_kernel_tables
from simrl.result import Lane, Recorder
from simrl.trace import Response, Sample
from simrl.worker import SimulatedWorker, WorkerCosts

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
CALIBRATED, PREDICTED = "Llama-3.1-8B", "Qwen3-32B"


@dataclass(frozen=True)
class Run:
    """One recorded run. Times in seconds from the first arrival; `first_s` and `last_s` as measured."""

    name: str
    folder: Path
    tp: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prompt_tokens: NDArray[np.int64]
    response_tokens: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]


def read_run(data: Path, name: str) -> Run:
    folder = data / "vllm_runs" / "RTXPRO6000" / name
    try:
        rows = pd.read_json(folder / "requests.jsonl", lines=True, dtype=False)
        settings = json.loads((folder / "meta.json").read_text())["engine_kwargs"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{folder}: not a recorded vLLM run ({error}); name the folder that holds vllm_runs/"
        ) from error
    # Arrivals are on the wall clock, engine events on a monotonic one. No event is before its cause, so the smallest
    # difference between being queued and arriving is the offset (a request that found the engine listening).
    offset_s = (rows["queued_ts"] - rows["arrival_time"]).min()
    origin_s = rows["arrival_time"].min()
    return Run(
        name=name,
        folder=folder,
        tp=int(settings["tensor_parallel_size"]),
        max_num_seqs=int(settings["max_num_seqs"]),
        max_num_batched_tokens=int(settings["max_num_batched_tokens"]),
        prompt_tokens=rows["input_toks"].to_numpy(),
        response_tokens=rows["output_toks"].to_numpy(),
        arrival_s=(rows["arrival_time"] - origin_s).to_numpy(),
        first_s=(rows["first_token_ts"] - offset_s - origin_s).to_numpy(),
        last_s=(rows["last_token_ts"] - offset_s - origin_s).to_numpy(),
    )


def simulate_run(
    data: Path, run: Run, between_passes_s: float, gather_logits: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """First- and last-token times as the simulated worker has them, with the recorded arrivals."""
    folder = data / "kernel_profiles" / "RTXPRO6000" / run.name / f"tp{run.tp}"
    shape = model_shape(run.name)
    link = read_link(run.folder / "serving_config.json")
    profile = compose_kernel_tables(folder, shape, run.tp, link, between_passes_s, gather_logits)
    profile.require_covers(
        run.max_num_batched_tokens, run.max_num_seqs, int((run.prompt_tokens + run.response_tokens).max())
    )
    memory = run.tp * 0.9 * gpu("rtxpro6000").memory_bytes - shape.weight_bytes - run.tp * 4e9
    limits = Limits(run.max_num_seqs, run.max_num_batched_tokens, 16, int(memory / shape.kv_bytes_per_token) // 16)
    env = simpy.Environment()
    responses = {i: Response(int(tokens), 0.0) for i, tokens in enumerate(run.response_tokens)}
    record = Recorder([Lane("rollout-000", run.tp)])
    worker = SimulatedWorker(env, 0, profile.tables, limits, WorkerCosts(load_s=0.0), responses, record)
    first_s, last_s = np.full(run.arrival_s.size, np.nan), np.full(run.arrival_s.size, np.nan)

    def request(i: int) -> simpy.events.ProcessGenerator:
        yield env.timeout(run.arrival_s[i])
        rollout = yield worker.submit(Sample(i, 0, 0, i, 0, int(run.prompt_tokens[i])))
        first_s[i], last_s[i] = rollout.first_token_s, rollout.finished_s

    for i in range(run.arrival_s.size):
        env.process(request(i))
    env.run()
    return first_s, last_s


def errors(run: Run, first_s: NDArray[np.float64], last_s: NDArray[np.float64]) -> dict[str, object]:
    """Relative errors of the means over requests, and the measured and simulated quantiles of each quantity."""

    def quantities(first: NDArray[np.float64], last: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        return {
            "tpot_s": ((last - first) / np.maximum(run.response_tokens - 1, 1))[run.response_tokens > 1],
            "latency_s": last - run.arrival_s,
            "ttft_s": first - run.arrival_s,
        }

    measured, simulated = quantities(run.first_s, run.last_s), quantities(first_s, last_s)
    row: dict[str, object] = {"run": f"{run.name} TP{run.tp}"}
    for name in measured:
        row[f"{name.removesuffix('_s')}_mean_err"] = float(simulated[name].mean() / measured[name].mean() - 1)
    row["quantiles"] = [
        {
            "quantity": name,
            "quantile": q,
            "measured": float(np.quantile(measured[name], q)),
            "simulated": float(np.quantile(simulated[name], q)),
        }
        for name in measured
        for q in QUANTILES
    ]
    return row


def calibrate(data: Path, run: Run) -> float:
    """The pause between passes at which the mean TPOT of the run comes out."""

    def tpot_error(between_passes_s: float) -> float:
        return float(errors(run, *simulate_run(data, run, between_passes_s))["tpot_mean_err"])  # type: ignore[arg-type]

    return float(brentq(tpot_error, 0.0, 5e-3, xtol=1e-5))


def main(
    data: Annotated[Path, typer.Argument(help="the folder with vllm_runs/ and kernel_profiles/")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables (stable)")] = False,
) -> None:
    try:
        calibrated, predicted = read_run(data, CALIBRATED), read_run(data, PREDICTED)
        between_passes_s = calibrate(data, calibrated)
        rows = [errors(run, *simulate_run(data, run, between_passes_s)) for run in (calibrated, predicted)]
        gathered = errors(predicted, *simulate_run(data, predicted, between_passes_s, gather_logits=True))
    except InputError as error:
        print(f"validate_engine: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    if as_json:
        rows[1]["with_logits_gather"] = {
            key: gathered[key] for key in ("tpot_mean_err", "latency_mean_err", "ttft_mean_err")
        }
        print(json.dumps(rows, indent=1))
        return
    console = Console()
    console.print(
        f"Pause between forward passes: {between_passes_s * 1e3:.2f} ms, calibrated on the mean TPOT of {CALIBRATED}; "
        f"{PREDICTED} is predicted with it.\n"
    )
    table = Table("run", "mean TPOT error", "mean latency error", "mean TTFT error", title="Simulated against measured")
    for row in rows:
        table.add_row(str(row["run"]), *(f"{row[f'{k}_mean_err']:+.2%}" for k in ("tpot", "latency", "ttft")))
    console.print(table)
    console.print(
        "Counted are the all-reduces. vLLM also gathers the logits of both ranks; with that at the link's figures "
        f"{gathered['run']} comes out at {gathered['tpot_mean_err']:+.2%} TPOT, {gathered['latency_mean_err']:+.2%} latency.\n"
    )
    for row in rows:
        table = Table("quantity", *(f"p{q * 100:g}" for q in QUANTILES), title=f"{row['run']}: measured → simulated")
        for name in ("tpot_s", "latency_s", "ttft_s"):
            scale, unit = (1e3, "ms") if name == "tpot_s" else (1.0, "s")
            cells = [x for x in row["quantiles"] if x["quantity"] == name]  # type: ignore[union-attr, attr-defined]
            table.add_row(
                f"{name.removesuffix('_s')} [{unit}]",
                *(f"{x['measured'] * scale:.4g} → {x['simulated'] * scale:.4g}" for x in cells),
            )
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
