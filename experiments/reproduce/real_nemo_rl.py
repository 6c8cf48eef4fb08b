"""NeMo-RL's performance pages: GRPO of dense models and mixtures of experts with Megatron on H100, in turns and
asynchronously.

Invariant: a run is its recipe (`recipes/`, a delta over `grpo_math_1B.yaml`) and the mean sequence of the page's table. The
runs of a ratio share all open inputs.
"""

from __future__ import annotations

from typing import Any

from experiments.reproduce.lab import Lab, Measures, Predict, row, run_of
from experiments.reproduce.ledger import Inputs, named
from experiments.reproduce.real_lengths import of_run
from simrl.scenario.model import Scenario

SYNC_STEPS = (4, 1)  # simulated, and the first of them that are left out
FILL_STEPS, MEASURED_STEPS = 2, 5  # asynchronous: left out beyond the greatest age, and the page's
PHASES = ("generation_s", "logprobs_s", "train_s")
QUANTITIES = {
    "nemo-8b-sync": ("step_s",),
    "nemo-8b-async": ("step_s",),
    "nemo-8b-async-over-sync": ("samples/s ratio",),
    "nemo-32b-sync": ("step_s",),
    "nemo-30b-a3b-sync": ("step_s",),
    "nemo-30b-a3b-async": ("step_s",),
    "nemo-30b-a3b-async-over-sync": ("samples/s ratio",),
    "nemo-235b-a22b-sync": ("step_s",),
    "nemo-phases-8b": (*PHASES, "step_s"),
    "nemo-phases-70b": (*PHASES, "step_s"),
}
UNSCORED = {
    row: "its configuration is not in the data: it is taken from the recipes, GPUs and lengths apart"
    for row in ("nemo-phases-8b", "nemo-phases-70b")
}


def scenario(inputs: Inputs, asynchronous: bool) -> Scenario:
    """Return a run: everything that its recipe says is put together here."""
    updates = {"minibatches": inputs["minibatches"], "log_probs": inputs["log_probs"]}
    system: dict[str, Any] = {"name": "verl_colocated", **updates}
    if asynchronous:
        system = {
            "name": "nemo_rl_async",
            **named(inputs, "max_age", "in_flight", "rollout_share"),
            **updates,
        }
    steps, warmup_steps = SYNC_STEPS
    if asynchronous:
        warmup_steps = inputs["max_age"] + FILL_STEPS
        steps = warmup_steps + MEASURED_STEPS
    prompt_tokens = inputs["prompt_tokens"]
    return run_of(
        inputs,
        system,
        model=inputs["model"],
        gpus=inputs["gpus"],
        tp=inputs["gen_tp"],
        lengths={
            "steps": steps + inputs["max_age"] * asynchronous,
            "prompts_per_step": inputs["prompts"],
            "cap_tokens": round(inputs["max_sequence_tokens"] - prompt_tokens),
            "mean_tokens": inputs["mean_sequence_tokens"] - prompt_tokens,
        },
        steps=steps,
        warmup_steps=warmup_steps,
        training={
            "tensor_parallel": inputs["train_tp"],
            "pipeline_parallel": inputs["train_pp"],
            "sequence_parallel": inputs["train_cp"],
            "expert_parallel": inputs["train_ep"],
            "log_prob_tokens_per_microbatch": inputs["log_prob_tokens"],
            **named(inputs, "recompute", "tokens_per_microbatch", "switch_s", "reward_s"),
            **named(
                inputs,
                "extra_log_probs",
                "update_sequence_s",
                "log_prob_sequence_s",
                "expert_imbalance",
            ),
        },
        engine=named(inputs, "max_num_batched_tokens", "gpu_memory_utilization"),
        framework=inputs["framework"],
    )


def run(lab: Lab, inputs: Inputs, name: str) -> Measures:
    """Return the measures of a run."""
    return lab.run(
        scenario(of_run(inputs, name.split("_")[0], name), asynchronous=name.endswith("async"))
    )


@row
def step(lab: Lab, inputs: Inputs, name: str) -> list[float]:
    """Predict the seconds of a step."""
    return [run(lab, inputs, name)["step_s"]]


@row
def phases(lab: Lab, inputs: Inputs, name: str) -> list[float]:
    """Predict the seconds of generation, of both log-prob passes, of training, and of a step."""
    found = run(lab, inputs, name)
    return [
        found["rollout_s"],
        found["phase_s"]["log_prob"],
        found["phase_s"]["train"],
        found["step_s"],
    ]


@row
def speed_up(lab: Lab, inputs: Inputs, name: str, baseline: str) -> list[float]:
    """Predict the ratio of two runs in samples a second; their batches are equal."""
    return [run(lab, inputs, baseline)["step_s"] / run(lab, inputs, name)["step_s"]]


ROWS: dict[str, Predict] = {
    "nemo-8b-sync": step("8b_sync"),
    "nemo-8b-async": step("8b_async"),
    "nemo-8b-async-over-sync": speed_up("8b_async", "8b_sync"),
    "nemo-32b-sync": step("32b_sync"),
    "nemo-30b-a3b-sync": step("30b_sync"),
    "nemo-30b-a3b-async": step("30b_async"),
    "nemo-30b-a3b-async-over-sync": speed_up("30b_async", "30b_sync"),
    "nemo-235b-a22b-sync": step("235b_sync"),
    "nemo-phases-8b": phases("8b_phases"),
    "nemo-phases-70b": phases("70b_phases"),
}
NOT_YET = {
    "nemo-deepseek-v3-sync": (
        "step_s",
        "its kernels in bfloat16 were not measured on H100 (in 8 bits they were), and its recipe is not in the ledger",
    )
}
