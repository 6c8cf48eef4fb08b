"""One whole colocated RL step on one GPU, predicted and measured: generation, log-probs, update, weights to a file, load.

Invariant: a prediction is complete before anything is measured, and follows from its scenario alone; the measurement has its
requests, limits and micro-batches. A phase is measured warm, by a clock that stops when the device has finished, and reported
at once. The trainer of `simrl_replay.grpo` runs in this process, the engine in another, on one GPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

import simrl
from simrl.errors import StoppedError
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.shipped import shipped_profile
from simrl.result.result import SampleRow
from simrl.runtime.weight_sync import loading_s, publication_s
from simrl.scenario.presets import constants
from simrl.scenario.training import TrainingConfig, trained_by
from simrl_replay.grpo.policy import TokenIds, micro_batches, qwen3, save_policy
from simrl_replay.grpo.update import Trajectory, UpdateConfig, make_optimizer, update
from simrl_replay.host import Begin, Ended, Failed, Gained, Loaded, LoadWeights, Report
from simrl_replay.link import EngineLink, engine_link, start_all
from simrl_replay.vllm_adapter import EngineSettings

Device = Literal["cpu", "cuda"]
OnPhase = Callable[[str, float, dict[str, Any]], None]  # a phase, its measured seconds, its details
START_S, SILENCE_S = 600.0, 120.0  # time for the engine to start, and between two of its reports
WARM_TOKENS, WARM_SEQUENCES = 8, 4  # of the responses before the measured ones; in the update before the measured one
LEARNING_RATE = 1e-6
UNLIKE = (
    "one GPU: no weights are gathered, gradients reduced or weights resharded",
    "trainer and engine share the memory: nothing is offloaded between phases, so the switch takes no time",
    "weights reach the engine through a file; verl hands over tensors on the GPU",
    "sequences are padded to the longest of a micro-batch; the prediction and verl pack them",
    "no reference model; rewards are not computed",
    "the batch reaches the trainer through a pipe, outside of the phases, in place of verl's controller",
)
LENGTHS = {
    "steps": 1, "prompts_per_step": 16, "group": 16, "prompt_tokens": 64, "mean_tokens": 500, "sigma": 0.8, "cap_tokens": 2048
}  # fmt: skip


class Prediction(NamedTuple):
    """Phases by name (`predicted_s`, `rests_on`), the requests of the step, and its validated scenario."""

    phases: dict[str, dict[str, Any]]
    requests: list[SampleRow]
    scenario: dict[str, Any]


def scenario_of(model: str, card: str, profile: Path | None = None, **sections: Any) -> dict[str, Any]:
    """Return the scenario of a step of a Qwen3 (a name, or a config.json) on a GPU: 16 × 16 long-tailed responses unless the
    `sections` (`workload`, `engine`, `training`) say otherwise. Without a profile: the shipped one, or the roofline."""
    path = profile or shipped_profile(model_shape(model).name, card, 1)
    here = {"offload": "none", "switch_s": 0.0, "reward_s": 0.0, "tokens_per_microbatch": 8192}
    return {
        "name": "whole-step",
        "steps": 1,
        "warmup_steps": 0,
        "model": model,
        "cluster": {"gpu": card, "gpus": 1, "tp": 1},
        "workload": sections.get("workload", {"synthetic": LENGTHS}),
        "profile": {"roofline": {}} if path is None else {"path": str(path)},
        "engine": {"gpu_memory_utilization": 0.5, "async_scheduling": False, **sections.get("engine", {})},
        "training": {**here, **sections.get("training", {})},
        "systems": ["verl_colocated"],
    }


def predict(scenario: dict[str, Any]) -> Prediction:
    """Predict the phases with simrl. Raise `InputError` for a step that cannot be simulated."""
    result = simrl.run(scenario).result()
    facts, seconds = result.metadata, Counter[str]()
    for span in result.spans.to_pylist():
        seconds[span["kind"]] += span["ended_s"] - span["started_s"]
    valid, profile = facts["scenario"], facts["profile"]
    shape, card = model_shape(valid["model"]), gpu(valid["cluster"]["gpu"])
    by_file = TrainingConfig.model_validate({**valid["training"], "weight_sync": "file"})
    used = [f"{each.key} {each.constant.words}, {each.constant.kind}" for each in constants(valid, profile["kind"])]
    trained, load_s = f"{trained_by(valid)}; {card.source}", profile["load_weights_s"]
    storage = f"assumed: files at {by_file.weight_sync_storage_bytes_per_s / 1e9:g} GB/s"
    phases = {
        "generation": (seconds["rollout"], "; ".join((f"{profile['kind']}: {profile['source']}", *used))),
        "log_prob": (seconds["log_prob"], trained),
        "update": (seconds["train"], trained),
        "publish": (publication_s(by_file, shape, card, 1), storage),
        "load": (load_s or loading_s(by_file, shape, card, 1, 1, 1), "measured" if load_s else storage),
    }
    requests = [SampleRow(**row) for row in result.samples.sort_by("uid").to_pylist()]
    named = {name: {"predicted_s": float(of_s), "rests_on": why} for name, (of_s, why) in phases.items()}
    return Prediction(named, requests, valid)


def make_weights(prediction: Prediction, device: Device, folder: Path) -> Any:
    """Write random weights of the model's shape; return the model that has them, on the device, ready for training."""
    s, dtype = model_shape(prediction.scenario["model"]), _dtype(device)
    sizes = (s.layers, s.hidden, s.heads, s.kv_heads, s.intermediate, s.vocab, _longest(prediction.requests))
    config = qwen3(*sizes, head_dim=s.head_dim, tie_word_embeddings=s.tied_embeddings, dtype=dtype)
    config._attn_implementation = "sdpa"
    torch.manual_seed(prediction.scenario["seed"])
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    # Activations are recomputed in the backward pass, as in the prediction; no layer draws random numbers.
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    save_policy(model.train(), folder)
    return model


