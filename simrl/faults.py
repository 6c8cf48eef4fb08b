"""Faults: workers that are slow, lost, or late with their weights, as a scenario asks for or draws them.

Invariant: what is drawn belongs to (seed, index of the fault in the scenario, worker) and to nothing else, so two systems see
the same faults at the same times on the same workers. Faults on one worker add up: it is lost while any of them says so, slow
by the product of their factors, late by the sum of their delays. The dispatcher hears of a loss at once, and of a worker that
is back when it has its weights; what becomes of the samples then is the system's own rule.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import simpy
from pydantic import BaseModel, ConfigDict, Field, model_validator

from simrl.errors import InputError

Seconds = Annotated[float, Field(ge=0, le=1e7)]  # four months
Worker = Annotated[int, Field(ge=0, description="index of a rollout worker, from 0")]
# More than one a minute and a worker might never finish what it recomputes.
Rate = Annotated[float, Field(gt=0, le=60, description="of every worker, an hour of its healthy time")]
Duration = Annotated[float, Field(gt=0, le=1e7)]


class _Fault(BaseModel):
    """Either on one `worker` at a stated time, or on every worker at drawn times (`rate_per_hour`, a Poisson process)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    worker: Worker | None = Field(
        default=None, description="index of the rollout worker, from 0; none: drawn, for all of them"
    )
    at_s: Seconds = Field(default=0.0, description="when it begins")
    rate_per_hour: Rate | None = Field(default=None, description="drawn: so many an hour of each worker's healthy time")
    duration_s: Duration | None = Field(default=None, description="drawn: how long each lasts")

    @property
    @abstractmethod
    def ends_s(self) -> float | None:
        """When a fault of a stated time is over; None: never."""

    @model_validator(mode="after")
    def _stated_or_drawn(self) -> _Fault:
        if (self.worker is None) == (self.rate_per_hour is None):
            raise ValueError("give either a worker, or rate_per_hour and duration_s for all of them")
        if (self.rate_per_hour is None) != (self.duration_s is None):
            raise ValueError("rate_per_hour and duration_s come together")
        if self.rate_per_hour is not None and (self.at_s or self.ends_s is not None):
            raise ValueError(
                "a fault with rate_per_hour begins at drawn times and lasts duration_s; leave the times out"
            )
        if self.ends_s is not None and self.ends_s <= self.at_s:
            raise ValueError(f"it ends at {self.ends_s:g} s and begins at {self.at_s:g} s; let it end later")
        return self


class Slow(_Fault):
    """Every forward pass of a worker takes `factor` times as long."""

    kind: Literal["slow"]
    factor: float = Field(ge=1, le=1000, description="how many times as long a pass takes")
    until_s: Seconds | None = Field(default=None, description="when it ends; none: never")

    @property
    def ends_s(self) -> float | None:
        return self.until_s


class Lost(_Fault):
    """A worker is lost, with its KV cache and weights; `back_s` empty: for good."""

    kind: Literal["lost"]
    back_s: Seconds | None = Field(default=None, description="when it is back; none: never")

    @property
    def ends_s(self) -> float | None:
        return self.back_s


class WeightSyncDelayed(_Fault):
    """Every load of weights that begins at a worker takes `delay_s` longer."""

    kind: Literal["weight_sync_delayed"]
    delay_s: Seconds = Field(description="how much longer a load of weights takes")
    until_s: Seconds | None = Field(default=None, description="when it ends; none: never")

    @property
    def ends_s(self) -> float | None:
        return self.until_s


Fault = Annotated[Slow | Lost | WeightSyncDelayed, Field(discriminator="kind")]


def check_faults(
    faults: Sequence[Slow | Lost | WeightSyncDelayed], workers: int, waits_for_lost: bool, adapts_split: bool
) -> None:
    """Raises `InputError` for a worker that the system has not, and for losses after which nothing could go on.

    `waits_for_lost`: the system lets samples of a lost worker wait for just that worker. `adapts_split`: it moves GPUs between
    workers and trainer, and what the trainer does with lost ones is not modelled.
    """
    for i, fault in enumerate(faults):
        if fault.kind == "lost" and adapts_split:
            raise InputError(
                f"faults.{i} is lost: with adapt_split_every the GPUs may be the trainer's then, whose losses are not "
                "modelled; leave one of the two out"
            )
        if fault.worker is not None and fault.worker >= workers:
            raise InputError(
                f"faults.{i}.worker is {fault.worker}: the system has {workers} rollout workers, 0 to {workers - 1}; "
                "name one of them"
            )
    gone = {
        fault.worker: i
        for i, fault in enumerate(faults)
        if fault.kind == "lost" and fault.worker is not None and fault.ends_s is None
    }
    if len(gone) == workers:
        raise InputError(f"faults: all {workers} rollout workers are lost for good; give one of them a back_s")
    if gone and waits_for_lost:
        worker, i = next(iter(gone.items()))
        raise InputError(
            f"faults.{i}: worker {worker} is lost for good, and this system's samples wait for their worker; give it a back_s"
        )


