"""Agent_On_Policy_Distillation: verl colocated on four GPUs, a student with a code tool, log-probs of a 32B teacher.

Invariant: a run is its logged lengths, turns and tool times under its own configuration. Of `do7bl4gg`, whose first 20 steps
may inform constants of the framework, only later steps are predicted.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd

from experiments.reproduce.lab import Lab, Predict, row, run_of
from experiments.reproduce.ledger import Inputs, named
from experiments.reproduce.real_lengths import (
    of_run,
    phase_seconds,
    trace_of,
    whole_lengths,
    with_turns,
)
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.scenario.model import Scenario
from simrl.trace.trace import Trace
from simrl.training.costs import TrainingCosts

LOGS = {
    "i80f2v90": "real_runs/agent_opd/i80f2v90/output.log",
    "yeu8r64c": "real_runs/agent_opd/yeu8r64c/output.log",
    "f6sves9c": "real_runs/agent_opd/f6sves9c/output.log",
    "do7bl4gg": "verl_run/do7bl4gg/output.log",
}
ONE_TOKEN, FIRST_SCORED = "i80f2v90", {"do7bl4gg": 21}
MOST_STEPS = 12  # simulated, evenly spaced among those of the window
PHASES = ("gen_s", "old_log_prob_s", "ref_s", "update_actor_s")
QUANTITIES = {f"opd-{run}": (*PHASES, "step_s") for run in LOGS}


def window(run: str, steps: pd.DataFrame) -> pd.Series:
    """Return which steps of a run are predicted, and scored: of one, those whose responses have one token each."""
    if run == ONE_TOKEN:
        return steps["response_length/max"] == 1
    return steps["step"] >= FIRST_SCORED.get(run, 1)


def scenario(inputs: Inputs, trace: Trace) -> Scenario:
    """Return a run: everything that its configuration says is put together here."""
    return run_of(
        inputs,
        {"name": "verl_colocated", "minibatches": inputs["minibatches"], "log_probs": 1},
        model=inputs["student"],
        gpus=inputs["gpus"],
        tp=inputs["tp"],
        lengths=trace,
        steps=len(trace.step_slices),
        warmup_steps=0,
        training=training(inputs),
        engine=named(inputs, "max_num_batched_tokens", "gpu_memory_utilization"),
        framework=inputs["framework"],
    )


def training(inputs: Inputs) -> dict[str, Any]:
    """Return the settings of the trainer. verl's budget of tokens is a GPU's: GPUs that share a sequence add theirs up."""
    sequence_parallel = inputs["sequence_parallel"]
    return {
        **named(inputs, "recompute", "load_overhead_s", "switch_s", "reward_s"),
        "sequence_parallel": sequence_parallel,
        "tokens_per_microbatch": inputs["tokens_per_microbatch"] * sequence_parallel,
    }


def reference_s(inputs: Inputs, trace: Trace) -> float:
    """Return the mean seconds of the teacher's log-probs of a step."""
    budget = {
        "tokens_per_microbatch": inputs["ref_tokens_per_microbatch"] * inputs["sequence_parallel"]
    }
    config = scenario(inputs, trace).training.model_copy(update={"extra_log_probs": 1, **budget})
    kind, gpus, teacher = gpu(inputs["gpu"]), inputs["gpus"], model_shape(inputs["teacher"])
    costs = TrainingCosts(
        model_shape(inputs["student"]), kind, gpus, config, 1, 2, switch=False, reference=teacher
    )
    return mean(costs.reference_s(lengths) for lengths in whole_lengths(trace))


@row
def steps_of(lab: Lab, inputs: Inputs, run: str) -> list[float]:
    """Predict the mean seconds of the phases of a run's steps, and of the steps."""
    inputs = of_run(inputs, run)
    log = Path(inputs["data"]) / LOGS[run]
    trace, steps = trace_of(
        log,
        run,
        lambda steps: window(run, steps),
        MOST_STEPS,
        inputs["group"],
        inputs["cap_tokens"],
    )
    trace = with_turns(trace, steps, inputs["most_pauses"], inputs["observation_tokens"])
    generation_s, log_probs_s, train_s, step_s = phase_seconds(
        lab.run(scenario(inputs, trace), trace)
    )
    ref_s = reference_s(inputs, trace)
    return [generation_s, log_probs_s, ref_s, train_s, step_s + ref_s]


ROWS: dict[str, Predict] = {f"opd-{run}": steps_of(run) for run in LOGS}
