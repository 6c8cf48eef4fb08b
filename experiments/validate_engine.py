"""Comparison of the engine with real vLLM runs: 300 recorded requests, two GPUs, models and tensor-parallel sizes.

    python experiments/validate_engine.py ../shared/data [--json]

The data folder has `vllm_runs/` (the measured runs) and `kernel_profiles/` (the kernel times of that GPU, measured apart). A
step time is composed of kernel times, and for TP2 of ring all-reduces at the link's configured figures (those of
`serving_config.json`; they were not measured on that machine). No number is calibrated on the runs: vLLM schedules a pass
while the one before runs, so that the GPU does not wait for the host, and the pause between passes is zero.
`validate_engine.md` has the effect of each cause.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import simpy
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from experiments.shared import AsJson, errors_in_a_line
from simrl.engine.config import EngineConfig
from simrl.engine.state import Limits
from simrl.errors import InputError, first_line
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import ModelShape, model_shape
from simrl.profile.precision import weight_bytes_per_gpu
from simrl.profile.profile import TableProfile
from simrl.profile.profilers.kernel_tables import compose_kernel_tables
from simrl.profile.roofline import Link
from simrl.result.result import Lane
from simrl.runtime.recorder import Recorder
from simrl.runtime.simulated_worker import simulated_workers
from simrl.runtime.worker import WorkerCosts
from simrl.simulate.memory import LARGEST_GRAPH
from simrl.trace.trace import Response, Sample

QUANTITIES = ("tpot_s", "latency_s", "ttft_s")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
BARRED = (0.5, 0.9, 0.99)  # quantiles that have to agree
MEAN_BAR, QUANTILE_BAR = 0.01, 0.03  # relative errors
# All-gathers and reduce-scatters are NCCL's, which writes to the other GPU; the link of a cluster config is of all-reduces by
# vLLM's own kernel, which reads from it. Measured on two GPUs (aiconfigurator 0.12, NCCL 2.29.2; half precision): 31, 47, 80
# and 146 µs for an all-gather of 1, 2, 4 and 8 MiB, 31, 49, 84 and 154 for a reduce-scatter: 14 µs and 32 GB/s.
EXCHANGES = {"RTXPRO6000": Link(32e9, 14e-6, latency_each_step=False)}


@dataclass(frozen=True)
class Run:
    """One recorded run. Times in seconds from the first arrival; `first_s` and `last_s` as measured."""

    name: str
    folder: Path
    gpu: str
    tp: int
    dp: int
    ep: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prompt_tokens: NDArray[np.int64]
    response_tokens: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]


def run_folders(data: Path) -> list[Path]:
    """Return the recorded runs, `vllm_runs/<GPU>/<model>`."""
    folders = sorted(path.parent for path in (data / "vllm_runs").glob("*/*/requests.jsonl"))
    if not folders:
        raise InputError(
            f"{data}: no vllm_runs/<GPU>/<model>/requests.jsonl; name the folder that holds vllm_runs/"
        )
    return folders


def read_run(folder: Path) -> Run:
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
    if int(settings.get("pipeline_parallel_size", 1)) > 1:
        raise InputError(
            f"{folder / 'meta.json'}: pipeline_parallel_size is {settings['pipeline_parallel_size']}; "
            "engines without pipeline stages are compared: give a run of one"
        )
    tp, dp = int(settings["tensor_parallel_size"]), int(settings.get("data_parallel_size", 1))
    if dp > 1 and not model_shape(folder.name).experts:
        raise InputError(
            f"{folder / 'meta.json'}: data_parallel_size is {dp}, and {folder.name} has no experts: its ranks are engines "
            "of their own; give a run of one, or of a mixture of experts"
        )
    return Run(
        name=folder.name,
        folder=folder,
        gpu=folder.parent.name,
        tp=tp,
        dp=dp,
        ep=tp * dp if settings.get("enable_expert_parallel") else 1,
        max_num_seqs=int(settings["max_num_seqs"]),
        max_num_batched_tokens=int(settings["max_num_batched_tokens"]),
        prompt_tokens=rows["input_toks"].to_numpy(),
        response_tokens=rows["output_toks"].to_numpy(),
        arrival_s=(rows["arrival_time"] - origin_s).to_numpy(),
        first_s=(rows["first_token_ts"] - offset_s - origin_s).to_numpy(),
        last_s=(rows["last_token_ts"] - offset_s - origin_s).to_numpy(),
    )


def kv_blocks(run: Run, shape: ModelShape) -> int:
    """Return the blocks of 16 tokens of a rank's KV cache: from meta.json, where vLLM adds up the blocks of all ranks, or from
    the rest of 0.9 of the memory (vLLM's default)."""
    recorded = (
        json.loads((run.folder / "meta.json").read_text()).get("kv_cache", {}).get("num_gpu_blocks")
    )
    if recorded:
        return int(recorded) // run.dp
    engine = EngineConfig()
    memory = engine.gpu_memory_utilization * gpu(run.gpu).memory_bytes - engine.reserve_bytes
    weights = weight_bytes_per_gpu(shape, run.tp, run.dp, run.ep)
    return int(run.tp * (memory - weights) / shape.kv_bytes_per_token) // 16


def read_link(serving_config: str | Path) -> Link:
    """Return the link of an LLMServingSim cluster config: `link_bw` [GiB/s] and `link_latency` [ns].

    Its network backend (ASTRA-Sim, analytical) counts a bandwidth in 2^30 bytes and pays the latency at every step of
    the ring. Raises `InputError` for a file without those numbers.
    """
    path = Path(serving_config)
    try:
        config = json.loads(path.read_text())
        return Link(
            bytes_per_s=float(config["link_bw"]) * 2**30,
            latency_s=float(config["link_latency"]) * 1e-9,
        )
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); name an LLMServingSim cluster config"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}: no numbers 'link_bw' [GiB/s] and 'link_latency' [ns] ({first_line(error)}); "
            "name an LLMServingSim cluster config"
        ) from error


