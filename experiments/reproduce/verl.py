"""verl's documentation (recipe fully_async_policy): the phases of colocated and of fully asynchronous steps on H20.

Invariant: all runs have the lengths with which the update of the asynchronous run on 16 + 16 GPUs takes what the page says. It
is an element of no row once the page's two swapped updates are corrected (NOTES). The runs are simulated whole, as the longest
of a batch's responses would not scale.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import numpy as np

from experiments.reproduce.lab import GIVEN, Lab, Measures, Predict, lengths_of, made, row, run_of
from experiments.reproduce.ledger import Inputs, named
from simrl.errors import InputError
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.scenario.model import Scenario
from simrl.trace.synthesis import synthesise
from simrl.training.config import TrainingConfig
from simrl.training.costs import TrainingCosts

COLOCATED_STEPS, ASYNCHRONOUS_STEPS = (
    (3, 1),
    (6, 2),
)  # steps of the page, and the first of them that are left out
AHEAD_STEPS = 1  # of the trace, which staleness lets run ahead
SOLVED_STEPS = 4  # batches whose mean update takes the seconds that are stated
LEAST_TOKENS, MOST_TOKENS = 16.0, 8192.0  # of a mean response


def scenario(
    lab: Lab,
    inputs: Inputs,
    gpus: int,
    system: dict[str, Any],
    steps: int,
    warmup_steps: int,
    updates: int = 1,
) -> Scenario:
    """Return one of the page's runs; `updates` make one of its steps."""
    return run_of(
        inputs,
        system,
        model=inputs["model"],
        gpus=gpus,
        tp=inputs["tp"],
        lengths={**lengths(inputs, lab.once(mean_tokens, inputs)), "steps": steps + AHEAD_STEPS},
        steps=updates * steps,
        warmup_steps=updates * warmup_steps,
        engine=named(inputs, "max_num_batched_tokens", "gpu_memory_utilization"),
        training=training(inputs),
    )


def training(inputs: Inputs) -> dict[str, Any]:
    """Return the settings that the trainers of all runs share. verl's budget of tokens is a GPU's: GPUs that share a sequence
    add theirs up."""
    sequence_parallel = inputs["sequence_parallel"]
    return {
        **named(inputs, "mfu", "log_prob_mfu", "recompute"),
        "sequence_parallel": sequence_parallel,
        "tokens_per_microbatch": inputs["tokens_per_microbatch"] * sequence_parallel,
        **named(inputs, "minibatch_overhead_s", "log_prob_overhead_s", "switch_s"),
    }


def lengths(inputs: Inputs, mean_tokens: float) -> dict[str, Any]:
    """Return a batch of the page's runs."""
    return {
        "prompts_per_step": inputs["prompts"],
        "cap_tokens": inputs["cap_tokens"],
        "mean_tokens": mean_tokens,
    }


