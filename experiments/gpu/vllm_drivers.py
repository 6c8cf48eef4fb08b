"""Measures the seconds of a decode pass by the way a vLLM engine is driven: in this process, by `LLM.generate`, by a streaming
`AsyncLLM`, with and without asynchronous scheduling, log-probs and stop strings, by the number of sequences.

    python3 experiments/gpu/vllm_drivers.py --out FILE.json --model FOLDER [--device cpu] [--seconds 120]

`FOLDER` holds a config.json; weights are random. Every way has a process of its own. Up to `--at-once` engines start
together; none is measured before all of them are up, and one is measured at a time. A batch of n equal requests decodes
`TOKENS` tokens; what a pass takes is the time beyond half as many tokens, over the passes between them.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

TOKENS = 96
MOST_START_S = 100.0  # beyond it, engines that are up do not wait for the others
WAYS = {
    "in process": {},
    "LLM.generate": {},
    "LLM.generate, asynchronous scheduling": {"async_scheduling": True},
    "AsyncLLM, streaming every token": {},
    "AsyncLLM, streaming, asynchronous scheduling": {"async_scheduling": True},
    "AsyncLLM, final output": {},
    "AsyncLLM, streaming, log-probs": {"logprobs": 0},
    "LLM.generate, log-probs": {"logprobs": 0},
}
COUNTS = (1, 8, 32, 64, 128, 256)

if (
    find_spec("torchvision") is None
):  # vLLM 0.26 imports it for the warm-up of another model's kernels; an engine's process imports this file
    without = ModuleType("vllm.model_executor.warmup.minimax_m3_msa_warmup")
    without.minimax_m3_msa_warmup = lambda worker: None  # type: ignore[attr-defined]
    sys.modules[without.__name__] = without


def arguments(model: str, device: str, way: str) -> dict[str, Any]:
    """Return vLLM's arguments of an engine."""
    common = {
        "model": model,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": 1024,
        "max_num_seqs": max(COUNTS),
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "async_scheduling": bool(WAYS[way].get("async_scheduling")),
    }
    if device == "cpu":
        return {**common, "dtype": "float32", "enforce_eager": True}
    sizes = [1, 2, 4, *range(8, max(COUNTS) + 1, 8)]
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    memory = {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 2**30}
    return {**common, "dtype": "bfloat16", "compilation_config": graphs, **memory}


@contextmanager
def turn(gate: Path | None, way: str) -> Iterator[None]:
    """Wait until every engine of the gate is up, and for this one's turn."""
    if gate is None:
        yield
        return
    (gate / f"up-{way}").touch()
    until_s = time.monotonic() + MOST_START_S
    while (
        len(list(gate.glob("up-*"))) < int((gate / "engines").read_text())
        and time.monotonic() < until_s
    ):
        time.sleep(0.2)
    with (gate / "turn").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def measure(
    way: str, model: str, device: str, counts: list[int], gate: Path | None
) -> dict[str, Any]:
    """Return the seconds of a pass, and of this process's processor in it, by sequences."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if way == "in process" else "1"
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    streams = "streaming" in way
    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY

    def sampling(tokens: int) -> Any:
        exact = {
            "min_tokens": tokens,
            "max_tokens": tokens,
            "ignore_eos": True,
            "detokenize": False,
        }
        return SamplingParams(
            temperature=1.0, logprobs=WAYS[way].get("logprobs"), output_kind=kind, **exact
        )

    def prompts(count: int) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": [3 + i % 200, *range(5, 20)]} for i in range(count)]

    began = time.monotonic()
    if way.startswith("AsyncLLM"):
        return asyncio.run(_streamed(model, device, way, counts, sampling, prompts, began, gate))
    from vllm import LLM

    engine = LLM(**arguments(model, device, way))
    start_s = time.monotonic() - began

    def work(count: int, tokens: int) -> None:
        engine.generate(prompts(count), sampling(tokens), use_tqdm=False)

    with turn(gate, way):
        return {
            "start_s": start_s,
            "passes": {n: _passes(lambda t, n=n: work(n, t)) for n in counts},
        }


def _passes(work: Callable[[int], None]) -> dict[str, float]:
    work(8)  # warm
    return _per_pass(
        [_timed(work, TOKENS) for _ in range(3)], [_timed(work, TOKENS // 2) for _ in range(3)]
    )


def _timed(work: Callable[[int], None], tokens: int) -> tuple[float, float]:
    began, used = time.perf_counter(), time.process_time()
    work(tokens)
    return time.perf_counter() - began, time.process_time() - used


def _per_pass(
    whole: list[tuple[float, float]], half: list[tuple[float, float]]
) -> dict[str, float]:
    between = TOKENS - TOKENS // 2
    (wall, used), (wall_half, used_half) = (
        tuple(map(min, zip(*each, strict=True))) for each in (whole, half)
    )
    return {
        "pass_s": (wall - wall_half) / between,
        "front_end_processor_s": (used - used_half) / between,
    }


async def _streamed(
    model: str,
    device: str,
    way: str,
    counts: list[int],
    sampling: Callable[[int], Any],
    prompts: Any,
    began: float,
    gate: Path | None,
) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(model, device, way)))
    start_s, number = time.monotonic() - began, 0

    async def one(prompt: Any, tokens: int, name: str) -> None:
        async for _ in engine.generate(prompt, sampling(tokens), name):
            pass

    async def timed(count: int, tokens: int) -> tuple[float, float]:
        nonlocal number
        number += 1
        start, used = time.perf_counter(), time.process_time()
        await asyncio.gather(
            *(one(p, tokens, f"{number}-{i}") for i, p in enumerate(prompts(count)))
        )
        return time.perf_counter() - start, time.process_time() - used

    rows = {}
    with turn(gate, way):
        for count in counts:
            await timed(count, 8)
            whole = [await timed(count, TOKENS) for _ in range(3)]
            rows[count] = _per_pass(whole, [await timed(count, TOKENS // 2) for _ in range(3)])
    engine.shutdown()
    return {"start_s": start_s, "passes": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="engines begin within this time"
    )
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--at-once", type=int, default=1, help="engines that start together")
    parser.add_argument(
        "--way", choices=WAYS, help="one way, in this process; the result goes to --out"
    )
    parser.add_argument(
        "--gate", type=Path, help="with --way: the folder at which engines wait for each other"
    )
    args = parser.parse_args()
    counts = [int(count) for count in args.counts.split(",")]
    if args.way:
        args.out.write_text(
            json.dumps(measure(args.way, args.model, args.device, counts, args.gate))
        )
        return
    until_s, record, ways = time.monotonic() + args.seconds, {}, list(WAYS)
    while ways and time.monotonic() < until_s - 20:
        some, ways = ways[: args.at_once], ways[args.at_once :]
        with tempfile.TemporaryDirectory() as folder, args.out.with_suffix(".log").open("a") as log:
            gate = Path(folder)
            (gate / "engines").write_text(str(len(some)))
            command = [sys.executable, __file__, "--model", args.model, "--device", args.device]
            command += ["--counts", args.counts, "--gate", folder]
            running = {
                way: subprocess.Popen(
                    [*command, "--way", way, "--out", str(gate / f"{i}.json")],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                for i, way in enumerate(some)
            }
            for i, (way, process) in enumerate(running.items()):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(until_s - time.monotonic(), 0.1))
                part = gate / f"{i}.json"
                record[way] = (
                    json.loads(part.read_text()) if part.exists() else "failed, or out of time"
                )
                print(way, json.dumps(record[way]), flush=True)
                args.out.write_text(json.dumps(record, indent=1) + "\n")
            for process in running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
