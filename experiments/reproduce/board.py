"""The board: every published row beside its prediction, as data and on the screen.

Invariant: every row of `published.csv` is on it; a row without a prediction says why, and counts as not covered. An element
that its prediction is given counts as nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.reproduce.ledger import PLACE, read_ledger
from experiments.reproduce.predict import PAPERS, Prediction, drivers, left_out, paper_of
from experiments.reproduce.score import Bound, Published, published_rows, score
from simrl.errors import InputError, meant

MOST_SHOWN = 4  # elements in a cell
GIVEN_CELL = "–"
SCORED = ("predicted", "low", "high", "error", "covered", "half_width")


def require_published() -> None:
    """Raise `InputError` for a row that a paper predicts or leaves out and nobody published, and for a repeated one."""
    known, places = published_rows(), dict[str, str]()
    for name, paper in PAPERS.items():
        place = f"{PLACE}/{name}.py"
        for where in ("ROWS", "LEFT_OUT"):
            for row in getattr(paper, where, {}):
                if row not in known:
                    near = meant(row, known)
                    raise InputError(
                        f"{place}: {where} has {row!r}, which published.csv does not have{near}; add its line there"
                    )
                if row in places:
                    raise InputError(
                        f"{place}: {where} has {row!r}, and so has {places[row]}; leave it in one of them"
                    )
                places[row] = f"{where} of {place}"


def board(rows: Sequence[str], predicted: Mapping[str, Prediction]) -> list[dict[str, Any]]:
    """Return an entry of each row, for `json.dumps`: id, published, predicted, low, high, error, covered, half_width (lists
    with a value of each element; None without a prediction, for a given element, and without an interval where one is
    needed), why_not (why there is no prediction, if known), refused (why sets of inputs could not be simulated), setting,
    quantity, source, ledger (inputs and their kinds), asked (the inputs that the row asks for), drivers, levels (seconds a step
    and of its rollout, trained response tokens a second, of the runs at the middle, by what they run)."""
    return [_entry(published_rows()[row], predicted.get(row)) for row in rows]


def _entry(row: Published, predicted: Prediction | None) -> dict[str, Any]:
    said = {
        "id": row.id,
        "source": row.source,
        "system": row.system,
        "baseline": row.baseline,
        "quantity": row.quantity,
        "setting": row.setting,
        "unit": "x" if row.gain else row.unit,  # a gain is compared as a ratio
        "published": [_bound(bound) for bound in row.elements],
        "refused": predicted.refused if predicted else [],
    }
    paper = paper_of(row.id)
    if predicted is None or not predicted.elements or paper is None:
        keys = (
            "predicted",
            "low",
            "high",
            "error",
            "covered",
            "half_width",
            "ledger",
            "asked",
            "drivers",
            "levels",
        )
        why_not = (
            predicted.refused[0] if predicted and predicted.refused else left_out().get(row.id)
        )
        if paper is None and why_not is None:
            why_not = f"no paper in PAPERS ({PLACE}/predict.py) has it in its ROWS"
        return {**said, **dict.fromkeys(keys), "why_not": why_not}
    elements = score(row, predicted.elements)
    scored = [[value for value in values if not math.isnan(value)] for values in predicted.elements]
    return {
        **said,
        **{key: [None if e.given else getattr(e, key) for e in elements] for key in SCORED},
        "ledger": ledger_of(paper),
        "asked": sorted(predicted.asked),
        "drivers": drivers_of(paper, predicted, [fmean(values) for values in scored]),
        "levels": [{**level._asdict(), "run": json.loads(level.run)} for level in predicted.levels],
        "why_not": None,
    }


def ledger_of(name: str) -> dict[str, Any]:
    """Return the inputs of a paper or family, for `json.dumps`."""
    return {
        key: entry.model_dump(exclude_defaults=True)
        for key, entry in read_ledger(name).inputs.items()
    }


def drivers_of(name: str, predicted: Prediction, values: Sequence[float]) -> list[dict[str, Any]]:
    """Return `drivers` of these values of a prediction, for `json.dumps`."""
    found = drivers(name, predicted.inputs, values, predicted.asked)
    return [{"input": key, "rank_correlation": correlation} for key, correlation in found]


def _bound(bound: Bound) -> float | list[float | None]:
    if bound.low == bound.high:
        return bound.low
    return [None if abs(end) == float("inf") else end for end in bound]


def totals(entries: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return over all elements but given ones: their number, the covered share (None if only the middle was predicted), the
    median of |error| and of the half-widths of predicted ones (None without any); and the number of predicted rows."""
    hits = [hit for e in entries for hit in hits_of(e)]
    middle_only = any(e["predicted"] for e in entries) and not any(map(has_interval, entries))
    errors = [abs(x) for e in entries for x in e["error"] or () if x is not None]
    widths = [x for e in entries for x in e["half_width"] or () if x is not None]
    return {
        "rows": len(entries),
        "rows_predicted": sum(e["predicted"] is not None for e in entries),
        "elements": len(hits),
        "covered_share": None if middle_only else sum(hits) / len(hits) if hits else 0.0,
        "median_error": median(errors) if errors else None,
        "median_half_width": median(widths) if widths else None,
    }


def hits_of(entry: Mapping[str, Any]) -> list[bool]:
    """Return for each element but given ones whether it is covered; without a prediction, or only at the middle, it is not."""
    if entry["predicted"] is None:
        return [False] * len(entry["published"])
    pairs = zip(entry["predicted"], entry["covered"], strict=True)
    return [hit is True for predicted, hit in pairs if predicted is not None]


