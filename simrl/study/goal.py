"""The goal of a search: the fastest choice, the cheapest in time, or the fastest within a budget;
and its limits.

Invariant: pure functions of a scenario and its row. `merit` is a rate (larger is better, a ratio of
two is a speed-up or a saving), so that one number compares options under any goal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from simrl.errors import InputError, refuse
from simrl.result.off_policyness import largest_off_policyness
from simrl.scenario.model import Scenario
from simrl.systems.recipes import make_system

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
Row = Mapping[str, Any]
SETTLING = "settling"


class Broken(NamedTuple):
    """A limit that an option exceeds, in words, and by what share of the limit; `unsettled` if the
    value was still growing."""

    limit: str
    says: str
    excess: float
    unsettled: bool = False


@dataclass(frozen=True)
class Goal:
    """The user's goal. `updates` are of a whole batch, `batch_samples`, whatever number a system
    trains at a time; `price` is the price of a GPU-hour, 0 if unknown; with `settled`, a run has to
    settle. Raises `InputError` for options that contradict each other."""

    batch_samples: float
    price: float = 0.0
    max_off_policyness: float | None = None
    max_cost: float | None = None
    updates: int = 0
    deadline_s: float | None = None
    budget: float | None = None
    settled: bool = False

    def __post_init__(self) -> None:
        priced = {"--max-cost": self.max_cost, "--budget": self.budget}
        option = next((name for name, most in priced.items() if most is not None), "")
        refuse(
            (
                self.deadline_s is not None and self.budget is not None,
                "--deadline and --budget: give one of them; the other is minimised",
            ),
            (
                option and not self.price,
                f"{option}: cluster.cost_per_gpu_hour is 0; give the price of a GPU-hour",
            ),
        )

    @property
    def words(self) -> str:
        """The goal in words."""
        if self.deadline_s is not None:
            least = "lowest cost" if self.price else "fewest GPU-hours"
            return f"the {least} of {self.updates:,} updates within {duration(self.deadline_s)}"
        if self.budget is not None:
            return f"the shortest time of {self.updates:,} updates for at most {self.budget:,.6g}"
        return "the most trained samples a second"

    def seconds(self, row: Row) -> float:
        """Return the seconds of the requested updates."""
        return float(self.updates * self.batch_samples / row["samples_per_s"])

    def cost(self, row: Row) -> float:
        """Return their cost; in GPU-hours without a price."""
        if row.get("train_cost_per_1k_samples") is not None:  # of pools with prices of their own
            return float(self.updates * self.batch_samples / 1000 * row["cost_per_1k_samples"])
        return float(row["gpus"] * self.seconds(row) / 3600 * (self.price or 1.0))

    def merit(self, row: Row) -> float:
        """Return the rate that options are compared by."""
        if self.deadline_s is not None:
            return 1.0 / self.cost(row)
        return float(row["samples_per_s"])

    def broken(self, scenario: Scenario, row: Row) -> list[Broken]:
        """Return the limits that an option exceeds."""
        limits = [self._staleness(scenario, row)]
        if self.settled and not row["settled"] and limits == [None]:
            says = f"had not settled after {scenario.steps} updates"
            limits.append(Broken(SETTLING, says, 0.1, unsettled=True))
        if self.max_cost is not None:
            limits.append(
                _over("cost", "cost of 1,000 samples", row["cost_per_1k_samples"], self.max_cost)
            )
        if self.deadline_s is not None and (seconds := self.seconds(row)) > self.deadline_s:
            limits.append(
                Broken("deadline", f"takes {duration(seconds)}", seconds / self.deadline_s - 1)
            )
        if self.budget is not None:
            limits.append(_over("budget", "cost", self.cost(row), self.budget))
        return [broken for broken in limits if broken is not None]

    def _staleness(self, scenario: Scenario, row: Row) -> Broken | None:
        """Return the broken limit of staleness, of the oldest trained token, carried ones too. If
        its age still grew, only the system's own rule bounds it."""
        limit, most = "off-policyness", self.max_off_policyness
        if most is None:
            return None
        oldest = largest_off_policyness(row)
        if oldest > most:
            return Broken(
                limit,
                f"off-policyness up to {oldest}",
                oldest / max(most, 1.0) - most / max(most, 1.0),
            )
        bound = make_system(scenario.system.name, scenario.system.parameters).off_policyness
        if row["settled"] or (bound is not None and bound <= most):
            return None
        says = f"off-policyness was {oldest} and still growing after {scenario.steps} updates"
        return Broken(limit, says, 0.1, unsettled=True)


def _over(limit: str, what: str, value: float, most: float) -> Broken | None:
    return (
        Broken(limit, f"{what} {value:,.4g}", value / max(most, 1e-9) - 1) if value > most else None
    )


def seconds_of(text: str, option: str) -> float:
    """Return the seconds of "36h", "90m", "2d" or "1.5h". Raise `InputError`."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())
    if not number or float(number[1]) == 0:
        raise InputError(f"{option} {text}: give a number and its unit, such as 36h (s, m, h or d)")
    return float(number[1]) * SECONDS[number[2]]


def duration(seconds: float) -> str:
    """Return seconds in the unit that reads best."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