class FaultyWorker(Protocol):
    """What a worker lets itself be done."""

    load_delay_s: float

    def slow_down(self, factor: float) -> None: ...

    def fail(self) -> None: ...

    def restore(self) -> simpy.Event: ...


class HearsOfLosses(Protocol):
    """The dispatcher, as far as faults go."""

    def retire(self, worker: int, lost: bool = False) -> None: ...

    def found(self, worker: int) -> None: ...


def inject(
    env: simpy.Environment,
    faults: Sequence[Slow | Lost | WeightSyncDelayed],
    seed: int,
    workers: Sequence[FaultyWorker],
    dispatcher: HearsOfLosses,
) -> list[dict[str, Any]]:
    """Lets the faults happen. The list that it returns grows by each one that does: its `kind`, `worker`, the times asked for
    (`at_s`, `until_s`; empty: to the end), its size, and the `fault` of the scenario that it came from."""
    happened: list[dict[str, Any]] = []
    states = [_State(env, i, worker, dispatcher) for i, worker in enumerate(workers)]
    for i, fault in enumerate(faults):
        drawn = fault.rate_per_hour is not None
        for state in states if drawn else [states[fault.worker or 0]]:
            times = _drawn(fault, seed, i, state.index) if drawn else iter([(fault.at_s, fault.ends_s)])
            env.process(_happen(env, i, fault, state, times, happened))
    return happened


def _drawn(fault: _Fault, seed: int, index: int, worker: int) -> Iterator[tuple[float, float]]:
    """(begin, end) of one drawn fault after the other on a worker. The key has five words, those of synthesis four or fewer."""
    assert fault.rate_per_hour is not None and fault.duration_s is not None
    draws = np.random.PCG64(np.random.SeedSequence([seed, index, worker, 0, 1]))
    ended_s = 0.0
    while True:
        uniform = ((draws.random_raw() >> 11) + 0.5) * 2.0**-53
        began_s = ended_s - float(np.log(uniform)) * 3600 / fault.rate_per_hour
        ended_s = began_s + fault.duration_s
        yield began_s, ended_s


class _State:
    """The faults that a worker has now."""

    def __init__(self, env: simpy.Environment, index: int, worker: FaultyWorker, dispatcher: HearsOfLosses) -> None:
        self.env = env
        self.index = index
        self.worker = worker
        self.dispatcher = dispatcher
        self.now: dict[object, Slow | Lost | WeightSyncDelayed] = {}

    def change(self, fault: Slow | Lost | WeightSyncDelayed, of: object, begins: bool) -> None:
        """A fault, known by `of`, begins or ends."""
        was_lost = self.lost
        if begins:
            self.now[of] = fault
        else:
            del self.now[of]
        match fault:
            case Slow():
                self.worker.slow_down(float(np.prod([f.factor for f in self.now.values() if isinstance(f, Slow)])))
            case WeightSyncDelayed():
                self.worker.load_delay_s = sum(f.delay_s for f in self.now.values() if isinstance(f, WeightSyncDelayed))
            case Lost():
                if self.lost and not was_lost:
                    self.dispatcher.retire(self.index, lost=True)
                    self.worker.fail()
                elif was_lost and not self.lost:
                    self.env.process(self.come_back())

    @property
    def lost(self) -> bool:
        return any(isinstance(fault, Lost) for fault in self.now.values())

    def come_back(self) -> simpy.events.ProcessGenerator:
        """With its weights, a worker takes samples again, unless it was lost anew meanwhile."""
        yield self.worker.restore()
        if not self.lost:
            self.dispatcher.found(self.index)


def _happen(
    env: simpy.Environment,
    index: int,
    fault: Slow | Lost | WeightSyncDelayed,
    state: _State,
    times: Iterator[tuple[float, float | None]],
    happened: list[dict[str, Any]],
) -> simpy.events.ProcessGenerator:
    size = fault.model_dump(include={"factor", "delay_s"})
    for at_s, until_s in times:
        yield env.timeout(max(at_s - env.now, 0.0))
        happened.append(
            {"kind": fault.kind, "worker": state.index, "at_s": at_s, "until_s": until_s, **size, "fault": index}
        )
        of = object()
        state.change(fault, of, begins=True)
        if until_s is None:
            return
        yield env.timeout(max(until_s - env.now, 0.0))
        state.change(fault, of, begins=False)
