"""A ledger: what a paper says of its experiments, input by input, and what it leaves open.

Invariant: an input is stated (in the paper's words), digitised (read off a figure) or assumed; only what is assumed is a
range, with a reason, set once for all rows of the paper. A prediction runs the middle and a designed sample of the ranges.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

Value = bool | int | float | str
Inputs = dict[str, Any]  # one value an input


class Asked(dict[str, Any]):
    """Inputs that note in `names` which of them are asked for; so does what `asked | {...}` replaces some in."""

    def __init__(self, inputs: Inputs, names: set[str]) -> None:
        super().__init__(inputs)
        self.names = names

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __or__(self, other: Inputs) -> Asked:  # type: ignore[override]
        return Asked({**self, **other}, self.names)


class Input(BaseModel):
    """One input. `low` and `high` bound it where it is assumed, `choices` are the alternatives of one that is no number;
    `value` is the middle. `source` says where it stands in the paper, or why it is assumed so. `log`: drawn by its ratio.
    `used`: false where it is written down for the reader and no prediction asks for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: Value | list[Value]
    kind: Literal["stated", "digitised", "assumed"]
    source: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Value, ...] = ()
    used: bool = True

    @model_validator(mode="after")
    def _a_range_is_assumed(self) -> Input:
        if (self.low is None) != (self.high is None):
            raise ValueError("give low and high, or neither")
        if self.open and self.kind != "assumed":
            raise ValueError(f"{self.kind}, and yet a range: only what is assumed has one")
        if self.open and not self.used:
            raise ValueError("a range that no prediction asks for")
        number = isinstance(self.value, int | float)
        if self.low is not None and not (number and self.low <= self.value <= self.high):  # type: ignore[operator]
            raise ValueError(f"the middle {self.value} is not between {self.low} and {self.high}")
        if self.choices and self.value not in self.choices:
            raise ValueError(f"the middle {self.value} is none of the choices")
        return self

    @property
    def open(self) -> bool:
        """Whether it is a range."""
        return self.low is not None or bool(self.choices)

    def at(self, share: float) -> Value:
        """The value at a share in [0, 1) of the range."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        assert self.low is not None and self.high is not None
        if self.log:
            drawn = math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        else:
            drawn = self.low + share * (self.high - self.low)
        return round(drawn) if isinstance(self.value, int) else float(f"{drawn:.6g}")


class Ledger(BaseModel):
    """All inputs of one paper."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paper: str
    inputs: dict[str, Input] = Field(min_length=1)

    @property
    def middle(self) -> Inputs:
        return {name: entry.value for name, entry in self.inputs.items()}

    @property
    def open(self) -> list[str]:
        """The inputs that are ranges."""
        return [name for name, entry in self.inputs.items() if entry.open]

    def sample(self, count: int) -> list[Inputs]:
        """The middle, then `count` points of the ranges: a scrambled Sobol sequence with a seed of its own, so that more
        points leave those that were there."""
        names = self.open
        points = [self.middle]
        if names and count:
            from scipy.stats import qmc

            shares = qmc.Sobol(len(names), rng=0).random(2 ** math.ceil(math.log2(count)))[:count]
            for row in shares:
                drawn = {name: self.inputs[name].at(float(share)) for name, share in zip(names, row, strict=True)}
                points.append({**self.middle, **drawn})
        return points


@cache
def read_ledger(name: str) -> Ledger:
    """The ledger of a paper, `ledgers/<name>.yaml`."""
    text = (files("simrl.published") / "ledgers" / f"{name}.yaml").read_text(encoding="utf-8")
    return Ledger.model_validate(yaml.safe_load(text))
