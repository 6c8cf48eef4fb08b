"""A ledger: a paper's statements about its experiments, or a run's configuration, input by input, and the inputs left open.

Invariant: an input is stated (in the paper's words), inferred (from what is stated), digitised (read off a figure) or assumed;
only an assumed input is a range, with a reason, set once for all rows of the paper. A prediction runs the middle and a designed
sample of the ranges.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from simrl.errors import InputError
from simrl.scenario.yaml_text import read_yaml
from simrl.validation import explain

PLACE = "experiments/reproduce"  # for messages: the folder of the papers' files
Value = bool | int | float | str | None
Inputs = dict[str, Any]  # one value an input


class PaperError(InputError):
    """A mistake in a paper's module or ledger, independent of the drawn inputs: it ends the whole prediction."""


class MissingInputError(KeyError):
    """A ledger lacks the input that a row asks for."""


class Asked(dict[str, Any]):
    """Inputs that note in `names` which of them are asked for, as does `asked | {...}`."""

    def __init__(self, inputs: Inputs, names: set[str]) -> None:
        super().__init__(inputs)
        self.names = names

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __missing__(self, name: str) -> Any:
        raise MissingInputError(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __or__(self, other: Inputs) -> Asked:  # type: ignore[override]
        return Asked({**self, **other}, self.names)


def named(inputs: Inputs, *names: str) -> Inputs:
    """Return some inputs under their own names."""
    return {name: inputs[name] for name in names}


class LedgerInput(BaseModel):
    """One input. `low` and `high` bound an assumed one, `choices` are the alternatives of one that is no number; `value` is
    the middle. `source` says where it stands in the paper, what it is inferred from, or why it is assumed so. `log`: drawn by
    its ratio. `used`: false if it only informs the reader. `held`: assumed, but no range, for the reason in `source`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    value: Value | list[Value]
    kind: Literal["stated", "inferred", "digitised", "assumed"]
    source: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    unit: str = ""
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Value, ...] = ()
    used: bool = True
    held: bool = False

    @model_validator(mode="after")
    def _a_range_is_assumed(self) -> LedgerInput:
        if (self.low is None) != (self.high is None):
            raise ValueError("give low and high, or neither")
        if self.open and self.kind != "assumed":
            raise ValueError(f"{self.kind}, and yet a range: only what is assumed has one")
        if self.open and not self.used:
            raise ValueError("a range that no prediction asks for")
        if isinstance(self.value, list) and (
            self.open or (self.kind == "assumed" and self.used and not self.held)
        ):
            raise ValueError(
                "a list, which has neither a range nor choices; write held: true instead, and say why in source"
            )
        if self.held != (self.kind == "assumed" and self.used and not self.open):
            if self.held:
                raise ValueError("held, which is for what is assumed and used, without a range")
            raise ValueError(
                "assumed, and no range; give low and high, or choices (or held: true, and say why in source)"
            )
        if self.low is not None:
            self._require_range(self.low, self.high)
        if len(self.choices) == 1:
            raise ValueError(
                f"{self.choices[0]} alone is no choice; give others, or held: true without choices"
            )
        if self.choices and self.value not in self.choices:
            raise ValueError(f"the middle {self.value} is none of the choices")
        return self

    def _require_range(self, low: float, high: Any) -> None:
        if self.choices:
            raise ValueError("low and high, and choices; give the one or the other")
        if low >= high:
            raise ValueError(
                f"low {low:g} is not below high {high:g}; write the smaller number first"
            )
        if not (isinstance(self.value, int | float) and low <= self.value <= high):
            raise ValueError(f"the middle {self.value} is not between {low:g} and {high:g}")
        if type(self.value) is int and not (low.is_integer() and float(high).is_integer()):
            raise ValueError(
                f"{self.value} is a whole number, and so is what is drawn: write {self.value}.0, or whole ends"
            )
        if self.log and low <= 0:
            raise ValueError(
                f"log draws by ratios, which low {low:g} has none of; give one above 0, or leave log out"
            )

    @property
    def open(self) -> bool:
        """True for a range."""
        return self.low is not None or bool(self.choices)

    def at(self, share: float) -> Value:
        """Return the value at a share in [0, 1) of the range."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        assert self.low is not None and self.high is not None
        if self.log:
            drawn = math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        else:
            drawn = self.low + share * (self.high - self.low)
        return round(drawn) if isinstance(self.value, int) else float(f"{drawn:.6g}")


class Descriptor(BaseModel):
    """A paper's statement on its baseline: `value`, or a range or side (`low`, `high`). A draw agrees if the baseline's run is
    within `tolerance` of it: absolute for a `share`, else relative. `rows`: the published rows, or elements of rows (ROW/2),
    that it uses up, so that they are no longer scored. `unused`: why it is shown and conditions nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    value: float | None = Field(None, gt=0)
    low: float | None = Field(None, gt=0)
    high: float | None = Field(None, gt=0)
    tolerance: float = Field(gt=0)
    share: bool = False
    source: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    rows: tuple[str, ...] = ()
    unused: str = ""

    @model_validator(mode="after")
    def _a_value_or_ends(self) -> Descriptor:
        if (self.value is None) == (self.low is None and self.high is None):
            raise ValueError("give value, or low, high or both")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(
                f"low {self.low:g} is not below high {self.high:g}; write the smaller number first"
            )
        return self

    def misfit(self, simulated: float) -> float:
        """Return the distance from the stated value or its nearest end, in tolerances: 1 and less agrees."""
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        nearest = simulated
        if low is not None and simulated < low:
            nearest = low
        elif high is not None and simulated > high:
            nearest = high
        if self.share:
            return abs(simulated - nearest) / self.tolerance
        return (
            abs(math.log(simulated / nearest)) / math.log1p(self.tolerance)
            if simulated > 0
            else math.inf
        )


class Ledger(BaseModel):
    """All inputs of one paper, and descriptors of its baseline by the quantity of the baseline's run that answers each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paper: str
    inputs: dict[str, LedgerInput] = Field(min_length=1)
    descriptors: dict[str, Descriptor] = {}

    @property
    def middle(self) -> Inputs:
        return {name: entry.value for name, entry in self.inputs.items()}

    @property
    def open(self) -> list[str]:
        """The inputs that are ranges."""
        return [name for name, entry in self.inputs.items() if entry.open]

    def sample(self, count: int) -> list[Inputs]:
        """Return the middle, then `count` points of the ranges: a scrambled Sobol sequence with its own seed, so that more
        points keep the first ones."""
        names = self.open
        points = [self.middle]
        if names and count:
            from scipy.stats import qmc

            shares = qmc.Sobol(len(names), rng=0).random(2 ** math.ceil(math.log2(count)))[:count]
            for row in shares:
                drawn = {
                    name: self.inputs[name].at(float(share))
                    for name, share in zip(names, row, strict=True)
                }
                points.append({**self.middle, **drawn})
        return points


@cache
def read_ledger(name: str) -> Ledger:
    """Return the ledger of a paper, `ledgers/<name>.yaml`. Raise `PaperError`."""
    place, file = (
        f"{PLACE}/ledgers/{name}.yaml",
        files("experiments.reproduce") / "ledgers" / f"{name}.yaml",
    )
    if not file.is_file():
        raise PaperError(f"{place}: is not there; every paper in PAPERS has a ledger")
    try:
        return Ledger.model_validate(read_yaml(file, place, "a ledger", Ledger.model_fields))
    except ValidationError as error:
        raise PaperError(f"{place}: {explain(error, Ledger, 'a ledger')[1]}") from error
    except InputError as error:
        raise PaperError(str(error)) from error