def start_engine(prediction: Prediction, device: Device, weights: Path, log: Path, **others: Any) -> EngineLink:
    """Start an engine that has the weights; `others` are fields of `EngineSettings`. Raise `InputError` or `StoppedError` if it
    does not start."""
    sizes, names = prediction.scenario["engine"], ("max_num_seqs", "max_num_batched_tokens", "block_size")
    fields: dict[str, Any] = {
        **{name: sizes[name] for name in (*names, "gpu_memory_utilization")},
        "max_model_len": _longest(prediction.requests),
        "kv_blocks": sizes["kv_cache_tokens"] and sizes["kv_cache_tokens"] // sizes["block_size"],
        "device": device,
        "dtype": _dtype(device),
        "prefix_caching": True,  # as verl_colocated has it
    }
    settings = EngineSettings(str(weights), **(fields | others))
    return start_all([partial(engine_link, "engine", settings, log)], START_S)[0]


def measure(
    prediction: Prediction, model: Any, link: EngineLink, folder: Path, device: Device, on_phase: OnPhase
) -> None:
    """Run the step. Model and engine have the weights in `folder`/0; the next are written to `folder`/1. Raise `StoppedError`
    if the engine ends."""
    scenario, requests = prediction.scenario, prediction.requests
    shape, draws = model_shape(scenario["model"]), np.random.default_rng(scenario["seed"])
    prompts = {r.prompt_id: tuple(draws.integers(0, shape.vocab, r.prompt_tokens).tolist()) for r in requests}
    warm = [r._replace(uid=-1 - r.uid, generated_tokens=min(WARM_TOKENS, r.generated_tokens)) for r in requests]
    _generate(link, warm, {key: prompt[::-1] for key, prompt in prompts.items()})
    started_s = time.monotonic()
    responses, ended_s = _generate(link, requests, prompts)
    lengths = np.array([r.prompt_tokens + r.generated_tokens for r in requests])
    details: dict[str, Any] = {"responses": len(requests), "tokens": sum(map(len, responses.values()))}
    on_phase("generation", ended_s - started_s, details)

    budget = scenario["training"]["tokens_per_microbatch"]
    config = UpdateConfig(micro_batch_tokens=budget, learning_rate=LEARNING_RATE)
    optimizer = make_optimizer(model, config)
    batch = []
    for r in requests:
        ids = TokenIds(prompts[r.prompt_id], responses[r.uid])
        batch.append(Trajectory(ids, float(r.sample % 2), r.prompt_id, ((0, r.generated_tokens),)))
    longest = sorted(batch, key=lambda t: -len(t.ids.response))[:WARM_SEQUENCES]
    # Equal rewards have no gradient, and AdamW without decay then leaves the weights as they are.
    update(model, optimizer, [t._replace(reward=0.0) for t in longest], 0, {}, config)
    flops = float(shape.forward_flops(lengths.sum(), (lengths.astype(float) ** 2).sum() / 2))
    parts = [len(part) * int(lengths[part].max()) for part in micro_batches(lengths.tolist(), budget)]

    def trained(name: str, passes: int, seconds: float) -> None:
        more = {"tokens": int(lengths.sum()), "padded_tokens": sum(parts), "micro_batches": len(parts)}
        if device == "cuda":
            free_bytes, all_bytes = torch.cuda.mem_get_info()
            more |= {"peak_bytes": torch.cuda.max_memory_allocated(), "used_bytes": all_bytes - free_bytes}
        mfu = passes * flops / seconds / gpu(scenario["cluster"]["gpu"]).bf16_flops
        on_phase(name, seconds, {**more, "mfu": mfu})

    stats = update(model, optimizer, batch, 0, {}, config, partial(trained, "log_prob", 1))
    trained("update", 3, stats.train_s)
    started_s = time.monotonic()
    save_policy(model, folder / "1")
    on_phase("publish", time.monotonic() - started_s, {"bytes": (folder / "1" / "model.safetensors").stat().st_size})
    _load(link, folder / "0")  # the first load takes longer
    on_phase("load", _load(link, folder / "1"), {})


