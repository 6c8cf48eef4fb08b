"""verl: rollout dumps, wandb tables of generations, and the step metrics of runs that dumped no samples.

What verl writes (`trainer.rollout_data_dir`: `{step}.jsonl` with input, output, gts, score, step; wandb:
`*generations*.table.json` with step, input_k, output_k, score_k) is decoded text without ids or lengths, so a
`TokenCounter` says how long it is. Rows with the same prompt text and step are one group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from simrl.errors import InputError
from simrl.importers.lengths import lengths_with
from simrl.importers.rows import (
    INT32_MAX,
    TextRow,
    as_float,
    count_rows,
    existing,
    integer,
    json_object,
    listed,
    number,
    opened,
    read_jsonl,
    read_whole,
    shown,
    step_number,
    text,
    trace_from_rows,
)
from simrl.importers.tokens import TokenCounter
from simrl.trace import Trace, TraceMetadata

TABLE = ".table.json"
TOOL_RESULT = "<tool_response>"  # how Qwen's chat template, the usual one in verl's tool recipes, opens a tool's answer
DECODED = "Lengths are of the decoded text, without special tokens: each misses its end token."
EPISODES = "A response is the whole episode: text of tools and of later turns in it counts as response tokens"

CONSOLE_STEP = re.compile(r"(?:^|[^\w/])step:(\d+) - ")
NUMBER = r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|inf|nan)"
CONSOLE_VALUE = re.compile(rf"({NUMBER})|np\.\w+\(({NUMBER})\)", re.IGNORECASE)
MOST_SAMPLES = 1_000_000  # of a step
CONSOLE_WIDTH = 4096  # wandb's output.log cuts a line here, in the middle of a number if need be
NEEDED = (
    *(f"response_length/{name}" for name in ("mean", "max", "min", "clip_ratio")),
    *(f"prompt_length/{name}" for name in ("mean", "max", "min")),
    "perf/total_num_tokens",
)


def import_verl(
    path: str | Path,
    counter: TokenCounter,
    *,
    cap_tokens: int | None = None,
    name: str | None = None,
    licence: str = "unknown",
) -> Trace:
    """A trace from verl's samples: a folder of `{step}.jsonl` rollout dumps, one such file, or a wandb table.

    A run folder without dumps is searched for `*generations*.table.json`; the tables are cumulative, the largest
    holds all steps. `cap_tokens` is the run's `data.max_response_length`; None takes the largest response for it.
    Token ids are kept where `counter` is a tokenizer. The reward is verl's `score`.

    Raises `InputError` for anything else at `path`, and for fields that are missing or of the wrong type.
    """
    path = existing(path)
    table = _table(path)
    texts = _table_texts(table) if table else _dump_texts(path)
    tool_results = 0

    def watched() -> Iterator[TextRow]:
        nonlocal tool_results
        for row in texts:
            tool_results += TOOL_RESULT in row.response
            yield row

    rows = list(count_rows(watched(), counter))
    notes = [DECODED, f"{EPISODES} ({tool_results} of {len(rows)} responses hold {TOOL_RESULT})."]
    if table:
        notes.insert(
            0, "Validation generations that verl logged as a table, a few a checkpoint, not training rollouts."
        )
    return trace_from_rows(
        rows,
        name=name or path.name.removesuffix(TABLE).removesuffix(".jsonl"),
        source=f"verl wandb table {table.name}" if table else f"verl rollout dump {path.name}",
        licence=licence,
        tokenizer=counter.tokenizer,
        cap_tokens=cap_tokens,
        notes=notes,
    )


def _table(path: Path) -> Path | None:
    """The wandb table at `path`, None if there are rollout dumps instead."""
    if path.is_file():
        return path if path.name.endswith(TABLE) else None
    if _dumps(path):
        return None
    found = [file for file in path.rglob(f"*generations*{TABLE}") if file.is_file()]
    tables = sorted(found, key=lambda file: (file.stat().st_size, file.name))
    if not tables:
        raise InputError(
            f"{path}: neither {{step}}.jsonl rollout dumps nor a *generations*{TABLE} in it; name the run's "
            "trainer.rollout_data_dir, or for metrics alone its console log"
        )
    return tables[-1]


def _dumps(folder: Path) -> list[Path]:
    return sorted((file for file in folder.glob("*.jsonl") if file.stem.isdecimal()), key=lambda file: int(file.stem))


def _dump_texts(path: Path) -> Iterator[TextRow]:
    for file in _dumps(path) if path.is_dir() else [path]:
        for place, row in read_jsonl(file):
            step = integer(row, "step", place)
            yield TextRow(
                place, step, text(row, "input", place), text(row, "output", place), number(row, "score", place)
            )


def _table_texts(file: Path) -> Iterator[TextRow]:
    table = json_object(read_whole(file), str(file))
    columns, data = table.get("columns"), table.get("data")
    if not isinstance(columns, list) or not isinstance(data, list):
        raise InputError(f"{file}: keys {listed(table)}; a wandb table has the lists 'columns' and 'data'")
    slots = [name.removeprefix("input_") for name in map(str, columns) if name.startswith("input_")]
    if not slots:
        raise InputError(
            f"{file}: no column 'input_1' in it; a table of generations has step, input_k, output_k, score_k"
        )
    seen: set[int] = set()
    for index, values in enumerate(data):
        place = f"{file}: data row {index}"
        if not isinstance(values, list) or len(values) != len(columns):
            raise InputError(f"{place}: {shown(values)} is not a list of {len(columns)} values, one a column")
        row = dict(zip(map(str, columns), values, strict=True))
        step = integer(row, "step", place)
        if step in seen:
            raise InputError(f"{place}: step {step} occurs twice; remove the row of the run that was repeated")
        seen.add(step)
        for k in slots:
            prompt, response = text(row, f"input_{k}", place), text(row, f"output_{k}", place)
            yield TextRow(f"{place}, slot {k}", step, prompt, response, number(row, f"score_{k}", place))


# Step metrics


def read_verl_metrics(path: str | Path) -> pd.DataFrame:
    """One row a step of a verl run's metrics: `step`, and a float column for each key (`timing_s/gen`, …).

    `path` is a console log (its `step:N - key:value - …` lines; all other lines are passed over) or the file logger's
    JSON Lines (`{"step": …, "data": {…}}`, told by the name's ending .jsonl; values that are not numbers are passed
    over). What a step lacks is NaN. Of a step logged twice, as after a resume, later values count. A console line that
    was cut off loses its last entry. Raises `InputError` if there is no step, or an entry cannot be read.
    """
    path = existing(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name the run's console log, or the file logger's .jsonl")
    steps: dict[int, dict[str, float]] = {}
    for step, values in _logged_steps(path) if path.suffix == ".jsonl" else _console_steps(path):
        steps.setdefault(step, {}).update(values)
    if not steps:
        raise InputError(
            f"{path}: no line of the form 'step:N - key:value - …' in it; is it the trainer's console log?"
        )
    metrics = pd.DataFrame([{"step": step, **steps[step]} for step in sorted(steps)])
    metrics.attrs["source"] = path.name
    return metrics


def _logged_steps(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    for place, row in read_jsonl(path):
        step, data = integer(row, "step", place), row.get("data")
        if not isinstance(data, dict):
            raise InputError(f"{place}: field 'data' is {shown(data)}; verl's file logger writes an object of metrics")
        yield step, {key: as_float(value) for key, value in data.items() if isinstance(value, int | float)}


def _console_steps(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    with opened(path) as lines:  # other processes write into a console log, too
        for line_number, line in enumerate(lines, start=1):
            start = CONSOLE_STEP.search(line)
            if start:
                cut = not line.endswith("\n") or len(line) == CONSOLE_WIDTH + 1
                place = f"{path}: line {line_number}"
                yield step_number(start[1], place), _console_values(line[start.end() :], cut, place)


def _console_values(line: str, cut: bool, place: str) -> dict[str, float]:
    entries = line.strip().split(" - ")
    values: dict[str, float] = {}
    for position, entry in enumerate(entries, start=1):
        key, _, value = entry.rpartition(":")
        read = CONSOLE_VALUE.fullmatch(value) if key else None
        last = position == len(entries)
        if read and not (last and cut):
            values[key] = float(read[1] or read[2])
        elif not last:
            raise InputError(f"{place}: entry {shown(entry)} is not key:number; repair or remove the line")
    return values


# A trace from step metrics


def trace_from_verl_metrics(
    metrics: pd.DataFrame,
    group: int,
    seed: int,
    *,
    cap_tokens: int | None = None,
    name: str = "verl-metrics",
    licence: str = "unknown",
) -> Trace:
    """A synthetic trace whose steps have the lengths' statistics of a run that dumped no samples.

    `metrics` is what `read_verl_metrics` gives; `group` the samples a prompt (`rollout.n`). Of each step the number of
    samples, the response lengths' sum, min, max and share at the max (where verl counts clipped ones), and the prompt
    lengths' sum, min and max are the log's, exactly; the shape between is `simrl.importers.lengths`' lognormal, dealt
    to prompts at random by `seed`. `cap_tokens` None takes the largest `response_length/max` of a step with clipped
    responses. Steps whose line lacks one of these metrics are left out; the notes name them.

    Raises `InputError` for metrics that are missing or contradict each other, and samples that are not whole groups.
    """
    if group < 1:
        raise InputError(f"group is {group}; a prompt has at least 1 sample")
    source = str(metrics.attrs.get("source", "metrics"))
    for key in ("step", *NEEDED):
        if key not in metrics.columns:
            raise InputError(f"{source}: no column {key!r}; verl's trainer logs it, a validation-only log does not")
    usable = metrics.dropna(subset=[*NEEDED, *({"training/epoch"} & set(metrics.columns))])
    if usable.empty:
        raise InputError(
            f"{source}: none of the {len(metrics)} steps has all of {', '.join(NEEDED)}; is the log cut off?"
        )
    epochs = {"training/epoch"} & set(metrics.columns)
    for key in ("step", *epochs, *NEEDED):
        most = 1 if key.endswith("clip_ratio") else INT32_MAX
        for step, value in usable.loc[~usable[key].between(0, most), ["step", key]].to_numpy():
            raise InputError(f"{source}: step {step:g}: {key} is {value:g}; it must be from 0 to {most}; check the log")
    clipped = usable.loc[usable["response_length/clip_ratio"] > 0, "response_length/max"]
    if cap_tokens is None and clipped.empty:
        raise InputError(f"{source}: no step has clipped responses, so the cap is unknown; give cap_tokens")
    cap = int(clipped.max()) if cap_tokens is None else cap_tokens
    epoch_of = usable["training/epoch"] if "training/epoch" in usable.columns else pd.Series(0, usable.index)
    first_step = usable["step"].groupby(epoch_of).transform("min")
    parts = [
        _step_columns(row, int(epoch), group, seed, cap, source)
        for (_, row), epoch in zip(usable.iterrows(), epoch_of, strict=True)
    ]
    most_prompts = max(int(part["prompt_id"][-1]) + 1 for part in parts)
    for part, before in zip(parts, usable["step"] - first_step, strict=True):
        part["prompt_id"] += int(before) * most_prompts  # its place in the epoch: the next epoch has the same prompts
    return Trace.from_columns(
        {key: np.concatenate([part[key] for part in parts]) for key in parts[0]},
        TraceMetadata(
            name=name,
            kind="synthetic",
            source=f"step metrics in {source}, group {group}, seed {seed}",
            licence=licence,
            tokenizer="the run's own (lengths are from its log)",
            cap_tokens=cap,
            notes=_metrics_notes(metrics, usable),
        ),
        origin=f"trace from the metrics in {source}",
    )


def _step_columns(row: pd.Series[Any], epoch: int, group: int, seed: int, cap: int, source: str) -> dict[str, Any]:
    """The columns of one step, its prompts numbered from 0."""
    step = int(row["step"])
    place = f"{source}: step {step}"
    response, prompt = (
        {key: float(row[f"{kind}_length/{key}"]) for key in ("mean", "min", "max")} for kind in ("response", "prompt")
    )
    total = float(row["perf/total_num_tokens"])
    mean = response["mean"] + prompt["mean"]
    samples = round(total / mean) if mean > 0 else 0
    if samples < 1 or abs(total / mean - samples) > 0.01:
        raise InputError(
            f"{place}: {total:g} tokens over a mean of {mean:g} are no whole number of samples; check the log"
        )
    if samples > MOST_SAMPLES:
        raise InputError(f"{place}: {samples:,} samples; no step has more than {MOST_SAMPLES:,}; check the log")
    if samples % group:
        raise InputError(f"{place}: {samples} samples are not whole groups of {group}; give the run's samples a prompt")
    if response["max"] > cap:
        raise InputError(
            f"{place}: response_length/max is {response['max']:g}, over the cap of {cap}; give the run's cap"
        )
    if response["min"] < 1:
        raise InputError(
            f"{place}: response_length/min is {response['min']:g}, aborted or empty: cannot be generated again; "
            "drop this step from the metrics"
        )
    clipped = round(float(row["response_length/clip_ratio"]) * samples)
    response_tokens = _lengths(response, samples, clipped or None, f"{place}: response_length")
    prompts = samples // group
    prompt_tokens = _lengths(prompt, prompts, None, f"{place}: prompt_length")
    rng = np.random.default_rng([seed, step])
    response_tokens = rng.permutation(response_tokens)
    in_step = np.repeat(np.arange(prompts), group)
    return {
        "step": np.full(samples, step),
        "epoch": np.full(samples, epoch),
        "prompt_id": in_step.copy(),
        "sample": np.tile(np.arange(group), prompts),
        "prompt_tokens": rng.permutation(prompt_tokens)[in_step],
        "response_tokens": response_tokens,
        "finish_reason": np.where(response_tokens == cap, "length", "stop"),
    }


def _lengths(stats: Mapping[str, float], count: int, at_max: int | None, place: str) -> np.ndarray[Any, Any]:
    try:
        return lengths_with(round(stats["mean"] * count), count, int(stats["min"]), int(stats["max"]), at_max)
    except ValueError as error:
        raise InputError(
            f"{place}: mean, min, max and clip_ratio contradict each other ({error}); check the log"
        ) from error


def _metrics_notes(metrics: pd.DataFrame, usable: pd.DataFrame) -> str:
    left_out = sorted(set(metrics["step"].astype(int)) - set(usable["step"].astype(int)))
    notes = [
        f"Synthesised from the log of {len(usable)} steps. From the run, in each step: the number of samples, "
        "response_length mean, min, max and clip_ratio, prompt_length mean, min and max. Assumed: the shape between "
        "(a truncated lognormal), lengths independent of the prompt and of other steps, and that the j-th prompt of "
        "every epoch is the same one. Rewards and tool times are not in it.",
        "The epoch is the run's."
        if "training/epoch" in usable.columns
        else "The run logged no epoch: all steps are taken for the first.",
    ]
    if left_out:
        notes.append(f"Left out, as their lines lack lengths (validation only, or cut off): steps {left_out}.")
    return " ".join(notes)
