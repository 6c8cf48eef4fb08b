"""Metrics logs of runs, of verl, TRL, slime or NeMo-RL, as one table in verl's names: a row a step, seconds and lengths.

Invariant: a value that a log lacks is missing (NaN, or no column), never guessed here. Where a format lacks the number of
responses or the length of prompts, one line asks for it. Of a step logged twice, as after a resume, later values count.

A log is a console's, or a table that W&B, TensorBoard or the framework itself wrote (`simrl.trace.importers.exports`).

verl   console lines `step:N - key:value - …`; in tables the same keys. Where a line lacks `perf/total_num_tokens`, it is the
       mean of `global_seqlen` times the number of ranks, which follows from other lines or from the number of responses.
TRL    `trainer_state.json`, or the run's history. TRL logs the times of its methods (`profiling/Time taken: GRPOTrainer.…`) to
       W&B, MLflow or Trackio only, in rows of their own before the row of the step: `trainer_state.json` has no generation
       time, and cannot be calibrated on.
slime  the lines `perf N: {…}` and `rollout N: {…}` that rollout manager and trainer write to the console; in tables their keys.
nemo   NeMo-RL, from its console or from what it sends to W&B and TensorBoard.
"""

from __future__ import annotations

import ast
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel

from simrl.errors import InputError, meant
from simrl.trace.importers import rows
from simrl.trace.importers.exports import STEPS, Logged, numbers, read_rows, step_of, tables, tag_of

CONSOLE = {
    "encoding": "utf-8",
    "errors": "replace",
}  # other processes write into a console log, too
NUMBER = r"-?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|inf|nan)"
VERL_STEP = re.compile(r"(?:^|[^\w/])step:(\d+) - ")
VERL_ENTRY = re.compile(rf"(.+):(?:({NUMBER})|np\.\w+\(({NUMBER})\))", re.IGNORECASE)
TRUTH = (":True", ":False")  # flags, which no step needs
CONSOLE_WIDTH = 4096  # wandb's output.log cuts a line here, even in the middle of a number
SLIME_STEP = re.compile(r"(?:^|\s)(?:perf|rollout) (\d+): (\{)")
MOST_TAGS = 10_000  # of a log: a column each
MOST_CHARACTERS = 1_000_000  # of slime's dictionary: parsed, each takes some hundred bytes
TRL_METHOD = "profiling/Time taken: GRPOTrainer."
NEMO_HEADER = re.compile(r"={5} (Epoch|Step) ([0-9]{1,9})/[0-9]+ ={5}")
NEMO_PRINTED = re.compile(
    r"• ([\w/]+|Total step time|Mean Generation Length): ([0-9.]{1,20})(s?)(?=\s|$)"
)
NEMO_TITLES = {
    "Total step time": "timing/train/total_step_time",
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
}


class Format(BaseModel, frozen=True, extra="forbid"):
    """The metrics of a framework; `metrics.toml` explains the keys."""

    signs: tuple[str, ...]
    lengths: str
    nothing: str
    prefix: str = ""
    names: Mapping[str, str] = {}
    tags: tuple[str, ...] = ()
    methods: Mapping[str, tuple[str, ...]] = {}


FORMATS = {
    name: Format.model_validate(table)
    for name, table in tomllib.loads(
        Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")
    ).items()
}
TAGS = [
    tag
    for kind in FORMATS.values()
    for tag in (*kind.tags, *(f"{kind.prefix}{name}" for name in kind.names))
]
EXPORTS = ("wandb", "tensorboard")  # names of tables, of any framework
TOTAL, PER_RANK = "perf/total_num_tokens", "global_seqlen/mean"
NEMO_TOTAL, NEMO_ENVIRONMENT = FORMATS["nemo"].tags


