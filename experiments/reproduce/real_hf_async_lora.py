"""Hugging Face's asynchronous GRPO with LoRA on H200: two rungs of a ladder of trainers, rollout on GPUs of their own.

Invariant: what is predicted is a step without a weight sync, as the page's median is (it syncs after every fourth), and which
side waits for the other.
"""

from __future__ import annotations

from experiments.reproduce.lab import Lab, Predict, row, run_of
from experiments.reproduce.ledger import Inputs, named
from experiments.reproduce.real_lengths import of_run
from simrl.scenario.model import Scenario

STEPS = (24, 12)  # the queue fills in the first ones
MOST_GROUPS = 100_000  # under way: no limit but the queue's
QUANTITIES = {f"hf-lora-{name}": ("step_s", "trainer waits") for name in ("dp2", "dp2-tb16k")}


def scenario(inputs: Inputs) -> Scenario:
    """Return a run: everything that is known of it is put together here."""
    steps, group = STEPS[0], inputs["group"]
    replicas = round(inputs["gpus"] * inputs["rollout_share"]) // inputs["tp"]
    seats = inputs["max_inflight"] // replicas  # others wait at the engine
    packed = inputs["token_budget"] > 0
    longest = inputs["cap_tokens"] + inputs["prompt_cap_tokens"]
    return run_of(
        inputs,
        {
            "name": "areal",
            "eta": inputs["queue_samples"] // inputs["samples"],
            "rollout_share": inputs["rollout_share"],
            "max_concurrent": MOST_GROUPS,
            "minibatches": 1,
            "log_probs": inputs["log_probs"],
        },
        model=inputs["model"],
        gpus=inputs["gpus"],
        tp=inputs["tp"],
        lengths={
            "steps": steps + 8,
            "prompts_per_step": round(inputs["samples"] / group),
            "cap_tokens": inputs["cap_tokens"],
            "mean_tokens": inputs["mean_tokens"],
        },
        steps=steps,
        warmup_steps=STEPS[1],
        training={
            "lora": True,
            "logits": inputs["logits"],
            "microbatching": "dynamic" if packed else "fixed",
            "tokens_per_microbatch": inputs["token_budget"] if packed else longest,
            **named(inputs, "sharding", "recompute", "reward_s"),
        },
        engine={**named(inputs, "gpu_memory_utilization"), "max_num_seqs": seats},
    )


@row
def step_and_side(lab: Lab, inputs: Inputs, name: str) -> list[float]:
    """Predict the seconds of a trainer's step, and the share of it in which the trainer waits for rollouts, both without the
    weight sync that follows each simulated step."""
    found = lab.run(scenario(of_run(inputs, name)))
    sync_s = found["phase_s"].get("load_weights", 0.0)  # from its publication on
    step_s = found["step_s"] - sync_s
    waits_s = found["train_idle"] * found["step_s"] + found["phase_s"].get("publish", 0.0) - sync_s
    return [step_s, max(waits_s, 0.0) / step_s]


ROWS: dict[str, Predict] = {
    "hf-lora-dp2": step_and_side("dp2"),
    "hf-lora-dp2-tb16k": step_and_side("tb16k"),
}
