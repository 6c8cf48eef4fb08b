"""RLinf's comparison with verl: both colocated on one node of H100, Megatron and SGLang, with long reasoning responses.

Invariant: the two runs differ in mean length, in the reference's log-probs, in the controller and in the trainer (Megatron,
FSDP); all else is one set of inputs.
"""

from __future__ import annotations

from typing import Any

from experiments.reproduce.lab import Lab, Predict, row, run_of
from experiments.reproduce.ledger import Inputs, named
from experiments.reproduce.real_lengths import of_run, phase_seconds
from simrl.scenario.model import Scenario

STEPS = (3, 0)
QUANTITIES = {
    "rlinf": ("generation_s", "log_prob_s", "train_s", "step_s"),
    "rlinf-verl": ("generation_s", "log_prob_s", "train_s", "step_s"),
    "rlinf-over-verl": ("step_s ratio",),
}


def scenario(inputs: Inputs) -> Scenario:
    """Return a run: everything that the page says of it is put together here."""
    return run_of(
        inputs,
        {
            "name": inputs["system"],
            "minibatches": inputs["minibatches"],
            "log_probs": inputs["log_probs"],
        },
        model=inputs["model"],
        gpus=inputs["gpus"],
        tp=inputs["tp"],
        lengths={
            "prompts_per_step": inputs["sequences"] // inputs["group"],
            "cap_tokens": inputs["context_tokens"] - inputs["prompt_cap_tokens"],
            "mean_tokens": inputs["mean_response_tokens"],
        },
        steps=STEPS[0],
        warmup_steps=STEPS[1],
        training=training(inputs),
        engine={
            **named(inputs, "gpu_memory_utilization"),
            "log_probs": inputs["returns_log_probs"],
        },
        framework=inputs["framework"],
    )


def training(inputs: Inputs) -> dict[str, Any]:
    """Return the settings of the trainer: RLinf's is Megatron, verl's FSDP by its preset."""
    common = named(inputs, "recompute", "reward_s", "balance")
    if inputs["framework"] is not None:
        shared = inputs["sequence_parallel"]
        tokens = inputs["tokens_per_microbatch"] * shared  # verl's budget is one GPU's
        return {**common, "sequence_parallel": shared, "tokens_per_microbatch": tokens}
    return {
        **{"kernels": "fused", "attention": "fa3", "sharding": "optimizer"},
        "tensor_parallel": inputs["tensor_parallel"],
        # Sequences one by one: as many as fit at the greatest length, which is the context's.
        "microbatching": "fixed",
        "tokens_per_microbatch": inputs["context_tokens"],
        **named(inputs, "switch_s", "offload_memory"),
        **common,
    }


def seconds(lab: Lab, inputs: Inputs, name: str) -> list[float]:
    """Return the seconds of generation, of the old policy's log-probs, of training, and of a step."""
    inputs = of_run(inputs, name)
    generation_s, log_probs_s, train_s, step_s = phase_seconds(lab.run(scenario(inputs)))
    return [generation_s, log_probs_s / inputs["log_probs"], train_s, step_s]


@row
def phases(lab: Lab, inputs: Inputs, name: str) -> list[float]:
    """Predict the seconds of a run's phases and step."""
    return seconds(lab, inputs, name)


@row
def ratio(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict RLinf's seconds of a step over verl's."""
    return [seconds(lab, inputs, "rlinf")[-1] / seconds(lab, inputs, "verl")[-1]]


ROWS: dict[str, Predict] = {
    "rlinf": phases("rlinf"),
    "rlinf-verl": phases("verl"),
    "rlinf-over-verl": ratio(),
}
