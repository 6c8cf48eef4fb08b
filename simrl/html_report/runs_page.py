"""What the page of runs says: who is fastest and why, the table of a comparison, the pictures, and each run closely.

Invariant: every number and every word on it comes from the functions that `simrl compare` and `simrl explain` print: `table`,
`explanation`, `gpu_hours`, `diagnosis`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml
from rich.console import Console

from simrl.agreement import agree
from simrl.agreement_table import print_agreement
from simrl.errors import InputError
from simrl.explanation import Explanation, explain_result
from simrl.explanation_table import WORDS_OF_ALL, number
from simrl.gpu_hours import PARTS, Waterfall, undivided, waterfall
from simrl.html_report import pictures
from simrl.html_report.answer import of_runs
from simrl.html_report.lanes import timeline
from simrl.html_report.ledger import shared
from simrl.html_report.sources import Run, Runs
from simrl.metrics import window
from simrl.table import Column, columns_of, notes

# What the table's legend on the screen leaves out.
MEANINGS = {
    "system": "the schedule, and the parameters that differ from its defaults",
    "step s": "seconds a policy update",
    "GPU-h/1k samples": "hours of all GPUs, whatever they do, for 1,000 trained samples",
    "cost/1k samples": "the same at cluster.cost_per_gpu_hour",
}
LEAST_PATH_SHARE = 0.005


class Heading(NamedTuple):
    """Of a column of the table: its lines, what it means, whether its cells are words."""

    lines: str
    meaning: str
    text: bool


class Cell(NamedTuple):
    """A cell of a table: its text, and the number that it is sorted by (None: by its text)."""

    text: str
    value: float | None


def runs_context(found: Runs, most_spans: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """For the template, and for the page's own code. The timelines have at most so many spans together."""
    runs = found.runs
    rows, results = [run.row for run in runs], [run.result for run in runs]
    warmups = [run.warmup_steps for run in runs]
    falls = [_fall(run) for run in runs]
    explained = [_explained(run) for run in runs]
    columns = columns_of(rows)
    names = _names(runs)
    each = most_spans // len(runs)
    details = [_details(run, fall, said) for run, fall, said in zip(runs, falls, explained, strict=True)]
    data = {
        "figures": {
            "speed": pictures.speed_figure(rows),
            "gpu_seconds": pictures.gpu_seconds_figure(rows, _alike(falls)),
            "bubble": pictures.bubble_figure(rows, results, warmups),
            "staleness": pictures.staleness_figure(rows, results, warmups),
        },
        "runs": [
            {"name": name, "timeline": timeline(run.result, each), "figures": _run_figures(run)}
            for name, run in zip(names, runs, strict=True)
        ],
    }
    fastest = {row["variant"]: max(r["samples_per_s"] for r in rows if r["variant"] == row["variant"]) for row in rows}
    context = {
        "answer": of_runs(found),
        "headings": [_heading(column) for column in columns],
        "rows": [
            {
                "best": row["samples_per_s"] == fastest[row["variant"]],
                "first": i == 0 or row["variant"] != rows[i - 1]["variant"],
                "cells": [_cell(column.cell(row)) for column in columns],
            }
            for i, row in enumerate(rows)
        ],
        "notes": notes(rows),
        "runs": list(zip(names, details, strict=True)),
        "several": len(runs) > 1,
        "raced": len(runs) > 1 and not found.replayed,
        "chosen": 1 if found.replayed else rows.index(max(rows, key=lambda row: row["samples_per_s"])),
        "ledger": shared({name: run.result.metadata for name, run in zip(names, runs, strict=True)}),
        "scenarios": [(name, _yaml(run.result.metadata["scenario"])) for name, run in zip(names, runs, strict=True)],
        "agreement": _agreement(runs) if found.replayed else None,
        "carried": any(row["carried_share"] > 0 for row in rows),
        "updates": sorted({run.result.steps.num_rows - run.warmup_steps for run in runs}),
    }
    return context, data


def _names(runs: Sequence[Run]) -> list[str]:
    """System and variant; the folder where two are alike."""
    plain = [", ".join(str(part) for part in (run.row["system"], run.row["variant"]) if part) for run in runs]
    return [name if plain.count(name) == 1 else f"{name} ({run.name})" for name, run in zip(plain, runs, strict=True)]


def _fall(run: Run) -> Waterfall:
    return waterfall(run.result, *window(run.result, run.warmup_steps))


def _alike(falls: Sequence[Waterfall]) -> list[Waterfall]:
    """A real engine does not divide what it does besides decoding: beside one, nobody's is divided."""
    return [undivided(fall) for fall in falls] if any(fall.gpu_s["undivided"] for fall in falls) else list(falls)


def _explained(run: Run) -> Explanation | None:
    """None for a run with too little in it to be explained."""
    try:
        return explain_result(run.result)
    except InputError:
        return None


def _heading(column: Column) -> Heading:
    meaning = column.meaning or MEANINGS.get(column.name, "what varies")
    return Heading(column.heading, meaning, column.name in ("system", "variant"))


def _cell(text: str) -> Cell:
    """Sorted by the number that it begins with."""
    text = " ".join(text.split())
    found = re.match(r"-?[\d,]+(\.\d+)?", text)
    return Cell(text, float(found[0].replace(",", "")) if found and found[0].strip(",-") else None)


def _details(run: Run, fall: Waterfall, said: Explanation | None) -> dict[str, Any]:
    """Of one run, in words: its GPU time, its critical paths, what is known to go wrong."""
    per_sample = fall.per_sample
    parts = [
        (PARTS[key].words, PARTS[key].ideal, number(per_sample[key]), f"{gpu_s / fall.total_gpu_s:.1%}")
        for key, gpu_s in fall.gpu_s.items()
        if gpu_s >= 0.001 * fall.total_gpu_s
    ]
    paths: list[str] = []
    if said:
        length_s = sum(said.paths_s.values())
        paths = [
            f"{WORDS_OF_ALL.get(kind, kind)} {s / length_s:.0%}"
            for kind, s in said.paths_s.items()
            if length_s and s >= LEAST_PATH_SHARE * length_s
        ]
    return {
        "parts": parts,
        "total": number(fall.total_gpu_s / fall.samples),
        "paths": ", ".join(paths),
        "findings": said.findings if said else (),
        "drafts": run.row["accept_length"] is not None,
    }


def _run_figures(run: Run) -> dict[str, Any]:
    result = run.result
    figures = {
        "Off-policyness": pictures.run_staleness_figure(result, run.warmup_steps),
        "Updates": pictures.steps_figure(result),
        "Response lengths": pictures.lengths_figure(result),
        "Response lengths by update": pictures.step_lengths_figure(result),
    }
    return {
        **{title: figure for title, figure in figures.items() if figure is not None},
        **dict(pictures.acceptance_figures(result)),
    }


def _agreement(runs: Sequence[Run]) -> str:
    """As `simrl compare PREDICTED --measured MEASURED` prints it."""
    text = io.StringIO()
    try:
        print_agreement(
            agree(runs[0].result, runs[1].result), Console(file=text, width=100, highlight=False, markup=False)
        )
    except InputError as error:
        return str(error)
    return text.getvalue().rstrip()


def _yaml(data: Any) -> str:
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
