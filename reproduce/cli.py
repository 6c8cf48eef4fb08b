"""`simrl reproduce`: published results, predicted from the inputs that their papers state."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from simrl.errors import InputError, meant

EXAMPLE = (
    "Examples:  simrl reproduce areal-eta   |   simrl reproduce --samples 8   |   simrl reproduce --json > board.json"
)


def reproduce(
    rows: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="rows of published results (default: all of them)")
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            min=0, max=1024, help="sets of assumed inputs that are drawn from their ranges, beside the middle"
        ),
    ] = 4,
    jobs: Annotated[int, typer.Option(min=1, help="processes on this machine")] = os.cpu_count() or 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="a JSON file to write, as --json prints it")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="print JSON on stdout; its keys are stable: simrl_version, samples, totals, rows, with id, published, "
            "predicted, low, high, error, covered, ledger, asked, why_not, refused",
        ),
    ] = False,
) -> None:
    """Predict what papers published, by running their schedules on their inputs; say how far off it is.

    What a paper does not state is a range with a reason, set once for all of its rows: the prediction is an interval, and
    a middle. Nothing is fitted to an outcome. One row alone prints its inputs, each with where it stands or why it is assumed.
    """
    from rich.console import Console
    from rich.progress import TimeRemainingColumn

    from reproduce.board import board, in_words, print_board, require_published, totals
    from reproduce.predict import predict, tasks
    from reproduce.score import published_rows
    from simrl import __version__
    from simrl.files import write_whole_file
    from simrl.study.progress import compile_kernels, progress_bar

    require_published()
    known = published_rows()
    wanted = list(dict.fromkeys(rows or known))
    for row in wanted:
        if row not in known:
            raise InputError(f"{row}: no published row{meant(row, known)}; there are {', '.join(known)}")
    todo = tasks({row: len(known[row].elements) for row in wanted}, samples)
    with (
        nullcontext() if output is None else write_whole_file(output) as temporary
    ):  # tells before the runs if it cannot
        if todo:
            compile_kernels()
        with progress_bar(TimeRemainingColumn(), speed_over_s=600.0) as bar:
            task = bar.add_task("sets of inputs", total=len(todo))
            predicted = predict(todo, jobs, lambda: bar.advance(task))
        entries = board(wanted, predicted)
        text = json.dumps(
            {"simrl_version": __version__, "samples": samples, "totals": totals(entries), "rows": entries},
            indent=1,
            ensure_ascii=False,
            allow_nan=False,
        )
        if temporary is not None:
            temporary.write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    print_board(entries, console)
    console.print(f"\n{in_words(entries)}")
    if output is not None:
        console.print(f"Written to {output}", soft_wrap=True)
