"""Shared by the families of real runs: the lengths of a logged run's steps, which are inputs of its prediction (its trace, made
from its metrics), and the names of a run's inputs and phases.

Invariant: of a log, only the columns that this module names are read; seconds of phases are not among them. (Whether a step
has them is: a step whose line was cut off is no step of the prediction either.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.reproduce.lab import Measures
from experiments.reproduce.ledger import Inputs
from simrl.errors import InputError
from simrl.trace.importers.lengths import lengths_with
from simrl.trace.importers.logs import read_metrics
from simrl.trace.importers.verl import NEEDED, trace_from_verl_metrics
from simrl.trace.trace import Trace

TIMES = ("gen", "old_log_prob", "update_actor", "step")
TURNS, TOOL_MEAN_S, TOOL_MAX_S = (
    "num_turns/mean",
    "timing_s/agent_loop/tool_calls/mean",
    "timing_s/agent_loop/tool_calls/max",
)
INPUT_COLUMNS = ("step", *NEEDED, TURNS, TOOL_MEAN_S, TOOL_MAX_S)


def of_run(inputs: Inputs, *run: str) -> Inputs:
    """Return the inputs, those of a run or its model (`gpus_8b_sync`, `model_8b`) under their plain names, too."""
    for end in run:
        found = {
            name.removesuffix(f"_{end}"): inputs[name]
            for name in list(inputs)
            if name.endswith(f"_{end}")
        }
        inputs = inputs | found
    return inputs


def phase_seconds(found: Measures) -> tuple[float, float, float, float]:
    """Return the seconds of generation (with all that is no other phase: phases of logs and pages add up to their steps), of
    log-probs, of training, and of a step."""
    step_s, log_probs_s, train_s = (
        found["step_s"],
        found["phase_s"]["log_prob"],
        found["phase_s"]["train"],
    )
    return (
        step_s - log_probs_s - train_s - found["phase_s"].get("transfer", 0.0),
        log_probs_s,
        train_s,
        step_s,
    )


def complete_steps(log: Path) -> pd.DataFrame:
    """Return the rows of a verl log that have lengths and the seconds of their phases. Raise `InputError` without any."""
    metrics = read_metrics(log, "verl")
    needed = [*NEEDED, *(f"timing_s/{name}" for name in TIMES)]
    for name in needed:
        if name not in metrics:
            raise InputError(
                f"{log}: no step has {name}; it is not the log of this run, or cut off"
            )
    steps = metrics.dropna(subset=needed)
    if steps.empty:
        raise InputError(f"{log}: no step has all of {', '.join(needed)}; it is cut off")
    return steps


@cache
def logged_lengths(log: Path) -> pd.DataFrame:
    """Return the inputs of the complete steps of a log: `INPUT_COLUMNS`."""
    steps = complete_steps(log)
    return steps[[name for name in INPUT_COLUMNS if name in steps]].assign(source=log.name)


def trace_of(
    log: Path,
    name: str,
    wanted: Callable[[pd.DataFrame], pd.Series],
    most_steps: int,
    group: int,
    cap_tokens: int,
) -> tuple[Trace, pd.DataFrame]:
    """Return the trace of up to `most_steps` of the wanted steps, evenly spaced, and their inputs."""
    steps = logged_lengths(log)
    steps = steps[wanted(steps)]
    if steps.empty:
        raise InputError(f"{log}: no step is in the window of {name}; is it the log of this run?")
    places = np.unique(
        np.linspace(0, len(steps) - 1, min(most_steps, len(steps))).round().astype(int)
    )
    steps = steps.iloc[places].reset_index(drop=True)
    return trace_from_verl_metrics(steps, group, 0, cap_tokens=cap_tokens, name=name), steps


def with_turns(
    trace: Trace, steps: pd.DataFrame, most_pauses: int, observation_tokens: int
) -> Trace:
    """Return the trace with turns: verl's log counts a tool's answers as response tokens, and gives mean turns and the mean and
    the greatest seconds of a sample's tools.

    Which samples call tools is drawn, independent of their lengths: binomial with the logged mean. The seconds have the logged
    mean and maximum.
    """
    columns: dict[str, Any] = {
        name: trace.column(name)
        for name in ("step", "epoch", "prompt_id", "sample", "prompt_tokens")
    }
    responses = trace.column("response_tokens").astype(np.int64)
    pauses, seconds = np.zeros(responses.size, np.int64), np.zeros(responses.size)
    rows = {int(row["step"]): row for row in steps.to_dict("records")}
    for step, first, end in trace.step_slices:
        row, rng = rows[step], np.random.default_rng([1, step])
        # A turn of the model, and one of the tool, for each pause; the prompt and the last turn are two more.
        mean = min(max((float(row[TURNS]) - 2) / 2, 0.0), float(most_pauses))
        drawn = rng.binomial(most_pauses, mean / most_pauses, end - first)
        pauses[first:end] = np.minimum(
            drawn, (responses[first:end] - 1) // (observation_tokens + 1)
        )
        calling = first + np.flatnonzero(pauses[first:end])
        seconds[calling] = rng.permutation(
            tool_s(row[TOOL_MEAN_S] * (end - first), row[TOOL_MAX_S], calling.size)
        )
    generated = responses - pauses * observation_tokens
    turns = [
        _parts(int(tokens), int(count) + 1) for tokens, count in zip(generated, pauses, strict=True)
    ]
    columns |= {
        "response_tokens": generated,
        "environment_s": seconds,
        "turn_tokens": turns,
        "turn_observation_tokens": [[observation_tokens] * (len(turn) - 1) for turn in turns],
    }
    return Trace.from_columns(columns, trace.metadata, origin=trace.metadata.name)


def tool_s(total_s: float, most_s: float, samples: int) -> NDArray[np.float64]:
    """Return the seconds of the tools of some samples, with this sum and maximum if they can have them."""
    if not samples:
        return np.zeros(0)
    try:
        return (
            lengths_with(round(1000 * total_s), samples, 1, max(round(1000 * most_s), 1), None)
            / 1000
        )
    except ValueError:
        return np.full(samples, total_s / samples)


def _parts(tokens: int, parts: int) -> list[int]:
    return [tokens // parts + (i < tokens % parts) for i in range(parts)]


def whole_lengths(trace: Trace) -> Sequence[NDArray[np.int64]]:
    """Return the tokens of each sequence, step by step: prompt, response and observations."""
    tokens = (
        trace.column("prompt_tokens").astype(np.int64)
        + trace.column("response_tokens")
        + trace.observation_tokens()
    )
    return [tokens[first:end] for _, first, end in trace.step_slices]