def read_metrics(
    path: str | Path,
    log_format: str | None = None,
    samples: int | None = None,
    prompt_tokens: float | None = None,
    lengths: bool = True,
    times: bool = True,
) -> pd.DataFrame:
    """Return a row a step: `step`, `timing_s/{gen, old_log_prob, ref, update_actor, step}`,
    `response_length/*` and so on.

    Without `log_format` it is recognised. `samples` a step and mean `prompt_tokens` are for formats
    that do not log them; a logged value stands. Without `lengths`, the log may lack them; without
    `times`, the time of generation. Raises `InputError` for a log that cannot be read, and for a
    missing value that was not given.
    """
    path = rows.existing(path)
    if log_format is not None and log_format not in (*FORMATS, *EXPORTS):
        known = ", ".join((*FORMATS, *EXPORTS))
        raise InputError(
            f"--format {log_format}: unknown{meant(log_format, (*FORMATS, *EXPORTS))}; choose one of {known}"
        )
    name = log_format if log_format in FORMATS else recognised(path)
    if name is None:
        raise InputError(
            f"{path}: no metrics of verl (timing_s/…), TRL (completions/mean_length), slime (perf N: {{…}}) or NeMo-RL "
            "(timing/train/…) in it; name the run's metrics log"
        )
    metrics = _by_step(path, name)
    metrics.attrs |= {"source": path.name, "format": name}
    if times and name == "trl" and "timing_s/gen" not in metrics:
        raise InputError(
            f"{path}: no generation times ('{TRL_METHOD}vLLM.generate'); TRL sends them to W&B, MLflow or Trackio only: "
            "export the run's history from there as JSON Lines or CSV"
        )
    return _with_lengths(metrics, path, samples, prompt_tokens) if lengths else metrics


def recognised(path: Path) -> str | None:
    """Return the framework that wrote a log, by the first line, or name of a file, with metrics;
    None if none did."""
    files = tables(path) if path.is_dir() else [path]
    names = (tag for file in files if file.suffix == ".csv" and (tag := tag_of(file, TAGS)))
    lines = (line for file in files for _, line in rows.numbered_lines(file, **CONSOLE))
    for line in chain(names, lines):
        for name, kind in reversed(
            FORMATS.items()
        ):  # verl, whose signs are the least special, last
            if any(sign in line for sign in kind.signs) or (name == "slime" and _slime_entry(line)):
                return name
    return None


def _by_step(path: Path, name: str) -> pd.DataFrame:
    """Return a row a step, in verl's names. Raises `InputError` if there is none."""
    read_console, convert = READERS[name]
    logged = read_rows(path, TAGS)
    steps: dict[int, dict[str, float]] = {}
    tags: set[str] = set()
    for place, row in convert(read_console(path) if logged is None else logged):
        if (step := step_of(row, place)) is not None:
            values = {
                tag: value
                for tag, value in row.items()
                if tag not in STEPS and not tag.startswith("_")
            }
            tags |= values.keys()
            if len(tags) > MOST_TAGS:
                raise InputError(
                    f"{place}: more than {MOST_TAGS:,} metrics; is it the log of one run?"
                )
            steps.setdefault(step, {}).update(values)
    if not any(steps.values()):
        raise InputError(f"{path}: {FORMATS[name].nothing}")
    metrics = pd.DataFrame([{"step": step, **values} for step, values in sorted(steps.items())])
    lengths = ["prompt_length/mean", "response_length/mean"]
    if {NEMO_TOTAL, *lengths} <= set(
        metrics
    ):  # a sequence is prompt, response and what the environment wrote
        mean = metrics[lengths].sum(axis=1, skipna=False) + metrics.get(NEMO_ENVIRONMENT, 0.0)
        metrics["samples"] = (metrics[NEMO_TOTAL] / mean).round()
    return metrics


