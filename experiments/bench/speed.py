"""Speed of the simulator, each figure beside its bar. One core; medians of repeats after a warm-up.

python experiments/bench/speed.py [--once] [--json]
"""

import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated

import numpy as np
import typer

from experiments.shared import AsJson, bench_row, median_s, print_bench
from simrl.engine.engine import one_engine
from simrl.engine.state import Limits
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profilers.roofline import roofline_profile
from simrl.scenario.model import Scenario
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.decoding import MODEL, RUNS, Rule, chains, packed
from simrl.speculation.draft_times import model_drafts, text_drafts
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns
from simrl.speculation.windows import Fixed

LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=8192, block_size=16, kv_blocks=50_000)
# of the bars of speculation: passes times the requests that verify a draft in each
REQUEST_PASSES = 30e6
LENGTHS = {"cap_tokens": 16384, "mean_tokens": 5070, "sigma": 0.9, "prompt_share": 0.6}


def scenario(
    name: str, gpus: int, steps: int, prompts_per_step: int, system: dict[str, object]
) -> Scenario:
    return Scenario.model_validate(
        {
            "name": name,
            "steps": steps,
            "model": "qwen3-14b",
            "cluster": {"gpu": "h100", "gpus": gpus, "tp": 2},
            "workload": {
                "synthetic": {
                    "steps": steps,
                    "prompts_per_step": prompts_per_step,
                    "group": 16,
                    **LENGTHS,
                }
            },
            "profile": {"roofline": {}},
            "system": system,
        }
    )


def batches() -> list[list[int]]:
    return (
        np.minimum(np.random.default_rng(0).lognormal(8.25, 0.9, (256, 64)), 16384)
        .astype(int)
        .tolist()
    )


def engines_of_a_batch() -> str:
    """Run the engines of 256 workers × 64 samples to their end, without SimPy."""
    tables = roofline_profile(model_shape("qwen3-14b"), gpu("h100"), 2).tables
    lengths = batches()
    passes = 0
    for batch in lengths:
        engine = one_engine(tables, LIMITS)
        for tokens in batch:
            engine.submit(512, max(tokens, 1))
        engine.run_until_idle()
        passes += engine.totals["passes"]
    return f"{sum(map(sum, lengths)) / 1e6:.0f} M tokens, {passes / 1e6:.1f} M passes"


def speculative(source: int, repeats: int) -> tuple[float, str]:
    """Decode the responses of `batches` with drafts of four tokens, of a model or replayed from runs. Return the seconds for
    30 M verified drafts."""
    tables = roofline_profile(model_shape("qwen3-14b"), gpu("h100"), 2).tables
    lengths = batches()
    rule = Rule(window=Fixed(tokens=4).rule)
    if source == MODEL:
        times = model_drafts(model_shape("qwen2.5-0.5b"), gpu("h100"))
        decoding = chains(rule, times, ModelAcceptance(by_position=(0.75, 0.7, 0.65)))
    else:
        runs = runs_of(sum(map(sum, lengths)))
        decoding = chains(rule, text_drafts())._replace(runs=packed(runs))
    verified = 0

    def run() -> str:
        nonlocal verified
        verified, accepted, offset = 0, 0, 0
        for batch in lengths:
            engine = one_engine(tables, LIMITS, decoding)
            slots = []
            for tokens in batch:
                slots.append(engine.submit(512, tokens))
                engine.draft_from(slots[-1], source, offset)
                offset += tokens
            engine.run_until_idle()
            drafted = [engine.drafted(slot) for slot in slots]
            accepted += sum(d[1] for d in drafted)
            verified += sum(d[2] for d in drafted)
        return f"{verified / 1e6:.0f} M in truth, {1 + accepted / verified:.1f} tokens each"

    seconds, what = measure(run, repeats)
    return seconds * REQUEST_PASSES / verified, what


