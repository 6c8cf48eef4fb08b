"""`simrl explain RESULT` and `simrl diff A B`: where the GPU-hours of a run went, and what made one run faster than another."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

Folder = Annotated[Path, typer.Argument(metavar="RESULT", help="a run's folder, or a replay's")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of tables (its keys are stable)")]


def explain(
    folder: Folder,
    step: Annotated[
        int | None, typer.Option(help="the update whose critical path is shown (default: one of median length)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say where the GPU-hours of a run went, what held its updates up, and which known signs of trouble it shows."""
    from simrl.explanation import explain_result
    from simrl.explanation_table import print_explanation
    from simrl.result import find_result

    result = find_result(folder)
    try:
        explanation = explain_result(result, step)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error
    if as_json:
        print(json.dumps(explanation.as_json(), indent=1))
    else:
        print_explanation(explanation, _console())


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="a run's folder, or a replay's")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another's")],
    as_json: AsJson = False,
) -> None:
    """Say what made run B faster than run A: the difference of where their GPU-hours went, largest part first."""
    from simrl.explanation import diff_results
    from simrl.explanation_table import print_difference
    from simrl.result import find_result

    results = find_result(a), find_result(b)
    try:
        difference = diff_results(*results)
    except InputError as error:
        raise InputError(f"{a}, {b}: {error}") from error
    if as_json:
        print(json.dumps(asdict(difference), indent=1))
    else:
        print_difference(difference, _console())


def _console(**options: Any) -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, **options)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 10_000  # a file or a pipe: nothing has to be left out or broken
    return console
