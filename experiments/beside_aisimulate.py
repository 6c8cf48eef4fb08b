"""Engines of simrl beside those of AISimulate: the same requests, limits and database of measured kernels, no host time.

    python experiments/beside_aisimulate.py [--aisimulate PROGRAM] [--measured ../shared/data] [--write] [--json]

Needs the optional package aisimulate (`pip install 'simrl[aisimulate]'`) and its program; without them it says so and does
nothing. Both know the lengths of 512 responses, lognormal(median 1,800, σ 0.9) up to 8,192 tokens, all there at t = 0. Nothing
is tuned to agree: the difference is taken apart by running simrl's engine on tables that cost what AISimulate counts and simrl
does not (`priced_as_there`). All requests are there at t = 0, so prices change no schedule, and the rest is what the rules of
scheduling and the steps of the tables make. With `--measured`, the largest part is held against measured serving under vLLM.
"""

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
import yaml

from experiments.bench.one_engine import responses
from experiments.bench.peers import run
from experiments.shared import AsJson, errors_in_a_line, markdown_of, write_parts
from experiments.validate_profiles import predict, profile_for, read_points
from simrl.engine.engine import Engine, one_engine
from simrl.engine.state import Limits
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import Tables
from simrl.profile.profilers.aiconfigurator import (
    KV_PRECISIONS,
    PACKAGES,
    SYSTEMS,
    EngineSetup,
    derive,
    engine_of,
)

PAGE = Path(__file__).with_suffix(".md")
REQUESTS, GPU, BAR = 512, "h100", 0.05
EXPERTS = EngineSetup(tp=2, ep=2, package="aisimulate")
DENSE = EngineSetup(tp=2, precision="fp8-block", package="aisimulate")
MIXED_TICKS = (16, 32, 64, 128, 384)  # of prefill tokens, beside those of the table


class Case(NamedTuple):
    """One engine and its requests. `named` is the model for AISimulate; a group of `group` requests has one prompt."""

    name: str
    model: str
    named: str
    setup: EngineSetup
    prompt_tokens: int = 512
    group: int = 1
    kv_blocks: int = 60_000
    prefix_caching: bool = False

    @property
    def limits(self) -> Limits:
        return Limits(256, 8192, 16, self.kv_blocks, prefix_caching=self.prefix_caching)


CASES = (
    Case("30B-A3B, bf16", "qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", EXPERTS),
    Case("… KV blocks short", "qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", EXPERTS, kv_blocks=24_000),
    Case(
        "… groups of 16, prefix caching",
        "qwen3-30b-a3b",
        "Qwen/Qwen3-30B-A3B",
        EXPERTS,
        2048,
        16,
        60_000,
        True,
    ),
    Case(
        "30B-A3B, fp8-block",
        "qwen3-30b-a3b",
        "Qwen/Qwen3-30B-A3B-FP8",
        EXPERTS._replace(precision="fp8-block"),
    ),
    Case("32B (dense), fp8-block", "qwen3-32b", "Qwen/Qwen3-32B-FP8", DENSE),
    Case(
        "… KV cache in fp8", "qwen3-32b", "Qwen/Qwen3-32B-FP8", DENSE._replace(kv_precision="fp8")
    ),
)


