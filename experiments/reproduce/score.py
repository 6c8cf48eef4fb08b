"""The score of predictions: the only code that reads published outcomes.

Invariant: ratios and gains are compared as ratios (a gain of 2.6 % as 1.026), a published range is hit where it overlaps the
predicted interval, a list is scored element by element. A single set of inputs gives no interval, and covers nothing.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from simrl.errors import InputError

PLACE = "experiments/reproduce/published.csv"
_NUMBER = r"\d+(?:\.\d+)?"
_GAINS = ("gain", "reduction", "increase")


class Bound(NamedTuple):
    """The published value of one element: a value, a range, or one side."""

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
        """Return a predicted value in the terms of `elements`."""
        return 1 + predicted if self.gain else predicted


class Element(NamedTuple):
    """One predicted element beside the published one. `error` is relative, to the nearest end of a published range or side. An
    element that is an input of its prediction (`given`) has neither an error nor an interval: nothing of it is a hit. Where
    only the middle of the inputs was predicted there is no interval (`low`, `high`, `covered` and `half_width` are None)."""

    published: Bound
    predicted: float
    low: float | None
    high: float | None

    @property
    def given(self) -> bool:
        return math.isnan(self.predicted)

    @property
    def error(self) -> float:
        nearest = min(max(self.predicted, self.published.low), self.published.high)
        return 0.0 if self.predicted == nearest else self.predicted / nearest - 1

    @property
    def covered(self) -> bool | None:
        if self.low is None or self.high is None:
            return None
        return self.low <= self.published.high and self.published.low <= self.high

    @property
    def half_width(self) -> float | None:
        """Half the interval, relative to the prediction; None where the prediction is 0."""
        if self.low is None or self.high is None or not self.predicted:
            return None
        return (self.high - self.low) / 2 / abs(self.predicted)


@cache
def published_rows() -> dict[str, Published]:
    """Return all rows by their ids. Raise `InputError` with the line of a row that cannot be read."""
    text = (files("experiments.reproduce") / "published.csv").read_text(encoding="utf-8")
    reader = csv.DictReader(text.splitlines())
    found: dict[str, Published] = {}
    for row in reader:
        place = f"{PLACE}: line {reader.line_num}"
        if row["id"] in found:
            raise InputError(
                f"{place}: id {row['id']} is there twice; give this row another, or its values by / in one row"
            )
        try:
            found[row["id"]] = _row(row)
        except ValueError as error:
            raise InputError(
                f"{place}: value is {row['value']!r}; write a number above 0, a range (2.0-2.4), a side (<13), or several by /"
            ) from error
    return found


def _row(row: dict[str, str]) -> Published:
    gain = row["unit"] == "fraction" and any(word in row["quantity"] for word in _GAINS)
    elements = tuple(Bound(low + gain, high + gain) for low, high in elements_of(row["value"]))
    return Published(**row, elements=elements, gain=gain)


def elements_of(text: str) -> list[Bound]:
    """Return `1.9`, `2.0-2.4`, `<13`, `a/b/c`, `a vs b` as bounds. Raise ValueError for other texts, for 0 (errors are
    relative) or too large a number, and for a range whose smaller end is not the first."""
    return [_bound(part) for part in re.split(r"\s*/\s*|\s+vs\s+", text.strip())]


def _bound(text: str) -> Bound:
    written = re.fullmatch(rf"([<>]?)({_NUMBER})(?:-({_NUMBER}))?", text)
    if written is None or (written[1] and written[3]):
        raise ValueError(text)
    first, last = float(written[2]), float(written[3] or written[2])
    if not 0 < first <= last < math.inf:
        raise ValueError(text)
    return Bound(-math.inf if written[1] == "<" else first, math.inf if written[1] == ">" else last)


def score(row: Published, predicted: Sequence[Sequence[float]]) -> list[Element]:
    """Return the elements of a row; `predicted` has a list of them for each set of inputs, the middle first."""
    samples = [[row.comparable(value) for value in values] for values in predicted]
    found = []
    for bound, column in zip(row.elements, zip(*samples, strict=True), strict=True):
        low, high = (min(column), max(column)) if len(column) > 1 else (None, None)
        found.append(Element(bound, column[0], low, high))
    return found
