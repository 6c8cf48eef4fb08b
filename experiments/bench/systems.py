"""Speed and memory of simulating every system, each figure beside its bar, and beside the engines alone: the seconds in which
they decode the responses of a step that are all there at first. A process for each system.

python experiments/bench/systems.py [NAME ...] [--long] [--json]
"""

import json
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.shared import AsJson
from simrl.engine.engine import one_engine
from simrl.scenario.model import Scenario
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import compile_engine, compile_training, simulate_prepared
from simrl.systems.recipes import RECIPES

BAR_FIRST_S, BAR_STEP_S, BAR_LONG_S, BAR_GB = 2.0, 0.8, 10.0, 1.5
BARS_STEP_S = {"verl_colocated": 0.35, "one_step_off": 0.35, "specactor": 15.0}
SLOW = (
    "specactor",
)  # its two loops wait for each other, so engines stop at each verification; measured when named


def scenario(system: str, gpus: int, steps: int, prompts_per_step: int) -> Scenario:
    """Return a 14B math model, responses of up to 16K tokens, sixteen a prompt, five steps an epoch."""
    workload = {
        "steps": max(steps, 5),
        "prompts_per_step": prompts_per_step,
        "group": 16,
        "prompts": 5 * prompts_per_step,
        "cap_tokens": 16384,
        "mean_tokens": 4000,
        "sigma": 0.9,
        "prompt_share": 0.6,
    }
    return Scenario.model_validate(
        {
            "name": "bench",
            "steps": steps,
            "model": "qwen3-14b",
            "cluster": {"gpu": "h100", "gpus": gpus, "tp": 2},
            "workload": {"synthetic": workload},
            "profile": {"roofline": {"between_passes_s": 0.001}},
            "system": {"name": system},
        }
    )


def simulate_s(case: Scenario) -> float:
    prepared = prepare(case)
    started = time.perf_counter()
    simulate_prepared(prepared)
    return time.perf_counter() - started


def engines_s(prepared: Prepared) -> float:
    """Return the seconds in which the engines of all workers decode the first step, without SimPy."""
    _, begin, end = prepared.trace.step_slices[0]
    prompts, responses = (
        prepared.trace.column(f"{name}_tokens")[begin:end].tolist()
        for name in ("prompt", "response")
    )
    engines = [
        one_engine(prepared.profile.tables, prepared.limits) for _ in range(prepared.workers)
    ]
    for i, lengths in enumerate(zip(prompts, responses, strict=True)):
        engines[i % len(engines)].submit(*lengths)
    started = time.perf_counter()
    for engine in engines:
        engine.run_until_idle()
    return time.perf_counter() - started


def measure(system: str, long: bool) -> dict[str, object]:
    """Return the seconds of the first step of 1,024 GPUs, of one more, of 100 steps of 256 GPUs; peak memory."""
    compile_engine()
    compile_training()
    simulate_s(scenario(system, 64, 2, 8))
    one = [simulate_s(scenario(system, 1024, 1, 1024)) for _ in range(3)]
    three = simulate_s(scenario(system, 1024, 3, 1024))
    return {
        "system": system,
        "first_step_s": median(one),
        "further_step_s": (three - median(one)) / 2,
        "engines_s": median(engines_s(prepare(scenario(system, 1024, 1, 1024))) for _ in range(3)),
        "hundred_steps_s": simulate_s(scenario(system, 256, 100, 128)) if long else None,
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main(
    systems: Annotated[
        list[str] | None, typer.Argument(help="systems to measure (default: all but specactor)")
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="100 steps of 256 GPUs as well: some minutes")
    ] = False,
    here: Annotated[bool, typer.Option("--here", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    if here:
        print(json.dumps(measure((systems or [])[0], long)))
        return
    command = [sys.executable, __file__, "--here", *(["--long"] if long else [])]
    rows = []
    names = systems or [name for name in RECIPES if name not in SLOW]
    for system in track(
        names, description="measuring", console=Console(stderr=True), transient=True
    ):
        found = subprocess.run([*command, system], check=True, capture_output=True, text=True)
        rows.append(json.loads(found.stdout))
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(
        "system",
        f"first step of 1,024 GPUs,\n16,384 samples (bar {BAR_FIRST_S:g} s)",
        "one more step\n(bar)",
        "over the\nengines alone",
        f"100 steps of 256 GPUs,\n2,048 samples each (bar {BAR_LONG_S:g} s)",
        f"peak RSS\n(bar {BAR_GB:g} GB)",
    )
    for row in rows:
        bar_s = BARS_STEP_S.get(row["system"], BAR_STEP_S)
        first, further, long_run, memory = (
            "-" if row[key] is None else f"{row[key]:.2f} {unit} ({row[key] / bar:.2f})"
            for key, unit, bar in (
                ("first_step_s", "s", BAR_FIRST_S),
                ("further_step_s", f"s of {bar_s:g}", bar_s),
                ("hundred_steps_s", "s", BAR_LONG_S),
                ("peak_rss_gb", "GB", BAR_GB),
            )
        )
        ratio = f"{row['further_step_s'] / row['engines_s']:.0f}× {row['engines_s']:.3f} s"
        table.add_row(str(row["system"]), first, further, ratio, long_run, memory)
    Console(width=140).print(table)
    print("In brackets: measured over its bar.")


if __name__ == "__main__":
    typer.run(main)
