"""The metrics log of a run, whichever framework wrote it, as one table in verl's names: a row a step, seconds and lengths.

Invariant: what a log does not say is missing (NaN, or no column), never guessed here. What it cannot say, the number of
responses and the prompt's length in some formats, is asked for in one line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from simrl.errors import InputError, meant
from simrl.importers.rows import existing, opened
from simrl.importers.slime_metrics import PERF_LINE, read_slime_metrics
from simrl.importers.trl_metrics import read_trl_metrics
from simrl.importers.verl import read_verl_metrics

FORMATS: dict[str, Callable[[str | Path], pd.DataFrame]] = {
    "verl": read_verl_metrics,
    "trl": read_trl_metrics,
    "slime": read_slime_metrics,
}


def read_metrics(
    path: str | Path,
    log_format: str | None = None,
    samples: int | None = None,
    prompt_tokens: float | None = None,
    lengths: bool = True,
) -> pd.DataFrame:
    """A row a step: `step`, `timing_s/{gen, old_log_prob, ref, update_actor, step}`, `response_length/*`, `prompt_length/*` …

    Without `log_format`, the file tells. `samples` a step and mean `prompt_tokens` are for formats that do not log them; what a
    log says itself stands; without `lengths`, those of a trace will do. Raises `InputError` for a log that cannot be read, and
    for what is needed and nobody said.
    """
    path = existing(path)
    if log_format is not None and log_format not in FORMATS:
        raise InputError(
            f"--format {log_format}: unknown{meant(log_format, FORMATS)}; choose one of {', '.join(FORMATS)}"
        )
    name = log_format or format_of(path)
    metrics = FORMATS[name](path)
    metrics.attrs["format"] = name
    if name == "verl" or not lengths:
        return metrics
    if "response_length/mean" not in metrics:
        raise InputError(
            f"{path}: a {name} log without the mean length of responses (slime: rollout/response_len/mean, TRL: "
            "completions/mean_length); name the log that has it"
        )
    if "prompt_length/mean" not in metrics and prompt_tokens is not None:
        for key in ("mean", "min", "max"):
            metrics[f"prompt_length/{key}"] = float(round(prompt_tokens))
    if "prompt_length/mean" not in metrics:
        raise InputError(
            f"{path}: a {name} log does not say how long prompts are; give their mean with --prompt-tokens"
        )
    for key in ("min", "max"):
        if f"prompt_length/{key}" not in metrics:  # only their mean is logged: all are taken to be as long
            metrics[f"prompt_length/{key}"] = metrics["prompt_length/mean"].round()
    metrics["prompt_length/mean"] = metrics["prompt_length/mean"].round()
    if "response_length/clip_ratio" not in metrics:
        metrics["response_length/clip_ratio"] = 0.0
    if "samples" in metrics:
        count = metrics["samples"]
    elif samples is not None:
        count = pd.Series(samples, metrics.index)
    else:
        raise InputError(f"{path}: a {name} log does not say how many responses a step has; give them with --samples")
    metrics["perf/total_num_tokens"] = count * (metrics["response_length/mean"] + metrics["prompt_length/mean"])
    return metrics


def format_of(path: Path) -> str:
    """Which framework wrote it, by its first telling line."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name the run's metrics log")
    if path.name == "trainer_state.json":
        return "trl"
    with opened(path) as lines:
        for line in lines:
            if "completions/mean_length" in line:
                return "trl"
            if PERF_LINE.search(line):
                return "slime"
            if "timing_s/" in line or "response_length/" in line:
                return "verl"
    raise InputError(
        f"{path}: no metrics of verl (timing_s/…), TRL (completions/mean_length) or slime (perf N: {{…}}) in it; name the "
        "run's metrics log"
    )
