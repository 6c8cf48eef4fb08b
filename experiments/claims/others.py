"""Claims of systems of which only abstracts and reports can be read (StreamRL, Kimi, Laminar), and of RollPacker."""

from __future__ import annotations

from typing import Any

from experiments.claims.claim import Claim, Figure, Undetermined
from experiments.reproduce import rollpacker
from experiments.reproduce.lab import Lab, Measures, made, step_times
from experiments.reproduce.ledger import Inputs
from simrl.scenario.model import Scenario

EPOCH_STEPS, STEPS, WARMUP_STEPS = 2, 8, 4
TPS = {"qwen3-14b": 2, "qwen2.5-32b": 4}  # as RhymeRL's
LONGEST = {"long_cap_tokens": 32768, "long_sigma": 1.2}


def run(lab: Lab, inputs: Inputs, system: dict[str, Any]) -> Measures:
    """Return a run on 64 GPUs with long tails; four updates after two epochs."""
    model, gpu = inputs["long_model"], inputs["long_gpu"]
    tp = TPS[model]
    scenario = {
        "name": "long_tail",
        "steps": STEPS,
        "warmup_steps": WARMUP_STEPS,
        "model": model,
        "cluster": {
            "gpu": gpu,
            "gpus": inputs["long_gpus"],
            "tp": tp,
            "host_speed": inputs["long_host_speed"],
        },
        "workload": {
            "synthetic": {
                "steps": STEPS + 10,
                "prompts_per_step": inputs["long_prompts"],
                "prompts": EPOCH_STEPS * inputs["long_prompts"],
                "group": inputs["long_group"],
                "cap_tokens": inputs["long_cap_tokens"],
                "mean_tokens": inputs["long_mean_tokens"],
                "sigma": inputs["long_sigma"],
                "prompt_share": inputs["long_prompt_share"],
            }
        },
        "profile": step_times(model, gpu, tp),
        "engine": {"preset": inputs["long_engine_preset"]},
        "training": {
            "mfu": inputs["long_mfu"],
            "log_prob_mfu": inputs["long_mfu"],
            "sequence_parallel": 4,
        },
        "system": system,
    }
    return lab.run(made(Scenario, scenario))


VERL = {"name": "verl_colocated", "dispatch": "even_split"}


def streams(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate x-1."""
    streamed = run(lab, inputs, {"name": "streamrl", "rollout_share": inputs["long_rollout_share"]})
    ratio = float(streamed["samples_per_s"] / run(lab, inputs, VERL)["samples_per_s"])
    return Figure({"throughput": ratio}, ratio > 1.1)


def packs(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate x-2."""
    verl, fused, packed = rollpacker.steps_s(lab, inputs)
    return Figure({"verl": verl, "RLHFuse": fused, "RollPacker": packed}, packed < fused < verl)


def in_parts(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate x-3."""
    cut = run(
        lab,
        inputs,
        {
            "name": "partial_rollout",
            "dispatch": "even_split",
            "budget_tokens": inputs["long_budget_tokens"],
        },
    )
    figures = {
        "throughput": float(cut["samples_per_s"] / run(lab, inputs, VERL)["samples_per_s"]),
        "stale tokens": cut["stale_share"],
        "of cut responses": cut["cut_share"],
    }
    return Figure(figures, figures["throughput"] > 1.1 and figures["stale tokens"] < 0.3)


def by_trajectory(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate x-4."""
    longest, share = inputs | LONGEST, {"rollout_share": inputs["long_rollout_share"]}
    rates = [
        run(lab, longest, {**share, **system})["tokens_per_s"]
        for system in ({"name": "laminar"}, {"name": "areal", "eta": inputs["long_eta"]})
    ]
    return Figure({"throughput": rates[0] / rates[1]}, rates[0] >= 0.98 * rates[1])


_LONG = "32B (14B) on 64 GPUs, 16K, sigma 1.0; verl 0.4's dispatch"

CLAIMS = {
    "x-1": Claim("claims", streams, "ratio > 1.1", _LONG),
    "x-2": Claim("rollpacker", packs, "order", "16 H800, whole; 12 steps"),
    "x-3": Claim(
        "claims",
        in_parts,
        "ratio > 1.1 and stale tokens < 30 %",
        _LONG,
        "a group trains when all of its responses are complete, so that the finished siblings of a cut response become "
        "stale, too",
        undetermined=Undetermined(
            "threshold and budget are assumed; the paper is none of the four",
            "long_budget_tokens",
            (2048, 4096, 8192, 12288),
        ),
    ),
    "x-4": Claim("claims", by_trajectory, "ratio >= 0.98", "32B (14B) on 64 GPUs, 32K, sigma 1.2"),
}
