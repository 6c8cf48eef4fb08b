"""The lines of a comparison on its ranking by samples/s with other assumed seconds.

Invariant: a lead within the model's own error is no lead; runs that change places by less are
level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from simrl.show.text import grouped
from simrl.study.compare import FACTORS, HEADING
from simrl.study.model_error import RATIO_ERROR

Row = Mapping[str, Any]


def row_name(row: Row) -> str:
    """Return the name of a run in a line about it: its system, and what was varied."""
    return f"{row['system']} ({row['variant']})" if row["variant"] else str(row["system"])


def of_variants(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each variant."""
    return list(grouped((str(row["variant"]), row) for row in rows).values())


def most_of_variants(rows: Sequence[Row]) -> dict[str, float]:
    """Return the most samples/s of each variant."""
    return {
        str(group[0]["variant"]): max(row["samples_per_s"] for row in group)
        for group in of_variants(rows)
    }


def several(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each variant that has several."""
    return [group for group in of_variants(rows) if len(group) > 1]


def ranking_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line on the changes of the ranking in each variant and on the lead of the best run;
    none without factors."""
    if all(row[key] is None for row in rows for key in FACTORS):
        return []
    groups = several(rows)
    moves = grouped(move for group in groups for move in _moves(group))
    moved = "; ".join(f"{how}: {', '.join(names)}" for how, names in moves.items())
    _, lead = max(_lead(group) for group in groups)
    return [
        f"{HEADING}: {moved or 'unchanged'}. {lead}{', where it moves most' * (len(groups) > 1)}."
    ]


def _rate(row: Row, key: str) -> float:
    """Return samples/s with a factor, or without for a run that was not simulated again."""
    return float(row[key] or row["samples_per_s"])


def _moves(group: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield a change of places, or a run that becomes level with the best, at each factor; and the
    run's name."""
    order = sorted(group, key=lambda row: -row["samples_per_s"])
    for key, factor in FACTORS.items():
        for fast, slow in combinations(order, 2):
            before, after = (_rate(fast, k) / _rate(slow, k) for k in ("samples_per_s", key))
            if after < 1 / (1 + RATIO_ERROR):
                yield f"at × {factor:g} faster than {fast['system']}", row_name(slow)
            elif fast is order[0] and after <= 1 + RATIO_ERROR < before:
                yield (
                    f"at × {factor:g} level with {fast['system']} (within {RATIO_ERROR:.0%})",
                    row_name(slow),
                )


def best_and_other(group: Sequence[Row]) -> tuple[Row, Row]:
    """Return the run with the most samples/s and the run that it leads: the first one, or the
    second best."""
    best, second = sorted(group, key=lambda row: -row["samples_per_s"])[:2]
    return best, second if best is group[0] else group[0]


def _lead(group: Sequence[Row]) -> tuple[float, str]:
    """Return the ratio of the largest to the smallest lead of the best, and the range in words."""
    best, other = best_and_other(group)
    leads = [_rate(best, key) / _rate(other, key) for key in ("samples_per_s", *FACTORS)]
    low, high = min(leads), max(leads)
    return high / low, f"{best['system']} is {low:.2f}× to {high:.2f}× as fast as {row_name(other)}"
