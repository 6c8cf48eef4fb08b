"""RollPacker (arXiv 2509.21009): the mean step of verl, of RLHFuse and of tail batching, 7B on 16 H800."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simrl.published.lab import Lab, run_of
from simrl.published.ledger import Inputs
from simrl.scenario import Scenario

STEPS, WARMUP_STEPS = 12, 0  # some short rounds and a long one of tail batching


def scenario(inputs: Inputs, system: dict[str, Any]) -> Scenario:
    """One of the three runs."""
    return run_of(
        inputs,
        {"minibatches": inputs["minibatches"], "log_probs": inputs["log_probs"], **system},
        model=inputs["model"],
        gpus=inputs["gpus"],
        tp=inputs["tp"],
        lengths={
            "prompts_per_step": inputs["prompts"],
            "cap_tokens": inputs["cap_tokens"],
            "mean_tokens": inputs["mean_tokens"],
        },
        steps=STEPS,
        warmup_steps=WARMUP_STEPS,
        training={
            "mfu": inputs["mfu"],
            "log_prob_mfu": inputs["log_prob_mfu"],
            "sequence_parallel": inputs["train_tp"],
            "tokens_per_microbatch": inputs["cap_tokens"] + inputs["prompt_cap_tokens"],
            "extra_log_probs": inputs["extra_log_probs"],
            "reward_s": inputs["reward_s"],
            "switch_s": inputs["switch_s"],
            "load_s": inputs["load_s"],
        },
    )


def steps_s(lab: Lab, inputs: Inputs) -> list[float]:
    """Seconds of a step under verl, RLHFuse and tail batching."""
    systems: tuple[dict[str, Any], ...] = (
        {"name": "verl_colocated"},
        {"name": "rlhfuse", "threshold": inputs["rlhfuse_threshold"]},
        {
            "name": "rollpacker",
            "eta_prompts": inputs["eta_prompts"],
            "eta_responses": inputs["eta_responses"],
        },
    )
    return [float(lab.run(scenario(inputs, system))["step_s"]) for system in systems]


ROWS: dict[str, Callable[[Lab, Inputs], list[float]]] = {"rollpacker-7b-8k": steps_s}
