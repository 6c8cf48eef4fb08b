"""verl's V1 trainer on Qwen3.5-35B-A3B: synchronous, colocated and asynchronous, and asynchronous on GPUs of their own.

Invariant: the three runs share all inputs but GPUs, parallelism and lengths. A step trains a batch of 64 prompts in every mode.
"""

from __future__ import annotations

from typing import Any

from experiments.reproduce.lab import Lab, Predict, row, run_of
from experiments.reproduce.ledger import Inputs, named
from experiments.reproduce.real_lengths import of_run
from simrl.scenario.model import Scenario

QUANTITIES = {
    "verl-v1-sync": ("hours",),
    "verl-v1-colocate-async": ("hours",),
    "verl-v1-separate-async": ("hours",),
    "verl-v1-colocate-async-over-sync": ("samples/s ratio",),
}
STEPS, WARMUP_STEPS, UPDATES = (
    6,
    2,
    4,
)  # of batches, simulated and left out; weight syncs of a batch


SYSTEMS = {"sync": "sync", "colocate": "colocate_async", "separate": "separate_async"}


def scenario(inputs: Inputs, mode: str) -> Scenario:
    """Return a run: everything that the page says of it is put together here."""
    each = UPDATES if mode == "separate" else 1
    system: dict[str, Any] = {"name": f"verl_v1_{SYSTEMS[mode]}", **named(inputs, "log_probs")}
    if mode != "sync":
        system |= named(inputs, "warmup_batches")
    if mode == "separate":  # an update is a mini-batch
        system |= {"sync_step": inputs["minibatches"], **named(inputs, "rollout_share")}
    else:
        system |= named(inputs, "minibatches")
    return run_of(
        inputs,
        system,
        model=inputs["model"],
        gpus=inputs["gpus"],
        tp=inputs["gen_tp"],
        lengths={
            "steps": 2 * STEPS,
            "prompts_per_step": inputs["prompts"],
            "cap_tokens": inputs["cap_tokens"],
            "mean_tokens": inputs["mean_tokens"],
        },
        steps=STEPS * each,
        warmup_steps=WARMUP_STEPS * each,
        training={
            "tensor_parallel": inputs["train_tp"],
            "pipeline_parallel": inputs["train_pp"],
            "sequence_parallel": inputs["train_cp"],
            "expert_parallel": inputs["train_ep"],
            "tokens_per_microbatch": inputs["prompt_cap_tokens"] + inputs["cap_tokens"],
            "microbatching": "fixed",
            **named(inputs, "sequences_per_microbatch", "remove_padding", "padded_to"),
            **named(inputs, "recompute", "switch_s", "reward_s", "expert_imbalance", "weight_sync"),
        },
        engine={
            "log_probs": inputs["engine_log_probs"],
            **named(inputs, "gpu_memory_utilization"),
        },
        framework=inputs["framework"],
    )


def hours(lab: Lab, inputs: Inputs, mode: str) -> float:
    """Return the hours of a run's steps."""
    inputs = of_run(inputs, mode)
    updates = inputs["minibatches"] if mode == "separate" else 1
    return float(lab.run(scenario(inputs, mode))["step_s"] * updates * inputs["steps"] / 3600)


@row
def run(lab: Lab, inputs: Inputs, mode: str) -> list[float]:
    """Predict the hours of a run."""
    return [hours(lab, inputs, mode)]


@row
def speed_up(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict the ratio of the colocated runs in samples a second; their batches and steps are equal."""
    return [hours(lab, inputs, "sync") / hours(lab, inputs, "colocate")]


ROWS: dict[str, Predict] = {
    "verl-v1-sync": run("sync"),
    "verl-v1-colocate-async": run("colocate"),
    "verl-v1-separate-async": run("separate"),
    "verl-v1-colocate-async-over-sync": speed_up(),
}
