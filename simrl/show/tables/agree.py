"""An agreement on the screen: the updates, the errors, the decisions.

Invariant: fits into 80 columns; rows that are left out for want of room are counted, and are in
agreement.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from rich.console import Console
from rich.table import Table

from simrl.analysis.agreement import Agreement, Both, Share, Spread, UpdatePart
from simrl.show.tables.compare import not_drafted
from simrl.show.text import Column, Line, aligned, fitting, folded, plain_table, say

MEANING = (
    "Rollout clock: seconds in which some worker rolled out; wall clock: all seconds; both up to the last update. A sample's "
    "end is on the rollout clock, its latency (from its start) on the wall clock. Bubble: idle share of rollout workers. "
    "Error: predicted / measured - 1, of shares the difference in percentage points; MAPE: its mean size over samples. "
    "Dispatch and seal: the start of a group's first and the end of its last response; ages: updates between the weights that "
    "began or ended a response and the update that trained it; alone: events that only one run has. In "
    "agreement.json the rollout clock is rollout_s, its error makespan_err"
)
KINDS = {
    "dispatch": "Dispatch, s",
    "seal": "Seal, s",
    "sync": "Weight sync, s",
    "update": "Update, s",
    "age_begun": "Age begun",
    "age_sealed": "Age sealed",
}
MOST_ROWS = 32
MOST_DIFFERENCES = 10
POINTS = ("bubble_err", "acceptance_err")  # differences of shares, in percentage points


def print_agreement(agreement: Agreement, console: Console, spread: Spread | None = None) -> None:
    """Print the updates at the workers, the errors (with the spread of repeats, if given) and the
    differences."""
    if agreement.parts:
        with folded(console, "The updates at the workers, one by one"):
            _print_parts(agreement, console)
    console.print(_errors(agreement, spread))
    if agreement.samples:
        console.print(_instants(agreement))
        say(console, _ages(agreement))
        with folded(console, "What the rows mean"):
            say(console, MEANING)
    # measured results do not say what vLLM's own drafters do
    drafted = [] if agreement.not_drafted is None else [not_drafted(agreement.not_drafted)]
    say(console, *_missing(agreement), *drafted, verdict(agreement))
    shown = sorted(agreement.differences, key=lambda d: d.near_tie_ms is not None)[
        :MOST_DIFFERENCES
    ]
    if shown:
        console.print(aligned(((f"{_seconds(d.at_s)} s", d.text) for d in shown), "ll"))
    if len(shown) < len(agreement.differences):
        say(console, f"… and {len(agreement.differences) - len(shown):,} more, in agreement.json")


def verdict(agreement: Agreement) -> str:
    """Return a line on the decisions of both runs: equal, or the number of differences."""
    if not agreement.samples:
        return "Decisions: no sample finished in both runs; there is nothing to compare"
    if not agreement.differences:
        return f"Decisions: equal for {agreement.samples:,} samples (workers, migrations, order of starts, weights)"
    real = len(agreement.real_differences)
    ties = len(agreement.differences) - real
    known = (
        f" (two events at most {1000 * agreement.near_tie_s:.3g} ms apart that changed places)"
        if ties
        else ""
    )
    return (
        f"Decisions: {_count(real, 'real difference')}, {_count(ties, 'near-tie')}{known}; samples are named "
        "prompt/sample/epoch"
    )


def repeats_line(agreements: Sequence[Agreement], pass_spread: float | None) -> str:
    """Return a line with the spread of the machine's own times and the prediction's error of each
    replay.

    `pass_spread` is the spread of the repeats of a pass when the profile was measured.
    """
    compared = [
        a
        for a in agreements
        if a.figures.rollout_s.measured is not None and a.errors.makespan_err is not None
    ]
    if len(compared) < 2:
        passes = (
            ""
            if pass_spread is None
            else f"Repeats of a pass in the profile differed by {pass_spread:.1%}. "
        )
        return f"{passes}One replay does not show how far this machine's own times are apart: add --repeats 3"
    clocks = [a.figures.rollout_s.measured or 0.0 for a in compared]
    errors = ", ".join(f"{a.errors.makespan_err:+.1%}" for a in compared)
    return (
        f"Rollout clock of {len(clocks)} replays: {', '.join(map(_seconds, clocks))} s; the prediction is {errors} off. "
        f"Two replays differ by up to {max(clocks) / min(clocks) - 1:.1%}: no prediction can be shown to be closer"
    )


def error_rows(agreement: Agreement) -> list[tuple[str, str, str, str, str]]:
    """Return rows of quantity, predicted, measured, error in words, and the error's name in
    `Errors`."""
    a = agreement.figures
    compared: list[tuple[str, Both[float | None] | None, Callable[[float], str], str]] = [
        ("Rollout clock", a.rollout_s, lambda s: f"{_seconds(s)} s", "makespan_err"),
        ("Wall clock", a.wall_s, lambda s: f"{_seconds(s)} s", "wall_err"),
        ("A sample's end", None, _seconds, "sample_mape"),
        ("A sample's latency", None, _seconds, "latency_mape"),
        ("Rollout bubble", a.bubble, "{:.1%}".format, "bubble_err"),
        ("Accepted of drafted", a.acceptance, "{:.1%}".format, "acceptance_err"),
        ("Tokens a draft", a.accept_length, "{:.2f}".format, "accept_length_err"),
    ]
    rows = []
    for name, both, text, error in compared:
        figures = (None, None) if both is None else (both.predicted, both.measured)
        predicted, measured = ("" if figure is None else text(figure) for figure in figures)
        rows.append(
            (name, predicted, measured, _error(error, getattr(agreement.errors, error)), error)
        )
    return [row for row in rows if any(row[1:4])]


def _errors(agreement: Agreement, spread: Spread | None) -> Table:
    headings = ["", "predicted", "measured", "error"]
    rows = error_rows(agreement)
    if spread is None:
        return plain_table(headings, [row[:4] for row in rows])
    repeats = (spread.mean, spread.largest)
    cells = [
        (*row[:4], *(_error(row[4], getattr(errors, row[4]), "-") for errors in repeats))
        for row in rows
    ]
    return plain_table([*headings, f"{spread.repeats} repeats:\nmean", "largest"], cells)


def _instants(agreement: Agreement) -> Table:
    """Return a row for each kind of events: how far apart they are, and which is furthest."""
    headings = ["predicted - measured", "events", "alone", "median", "largest", "at"]
    cells = [
        (
            *(KINDS[i.kind], f"{len(i.events):,}", f"{i.alone[0]} / {i.alone[1]}"),
            *(f"{i.median:+.3g}", f"{i.largest:+.3g}", i.at),
        )
        for i in agreement.instants
        if i.events
    ]
    return plain_table(headings, cells, left=(0, 5))


def _ages(agreement: Agreement) -> str:
    """Return a line with the ages of responses in both runs, in versions when they were sealed."""
    (sealed,) = (i.events for i in agreement.instants if i.kind == "age_sealed")
    runs = (Counter(int(event[run]) for event in sealed) for run in (1, 2))
    shares = (
        ", ".join(f"{age}: {n / len(sealed):.0%}" for age, n in sorted(c.items())) or "none"
        for c in runs
    )
    return "Age sealed, share of responses: {} predicted; {} measured".format(*shares)


def _print_parts(agreement: Agreement, console: Console) -> None:
    """Print a row for each update and worker. If these are too many, print one for each update; if
    these are still too many, only the rows furthest apart."""
    parts: Sequence[UpdatePart] = agreement.parts
    lines = []
    if len(parts) > MOST_ROWS:
        parts = agreement.steps
        lines.append("A row is an update, all workers together; agreement.json has every worker")
    if len(parts) > MOST_ROWS:
        worst = sorted(parts, key=_apart_s, reverse=True)[:MOST_ROWS]
        lines.append(
            f"Shown are the {MOST_ROWS} of {len(parts):,} updates whose ends are furthest apart"
        )
        parts = [part for part in parts if part in worst]
    columns = [column for column in COLUMNS if any(map(column.cell, parts))]
    table, left_out = fitting(console, columns, partial(_parts_table, parts))
    say(
        console,
        "Updates at the workers: predicted / measured, one number if they are equal",
        style="bold",
    )
    console.print(table)
    if left_out:
        lines.append(f"Left out for want of room, but in agreement.json: {', '.join(left_out)}")
    say(console, *lines)
    console.print()


def _parts_table(parts: Sequence[UpdatePart], columns: Sequence[Column]) -> Table:
    lines = []
    for part, after in zip(parts, [*parts[1:], parts[-1]], strict=True):
        last = after.step != part.step and part.worker is not None
        lines.append(Line([column.cell(part) for column in columns], end_section=last))
    return plain_table([column.heading for column in columns], lines, left=())


def _both(text: Callable[[Share], str]) -> Callable[[UpdatePart], str]:
    """Return a function for cells with this text of both runs."""

    def cell(part: UpdatePart) -> str:
        predicted, measured = (
            "-" if share is None else text(share) for share in (part.predicted, part.measured)
        )
        return predicted if predicted == measured else f"{predicted} / {measured}"

    return cell


COLUMNS = (
    Column("update", lambda part: str(part.step)),
    Column("worker", lambda part: "" if part.worker is None else str(part.worker)),
    Column("start s", _both(lambda share: _seconds(share.started_s)), turn=2),
    Column("end s", _both(lambda share: _seconds(share.ended_s))),
    Column("tokens", _both(lambda share: f"{share.tokens:,}"), turn=1),
    Column("samples\nat a time", _both(lambda share: f"{share.batch:.1f}"), turn=4),
    Column(
        "tokens\na draft",
        _both(lambda share: "" if share.accept_length is None else f"{share.accept_length:.2f}"),
        turn=3,
    ),
    Column("weights", _both(lambda share: _ranges(share.policy_versions))),
)


def _ranges(versions: Sequence[int]) -> str:
    """Return 2, 3, 4, 7 as 2-4,7."""
    groups = groupby(enumerate(versions), key=lambda pair: pair[1] - pair[0])
    runs = [[version for _, version in group] for _, group in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _missing(agreement: Agreement) -> list[str]:
    """Return lines on updates and samples that only one of the runs reached."""
    lines = []
    updates, alone = agreement.updates, agreement.finished_in_one
    if updates.predicted != updates.measured:
        made = f"{updates.predicted:,} predicted, {updates.measured:,} measured"
        lines.append(f"Updates: {made}; compared up to the last that both made")
    if alone.predicted or alone.measured:
        in_one = f"{alone.predicted:,} finished only in the predicted one, {alone.measured:,} only in the measured one"
        lines.append(
            f"Samples: {agreement.samples:,} finished in both runs and are compared; {in_one}"
        )
        alone_n, ahead_n = (
            both.predicted + both.measured for both in (alone, agreement.finished_ahead)
        )
        if ahead_n:
            which = f"{'those' if ahead_n == alone_n else f'{ahead_n:,} of those'} that only one run finished are such"
            lines.append(
                f"A run ends at its last update, with samples for later ones under way: {which}"
            )
    return lines


def _apart_s(part: UpdatePart) -> float:
    if part.predicted is None or part.measured is None:
        return float("inf")
    return abs(part.predicted.ended_s - part.measured.ended_s)


def _seconds(value: float) -> str:
    return f"{value:,.{3 if value < 10 else 2 if value < 1000 else 1}f}"


def _error(key: str, value: float | None, sign: str = "+") -> str:
    if value is None:
        return ""
    if key in POINTS:
        return f"{100 * value:{sign}.2f} points"
    return f"{value:.2%} MAPE" if key.endswith("mape") and sign == "+" else f"{value:{sign}.2%}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
