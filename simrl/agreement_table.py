"""An agreement on the screen: what the updates took, the errors, the decisions.

Invariant: fits into 80 columns; what is left out for want of room is said, and is in agreement.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simrl.agreement import Agreement, Both, Part, Share, Spread
from simrl.page import folded
from simrl.table import not_drafted

MEANING = (
    "Rollout clock: seconds in which some worker rolled out; wall clock: all seconds; both up to the last update. A sample's "
    "end is on the rollout clock, its latency (from its start) on the wall clock. Bubble: idle share of rollout workers. "
    "Error: predicted / measured - 1, of shares the difference in percentage points; MAPE: its mean size over samples. In "
    "agreement.json the rollout clock is rollout_s, its error makespan_err"
)
MOST_ROWS = 32
MOST_DIFFERENCES = 10
POINTS = ("bubble_err", "acceptance_err")  # differences of shares, in percentage points


def print_agreement(agreement: Agreement, console: Console, spread: Spread | None = None) -> None:
    """The parts of the run, the errors (beside them the spread of repeats, where there is one) and the differences."""
    if agreement.parts:
        with folded(console, "The updates at the workers, one by one"):
            _print_parts(agreement, console)
    console.print(_errors(agreement, spread))
    if agreement.samples:
        with folded(console, "What the rows mean"):
            console.print(Text(MEANING))
    for line in [*_missing(agreement), *_not_drafted(agreement), verdict(agreement)]:
        console.print(Text(line))
    shown = sorted(agreement.differences, key=lambda d: d.near_tie_ms is not None)[:MOST_DIFFERENCES]
    table = Table.grid(padding=(0, 2, 0, 0))
    for d in shown:
        table.add_row(Text(f"{_seconds(d.at_s)} s"), Text(d.text))
    if shown:
        console.print(table)
    if len(shown) < len(agreement.differences):
        console.print(Text(f"… and {len(agreement.differences) - len(shown):,} more, in agreement.json"))


def verdict(agreement: Agreement) -> str:
    """Whether the same was decided, in a line."""
    if not agreement.samples:
        return "Decisions: no sample finished in both runs; there is nothing to compare"
    if not agreement.differences:
        return f"Decisions: the same for {agreement.samples:,} samples (workers, migrations, order of starts, weights)"
    real = len(agreement.real_differences)
    ties = len(agreement.differences) - real
    known = f" (two events at most {1000 * agreement.near_tie_s:.3g} ms apart that changed places)" if ties else ""
    return (
        f"Decisions: {_count(real, 'real difference')}, {_count(ties, 'near-tie')}{known}; samples are named "
        "prompt/sample/epoch"
    )


def error_rows(agreement: Agreement) -> list[tuple[str, str, str, str, str]]:
    """What is compared, predicted, measured, the error in words, and the error's name in `Errors`."""
    a, e = agreement.figures, agreement.errors

    def row(
        name: str, both: Both[float | None] | None, value: Callable[[float], str], error: str
    ) -> tuple[str, str, str, str, str]:
        p, m = (None, None) if both is None else (both.predicted, both.measured)
        predicted, measured = ("" if each is None else value(each) for each in (p, m))
        return name, predicted, measured, _error(error, getattr(e, error)), error

    rows = [
        row("Rollout clock", a.rollout_s, _with_unit, "makespan_err"),
        row("Wall clock", a.wall_s, _with_unit, "wall_err"),
        row("A sample's end", None, _seconds, "sample_mape"),
        row("A sample's latency", None, _seconds, "latency_mape"),
        row("Rollout bubble", a.bubble, _share, "bubble_err"),
        row("Accepted of drafted", a.acceptance, _share, "acceptance_err"),
        row("Tokens a draft", a.accept_length, "{:.2f}".format, "accept_length_err"),
    ]
    return [each for each in rows if any(each[1:4])]


def _errors(agreement: Agreement, spread: Spread | None) -> Table:
    table = _new_table()
    table.add_column("")
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    if spread is not None:
        table.add_column(f"{spread.repeats} repeats:\nmean", justify="right", no_wrap=True)
        table.add_column("largest", justify="right", no_wrap=True)
    for name, predicted, measured, error, key in error_rows(agreement):
        repeats = [] if spread is None else [_size(key, getattr(s, key)) for s in (spread.mean, spread.largest)]
        table.add_row(*map(Text, [name, predicted, measured, error, *repeats]))
    return table


