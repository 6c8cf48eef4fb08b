"""AReaL (arXiv 2505.24298): its schedules on its inputs. Its tables and figures are of 32 to 512 H800.

GPUs, prompts and concurrent requests are divided by `SCALE` together: each worker and each trainer rank keeps its load.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import numpy as np

from experiments.reproduce.lab import Lab, Measures, Predict, row, run_of
from experiments.reproduce.ledger import Inputs, named
from experiments.reproduce.length_models import mean_under
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.scenario.model import Scenario
from simrl.trace.synthesis import synthesise
from simrl.training.costs import TrainingCosts

SMALL, LARGE = "deepseek-r1-distill-qwen-1.5b", "deepseek-r1-distill-qwen-7b"
SCALE = 8
# Updates, and the first of them that are left out. The first batch of a run that trains what is finished first has short
# responses, whose long siblings follow in the next three or four.
SYNCHRONOUS_STEPS, ASYNCHRONOUS_STEPS = (5, 2), (9, 4)
BATCHES = (
    ASYNCHRONOUS_STEPS[0] + 8
)  # of the trace: what may be submitted under a bound of 8; beyond, they come again
UNBOUNDED = 1000  # updates: more than a run has
UPDATES = 250  # of Table 1
KILO = 1e-3


def scenario(
    inputs: Inputs,
    model: str,
    gpus: int,
    system: dict[str, Any],
    cap_tokens: int,
    scale: int = SCALE,
    updates: tuple[int, int] | None = None,
) -> Scenario:
    """Return one of the paper's runs, a few updates of it."""
    mean_tokens, sigma = inputs["mean_tokens"], inputs["sigma"]
    baseline = system["name"] == "verl_colocated"
    mfu = inputs["verl_mfu"] if baseline else inputs["mfu"]
    memory = inputs["verl_gpu_memory_utilization"] if baseline else inputs["gpu_memory_utilization"]
    steps, warmup_steps = updates or (
        ASYNCHRONOUS_STEPS if system["name"] == "areal" else SYNCHRONOUS_STEPS
    )
    return run_of(
        inputs,
        system,
        model=model,
        gpus=gpus // scale,
        tp=inputs["tp"],
        lengths={
            "prompts_per_step": inputs["prompts"] // scale,
            "cap_tokens": cap_tokens,
            "mean_tokens": mean_under(cap_tokens, mean_tokens, sigma, inputs["cap_tokens"]),
            "steps": BATCHES,
        },
        steps=steps,
        warmup_steps=warmup_steps,
        engine={
            "gpu_memory_utilization": memory,
            "enforce_eager": baseline and inputs["enforce_eager"],
        },
        training={
            "mfu": mfu,
            "log_prob_mfu": mfu,
            "sequence_parallel": inputs["verl_sequence_parallel"] if baseline else 1,
            **named(inputs, "tokens_per_microbatch", "publish_s", "reward_s"),
        },
    )


def areal(
    inputs: Inputs, eta: int, interruptible: bool = True, scale: int = SCALE
) -> dict[str, Any]:
    """Return AReaL's system at a staleness bound."""
    return {
        "name": "areal",
        "eta": eta,
        "interruptible": interruptible,
        "max_concurrent": inputs["max_concurrent"] // scale,
        **named(inputs, "rollout_share", "minibatches", "log_probs"),
    }


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
    return [trained(lab.run(scenario(inputs, SMALL, 128, areal(inputs, eta), cap))) for eta in etas]


@row
def throughput_by_gpus(
    lab: Lab, inputs: Inputs, model: str, gpus: tuple[int, ...], asynchronous: bool
) -> list[float]:
    """Predict Fig. 4 at a context of 16K, of which 1K is the prompt's."""
    system = areal(inputs, inputs["eta_fig4"]) if asynchronous else verl(inputs)
    cap = inputs["cap_tokens_fig4"]
    return [trained(lab.run(scenario(inputs, model, count, system, cap))) for count in gpus]


