"""Marin's reinforcement learning of a mixture of experts on H100: synchronous, and one batch ahead, rollout on GPUs of its own.

Invariant: both runs share all inputs but the mean length. No profile of the model exists: its forward passes are estimated from
the nearest model by the ratio of rooflines. Seconds are of all updates, the first ones too, as they were measured.
"""

from __future__ import annotations

from typing import Any

from experiments.reproduce.lab import Lab, Predict, lengths_of, made, row
from experiments.reproduce.ledger import Inputs, named
from experiments.reproduce.real_lengths import of_run
from simrl.profile.shipped import SHIPPED
from simrl.scenario.model import Scenario

QUANTITIES = {
    "marin-sync": ("core_s",),
    "marin-async-c1": ("core_s",),
    "marin-async-c1-over-sync": ("core_s ratio",),
}


def scenario(inputs: Inputs, mode: str, publish_s: float) -> Scenario:
    """Return a run: everything that the thread says of it is put together here."""
    system: dict[str, Any] = {"name": "split"}
    if mode == "c1":
        system = {"name": "skyrl_async", "max_staleness_steps": inputs["batches_ahead"]}
    lengths = {
        "prompts_per_step": inputs["prompts"],
        "mean_tokens": inputs["mean_tokens"],
        "cap_tokens": inputs["cap_tokens"],
    }
    data = {
        "name": "marin",
        "steps": inputs["updates"],
        "warmup_steps": 0,
        "model": inputs["model"],
        "cluster": {
            "gpus": inputs["learner_gpus"] + inputs["inference_gpus"],
            "tp": 1,
            "dp": inputs["inference_gpus"],
            "ep": inputs["inference_gpus"],
            **named(inputs, "gpu", "host_speed"),
        },
        "workload": {"synthetic": lengths_of(inputs, inputs["updates"] + 4, lengths)},
        "profile": {"path": SHIPPED},
        "engine": {"preset": inputs["engine_preset"], **named(inputs, "max_num_seqs")},
        "training": {
            "microbatching": "fixed",
            "publish_s": publish_s,
            **named(inputs, "sharding", "recompute", "expert_parallel", "reward_s"),
            **named(inputs, "sequences_per_microbatch", "expert_imbalance"),
        },
        "system": {
            "rollout_share": inputs["inference_gpus"]
            / (inputs["learner_gpus"] + inputs["inference_gpus"]),
            **named(inputs, "minibatches", "log_probs"),
            **system,
        },
    }
    return made(Scenario, data).with_profile()


def core_s(lab: Lab, inputs: Inputs, mode: str) -> float:
    """Return the seconds of a run's updates, whose weight syncs take the seconds that the thread states."""
    inputs = of_run(inputs, mode)
    phases = lab.run(scenario(of_run(inputs, "sync"), "sync", 0.0))["phase_s"]
    transfer_s = phases["publish"] + phases["load_weights"]
    publish_s = max(inputs["weight_sync_s"] - transfer_s, 0.0)
    return float(lab.run(scenario(inputs, mode, publish_s))["step_s"] * inputs["updates"])


@row
def run(lab: Lab, inputs: Inputs, mode: str) -> list[float]:
    """Predict the seconds of a run."""
    return [core_s(lab, inputs, mode)]


@row
def ratio(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict the ratio of seconds: the run that is a batch ahead over the synchronous run."""
    return [core_s(lab, inputs, "c1") / core_s(lab, inputs, "sync")]


ROWS: dict[str, Predict] = {
    "marin-sync": run("sync"),
    "marin-async-c1": run("c1"),
    "marin-async-c1-over-sync": ratio(),
}
