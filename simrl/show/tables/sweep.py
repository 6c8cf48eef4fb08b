"""A sweep on the screen: its fastest points, the number of points, and the failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from simrl.show.tables.compare import GROWING, left_open
from simrl.show.text import Column, fitting, formatted, plain_table, say, shown_value
from simrl.study.sweep import SweepPlan, Swept

SHOWN = 10
# Heading, key, format, and the turn in which a column is left out for want of room (0: never, as
# the names of points).
MEASURES = (
    ("samples/s", "samples_per_s", "{:.3g}", 0),
    ("speed-up", "speedup", "{:.2f}×", 4),
    ("rollout\nbubble", "rollout_bubble", "{:.0%}", 6),
    ("occupancy", "occupancy", "{:.0%}", 1),
    ("train\nidle", "train_idle", "{:.0%}", 5),
    ("off-policy", "off_policyness_mean", "{:.2f}", 3),
    ("GPU-h/1k\nsamples", "gpu_hours_per_1k_samples", "{:.3g}", 2),
)


def print_sweep(planned: SweepPlan, swept: Swept, console: Console) -> None:
    """Print the fastest points as a table, the number of points, and the failures."""
    best = sorted(
        (row for row in swept.rows if row["error"] is None), key=lambda row: -row["samples_per_s"]
    )[:SHOWN]
    points = len(swept.rows)
    if best:
        say(console, f"The fastest {len(best)} of {points} points (speed-up over the first point)")
        table, left_out = fitting(console, _columns(planned.keys), partial(_table, best))
        console.print(table)
        if left_out:
            say(
                console,
                f"Left out for want of room, but in the sweep's table: {', '.join(left_out)}",
            )
        if not all(row["settled"] for row in best):
            say(console, f"↑ {GROWING}")
        say(console, *left_open(swept.fastest))
        named = (row.get("without_effect") or "" for row in swept.rows)
        unused = Counter(words for several in named for words in several.split("; ") if words)
        say(
            console,
            *(
                f"Without effect at {count} of {points} points: {words}"
                for words, count in unused.items()
            ),
        )
        console.print()
    stored = f", {points - swept.simulated} were there" if swept.simulated < points else ""
    equal = (
        f", {planned.combinations} combinations, some of them the same"
        if planned.combinations > points
        else ""
    )
    say(console, f"{points} points, {swept.simulated} simulated now{stored}{equal}.")
    failed = [row for row in swept.rows if row["error"] is not None]
    if failed:
        say(console, f"{len(failed)} failed; point {failed[0]['point']}: {failed[0]['error']}")


def _columns(keys: Sequence[str]) -> list[Column]:
    """Return the columns of points: number, varied keys (by their last part), measures."""

    def varied(key: str) -> Column:
        return Column(
            key.removesuffix(".name").rpartition(".")[2], lambda row: shown_value(row[key])
        )

    def measure(heading: str, key: str, form: str, turn: int) -> Column:
        def cell(row: Mapping[str, Any]) -> str:
            return formatted(row[key], form) + " ↑" * (
                key == "off_policyness_mean" and not row["settled"]
            )

        return Column(heading, cell, turn=turn)

    point = Column("point", lambda row: str(row["point"]))
    return [point, *map(varied, keys), *(measure(*entry) for entry in MEASURES)]


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> Table:
    cells = [[column.cell(row) for column in columns] for row in rows]
    names = [i for i, column in enumerate(columns) if column.name == "system"]
    return plain_table([column.heading for column in columns], cells, names)
