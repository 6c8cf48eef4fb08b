"""Dispatch: which worker gets which sample. One file a placement rule; this module is what all rules share.

Invariant: a pipeline waits on the event that `Dispatcher.submit` returned, never on one stay at a worker, so that a sample
may move without its pipeline knowing. A placement rule sees the samples and the number of unfinished samples at each
worker, as the dispatcher itself knows them; it never asks a worker.
"""

from collections.abc import Callable, Sequence

import numpy as np
import simpy
from numpy.typing import NDArray

from simrl.dispatch.even_split import even_split
from simrl.dispatch.least_requests import least_requests
from simrl.dispatch.round_robin import round_robin
from simrl.events import on_fire
from simrl.trace import Sample
from simrl.worker import RolloutWorker

# (samples submitted together, unfinished samples a worker, samples submitted before) -> a worker for each
Placement = Callable[[Sequence[Sample], NDArray[np.int64], int], Sequence[int]]

PLACEMENTS: dict[str, Placement] = {
    "even_split": even_split,
    "least_requests": least_requests,
    "round_robin": round_robin,
}


class Dispatcher:
    """Hands samples to workers by a placement rule."""

    def __init__(self, env: simpy.Environment, workers: Sequence[RolloutWorker], place: Placement) -> None:
        self._env = env
        self._workers = list(workers)
        self._place = place
        self._unfinished = np.zeros(len(workers), dtype=np.int64)
        self._submitted = 0

    def submit(self, samples: Sequence[Sample]) -> list[simpy.Event]:
        """An event for each sample, in order; it fires with the finished `Rollout`."""
        places = self._place(samples, self._unfinished, self._submitted)
        self._submitted += len(samples)
        return [self._start(sample, worker) for sample, worker in zip(samples, places, strict=True)]

    def _start(self, sample: Sample, worker: int) -> simpy.Event:
        done = self._env.event()
        self._unfinished[worker] += 1

        def stay_ended(stay: simpy.Event) -> None:
            self._unfinished[worker] -= 1
            done.trigger(stay)  # its value, or its failure
            stay.defused = True

        on_fire(self._workers[worker].submit(sample), stay_ended)
        return done
