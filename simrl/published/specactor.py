"""SpecActor (arXiv 2511.16193): decoupled and best-of-N speculation against verl and its variants, 32B on 256 H800.

GPUs and prompts are divided together: a worker has 128 (GRPO) or 256 (DAPO) responses, as there. The GPUs that are left make
whole workers both of 4 and, with a drafter beside them, of 5. What waits for the slowest worker is of all of them: the share of
waiting, and what more GPUs or an overlap make of it (§2.2), are simulated whole.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from simrl.engine import EngineConfig
from simrl.hardware import gpu, model_shape
from simrl.published.lab import Lab, Measures, passes, run_of
from simrl.published.ledger import Inputs
from simrl.scenario import Scenario
from simrl.synthesis import share_of_equal

GPUS = 40
STEPS, WARMUP_STEPS = 2, 1
LONG = 0.5  # of the cap: responses beyond are among the last of a rollout
SMALL, LARGER = "qwen2.5-0.5b", "qwen2.5-1.5b"
TRACES = ("grpo", "dapo")
MILLI = 1e3

System = dict[str, Any]
VERL: System = {"name": "verl_colocated"}
TWICE: System = {"name": "verl_2x"}
RLHFUSE: System = {"name": "rlhfuse"}


def vanilla(inputs: Inputs) -> System:
    """A draft model beside the target, in turns."""
    return {"name": "verl_draft_model", "model": inputs["vanilla_drafter"], "draft_tokens": inputs["draft_tokens"]}


def ngrams(inputs: Inputs) -> System:
    """Drafts from a response's own text."""
    return {"name": "verl_ngram", "draft_tokens": inputs["draft_tokens"]}


def specactor(inputs: Inputs, **ablated: bool) -> System:
    """Its own system, or without some of its parts."""
    return {
        "name": "specactor",
        "b_max": inputs["b_max"],
        "kv": inputs["kv"],
        "drafters": inputs["drafters"],
        "assignment": inputs["assignment"],
        **ablated,
    }


def late(inputs: Inputs) -> Inputs:
    """The inputs of a late step, of which §5.4's ablations are: its responses are longer than the mean over the run."""
    return inputs | {"mean_tokens": inputs["mean_tokens"] * inputs["late_over_mean"]}


def scenario(
    inputs: Inputs, trace: str, system: System, workers: int | None = None, requests: float | None = None
) -> Scenario:
    """Some steps of one of the two traces, on so many workers with so many requests each (by default verl's). DAPO generates
    twice as many responses, and trains groups whose rewards differ."""
    workers = workers or GPUS // inputs["tp"]
    requests = requests or inputs[f"{trace}_samples"] * inputs["tp"] / inputs["gpus"]
    dapo = trace == "dapo"
    group, right = inputs["group"], inputs["reward_mean"]
    rewards = {
        "reward_mean": right,
        "reward_prompt_share": share_of_equal(1 - inputs["informative_share"], right, group),
    }
    engine: dict[str, Any] = {
        "max_num_batched_tokens": inputs["max_num_batched_tokens"],
        "gpu_memory_utilization": inputs["gpu_memory_utilization"],
    }
    if system["name"] == "specactor":
        engine["kv_cache_tokens"] = _verifiers_cache_tokens(inputs)
    return run_of(
        inputs,
        {
            "minibatches": inputs["minibatches"],
            "log_probs": inputs["log_probs"],
            "dispatch": inputs["dispatch"],
            "filter_groups": dapo,
            **system,
        },
        model=inputs["model"],
        gpus=workers * inputs["tp"],
        tp=inputs["tp"],
        lengths={
            "prompts_per_step": round(workers * requests / group),
            "cap_tokens": inputs["cap_tokens"],
            "mean_tokens": inputs["mean_tokens"],
            **rewards,
        },
        steps=STEPS,
        warmup_steps=WARMUP_STEPS,
        engine=engine,
        training={
            "mfu": inputs["mfu"],
            "log_prob_mfu": inputs["log_prob_mfu"],
            "sequence_parallel": inputs["sequence_parallel"],
            "tokens_per_microbatch": inputs["microbatch_tokens_per_gpu"] * inputs["sequence_parallel"],
            "extra_log_probs": 0 if dapo else inputs["grpo_reference"],
            "switch_s": inputs["switch_s"],
            "load_s": inputs["load_s"],
            "minibatch_overhead_s": inputs["minibatch_overhead_s"],
            "reward_s": inputs["reward_s"],
        },
        speculation={
            "verification": inputs["verification"],
            "temperature": inputs["temperature"],
            "draft_round_s": inputs["draft_round_s"],
            "acceptance": {
                SMALL: _acceptance(inputs, inputs["accept_0p5b"]),
                LARGER: _acceptance(inputs, inputs["accept_0p5b"] + inputs["accept_1p5b_more"]),
            },
            "runs": {"ngram": _ngram_runs(inputs)},
        },
    )


