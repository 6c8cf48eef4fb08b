"""verl's documentation (recipe fully_async_policy): the phases of colocated and of fully asynchronous steps on H20.

GPUs, prompts and mini-batches are divided by `SCALE` together: each worker and each trainer rank has the same to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simrl.published.lab import Lab, Measures, run_of
from simrl.published.ledger import Inputs
from simrl.scenario import Scenario

SCALE = 2
COLOCATED_STEPS, ASYNCHRONOUS_STEPS = (3, 1), (6, 2)  # steps of the page, and the first of them that are left out


def scenario(
    inputs: Inputs, gpus: int, system: dict[str, Any], steps: int, warmup_steps: int, **training: Any
) -> Scenario:
    """One of the page's runs."""
    return run_of(
        inputs,
        system,
        model=inputs["model"],
        gpus=gpus // SCALE,
        tp=inputs["tp"],
        lengths={
            "prompts_per_step": inputs["prompts"] // SCALE,
            "cap_tokens": inputs["cap_tokens"],
            "mean_tokens": inputs["mean_tokens"],
        },
        steps=steps,
        warmup_steps=warmup_steps,
        engine={
            "max_num_batched_tokens": 16384,  # as far as profiles reach; the scripts' 30,720 matter to prefill alone
            "gpu_memory_utilization": inputs["gpu_memory_utilization"],
        },
        training={
            "mfu": inputs["mfu"],
            "log_prob_mfu": inputs["log_prob_mfu"],
            "sequence_parallel": inputs["sequence_parallel"],
            "tokens_per_microbatch": inputs["tokens_per_microbatch"],
            "minibatch_overhead_s": inputs["minibatch_overhead_s"],
            "log_prob_overhead_s": inputs["log_prob_overhead_s"],
            "switch_s": inputs["switch_s"],
            **training,
        },
    )


def colocated(gpus: int) -> Callable[[Lab, Inputs], list[float]]:
    """Seconds of a step, of generation (waking and sleeping of the engines is in it), old log-probs and update."""

    def predict(lab: Lab, inputs: Inputs) -> list[float]:
        minibatches = inputs["prompts"] // inputs["minibatch_prompts"]
        system = {"name": "verl_colocated", "minibatches": minibatches, "log_probs": inputs["colocated_log_probs"]}
        run = lab.run(scenario(inputs, gpus, system, *COLOCATED_STEPS))
        phase_s = run["phase_s"]
        generation_s = run["step_s"] - phase_s["log_prob"] - phase_s["train"] - phase_s.get("transfer", 0.0)
        return [run["step_s"] + inputs["step_overhead_s"], generation_s, phase_s["log_prob"], phase_s["train"]]

    return predict


def asynchronous(gpus: int, with_update: bool) -> Callable[[Lab, Inputs], list[float]]:
    """Seconds of a step of the page (all updates of one synchronisation), of the trainer's wait, and of the updates."""

    def predict(lab: Lab, inputs: Inputs) -> list[float]:
        updates = inputs["sync_step"]
        system = {
            "name": "verl_fully_async",
            "staleness": inputs["staleness"],
            "sync_step": updates,
            "require_batches": inputs["require_batches"],
            "mini_batch": inputs["minibatch_prompts"] // SCALE,
            "partial_rollout": inputs["partial_rollout"],
            "per_replica": inputs["per_replica"],
            "rollout_share": inputs["async_rollout_share"],
            "log_probs": inputs["async_log_probs"],
        }
        steps, warmup_steps = (updates * count for count in ASYNCHRONOUS_STEPS)
        run = lab.run(scenario(inputs, gpus, system, steps, warmup_steps))
        seconds = [updates * run["step_s"], updates * waits(run), updates * run["phase_s"]["train"]]
        return seconds if with_update else seconds[:2]

    return predict


def waits(run: Measures) -> float:
    """Seconds an update that the trainer idles."""
    return float(run["train_idle"] * run["step_s"])


def weight_sync(size: str) -> Callable[[Lab, Inputs], list[float]]:
    """Seconds of a synchronisation of weights tensor by tensor, and in buckets."""

    def predict(lab: Lab, inputs: Inputs) -> list[float]:
        bytes_, tensors = inputs[f"sync_bytes_{size}"], inputs[f"sync_tensors_{size}"]
        rate = inputs["link_bytes_per_s"] if size == "7b" else inputs["network_bytes_per_s"]
        buckets = -(-bytes_ // inputs["bucket_bytes"])
        one_by_one_s = bytes_ / rate + tensors * inputs["tensor_s"]
        bucketed_s = max(bytes_ / rate, bytes_ / inputs["engine_bytes_per_s"]) + buckets * inputs["tensor_s"]
        return [one_by_one_s, bucketed_s]

    return predict


ROWS: dict[str, Callable[[Lab, Inputs], list[float]]] = {
    "verl-sync-32": colocated(32),
    "verl-sync-64": colocated(64),
    "verl-async-32": asynchronous(32, with_update=False),
    "verl-async-64": asynchronous(64, with_update=True),
    "weight-sync-7b": weight_sync("7b"),
    "weight-sync-30b": weight_sync("30b"),
}