def run_profile(data: Path, run: Run) -> TableProfile:
    """Return the profile composed of the kernel times of a run's GPU, model and split."""
    folder = data / "kernel_profiles" / run.gpu / run.name / f"tp{run.tp}"
    # A collective is one kernel of NCCL: its latency is paid once, not at each step of a ring as LLMServingSim counts.
    link = replace(read_link(run.folder / "serving_config.json"), latency_each_step=False)
    return compose_kernel_tables(
        folder,
        model_shape(run.name),
        gpu(run.gpu) if run.dp > 1 else None,
        run.tp,
        link,
        between_passes_s=0.0,
        dp=run.dp,
        ep=run.ep,
        exchange=EXCHANGES.get(run.gpu),
    )


def simulate_run(
    data: Path, run: Run
) -> tuple[NDArray[np.float64], NDArray[np.float64], dict[str, int]]:
    """Return first- and last-token times of the simulated worker with the recorded arrivals, and the engine's totals."""
    profile = run_profile(data, run)
    longest = int((run.prompt_tokens + run.response_tokens).max())
    profile.require_covers(run.max_num_batched_tokens, run.max_num_seqs, longest)
    blocks = kv_blocks(run, model_shape(run.name))
    # vLLM's defaults of that version; no two requests have one prompt, but those that were preempted find their own blocks.
    limits = Limits(
        run.max_num_seqs,
        run.max_num_batched_tokens,
        16,
        blocks,
        async_scheduling=True,
        prefix_caching=True,
        dp=run.dp,
        graph_tokens=min(2 * run.max_num_seqs, LARGEST_GRAPH, run.max_num_batched_tokens),
    )
    env = simpy.Environment()
    responses = {i: Response(int(tokens), 0.0) for i, tokens in enumerate(run.response_tokens)}
    record = Recorder([Lane("rollout-000", run.tp * run.dp)])
    (worker,) = simulated_workers(
        env, 1, profile.tables, limits, WorkerCosts(load_s=0.0), responses, record
    )
    first_s, last_s = np.full(run.arrival_s.size, np.nan), np.full(run.arrival_s.size, np.nan)

    def request(i: int) -> simpy.events.ProcessGenerator:
        yield env.timeout(run.arrival_s[i])
        rollout = yield worker.submit(Sample(i, 0, 0, i, 0, int(run.prompt_tokens[i])))
        first_s[i], last_s[i] = rollout.first_token_s, rollout.finished_s

    for i in range(run.arrival_s.size):
        env.process(request(i))
    env.run()
    return first_s, last_s, worker.engine.totals


