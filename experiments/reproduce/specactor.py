"""SpecActor (arXiv 2511.16193): decoupled and best-of-N speculation against verl and its variants, 32B on 256 H800.

GPUs and prompts are divided together: a worker has 128 (GRPO) or 256 (DAPO) responses, as in the paper. The remaining GPUs
make whole workers both of 4 and, with a drafter beside them, of 5. Rows about waiting for the slowest of all workers are
simulated in full size: the share of waiting, and the effect of more GPUs or an overlap (§2.2).
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from experiments.reproduce.lab import Lab, Measures, Predict, passes, row, run_model, run_of
from experiments.reproduce.ledger import Inputs, named
from experiments.reproduce.length_models import share_of_equal
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.result.result import Result
from simrl.scenario.model import Scenario

GPUS = 40
STEPS, WARMUP_STEPS = 2, 1
LONG = 0.5  # of the cap: responses beyond are among the last of a rollout
SMALL, LARGER = "qwen2.5-0.5b", "qwen2.5-1.5b"
TRACES = ("grpo", "dapo")
LARGE_BATCH = 64  # requests: §1's "large"
PARTS = ("decoupled", "reconfigured", "best of N")  # in the order in which they are added
MILLI = 1e3

System = dict[str, Any]
VERL: System = {"name": "verl_colocated"}
TWICE: System = {"name": "verl_2x"}
RLHFUSE: System = {"name": "rlhfuse"}


def vanilla(inputs: Inputs) -> System:
    """Return a draft model beside the target, in turns."""
    return {
        "name": "verl_draft_model",
        "model": inputs["vanilla_drafter"],
        "draft_tokens": inputs["draft_tokens"],
    }


def ngrams(inputs: Inputs) -> System:
    """Return drafts from a response's own text."""
    return {"name": "verl_ngram", "draft_tokens": inputs["draft_tokens"]}


def specactor(inputs: Inputs, **ablated: Any) -> System:
    """Return SpecActor's own system, or without some of its parts."""
    return {
        "name": "specactor",
        **named(inputs, "b_max", "kv", "drafters", "assignment"),
        **ablated,
    }


def late(inputs: Inputs) -> Inputs:
    """Return the inputs of a late step, where §5.4's ablations are: its responses are longer than the mean over the run."""
    return inputs | {"mean_tokens": inputs["mean_tokens"] * inputs["late_over_mean"]}


def scenario(
    inputs: Inputs,
    trace: str,
    system: System,
    workers: int | None = None,
    requests: float | None = None,
) -> Scenario:
    """Return some steps of one of the two traces, on this number of workers with this number of requests each (by default
    verl's). DAPO generates twice as many responses, and trains groups whose rewards differ."""
    workers = workers or GPUS // inputs["tp"]
    requests = requests or inputs[f"{trace}_samples"] * inputs["tp"] / inputs["gpus"]
    dapo = trace == "dapo"
    group, right = inputs["group"], inputs["reward_mean"]
    alike = share_of_equal(1 - inputs["informative_share"], right, group)
    engine = named(inputs, "max_num_batched_tokens", "gpu_memory_utilization")
    return run_of(
        inputs,
        {**named(inputs, "minibatches", "log_probs", "dispatch"), "filter_groups": dapo, **system},
        model=inputs["model"],
        gpus=workers * inputs["tp"],
        tp=inputs["tp"],
        lengths={
            "prompts_per_step": round(workers * requests / group),
            **named(inputs, "cap_tokens", "mean_tokens"),
            "reward_mean": right,
            "reward_prompt_share": alike,
        },
        steps=STEPS,
        warmup_steps=WARMUP_STEPS,
        engine=engine,
        training={
            **named(inputs, "mfu", "log_prob_mfu", "sequence_parallel"),
            "tokens_per_microbatch": inputs["microbatch_tokens_per_gpu"]
            * inputs["sequence_parallel"],
            "extra_log_probs": 0 if dapo else inputs["grpo_reference"],
            **named(inputs, "switch_s", "load_s", "minibatch_overhead_s", "reward_s"),
        },
        speculation={
            **named(inputs, "verification", "temperature", "draft_round_s"),
            "acceptance": {
                SMALL: _acceptance(inputs, inputs["accept_0p5b"]),
                LARGER: _acceptance(inputs, inputs["accept_0p5b"] + inputs["accept_1p5b_more"]),
            },
            "runs": {"ngram": _ngram_runs(inputs)},
        },
    )