def _verifiers_cache_tokens(inputs: Inputs) -> int:
    """The KV cache of a worker that verifies. §4.3: drafters of the tail wait in the host's memory until a worker is freed,
    and that of the batch is on another GPU, so that none of them takes a verifier's (simrl's recipe has them all resident)."""
    shape, kind, tp = model_shape(inputs["model"]), gpu(inputs["gpu"]), inputs["tp"]
    own = kind.memory_bytes * inputs["gpu_memory_utilization"] - EngineConfig().reserve_bytes - shape.weight_bytes / tp
    return int(own // (shape.kv_bytes_per_token / min(tp, shape.kv_heads)))


def _ngram_runs(inputs: Inputs) -> dict[str, Any]:
    """What a response's own text drafts: of the longest, for most nothing."""
    drafted: dict[str, Any] = {
        "share": 1.0,
        "share_of_long": inputs["ngram_share_of_long"],
        "wrong_drafts": inputs["ngram_wrong_drafts"],
        "gaps": [{"up_to_tokens": 64, "share": 1.0, "mean_tokens": inputs["ngram_gap_tokens"]}],
        "hits": [{"up_to_tokens": 64, "share": 1.0, "mean_tokens": inputs["ngram_hit_tokens"]}],
    }
    cap = inputs["cap_tokens"]
    never = drafted | {
        "share": 0.0,
        "share_of_long": 1 - inputs["ngram_share_of_long"],
        "gaps": [{"up_to_tokens": 2 * cap, "share": 1.0, "mean_tokens": 2 * cap}],
    }
    return {
        "classes": [drafted, never],
        "typical_tokens": LONG * cap,
        "first_epoch": True,
        "source": "the ledger",
    }


def _acceptance(inputs: Inputs, accepted: float) -> dict[str, Any]:
    return {
        "by_position": [accepted],
        "spread": inputs["accept_spread"],
        "length_exponent": inputs["accept_length_exponent"],
        "typical_tokens": inputs["mean_tokens"],
        "verification": inputs["verification"],
        "source": "the ledger",
    }


def _run(lab: Lab, inputs: Inputs, trace: str, system: System) -> Measures:
    return lab.run(scenario(inputs, trace, system))


def whole(inputs: Inputs, trace: str, system: System) -> Scenario:
    """The scenario on all GPUs."""
    return scenario(inputs, trace, system, inputs["gpus"] // inputs["tp"])


def _run_whole(lab: Lab, inputs: Inputs, trace: str, system: System) -> Measures:
    return lab.run(whole(inputs, trace, system))


def against_the_best(lab: Lab, inputs: Inputs) -> list[float]:
    """Fig. 11: the best baseline's step over its own, a mean over the traces."""
    return [mean(min(_baselines(lab, inputs, trace)) for trace in TRACES)]


def against_the_others(lab: Lab, inputs: Inputs) -> list[float]:
    """Fig. 11: the other baselines' steps over its own."""
    return [mean(ratio for trace in TRACES for ratio in sorted(_baselines(lab, inputs, trace))[1:])]


def _baselines(lab: Lab, inputs: Inputs, trace: str) -> list[float]:
    own_s = _run(lab, inputs, trace, specactor(inputs))["step_s"]
    systems = (VERL, RLHFUSE, TWICE, vanilla(inputs), ngrams(inputs))
    return [_run(lab, inputs, trace, system)["step_s"] / own_s for system in systems]


def rollout_against(*names: str) -> Callable[[Lab, Inputs], list[float]]:
    """§5.2: a baseline's rollout over its own, a mean over the traces (and over baselines)."""

    def predict(lab: Lab, inputs: Inputs) -> list[float]:
        systems = {"verl": VERL, "twice": TWICE, "vanilla": vanilla(inputs), "ngram": ngrams(inputs)}
        ratios = [
            _run(lab, inputs, trace, systems[name])["rollout_s"]
            / _run(lab, inputs, trace, specactor(inputs))["rollout_s"]
            for trace in TRACES
            for name in names
        ]
        return [mean(ratios)]

    return predict


def _late_rollout_s(lab: Lab, inputs: Inputs, system: System) -> float:
    return float(_run(lab, late(inputs), "dapo", system)["rollout_s"])


def vanilla_gain(lab: Lab, inputs: Inputs) -> list[float]:
    """§5.4: by how much a draft model shortens verl's rollout."""
    return [1 - _late_rollout_s(lab, inputs, vanilla(inputs)) / _late_rollout_s(lab, inputs, VERL)]


def apart(lab: Lab, inputs: Inputs) -> list[float]:
    """§5.4: by how much a draft model on GPUs of its own, still in turns with verification, lengthens verl's rollout. There are
    fewer pairs of verifier and drafter than verl has workers, so that each has more of the requests; passes take what they
    take in `vanilla`, whose drafter is computed by one GPU as well."""
    pair = inputs["tp"] + inputs["draft_gpus"]
    requests = inputs["dapo_samples"] / (inputs["gpus"] // pair)
    few = scenario(late(inputs), "dapo", vanilla(inputs), GPUS // pair, requests)
    return [float(lab.run(few)["rollout_s"]) / _late_rollout_s(lab, inputs, VERL) - 1]


def decoupled(lab: Lab, inputs: Inputs) -> list[float]:
    """§5.4: vanilla speculation over decoupled drafting alone."""
    alone = specactor(inputs, reconfigure=False, best_of_n=False)
    return [_late_rollout_s(lab, inputs, vanilla(inputs)) / _late_rollout_s(lab, inputs, alone)]


def reconfigured(lab: Lab, inputs: Inputs) -> list[float]:
    """§5.4: what reconfiguration adds."""
    without = specactor(inputs, reconfigure=False, best_of_n=False)
    return [_late_rollout_s(lab, inputs, without) / _late_rollout_s(lab, inputs, specactor(inputs, best_of_n=False))]


def best_of_n(lab: Lab, inputs: Inputs) -> list[float]:
    """§5.4: what best-of-N adds."""
    without = specactor(inputs, best_of_n=False)
    return [_late_rollout_s(lab, inputs, without) / _late_rollout_s(lab, inputs, specactor(inputs))]


def twice_the_gpus(lab: Lab, inputs: Inputs) -> list[float]:
    """§2.2, Fig. 2b: verl's step over that with twice the GPUs for rollout."""
    return [_run_whole(lab, inputs, "dapo", VERL)["step_s"] / _run_whole(lab, inputs, "dapo", TWICE)["step_s"]]


def fused(lab: Lab, inputs: Inputs) -> list[float]:
    """§2.2: what RLHFuse gains over verl."""
    return [_run_whole(lab, inputs, "dapo", VERL)["step_s"] / _run_whole(lab, inputs, "dapo", RLHFUSE)["step_s"] - 1]


def wasted(lab: Lab, inputs: Inputs) -> list[float]:
    """§2.2, Fig. 2a: share of the workers' time in verl's rollout for which they wait for the slowest."""
    return [float(_run_whole(lab, inputs, "dapo", VERL)["idle_share"])]


def rollout_share(lab: Lab, inputs: Inputs) -> list[float]:
    """§2.2: of verl's step, a mean over the traces."""
    runs = [_run_whole(lab, inputs, trace, VERL) for trace in TRACES]
    return [mean(run["rollout_s"] / run["step_s"] for run in runs)]


def decode_latency(lab: Lab, inputs: Inputs) -> list[float]:
    """§5.1: milliseconds a token of one response."""
    profile = passes(model_shape(inputs["model"]), gpu(inputs["gpu"]), inputs["tp"], inputs["between_passes_s"])
    return [MILLI * profile.decode_s(1, round(inputs["mean_tokens"]))]


ROWS: dict[str, Callable[[Lab, Inputs], list[float]]] = {
    "spec-e2e-best": against_the_best,
    "spec-e2e-others": against_the_others,
    "spec-rollout-verl": rollout_against("verl"),
    "spec-rollout-2x": rollout_against("twice"),
    "spec-rollout-vanilla": rollout_against("vanilla", "ngram"),
    "spec-abl-vanilla": vanilla_gain,
    "spec-abl-disagg": apart,
    "spec-abl-decoupled": decoupled,
    "spec-abl-reconf": reconfigured,
    "spec-abl-bon": best_of_n,
    "spec-2x": twice_the_gpus,
    "spec-rlhfuse": fused,
    "spec-idle": wasted,
    "spec-rollout-share": rollout_share,
    "spec-decode-latency": decode_latency,
}
