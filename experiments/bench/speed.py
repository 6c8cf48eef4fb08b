"""How fast the simulator is, each figure beside its bar. One core; medians of repeats after a warm-up.

python experiments/bench/speed.py [--once] [--json]
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from simrl.engine import Engine
from simrl.engine.state import Limits
from simrl.hardware import gpu, model_shape
from simrl.profilers.roofline import roofline_profile
from simrl.scenario import Scenario
from simrl.simulate import prepare, simulate_prepared
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.decoding import MODEL, RUNS, chains, packed, rules
from simrl.speculation.draft_times import model_drafts, text_drafts
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns
from simrl.speculation.windows import Fixed

LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=8192, block_size=16, kv_blocks=50_000)
REQUEST_PASSES = 30e6  # of the bars of speculation: passes times the requests that verify a draft in each
LENGTHS = {"cap_tokens": 16384, "mean_tokens": 5070, "sigma": 0.9, "prompt_share": 0.6}


def scenario(name: str, gpus: int, steps: int, prompts_per_step: int, system: dict[str, object]) -> Scenario:
    return Scenario.model_validate(
        {
            "name": name,
            "steps": steps,
            "model": "qwen3-14b",
            "cluster": {"gpu": "h100", "gpus": gpus, "tp": 2},
            "workload": {"synthetic": {"steps": steps, "prompts_per_step": prompts_per_step, "group": 16, **LENGTHS}},
            "profile": {"roofline": {}},
            "system": system,
        }
    )


def batches() -> list[list[int]]:
    """Response tokens of 256 workers × 64 samples."""
    return np.minimum(np.random.default_rng(0).lognormal(8.25, 0.9, (256, 64)), 16384).astype(int).tolist()


def engines_of_a_batch() -> str:
    """256 workers × 64 samples, each engine run to its end, without SimPy."""
    tables = roofline_profile(model_shape("qwen3-14b"), gpu("h100"), 2).tables
    lengths = batches()
    passes = 0
    for batch in lengths:
        engine = Engine(tables, LIMITS)
        for tokens in batch:
            engine.submit(512, max(tokens, 1))
        engine.run_until_idle()
        passes += engine.totals["passes"]
    return f"{sum(map(sum, lengths)) / 1e6:.0f} M tokens, {passes / 1e6:.1f} M passes"


def speculative(source: int, repeats: int) -> tuple[float, str]:
    """The same responses decoded with drafts of four tokens: of a model, or replayed from runs. Seconds for 30 M times that a
    request verifies a draft."""
    tables = roofline_profile(model_shape("qwen3-14b"), gpu("h100"), 2).tables
    lengths = batches()
    rule = rules(window=Fixed(tokens=4).rule)
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
            engine = Engine(tables, LIMITS, decoding)
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
    """Drafts of which each token is right with 85 %, for every place of so many tokens."""
    rng = np.random.default_rng(1)
    accepted = np.empty(tokens, dtype=np.uint8)
    for start in range(0, tokens, 1_000_000):  # all at once would take gigabytes
        part = accepted[start : start + 1_000_000]
        wrong = np.flatnonzero(rng.random(part.size) >= 0.85)
        places = np.arange(part.size)
        next_wrong = np.r_[wrong, part.size][np.searchsorted(wrong, places)]
        part[:] = np.minimum(next_wrong - places, MOST_DRAFT_TOKENS)
    return AcceptRuns(np.zeros(1, dtype=np.int64), np.full(tokens, MOST_DRAFT_TOKENS, dtype=np.uint8), accepted)


def one_long_queue() -> str:
    """One engine, 2,048 requests queued at once, at most 256 running."""
    engine = Engine(roofline_profile(model_shape("qwen3-14b"), gpu("h100"), 2).tables, LIMITS)
    lengths = np.minimum(np.random.default_rng(0).lognormal(7.5, 0.8, 2048), 8192).astype(int).tolist()
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
    """Seconds that one more step takes: a run of three steps less a run of one, halved. (One-step-off leaves a batch in
    flight at its end, so a run of n steps generates more than n batches.)"""
    (one_s, what), (three_s, _) = (measure(simulation(case(steps)), repeats) for steps in (1, 3))
    return (three_s - one_s) / 2, what.split(",")[0] + ", 16384 samples a step"


def measure(run: Callable[[], str], repeats: int, warm_up: bool = True) -> tuple[float, str]:
    if warm_up:
        run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        what = run()
        seconds.append(time.perf_counter() - started)
    return median(seconds), what


def second_process_s(repeats: int) -> float:
    """From the start of Python to the first simulated pass, kernels cached on disk."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import speed; speed.one_long_queue()"
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def main(
    once: Annotated[bool, typer.Option("--once", help="nothing is repeated: quicker, and noisier")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table (stable)")] = False,
) -> None:
    few, more = (1, 1) if once else (3, 5)

    def one_step_off(steps: int) -> Scenario:
        return scenario("step", 680, steps, 1024, {"name": "one_step_off", "rollout_share": 512 / 680})

    areal = scenario("areal", 256, 100, 128, {"name": "areal", "eta": 8})
    rows = []
    for name, run, bar_s in (
        ("engines of 256 workers × 64 samples", engines_of_a_batch, 0.15),
        ("one engine, 2,048 queued", one_long_queue, 0.05),
    ):
        seconds, what = measure(run, more)
        rows.append({"what": f"{name} ({what})", "value": seconds, "unit": "s", "bar": bar_s})
    seconds, what = per_step(one_step_off, few)
    rows.append({"what": f"one more step of one-step-off ({what})", "value": seconds, "unit": "s", "bar": 1.0})
    seconds, what = measure(simulation(areal), 1, warm_up=False)  # the others compiled what it runs
    name = "100 AReaL steps, 256 GPUs, 2,048 samples a step"
    rows.append({"what": f"{name} ({what})", "value": seconds, "unit": "s", "bar": 30.0})
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rows.append({"what": "peak RSS of all that", "value": rss, "unit": "GB", "bar": 1.0})
    for name, source, bar_s in (("acceptance from a model", MODEL, 1.5), ("replay of recorded runs", RUNS, 0.5)):
        seconds, what = speculative(source, few)
        rows.append({"what": f"30 M verified drafts, {name} ({what})", "value": seconds, "unit": "s", "bar": bar_s})
    rows.append(
        {"what": "second process: start to first passes", "value": second_process_s(few), "unit": "s", "bar": 1.5}
    )
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("what", "measured", "bar", "measured / bar")
    for row in rows:
        value, bar = float(row["value"]), float(row["bar"])
        table.add_row(str(row["what"]), f"{value:.3f} {row['unit']}", f"{bar:g} {row['unit']}", f"{value / bar:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