def _ngram_runs(inputs: Inputs) -> dict[str, Any]:
    """Return the drafts from a response's own text: among the longest responses, none for most."""
    cap, of_long = inputs["cap_tokens"], inputs["ngram_share_of_long"]

    def part(
        share: float, share_of_long: float, up_to_tokens: int, gap_tokens: float
    ) -> dict[str, Any]:
        return {
            "share": share,
            "share_of_long": share_of_long,
            "wrong_drafts": inputs["ngram_wrong_drafts"],
            "gaps": [{"up_to_tokens": up_to_tokens, "share": 1.0, "mean_tokens": gap_tokens}],
            "hits": [{"up_to_tokens": 64, "share": 1.0, "mean_tokens": inputs["ngram_hit_tokens"]}],
        }

    drafted, never = (
        part(1.0, of_long, 64, inputs["ngram_gap_tokens"]),
        part(0.0, 1 - of_long, 2 * cap, 2 * cap),
    )
    return run_model([drafted, never], typical_tokens=LONG * cap)


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
    """Return the scenario on all GPUs."""
    return scenario(inputs, trace, system, inputs["gpus"] // inputs["tp"])


def _run_whole(lab: Lab, inputs: Inputs, trace: str, system: System) -> Measures:
    return lab.run(whole(inputs, trace, system))


@row
def step_against(lab: Lab, inputs: Inputs, baselines: slice) -> list[float]:
    """Predict Fig. 11: the steps of some baselines, the best first, over SpecActor's, a mean over the traces."""
    return [
        mean(
            ratio for trace in TRACES for ratio in sorted(_baselines(lab, inputs, trace))[baselines]
        )
    ]


def _baselines(lab: Lab, inputs: Inputs, trace: str) -> list[float]:
    own_s = _run(lab, inputs, trace, specactor(inputs))["step_s"]
    systems = (VERL, RLHFUSE, TWICE, vanilla(inputs), ngrams(inputs))
    return [_run(lab, inputs, trace, system)["step_s"] / own_s for system in systems]


@row
def rollout_against(lab: Lab, inputs: Inputs, *names: str) -> list[float]:
    """Predict §5.2: a baseline's rollout over SpecActor's, a mean over the traces (and over baselines)."""
    systems = {"verl": VERL, "twice": TWICE, "vanilla": vanilla(inputs), "ngram": ngrams(inputs)}

    def rollout_s(trace: str, system: System) -> float:
        return float(_run(lab, inputs, trace, system)["rollout_s"])

    return [
        mean(
            rollout_s(t, systems[name]) / rollout_s(t, specactor(inputs))
            for t in TRACES
            for name in names
        )
    ]


def _late_rollout_s(lab: Lab, inputs: Inputs, system: System) -> float:
    return float(_run(lab, late(inputs), "dapo", system)["rollout_s"])


def vanilla_gain(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict §5.4: by how much a draft model shortens verl's rollout."""
    return [1 - _late_rollout_s(lab, inputs, vanilla(inputs)) / _late_rollout_s(lab, inputs, VERL)]


def apart(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict §5.4: by how much a draft model on GPUs of its own, still in turns with verification, lengthens verl's rollout.
    There are fewer pairs of verifier and drafter than verl has workers, so that each has more of the requests; passes last as
    long as in `vanilla`, whose drafter is computed by one GPU as well."""
    pair = inputs["tp"] + inputs["draft_gpus"]
    requests = inputs["dapo_samples"] / (inputs["gpus"] // pair)
    few = scenario(late(inputs), "dapo", vanilla(inputs), GPUS // pair, requests)
    return [float(lab.run(few)["rollout_s"]) / _late_rollout_s(lab, inputs, VERL) - 1]


@row
def gain_of(lab: Lab, inputs: Inputs, part: str) -> list[float]:
    """Predict §5.4: the gain of a part. Decoupled drafting is compared with vanilla speculation."""
    plan = {"reconfigure": False, "best_of_n": False}
    ladder = [
        vanilla(inputs),
        specactor(inputs, **plan),
        specactor(inputs, best_of_n=False),
        specactor(inputs),
    ]
    i = PARTS.index(part)
    return [_late_rollout_s(lab, inputs, ladder[i]) / _late_rollout_s(lab, inputs, ladder[i + 1])]


@row
def over_whole(lab: Lab, inputs: Inputs, system: System, subtract: int = 0) -> list[float]:
    """Predict §2.2 (Fig. 2b): verl's step over the step of a system, in full size."""
    return [
        _run_whole(lab, inputs, "dapo", VERL)["step_s"]
        / _run_whole(lab, inputs, "dapo", system)["step_s"]
        - subtract
    ]


def wasted(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict §2.2, Fig. 2a: share of the workers' time in verl's rollout spent waiting for the slowest."""
    return [float(_run_whole(lab, inputs, "dapo", VERL)["idle_share"])]


def rollout_share(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict §2.2: rollout's share of verl's step, a mean over the traces."""
    runs = [_run_whole(lab, inputs, trace, VERL) for trace in TRACES]
    return [mean(map(_rollout_part, runs))]


def _rollout_part(run: Measures) -> float:
    return float(run["rollout_s"] / run["step_s"])


def half_a_step(lab: Lab, inputs: Inputs) -> Measures:
    """Return one step of verl's DAPO run on half of the workers: still some thousand responses, of which a few reach the cap,
    so that the slowest worker is as slow as in full size."""
    run = scenario(inputs, "dapo", VERL, inputs["gpus"] // inputs["tp"] // 2)
    return lab.run(run.model_copy(update={"steps": 1, "warmup_steps": 0}))


def large_batch_share(result: Result, warmup_steps: int) -> Measures:
    """Measure the share of a rollout in which a worker has `LARGE_BATCH` requests or more, a mean over workers."""
    segments = result.segments.select(
        ["worker", "policy_version", "started_s", "ended_s"]
    ).to_pandas()
    shares = []
    for _, rollout in segments[segments["policy_version"] >= warmup_steps].groupby(
        "policy_version"
    ):
        start_s = rollout["started_s"].min()
        length_s = rollout["ended_s"].max() - start_s
        for _, own in rollout.groupby("worker", observed=True):
            ends_s = own["ended_s"].sort_values().to_numpy()
            shares.append(
                (ends_s[-LARGE_BATCH] - start_s) / length_s if len(ends_s) >= LARGE_BATCH else 0.0
            )
    return {"large_batch_share": mean(map(float, shares))}


def decode_latency(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict §5.1: milliseconds a token of one response."""
    profile = passes(inputs, model_shape(inputs["model"]), gpu(inputs["gpu"]), inputs["tp"])
    return [MILLI * profile.decode_s(1, round(inputs["mean_tokens"]))]


ROWS: dict[str, Predict] = {
    "spec-e2e-best": step_against(slice(1)),
    "spec-e2e-others": step_against(slice(1, None)),
    "spec-rollout-verl": rollout_against("verl"),
    "spec-rollout-2x": rollout_against("twice"),
    "spec-rollout-vanilla": rollout_against("vanilla", "ngram"),
    "spec-abl-vanilla": vanilla_gain,
    "spec-abl-disagg": apart,
    "spec-abl-decoupled": gain_of("decoupled"),
    "spec-abl-reconf": gain_of("reconfigured"),
    "spec-abl-bon": gain_of("best of N"),
    "spec-2x": over_whole(TWICE),
    "spec-rlhfuse": over_whole(RLHFUSE, subtract=1),  # a gain
    "spec-idle": wasted,
    "spec-rollout-share": rollout_share,
    "spec-decode-latency": decode_latency,
}

# What descriptors are compared with: one step of verl's DAPO run, on half of the workers, and a pass.
BASELINE: dict[str, Predict] = {
    "rollout_share": lambda lab, inputs: [_rollout_part(half_a_step(lab, inputs))],
    "other_phases": lambda lab, inputs: [1 - _rollout_part(half_a_step(lab, inputs))],
    "idle": lambda lab, inputs: [half_a_step(lab, inputs)["idle_share"]],
    "large_batch": lambda lab, inputs: [half_a_step(lab, inputs)["large_batch_share"]],
    "decode_latency_ms": decode_latency,
}
MORE = large_batch_share  # measured of a baseline's run
