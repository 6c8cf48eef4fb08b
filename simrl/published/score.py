"""The score of predictions: the only code that reads what was published.

Invariant: ratios and gains are compared as ratios (a gain of 2.6 % as 1.026), a published range is hit where it overlaps the
predicted interval, a list is scored element by element.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

_NUMBER = r"[<>]?\d+(?:\.\d+)?"
_GAINS = ("gain", "reduction", "increase")


class Bound(NamedTuple):
    """What was published of one element: a value, a range, or one side."""

    low: float
    high: float

    @property
    def value(self) -> float:
        """The middle of a range, the limit of one side."""
        if math.isinf(self.high):
            return self.low
        return self.high if math.isinf(self.low) else (self.low + self.high) / 2


class Published(NamedTuple):
    """A row of `published.csv`; `elements` as ratios where it is a gain."""

    id: str
    source: str
    system: str
    baseline: str
    quantity: str
    value: str
    unit: str
    setting: str
    elements: tuple[Bound, ...]
    gain: bool

    def comparable(self, predicted: float) -> float:
        """A predicted value in the terms of `elements`."""
        return 1 + predicted if self.gain else predicted


class Element(NamedTuple):
    """One predicted element beside the published one. `error` is relative, to the nearest end of a published range or side. An
    element that is an input of its prediction (`given`) has neither an error nor an interval: nothing of it is a hit."""

    published: Bound
    predicted: float
    low: float
    high: float

    @property
    def given(self) -> bool:
        return math.isnan(self.predicted)

    @property
    def error(self) -> float:
        nearest = min(max(self.predicted, self.published.low), self.published.high)
        return self.predicted / nearest - 1

    @property
    def covered(self) -> bool:
        return self.low <= self.published.high and self.published.low <= self.high

    @property
    def half_width(self) -> float | None:
        """Of the interval, relative to the prediction; None where that is 0."""
        return (self.high - self.low) / 2 / abs(self.predicted) if self.predicted else None


@cache
def published_rows() -> dict[str, Published]:
    """All rows by their ids."""
    text = (files("simrl.published") / "published.csv").read_text(encoding="utf-8")
    return {row["id"]: _row(row) for row in csv.DictReader(text.splitlines())}


def _row(row: dict[str, str]) -> Published:
    gain = row["unit"] == "fraction" and any(word in row["quantity"] for word in _GAINS)
    elements = tuple(Bound(low + gain, high + gain) for low, high in elements_of(row["value"]))
    return Published(**{key: row[key] for key in Published._fields[:8]}, elements=elements, gain=gain)


def elements_of(text: str) -> list[Bound]:
    """`1.9`, `2.0-2.4`, `<13`, `a/b/c`, `a vs b` as bounds."""
    found = []
    for part in re.split(r"\s*/\s*|\s+vs\s+", text.strip()):
        ends = re.fullmatch(rf"({_NUMBER})-({_NUMBER})", part)
        if ends:
            found.append(Bound(float(ends[1]), float(ends[2])))
        elif part[0] in "<>":
            limit = float(part[1:])
            found.append(Bound(-math.inf, limit) if part[0] == "<" else Bound(limit, math.inf))
        else:
            found.append(Bound(float(part), float(part)))
    return found


def score(row: Published, predicted: Sequence[Sequence[float]]) -> list[Element]:
    """The elements of a row; `predicted` has a list of them for each set of inputs, the middle first."""
    samples = [[row.comparable(value) for value in values] for values in predicted]
    if any(len(values) != len(row.elements) for values in samples):
        raise ValueError(f"{row.id} has {len(row.elements)} elements, predicted were {[len(v) for v in samples]}")
    columns = zip(*samples, strict=True)
    return [
        Element(bound, column[0], min(column), max(column)) for bound, column in zip(row.elements, columns, strict=True)
    ]
