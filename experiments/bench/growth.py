"""How the time and the memory of a simulation grow with the cluster, and with the samples. A process for each point.

python experiments/bench/growth.py [SYSTEM ...] [--most 1000000] [--write]
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer
from rich.console import Console
from rich.progress import track

from experiments.bench.systems import scenario, simulate_s
from experiments.shared import Small, markdown_of, shrink, write_parts
from simrl.show.style import SERIES
from simrl.simulate.prepare import prepare
from simrl.simulate.run import compile_engine, compile_training, simulate_prepared

PAGE, PICTURE = (Path(__file__).with_name(name) for name in ("peers.md", "growth.png"))
GPUS = (64, 256, 1024, 4096)
STEP_SAMPLES = 16_384  # of a step, on each number of GPUs, and on 1,024 GPUs where the samples grow
SAMPLES = (1024, 10_240, 102_400, 1_024_000, 10_240_000)
SYSTEMS = ("verl_colocated", "one_step_off", "areal", "rollpacker")


def measure(system: str, gpus: int, samples: int) -> dict[str, float]:
    """Return the seconds to prepare and to simulate `samples` samples, in steps of at most `STEP_SAMPLES`, and the memory."""
    compile_engine()
    compile_training()
    simulate_s(scenario(system, 64, 2, 8))
    step = min(samples, STEP_SAMPLES)
    started = time.perf_counter()
    prepared = prepare(scenario(system, gpus, samples // step, step // 16))
    ready = time.perf_counter()
    simulate_prepared(prepared)
    over = time.perf_counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"prepare_s": ready - started, "simulate_s": over - ready, "memory_gb": memory}


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw seconds and memory over GPUs and over samples."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex="col")
    for axis in axes.flat:
        axis.set_prop_cycle(color=SERIES)
    for column, over, title in (
        (0, "gpus", f"a step of {STEP_SAMPLES:,} samples"),
        (1, "samples", "samples on 1,024 GPUs"),
    ):
        for system in dict.fromkeys(row["system"] for row in rows):
            mine = [row for row in rows if row["system"] == system and row["over"] == over]
            for axis, what in zip(axes[:, column], ("simulate_s", "memory_gb"), strict=True):
                x, y = ([row[key] for row in mine] for key in (over, what))
                axis.plot(x, y, "o-", label=system, markersize=4)
        axes[0, column].set(xscale="log", yscale="log", ylabel="simulation [s]")
        axes[1, column].set(xscale="log", ylim=(0, None), ylabel="memory, peak [GB]")
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
        axes[0, column].set_title(title, fontsize=10)
        axes[1, column].set_xlabel({"gpus": "GPUs", "samples": "samples"}[over])
        if over == "gpus":
            axes[1, column].set_xticks(GPUS, [f"{gpus:,}" for gpus in GPUS], minor=False)
            axes[1, column].minorticks_off()
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main(
    systems: Annotated[
        list[str] | None, typer.Argument(help=f"default: {', '.join(SYSTEMS)}")
    ] = None,
    most: Annotated[
        int, typer.Option(help="samples at most; ten millions take minutes a system")
    ] = 1_024_000,
    write: Annotated[
        bool, typer.Option("--write", help=f"write {PAGE.name} and {PICTURE.name}, too")
    ] = False,
    here: Annotated[str | None, typer.Option(hidden=True)] = None,
    small: Small = False,
) -> None:
    shrink(
        globals(),
        small,
        GPUS=(64, 128),
        STEP_SAMPLES=1024,
        SAMPLES=(1024, 2048),
        SYSTEMS=("areal",),
    )
    if here is not None:
        print(json.dumps(measure(*json.loads(here))))
        return
    points = [
        (system, "gpus", gpus, STEP_SAMPLES) for system in systems or SYSTEMS for gpus in GPUS
    ]
    points += [
        (s, "samples", 1024, samples)
        for s in systems or SYSTEMS
        for samples in SAMPLES
        if samples <= most
    ]
    rows: list[dict[str, Any]] = []
    for system, over, gpus, samples in track(
        points, description="measuring", console=Console(stderr=True), transient=True
    ):
        command = [
            sys.executable,
            __file__,
            "--here",
            json.dumps([system, gpus, samples]),
            *["--small"] * small,
        ]
        found = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        rows.append({"system": system, "over": over, "gpus": gpus, "samples": samples, **found})
    lines = markdown_of(
        [
            {
                "system": row["system"],
                "GPUs": f"{row['gpus']:,}",
                "samples": f"{row['samples']:,}",
                "simulate": f"{row['simulate_s']:.2f} s",
                "µs a sample": f"{row['simulate_s'] / row['samples'] * 1e6:.0f}",
                "prepare": f"{row['prepare_s']:.2f} s",
                "peak memory": f"{row['memory_gb']:.2f} GB",
            }
            for row in rows
        ]
    )
    print("\n".join(lines))
    if write:
        draw(rows)
        write_parts(PAGE, {"growth": lines})


if __name__ == "__main__":
    typer.run(main)
