"""Faults: workers that are slow, lost, or late with their weights, at times that a scenario gives
or draws.

Invariant: a draw depends only on (seed, index of the fault in the scenario, worker), so two systems
see equal faults at equal times on equal workers. Faults on one worker add up: it is lost while one
of them says so, slow by the product of their factors, late by the sum of their delays. The
dispatcher hears of a loss at once, and of a return when the worker has its weights; the system
decides what happens to the samples. Faults do not keep a run alive that stands still: they end once
nothing else is due, unless a lost worker will return and that may help.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import simpy

from simrl.errors import refuse
from simrl.runtime.events import Background, call_last, idle
from simrl.runtime.worker import Worker
from simrl.scenario.faults import Fault, Lost, Slow, WeightSyncDelayed


def check_faults(
    faults: Sequence[Fault],
    workers: int,
    waits_for_lost: bool,
    elastic: str | None,
    prefill: int = 0,
) -> None:
    """Raise `InputError` for a worker that the system does not have, and for losses after which
    nothing could continue.

    `waits_for_lost`: in this system, samples of a lost worker wait for that worker. `elastic`:
    what moves GPUs between workers and trainer; a trainer that loses GPUs is not modelled.
    `prefill`: workers of a pool of their own, which follow the others.
    """
    for i, fault in enumerate(faults):
        refuse(
            (
                fault.kind == "lost" and elastic,
                f"faults.{i} is lost: with {elastic} the GPUs may be the trainer's then, whose losses are not "
                "modelled; leave one of the two out",
            ),
            (
                fault.worker is not None and fault.worker >= workers + prefill,
                f"faults.{i}.worker is {fault.worker}: the system has {workers + prefill} rollout workers, 0 to "
                f"{workers + prefill - 1}; "
                "name one of them",
            ),
        )
    for_good = [
        (i, fault)
        for i, fault in enumerate(faults)
        if fault.kind == "lost" and fault.ends_s is None
    ]
    gone = {fault.worker: i for i, fault in for_good if fault.worker is not None}
    worker, i = next(iter(gone.items()), (0, 0))
    refuse(
        (
            {*range(workers)} <= gone.keys(),
            f"faults: all {workers} rollout workers are lost for good; give one of them a back_s",
        ),
        (
            prefill and {*range(workers, workers + prefill)} <= gone.keys(),
            f"faults: all {prefill} prefill workers are lost for good; give one of them a back_s",
        ),
        (
            gone and waits_for_lost,
            f"faults.{i}: worker {worker} is lost for good, and this system's samples wait for their worker; give it a back_s",
        ),
    )


class HearsOfLosses(Protocol):
    """The dispatcher as fault injection needs it."""

    def retire(self, worker: int, lost: bool = False) -> None:
        """Submit nothing to a worker from now on."""

    def activate(self, worker: int, lost: bool = False) -> None:
        """Submit to a worker again."""


def inject(
    env: simpy.Environment,
    faults: Sequence[Fault],
    seed: int,
    fleets: Sequence[tuple[Sequence[Worker], HearsOfLosses]],
) -> list[dict[str, Any]]:
    """Start the faults. `fleets`: workers and their dispatcher; the numbers of workers go on from one
    to the next. Return a list that gets an entry when one begins: its `kind`, `worker`,
    planned times (`at_s`, `until_s`; None: to the end), size, and index in the scenario
    (`fault`)."""
    happened: list[dict[str, Any]] = []
    states: list[_PresentFaults] = []
    every = ((*each, hears) for workers, hears in fleets for each in enumerate(workers))
    states += (_PresentFaults(env, i, *each, states) for i, each in enumerate(every))
    for i, fault in enumerate(faults):
        drawn = fault.rate_per_hour is not None
        for state in states if drawn else [states[fault.worker or 0]]:
            times = (
                _drawn(fault, seed, i, state.index) if drawn else iter([(fault.at_s, fault.ends_s)])
            )
            env.process(state.happen(i, fault, times, happened))
    return happened


def _drawn(fault: Fault, seed: int, index: int, worker: int) -> Iterator[tuple[float, float]]:
    """Yield (begin, end) of a worker's drawn faults in time. The key has five words; keys of
    synthesis have at most four."""
    assert fault.rate_per_hour is not None and fault.duration_s is not None
    draws = np.random.PCG64(np.random.SeedSequence([seed, index, worker, 0, 1]))
    ended_s = 0.0
    while True:
        uniform = ((draws.random_raw() >> 11) + 0.5) * 2.0**-53
        began_s = ended_s - float(np.log(uniform)) * 3600 / fault.rate_per_hour
        ended_s = began_s + fault.duration_s
        yield began_s, ended_s


class _Return(simpy.Timeout):
    """The end of a loss."""


@dataclass
class _PresentFaults:
    """The present faults of a worker (`now`), by their index in the scenario; `workers` has this
    state of all workers. Its dispatcher knows it by `number`. `for_good`: a loss has no end.
    `vain`: only faults have been due since its last return."""

    env: simpy.Environment
    index: int
    number: int
    worker: Worker
    dispatcher: HearsOfLosses
    workers: list[_PresentFaults]
    now: dict[int, Fault] = field(default_factory=dict)
    for_good: bool = False
    vain: bool = False

    def happen(
        self,
        index: int,
        fault: Fault,
        times: Iterator[tuple[float, float | None]],
        happened: list[dict[str, Any]],
    ) -> simpy.events.ProcessGenerator:
        """Begin and end a fault of the scenario at these times."""
        size = fault.model_dump(include={"factor", "delay_s"})
        for at_s, until_s in times:
            yield Background(self.env, max(at_s - self.env.now, 0.0))
            if self.run_stands_still():
                return
            happened.append(
                {
                    "kind": fault.kind,
                    "worker": self.index,
                    "at_s": at_s,
                    "until_s": until_s,
                    **size,
                    "fault": index,
                }
            )
            self.change(fault, {**self.now, index: fault})
            if until_s is None:
                self.for_good |= isinstance(fault, Lost)
                return
            ending = _Return if isinstance(fault, Lost) else Background
            yield ending(self.env, max(until_s - self.env.now, 0.0))
            self.change(fault, {other: kept for other, kept in self.now.items() if other != index})

    def change(self, fault: Fault, now: dict[int, Fault]) -> None:
        """Begin or end a fault, so that the worker has the faults `now`."""
        was_lost, self.now = self.lost, now
        match fault:
            case Slow():
                self.worker.slow_down(
                    float(np.prod([f.factor for f in now.values() if isinstance(f, Slow)]))
                )
            case WeightSyncDelayed():
                self.worker.load_delay_s = sum(
                    f.delay_s for f in now.values() if isinstance(f, WeightSyncDelayed)
                )
            case Lost():
                if self.lost and not was_lost:
                    self.dispatcher.retire(self.number, lost=True)
                    self.worker.fail()
                elif was_lost and not self.lost:
                    self.env.process(self.come_back())

    @property
    def lost(self) -> bool:
        return any(isinstance(fault, Lost) for fault in self.now.values())

    def come_back(self) -> simpy.events.ProcessGenerator:
        """Reactivate a worker when it has its weights, unless it was lost again meanwhile."""
        yield self.worker.restore()
        if not self.lost:
            self.dispatcher.activate(self.number, lost=True)
            self.vain = True
            call_last(self.env, self.run_stands_still)  # after the effects of the return

    def run_stands_still(self) -> bool:
        """Return whether only faults are due, and only workers whose last return was in vain will
        return."""
        if not idle(self.env, Background, _Return):
            for worker in self.workers:
                worker.vain = False
            return False
        return not any(
            worker.lost and not worker.for_good and not worker.vain for worker in self.workers
        )