def minibatches_of(inputs: Inputs) -> int:
    """Return the number of mini-batches of a batch."""
    prompts, each = inputs["prompts"], inputs["minibatch_prompts"]
    if not 0 < each <= prompts:
        raise InputError(
            f"verl: minibatch_prompts is {each}; a mini-batch has 1 to all {prompts} prompts of a batch"
        )
    return int(prompts // each)


def mean_tokens(inputs: Inputs) -> float:
    """Return the mean response length at which the asynchronous trainer (half of 32 GPUs) takes the page's seconds for a
    batch."""
    from scipy.optimize import brentq

    trainers = round(32 * (1 - inputs["async_rollout_share"]))
    stated_s = float(inputs["async_32_update_s"])

    def excess_s(tokens: float) -> float:
        return update_s(inputs, trainers, tokens) - stated_s

    if not excess_s(LEAST_TOKENS) < 0 < excess_s(MOST_TOKENS):
        raise InputError(
            f"verl: with no mean response from {LEAST_TOKENS:.0f} to {MOST_TOKENS:.0f} tokens does the update take the "
            f"{stated_s} s that are stated; its overheads or MFU cannot be"
        )
    return float(brentq(excess_s, LEAST_TOKENS, MOST_TOKENS, xtol=0.5))


def update_s(inputs: Inputs, gpus: int, mean_tokens: float) -> float:
    """Return the seconds of the update on a batch, in its mini-batches."""
    config, minibatches = made(TrainingConfig, training(inputs)), minibatches_of(inputs)
    costs = TrainingCosts(
        model_shape(inputs["model"]), gpu(inputs["gpu"]), gpus, config, minibatches, 0, switch=False
    )
    trace = synthesise(lengths_of(inputs, SOLVED_STEPS, lengths(inputs, mean_tokens)), seed=0)
    tokens = (trace.column("prompt_tokens") + trace.column("response_tokens")).astype(np.int64)
    return mean(
        s for batch in np.split(tokens, SOLVED_STEPS) for _, s in costs.update(batch, minibatches)
    )


@row
def colocated(lab: Lab, inputs: Inputs, gpus: int) -> list[float]:
    """Predict the seconds of a step, of generation (with waking and sleeping of the engines), old log-probs and update."""
    log_probs = inputs["colocated_log_probs"]
    system = {
        "name": "verl_colocated",
        "minibatches": minibatches_of(inputs),
        "log_probs": log_probs,
    }
    run = lab.run(scenario(lab, inputs, gpus, system, *COLOCATED_STEPS))
    phase_s = run["phase_s"]
    generation_s = (
        run["step_s"] - phase_s["log_prob"] - phase_s["train"] - phase_s.get("transfer", 0.0)
    )
    return [
        run["step_s"] + inputs["step_overhead_s"],
        generation_s,
        phase_s["log_prob"],
        phase_s["train"],
    ]


@row
def asynchronous(lab: Lab, inputs: Inputs, gpus: int, given: bool) -> list[float]:
    """Predict the seconds of a step of the page (all updates of one synchronisation), of the trainer's wait, and of the
    updates. Where the update is an input, so is most of the step, and only the wait is predicted.

    Groups are fetched one by one while others are still awaited, so a step waits for the longer of the two. Only the waiting
    is executed (`verl_fully_async` takes groups at no cost): the fetching is an input, and the prediction is which of the two
    decides. The trainer is the slower side of these runs, groups lie ready, and the wait is that input.
    """
    updates = inputs["sync_step"]
    system = {
        "name": "verl_fully_async",
        "staleness": inputs["staleness"],
        "sync_step": updates,
        "require_batches": inputs["require_batches"],
        "mini_batch": inputs["minibatch_prompts"],
        **named(inputs, "partial_rollout", "per_replica"),
        "rollout_share": inputs["async_rollout_share"],
        "log_probs": inputs["async_log_probs"],
    }
    run = lab.run(scenario(lab, inputs, gpus, system, *ASYNCHRONOUS_STEPS, updates))
    idle_s = updates * waits(run)
    wait_s = max(idle_s, inputs["fetch_s"])
    step_s = updates * run["step_s"] + wait_s - idle_s
    return [GIVEN, wait_s] if given else [step_s, wait_s, updates * run["phase_s"]["train"]]


def waits(run: Measures) -> float:
    """Return the trainer's idle seconds an update."""
    return float(run["train_idle"] * run["step_s"])


@row
def weight_sync(lab: Lab, inputs: Inputs, size: str) -> list[float]:
    """Predict the seconds of a weight sync tensor by tensor, and in buckets, into and out of which tensors are copied."""
    bytes_, tensors = inputs[f"sync_bytes_{size}"], inputs[f"sync_tensors_{size}"]
    rate = inputs["link_bytes_per_s"] if size == "7b" else inputs["network_bytes_per_s"]
    buckets = -(-bytes_ // inputs["bucket_bytes"])
    one_by_one_s = bytes_ / rate + tensors * inputs["tensor_s"]
    bucketed_s = (
        max(bytes_ / rate, bytes_ / inputs["engine_bytes_per_s"]) + buckets * inputs["tensor_s"]
    )
    return [one_by_one_s, bucketed_s + tensors * inputs["bucket_tensor_s"]]


ROWS: dict[str, Predict] = {
    "verl-sync-32": colocated(32),
    "verl-sync-64": colocated(64),
    "verl-async-32": asynchronous(32, given=True),
    "verl-async-64": asynchronous(64, given=False),
    "weight-sync-7b": weight_sync("7b"),
    "weight-sync-30b": weight_sync("30b"),
}