def _print_parts(agreement: Agreement, console: Console) -> None:
    """A row an update and worker; where these are too many a row an update; or only the rows that are furthest apart."""
    parts: Sequence[Part] = agreement.parts
    said = []
    if len(parts) > MOST_ROWS:
        parts = agreement.steps
        said.append("A row is an update, all workers together; agreement.json has every worker")
    if len(parts) > MOST_ROWS:
        worst = sorted(parts, key=_apart_s, reverse=True)[:MOST_ROWS]
        said.append(f"Shown are the {MOST_ROWS} of {len(parts):,} updates whose ends are furthest apart")
        parts = [part for part in parts if part in worst]
    columns, left_out = [column for column in COLUMNS if any(map(column.cell, parts))], []
    unlimited = console.options.update(max_width=10_000)
    while console.measure(table := _parts_table(parts, columns), options=unlimited).maximum > console.width:
        first = min((column for column in columns if column.turn), key=lambda column: column.turn, default=None)
        if first is None:
            break
        columns.remove(first)
        left_out.append(first.heading.replace("\n", " "))
    console.print(
        Text("Updates at the workers: predicted / measured, one number where they are the same", style="bold")
    )
    console.print(table)
    if left_out:
        said.append(f"Left out for want of room, but in agreement.json: {', '.join(left_out)}")
    for line in said:
        console.print(Text(line))
    console.print()


def _parts_table(parts: Sequence[Part], columns: Sequence[_Column]) -> Table:
    table = _new_table()
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        last = after is not None and after.step != part.step and part.worker is not None
        table.add_row(*(Text(column.cell(part)) for column in columns), end_section=last)
    return table


def _new_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


class _Column(NamedTuple):
    """A heading, what stands under it (nothing, if empty everywhere), and its turn to be left out (0: never)."""

    heading: str
    cell: Callable[[Part], str]
    turn: int = 0


def _both(text: Callable[[Share], str]) -> Callable[[Part], str]:
    """The cell with this text of both runs."""

    def cell(part: Part) -> str:
        predicted, measured = ("-" if share is None else text(share) for share in (part.predicted, part.measured))
        return predicted if predicted == measured else f"{predicted} / {measured}"

    return cell


COLUMNS = (
    _Column("update", lambda part: str(part.step)),
    _Column("worker", lambda part: "" if part.worker is None else str(part.worker)),
    _Column("start s", _both(lambda share: _seconds(share.started_s)), turn=2),
    _Column("end s", _both(lambda share: _seconds(share.ended_s))),
    _Column("tokens", _both(lambda share: f"{share.tokens:,}"), turn=1),
    _Column("samples\nat a time", _both(lambda share: f"{share.batch:.1f}"), turn=4),
    _Column(
        "tokens\na draft",
        _both(lambda share: "" if share.accept_length is None else f"{share.accept_length:.2f}"),
        turn=3,
    ),
    _Column("weights", _both(lambda share: _ranges(share.policy_versions))),
)


def _ranges(versions: Sequence[int]) -> str:
    """2, 3, 4, 7 as 2-4,7."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][-1] == version - 1:
            runs[-1] = [runs[-1][0], version]
        else:
            runs.append([version])
    return ",".join("-".join(map(str, run)) for run in runs)


def _missing(agreement: Agreement) -> list[str]:
    """What only one of the runs came to."""
    lines = []
    updates, alone = agreement.updates, agreement.finished_in_one
    if updates.predicted != updates.measured:
        lines.append(
            f"Updates: {updates.predicted:,} predicted, {updates.measured:,} measured; compared up to the last that both made"
        )
    if alone.predicted or alone.measured:
        lines.append(
            f"Samples: {agreement.samples:,} finished in both runs and are compared; {alone.predicted:,} finished only in the "
            f"predicted one, {alone.measured:,} only in the measured one"
        )
        alone_n, ahead_n = (both.predicted + both.measured for both in (alone, agreement.finished_ahead))
        if ahead_n:
            which = "those" if ahead_n == alone_n else f"{ahead_n:,} of those"
            lines.append(
                f"A run ends at its last update, with samples for later ones under way: {which} that only one run finished "
                "are such"
            )
    return lines


def _not_drafted(agreement: Agreement) -> list[str]:
    """A method that drafted nothing where it was predicted; what vLLM's own drafters do, measured results do not say."""
    return [] if agreement.not_drafted is None else [not_drafted(agreement.not_drafted)]


def _apart_s(part: Part) -> float:
    if part.predicted is None or part.measured is None:
        return float("inf")
    return abs(part.predicted.ended_s - part.measured.ended_s)


def _seconds(value: float) -> str:
    return f"{value:,.{3 if value < 10 else 2 if value < 1000 else 1}f}"


def _with_unit(value: float) -> str:
    return f"{_seconds(value)} s"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _error(key: str, value: float | None) -> str:
    if value is None:
        return ""
    if key.endswith("mape"):
        return f"{value:.2%} MAPE"
    return f"{100 * value:+.2f} points" if key in POINTS else f"{value:+.2%}"


def _size(key: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.2f} points" if key in POINTS else f"{value:.2%}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
