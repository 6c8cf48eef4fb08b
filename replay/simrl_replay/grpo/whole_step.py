"""One whole colocated RL step on one GPU, predicted and measured: generation, log-probs, update,
weights to a file, load.

Invariant: a prediction is complete before anything is measured, and follows from its scenario
alone; the measurement has its requests, limits and micro-batches. A phase is measured warm, by a
clock that stops when the device has finished, and reported at once. The trainer of
`simrl_replay.grpo` runs in this process, the engine in another, on one GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import simrl
from simrl.profile.hardware import gpu
from simrl.profile.metadata import ProfileMetadata
from simrl.profile.model_shape import model_shape
from simrl.result.result import SampleRow
from simrl.scenario.presets import constants
from simrl.training.config import TrainingConfig, trained_by
from simrl.training.weight_sync import loading_s, publication_s
from simrl_replay.grpo.policy import WEIGHTS, TokenIds, micro_batches, qwen3, save_policy
from simrl_replay.grpo.update import Trajectory, UpdateConfig, make_optimizer, update
from simrl_replay.host import Begin, Ended, Gained, Loaded, LoadWeights
from simrl_replay.link import EngineLink, engine_link, reports_of, start_all
from simrl_replay.vllm_adapter import EngineSettings

Device = Literal["cpu", "cuda"]
DTYPES: dict[Device, str] = {"cpu": "float32", "cuda": "bfloat16"}
OnPhase = Callable[[str, float, dict[str, Any]], None]  # a phase, its measured seconds, its details
SILENCE_S = 120.0  # of an engine that is waited for
UNLIKE = (
    "one GPU: no weights are gathered, gradients reduced or weights resharded",
    "trainer and engine share the memory: nothing is offloaded between phases, so the switch takes no time",
    "weights reach the engine through a file; verl hands over tensors on the GPU",
    "sequences are padded to the longest of a micro-batch; the prediction and verl pack them",
    "no reference model; rewards are not computed",
    "the batch reaches the trainer through a pipe, outside of the phases, in place of verl's controller",
)


class Prediction(NamedTuple):
    """Phases by name (`predicted_s`, `rests_on`), the requests of the step, and its validated
    scenario."""

    phases: dict[str, dict[str, Any]]
    requests: list[SampleRow]
    scenario: dict[str, Any]


def scenario_of(
    model: str, card: str, profile: Path | None = None, **sections: Any
) -> dict[str, Any]:
    """Return the scenario of a step of a Qwen3 (a name, or a config.json) on a GPU: 16 × 16
    long-tailed responses unless the `sections` (`workload`, `engine`, `training`) say otherwise;
    without a profile, the roofline."""
    here = {"offload": "none", "switch_s": 0.0, "reward_s": 0.0, "tokens_per_microbatch": 8192}
    lengths = {"prompt_tokens": 64, "mean_tokens": 500, "sigma": 0.8, "cap_tokens": 2048}
    return {
        "name": "whole-step",
        "steps": 1,
        "warmup_steps": 0,
        "model": model,
        "cluster": {"gpu": card, "gpus": 1, "tp": 1},
        "workload": sections.get(
            "workload", {"synthetic": {"steps": 1, "prompts_per_step": 16, "group": 16, **lengths}}
        ),
        "profile": {"roofline": {}} if profile is None else {"path": str(profile)},
        "engine": {
            "gpu_memory_utilization": 0.5,
            "async_scheduling": False,
            **sections.get("engine", {}),
        },
        "training": {**here, **sections.get("training", {})},
        "systems": ["verl_colocated"],
    }


def predict(scenario: dict[str, Any]) -> Prediction:
    """Predict the phases with simrl. Raise `InputError` for a step that cannot be simulated."""
    result = simrl.run(scenario).result()
    valid, profile = result.metadata["scenario"], result.metadata["profile"]
    spans = result.spans.to_pandas()
    seconds = (spans["ended_s"] - spans["started_s"]).groupby(spans["kind"].astype(str)).sum()
    shape, card = model_shape(valid["model"]), gpu(valid["cluster"]["gpu"])
    by_file = TrainingConfig.model_validate({**valid["training"], "weight_sync": "file"})
    trained, load_s = f"{trained_by(valid)}; {card.source}", profile["load_weights_s"]
    storage = f"assumed: files at {by_file.weight_sync_storage_bytes_per_s / 1e9:g} GB/s"
    phases = {
        "generation": (
            seconds["rollout"],
            "; ".join(
                [f"{profile['kind']}: {profile['source']}"]
                + [
                    f"{key} {constant.words}, {constant.kind}"
                    for _, key, constant in constants(
                        valid, ProfileMetadata.model_construct(**profile)
                    )
                ]
            ),
        ),
        "log_prob": (seconds["log_prob"], trained),
        "update": (seconds["train"], trained),
        "publish": (publication_s(by_file, shape, card, 1), storage),
        "load": (
            load_s or loading_s(by_file, shape, card, 1, 1, 1),
            "measured" if load_s else storage,
        ),
    }
    return Prediction(
        {
            name: {"predicted_s": float(of_s), "rests_on": why}
            for name, (of_s, why) in phases.items()
        },
        [SampleRow(**row) for row in result.samples.sort_by("uid").to_pylist()],
        valid,
    )


def make_weights(prediction: Prediction, device: Device, folder: Path) -> Any:
    """Write random weights of the model's shape. Return the model that has them, on the device,
    ready for training."""
    s = model_shape(prediction.scenario["model"])
    sizes = (
        s.layers,
        s.hidden,
        s.heads,
        s.kv_heads,
        s.intermediate,
        s.vocab,
        _longest(prediction.requests),
    )
    others: dict[str, Any] = {
        "head_dim": s.head_dim,
        "tie_word_embeddings": s.tied_embeddings,
        "dtype": DTYPES[device],
    }
    torch.manual_seed(prediction.scenario["seed"])
    with torch.device(
        device
    ):  # rotary frequencies stay in float32, as a later conversion would not leave them
        model = AutoModelForCausalLM.from_config(
            qwen3(*sizes, **others),
            dtype=getattr(torch, DTYPES[device]),
            attn_implementation="sdpa",
        )
    # Activations are recomputed in the backward pass, as in the prediction; no layer draws random
    # numbers.
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    save_policy(model.train(), folder)
    return model


def start_engine(
    prediction: Prediction, device: Device, weights: Path, log: Path, **others: Any
) -> EngineLink:
    """Start an engine that has the weights; `others` are fields of `EngineSettings`. Raise
    `InputError` or `StoppedError` if it does not start."""
    sizes = prediction.scenario["engine"]
    fields: dict[str, Any] = {
        **{name: sizes[name] for name in ("max_num_seqs", "max_num_batched_tokens", "block_size")},
        "max_model_len": _longest(prediction.requests),
        "kv_blocks": sizes["kv_cache_tokens"] and sizes["kv_cache_tokens"] // sizes["block_size"],
        "device": device,
        "dtype": DTYPES[device],
        "gpu_memory_utilization": sizes["gpu_memory_utilization"],
        "prefix_caching": True,  # as verl_colocated has it
    }
    return start_all(
        [partial(engine_link, "engine", EngineSettings(str(weights), **(fields | others)), log)],
        600.0,
    )[0]


def measure(
    prediction: Prediction,
    model: Any,
    link: EngineLink,
    folder: Path,
    device: Device,
    on_phase: OnPhase,
) -> None:
    """Run the step. Model and engine have the weights in `folder`/0; the next are written to
    `folder`/1. Raise `StoppedError` if the engine ends."""
    scenario, requests = prediction.scenario, prediction.requests
    shape, draws = model_shape(scenario["model"]), np.random.default_rng(scenario["seed"])
    prompts = {
        r.prompt_id: tuple(draws.integers(0, shape.vocab, r.prompt_tokens).tolist())
        for r in requests
    }
    warm = [
        r._replace(generated_tokens=min(8, r.generated_tokens)) for r in requests
    ]  # the whole batch, for a few passes
    _generate(link, warm, {key: prompt[::-1] for key, prompt in prompts.items()})
    responses, seconds = _generate(link, requests, prompts)
    on_phase("generation", seconds, {"tokens": sum(map(len, responses.values()))})

    batch = [
        Trajectory(
            TokenIds(prompts[r.prompt_id], responses[r.uid]),
            float(r.sample % 2),
            r.prompt_id,
            ((0, r.generated_tokens),),
        )
        for r in requests
    ]
    config = UpdateConfig(
        micro_batch_tokens=scenario["training"]["tokens_per_microbatch"], learning_rate=1e-6
    )
    optimizer = make_optimizer(model, config)
    # The longest: micro-batches of full size. Equal rewards have no gradient, and AdamW then leaves
    # the weights as they are.
    warm_up = sorted((t._replace(reward=0.0) for t in batch), key=lambda t: -len(t.ids.response))[
        :4
    ]
    update(model, optimizer, warm_up, 0, {}, config)
    lengths = np.array([r.prompt_tokens + r.generated_tokens for r in requests])
    attended, peak = (lengths**2).sum() / 2, gpu(scenario["cluster"]["gpu"]).bf16_flops
    parts = list(micro_batches(lengths.tolist(), config.micro_batch_tokens))

    def trained(name: str, passes: int, seconds: float) -> None:
        on_phase(
            name,
            seconds,
            {
                "tokens": int(lengths.sum()),
                "padded_tokens": sum(len(part) * int(lengths[part].max()) for part in parts),
                "micro_batches": len(parts),
                "mfu": passes
                * float(shape.forward_flops(lengths.sum(), attended))
                / seconds
                / peak,
                "peak_bytes": torch.cuda.max_memory_allocated(),  # of the trainer; 0 on a CPU
            },
        )

    trained(
        "update",
        3,
        update(model, optimizer, batch, 0, {}, config, partial(trained, "log_prob", 1)).train_s,
    )
    started_s = time.monotonic()
    save_policy(model, folder / "1")
    on_phase(
        "publish", time.monotonic() - started_s, {"bytes": (folder / "1" / WEIGHTS).stat().st_size}
    )
    _load(link, folder / "0")  # the first load takes longer
    on_phase("load", _load(link, folder / "1"), {})


def whole_step(
    prediction: Prediction,
    device: Device,
    folder: Path,
    on_phase: OnPhase = lambda *_: None,
    before: Callable[[], None] = lambda: None,
    **engine: Any,
) -> dict[str, dict[str, Any]]:
    """Run a predicted step, with files in a new folder and an engine of these settings. Return both
    by phase. `before` is called when all is up, `on_phase` when a phase has ended."""
    outcome = {
        name: {**phase, "measured_s": None, "details": {}}
        for name, phase in prediction.phases.items()
    }

    def ended(name: str, seconds: float, details: dict[str, Any]) -> None:
        outcome[name] |= {"measured_s": seconds, "details": details}
        on_phase(name, seconds, details)

    model = make_weights(prediction, device, folder / "0")
    link = start_engine(prediction, device, folder / "0", folder / "engine.log", **engine)
    try:
        before()
        measure(prediction, model, link, folder, device, ended)
    finally:
        link.close()
    return outcome


def _longest(requests: Sequence[SampleRow]) -> int:
    return max(request.prompt_tokens + request.generated_tokens for request in requests)


def _generate(
    link: EngineLink, requests: Sequence[SampleRow], prompts: dict[int, tuple[int, ...]]
) -> tuple[dict[int, list[int]], float]:
    """Return the responses by uid, and the seconds until the last of them ended."""
    responses: dict[int, list[int]] = {r.uid: [] for r in requests}
    started_s, reports, ends = time.monotonic(), reports_of(link, SILENCE_S), list[float]()
    link.send(
        [Begin(r.uid, r.prompt_id, prompts[r.prompt_id], (), r.generated_tokens) for r in requests]
    )
    while len(ends) < len(requests):
        match next(reports):
            case Gained(number, token_ids):
                responses[number] += token_ids
            case Ended(_, at_s):
                ends.append(at_s - link.offset_s)
    return responses, ends[-1] - started_s


def _load(link: EngineLink, folder: Path) -> float:
    """Return the seconds in which the engine loads weights."""
    link.send([LoadWeights(0, 0, str(folder), "recompute", 0.0)])
    loaded = next(report for report in reports_of(link, SILENCE_S) if isinstance(report, Loaded))
    return loaded.finished_s - loaded.started_s