def errors(run: Run, first_s: NDArray[np.float64], last_s: NDArray[np.float64]) -> dict[str, Any]:
    """Return relative errors of the means over requests and of the quantiles of each quantity, and which are within the
    bars."""

    def quantities(
        first: NDArray[np.float64], last: NDArray[np.float64]
    ) -> dict[str, NDArray[np.float64]]:
        return {
            "tpot_s": ((last - first) / np.maximum(run.response_tokens - 1, 1))[
                run.response_tokens > 1
            ],
            "latency_s": last - run.arrival_s,
            "ttft_s": first - run.arrival_s,
        }

    measured, simulated = quantities(run.first_s, run.last_s), quantities(first_s, last_s)
    ranks = f" DP{run.dp}" * (run.dp > 1) + f" EP{run.ep}" * (run.ep > 1)
    row: dict[str, Any] = {"run": f"{run.name} TP{run.tp}{ranks}, {run.gpu}"}
    for name in measured:
        row[f"{name.removesuffix('_s')}_mean_err"] = float(
            simulated[name].mean() / measured[name].mean() - 1
        )
    row["quantiles"] = []
    for name in measured:
        for q in QUANTILES:
            pair = [float(np.quantile(each[name], q)) for each in (measured, simulated)]
            error = pair[1] / pair[0] - 1
            within = abs(error) <= QUANTILE_BAR if q in BARRED else None
            found = {"quantity": name, "quantile": q, "measured": pair[0], "simulated": pair[1]}
            row["quantiles"].append({**found, "err": error, "within_bar": within})
    means = [abs(row[f"{name.removesuffix('_s')}_mean_err"]) <= MEAN_BAR for name in QUANTITIES]
    row["means_within_bar"] = dict(zip(QUANTITIES, means, strict=True))
    row["within_bars"] = all(means) and all(x["within_bar"] is not False for x in row["quantiles"])
    return row


def main(
    data: Annotated[Path, typer.Argument(help="the folder with vllm_runs/ and kernel_profiles/")],
    as_json: AsJson = False,
) -> None:
    rows = []
    with errors_in_a_line("validate_engine"):
        for folder in run_folders(data):
            run = read_run(folder)
            first_s, last_s, totals = simulate_run(data, run)
            rows.append(errors(run, first_s, last_s) | {"preemptions": totals["preemptions"]})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    console = Console()
    console.print(
        f"Simulated against measured, nothing calibrated. Bars: {MEAN_BAR:.0%} on means, {QUANTILE_BAR:.0%} on "
        f"{', '.join(f'p{q * 100:g}' for q in BARRED)}; ✗ is beyond its bar.\n"
    )
    for row in rows:
        title = f"{row['run']}: measured → simulated, {'within' if row['within_bars'] else 'not all within'} the bars"
        table = Table("quantity", "mean", *(f"p{q * 100:g}" for q in QUANTILES), title=title)
        for name in QUANTITIES:
            scale, unit = (1e3, "ms") if name == "tpot_s" else (1.0, "s")
            short = name.removesuffix("_s")
            mean = f"{row[f'{short}_mean_err']:+.2%}{'' if row['means_within_bar'][name] else ' ✗'}"
            cells = [x for x in row["quantiles"] if x["quantity"] == name]
            table.add_row(
                f"{short} [{unit}]",
                mean,
                *(
                    f"{x['measured'] * scale:.4g} → {x['simulated'] * scale:.4g}\n{x['err']:+.2%}"
                    f"{' ✗' if x['within_bar'] is False else ''}"
                    for x in cells
                ),
            )
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
