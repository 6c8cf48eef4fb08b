"""simrl and other simulators of inference engines on one workload: whole processes, loops, memory, and how far apart they are.

simrl's program is `one_engine.py`, which says the workload.

python experiments/bench/peers.py --aisimulate PROGRAM [--repeats 5] [--write]

AISimulate is installed apart: python -m venv peers && peers/bin/pip install aisimulate==0.13.0.dev202610270000000085
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
import yaml

from experiments.bench.one_engine import LIMITS, PROMPT_TOKENS, responses
from experiments.shared import Small, markdown_of, shrink, write_parts

PAGE = Path(__file__).with_suffix(".md")
TRAFFIC = {"load": {"type": "trace_timestamps"}}
WORKER = {
    "scheduler": {
        "max_batched_tokens": LIMITS.max_num_batched_tokens,
        "max_sequences": LIMITS.max_num_seqs,
    },
    "kv_cache": {
        "block_size": LIMITS.block_size,
        "prefix_caching": False,
        "capacity": {"type": "fixed", "blocks": LIMITS.kv_blocks},
    },
}
REQUESTS = (1024, 2048)
ENGINE = {"mode": "aggregated", "model": "Qwen/Qwen3-8B", "hardware": "h100_sxm", "backend": "vllm"}


def aisimulate_config(folder: Path, requests: int) -> Path:
    rows = [
        {"timestamp": 0, "input_length": PROMPT_TOKENS, "output_length": tokens, "hash_ids": [i]}
        for i, tokens in enumerate(responses(requests))
    ]
    trace = folder / f"{requests}.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {
        "type": "trace",
        "paths": [str(trace)],
        "format": "mooncake",
        "block_size": PROMPT_TOKENS,
    }
    config = {
        "traffic": {"source": source, **TRAFFIC},
        "engine": {**ENGINE, "workers": {"aggregated": WORKER}},
    }
    file = folder / f"{requests}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def run(command: list[str]) -> tuple[float, float, str]:
    """Return the seconds and the peak memory in MB of a process, and what it printed."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    printed, said = process.stdout.read(), process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"peers: {command[0]} failed: {said.strip()[-300:]}")
    return time.perf_counter() - started, used.ru_maxrss / 1e3, printed


def simrl_process(requests: int) -> dict[str, float]:
    seconds, memory, printed = run(
        [sys.executable, str(PAGE.with_name("one_engine.py")), str(requests)]
    )
    return {"process_s": seconds, "memory_mb": memory, **json.loads(printed)}


def aisimulate_process(program: str, requests: int, folder: Path) -> dict[str, float]:
    out = folder / f"out{requests}"
    config = aisimulate_config(folder, requests)
    command = [
        program,
        "predict",
        "--config",
        str(config),
        "--output-dir",
        str(out),
        "--overwrite",
        "--format",
        "json",
    ]
    seconds, memory, _ = run(command)
    found = json.loads((out / "prediction.json").read_text())
    return {
        "process_s": seconds,
        "memory_mb": memory,
        "loop_s": found["wall_time_ms"] / 1e3,
        "makespan_s": found["duration_ms"] / 1e3,
    }


def compared(requests: int, program: str | None, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each simulator; the processes of both are run in turn."""
    runs: dict[str, list[dict[str, float]]] = {
        "simrl": [],
        **({"AISimulate": []} if program else {}),
    }
    with tempfile.TemporaryDirectory() as name:
        simrl_process(requests)  # compiles
        for _ in range(repeats):
            runs["simrl"].append(simrl_process(requests))
            if program:
                runs["AISimulate"].append(aisimulate_process(program, requests, Path(name)))
    medians = {
        name: {key: median(each[key] for each in found) for key in found[0]}
        for name, found in runs.items()
    }
    own = medians["simrl"]
    return [
        {
            "requests": f"{requests:,}",
            "simulator": name,
            "whole process": f"{m['process_s']:.2f} s",
            "× simrl": f"{m['process_s'] / own['process_s']:.1f}",
            "loop, first / warm": (f"{m['first_s']:.3f} / " if "first_s" in m else "")
            + f"{m['loop_s']:.3f} s",
            "loop × simrl's warm": f"{m['loop_s'] / own['loop_s']:.0f}",
            "peak memory": f"{m['memory_mb']:.0f} MB",
            "last response": f"{m['makespan_s']:.1f} s",
            "apart": f"{m['makespan_s'] / own['makespan_s'] - 1:+.1%}",
        }
        for name, m in medians.items()
    ]


def main(
    aisimulate: Annotated[
        str | None, typer.Option(help="AISimulate's program; without it, simrl alone")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="processes of each; medians are printed")] = 5,
    small: Small = False,
    write: Annotated[
        bool, typer.Option("--write", help=f"write the table into {PAGE.name}, too")
    ] = False,
) -> None:
    shrink(globals(), small, REQUESTS=(64,))
    rows = [row for requests in REQUESTS for row in compared(requests, aisimulate, repeats)]
    lines = markdown_of(rows)
    print("\n".join(lines))
    if write:
        write_parts(PAGE, {"peers": lines})


if __name__ == "__main__":
    typer.run(main)
