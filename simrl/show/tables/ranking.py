"""The lines of a comparison on its ranking by samples/s with other assumed seconds.

Invariant: a lead within the model's own error is no lead; runs that change places by less are level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from simrl.study.compare import FACTORS, HEADING
from simrl.study.model_error import RATIO_ERROR

Row = Mapping[str, Any]


def row_name(row: Row) -> str:
    """Return the name of a run in a line about it: its system, and what was varied."""
    return f"{row['system']} ({row['variant']})" if row["variant"] else str(row["system"])


def of_variants(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each variant."""
    return [[row for row in rows if row["variant"] == name] for name in dict.fromkeys(row["variant"] for row in rows)]


def several(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each variant that has several."""
    return [group for group in of_variants(rows) if len(group) > 1]


def ranking_lines(rows: Sequence[Row]) -> list[str]:
    """Return how the ranking of each variant's runs moves, and the best one's lead; nothing if none was simulated again."""
    if all(row[key] is None for row in rows for key in FACTORS):
        return []
    groups = several(rows)
    moves: dict[str, list[str]] = {}
    for how, name in (move for group in groups for move in _moves(group)):
        moves.setdefault(how, []).append(name)
    moved = "; ".join(f"{how}: {', '.join(names)}" for how, names in moves.items())
    _, lead = max(_lead(group) for group in groups)
    return [f"{HEADING}: {moved or 'unchanged'}. {lead}{', where it moves most' * (len(groups) > 1)}."]


def _rate(row: Row, key: str) -> float:
    """Return samples/s, by default those of a run that was not simulated again."""
    return float(row[key] or row["samples_per_s"])


def _moves(group: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield how runs change places or become level with the best, at each factor, and their names."""
    order = sorted(group, key=lambda row: -row["samples_per_s"])
    for key, factor in FACTORS.items():
        for fast, slow in combinations(order, 2):
            before, after = (_rate(fast, k) / _rate(slow, k) for k in ("samples_per_s", key))
            if after < 1 / (1 + RATIO_ERROR):
                yield f"at × {factor:g} faster than {fast['system']}", row_name(slow)
            elif fast is order[0] and after <= 1 + RATIO_ERROR < before:
                yield f"at × {factor:g} level with {fast['system']} (within {RATIO_ERROR:.0%})", row_name(slow)


def best_and_other(group: Sequence[Row]) -> tuple[Row, Row]:
    """Return the run with the most samples/s, and what its lead is over: the first run, or the second best."""
    best, second = sorted(group, key=lambda row: -row["samples_per_s"])[:2]
    return best, second if best is group[0] else group[0]


def _lead(group: Sequence[Row]) -> tuple[float, str]:
    """Return how far the lead of the best moves, and its range in words."""
    best, other = best_and_other(group)
    leads = [_rate(best, key) / _rate(other, key) for key in ("samples_per_s", *FACTORS)]
    low, high = min(leads), max(leads)
    return high / low, f"{best['system']} is {low:.2f}× to {high:.2f}× as fast as {row_name(other)}"