def _with_lengths(
    metrics: pd.DataFrame, path: Path, samples: int | None, prompt_tokens: float | None
) -> pd.DataFrame:
    """Return the metrics with the lengths of prompts and the number of tokens of each step, as far
    as they follow."""
    name = metrics.attrs["format"]
    for key in ("mean", "max", "min"):
        if f"response_length/{key}" not in metrics:
            raise InputError(
                f"{path}: a {name} log without the {key} length of responses ({FORMATS[name].lengths}); name the log that "
                "has it, or give the run's own lengths, imported from a dump (simrl calibrate --trace)"
            )
    if name != "verl":
        metrics["response_length/clip_ratio"] = metrics.get("response_length/clip_ratio", 0.0)
    if "prompt_length/mean" not in metrics:
        if prompt_tokens is None:
            raise InputError(
                f"{path}: a {name} log does not say how long prompts are; give their mean with --prompt-tokens"
            )
        metrics["prompt_length/mean"] = float(prompt_tokens)
    for key in ("mean", "min", "max"):  # only the mean is known: all prompts are taken to have it
        if name != "verl" or f"prompt_length/{key}" not in metrics:
            metrics[f"prompt_length/{key}"] = metrics["prompt_length/mean"].round()
    metrics[TOTAL] = _total_tokens(metrics, path, samples)
    return metrics


def _total_tokens(metrics: pd.DataFrame, path: Path, samples: int | None) -> pd.Series:
    """Return the tokens of each step's prompts and responses."""
    nothing = pd.Series(math.nan, metrics.index)
    mean = metrics["response_length/mean"] + metrics["prompt_length/mean"]
    count = metrics.get("samples", nothing).fillna(math.nan if samples is None else samples)
    total, per_rank = metrics.get(TOTAL, nothing), metrics.get(PER_RANK, nothing)
    known = total.fillna(count * mean)
    if known.isna().all():
        raise InputError(
            f"{path}: a {metrics.attrs['format']} log does not say how many responses a step has; give them with --samples"
        )
    ranks = (known / per_rank).median()
    if math.isfinite(ranks) and abs(ranks - round(ranks)) < 0.01:
        total = total.fillna(per_rank * round(ranks))
    return total.fillna(count * mean)


def _step(digits: str, place: str) -> int:
    if len(digits) > 10 or int(digits) > rows.INT32_MAX:
        raise InputError(
            f"{place}: step {digits[:20]} is larger than {rows.INT32_MAX}; repair or remove the line"
        )
    return int(digits)


# verl


def _verl_console(path: Path) -> Iterator[Logged]:
    """Yield the steps of a console log. A line that was cut off loses its last entry."""
    for place, line in rows.numbered_lines(path, **CONSOLE):
        if start := VERL_STEP.search(line):
            entries = [
                entry
                for entry in line[start.end() :].strip().split(" - ")
                if not entry.endswith(TRUTH)
            ]
            matches = [VERL_ENTRY.fullmatch(entry) for entry in entries]
            if None in matches[:-1]:
                wrong = rows.shown(entries[matches.index(None)])
                raise InputError(
                    f"{place}: entry {wrong} is not key:number; repair or remove the line"
                )
            if matches and (
                not line.endswith("\n") or len(line) == CONSOLE_WIDTH + 1
            ):  # the line was cut off
                matches.pop()
            values = {entry[1]: float(entry[2] or entry[3]) for entry in matches if entry}
            yield place, {**values, STEPS[0]: _step(start[1], place)}


# TRL


def _trl_steps(logged: Iterable[Logged]) -> Iterator[Logged]:
    """Yield a row a logged step, in verl's names; `timing_s/update_actor` is `step_time` without
    generation and log-probs."""
    timed: Counter[str] = Counter()  # seconds of each method since the last row of a step
    for place, logged_row in logged:
        row = {key.removeprefix(FORMATS["trl"].prefix): value for key, value in logged_row.items()}
        timed.update({key: seconds for key, seconds in row.items() if key.startswith(TRL_METHOD)})
        step = step_of(row, place)
        if "completions/mean_length" not in row or step is None:
            continue
        values = {ours: row[name] for name, ours in FORMATS["trl"].names.items() if name in row}
        for ours, methods in FORMATS["trl"].methods.items():
            if seconds := [
                timed[TRL_METHOD + method] for method in methods if TRL_METHOD + method in timed
            ]:
                values[ours] = seconds[0]
        if "timing_s/gen" in values and "timing_s/step" in values:
            inference_s = values["timing_s/gen"] + values.get("timing_s/old_log_prob", 0.0)
            values["timing_s/update_actor"] = values["timing_s/step"] - inference_s
        yield place, {**values, STEPS[0]: step}
        timed.clear()