def whole_step(
    scenario: dict[str, Any], device: Device, folder: Path, on_phase: OnPhase = lambda *_: None
) -> dict[str, Any]:
    """Predict a step and run it, with files in a new folder. Return both by phase, and how it differs from a real trainer's.
    `on_phase` is called when a phase has ended."""
    prediction = predict(scenario)
    outcome = {name: {**phase, "measured_s": None, "details": {}} for name, phase in prediction.phases.items()}

    def ended(name: str, seconds: float, details: dict[str, Any]) -> None:
        outcome[name] |= {"measured_s": seconds, "details": details}
        on_phase(name, seconds, details)

    model = make_weights(prediction, device, folder / "0")
    link = start_engine(prediction, device, folder / "0", folder / "engine.log")
    try:
        measure(prediction, model, link, folder, device, ended)
    finally:
        link.close()
    return {"phases": outcome, "unlike": list(UNLIKE)}


def _dtype(device: Device) -> str:
    return "bfloat16" if device == "cuda" else "float32"


def _longest(requests: Sequence[SampleRow]) -> int:
    return max(request.prompt_tokens + request.generated_tokens for request in requests)


def _generate(
    link: EngineLink, requests: Sequence[SampleRow], prompts: dict[int, tuple[int, ...]]
) -> tuple[dict[int, list[int]], float]:
    """Return the responses by uid, and when the last of them ended."""
    responses: dict[int, list[int]] = {r.uid: [] for r in requests}
    link.send([Begin(r.uid, r.prompt_id, prompts[r.prompt_id], (), r.generated_tokens) for r in requests])
    running = len(requests)
    for report in _reports(link):
        if isinstance(report, Gained):
            responses[report.number] += report.token_ids
        elif isinstance(report, Ended):
            running -= 1
            if not running:
                return responses, report.at_s - link.offset_s
    raise AssertionError("reports end with an error")


def _load(link: EngineLink, folder: Path) -> float:
    """Return the seconds in which the engine loads weights."""
    link.send([LoadWeights(0, 0, str(folder), "recompute", 0.0)])
    return next(report.finished_s - report.started_s for report in _reports(link) if isinstance(report, Loaded))


def _reports(link: EngineLink) -> Iterator[Report]:
    while link.connection.poll(SILENCE_S):
        try:
            reports = link.connection.recv()
        except (EOFError, OSError):
            raise StoppedError(f"{link.name}: {link.death()}") from None
        for report in reports:
            if isinstance(report, Failed):
                raise StoppedError(f"{link.name}: {report.message}")
            yield report
    raise StoppedError(f"{link.name}: no report for {SILENCE_S:g} s; see its log")