def runs_of(tokens: int) -> AcceptRuns:
    """Return drafts for every place of `tokens` tokens; each drafted token is right with 85 %."""
    rng = np.random.default_rng(1)
    accepted = np.empty(tokens, dtype=np.uint8)
    for start in range(0, tokens, 1_000_000):  # all at once would take gigabytes
        part = accepted[start : start + 1_000_000]
        wrong = np.flatnonzero(rng.random(part.size) >= 0.85)
        places = np.arange(part.size)
        next_wrong = np.r_[wrong, part.size][np.searchsorted(wrong, places)]
        part[:] = np.minimum(next_wrong - places, MOST_DRAFT_TOKENS)
    return AcceptRuns(
        np.zeros(1, dtype=np.int64), np.full(tokens, MOST_DRAFT_TOKENS, dtype=np.uint8), accepted
    )


def one_long_queue() -> str:
    """Run one engine with 2,048 requests queued at once, at most 256 running."""
    engine = one_engine(roofline_profile(model_shape("qwen3-14b"), gpu("h100"), 2).tables, LIMITS)
    lengths = (
        np.minimum(np.random.default_rng(0).lognormal(7.5, 0.8, 2048), 8192).astype(int).tolist()
    )
    for tokens in lengths:
        engine.submit(512, max(tokens, 1))
    engine.run_until_idle()
    return f"{sum(lengths) / 1e6:.0f} M tokens"


def simulation(case: Scenario) -> Callable[[], str]:
    prepared = prepare(case)

    def run() -> str:
        result = simulate_prepared(prepared)
        return f"{prepared.workers} workers, {result.samples.num_rows} samples"

    return run


def per_step(case: Callable[[int], Scenario], repeats: int) -> tuple[float, str]:
    """Return the seconds of one more step: a run of three steps less a run of one, halved. (One-step-off leaves a batch in
    flight at its end, so a run of n steps generates more than n batches.)"""
    (one_s, what), (three_s, _) = (measure(simulation(case(steps)), repeats) for steps in (1, 3))
    return (three_s - one_s) / 2, what.split(",")[0] + ", 16384 samples a step"


def measure(run: Callable[[], str], repeats: int, warm_up: bool = True) -> tuple[float, str]:
    said: list[str] = []
    return median_s(lambda: said.append(run()), repeats, warm_up), said[-1]


def second_process_s(repeats: int) -> float:
    """Return the seconds from the start of Python to the first simulated pass, kernels cached on disk."""
    code = "from experiments.bench import speed; speed.one_long_queue()"
    return median_s(
        lambda: subprocess.run([sys.executable, "-c", code], check=True), repeats, warm_up=False
    )


def main(
    once: Annotated[
        bool, typer.Option("--once", help="nothing is repeated: quicker, and noisier")
    ] = False,
    as_json: AsJson = False,
) -> None:
    few, more = (1, 1) if once else (3, 5)

    def one_step_off(steps: int) -> Scenario:
        return scenario(
            "step", 680, steps, 1024, {"name": "one_step_off", "rollout_share": 512 / 680}
        )

    areal = scenario("areal", 256, 100, 128, {"name": "areal", "eta": 8})
    rows = []

    def add(name: str, measured: tuple[float, str], bar_s: float) -> None:
        rows.append(bench_row(f"{name} ({measured[1]})", measured[0], bar_s))

    add("engines of 256 workers × 64 samples", measure(engines_of_a_batch, more), 0.15)
    add("one engine, 2,048 queued", measure(one_long_queue, more), 0.05)
    add("one more step of one-step-off", per_step(one_step_off, few), 1.0)
    measured = measure(simulation(areal), 1, warm_up=False)  # the others compiled its kernels
    add("100 AReaL steps, 256 GPUs, 2,048 samples a step", measured, 30.0)
    rows.append(
        bench_row(
            "peak RSS of all that",
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
            1.0,
            "GB",
        )
    )
    add("30 M verified drafts, acceptance from a model", speculative(MODEL, few), 1.5)
    add("30 M verified drafts, replay of recorded runs", speculative(RUNS, few), 0.5)
    rows.append(bench_row("second process: start to first passes", second_process_s(few), 1.5))
    print_bench(rows, as_json)


if __name__ == "__main__":
    typer.run(main)
