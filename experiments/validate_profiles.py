"""Comparison of derived profiles with measured serving on H100: the time per output token (TPOT) of closed loops of requests.

    python experiments/validate_profiles.py ../shared/data [--json]

`serving_measurements/` in the data folder has points by model, backend, tensor-parallel size, concurrency, prompt and output
length. Each is predicted through the profile of its model, backend and size: with the project's own engine, as many clients
each sending its next request when the last one ended (vLLM and TensorRT-LLM mix prefill into decode passes), or by SGLang's
rule (prefill first, whole waves of requests: `engine.scheduler: sglang`). Profiles are kernels alone. The host time between two
passes is two constants a backend, one a pass and one a sequence: set on half of that backend's points (a hash of their
names) and judged on the other half. They are the host times of the presets in `SETS`. The files in `profiles/` serve where
they fit; the others are derived, which needs aiconfigurator ('simrl[aiconfigurator]'): without it those points are listed
as not covered.
"""

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple
from zlib import crc32

import numpy as np
import pandas as pd
import simpy
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from experiments.shared import AsJson, errors_in_a_line
from simrl.engine.state import Limits
from simrl.errors import InputError
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import MODELS
from simrl.profile.profile import TableProfile, read_profile
from simrl.profile.profilers import aiconfigurator
from simrl.result.result import Lane
from simrl.runtime.recorder import Recorder
from simrl.runtime.simulated_worker import simulated_workers
from simrl.runtime.worker import WorkerCosts
from simrl.scenario.presets import ENGINES
from simrl.trace.trace import Response, Sample

PROFILES = Path(__file__).parents[1] / "profiles"
PASS_TOKENS = 8192  # the default of all three backends for a server on H100
MEMORY_SHARE, WORKING_BYTES = (
    0.9,
    4e9,
)  # of a GPU, for weights and KV cache; what else an engine keeps there
REQUESTS = 10  # of a client: as InferenceMAX and NVIDIA's examples of genai-perf send
# InferenceMAX's part: its runs are files by date, lengths are uniform down to this share of what a point names (the default
# of its workflow), and its servers schedule ahead and run as many requests as there are clients. Its repository,
# benchmarks/benchmark_lib.sh@145ff605, gptoss_fp4_h100.sh, 70b_fp8_h100_docker.sh and .github/workflows/benchmark-tmpl.yml.
INFERENCEMAX, SHORTEST = "source_file=2026-", 0.8


class Served(NamedTuple):
    """A model as these measurements served it: its name in simrl, its precision, and the bytes of its weights."""

    name: str
    weight_bytes: float
    precision: str = "bf16"
    kv_precision: str = "bf16"


def _dense(name: str, precision: str = "bf16", kv_precision: str = "bf16") -> Served:
    return Served(
        name, MODELS[name].weight_bytes / (2 if precision == "fp8" else 1), precision, kv_precision
    )


# By model, backend and the precision of the weights, as in the file. It lacks the precision of the KV cache: FP8 for
# TensorRT-LLM's FP8 checkpoints (their hf_quant_config.json), bfloat16 by default for vLLM. It calls gpt-oss's own MXFP4
# "nvfp4". Bytes of quantised mixtures of experts: of the checkpoint's files.
SERVED = {
    ("Qwen/Qwen3-32B", "vllm", "bf16"): _dense("qwen3-32b"),
    ("Qwen/Qwen3-32B", "vllm", "fp8"): _dense("qwen3-32b", "fp8"),
    ("Qwen/Qwen3-32B", "sglang", "bf16"): _dense("qwen3-32b"),
    ("Qwen/Qwen3-32B", "trtllm", "fp8"): _dense("qwen3-32b", "fp8", "fp8"),
    ("meta-llama/Llama-3.1-8B-Instruct", "trtllm", "bf16"): _dense("llama-3.1-8b"),
    ("meta-llama/Llama-3.1-70B", "vllm", "fp8"): _dense("llama-3.1-70b", "fp8"),
    ("Qwen/Qwen3-235B-A22B-FP8", "trtllm", "fp8"): Served("qwen3-235b-a22b", 235e9, "fp8-block"),
    ("MiniMaxAI/MiniMax-M2.5", "vllm", "fp8"): Served("minimax-m2.5", 229e9, "fp8-block"),
    ("openai/gpt-oss-120b", "vllm", "nvfp4"): Served("gpt-oss-120b", 65e9, "w4a16_mxfp4"),
}
# requests: vLLM runs as many by default, and the file does not say what these servers ran
MOST_AT_A_TIME = 256
SETS = {("vllm", "0.18.0"): "vllm-0.19", ("vllm", ""): "vllm-0.12", ("sglang", ""): "sglang-0.5"}
SETS = {
    "vllm": "vllm-0.12",
    "sglang": "sglang-0.5",
}  # presets whose host times are those that this comparison sets
HIDDEN = {"least_pass_s": "hidden_pass_s", "least_sequence_s": "hidden_sequence_s"}


