"""Metrics logs of runs, of verl, TRL or slime, as one table in verl's names: a row a step, seconds and lengths.

Invariant: a value that a log lacks is missing (NaN, or no column), never guessed here. Where a format lacks the number of
responses or the length of prompts, one line asks for it. Of a step logged twice, as after a resume, later values count.

verl   console lines `step:N - key:value - …`, or the file logger's JSON Lines (`{"step": …, "data": {…}}`).
TRL    `trainer_state.json`, or the run's history as JSON Lines (a row a call of `log`, as W&B exports it). TRL logs the times
       of its methods (`profiling/Time taken: GRPOTrainer.…`) to W&B, MLflow or Trackio only, in rows of their own before the
       row of the step: `trainer_state.json` has no generation time, and cannot be calibrated on.
slime  the lines `perf N: {…}` and `rollout N: {…}` that rollout manager and trainer write to the console.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from simrl.errors import InputError, meant
from simrl.trace.importers import rows

Entry = tuple[int, dict[str, float]]  # a step, and some of its metrics
CONSOLE = {"encoding": "utf-8", "errors": "replace"}  # other processes write into a console log, too
NUMBER = r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|inf|nan)"
VERL_STEP = re.compile(r"(?:^|[^\w/])step:(\d+) - ")
VERL_ENTRY = re.compile(rf"(.+):(?:({NUMBER})|np\.\w+\(({NUMBER})\))", re.IGNORECASE)
CONSOLE_WIDTH = 4096  # wandb's output.log cuts a line here, even in the middle of a number
SLIME_STEP = re.compile(r"(?:^|\s)(?:perf|rollout) (\d+): (\{.*\})\s*$")
SLIME_NAMES = {
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
TRL_NAMES = {
    "completions/mean_length": "response_length/mean",
    "completions/min_length": "response_length/min",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "step_time": "timing_s/step",
}
TRL_METHOD = "profiling/Time taken: GRPOTrainer."
TRL_METHODS = {  # the methods of a phase by TRL version, the newest first
    "timing_s/gen": ("vLLM.generate", "transformers.generate", "transformers.generate_batch", "generate"),
    "timing_s/old_log_prob": ("_get_per_token_logps_and_entropies", "_get_per_token_logps"),
}


def read_metrics(
    path: str | Path,
    log_format: str | None = None,
    samples: int | None = None,
    prompt_tokens: float | None = None,
    lengths: bool = True,
) -> pd.DataFrame:
    """Return a row a step: `step`, `timing_s/{gen, old_log_prob, ref, update_actor, step}`, `response_length/*` and so on.

    Without `log_format` it is recognised. `samples` a step and mean `prompt_tokens` are for formats that do not log them; a
    logged value stands. Without `lengths`, the log may lack them. Raises `InputError` for a log that cannot be read, and for a
    missing value that was not given.
    """
    path = rows.existing(path)
    if log_format is not None and log_format not in FORMATS:
        raise InputError(
            f"--format {log_format}: unknown{meant(log_format, FORMATS)}; choose one of {', '.join(FORMATS)}"
        )
    name = log_format or _format_of(path)
    metrics = FORMATS[name](path)
    metrics.attrs["format"] = name
    if name == "verl" or not lengths:
        return metrics
    if "response_length/mean" not in metrics:
        raise InputError(
            f"{path}: a {name} log without the mean length of responses (slime: rollout/response_len/mean, TRL: "
            "completions/mean_length); name the log that has it"
        )
    if "prompt_length/mean" not in metrics:
        if prompt_tokens is None:
            raise InputError(
                f"{path}: a {name} log does not say how long prompts are; give their mean with --prompt-tokens"
            )
        metrics["prompt_length/mean"] = float(prompt_tokens)
    for key in ("mean", "min", "max"):  # only the mean is known: all prompts are taken to have it
        metrics[f"prompt_length/{key}"] = metrics["prompt_length/mean"].round()
    metrics["response_length/clip_ratio"] = metrics.get("response_length/clip_ratio", 0.0)
    count = metrics.get("samples", samples)
    if count is None:
        raise InputError(f"{path}: a {name} log does not say how many responses a step has; give them with --samples")
    metrics["perf/total_num_tokens"] = count * (metrics["response_length/mean"] + metrics["prompt_length/mean"])
    return metrics


def _format_of(path: Path) -> str:
    """Return the framework that wrote a log, by the first line with metrics."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name the run's metrics log")
    if path.name == "trainer_state.json":
        return "trl"
    for _, line in rows.numbered_lines(path, **CONSOLE):
        if "completions/mean_length" in line:
            return "trl"
        if SLIME_STEP.search(line):
            return "slime"
        if "timing_s/" in line or "response_length/" in line:
            return "verl"
    raise InputError(
        f"{path}: no metrics of verl (timing_s/…), TRL (completions/mean_length) or slime (perf N: {{…}}) in it; name the "
        "run's metrics log"
    )


