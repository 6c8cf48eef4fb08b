"""slime's metrics: the lines `perf N: {…}` and `rollout N: {…}` that rollout manager and trainer write to the console."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd

from simrl.errors import InputError
from simrl.importers.rows import existing, opened, shown, step_number

PERF_LINE = re.compile(r"(?:^|\s)(?:perf|rollout) (\d+): (\{.*\})\s*$")
NAMES = {
    "perf/rollout_time": "timing_s/gen",
    "perf/log_probs_time": "timing_s/old_log_prob",
    "perf/ref_log_probs_time": "timing_s/ref",
    "perf/actor_train_time": "timing_s/update_actor",
    "rollout/response_len/mean": "response_length/mean",
    "rollout/response_len/max": "response_length/max",
    "rollout/response_len/min": "response_length/min",
    "rollout/truncated_ratio": "response_length/clip_ratio",
    "rollout/num_training_samples": "samples",
}


def read_slime_metrics(path: str | Path) -> pd.DataFrame:
    """A row a rollout, in verl's names. Of a rollout logged twice, later values count.

    Where the trainer logs mean `rollout/total_lengths`, what is over the mean response is the prompt. `perf/step_time` is of
    the trainer's loop and left out: it counts the next rollout's wait. Raises `InputError` if no line has metrics, or one is
    no dictionary of plain values.
    """
    path = existing(path)
    steps: dict[int, dict[str, float]] = {}
    with opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if found := PERF_LINE.search(line):
                values = _numbers(found[2], f"{path}: line {number}")
                steps.setdefault(step_number(found[1], f"{path}: line {number}"), {}).update(values)
    if not steps:
        raise InputError(f"{path}: no line of the form 'perf N: {{…}}' in it; is it slime's console log?")
    rows = []
    for step, values in sorted(steps.items()):
        row: dict[str, float] = {"step": step, **{ours: values[name] for name, ours in NAMES.items() if name in values}}
        if "rollout/total_lengths" in values and "rollout/response_lengths" in values:
            row["prompt_length/mean"] = values["rollout/total_lengths"] - values["rollout/response_lengths"]
        rows.append(row)
    metrics = pd.DataFrame(rows)
    metrics.attrs["source"] = path.name
    return metrics


def _numbers(text: str, place: str) -> dict[str, float]:
    try:
        values: Any = ast.literal_eval(re.sub(r"np\.\w+\(([^()]*)\)|\b(nan|inf)\b", _plain, text))
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise InputError(
            f"{place}: {shown(text[:60])} is no dictionary of numbers; repair or remove the line"
        ) from error
    if not isinstance(values, dict):
        raise InputError(f"{place}: {shown(text[:60])} is no dictionary of numbers; repair or remove the line")
    return {
        str(key): float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not math.isnan(value)
    }


def _plain(found: re.Match[str]) -> str:
    return found[1] if found[1] is not None else "1e999" if found[2] == "inf" else "None"