@dataclass(frozen=True)
class Point:
    """One measurement: `concurrency` requests at a time, with their prompt and output tokens."""

    name: str
    model: str
    backend: str
    version: str
    precision: str
    tp: int
    dp: int
    ep: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    tpot_s: float
    ttft_s: float = math.nan
    inferencemax: bool = False

    @property
    def short_of_kv(self) -> bool:
        """Return whether the KV cache holds fewer requests than there are clients."""
        tokens = self.concurrency * (self.prompt_tokens + self.output_tokens)
        return kv_blocks(self) * 16 < tokens

    @property
    def served(self) -> Served:
        return SERVED[self.model, self.backend, self.precision]

    @property
    def calibrates(self) -> bool:
        """Return whether host times are set on this point: on half of the dense models in bfloat16, on no others."""
        plain = self.precision == "bf16" and not MODELS[self.served.name].experts
        return plain and crc32(self.name.encode()) % 2 == 0


@dataclass
class Row:
    """A point and its predictions: by kernels alone, and with the host times of its backend."""

    point: Point
    profile: TableProfile
    kernels_s: float
    with_host_s: float = math.nan
    with_preset_s: float = math.nan
    ttft_s: float = (
        math.nan
    )  # with the preset, without one with host times, the points that set them included


def read_points(data: Path) -> tuple[list[Point], dict[str, int]]:
    """Return the measurements that can be predicted, and the number of others by reason."""
    path = data / "serving_measurements" / "h100_sxm_agg.csv"
    try:
        rows = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read ({error}); name the folder that holds serving_measurements/"
        ) from error
    points: list[Point] = []
    left_out: dict[str, int] = {}
    for row in rows.itertuples():
        dp = 1 if pd.isna(row.attention_dp_size) else int(row.attention_dp_size)
        point = Point(
            name=str(row.id),
            model=str(row.model_path),
            backend=str(row.backend),
            version=str(row.backend_version)
            if isinstance(row.backend_version, str)
            else "unstated",
            precision="bf16"
            if pd.isna(row.gemm_quant_mode)
            else str(row.gemm_quant_mode).removesuffix("_block"),
            # Names of points with attention on several ranks have 4 GPUs, the columns 4 ranks of 4: each rank is one GPU.
            tp=int(row.tp_size) if dp == 1 else 1,
            dp=dp,
            ep=max(int(row.moe_ep_size) // dp, 1),
            concurrency=int(row.batch_size),
            prompt_tokens=int(row.isl),
            output_tokens=int(row.osl),
            tpot_s=1e-3 * float(row.silicon_tpot_ms),
            ttft_s=1e-3 * float(row.silicon_ttft_ms),
            inferencemax=str(row.silicon_data_source).startswith(INFERENCEMAX),
        )
        if (point.model, point.backend, point.precision) not in SERVED:
            why = f"{point.model} under {point.backend} in {point.precision}: nothing is known of how it was served"
        elif point.concurrency > MOST_AT_A_TIME:
            why = f"{point.model}: {point.concurrency} requests at a time, more than the server ran"
        else:
            points.append(point)
            continue
        left_out[why] = left_out.get(why, 0) + 1
    return points, left_out


def profile_for(point: Point) -> TableProfile:
    """Return the shipped profile of a point, else a derived one. Raise `InputError` where the database has none."""
    served = point.served
    shipped = PROFILES / f"{served.name}_h100_tp{point.tp}.parquet"
    if point.backend == "vllm" and served.precision == "bf16" and shipped.is_file():
        return read_profile(shipped)
    newer = served.precision == "fp8-block" and point.backend == "vllm"
    setup = aiconfigurator.EngineSetup(
        point.tp,
        point.dp,
        point.ep,
        served.precision,
        served.kv_precision,
        backend=point.backend,
        package="aisimulate" if newer else "aiconfigurator",
    )
    return aiconfigurator.derive(MODELS[served.name], "h100", setup)


def kv_blocks(point: Point) -> int:
    """Return the blocks of 16 tokens that the memory of the GPUs of an attention rank holds."""
    memory = point.tp * (MEMORY_SHARE * gpu("h100").memory_bytes - WORKING_BYTES)
    shape, served = MODELS[point.served.name], point.served
    token_bytes = shape.kv_bytes_per_token / (2 if served.kv_precision == "fp8" else 1)
    return int((memory - served.weight_bytes / point.dp) / token_bytes) // 16


def closed_loop_s(point: Point, profile: TableProfile, ahead: bool) -> tuple[float, float]:
    """Return the mean seconds to the first token and per output token of a closed loop in simrl's engine.

    A load generator without a ramp begins with all clients at once. InferenceMAX's lengths vary, so clients drift apart, and
    every request counts. Other points have one length: their clients would stay in bunches, which the measured times to first
    token contradict. They count as requests of clients that are spread over a request's life (each one's first request is cut
    and does not count), the first ones, all at once, as one of `REQUESTS` in the time to first token.
    """
    most = np.array([point.prompt_tokens, point.output_tokens])
    if point.backend == "sglang":  # it prefills all that wait: requests of one length run in waves
        lengths = np.tile(most, (point.concurrency, REQUESTS, 1))
        ttft_s, tpot_s = serve_s(point, profile, ahead, lengths).mean(axis=(0, 1))
        return float(ttft_s), float(tpot_s)
    if point.inferencemax:
        draws = np.random.default_rng(crc32(point.name.encode()))
        shape = (point.concurrency, REQUESTS, 2)
        lengths = draws.integers((SHORTEST * most).astype(int), most, shape, endpoint=True)
        ttft_s, tpot_s = serve_s(point, profile, ahead, lengths).mean(axis=(0, 1))
        return float(ttft_s), float(tpot_s)
    lengths = np.tile(most, (point.concurrency, 3, 1))
    at_once_s = serve_s(point, profile, ahead, lengths[:, :1]).mean(axis=(0, 1))[0]
    cut = point.output_tokens * np.arange(1, point.concurrency + 1) // point.concurrency
    lengths[:, 0, 1] = np.maximum(cut, 1)
    ttft_s, tpot_s = serve_s(point, profile, ahead, lengths)[:, 1].mean(axis=0)
    return float((at_once_s + (REQUESTS - 1) * ttft_s) / REQUESTS), float(tpot_s)


def serve_s(
    point: Point, profile: TableProfile, ahead: bool, lengths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the seconds to the first token and per output token of every request, by client and turn. Each client sends its
    next request, with its prompt and output tokens, when its last one ended. `ahead`: the engine schedules a pass while the
    one before runs."""
    limits = Limits(1024, PASS_TOKENS, 16, kv_blocks(point), async_scheduling=ahead)
    if point.backend == "sglang":
        limits = limits._replace(block_size=1, kv_blocks=16 * limits.kv_blocks, sglang=True)
        limits = limits._replace(max_new_tokens=point.output_tokens)
    env = simpy.Environment()
    responses = {uid: Response(int(n), 0.0) for uid, n in enumerate(lengths[..., 1].flat)}
    record = Recorder([Lane("rollout-000", point.tp)])
    (worker,) = simulated_workers(
        env, 1, profile.even, limits, WorkerCosts(load_s=0.0), responses, record
    )
    times = np.zeros(lengths.shape)

    def client(i: int) -> simpy.events.ProcessGenerator:
        for turn, (prompt_tokens, tokens) in enumerate(lengths[i]):
            uid, sent_s = i * lengths.shape[1] + turn, env.now
            rollout = yield worker.submit(Sample(uid, 0, 0, uid, 0, int(prompt_tokens)))
            decoding_s = rollout.finished_s - rollout.first_token_s
            times[i, turn] = rollout.first_token_s - sent_s, decoding_s / max(tokens - 1, 1)

    for i in range(point.concurrency):
        env.process(client(i))
    env.run()
    return times


def predict(point: Point, profile: TableProfile) -> tuple[float, float]:
    """Return the mean seconds to the first token and per output token."""
    preset = preset_of(point)
    ahead = preset is not None and "async_scheduling" in ENGINES[preset].constants
    return closed_loop_s(
        point, profile, ahead and bool(ENGINES[preset].constants["async_scheduling"].value)
    )


def preset_of(point: Point) -> str | None:
    """Return the engine's preset, which has its host times and whether it schedules ahead."""
    if point.backend == "vllm" and point.inferencemax:
        return "vllm-0.19"
    return SETS.get(point.backend)


def host_times(points: list[Point], kernels_s: list[float]) -> tuple[float, float]:
    """Return seconds a pass and a sequence in it, not negative, with the least relative errors of these points (robust to
    outliers); none without points."""
    if not points:
        return 0.0, 0.0
    measured = np.array([p.tpot_s for p in points])
    work = np.array([[1.0, p.concurrency] for p in points])

    def relative(times: NDArray[np.float64]) -> NDArray[np.float64]:
        return (np.array(kernels_s) + work @ times) / measured - 1

    fitted = least_squares(
        relative,
        [1e-4, 1e-6],
        bounds=(0, np.inf),
        x_scale=[1e-3, 1e-5],
        loss="soft_l1",
        f_scale=0.05,
    )
    return float(fitted.x[0]), float(fitted.x[1])


def errors(rows: list[Row], predicted: str) -> dict[str, float]:
    """Return the median relative error, the median of the sizes, the size that nine of ten are within, and the worst error."""
    measured = "ttft_s" if predicted == "ttft_s" else "tpot_s"
    relative = np.array(
        [getattr(row, predicted) / getattr(row.point, measured) - 1 for row in rows]
    )
    sizes = np.abs(relative)
    return {
        "median": float(np.median(relative)),
        "median_size": float(np.median(sizes)),
        "p90_size": float(np.quantile(sizes, 0.9)),
        "worst": float(relative[np.argmax(sizes)]),
    }


def predict_all(
    points: list[Point], left_out: dict[str, int]
) -> tuple[list[Row], dict[str, tuple[float, float]]]:
    """Return the points with their predictions, and by backend the seconds of host time, fitted on the calibration half."""
    profiles: dict[tuple[object, ...], TableProfile | str] = {}
    rows: list[Row] = []
    for point in points:
        key = (point.model, point.backend, point.precision, point.tp, point.dp, point.ep)
        if key not in profiles:
            try:
                profiles[key] = profile_for(point)
            except InputError as error:
                profiles[key] = str(error)
        profile = profiles[key]
        if kv_blocks(point) * 16 < point.prompt_tokens + point.output_tokens:
            profile = f"{point.model} at tp {point.tp}: no room for the KV cache"
        if isinstance(profile, str):
            left_out[profile] = left_out.get(profile, 0) + 1
        else:
            rows.append(Row(point, profile, predict(point, profile)[1]))
    constants = {}
    for backend in sorted({row.point.backend for row in rows}):
        own = [row for row in rows if row.point.backend == backend]
        used = [row for row in own if row.point.calibrates]
        each_pass_s, each_sequence_s = host_times(
            [row.point for row in used], [row.kernels_s for row in used]
        )
        constants[backend] = each_pass_s, each_sequence_s
        host = {"between_passes_s": each_pass_s, "sequence_overhead_s": each_sequence_s}
        for row in own:
            row.ttft_s, with_host_s = predict(row.point, row.profile.with_corrections(**host))
            if not row.point.calibrates:
                row.with_host_s = with_host_s
            if preset := preset_of(row.point):
                engine = ENGINES[preset].constants
                of = {key: float(engine[key].value) for key in host}
                of |= {
                    least: float(engine[key].value)
                    for least, key in HIDDEN.items()
                    if key in engine
                }
                row.ttft_s, row.with_preset_s = predict(
                    row.point, row.profile.with_corrections(**of)
                )
    return rows, constants


def main(
    data: Annotated[Path, typer.Argument(help="the folder with serving_measurements/")],
    as_json: AsJson = False,
) -> None:
    logging.disable(
        logging.WARNING
    )  # aiconfigurator says what it takes from other versions of a backend
    with errors_in_a_line("validate_profiles"):
        points, left_out = read_points(data)
    rows, constants = predict_all(points, left_out)

    def line(name: str, some: list[Row]) -> dict[str, object]:
        judged = [row for row in some if not row.point.calibrates]
        roomy = [row for row in some if not row.point.short_of_kv]
        return {
            "what": name,
            "points": len(some),
            "kernels": errors(some, "kernels_s"),
            "judged": len(judged),
            "judged_kernels": errors(judged, "kernels_s") if judged else None,
            "judged_with_host_times": errors(judged, "with_host_s") if judged else None,
            "judged_with_preset": errors(judged, "with_preset_s") if judged else None,
            "with_room": len(roomy),
            "ttft": errors(roomy, "ttft_s") if roomy else None,
        }

    groups: dict[str, list[Row]] = {}
    for row in rows:
        p = row.point
        ranks = f", {p.dp} attention ranks" if p.dp > 1 else ""
        what = f"{p.model.split('/')[1]} {p.served.precision}{ranks}, {p.backend} {p.version}"
        groups.setdefault(what, []).append(row)
    lines = [line(name, some) for name, some in sorted(groups.items())]
    vllm = [row for row in rows if row.point.backend == "vllm"]
    mixtures = [row for row in vllm if MODELS[row.point.served.name].experts]
    fp8 = [row for row in vllm if row.point.precision == "fp8"]
    lines += [
        line(f"{name}, vLLM", some)
        for name, some in (("mixtures of experts", mixtures), ("fp8", fp8))
        if some
    ]
    lines += [
        line(f"all of {b}", [row for row in rows if row.point.backend == b]) for b in constants
    ]
    lines.append(line("all", rows))
    host = {
        b: {"each_pass_s": each, "each_sequence_s": sequence}
        for b, (each, sequence) in constants.items()
    }
    if as_json:
        print(json.dumps({"errors": lines, "host_times": host, "left_out": left_out}, indent=1))
        return
    console = Console()
    heads = (
        *("TPOT", "points", "kernels", "judged", "kernels", "with host times", "with preset"),
        *("room for KV", "TTFT"),
    )
    table = Table(*heads, title="Predicted / measured - 1")
    for each in lines:
        cells = [
            _cell(each[key])
            for key in ("kernels", "judged_kernels", "judged_with_host_times", "judged_with_preset")
        ]
        table.add_row(
            *(str(each["what"]), str(each["points"]), cells[0], str(each["judged"]), *cells[1:]),
            *(str(each["with_room"]), _cell(each["ttft"])),
        )
    console.print(table)
    console.print(
        "Each error: median / median size / 90 % within / worst. Host times, set on the points that are not judged:"
    )
    for backend, (each_pass_s, each_sequence_s) in constants.items():
        console.print(
            f"  {backend}: {each_pass_s * 1e3:.2f} ms a pass and {each_sequence_s * 1e6:.1f} µs a sequence in it"
            + (f", as the preset {SETS[backend]}" if backend in SETS else "")
        )
    for why, count in left_out.items():
        console.print(f"Not covered: {count} points. {why}.", markup=False)


def _cell(error: object) -> str:
    if not isinstance(error, dict) or math.isnan(error["median"]):
        return "-"
    return f"{error['median']:+.1%} / {error['median_size']:.1%} / {error['p90_size']:.1%} / {error['worst']:+.0%}"


if __name__ == "__main__":
    typer.run(main)