def parallelism(case: Case, *names: str) -> dict[str, int]:
    """Return tp, and for experts how they are split, by the names that AISimulate has for them."""
    setup = case.setup
    split = (
        (setup.tp, setup.tp // setup.ep, setup.ep)
        if model_shape(case.model).experts
        else (setup.tp,)
    )
    return dict(zip(names, split, strict=False))


def aisimulate_config(case: Case, folder: Path, timing: dict[str, Any] | None) -> Path:
    """Write AISimulate's config of a case and its trace; return the config's path."""
    rows = [
        {
            "timestamp": 0,
            "input_length": case.prompt_tokens,
            "output_length": tokens,
            "hash_ids": [i // case.group],
        }
        for i, tokens in enumerate(responses(REQUESTS))
    ]
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    setup, limits = case.setup, case.limits
    worker = {
        "parallelism": parallelism(case, "tensor", "moe_tensor", "moe_expert"),
        "scheduler": {
            "max_batched_tokens": limits.max_num_batched_tokens,
            "max_sequences": limits.max_num_seqs,
        },
        "kv_cache": {
            "block_size": limits.block_size,
            "prefix_caching": limits.prefix_caching,
            "capacity": {"type": "fixed", "blocks": limits.kv_blocks},
        },
    }
    source = {
        "type": "trace",
        "paths": [str(trace)],
        "format": "mooncake",
        "block_size": case.prompt_tokens,
    }
    engine = {
        "mode": "aggregated",
        "model": case.named,
        "hardware": SYSTEMS[GPU],
        "backend": setup.backend,
        "kvcache_quant_mode": KV_PRECISIONS[
            setup.kv_precision
        ],  # its default for fp8 checkpoints is fp8, vLLM's is not
    }
    if timing:  # of no model then
        worker["timing"] = timing
        del engine["kvcache_quant_mode"]
    config = {
        "traffic": {"source": source, "load": {"type": "trace_timestamps"}},
        "engine": {**engine, "workers": {"aggregated": worker}},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def predicted(case: Case, program: str, timing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return AISimulate's prediction of a case."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        config = aisimulate_config(case, Path(name), timing)
        run(
            [
                program,
                "predict",
                "--config",
                str(config),
                "--output-dir",
                str(out),
                "--capture-per-request",
            ]
        )
        found: dict[str, Any] = json.loads((out / "prediction.json").read_text())
    return found


def simulated(case: Case, tables: Tables) -> tuple[Engine, float]:
    """Return simrl's engine when all requests of a case have ended, and their mean latency."""
    engine = one_engine(tables, case.limits)
    slots = [
        engine.submit(
            case.prompt_tokens, tokens, prompt_key=i // case.group if case.group > 1 else -1
        )
        for i, tokens in enumerate(responses(REQUESTS))
    ]
    return engine, float(engine.run_until_idle()[slots].mean())


def norms_s(case: Case) -> float:
    """Return what AISimulate's norms of queries and keys cost more than simrl's in a pass that decodes, attention included."""
    from aisimulate_core.sdk.engine import EngineHandle  # optional

    setup, shape = case.setup, model_shape(case.model)
    split = parallelism(case, "tp_size", "moe_tp_size", "moe_ep_size")
    kv = KV_PRECISIONS[setup.kv_precision]
    theirs = EngineHandle.compile(
        case.named, SYSTEMS[GPU], setup.backend, kvcache_quant_mode=kv, **split
    )
    rows = [
        handle.decode_step_per_op(64, 2048, 2)
        for handle in (theirs, engine_of(shape, GPU, setup).handle)
    ]
    both = [
        sum(ms for name, ms, *_ in row if name.startswith("generation_attention")) for row in rows
    ]
    return 1e-3 * float(both[0] - both[1])


def priced_as_there(tables: Tables, more_s: float, mixed: bool) -> Tables:
    """Return tables that cost what AISimulate counts: `more_s` in each pass that decodes and, if `mixed`, a mixed pass as two,
    its prefill and its decoding, each with all that is neither attention nor the head.

    The second is exact for passes with one chunk of prefill, up to the ticks.
    """
    ticks = np.union1d(tables.prefill_tokens, MIXED_TICKS)
    at = np.interp(ticks, tables.prefill_tokens, np.arange(tables.prefill_tokens.size))
    low, part = np.floor(at).astype(int), (at % 1)[:, None, None, None]
    high = np.minimum(low + 1, tables.prefill_tokens.size - 1)
    attention = (1 - part) * tables.attention_s[low] + part * tables.attention_s[high]

    def dense_s(tokens: Any) -> Any:
        return np.interp(tokens, tables.dense_tokens, tables.dense_s)

    chunks, decodes = ticks[:, None], tables.decode_sequences[None, :]
    twice = np.where(
        (chunks > 0) & (decodes > 0),
        dense_s(chunks) + dense_s(decodes) - dense_s(chunks + decodes),
        0.0,
    )
    more = mixed * twice + np.where(decodes > 0, more_s, 0.0)
    return tables._replace(prefill_tokens=ticks, attention_s=attention + more[:, None, :, None])


def row_of(case: Case, program: str) -> dict[str, Any]:
    """Return the figures of a case."""
    tables = derive(model_shape(case.model), GPU, case.setup).tables
    engine, latency_s = simulated(case, tables)
    more_s = norms_s(case)
    with_norms, _ = simulated(case, priced_as_there(tables, more_s, mixed=False))
    with_both, _ = simulated(case, priced_as_there(tables, more_s, mixed=True))
    found = predicted(case, program)
    # Where passes cost nothing, but one that decodes a millisecond, the milliseconds are those passes.
    counted = predicted(case, program, {"type": "fixed", "prefill_ms": 0.0, "decode_ms": 1.0})
    totals, there_s = engine.totals, found["duration_ms"] / 1e3
    return {
        "case": case.name,
        "makespan_s": engine.now_s,
        "aisimulate_s": there_s,
        "apart": engine.now_s / there_s - 1,
        "norms_s": with_norms.now_s - engine.now_s,
        "mixed_s": with_both.now_s - with_norms.now_s,
        "rest_s": there_s - with_both.now_s,
        "norms_of_a_pass_s": more_s,
        "mean_latency_s": latency_s,
        "aisimulate_mean_latency_s": found["mean_e2e_latency_ms"] / 1e3,
        "passes": totals["passes"],
        "aisimulate_decoding_passes": round(counted["duration_ms"]),
        "preemptions": totals["preemptions"],
        "aisimulate_preemptions": sum(
            request["readmission_count"] for request in found["per_request"]
        ),
        "found_in_cache": totals["hit_tokens"] / totals["lookup_tokens"],
        "aisimulate_found_in_cache": found["first_admission_prefix_cache_reused_ratio"],
    }


def measured_rows(data: Path) -> list[dict[str, Any]]:
    """Return by model what vLLM took beyond the kernels, in passes of at most 16 sequences, and the errors of the time per
    output token over all its points, and with what AISimulate's norms cost more."""
    layer_s = norms_s(CASES[0]) / model_shape(CASES[0].model).layers
    points, _ = read_points(data)
    served: dict[str, list[Any]] = {}
    for point in points:
        if point.backend == "vllm" and point.dp == 1:
            served.setdefault(point.model, []).append(point)
    rows = []
    for name, some in sorted(served.items()):
        shape = model_shape(some[0].served.name)
        more_s = layer_s * shape.layers if shape.qk_norm else 0.0
        measured_s = np.array([point.tpot_s for point in some])
        profiles = [profile_for(point) for point in some]
        kernels_s = np.array([predict(*each)[1] for each in zip(some, profiles, strict=True)])
        of_norms = [profile.with_corrections(1.0, more_s, 0.0, 0.0) for profile in profiles]
        with_norms_s = np.array([predict(*each)[1] for each in zip(some, of_norms, strict=True)])
        few = np.array([point.concurrency <= 16 for point in some])
        lacking_s = float(np.median((measured_s - kernels_s)[few]))
        rows.append(
            {
                "measured under vLLM": f"{name.split('/')[1]} {some[0].served.precision}",
                "norms of queries and keys": "yes" if shape.qk_norm else "no",
                "points": len(some),
                "beyond the kernels": f"{1e3 * lacking_s:+.2f} ms",
                "a layer": f"{1e6 * lacking_s / shape.layers:+.0f} µs",
                "error, kernels": f"{np.median(kernels_s / measured_s - 1):+.1%}",
                "with AISimulate's norms": f"{np.median(with_norms_s / measured_s - 1):+.1%}",
            }
        )
    return rows


def table_of(rows: list[dict[str, Any]]) -> list[str]:
    return markdown_of(
        [
            {
                "engine": row["case"],
                "simrl": f"{row['makespan_s']:.1f} s",
                "norms": f"{row['norms_s']:+.1f} s",
                "mixed passes": f"{row['mixed_s']:+.1f} s",
                "rest": f"{row['rest_s']:+.1f} s, {row['rest_s'] / row['aisimulate_s']:+.1%}",
                "AISimulate": f"{row['aisimulate_s']:.1f} s",
                "apart": f"{row['apart']:+.1%}" + ("" if abs(row["apart"]) <= BAR else " ✗"),
                "mean latency, both": f"{row['mean_latency_s']:.1f} / {row['aisimulate_mean_latency_s']:.1f} s",
                "passes, both": f"{row['passes']:,} / {row['aisimulate_decoding_passes']:,}",
                "preempted, both": f"{row['preemptions']:,} / {row['aisimulate_preemptions']:,}",
                "found in cache, both": f"{row['found_in_cache']:.2%} / {row['aisimulate_found_in_cache']:.2%}",
            }
            for row in rows
        ]
    )


Program = Annotated[str, typer.Option(help="AISimulate's program")]
Write = Annotated[bool, typer.Option("--write", help=f"write the table into {PAGE.name}, too")]


def program_of(aisimulate: str, name: str) -> str | None:
    """Return the path of AISimulate's program; None, which is printed, where it is not installed."""
    program = shutil.which(aisimulate)
    if program is None or importlib.util.find_spec(PACKAGES["aisimulate"]) is None:
        print(f"{name}: skipped, aisimulate is not installed; pip install 'simrl[aisimulate]'")
        return None
    return program


def main(
    aisimulate: Program = "aisimulate",
    measured: Annotated[
        Path | None, typer.Option(help="the folder with serving_measurements/")
    ] = None,
    write: Write = False,
    as_json: AsJson = False,
) -> None:
    if (program := program_of(aisimulate, "beside_aisimulate")) is None:
        return
    with errors_in_a_line("beside_aisimulate"):
        rows = [row_of(case, program) for case in CASES]
        parts = {"engines": table_of(rows)}
        if measured is not None:
            rows += measured_rows(measured)
            parts["measured"] = markdown_of(rows[len(CASES) :])
        print(
            json.dumps(rows, indent=1)
            if as_json
            else "\n\n".join("\n".join(lines) for lines in parts.values())
        )
        if write:
            write_parts(PAGE, parts)


if __name__ == "__main__":
    typer.run(main)