@row
def hours(lab: Lab, inputs: Inputs, model: str, nodes: int) -> list[float]:
    """Predict Table 1: hours under AReaL, verl and the synchronous AReaL, which shares its GPUs between the phases (Fig. 1)."""
    cap = inputs["cap_tokens"]
    # The phases of verl, without its controller, at AReaL's MFU.
    synchronous = {
        "name": "areal_sync",
        "minibatches": inputs["minibatches"],
        "log_probs": inputs["verl_log_probs"],
    }
    systems = (areal(inputs, inputs["eta"]), verl(inputs), synchronous)
    steps_s = [
        lab.run(scenario(inputs, model, 8 * nodes, system, cap))["step_s"] for system in systems
    ]
    return [UPDATES * step_s / 3600 for step_s in steps_s]


@row
def interruption(lab: Lab, inputs: Inputs, model: str, scale: int, updates: int) -> list[float]:
    """Predict Fig. 6: thousand generated tokens a second on 4 nodes after the first update, with and without interruption."""
    systems = [
        areal(inputs, inputs["eta_fig6"], interruptible, scale) for interruptible in (True, False)
    ]
    cap = inputs["cap_tokens"]
    runs = [
        lab.run(scenario(inputs, model, 32, system, cap, scale, (updates, 1))) for system in systems
    ]
    return [scale * KILO * run["generated_tokens_per_s"] for run in runs]


def synchronous_rate(lab: Lab, inputs: Inputs) -> list[float]:
    """Return Fig. 5c's throughput at η 0, of one update after one."""
    return [
        trained(
            lab.run(
                scenario(inputs, SMALL, 128, areal(inputs, 0), inputs["cap_tokens"], updates=(2, 1))
            )
        )
    ]


def verl_rate(lab: Lab, inputs: Inputs, gpus: int) -> float:
    """Return Fig. 4's throughput of verl, 1.5B, of one update."""
    return trained(
        lab.run(
            scenario(inputs, SMALL, gpus, verl(inputs), inputs["cap_tokens_fig4"], updates=(1, 0))
        )
    )


def dynamic_batches(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict Fig. 7: gain of micro-batches by tokens over micro-batches of equal counts, a mean over model sizes."""
    return [mean(dynamic_gain(inputs, *of) for of in ((SMALL, 16, "1p5b"), (LARGE, 24, "7b")))]


def dynamic_gain(inputs: Inputs, model: str, nodes: int, size: str) -> float:
    """Return the gain for one model. Both deal a batch to the data-parallel ranks by tokens; a rank's pipeline stages
    alternate one forward and one backward pass of its micro-batches."""
    stages = inputs[f"pipeline_stages_{size}"]
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


def trained(run: Measures) -> float:
    """Return thousand trained response tokens a second, of all GPUs."""
    return SCALE * KILO * float(run["response_tokens_per_s"])


ROWS: dict[str, Predict] = {
    "areal-eta": throughput_by_eta,
    "areal-fig4-1p5b-16k-areal": throughput_by_gpus(SMALL, (32, 64, 128, 256), True),
    "areal-fig4-1p5b-16k-verl": throughput_by_gpus(SMALL, (32, 64, 128, 256), False),
    "areal-fig4-7b-16k-areal": throughput_by_gpus(LARGE, (64, 128, 256, 512), True),
    "areal-fig4-7b-16k-verl": throughput_by_gpus(LARGE, (64, 128, 256, 512), False),
    "areal-hours-1p5b": hours(SMALL, 16),
    "areal-hours-7b": hours(LARGE, 24),
    "areal-interrupt-1p5b": interruption(SMALL, SCALE, 3),
    "areal-interrupt-7b": interruption(
        LARGE, SCALE // 2, 2
    ),  # one training GPU could not hold the states of 7B
    "areal-dynbatch": dynamic_batches,
}

# What descriptors are compared with: an update of synchronous systems.
BASELINE: dict[str, Predict] = {
    "synchronous_rate": synchronous_rate,
    "verl_scaling": lambda lab, inputs: [verl_rate(lab, inputs, 256) / verl_rate(lab, inputs, 32)],
    "verl_rate": lambda lab, inputs: [verl_rate(lab, inputs, 256)],
}
