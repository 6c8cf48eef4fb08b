"""The board: every published row beside its prediction, as data and on the screen.

Invariant: every row of `published.csv` is on it; a row that nothing predicts says so, and counts as not covered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from simrl.published.ledger import read_ledger
from simrl.published.predict import Predicted, Task, drivers, paper_of
from simrl.published.score import Bound, Published, published_rows, score

MOST_SHOWN = 4  # elements in a cell


def board(rows: Sequence[str], predicted: Predicted, done: Sequence[Task]) -> list[dict[str, Any]]:
    """One entry a row, for `json.dumps`: id, published, predicted, low, high, error, covered, half_width (lists, an element
    each; None where nothing predicts the row), setting, quantity, source, ledger (inputs and their kinds), drivers."""
    return [_entry(published_rows()[row], predicted.get(row), done) for row in rows]


def _entry(row: Published, predicted: Sequence[Sequence[float]] | None, done: Sequence[Task]) -> dict[str, Any]:
    said = {
        "id": row.id,
        "source": row.source,
        "system": row.system,
        "baseline": row.baseline,
        "quantity": row.quantity,
        "setting": row.setting,
        "unit": row.unit,
        "published": [_bound(bound) for bound in row.elements],
    }
    paper = paper_of(row.id)
    if predicted is None or paper is None:
        nothing = dict.fromkeys(("predicted", "low", "high", "error", "covered", "half_width", "ledger", "drivers"))
        return {**said, **nothing}
    elements = score(row, predicted)
    sets = [task.inputs for task in done if row.id in task.rows]
    mean_of_elements = [sum(values) / len(values) for values in predicted]
    return {
        **said,
        "predicted": [e.predicted for e in elements],
        "low": [e.low for e in elements],
        "high": [e.high for e in elements],
        "error": [e.error for e in elements],
        "covered": [e.covered for e in elements],
        "half_width": [e.half_width for e in elements],
        "ledger": {name: entry.model_dump(exclude_defaults=True) for name, entry in read_ledger(paper).inputs.items()},
        "drivers": [{"input": name, "rank_correlation": r} for name, r in drivers(paper, sets, mean_of_elements)],
    }


def _bound(bound: Bound) -> float | list[float | None]:
    if bound.low == bound.high:
        return bound.low
    return [None if abs(end) == float("inf") else end for end in bound]


def totals(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Over all elements: their number, the share that is covered, the median of |error| and of the half-widths of those that
    are predicted; and the number of rows that are."""
    covered = [c for e in entries for c in (e["covered"] or [False] * len(e["published"]))]
    errors = [abs(x) for e in entries for x in e["error"] or ()]
    widths = [x for e in entries for x in e["half_width"] or ()]
    return {
        "rows": len(entries),
        "rows_predicted": sum(e["predicted"] is not None for e in entries),
        "elements": len(covered),
        "covered_share": sum(covered) / len(covered) if covered else 0.0,
        "median_error": median(errors) if errors else float("nan"),
        "median_half_width": median(widths) if widths else float("nan"),
    }


def print_board(entries: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A line a row; of one row alone, its elements and its ledger besides."""
    table = Table(
        "row", "published", "predicted", "interval", "error", "covered", "moved most by", box=None, pad_edge=False
    )
    for e in entries:
        published = _cell(e["published"], lambda x: _range(x))
        if e["predicted"] is None:
            table.add_row(e["id"], published, "not predicted", "", "", "no", "")
            continue
        intervals = [f"{_number(low)}–{_number(high)}" for low, high in zip(e["low"], e["high"], strict=True)]
        driver = e["drivers"][0] if e["drivers"] else None
        table.add_row(
            e["id"],
            published,
            _cell(e["predicted"], _number),
            _cell(intervals, str),
            _cell(e["error"], lambda x: f"{x:+.0%}"),
            "yes"
            if all(e["covered"])
            else f"{sum(e['covered'])} of {len(e['covered'])}"
            if any(e["covered"])
            else "no",
            f"{driver['input']} ({driver['rank_correlation']:+.2f})" if driver else "",
        )
    console.print(table)
    if len(entries) == 1 and entries[0]["ledger"]:
        console.print()
        inputs = Table("input", "value", "range", "kind", "where, or why", box=None, pad_edge=False)
        for name, entry in entries[0]["ledger"].items():
            span = (
                f"{entry['low']:g}–{entry['high']:g}"
                if "low" in entry
                else ", ".join(map(str, entry.get("choices", ())))
            )
            inputs.add_row(
                name, f"{entry['value']} {entry.get('unit', '')}".strip(), span, entry["kind"], entry["source"]
            )
        console.print(inputs)


def _cell(values: Sequence[Any], text: Any) -> str:
    shown = [text(value) for value in values[:MOST_SHOWN]]
    return " / ".join([*shown, *(["…"] if len(values) > MOST_SHOWN else [])])


def _range(value: Any) -> str:
    if not isinstance(value, list):
        return _number(value)
    low, high = value
    return (
        f"<{_number(high)}"
        if low is None
        else f">{_number(low)}"
        if high is None
        else f"{_number(low)}–{_number(high)}"
    )


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
