"""`python -m experiments.reproduce`: published results and real runs, predicted from the inputs that are stated of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from simrl.commands.cli import main
from simrl.errors import InputError, meant

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.reproduce.predict import Prediction, Task

COMMAND = "python -m experiments.reproduce"
EXAMPLES = ("areal-eta", "--samples 8", "--real nemo-8b-sync")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Board(NamedTuple):
    """A board: the tasks to predict, the content of `--json` made of their predictions, and its view on a screen."""

    todo: list[Task]
    content: Callable[[Mapping[str, Prediction]], dict[str, Any]]
    show: Callable[[Sequence[dict[str, Any]], Console], None]


@app.command(
    "reproduce", epilog="Examples:  " + "   |   ".join(f"{COMMAND} {words}" for words in EXAMPLES)
)
def reproduce(
    rows: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="rows of the board (default: all of them)"),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            min=0,
            max=1024,
            help="sets of assumed inputs that are drawn from their ranges, beside the middle",
        ),
    ] = 4,
    jobs: Annotated[int, typer.Option(min=1, help="processes on this machine")] = os.cpu_count()
    or 1,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="a JSON file to write, as --json prints it"),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="print JSON on stdout; its keys are stable: simrl_version, samples, totals, rows, with id, published, "
            "predicted, low, high, error, covered, ledger, asked, why_not, refused; with --real also ledgers, and of rows "
            "quantity, measured, left_out, left_out_error, setup, open_inputs, driver, scored",
        ),
    ] = False,
    real: Annotated[
        bool,
        typer.Option(
            "--real", help="real runs that others measured, in place of published results"
        ),
    ] = False,
    data: Annotated[
        Path, typer.Option(help="with --real: the folder with the measurements")
    ] = Path("../shared/data"),
    page: Annotated[Path | None, typer.Option(help="with --real: a Markdown page to write")] = None,
    accuracy: Annotated[
        Path | None,
        typer.Option(
            help="with --real and all rows: the history of its errors, a CSV file that gets the lines of this code; "
            "exit code 1 if a median is 2 points worse than before"
        ),
    ] = None,
) -> None:
    """Predict what papers published, or what real runs took (--real), from their inputs; say how far off it is.

    What is not stated is a range with a reason, set once for all rows of a paper or setup: the prediction is an interval, and a
    middle. Nothing is fitted to an outcome. One row alone prints its inputs, each with where it stands or why it is assumed.
    """
    from rich.progress import TimeRemainingColumn

    from experiments.reproduce.predict import predict
    from simrl import __version__
    from simrl.files import write_whole_file
    from simrl.show.text import Screen
    from simrl.study.progress import compile_kernels, progress_bar

    for name, path in {"--page": page, "--accuracy": accuracy}.items():
        if path is not None and not real:
            raise InputError(f"{name}: is of the board of real runs; add --real")
    if accuracy is not None and rows:
        raise InputError("--accuracy: is of the whole board; leave out the rows")
    board = real_runs(rows or [], samples, data) if real else published(rows or [], samples)
    with ExitStack() as files:  # tells before the runs if it cannot write
        written = {
            path: files.enter_context(write_whole_file(path))
            for path in (output, page)
            if path is not None
        }
        if board.todo:
            compile_kernels()
        with progress_bar(TimeRemainingColumn(), speed_over_s=600.0) as bar:
            task = bar.add_task("sets of inputs", total=len(board.todo))
            predicted = predict(board.todo, jobs, lambda: bar.advance(task))
        content = board.content(predicted)
        head = {"simrl_version": __version__, "samples": samples}
        text = json.dumps({**head, **content}, indent=1, ensure_ascii=False, allow_nan=False)
        if output is not None:
            written[output].write_text(text + "\n", encoding="utf-8")
        if page is not None:
            from experiments.reproduce.real_page import page as made

            written[page].write_text(made(content["rows"], samples), encoding="utf-8")
    if as_json:
        print(text)
    else:
        console = Screen()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = 200
        board.show(content["rows"], console)
        for path in written:
            console.print(f"Written to {path}", soft_wrap=True)
    if real and not rows:
        from experiments.reproduce.real_scores import require_causes

        require_causes(content["rows"])
    if accuracy is not None:
        from experiments.reproduce.real_accuracy import record

        record(accuracy, content["totals"])


def published(rows: Sequence[str], samples: int) -> Board:
    """Return the board of published results. Raise `InputError` for an unknown row."""
    from experiments.reproduce.board import board, in_words, print_board, require_published, totals
    from experiments.reproduce.predict import tasks
    from experiments.reproduce.score import published_rows

    require_published()
    known = published_rows()
    wanted = list(dict.fromkeys(rows or known))
    for row in wanted:
        if row not in known:
            raise InputError(
                f"{row}: no published row{meant(row, known)}; there are {', '.join(known)}"
            )

    def content(predicted: Mapping[str, Prediction]) -> dict[str, Any]:
        entries = board(wanted, predicted)
        return {"totals": totals(entries), "rows": entries}

    def show(entries: Sequence[dict[str, Any]], console: Console) -> None:
        print_board(entries, console)
        console.print(f"\n{in_words(entries)}")

    return Board(tasks({row: len(known[row].elements) for row in wanted}, samples), content, show)


def real_runs(rows: Sequence[str], samples: int, data: Path) -> Board:
    """Return the board of real runs. Raise `InputError` for an unknown row, and for data that is missing or damaged."""
    from experiments.reproduce.board import ledger_of
    from experiments.reproduce.predict import FAMILIES, tasks
    from experiments.reproduce.real_board import (
        all_rows,
        entries_of,
        print_entries,
        training_steps,
        wanted_rows,
    )
    from experiments.reproduce.real_measured import measured
    from experiments.reproduce.real_scores import totals
    from experiments.reproduce.real_setups import left_out_tasks

    measured(data)  # damaged data ends here, not after the runs
    wanted, known = wanted_rows(rows, training_steps(data)), all_rows()
    counts = {row: len(known[row].names) for row in wanted if row in known}

    def content(predicted: Mapping[str, Prediction]) -> dict[str, Any]:
        entries = entries_of(wanted, predicted, data)
        ledgers = dict.fromkeys(entry["ledger"] for entry in entries if entry["ledger"])
        return {
            "totals": totals(entries),
            "rows": entries,
            "ledgers": {name: ledger_of(name) for name in ledgers},
        }

    todo = tasks(counts, samples, FAMILIES, data=str(data))
    return Board([*todo, *left_out_tasks(counts, data=str(data))], content, print_entries)


if __name__ == "__main__":
    main(app)
