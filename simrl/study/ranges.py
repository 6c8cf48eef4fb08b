"""The ranges of rows over what their inputs leave open: the other fits of a calibration, and how
alike the responses of a prompt are.

Invariant: a speed-up is of two runs under one fit, so what all rows share cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from simrl.scenario.calibration import other_fits
from simrl.scenario.model import Scenario
from simrl.study.point import Row

Others = Mapping[str, Sequence[Sequence[Scenario]]]  # by cause, those of each row
RowsOf = Callable[[Sequence[Scenario]], Iterable[Row]]


def left_open(scenarios: Sequence[Scenario], alike: Path | None = None) -> Others:
    """Return the scenarios with other fits, and on a trace whose responses of a prompt are
    `alike`."""
    others = {"fits": [other_fits(scenario) for scenario in scenarios]}
    if alike is not None:
        others["likeness"] = [[s.with_fields("workload", trace=str(alike))] for s in scenarios]
    return others


def with_ranges(
    scenarios: Sequence[Scenario], rows: Sequence[Row], others: Others, rows_of: RowsOf
) -> list[Row]:
    """Return the rows of scenarios with `ranges`, the ends of the speed-up over the first row by
    cause, and `step_s_range`, the ends of the seconds of a step over all causes."""
    runs = [
        (cause, i, other)
        for cause, of_rows in others.items()
        for i, of_row in enumerate(of_rows)
        for other in of_row
    ]
    further = iter(rows_of([other for _, i, other in runs if other != scenarios[i]]))
    of_cause: dict[str, list[list[Row]]] = {cause: [[row] for row in rows] for cause in others}
    for cause, i, other in runs:
        of_cause[cause][i].append(rows[i] if other == scenarios[i] else next(further))
    with_ends = []
    for i, row in enumerate(rows):
        ranges, seconds = {}, [row["step_s"]]
        for cause, of_rows in of_cause.items():
            if len(of_rows[i]) > 1:
                pairs = zip(of_rows[i], of_rows[0], strict=False)
                ranges[cause] = _ends(a["samples_per_s"] / b["samples_per_s"] for a, b in pairs)
                seconds += [other["step_s"] for other in of_rows[i]]
        with_ends.append(
            {**row, "ranges": ranges, "step_s_range": _ends(seconds) if ranges else None}
        )
    return with_ends


def _ends(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[0], ordered[-1]