# slime


def _slime_steps(logged: Iterable[Logged]) -> Iterator[Logged]:
    """Yield the rows in verl's names. If the trainer logs mean `rollout/total_lengths`, its excess
    over the mean response is the prompt. `perf/step_time` is of the trainer's loop and left out: it
    counts the next rollout's wait."""
    for place, row in logged:
        values = {ours: row[name] for name, ours in FORMATS["slime"].names.items() if name in row}
        if {"rollout/total_lengths", "rollout/response_lengths"} <= set(row):
            values["prompt_length/mean"] = (
                row["rollout/total_lengths"] - row["rollout/response_lengths"]
            )
        yield place, values | {name: row[name] for name in STEPS if name in row}


def _slime_entry(line: str) -> tuple[str, str] | None:
    """Return the step and the dictionary at the end of a line; None if there is none."""
    start, text = SLIME_STEP.search(line), line.rstrip()
    return (start[1], text[start.start(2) :]) if start and text.endswith("}") else None


def _slime_console(path: Path) -> Iterator[Logged]:
    for place, line in rows.numbered_lines(path, **CONSOLE):
        if entry := _slime_entry(line):
            step, text = _step(entry[0], place), entry[1]
            if len(text) > MOST_CHARACTERS:
                raise InputError(
                    f"{place}: {len(text):,} characters, {MOST_CHARACTERS:,} are the most; remove the line"
                )
            try:
                values: Any = ast.literal_eval(
                    re.sub(r"np\.\w+\(([^()]*)\)|\b(nan|inf)\b", _plain, text)
                )
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                values = None
            if not isinstance(values, dict):
                raise InputError(
                    f"{place}: {rows.shown(text[:60])} is no dictionary of numbers; repair or remove the line"
                )
            logged = {key: value for key, value in numbers(values).items() if not math.isnan(value)}
            yield place, {**logged, STEPS[0]: step}


def _plain(match: re.Match[str]) -> str:
    return match[1] if match[1] is not None else "1e999" if match[2] == "inf" else "None"


# NeMo-RL: `timing/train/generation` is generation alone; `exposed_generation`, of asynchronous
# runs, is a wait and left out. The console has the mean length of responses, and no longest or
# shortest one.


def _nemo_console(path: Path) -> Iterator[Logged]:
    """Yield a row a printed number. A step is counted on over epochs, each of which prints its own
    from 1."""
    step, before, epoch = None, 0, 0
    for place, line in rows.numbered_lines(path, **CONSOLE):
        if header := NEMO_HEADER.search(line):
            number = int(header[2])
            if header[1] == "Step":
                step = before + number
            elif number > epoch:
                epoch, before = number, step or 0
        elif (
            step is not None
            and (printed := NEMO_PRINTED.search(line))
            and re.fullmatch(r"\d+\.?\d*|\.\d+", printed[2])
        ):
            tag = NEMO_TITLES.get(printed[1], f"timing/train/{printed[1]}" if printed[3] else "")
            if tag in FORMATS["nemo"].names:
                yield place, {STEPS[0]: step, tag: float(printed[2])}


def _nemo_steps(logged: Iterable[Logged]) -> Iterator[Logged]:
    """Yield the rows in verl's names."""
    for place, row in logged:
        yield place, {FORMATS["nemo"].names.get(tag, tag): value for tag, value in row.items()}


Reader = tuple[Callable[[Path], Iterable[Logged]], Callable[[Iterable[Logged]], Iterable[Logged]]]
READERS: dict[
    str, Reader
] = {  # the console of a format (TRL's has no metrics), and its steps in verl's names
    "verl": (_verl_console, lambda logged: logged),
    "trl": (lambda _: [], _trl_steps),
    "slime": (_slime_console, _slime_steps),
    "nemo": (_nemo_console, _nemo_steps),
}
