"""AReaL (arXiv 2505.24298): its schedules on its inputs. Its tables and figures are of 32 to 512 H800.

GPUs, prompts and what runs at once are divided by `SCALE` together: each worker and each trainer rank has the same to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simrl.published.lab import Lab, Measures, run_of
from simrl.published.ledger import Inputs
from simrl.scenario import Scenario
from simrl.synthesis import mean_under

SMALL, LARGE = "deepseek-r1-distill-qwen-1.5b", "deepseek-r1-distill-qwen-7b"
SCALE = 8
STEPS, WARMUP_STEPS = 6, 2
UNBOUNDED = 1000  # updates: more than a run has
UPDATES = 250  # of Table 1
KILO = 1e-3


def scenario(inputs: Inputs, model: str, gpus: int, system: dict[str, Any], cap_tokens: int) -> Scenario:
    """One of the paper's runs, a few updates of it."""
    mean_tokens, sigma = inputs["mean_tokens"], inputs["sigma"]
    mfu = inputs["verl_mfu"] if system["name"] == "verl_colocated" else inputs["mfu"]
    return run_of(
        inputs,
        system,
        model=model,
        gpus=gpus // SCALE,
        tp=inputs["tp"],
        lengths={
            "prompts_per_step": inputs["prompts"] // SCALE,
            "cap_tokens": cap_tokens,
            "mean_tokens": mean_under(cap_tokens, mean_tokens, sigma, inputs["cap_tokens"]),
        },
        steps=STEPS,
        warmup_steps=WARMUP_STEPS,
        training={
            "mfu": mfu,
            "log_prob_mfu": mfu,
            "tokens_per_microbatch": inputs["tokens_per_microbatch"],
            "publish_s": inputs["publish_s"],
            "reward_s": inputs["reward_s"],
        },
    )


def areal(inputs: Inputs, eta: int, interruptible: bool = True) -> dict[str, Any]:
    """Its system at a staleness bound."""
    return {
        "name": "areal",
        "eta": eta,
        "interruptible": interruptible,
        "max_concurrent": inputs["max_concurrent"] // SCALE,
        "rollout_share": inputs["rollout_share"],
        "minibatches": inputs["minibatches"],
        "log_probs": inputs["log_probs"],
    }


def verl(inputs: Inputs) -> dict[str, Any]:
    """The synchronous baseline, in as many mini-batches."""
    return {"name": "verl_colocated", "minibatches": inputs["minibatches"], "log_probs": inputs["verl_log_probs"]}


def throughput_by_eta(lab: Lab, inputs: Inputs) -> list[float]:
    """Fig. 5c: thousand response tokens a second that are trained, 1.5B on 16 nodes."""
    etas = (0, 1, 2, 4, 8, 16, UNBOUNDED)
    cap = inputs["cap_tokens"]
    return [trained(lab.run(scenario(inputs, SMALL, 128, areal(inputs, eta), cap))) for eta in etas]


def throughput_by_gpus(model: str, gpus: tuple[int, ...], asynchronous: bool) -> Callable[[Lab, Inputs], list[float]]:
    """Fig. 4 at a context of 16K, of which 1K is the prompt's."""

    def predict(lab: Lab, inputs: Inputs) -> list[float]:
        system = areal(inputs, inputs["eta_fig4"]) if asynchronous else verl(inputs)
        cap = inputs["cap_tokens_fig4"]
        return [trained(lab.run(scenario(inputs, model, count, system, cap))) for count in gpus]

    return predict


def hours(model: str, nodes: int) -> Callable[[Lab, Inputs], list[float]]:
    """Table 1: hours under AReaL, verl and the synchronous AReaL, which shares its GPUs between the phases (Fig. 1)."""

    def predict(lab: Lab, inputs: Inputs) -> list[float]:
        cap = inputs["cap_tokens"]
        synchronous = {**verl(inputs), "name": "distflow"}  # the same phases, without verl's controller, at AReaL's MFU
        systems = (areal(inputs, inputs["eta"]), verl(inputs), synchronous)
        steps_s = [lab.run(scenario(inputs, model, 8 * nodes, system, cap))["step_s"] for system in systems]
        return [UPDATES * step_s / 3600 for step_s in steps_s]

    return predict


def interruption(model: str) -> Callable[[Lab, Inputs], list[float]]:
    """Fig. 6: thousand tokens a second that are generated on 4 nodes, with and without interruption."""

    def predict(lab: Lab, inputs: Inputs) -> list[float]:
        systems = [areal(inputs, inputs["eta"], interruptible) for interruptible in (True, False)]
        runs = [lab.run(scenario(inputs, model, 32, system, inputs["cap_tokens"])) for system in systems]
        return [SCALE * KILO * run["generated_tokens_per_s"] for run in runs]

    return predict


def trained(run: Measures) -> float:
    """Thousand response tokens a second, of all GPUs."""
    return SCALE * KILO * float(run["response_tokens_per_s"])


ROWS: dict[str, Callable[[Lab, Inputs], list[float]]] = {
    "areal-eta": throughput_by_eta,
    "areal-fig4-1p5b-16k-areal": throughput_by_gpus(SMALL, (32, 64, 128, 256), True),
    "areal-fig4-1p5b-16k-verl": throughput_by_gpus(SMALL, (32, 64, 128, 256), False),
    "areal-fig4-7b-16k-areal": throughput_by_gpus(LARGE, (64, 128, 256, 512), True),
    "areal-fig4-7b-16k-verl": throughput_by_gpus(LARGE, (64, 128, 256, 512), False),
    "areal-hours-1p5b": hours(SMALL, 16),
    "areal-hours-7b": hours(LARGE, 24),
    "areal-interrupt-1p5b": interruption(SMALL),
    # areal-interrupt-7b: at this scale its one training GPU cannot hold the states of 7B
}
