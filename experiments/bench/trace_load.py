"""Seconds to write and to load a trace of 100 steps and 1.6 million samples. Bar: a load in less than 1 s.

python experiments/bench/trace_load.py [--json]
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import typer

from experiments.shared import AsJson
from simrl.trace.synthesis import LengthModel, synthesise
from simrl.trace.trace import read_trace, write_trace

BAR_S = 1.0
MODEL = LengthModel(
    steps=100,
    prompts_per_step=1000,
    group=16,
    cap_tokens=16384,
    prompts=10_000,
    mean_tokens=(1000, 10_000),
    sigma=0.8,
    prompt_sigma=0.4,
)


def seconds(action, *arguments):
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    result = action(*arguments)
    return time.perf_counter() - start, result


def main(as_json: AsJson = False) -> None:
    synthesis_s, trace = seconds(synthesise, MODEL, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.parquet"
        write_s, _ = seconds(write_trace, trace, path)
        size_mb = path.stat().st_size / 1e6
        loads = [seconds(read_trace, path) for _ in range(5)]
        if any(loaded.table != trace.table for _, loaded in loads):
            raise SystemExit("the trace that was read is not the one that was written")
    load_s = statistics.median(s for s, _ in loads)
    if as_json:
        print(
            json.dumps(
                {
                    "rows": len(trace),
                    "load_s": load_s,
                    "bar_s": BAR_S,
                    "write_s": write_s,
                    "size_mb": size_mb,
                }
            )
        )
        return
    print(f"synthesis   {synthesis_s:.2f} s, {len(trace):,} rows, {MODEL.steps} steps")
    print(f"write       {write_s:.2f} s, {size_mb:.1f} MB")
    print(
        f"load        {load_s:.3f} s, median of 5: {load_s / BAR_S:.2f} of the bar of {BAR_S:g} s"
    )


if __name__ == "__main__":
    typer.run(main)
