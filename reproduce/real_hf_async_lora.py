"""Hugging Face's asynchronous GRPO with LoRA on H200: two rungs of a ladder of trainers, rollout on GPUs of their own.

Invariant: the model is not stated, and so is an open input; what is predicted is the step, and which side waits for the other.
"""

from __future__ import annotations

from reproduce.lab import Lab, Predict, row, run_of
from reproduce.ledger import Inputs, named
from reproduce.real_lengths import of_run
from simrl.scenario.model import Scenario

STEPS = (24, 12)  # the queue fills in the first ones
QUANTITIES = {f"hf-lora-{name}": ("step_s", "trainer waits") for name in ("dp2", "dp2-tb16k")}


def scenario(inputs: Inputs) -> Scenario:
    """Return a run: everything that is known of it is put together here."""
    group = inputs["group"]
    steps = STEPS[0]
    batch = round(inputs["samples"] / group)
    packed = inputs["token_budget"] > 0
    longest = inputs["cap_tokens"] + inputs["prompt_cap_tokens"]
    return run_of(
        inputs,
        {
            "name": "areal",
            "eta": inputs["queue_samples"] // inputs["samples"],
            "rollout_share": inputs["rollout_share"],
            "max_concurrent": max(inputs["max_inflight"] // (group if inputs["inflight_unit"] == "sample" else 1), 1),
            "minibatches": 1,
            "log_probs": inputs["log_probs"],
        },
        model=inputs["model"],
        gpus=inputs["gpus"],
        tp=inputs["tp"],
        lengths={
            "steps": steps + 8,
            "prompts_per_step": batch,
            "cap_tokens": inputs["cap_tokens"],
            "mean_tokens": inputs["mean_tokens"],
        },
        steps=steps,
        warmup_steps=STEPS[1],
        training={
            "lora": True,
            "sharding": "optimizer",
            "microbatching": "dynamic" if packed else "fixed",
            "tokens_per_microbatch": inputs["token_budget"] if packed else longest,
            **named(inputs, "recompute", "reward_s"),
        },
        engine=named(inputs, "gpu_memory_utilization"),
    )


@row
def step_and_side(lab: Lab, inputs: Inputs, name: str) -> list[float]:
    """Predict the seconds of a trainer's step, and the share of it in which the trainer waits for rollouts."""
    found = lab.run(scenario(of_run(inputs, name)))
    return [found["step_s"], found["train_idle"]]


ROWS: dict[str, Predict] = {"hf-lora-dp2": step_and_side("dp2"), "hf-lora-dp2-tb16k": step_and_side("tb16k")}
