"""Shared by the experiments: Markdown tables, pages with parts written anew, benchmark tables, recorded inputs."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from simrl.errors import InputError
from simrl.scenario.load import ScenarioFile, Setting
from simrl.scenario.model import Scenario
from simrl.trace.importers.logs import read_metrics
from simrl.trace.importers.verl import trace_from_verl_metrics
from simrl.trace.trace import Trace, write_trace

Small = Annotated[
    bool,
    typer.Option("--small", help="the smallest input, to see that it runs: figures mean nothing"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables (stable)")]


def shrink(constants: dict[str, Any], small: bool, **to: Any) -> None:
    """Give a script's constants these values in this process if it is to run on its smallest input (`--small`). Processes that
    it starts have the full ones, unless they get `--small` too: work sent to them gets what it needs as arguments."""
    if small:
        constants.update(to)


def line(cells: Sequence[Any]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return [line(heads), "|" + "---|" * len(heads), *map(line, rows)]


def markdown_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a Markdown table of rows whose keys are the heads."""
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def write_parts(page: Path, parts: Mapping[str, Sequence[str]]) -> None:
    """Replace the parts between `<!-- NAME -->` and `<!-- /NAME -->`. Raise `InputError` for a page without such a place."""
    text = page.read_text(encoding="utf-8")
    for name, lines in parts.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->\n")
        if not begin or not end:
            raise InputError(
                f"{page}: no place for {name}: write <!-- {name} --> and <!-- /{name} -->, a line each"
            )
        text = before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after
    page.write_text(text, encoding="utf-8")


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows as a CSV, with the keys of all of them as its columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
        )
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


def scenario_from(
    path: Path, settings: Mapping[str, Any], system: str | Mapping[str, Any]
) -> Scenario:
    """Return the scenario of a file with these settings, under one system. Raise `InputError`."""
    entry = {"name": system} if isinstance(system, str) else dict(system)
    overrides = [Setting(key, value, path.name) for key, value in settings.items()]
    return ScenarioFile(path, overrides).scenario([], entry)


@contextmanager
def errors_in_a_line(script: str) -> Iterator[None]:
    """Print an `InputError` in a line and exit with code 2."""
    try:
        yield
    except InputError as error:
        print(f"{script}: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def verl_trace(data: Path, path: Path) -> Trace:
    """Write the trace of the recorded verl run in the folder `data` to `path`; return it."""
    metrics = read_metrics(data / "verl_run" / "do7bl4gg" / "output.log", "verl")
    trace = trace_from_verl_metrics(metrics, 16, 0, name="verl_run", licence="Apache-2.0")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_trace(trace, path)
    return trace


def measure_engine(model: Path, output: Path, engine: Mapping[str, Any], **options: Any) -> Path:
    """Run `simrl measure` on this machine's CPU unless `output` exists; return `output`. `engine` and `options` are its options
    by name."""
    if not output.exists():
        given = {
            "model": model,
            "device": "cpu",
            "gpu": "cpu",
            "output": output,
            **engine,
            **options,
        }
        words = [
            word
            for name, value in given.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        subprocess.run(
            [sys.executable, "-m", "simrl.commands.cli", "measure", *words],
            check=True,
            stdout=sys.stderr,
        )
    return output


def median_s(run: Callable[[], object], repeats: int = 3, warm_up: bool = True) -> float:
    if warm_up:
        run()
    seconds = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_s)
    return median(seconds)


def bench_row(
    what: str, value: float, bar: float | None = None, unit: str = "s", **others: Any
) -> dict[str, Any]:
    """Return a figure of a benchmark beside its bar."""
    return {"what": what, "value": value, "unit": unit, "bar": bar, **others}


def print_bench(
    rows: Sequence[Mapping[str, Any]], as_json: bool, others: Sequence[str] = ()
) -> None:
    """Print the rows of a benchmark; `others` are further columns, such as another implementation's figures."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("what", "measured", "bar", "measured / bar", *others)
    for row in rows:
        value, bar, unit = row["value"], row["bar"], row["unit"]
        beside = ("", "") if bar is None else (f"{bar:g} {unit}", f"{value / bar:.2f}")
        more = ("" if row.get(name) is None else f"{row[name]:.2f}" for name in others)
        table.add_row(row["what"], f"{value:.3g} {unit}", *beside, *more)
    Console(width=150).print(table)
