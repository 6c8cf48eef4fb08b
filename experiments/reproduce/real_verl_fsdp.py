"""A whole log of verl of June 2025: Qwen2-7B with FSDP and vLLM on eight GPUs, responses of 200 to 670 tokens.

Invariant: two windows of one run, of short and of long responses; the lengths of each step are inputs. Predictions are means
over steps evenly spaced in a window.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.reproduce.lab import Lab, Predict, row, run_of
from experiments.reproduce.ledger import Inputs, named
from experiments.reproduce.real_lengths import phase_seconds, trace_of
from simrl.scenario.model import Scenario
from simrl.trace.trace import Trace

LOG = "real_runs/verl_logs/qwen2-7b_fsdp/output.log"
MOST_STEPS = 6  # simulated in a window
QUANTITIES = {
    f"verl-qwen2-7b-{name}": ("gen_s", "old_log_prob_s", "update_actor_s", "step_s")
    for name in ("short", "long")
}
_LINKS = "its log-probs say whether the GPUs have NVLink; update and step, which hang on the links too, are scored"
EVIDENCE = {row: {"old_log_prob_s": _LINKS} for row in QUANTITIES}


def window(name: str, steps: pd.DataFrame) -> pd.Series:
    """Return which steps are in a window, by their mean response."""
    mean_tokens = steps["response_length/mean"]
    return mean_tokens < 300 if name == "short" else mean_tokens > 500


def scenario(inputs: Inputs, trace: Trace) -> Scenario:
    """Return the run: everything that its launch command says is put together here."""
    return run_of(
        inputs,
        {
            "name": "verl_colocated",
            "minibatches": inputs["minibatches"],
            "dispatch": "even_split",
            "log_probs": 1,
        },
        model=inputs["model"],
        gpus=inputs["gpus"],
        tp=inputs["tp"],
        lengths=trace,
        steps=len(trace.step_slices),
        warmup_steps=0,
        training={
            "microbatching": "fixed",
            "sequences_per_microbatch": inputs["microbatch_sequences"],
            "remove_padding": True,
            "offload": inputs["offload_states"],
            "gather_overlap": inputs["gather_overlap"],
            **named(inputs, "recompute", "load_overhead_s", "reward_s"),
        },
        engine=named(inputs, "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager"),
        framework=inputs["framework"],
    )


@row
def phases(lab: Lab, inputs: Inputs, name: str) -> list[float]:
    """Predict the seconds of the phases of a window's steps, and of the steps, without evaluations and checkpoints."""
    log = Path(inputs["data"]) / LOG
    trace, _ = trace_of(
        log,
        name,
        lambda steps: window(name, steps),
        MOST_STEPS,
        inputs["group"],
        inputs["cap_tokens"],
    )
    return list(phase_seconds(lab.run(scenario(inputs, trace), trace)))


ROWS: dict[str, Predict] = {f"verl-qwen2-7b-{name}": phases(name) for name in ("short", "long")}
