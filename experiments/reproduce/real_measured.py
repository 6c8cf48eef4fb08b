"""Measured values of real runs: the only code that reads their outcomes.

Invariant: values are read from the data folder at each call, none is kept in the repository, and no module that predicts
imports this one. Seconds of a log are those of the steps that its prediction has: their median where some steps of the log are
disturbed, else their mean.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.reproduce import real_agent_opd, real_nemo_rl, real_rlinf_verl, real_verl_fsdp
from experiments.reproduce.real_lengths import complete_steps
from simrl.errors import InputError

RUNS = Path("real_runs")
Values = dict[str, list[float]]  # by row, in the order of its quantities
NEMO = {
    "nemo-8b-sync": ("llama-3.1-8b", "on-policy"),
    "nemo-8b-async": ("llama-3.1-8b", "1-step off"),
    "nemo-32b-sync": ("qwen3-32b", "on-policy"),
    "nemo-30b-a3b-sync": ("qwen3-30b-a3b", "on-policy"),
    "nemo-30b-a3b-async": ("qwen3-30b-a3b", "8-step off"),
    "nemo-235b-a22b-sync": ("qwen3-235b-a22b", "on-policy"),
    "nemo-deepseek-v3-sync": ("deepseek-v3", "on-policy"),
}
NEMO_PHASES = {"nemo-phases-8b": "llama-3.1-8b-instruct", "nemo-phases-70b": "llama-3.1-70b"}
RLINF = {"rlinf": "rlinf", "rlinf-verl": "verl"}
LORA = {"hf-lora-dp2": "r1-dp2", "hf-lora-dp2-tb16k": "r1-dp2-tb16k"}
VERL_V1 = {
    "verl-v1-sync": "sync",
    "verl-v1-colocate-async": "colocate_async",
    "verl-v1-separate-async": "separate_async without switch",
}
MARIN = {"marin-sync": "sync", "marin-async-c1": "async-C1"}
Line = tuple[str, Mapping[str, str]]  # its place, and its fields


def measured(data: Path) -> Values:
    """Return the measured values of all rows. Raise `InputError` for a folder or a file that is missing or damaged."""
    if not (data / RUNS).is_dir():
        raise InputError(
            f"{data}: has no folder {RUNS}; name the folder with the measurements with --data"
        )
    found: Values = {}
    for read in (_nemo, _rlinf, _verl_fsdp, _agent_opd, _lora, _verl_v1, _marin):
        found |= read(data)
    return found | _nemo_phases(data, "published")


def again(data: Path) -> Values:
    """Return what a second measurement of some rows found: the distance is their noise."""
    return _nemo_phases(data, "user rerun")


def _nemo(data: Path) -> Values:
    lines = _lines(data / RUNS / "nemo_rl" / "runs.csv")
    found = {
        row: _numbers(_line(lines, model=model, policy=policy), "step_s")
        for row, (model, policy) in NEMO.items()
    }
    for model in ("8b", "30b-a3b"):
        found[f"nemo-{model}-async-over-sync"] = [
            found[f"nemo-{model}-sync"][0] / found[f"nemo-{model}-async"][0]
        ]
    return found


def _nemo_phases(data: Path, source: str) -> Values:
    lines = _lines(data / RUNS / "nemo_rl" / "phases.csv")
    return {
        row: _numbers(
            _line(lines, model=model, backend="megatron", source=source),
            *real_nemo_rl.QUANTITIES[row],
        )
        for row, model in NEMO_PHASES.items()
    }


def _rlinf(data: Path) -> Values:
    lines = _lines(data / RUNS / "rlinf_verl.csv")
    found = {
        row: _numbers(_line(lines, system=system), *real_rlinf_verl.QUANTITIES[row])
        for row, system in RLINF.items()
    }
    return {**found, "rlinf-over-verl": [found["rlinf"][-1] / found["rlinf-verl"][-1]]}


def _lora(data: Path) -> Values:
    lines = _lines(data / RUNS / "hf_async_lora.csv")
    found = {}
    for row, run in LORA.items():
        step_s, wait_s = _numbers(next_exact(lines, "run", run), "step_s_p50", "rollout_wait_s")
        found[row] = [step_s, wait_s / step_s]
    return found


def _verl_v1(data: Path) -> Values:
    lines = _lines(data / RUNS / "verl_v1.csv")
    found = {
        row: _numbers(next_exact(lines, "mode", mode), "hours") for row, mode in VERL_V1.items()
    }
    return {
        **found,
        "verl-v1-colocate-async-over-sync": [
            found["verl-v1-sync"][0] / found["verl-v1-colocate-async"][0]
        ],
    }


def _marin(data: Path) -> Values:
    lines = _lines(data / RUNS / "marin_async.csv")
    core_s = {row: _numbers(next_exact(lines, "run", run), "core_s") for row, run in MARIN.items()}
    over = core_s["marin-async-c1"][0] / core_s["marin-sync"][0]
    return {**core_s, "marin-async-c1-over-sync": [over]}


def _verl_fsdp(data: Path) -> Values:
    steps = complete_steps(data / real_verl_fsdp.LOG)
    return {
        row: _seconds(
            steps[real_verl_fsdp.window(row.rpartition("-")[2], steps)], names, pd.Series.median
        )
        for row, names in real_verl_fsdp.QUANTITIES.items()
    }


def _agent_opd(data: Path) -> Values:
    found = {}
    for run, log in real_agent_opd.LOGS.items():
        steps, row = complete_steps(data / log), f"opd-{run}"
        found[row] = _seconds(
            steps[real_agent_opd.window(run, steps)], real_agent_opd.QUANTITIES[row], pd.Series.mean
        )
    return found


def _seconds(
    steps: pd.DataFrame, names: Sequence[str], mean: Callable[[pd.Series], float]
) -> list[float]:
    """Return mean or median seconds; a step's are those without its evaluation and checkpoint."""
    seconds = {name: steps[f"timing_s/{name.removesuffix('_s')}"] for name in names}
    for extra in ("testing", "save_checkpoint"):
        if f"timing_s/{extra}" in steps:
            seconds["step_s"] = seconds["step_s"] - steps[f"timing_s/{extra}"].fillna(0.0)
    return [float(mean(seconds[name])) for name in names]


def _lines(path: Path) -> list[Line]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read ({error}); name the folder with the measurements with --data"
        ) from error
    reader = csv.DictReader(text.splitlines())
    return [(f"{path}: line {reader.line_num}", row) for row in reader]


def _line(lines: Sequence[Line], **fields: str) -> Line:
    """Return the line whose fields begin with these texts. Raise `InputError` if there is none."""
    for place, row in lines:
        if all((row.get(name) or "").startswith(text) for name, text in fields.items()):
            return place, row
    where = lines[0][0].rpartition(": line")[0] if lines else "a file of measurements"
    raise InputError(
        f"{where}: no line with {', '.join(f'{k} {v!r}' for k, v in fields.items())}; restore the file"
    )


def next_exact(lines: Sequence[Line], name: str, text: str) -> Line:
    """Return the line with this very text in a field."""
    return _line([line for line in lines if line[1].get(name) == text] or lines[:1], **{name: text})


def _numbers(line: Line, *names: str) -> list[float]:
    place, row = line
    found = []
    for name in names:
        text = row.get(name)
        try:
            value = float(text or "")
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise InputError(
                f"{place}: {name} is {text!r}; a number above 0 belongs there; restore the file"
            )
        found.append(value)
    return found
