"""Dispatch: which worker gets which sample, in which order, and when one moves. One file a rule; here is what all share.

Invariant: a pipeline waits on the event that `Dispatcher.submit` returned, never on one stay at a worker, so that a sample may
wait, move or be cut into chunks without its pipeline knowing. A rule sees samples, which do not tell their length; the number
of unfinished samples at each worker, as the dispatcher itself knows it; and the lengths of what is finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import simpy
from numpy.typing import NDArray

from simrl.dispatch.even_split import even_split
from simrl.dispatch.least_requests import least_requests
from simrl.dispatch.round_robin import round_robin
from simrl.events import gather, on_fire
from simrl.history import LengthHistory
from simrl.result import Recorder
from simrl.rollout import Rollout
from simrl.trace import Sample
from simrl.worker import RolloutWorker

# (samples placed together, unfinished samples a worker, samples placed before, lengths) -> a worker for each sample
Placement = Callable[[Sequence[Sample], NDArray[np.int64], int, LengthHistory], Sequence[int]]


class Queue(Protocol):
    """Which of the waiting samples goes first."""

    def push(self, sample: Sample, partial: Rollout | None) -> None: ...

    def pop(self) -> Sample: ...

    def __len__(self) -> int: ...


class Fifo:
    """In the order in which they came."""

    def __init__(self, history: LengthHistory) -> None:
        self._samples: deque[Sample] = deque()

    def push(self, sample: Sample, partial: Rollout | None) -> None:
        self._samples.append(sample)

    def pop(self) -> Sample:
        return self._samples.popleft()

    def __len__(self) -> int:
        return len(self._samples)


@dataclass(frozen=True)
class Dispatch:
    """A rule of dispatch. Without `per_worker`, nothing waits in the queue while a worker is there.

    `per_worker` samples at most are at a worker at once. A stay ends after `chunk_tokens`, and the sample queues up anew; with
    `kv_pool` it finds its KV cache in a pool that all workers share, at the price of the transfer. A sample whose worker is
    lost goes on "elsewhere", its tokens prefilled anew, or has to "wait" for its worker.
    """

    name: str
    place: Placement
    queue: Callable[[LengthHistory], Queue] = Fifo
    per_worker: int | None = None
    chunk_tokens: int | None = None
    kv_pool: bool = False
    on_loss: Literal["elsewhere", "wait"] = "elsewhere"


DISPATCHES: dict[str, Dispatch] = {
    rule.name: rule
    for rule in (
        Dispatch("even_split", even_split),
        Dispatch("least_requests", least_requests),
        Dispatch("round_robin", round_robin),
    )
}


class _Job:
    """A sample that was submitted and has not come back: where it is, and what is to become of it when its stay ends."""

    __slots__ = (
        "destination", "done", "fate", "max_tokens", "min_version", "partial", "sample", "stay_tokens", "worker",
    )  # fmt: skip

    def __init__(
        self, sample: Sample, done: simpy.Event, partial: Rollout | None, max_tokens: int | None, min_version: int
    ) -> None:
        self.sample = sample
        self.done = done
        self.partial = partial
        self.max_tokens = max_tokens
        self.min_version = min_version
        self.worker: int | None = None
        self.fate: Literal["run", "move", "withdraw"] = "run"
        self.destination: int | None = None
        self.stay_tokens: int | None = None


class Dispatcher:
    """Hands samples to workers by a rule, and keeps them going until they are finished, cut or withdrawn."""

    def __init__(
        self,
        env: simpy.Environment,
        workers: Sequence[RolloutWorker],
        rule: Dispatch,
        recorder: Recorder,
        history: LengthHistory | None = None,
    ) -> None:
        self.history = history or LengthHistory()
        self._env = env
        self._workers = list(workers)
        self._rule = rule
        self._recorder = recorder
        self._queue = rule.queue(self.history)
        self._jobs: dict[int, _Job] = {}
        self._at: list[dict[int, _Job]] = [{} for _ in workers]
        self._stranded: list[list[_Job]] = [[] for _ in workers]  # waiting for just this worker
        self._until_empty: list[list[simpy.Event]] = [[] for _ in workers]
        self._too_new: list[_Job] = []  # waiting for a worker with the weights they need
        self._unfinished = np.zeros(len(workers), dtype=np.int64)
        self._active = np.ones(len(workers), dtype=bool)
        self._placed = 0

    def submit(
        self,
        samples: Sequence[Sample],
        partials: Sequence[Rollout | None] | None = None,
        max_tokens: int | None = None,
        to: Sequence[int] | None = None,
        min_version: int = 0,
    ) -> list[simpy.Event]:
        """An event for each sample, in order; it fires with its `Rollout`: done, or not done if the response reached
        `max_tokens` or was withdrawn.

        `partials` are what earlier stays left. `to` names the worker of each sample in place of the rule; who has to move
        later, goes only to a worker with weights of `min_version` or newer.
        """
        events = []
        for i, sample in enumerate(samples):
            job = _Job(sample, self._env.event(), partials[i] if partials else None, max_tokens, min_version)
            self._jobs[sample.uid] = job
            events.append(job.done)
            if to is not None and self._active[to[i]]:
                self._start(job, to[i])
            else:
                self._queue.push(sample, job.partial)
        self._feed()
        return events

    def withdraw(self, samples: Iterable[Sample]) -> simpy.Event:
        """Takes unfinished samples back: their events fire with what there is. Fires with those rollouts, in order; a sample
        that had ended meanwhile is done."""
        jobs = [self._jobs[sample.uid] for sample in samples]
        ends = [job.done for job in jobs]
        for job in jobs:
            job.fate = "withdraw"
            if job.worker is not None:
                self._workers[job.worker].abort(job.sample)
            else:
                self._hand_back(job, job.partial or Rollout(job.sample, (), False))
        return gather(self._env, ends)

    def move(self, sample: Sample, worker: int | None = None) -> None:
        """Lets a sample go on at another worker (None: by the rule): its tokens come along, its KV cache does not."""
        job = self._jobs[sample.uid]
        job.fate, job.destination = "move", worker
        if job.worker is not None:
            self._workers[job.worker].abort(sample)

    def held(self) -> list[list[Sample]]:
        """The unfinished samples at each worker, in the order they came there."""
        return [[job.sample for job in jobs.values()] for jobs in self._at]

    def empty(self, worker: int) -> simpy.Event:
        """Fires when no sample is at the worker; at once if there is none."""
        event = self._env.event()
        self._until_empty[worker].append(event)
        self._tell_if_empty(worker)
        return event

    @property
    def active(self) -> list[int]:
        """The workers that take samples."""
        return [int(i) for i in np.flatnonzero(self._active)]

    def retire(self, worker: int, lost: bool = False) -> None:
        """The worker takes no more samples; those it has go on elsewhere (a lost worker ends their stays itself)."""
        self._active[worker] = False
        for job in self._at[worker].values():
            if job.fate == "run":
                job.fate = "move"
            job.destination = None
            if not lost:
                self._workers[worker].abort(job.sample)

    def activate(self, worker: int) -> None:
        """The worker takes samples (again)."""
        self._active[worker] = True
        waited, self._stranded[worker] = self._stranded[worker], []
        for job in waited:
            self._start(job, worker)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Some worker has other weights now: who waited for them may start."""
        waiting, self._too_new = self._too_new, []
        for job in waiting:
            self._queue.push(job.sample, job.partial)
        self._feed()

    def waiting(self) -> list[Rollout]:
        """What is at no worker, as it is."""
        return [job.partial or Rollout(job.sample, (), False) for job in self._jobs.values() if job.worker is None]

    def _feed(self) -> None:
        """Starts what waits, while a worker has room for it."""
        while len(self._queue):
            room = self._active
            if self._rule.per_worker is not None:
                room = room & (self._unfinished < self._rule.per_worker)
            if not room.any():
                return
            uids = {self._queue.pop().uid: None}
            while self._rule.per_worker is None and len(self._queue):
                uids[self._queue.pop().uid] = None
            # Some may have been withdrawn, or submitted anew and started, since they were pushed.
            jobs = [self._jobs[uid] for uid in uids if uid in self._jobs and self._jobs[uid].worker is None]
            self._place(jobs, room)

    def _place(self, jobs: list[_Job], room: NDArray[np.bool_]) -> None:
        """Places jobs among the workers that have room, those together that need the same version."""
        for needed in sorted({job.min_version for job in jobs}):
            able = room
            if needed:
                able = room & np.array([worker.policy_version >= needed for worker in self._workers])
            same = [job for job in jobs if job.min_version == needed]
            if not able.any():
                self._too_new.extend(same)
                continue
            workers = np.flatnonzero(able)
            places = self._rule.place(
                [job.sample for job in same], self._unfinished[workers], self._placed, self.history
            )
            self._placed += len(same)
            for job, place in zip(same, places, strict=True):
                self._start(job, int(workers[place]))

    def _start(self, job: _Job, worker: int) -> None:
        job.worker, job.destination = worker, None
        self._at[worker][job.sample.uid] = job
        self._unfinished[worker] += 1
        job.stay_tokens = job.max_tokens
        if self._rule.chunk_tokens is not None:
            chunk_end = (job.partial.tokens if job.partial else 0) + self._rule.chunk_tokens
            job.stay_tokens = chunk_end if job.max_tokens is None else min(job.max_tokens, chunk_end)
        cached = self._rule.kv_pool and job.partial is not None
        stay = self._workers[worker].submit(job.sample, job.partial, job.stay_tokens, cached)
        on_fire(stay, partial(self._stay_ended, job, worker))

    def _stay_ended(self, job: _Job, worker: int, stay: Any) -> None:
        job.worker = None
        self._unfinished[worker] -= 1
        del self._at[worker][job.sample.uid]
        if not stay.ok:
            stay.defused = True
            del self._jobs[job.sample.uid]
            job.done.fail(stay.value)
            return
        rollout: Rollout = stay.value
        finished = rollout.done or (job.max_tokens is not None and rollout.tokens >= job.max_tokens)
        cut = job.stay_tokens is not None and rollout.tokens >= job.stay_tokens
        if not finished and (job.fate == "move" or (job.fate == "run" and cut)):
            job.partial, job.fate = rollout, "run"
            self._go_on(job, worker)
        else:
            self._hand_back(job, rollout)
        self._feed()
        self._tell_if_empty(worker)

    def _tell_if_empty(self, worker: int) -> None:
        if not self._at[worker]:
            told, self._until_empty[worker] = self._until_empty[worker], []
            for event in told:
                event.succeed()

    def _go_on(self, job: _Job, left: int) -> None:
        """A job whose stay ended before its time: to where it was sent, back when its worker is, or in the queue."""
        if job.destination is not None and self._active[job.destination]:
            self._start(job, job.destination)
        elif not self._active[left] and self._rule.on_loss == "wait":
            self._stranded[left].append(job)
        else:
            self._queue.push(job.sample, job.partial)

    def _hand_back(self, job: _Job, rollout: Rollout) -> None:
        del self._jobs[job.sample.uid]
        self._recorder.stay_ended(rollout)
        if rollout.done:
            self.history.observe(rollout)
        job.done.succeed(rollout)
