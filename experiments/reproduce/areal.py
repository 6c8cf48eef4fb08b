"""AReaL (arXiv 2505.24298): its schedules on its inputs. Its tables and figures are of 32 to 512 H800.

GPUs, prompts and concurrent prompts are divided by `SCALES` together: each worker and each trainer rank keeps its load.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import numpy as np

from experiments.reproduce.lab import Lab, Predict, row, run_of
from experiments.reproduce.ledger import Inputs, named
from experiments.reproduce.length_models import mean_under
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.scenario.model import Scenario
from simrl.trace.synthesis import synthesise
from simrl.training.costs import TrainingCosts

SMALL, LARGE = "deepseek-r1-distill-qwen-1.5b", "deepseek-r1-distill-qwen-7b"
CODE, LARGEST = "deepseek-r1-distill-qwen-14b", "deepseek-r1-distill-qwen-32b"  # both on code
SIZES = {SMALL: "1p5b", LARGE: "7b", CODE: "14b", LARGEST: "32b"}  # in names of inputs
# A trainer's states are cut into fewer parts on fewer GPUs: 7B needs four at the least. 32B has 36 engines of eight GPUs.
SCALES = {SMALL: 8, LARGE: 4, CODE: 8, LARGEST: 4}
WITHOUT_SGLANG = 512  # GPUs, from which SGLang raised errors in the baseline (A.4)
# Updates, and the first of them that are left out. The first batches of a run that trains what is finished first have short
# responses, whose long siblings follow: with four batches at once, tokens an update are level from the eighth update on. All
# systems train the same ten batches.
STEPS = (18, 8)
BATCHES = STEPS[0] + 8  # of the trace: what may be submitted under a bound of 8; then again
UNBOUNDED = 1000  # updates: more than a run has
KILO = 1e-3


def scenario(
    inputs: Inputs,
    model: str,
    gpus: int,
    system: dict[str, Any],
    cap_tokens: int,
    scale: int | None = None,
    updates: tuple[int, int] | None = None,
) -> Scenario:
    """Return one of the paper's runs, a few updates of it, on a `scale`-th of the GPUs (None: as `SCALES` has it)."""
    scale = scale or SCALES[model]
    if "max_concurrent" in system:
        system = {**system, "max_concurrent": system["max_concurrent"] // scale}
    mean_tokens, sigma = inputs["mean_tokens"], inputs["sigma"]
    baseline = system["name"] == "verl_colocated"
    mfu = inputs["verl_mfu"] if baseline else inputs["mfu"]
    if model in (CODE, LARGEST):
        mean_tokens *= inputs["code_over_math"]
    steps, warmup_steps = updates or STEPS
    return run_of(
        inputs,
        system,
        model=model,
        gpus=gpus // scale,
        tp=inputs[f"verl_tp_{SIZES[model]}"] if baseline else inputs[f"tp_{SIZES[model]}"],
        lengths={
            "prompts_per_step": inputs["prompts"] // scale,
            "cap_tokens": cap_tokens,
            "mean_tokens": mean_under(cap_tokens, mean_tokens, sigma, inputs["cap_tokens"]),
            "steps": BATCHES,
        },
        steps=steps,
        warmup_steps=warmup_steps,
        engine=engine_of(inputs, model, gpus) if baseline else areal_engine(inputs),
        training={
            "mfu": mfu,
            "log_prob_mfu": mfu,
            "sequence_parallel": inputs["verl_sequence_parallel"] if baseline else 1,
            **named(inputs, "tokens_per_microbatch", "publish_s", "reward_s"),
        },
    )


def areal_engine(inputs: Inputs) -> dict[str, Any]:
    """Return the settings of SGLang in AReaL."""
    return {
        "max_num_batched_tokens": inputs["max_prefill_tokens"],
        **named(
            inputs, "gpu_memory_utilization", "reserve_bytes", "prefix_caching", "schedule_policy"
        ),
    }


def engine_of(inputs: Inputs, model: str, gpus: int) -> dict[str, Any]:
    """Return the settings of the baseline's engine: SGLang, and vLLM where SGLang raised errors (A.4)."""
    memory = {"gpu_memory_utilization": inputs["verl_gpu_memory_utilization"]}
    if model == LARGEST or gpus >= WITHOUT_SGLANG:
        eager = inputs["verl_substitute_eager"]
        return {**memory, "preset": inputs["verl_substitute"], "enforce_eager": eager}
    return {**memory, **named(inputs, "reserve_bytes", "enforce_eager")}


def areal(
    inputs: Inputs,
    eta: int,
    interruptible: bool = True,
    most: int | None = None,
) -> dict[str, Any]:
    """Return AReaL's system at a staleness bound. η 0 is the synchronous variant, on divided GPUs: Sync.AReaL of Table 4 and
    Table 2's oracle of maximum staleness 0 have the same four scores. `most` prompts run at once, where it is not
    the number of the training runs."""
    return {
        "name": "areal",
        "eta": eta,
        "interruptible": interruptible,
        "max_concurrent": most or inputs["max_concurrent"],
        "log_probs": inputs["log_probs"] if eta else inputs["sync_log_probs"],
        **named(inputs, "rollout_share", "minibatches"),
    }


def fig4(inputs: Inputs) -> dict[str, Any]:
    """Return AReaL's system in the benchmark of Fig. 4."""
    return areal(inputs, inputs["eta_fig4"], most=inputs["max_concurrent_fig4"])


def verl(inputs: Inputs) -> dict[str, Any]:
    """Return the synchronous baseline, with AReaL's number of mini-batches."""
    return {
        "name": "verl_colocated",
        "minibatches": inputs["minibatches"],
        "log_probs": inputs["verl_log_probs"],
        "dispatch": inputs["verl_dispatch"],
    }


def throughput_by_eta(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict Fig. 5c: thousand trained response tokens a second, 1.5B on 16 nodes."""
    etas = (0, 1, 2, 4, 8, 16, UNBOUNDED)
    cap = inputs["cap_tokens"]
    return [rate(lab, inputs, SMALL, 128, areal(inputs, eta), cap) for eta in etas]


@row
def throughput_by_gpus(
    lab: Lab, inputs: Inputs, model: str, gpus: tuple[int, ...], asynchronous: bool
) -> list[float]:
    """Predict Fig. 4 at a context of 16K, of which 1K is the prompt's."""
    system = fig4(inputs) if asynchronous else verl(inputs)
    cap = inputs["cap_tokens_fig4"]
    return [rate(lab, inputs, model, count, system, cap) for count in gpus]


@row
def hours(lab: Lab, inputs: Inputs, model: str, nodes: int, updates: int = 250) -> list[float]:
    """Predict Table 1: hours under AReaL, verl and the synchronous AReaL."""
    eta = inputs["eta_code"] if model in (CODE, LARGEST) else inputs["eta"]
    systems = (areal(inputs, eta), verl(inputs), areal(inputs, 0))
    cap = inputs["cap_tokens"]
    runs = [lab.run(scenario(inputs, model, 8 * nodes, system, cap)) for system in systems]
    return [updates * run["step_s"] / 3600 for run in runs]


@row
def interruption(lab: Lab, inputs: Inputs, model: str, scale: int, updates: int) -> list[float]:
    """Predict Fig. 6: thousand generated tokens a second on 4 nodes after the first update, with and without interruption."""
    systems = [
        areal(inputs, inputs["eta_fig6"], interruptible, inputs["max_concurrent_fig6"])
        for interruptible in (True, False)
    ]
    cap = inputs["cap_tokens"]
    runs = [
        lab.run(scenario(inputs, model, 32, system, cap, scale, (updates, 1))) for system in systems
    ]
    return [scale * KILO * run["generated_tokens_per_s"] for run in runs]


def synchronous_rate(lab: Lab, inputs: Inputs) -> list[float]:
    """Return Fig. 5c's throughput at η 0, of one update after one."""
    return [rate(lab, inputs, SMALL, 128, areal(inputs, 0), inputs["cap_tokens"], (2, 1))]


def verl_rate(lab: Lab, inputs: Inputs, gpus: int) -> float:
    """Return Fig. 4's throughput of verl, 1.5B, of one update."""
    return rate(lab, inputs, SMALL, gpus, verl(inputs), inputs["cap_tokens_fig4"], (1, 0))


def dynamic_batches(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict Fig. 7: gain of micro-batches by tokens over micro-batches of equal counts, a mean over model sizes."""
    return [mean(dynamic_gain(inputs, *of) for of in ((SMALL, 16), (LARGE, 24)))]


def dynamic_gain(inputs: Inputs, model: str, nodes: int) -> float:
    """Return the gain for one model. Both deal a batch to the data-parallel ranks by tokens; a rank's pipeline stages
    alternate one forward and one backward pass of its micro-batches."""
    stages = inputs[f"pipeline_stages_{SIZES[model]}"]
    ranks = round(8 * nodes * (1 - inputs["rollout_share"])) // stages
    run = scenario(inputs, model, 8 * nodes, verl(inputs), inputs["cap_tokens"], scale=1)
    assert run.workload.synthetic is not None
    trace = synthesise(run.workload.synthetic.model_copy(update={"steps": 1}), run.seed)
    lengths = (trace.column("prompt_tokens") + trace.column("response_tokens")).astype(np.int64)
    staged = {"mfu": inputs["mfu"], "pipeline_parallel": stages, "sharding": "optimizer"}
    fixed = {
        "microbatching": "fixed",
        "microbatches": inputs["fixed_microbatches"],
        "remove_padding": True,
    }
    dynamic_s, fixed_s = (
        sum(
            TrainingCosts(
                model_shape(model),
                gpu(inputs["gpu"]),
                ranks * stages,
                run.training.model_copy(update=staged | how),
                1,
                0,
                False,
            ).sweep_s(minibatch, 3)
            for minibatch in np.array_split(lengths, inputs["minibatches"])
        )
        for how in ({}, fixed)
    )
    return fixed_s / dynamic_s - 1


def rate(
    lab: Lab,
    inputs: Inputs,
    model: str,
    gpus: int,
    system: dict[str, Any],
    cap_tokens: int,
    updates: tuple[int, int] | None = None,
) -> float:
    """Return thousand trained response tokens a second, of all GPUs."""
    run = lab.run(scenario(inputs, model, gpus, system, cap_tokens, updates=updates))
    return SCALES[model] * KILO * float(run["response_tokens_per_s"])


ROWS: dict[str, Predict] = {
    "areal-eta": throughput_by_eta,
    "areal-fig4-1p5b-16k-areal": throughput_by_gpus(SMALL, (32, 64, 128, 256), True),
    "areal-fig4-1p5b-16k-verl": throughput_by_gpus(SMALL, (32, 64, 128, 256), False),
    "areal-fig4-7b-16k-areal": throughput_by_gpus(LARGE, (64, 128, 256, 512), True),
    "areal-fig4-7b-16k-verl": throughput_by_gpus(LARGE, (64, 128, 256, 512), False),
    "areal-hours-1p5b": hours(SMALL, 16),
    "areal-hours-7b": hours(LARGE, 24),
    "areal-hours-14b": hours(CODE, 32, 80),
    "areal-hours-32b": hours(LARGEST, 48, 60),
    "areal-interrupt-1p5b": interruption(SMALL, 8, 3),
    "areal-interrupt-7b": interruption(LARGE, 2, 2),
    "areal-dynbatch": dynamic_batches,
}

# What descriptors are compared with: an update of synchronous systems.
BASELINE: dict[str, Predict] = {
    "synchronous_rate": synchronous_rate,
    "verl_scaling": lambda lab, inputs: [verl_rate(lab, inputs, 256) / verl_rate(lab, inputs, 32)],
    "verl_rate": lambda lab, inputs: [verl_rate(lab, inputs, 256)],
}
