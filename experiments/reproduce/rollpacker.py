"""RollPacker (arXiv 2509.21009): the mean step of verl, of RLHFuse and of tail batching, 7B on 16 H800."""

from __future__ import annotations

from typing import Any

from experiments.reproduce.lab import Lab, Predict, run_of
from experiments.reproduce.ledger import Inputs, named
from simrl.scenario.model import Scenario

BASELINE_STEPS = 3  # of verl, whose steps are alike
STEPS, WARMUP_STEPS = 12, 0  # some short rounds and a long one of tail batching


def scenario(inputs: Inputs, system: dict[str, Any]) -> Scenario:
    """Return one of the three runs."""
    return run_of(
        inputs,
        {**named(inputs, "minibatches", "log_probs"), **system},
        model=inputs["model"],
        gpus=inputs["gpus"],
        tp=inputs["tp"],
        lengths={
            "prompts_per_step": inputs["prompts"],
            **named(inputs, "cap_tokens", "mean_tokens"),
        },
        steps=STEPS,
        warmup_steps=WARMUP_STEPS,
        training={
            **named(inputs, "mfu", "log_prob_mfu"),
            "sequence_parallel": inputs["train_tp"],
            "tokens_per_microbatch": inputs["cap_tokens"] + inputs["prompt_cap_tokens"],
            **named(inputs, "extra_log_probs", "reward_s", "switch_s", "load_s"),
        },
    )


def steps_s(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict the seconds of a step under verl, RLHFuse and tail batching."""
    systems: tuple[dict[str, Any], ...] = (
        {"name": "verl_colocated"},
        {"name": "rlhfuse", "threshold": inputs["rlhfuse_threshold"]},
        {"name": "rollpacker", **named(inputs, "eta_prompts", "eta_responses")},
    )
    return [float(lab.run(scenario(inputs, system))["step_s"]) for system in systems]


ROWS: dict[str, Predict] = {"rollpacker-7b-8k": steps_s}

# What descriptors are compared with: a few steps of verl.
BASELINE: dict[str, Predict] = {
    "verl_step_s": lambda lab, inputs: [
        float(
            lab.run(
                scenario(inputs, {"name": "verl_colocated"}).model_copy(
                    update={"steps": BASELINE_STEPS}
                )
            )["step_s"]
        )
    ],
}
