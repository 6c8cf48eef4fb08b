"""The `faults` section of a scenario: workers that are slow, lost, or late with their weights,
stated or drawn."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from simrl.errors import refuse
from simrl.validation import Section, no_truth

Seconds = Annotated[float, Field(ge=0, le=1e7)]  # four months
Rate = Annotated[
    float, Field(gt=0, le=60)
]  # beyond one a minute a worker might never finish its recomputation
NUMBERS = (
    "worker",
    "at_s",
    "rate_per_hour",
    "duration_s",
    "factor",
    "until_s",
    "back_s",
    "delay_s",
)  # all fields but the kind: pydantic lets no validator precede a discriminator


class _Fault(Section):
    """A fault of one `worker` at a stated time, or of every worker at drawn times (`rate_per_hour`,
    a Poisson process)."""

    _numbers: Any = field_validator(*NUMBERS, mode="before", check_fields=False)(
        classmethod(no_truth)
    )

    worker: NonNegativeInt | None = None
    """index of the rollout worker, from 0; none: faults are drawn for all workers"""
    at_s: Seconds = 0.0
    """its beginning"""
    rate_per_hour: Rate | None = None
    """drawn: faults in an hour of a worker's healthy time"""
    duration_s: Annotated[float, Field(gt=0, le=1e7)] | None = None
    """drawn: length of a fault"""

    @property
    def ends_s(self) -> float | None:
        """Return the end of a fault of a stated time; None: never."""
        return vars(self).get("back_s", vars(self).get("until_s"))

    @model_validator(mode="after")
    def _stated_or_drawn(self) -> _Fault:
        ends_s = math.inf if self.ends_s is None else self.ends_s
        refuse(
            (
                (self.worker is None) == (self.rate_per_hour is None),
                "give either a worker, or rate_per_hour and duration_s for all of them",
            ),
            (
                (self.rate_per_hour is None) != (self.duration_s is None),
                "rate_per_hour and duration_s come together",
            ),
            (
                self.rate_per_hour is not None and (self.at_s or self.ends_s is not None),
                "a fault with rate_per_hour begins at drawn times and lasts duration_s; leave the times out",
            ),
            (
                ends_s <= self.at_s,
                f"it ends at {ends_s:g} s and begins at {self.at_s:g} s; let it end later",
            ),
            error=ValueError,
        )
        return self


class Slow(_Fault):
    """A slow worker: every forward pass takes `factor` times as long."""

    kind: Literal["slow"]
    factor: Annotated[float, Field(ge=1, le=1000)]
    """factor on every forward pass"""
    until_s: Seconds | None = None
    """its end; none: never"""


class Lost(_Fault):
    """A lost worker: its KV cache and weights are lost, too. Without `back_s` it does not
    return."""

    kind: Literal["lost"]
    back_s: Seconds | None = None
    """its return; none: never"""


class WeightSyncDelayed(_Fault):
    """A late weight sync: every load of weights that begins at the worker takes `delay_s`
    longer."""

    kind: Literal["weight_sync_delayed"]
    delay_s: Seconds
    """added to the time of every weight sync at the worker"""
    until_s: Seconds | None = None
    """its end; none: never"""


Fault = Annotated[Slow | Lost | WeightSyncDelayed, Field(discriminator="kind")]
