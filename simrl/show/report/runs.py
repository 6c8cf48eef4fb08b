"""The page of runs: the fastest and why, the table of a comparison, the pictures, and each run in
detail.

Invariant: all numbers and words on it come from the functions that `simrl compare` and `simrl
explain` print: `table`, `explanation`, `gpu_hours`, `diagnosis`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import yaml

from simrl.analysis.agreement import agree
from simrl.analysis.explanation import explain_result
from simrl.analysis.gpu_hours import PARTS, Waterfall, comparable, waterfall
from simrl.errors import InputError
from simrl.result.metrics import window
from simrl.show.figures.compare import (
    bubble_figure,
    comparison_figure,
    gpu_seconds_figure,
    staleness_figure,
)
from simrl.show.figures.one_run import run_figures
from simrl.show.inputs import calibration_lines, left_out_lines, shared
from simrl.show.report.answer import of_runs
from simrl.show.report.sources import Run, Runs
from simrl.show.style import Picture, rendered
from simrl.show.tables.agree import print_agreement
from simrl.show.tables.compare import columns_of, marked, notes
from simrl.show.tables.explain import path_shares
from simrl.show.tables.ranking import most_of_variants
from simrl.show.text import Screen, number

# Meanings that the legend on the screen leaves out.
MEANINGS = {
    "system": "the schedule, and the parameters that differ from its defaults",
    "step s": "seconds a policy update",
    "GPU-h/1k samples": "hours of all GPUs, whatever they do, for 1,000 trained samples",
    "cost/1k samples": "their cost at cluster.cost_per_gpu_hour",
}


def runs_context(source: Runs) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the context of the template, and the data of the page's script, without the
    timelines."""
    runs, several = source.runs, len(source.runs) > 1
    rows, names = marked([run.row for run in runs]), _names(runs)
    columns = columns_of(rows)
    falls = [waterfall(run.result, *window(run.result, run.warmup_steps)) for run in runs]
    speeds = [row["samples_per_s"] for row in rows]
    fastest = most_of_variants(rows)
    variants = [None, *(row["variant"] for row in rows)]
    context = {
        "answer": of_runs(source),
        "headings": [
            {
                "lines": column.heading,
                "meaning": column.meaning or MEANINGS.get(column.name, "what varies"),
                "text": column.name in ("system", "variant"),
            }
            for column in columns
        ],
        "rows": [
            {
                "best": row["samples_per_s"] == fastest[row["variant"]],
                "first": row["variant"] != before,
                "cells": [_cell(column.cell(row)) for column in columns],
            }
            for row, before in zip(rows, variants, strict=False)
        ],
        "notes": [
            *calibration_lines(run.result.metadata for run in runs),
            *notes(rows),
            *left_out_lines(run.result.metadata for run in runs),
        ],
        "runs": [
            (name, _details(run, fall)) for name, run, fall in zip(names, runs, falls, strict=True)
        ],
        "several": several,
        "raced": several and not source.replayed,
        "chosen": 1 if source.replayed else speeds.index(max(speeds)),
        "ledger": shared(
            {name: run.result.metadata for name, run in zip(names, runs, strict=True)}
        ),
        "scenarios": [  # sorted by key, as in a folder of results
            (name, yaml.safe_dump(run.result.metadata["scenario"], allow_unicode=True))
            for name, run in zip(names, runs, strict=True)
        ],
        "agreement": _agreement(runs) if source.replayed else None,
        "carried": any(row["carried_share"] > 0 for row in rows),
        "updates": sorted({run.result.steps.num_rows - run.warmup_steps for run in runs}),
    }
    return context, _pictures(runs, names, falls)


def _pictures(
    runs: Sequence[Run], names: Sequence[str], falls: Sequence[Waterfall]
) -> dict[str, Any]:
    """Return the pictures of all runs together, and the pictures of each run."""
    rows, results, warmups = (
        [run.row for run in runs],
        [run.result for run in runs],
        [run.warmup_steps for run in runs],
    )
    figures = {
        "speed": comparison_figure(rows),
        "gpu_seconds": gpu_seconds_figure(rows, comparable(falls)),
        "bubble": bubble_figure(rows, results, warmups),
        "staleness": staleness_figure(rows, results, warmups),
    }
    of_runs = [_svgs(run_figures(run.result, run.warmup_steps)) for run in runs]
    return {
        "figures": _svgs(figures),
        "runs": [
            {"name": name, "figures": of_run} for name, of_run in zip(names, of_runs, strict=True)
        ],
    }


def _svgs(figures: dict[str, Picture]) -> dict[str, str]:
    """Return the pictures as SVG. The page shows them as images, in which no markup of a name can
    act."""
    return {title: rendered(figure, "svg").decode() for title, figure in figures.items()}


def _names(runs: Sequence[Run]) -> list[str]:
    """Return system and variant of each run, and the folder if two runs have equal ones."""
    plain = [", ".join(filter(None, (run.row["system"], run.row["variant"]))) for run in runs]
    return [
        name if plain.count(name) == 1 else f"{name} ({run.name})"
        for name, run in zip(plain, runs, strict=True)
    ]


def _cell(text: str) -> dict[str, Any]:
    """Return a cell and the number at its beginning, by which it is sorted (None: by its text)."""
    text = " ".join(text.split())
    number_text = re.match(r"-?\d[\d,]*(\.\d+)?", text)
    return {"text": text, "value": float(number_text[0].replace(",", "")) if number_text else None}


def _details(run: Run, fall: Waterfall) -> dict[str, Any]:
    """Return the details of one run: its GPU time and, unless it is too short, its critical paths
    and known problems."""
    try:
        explained = explain_result(run.result)
    except InputError:
        explained = None
    return {
        "parts": [
            (
                PARTS[key].words,
                PARTS[key].ideal,
                number(fall.per_sample[key]),
                f"{gpu_s / fall.total_gpu_s:.1%}",
            )
            for key, gpu_s in fall.gpu_s.items()
            if gpu_s >= 0.001 * fall.total_gpu_s
        ],
        "total": number(fall.total_gpu_s / fall.samples),
        "paths": ", ".join(path_shares(explained)) if explained else "",
        "findings": explained.findings if explained else (),
        "drafts": run.row["accept_length"] is not None,
    }


def _agreement(runs: Sequence[Run]) -> str:
    """Return the output of `simrl compare PREDICTED --measured MEASURED`."""
    text = io.StringIO()
    try:
        print_agreement(agree(runs[0].result, runs[1].result), Screen(file=text, width=100))
    except InputError as error:
        return str(error)
    return text.getvalue().rstrip()