def _by_step(entries: Iterable[Entry], path: Path, nothing: str) -> pd.DataFrame:
    """Return a row a step. Raises `InputError` with the words `nothing` if there is none."""
    steps: dict[int, dict[str, float]] = {}
    for step, values in entries:
        steps.setdefault(step, {}).update(values)
    if not steps:
        raise InputError(f"{path}: {nothing}")
    metrics = pd.DataFrame([{"step": step, **values} for step, values in sorted(steps.items())])
    metrics.attrs["source"] = path.name
    return metrics


def _step(digits: str, place: str) -> int:
    if len(digits) > 10 or int(digits) > rows.INT32_MAX:
        raise InputError(f"{place}: step {digits[:20]} is larger than {rows.INT32_MAX}; repair or remove the line")
    return int(digits)


# verl


def read_verl_metrics(path: str | Path) -> pd.DataFrame:
    """Return a row a step of a verl run's metrics: `step`, and a float column for each key (`timing_s/gen`, …).

    `path` is a console log, whose lines without metrics are skipped, or the file logger's JSON Lines (a name that ends in
    .jsonl; values that are not numbers are skipped). A value that a step lacks is NaN. A console line that was cut off loses
    its last entry. Raises `InputError` if there is no step, or an entry cannot be read.
    """
    path = rows.existing(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name the run's console log, or the file logger's .jsonl")
    entries = _verl_jsonl(path) if path.suffix == ".jsonl" else _verl_console(path)
    nothing = "no line of the form 'step:N - key:value - …' in it; is it the trainer's console log?"
    return _by_step(entries, path, nothing)


def _verl_jsonl(path: Path) -> Iterator[Entry]:
    for place, row in rows.read_jsonl(path):
        step, data = rows.integer(row, "step", place), row.get("data")
        if not isinstance(data, dict):
            raise InputError(
                f"{place}: field 'data' is {rows.shown(data)}; verl's file logger writes an object of metrics"
            )
        yield step, _numbers(data)


def _verl_console(path: Path) -> Iterator[Entry]:
    for place, line in rows.numbered_lines(path, **CONSOLE):
        if start := VERL_STEP.search(line):
            entries = line[start.end() :].strip().split(" - ")
            found = [VERL_ENTRY.fullmatch(entry) for entry in entries]
            if None in found[:-1]:
                wrong = rows.shown(entries[found.index(None)])
                raise InputError(f"{place}: entry {wrong} is not key:number; repair or remove the line")
            if not line.endswith("\n") or len(line) == CONSOLE_WIDTH + 1:  # the line was cut off
                found.pop()
            yield _step(start[1], place), {entry[1]: float(entry[2] or entry[3]) for entry in found if entry}


# TRL


def read_trl_metrics(path: str | Path) -> pd.DataFrame:
    """Return a row a logged step, in verl's names; `timing_s/update_actor` is `step_time` without generation and log-probs.

    Raises `InputError` if no row has completions, or no generation was timed.
    """
    path = rows.existing(path)
    nothing = "no row has completions/mean_length; is it the log of TRL's GRPOTrainer?"
    metrics = _by_step(_trl_entries(path), path, nothing)
    if "timing_s/gen" not in metrics:
        raise InputError(
            f"{path}: no generation times ('{TRL_METHOD}vLLM.generate'); TRL sends them to W&B, MLflow or Trackio only: "
            "export the run's history from there as JSON Lines"
        )
    return metrics


def _trl_entries(path: Path) -> Iterator[Entry]:
    timed: Counter[str] = Counter()  # seconds of each method since the last row of a step
    for logged in _trl_rows(path):
        row = {
            key.removeprefix("train/"): rows.as_float(value) for key, value in logged.items() if rows.is_number(value)
        }
        timed.update({key: seconds for key, seconds in row.items() if key.startswith(TRL_METHOD)})
        step = row.get("global_step", row.get("step"))
        if "completions/mean_length" not in row or step is None:
            continue
        if not 0 <= step <= rows.INT32_MAX or step != int(step):
            raise InputError(f"{path}: step {step:.12g} is no whole number from 0; repair or remove the row")
        values = {ours: row[name] for name, ours in TRL_NAMES.items() if name in row}
        for ours, methods in TRL_METHODS.items():
            if found := [timed[TRL_METHOD + method] for method in methods if TRL_METHOD + method in timed]:
                values[ours] = found[0]
        if "timing_s/gen" in values and "timing_s/step" in values:
            inference_s = values["timing_s/gen"] + values.get("timing_s/old_log_prob", 0.0)
            values["timing_s/update_actor"] = values["timing_s/step"] - inference_s
        yield int(step), values
        timed.clear()


def _trl_rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix != ".json":
        yield from (row for _, row in rows.read_jsonl(path))
        return
    history = rows.read_json(path).get("log_history")
    if not isinstance(history, list):
        raise InputError(f"{path}: no list 'log_history'; TRL writes it into trainer_state.json")
    yield from (row for row in history if isinstance(row, dict))


# slime


def read_slime_metrics(path: str | Path) -> pd.DataFrame:
    """Return a row a rollout, in verl's names.

    If the trainer logs mean `rollout/total_lengths`, its excess over the mean response is the prompt. `perf/step_time` is of
    the trainer's loop and left out: it counts the next rollout's wait. Raises `InputError` if no line has metrics, or one is
    no dictionary of plain values.
    """
    path = rows.existing(path)
    nothing = "no line of the form 'perf N: {…}' in it; is it slime's console log?"
    logged = _by_step(_slime_entries(path), path, nothing)
    metrics = logged[["step", *(name for name in SLIME_NAMES if name in logged)]].rename(columns=SLIME_NAMES)
    if {"rollout/total_lengths", "rollout/response_lengths"} <= set(logged):
        metrics["prompt_length/mean"] = logged["rollout/total_lengths"] - logged["rollout/response_lengths"]
    return metrics


def _slime_entries(path: Path) -> Iterator[Entry]:
    for place, line in rows.numbered_lines(path, **CONSOLE):
        if found := SLIME_STEP.search(line):
            step = _step(found[1], place)
            try:
                values: Any = ast.literal_eval(re.sub(r"np\.\w+\(([^()]*)\)|\b(nan|inf)\b", _plain, found[2]))
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                values = None
            if not isinstance(values, dict):
                raise InputError(
                    f"{place}: {rows.shown(found[2][:60])} is no dictionary of numbers; repair or remove the line"
                )
            yield step, {key: value for key, value in _numbers(values).items() if not math.isnan(value)}


def _plain(found: re.Match[str]) -> str:
    return found[1] if found[1] is not None else "1e999" if found[2] == "inf" else "None"


def _numbers(values: dict[Any, Any]) -> dict[str, float]:
    return {str(key): rows.as_float(value) for key, value in values.items() if isinstance(value, int | float)}


FORMATS: dict[str, Callable[[str | Path], pd.DataFrame]] = {
    "verl": read_verl_metrics,
    "trl": read_trl_metrics,
    "slime": read_slime_metrics,
}
