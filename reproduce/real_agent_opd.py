"""Agent_On_Policy_Distillation: verl colocated on four GPUs, a student with a code tool, log-probs of a 32B teacher.

Invariant: a run is its logged lengths, turns and tool times under its own configuration. Of `do7bl4gg`, whose first 20 steps
may inform constants of the framework, only later steps are predicted.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd

from reproduce.lab import Lab, Predict, made, row, run_of
from reproduce.ledger import Inputs, named
from reproduce.real_lengths import of_run, trace_of, whole_lengths, with_turns
from simrl.profile.hardware import gpu, model_shape
from simrl.runtime.training_costs import TrainingCosts
from simrl.scenario.model import Scenario
from simrl.scenario.training import TrainingConfig
from simrl.trace.trace import Trace

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
        training=training(inputs, inputs["tokens_per_microbatch"]),
        engine=named(inputs, "max_num_batched_tokens", "gpu_memory_utilization"),
    )


def training(inputs: Inputs, tokens_of_a_gpu: int) -> dict[str, Any]:
    """Return the settings of the trainer. verl's budget of tokens is a GPU's: GPUs that share a sequence add theirs up."""
    sequence_parallel = inputs["sequence_parallel"]
    return {
        **named(inputs, "recompute", "switch_s"),
        "sequence_parallel": sequence_parallel,
        "tokens_per_microbatch": tokens_of_a_gpu * sequence_parallel,
        "reward_s": 0.0,  # computed in the agent loop, after the last tool
    }


def reference_s(inputs: Inputs, trace: Trace) -> float:
    """Return the mean seconds of the teacher's log-probs of a step."""
    config = made(TrainingConfig, training(inputs, inputs["ref_tokens_per_microbatch"]))
    costs = TrainingCosts(
        model_shape(inputs["teacher"]), gpu(inputs["gpu"]), inputs["gpus"], config, 1, 1, switch=False
    )
    return mean(costs.pass_s(lengths, 1) for lengths in whole_lengths(trace))


@row
def steps_of(lab: Lab, inputs: Inputs, run: str) -> list[float]:
    """Predict the mean seconds of the phases of a run's steps, and of the steps."""
    inputs = of_run(inputs, run)
    log = Path(inputs["data"]) / LOGS[run]
    trace, steps = trace_of(
        log, run, lambda steps: window(run, steps), MOST_STEPS, inputs["group"], inputs["cap_tokens"]
    )
    trace = with_turns(trace, steps, inputs["most_pauses"], inputs["observation_tokens"])
    found = lab.run(scenario(inputs, trace), trace)
    phase_s, ref_s = found["phase_s"], reference_s(inputs, trace)
    generation_s = found["step_s"] - phase_s["log_prob"] - phase_s["train"] - phase_s.get("transfer", 0.0)
    return [generation_s, phase_s["log_prob"], ref_s, phase_s["train"], found["step_s"] + ref_s]


ROWS: dict[str, Predict] = {f"opd-{run}": steps_of(run) for run in LOGS}
