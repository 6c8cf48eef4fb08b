"""The history of the board of real runs: experiments/accuracy.csv, lines of each commit whose code predicts otherwise.

Invariant: lines belong to a digest of simrl's code, so a commit of documentation adds none. A median that is worse than before
raises the alarm until its line says `why`, in words that a person wrote there.
"""

from __future__ import annotations

import csv
import io
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.reproduce.real_scores import GROUPS, KINDS, SUMS
from simrl.errors import InputError
from simrl.files import write_whole_file

WORSE = 0.02  # of the median error, beyond the last lines': an alarm
COLUMNS = (
    *("date", "commit", "code", "quantities", "group"),
    *("n", "median_error", "signed_median", "worst", "worst_row", "why"),
)
Line = Mapping[str, str]


def lines_of(totals: Mapping[str, Any], commit: str, date: str, code: str) -> list[dict[str, str]]:
    """Return the lines of a board's totals."""
    lines = []
    for kind in KINDS.values():
        for group in GROUPS:
            of = totals[SUMS[group]][SUMS[kind]]
            if of["count"]:
                values = (of["median_error"], of["signed_median"], of["worst"]["error"])
                row = f"{of['worst']['id']} {of['worst']['quantity']}"
                cells = (str(of["count"]), *(f"{value:.4f}" for value in values), row, "")
                lines.append(
                    dict(zip(COLUMNS, (date, commit, code, kind, group, *cells), strict=True))
                )
    return lines


def recorded(
    history: Sequence[Line], lines: Sequence[dict[str, str]]
) -> tuple[list[Line], list[str]]:
    """Return the history with these lines in place of those of their code, and an alarm for each median that is worse than the
    last one of other code by more than WORSE and whose line does not say why."""
    code = lines[0]["code"] if lines else ""
    before = [line for line in history if line["code"] != code]
    same = {(line["quantities"], line["group"]): line for line in history if line["code"] == code}
    last = {(line["quantities"], line["group"]): line for line in before}
    alarms, now = [], []
    for line in lines:
        key = line["quantities"], line["group"]
        unchanged = key in same and all(same[key][c] == line[c] for c in COLUMNS[3:-1])
        why = same[key]["why"] if key in same else ""
        # A line that says the same keeps its commit: the file changes only with the figures.
        now.append(same[key] if unchanged else {**line, "why": why})
        rise = float(line["median_error"]) - float(last[key]["median_error"]) if key in last else 0
        if rise > WORSE and not why:
            alarms.append(
                f"{key[0]}, {key[1]}: median error {float(line['median_error']):.1%}, "
                f"{float(last[key]['median_error']):.1%} at {last[key]['commit']}"
            )
    return [*before, *now], alarms


def record(path: Path, totals: Mapping[str, Any]) -> None:
    """Write the totals of the code at hand into a history. Raise `InputError` for a median that is worse without a reason."""
    from simrl.study.code_digest import code_digest

    commit, date = _commit()
    with write_whole_file(path) as file:
        history = (
            list(csv.DictReader(io.StringIO(path.read_text("utf-8")))) if path.exists() else []
        )
        lines, alarms = recorded(history, lines_of(totals, commit, date, code_digest()[:12]))
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        file.write_text(text.getvalue(), encoding="utf-8")
    if alarms:
        raise InputError(
            f"{path}: more than {WORSE:.0%} worse than before: {'; '.join(alarms)}; mend it, or write in "
            "the column why of its line what made it worse"
        )


def _commit() -> tuple[str, str]:
    """Return the short name and the date of the commit at hand; empty outside a repository."""
    command = ("git", "log", "-1", "--format=%h %cs")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "", ""
    commit, _, date = done.stdout.strip().partition(" ")
    return commit, date