def has_interval(entry: Mapping[str, Any]) -> bool:
    """Return whether a row has an interval: if any set of inputs was predicted in addition to the middle."""
    return any(low is not None for low in entry["low"] or ())


def in_words(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the totals as a sentence."""
    sums = totals(entries)
    said = f"{sums['rows_predicted']} of {sums['rows']} rows are predicted"
    if sums["covered_share"] is None:
        said += ", with every input at its middle alone, so that there is no interval"
    else:
        said += f"; {sums['covered_share']:.0%} of {sums['elements']} published figures lie in their intervals"
    if sums["median_error"] is None:
        return f"{said}."
    said += f"; median error {sums['median_error']:.0%}"
    width = sums["median_half_width"]
    return f"{said}." if width is None else f"{said}, median half-width {width:.0%}."


def print_board(entries: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a line for each row, without columns that need an interval if no row has one; for a single row, its ledger, too."""
    intervals = any(map(has_interval, entries))
    of_intervals = ("interval", "error", "covered", "moved most by") if intervals else ("error",)
    print_table(
        ("row", "published", "predicted", *of_intervals),
        [_cells(e, intervals) for e in entries],
        console,
    )
    for line in _notes(entries):
        console.print(line)
    if len(entries) == 1 and entries[0]["ledger"]:
        print_ledger(entries[0]["ledger"], entries[0]["asked"], console)


def _cells(entry: Mapping[str, Any], intervals: bool) -> list[str]:
    published = _cell(bound_text(bound, "") for bound in published_rows()[entry["id"]].elements)
    if entry["predicted"] is None:
        return [entry["id"], published, "not predicted", *(["", "", "no", ""] if intervals else [])]
    predicted = _cell("given" if x is None else number(x) for x in entry["predicted"])
    error = _cell(GIVEN_CELL if x is None else f"{x:+.0%}" for x in entry["error"])
    if not intervals:
        return [entry["id"], published, predicted, error]
    if not has_interval(entry):
        return [entry["id"], published, predicted, "none: the middle alone", error, "no", ""]
    ends = zip(entry["low"], entry["high"], strict=True)
    interval = _cell(GIVEN_CELL if low is None else span(low, high) for low, high in ends)
    moved = moved_by(entry["drivers"][0] if entry["drivers"] else None)
    return [entry["id"], published, predicted, interval, error, covered_words(entry), moved]


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> None:
    table = Table(*heads, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_ledger(ledger: Mapping[str, Any], asked: Sequence[str], console: Console) -> None:
    """Print, below an empty line, the inputs that the row asks for, then the paper's others."""
    table = Table("input", "value", "range", "kind", "where, or why", box=None, pad_edge=False)
    for name in sorted(ledger, key=lambda name: name not in asked):
        entry = ledger[name]
        choices = ", ".join(map(str, entry.get("choices", ())))
        table.add_row(
            name,
            f"{entry['value']} {entry.get('unit', '')}".strip(),
            f"{entry['low']:g}–{entry['high']:g}" if "low" in entry else choices,
            entry["kind"] + ("" if name in asked else ", not asked for here"),
            entry["source"],
            style="" if name in asked else "dim",
        )
    console.print()
    console.print(table)


def _notes(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on rows without a prediction, with the reason, and on rows that lack some sets of inputs."""
    said = []
    for e in entries:
        if e["why_not"] is not None:
            said.append((e["id"], f"not predicted: {e['why_not']}"))
        elif e["refused"]:
            sets = (
                "1 set of inputs"
                if len(e["refused"]) == 1
                else f"{len(e['refused'])} sets of inputs"
            )
            said.append(
                (e["id"], f"{sets} cannot be, and the interval is of the others: {e['refused'][0]}")
            )
    return by_text(said)


def by_text(notes: Iterable[tuple[str, str]]) -> list[str]:
    """Return each text of (row, text) once, behind its rows."""
    rows: dict[str, dict[str, None]] = {}
    for row, text in notes:
        rows.setdefault(text, {})[row] = None
    return [f"{', '.join(of)}: {text}" for text, of in rows.items()]


def _cell(texts: Iterable[str]) -> str:
    shown = list(texts)
    return " / ".join([*shown[:MOST_SHOWN], *(["…"] if len(shown) > MOST_SHOWN else [])])


def covered_words(entry: Mapping[str, Any]) -> str:
    """Return in words how many elements of a row are covered."""
    hits = hits_of(entry)
    return "yes" if all(hits) else f"{sum(hits)} of {len(hits)}" if any(hits) else "no"


def moved_by(driver: Mapping[str, Any] | None) -> str:
    return f"{driver['input']} ({driver['rank_correlation']:+.2f})" if driver else ""


def bound_text(bound: Bound, space: str = " ") -> str:
    """Return a published value, range or side, its sign before `space`."""
    if bound.low == bound.high:
        return number(bound.low)
    if math.isinf(bound.low):
        return f"<{space}{number(bound.high)}"
    return f">{space}{number(bound.low)}" if math.isinf(bound.high) else span(*bound)


def span(low: float, high: float) -> str:
    return f"{number(low)}–{number(high)}"


def number(value: float | str) -> str:
    """Return a number with three digits or, from 1,000, whole; a word as it is."""
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
