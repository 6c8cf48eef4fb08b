"""Dispatch: which worker gets which sample, in which order, and when one moves. One file a rule; here is what all share.

Invariant: a pipeline waits on the event that `Dispatcher.submit` returned, never on one stay at a worker, so that a sample may
wait, move or be cut into chunks without its pipeline knowing. A rule sees samples, which do not tell their length; the number
of unfinished samples at each worker, as the dispatcher itself knows it; and the lengths of what is finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import simpy
from numpy.typing import NDArray

from simrl.dispatch.even_split import even_split
from simrl.dispatch.least_requests import least_requests
from simrl.dispatch.round_robin import round_robin
from simrl.dispatch.seer import ContextAware
from simrl.dispatch.streamrl import LongestFirst, SkewnessAware
from simrl.events import gather, on_fire
from simrl.history import LengthHistory
from simrl.result import Recorder
from simrl.rollout import Rollout
from simrl.trace import Sample
from simrl.worker import RolloutWorker

_NO_LIMIT = 1 << 40  # samples at a worker

# (samples placed together, unfinished samples a worker, samples placed before, lengths) -> a worker for each sample
Placement = Callable[[Sequence[Sample], NDArray[np.int64], int, LengthHistory], Sequence[int]]


class Queue(Protocol):
    """Which of the waiting samples goes first."""

    def push(self, sample: Sample, partial: Rollout | None) -> None: ...

    def pop(self) -> Sample: ...

    def observe(self, rollout: Rollout) -> None:
        """A response is finished; `history` has it already."""
        ...

    def __len__(self) -> int: ...


class Fifo:
    """In the order in which they came."""

    def __init__(self, history: LengthHistory) -> None:
        self._samples: deque[Sample] = deque()

    def push(self, sample: Sample, partial: Rollout | None) -> None:
        self._samples.append(sample)

    def pop(self) -> Sample:
        return self._samples.popleft()

    def observe(self, rollout: Rollout) -> None:
        pass

    def __len__(self) -> int:
        return len(self._samples)


@dataclass(frozen=True)
class Dispatch:
    """A rule of dispatch. Without `per_worker`, nothing waits in the queue while a worker is there.

    `per_worker` samples at most are at a worker at once, whoever sent them there. A stay ends after `chunk_tokens`, and the
    sample queues up anew; with `kv_pool` it finds its KV cache in a pool that all workers share, at the price of the transfer,
    unless its worker was lost or the weights are others by then. A sample whose worker is lost goes on "elsewhere", its tokens
    prefilled anew, or has to "wait" for its worker.
    """

    name: str
    place: Placement
    queue: Callable[[LengthHistory], Queue] = Fifo
    per_worker: int | None = None
    chunk_tokens: int | None = None
    kv_pool: bool = False
    kv_room: bool = False
    on_loss: Literal["elsewhere", "wait"] = "elsewhere"


DISPATCHES: dict[str, Dispatch] = {
    rule.name: rule
    for rule in (
        Dispatch("even_split", even_split),
        Dispatch("least_requests", least_requests),
        Dispatch("round_robin", round_robin),
        Dispatch("streamrl", SkewnessAware(), LongestFirst),
        Dispatch("seer", least_requests, ContextAware, chunk_tokens=8192, kv_pool=True, kv_room=True),
    )
}


class _Stay:
    """A job at a worker: its own stay (`job.stay`), or one of its duplicates."""

    __slots__ = ("job", "tokens", "worker")

    def __init__(self, job: _Job, worker: int, tokens: int | None) -> None:
        self.job = job
        self.worker = worker
        self.tokens = tokens  # with so many it ends at the latest


class _Job:
    """A sample that was submitted and has not come back: where it is, and what is to become of it when its stay ends.

    It is at a worker, in the queue, or on a shelf (`waits_in`); a move or a withdrawal takes effect when its stay has ended.
    Duplicates run beside all that, until one of them, or the job's own stay, comes to its end.
    """

    __slots__ = (
        "destination", "done", "duplicates", "fate", "max_tokens", "min_version", "partial", "pooled", "queued", "reserved",
        "sample", "stay", "waits_in", "worker",
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
        self.stay: _Stay | None = None
        self.duplicates: list[_Stay] = []
        self.queued = False
        self.waits_in: dict[int, _Job] | None = None
        self.fate: Literal["run", "move", "lost", "withdraw"] = "run"
        self.destination: int | None = None
        self.reserved = 0
        self.pooled = False  # the KV cache of `partial` is in the pool


class Dispatcher:
    """Hands samples to workers by a rule, and keeps them going until they are finished, cut or withdrawn."""

    def __init__(
        self,
        env: simpy.Environment,
        workers: Sequence[RolloutWorker],
        rule: Dispatch,
        recorder: Recorder,
        history: LengthHistory | None = None,
        kv_cache_tokens: int | None = None,
    ) -> None:
        self.history = history or LengthHistory()
        self._env = env
        self._workers = list(workers)
        self._rule = rule
        self._most = _NO_LIMIT if rule.per_worker is None else rule.per_worker
        self._recorder = recorder
        self._queue = rule.queue(self.history)
        self._taken_out: dict[int, int] = {}  # entries of the queue that are void, by uid
        self._jobs: dict[int, _Job] = {}
        self._expected: set[int] = set()  # samples that the history waits for
        self._at: list[dict[int, _Job]] = [{} for _ in workers]
        self._duplicates: list[list[_Stay]] = [[] for _ in workers]  # those that end just now, too
        self._for_worker: list[dict[int, _Job]] = [{} for _ in workers]  # waiting for just this worker
        self._until_empty: list[list[simpy.Event]] = [[] for _ in workers]
        self._until_active: list[list[simpy.Event]] = [[] for _ in workers]
        self._empty_since_s: list[float | None] = [env.now for _ in workers]
        self._empty_s = [0.0 for _ in workers]
        self._too_new: dict[int, _Job] = {}  # waiting for room at a worker with the weights they need
        self._unfinished = np.zeros(len(workers), dtype=np.int64)
        self._kv_tokens = kv_cache_tokens if rule.kv_room else None
        self._reserved = np.zeros(len(workers), dtype=np.int64)  # tokens of KV cache, each stay to the end of its chunk
        self._active = np.ones(len(workers), dtype=bool)
        self._lost = np.zeros(len(workers), dtype=bool)
        self._retired = np.zeros(len(workers), dtype=bool)
        self._loss = env.event()
        self._freed = env.event()
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
        later, goes only to a worker with weights of `min_version` or newer. A sample must have come back before it is
        submitted again.
        """
        events = []
        for i, sample in enumerate(samples):
            if sample.uid in self._jobs:
                raise ValueError(f"sample {sample.uid} is submitted although it has not come back")
            job = _Job(sample, self._env.event(), partials[i] if partials else None, max_tokens, min_version)
            if sample.uid not in self._expected:
                self._expected.add(sample.uid)
                self.history.expect(sample)
            self._jobs[sample.uid] = job
            on_fire(job.done, self._came_back)
            events.append(job.done)
            if job.partial is not None and max_tokens is not None and job.partial.tokens >= max_tokens:
                self._hand_back(job, job.partial)
            elif to is not None and self._active[to[i]]:
                self._send(job, to[i])
            else:
                self._enqueue(job)
        self._feed()
        return events

    def withdraw(self, samples: Iterable[Sample]) -> simpy.Event:
        """Takes unfinished samples back: their events fire with what there is. Fires with those rollouts, in order; a sample
        that had ended meanwhile is done."""
        jobs = [self._jobs[sample.uid] for sample in samples]
        for job in jobs:
            if job.done.triggered:
                continue  # its event fires at this very instant
            job.fate = "withdraw"
            if job.worker is not None:
                self._workers[job.worker].abort(job.sample)
            else:
                self._take_out(job)
                self._hand_back(job, job.partial or Rollout(job.sample, (), False))
        return gather(self._env, [job.done for job in jobs])

    def move(self, sample: Sample, worker: int | None = None) -> None:
        """Lets a sample go on at another worker (None: where the rule says): its tokens come along; its KV cache does not,
        without a pool. What was withdrawn, or ends meanwhile, does not move."""
        job = self._jobs[sample.uid]
        if job.done.triggered or job.fate == "withdraw":
            return
        if job.worker is None:
            self._take_out(job)
            job.destination = worker
            self._go_on(job)
            self._feed()
        elif job.fate != "run":
            job.destination = worker
        elif job.worker != worker:
            job.fate, job.destination = "move", worker
            self._workers[job.worker].abort(sample)

    def duplicate(self, sample: Sample, worker: int, partial: Rollout, cached: bool = False) -> bool:
        """Lets a sample that is at a worker be generated at another one besides, from what it had (`partial`) on; `cached`:
        its KV cache comes over the network. The first of its stays to come to its end is what counts, the others are aborted
        at once. Where a duplicate ends early, its worker lost or retired, the sample goes on without.

        Returns whether there is one now: not of a sample that ends, moves or waits, nor at a worker that has it already, takes
        no samples, or has too old weights.
        """
        job = self._jobs.get(sample.uid)
        if job is None or job.done.triggered or job.stay is None or job.fate != "run" or not self._active[worker]:
            return False
        at = self._workers[worker]
        here = [job.stay.worker, *(stay.worker for stay in job.duplicates)]
        if worker in here or at.policy_version < job.min_version:
            return False
        stay = _Stay(job, worker, job.stay.tokens)
        job.duplicates.append(stay)
        self._not_empty(worker)
        self._duplicates[worker].append(stay)
        cached = cached and bool(partial.segments) and partial.segments[-1].policy_version == at.policy_version
        on_fire(at.submit(sample, partial, stay.tokens, cached), lambda end: self._stay_ended(stay, end))
        return True

    def held(self) -> list[list[Sample]]:
        """The unfinished samples at each worker, in the order they came there; duplicates not counted."""
        return [[job.sample for job in jobs.values()] for jobs in self._at]

    def number_held(self) -> list[int]:
        """How many unfinished samples each worker has; duplicates not counted."""
        counts: list[int] = self._unfinished.tolist()
        return counts

    def duplicated(self) -> list[list[Sample]]:
        """The samples of which each worker has a duplicate, in the order they came there; aborted ones till they have ended."""
        return [[stay.job.sample for stay in stays] for stays in self._duplicates]

    def empty(self, worker: int) -> simpy.Event:
        """Fires when no sample is at the worker, nor a duplicate of one; at once if there is none."""
        event = self._env.event()
        self._until_empty[worker].append(event)
        self._tell_if_empty(worker)
        return event

    def empty_s(self, worker: int) -> float:
        """Seconds up to now in which no sample was at the worker."""
        since_s = self._empty_since_s[worker]
        return self._empty_s[worker] + (0.0 if since_s is None else self._env.now - since_s)

    def activated(self, worker: int) -> simpy.Event:
        """Fires when the worker takes samples; at once if it does."""
        event = self._env.event()
        self._until_active[worker].append(event)
        self._tell_if_active(worker)
        return event

    @property
    def active(self) -> list[int]:
        """The workers that take samples."""
        return [int(i) for i in np.flatnonzero(self._active)]

    def takes_samples(self, worker: int) -> bool:
        return bool(self._active[worker])

    @property
    def lost(self) -> list[int]:
        """The workers that are lost, and not back yet."""
        return [int(i) for i in np.flatnonzero(self._lost)]

    def retire(self, worker: int, lost: bool = False) -> None:
        """The worker takes no more samples; those it has go on elsewhere (a lost worker ends their stays itself)."""
        (self._lost if lost else self._retired)[worker] = True
        self._active[worker] = False
        for job in self._at[worker].values():
            if job.fate == "run":
                job.fate = "lost" if lost else "move"
            if not lost:
                self._workers[worker].abort(job.sample)
        for stay in list(self._duplicates[worker]):
            if not lost and stay in stay.job.duplicates:
                self._abort(stay)
        if not (lost and self._rule.on_loss == "wait"):
            for job in list(self._for_worker[worker].values()):
                self._take_out(job)
                self._enqueue(job)
        self._feed()
        if lost:
            told, self._loss = self._loss, self._env.event()
            told.succeed()

    def activate(self, worker: int) -> None:
        """A worker that was retired takes samples again, unless it is lost."""
        self._retired[worker] = False
        self._take_samples(worker)

    def found(self, worker: int) -> None:
        """A worker that was lost is back, and takes samples again, unless it was retired besides."""
        self._lost[worker] = False
        self._take_samples(worker)

    def loss(self) -> simpy.Event:
        """Fires when the next worker is lost."""
        return self._loss

    def freed(self) -> simpy.Event:
        """Fires with the next worker that takes samples and, from then on, has nothing."""
        return self._freed

    def _take_samples(self, worker: int) -> None:
        if self._lost[worker] or self._retired[worker]:
            return
        self._active[worker] = True
        self._tell_if_active(worker)
        self._fill(worker)
        self.weights_changed()
        if not self._at[worker] and not self._duplicates[worker]:
            self._tell_freed(worker)

    def weights_changed(self) -> None:
        """Some worker has other weights now: who waited for them may start."""
        for job in list(self._too_new.values()):
            self._take_out(job)
            self._enqueue(job)
        self._feed()

    def waiting(self) -> list[Rollout]:
        """What is at no worker, as it is."""
        return [
            job.partial or Rollout(job.sample, (), False)
            for job in self._jobs.values()
            if job.worker is None and not job.done.triggered
        ]

    # Waiting: in the queue, for a worker, for weights.

    def _enqueue(self, job: _Job) -> None:
        job.queued = True
        self._queue.push(job.sample, job.partial)

    def _dequeue(self) -> _Job | None:
        """The first of the queue; None if that entry is void."""
        uid = self._queue.pop().uid
        void = self._taken_out.pop(uid, 0)
        if void:
            if void > 1:
                self._taken_out[uid] = void - 1
            return None
        job = self._jobs[uid]
        job.queued = False
        return job

    def _shelve(self, job: _Job, shelf: dict[int, _Job]) -> None:
        job.waits_in = shelf
        shelf[job.sample.uid] = job

    def _take_out(self, job: _Job) -> None:
        """A job that waits does so no longer."""
        if job.queued:
            job.queued = False
            self._taken_out[job.sample.uid] = self._taken_out.get(job.sample.uid, 0) + 1
        elif job.waits_in is not None:
            del job.waits_in[job.sample.uid]
            job.waits_in = None

    # From waiting to a worker.

    def _has_room(self, worker: int) -> bool:
        unfinished = self._unfinished.item(worker)
        if not self._active.item(worker) or unfinished >= self._most:
            return False
        chunk = self._rule.chunk_tokens or 0
        return self._kv_tokens is None or unfinished == 0 or self._reserved.item(worker) + chunk <= self._kv_tokens

    def _with_room(self) -> NDArray[np.bool_]:
        """Which workers take another sample. One that holds none does, however small its cache."""
        room: NDArray[np.bool_] = self._active & (self._unfinished < self._most)
        if self._kv_tokens is not None:
            chunk = self._rule.chunk_tokens or 0
            room &= (self._unfinished == 0) | (self._reserved + chunk <= self._kv_tokens)
        return room

    def _load(self) -> NDArray[np.int64]:
        """What each worker has, as rules see it: duplicates take no room from samples, but samples go where there are none."""
        if not any(self._duplicates):
            return self._unfinished
        load: NDArray[np.int64] = self._unfinished + np.array([len(stays) for stays in self._duplicates])
        return load

    def _room(self) -> int:
        """How many samples may be placed at once; one after the other where it depends on their lengths."""
        if self._kv_tokens is not None:
            return int(self._with_room().any())
        return int(np.maximum(self._most - self._unfinished[self._active], 0).sum())

    def _feed(self) -> None:
        """Starts what waits in the queue, as much of it as the workers have room for."""
        while len(self._queue):
            room = self._room()
            if room == 0:
                return
            jobs: list[_Job] = []
            while len(self._queue) and len(jobs) < room:
                job = self._dequeue()
                if job is not None:
                    jobs.append(job)
            self._place(jobs)

    def _fill(self, worker: int) -> None:
        """Starts what waits for just this worker, or for weights as new as it has, while it has room."""
        mine = self._for_worker[worker]
        while mine and self._has_room(worker):
            job = next(iter(mine.values()))
            self._take_out(job)
            self._start(job, worker)
        if self._too_new and self._has_room(worker):
            version = self._workers[worker].policy_version
            able = next((job for job in self._too_new.values() if job.min_version <= version), None)
            if able is not None:
                self._take_out(able)
                self._start(able, worker)

    def _fill_from_queue(self, worker: int) -> None:
        """What `_feed` does, where no other worker has room: nothing to place."""
        while len(self._queue) and self._has_room(worker):
            job = self._dequeue()
            if job is None:
                continue
            if job.min_version > self._workers[worker].policy_version:
                self._shelve(job, self._too_new)
            else:
                self._start(job, worker)
                self._placed += 1

    def _place(self, jobs: list[_Job]) -> None:
        """Places jobs among the workers that have room, those together that need the same version. The rule does not know how
        much room there is: whom it sends to a worker that is full by then, is placed again among the others."""
        for needed in sorted({job.min_version for job in jobs}):
            same = [job for job in jobs if job.min_version == needed]
            while same:
                able = self._with_room()
                if needed:
                    able &= np.array([worker.policy_version >= needed for worker in self._workers])
                workers = np.flatnonzero(able)
                if not workers.size:
                    for job in same:
                        self._shelve(job, self._too_new)
                    break
                samples = [job.sample for job in same]
                places = self._rule.place(samples, self._load()[workers], self._placed, self.history)
                again = []
                for job, place in zip(same, places, strict=True):
                    worker = int(workers[place])
                    if self._has_room(worker):
                        self._start(job, worker)
                        self._placed += 1
                    else:
                        again.append(job)
                same = again

    def _send(self, job: _Job, worker: int) -> None:
        """To just this worker, once it has room."""
        if self._has_room(worker):
            self._start(job, worker)
        else:
            self._shelve(job, self._for_worker[worker])

    def _start(self, job: _Job, worker: int) -> None:
        for duplicate in [stay for stay in job.duplicates if stay.worker == worker]:
            self._abort(duplicate)
        job.worker, job.destination = worker, None
        self._not_empty(worker)
        self._at[worker][job.sample.uid] = job
        self._unfinished[worker] += 1
        tokens = job.max_tokens
        if self._rule.chunk_tokens is not None:
            chunk_end = (job.partial.tokens if job.partial else 0) + self._rule.chunk_tokens
            tokens = chunk_end if job.max_tokens is None else min(job.max_tokens, chunk_end)
        job.stay = own = _Stay(job, worker, tokens)
        job.reserved = self._context_tokens(job)
        self._reserved[worker] += job.reserved
        at, segments = self._workers[worker], job.partial.segments if job.partial else ()
        cached = job.pooled and bool(segments) and segments[-1].policy_version == at.policy_version
        on_fire(at.submit(job.sample, job.partial, tokens, cached), lambda end: self._stay_ended(own, end))

    def _not_empty(self, worker: int) -> None:
        """Something comes to the worker."""
        self._empty_s[worker], self._empty_since_s[worker] = self.empty_s(worker), None

    def _context_tokens(self, job: _Job) -> int:
        """What a stay will hold when its chunk ends, if its response does not end before."""
        partial = job.partial
        known = job.sample.prompt_tokens + (partial.tokens + partial.observation_tokens if partial else 0)
        return known + (self._rule.chunk_tokens or 0)

    # From a worker onwards.

    def _stay_ended(self, stay: _Stay, end: Any) -> None:
        crowded = len(self._queue) > 0  # then nobody had room
        job, worker = stay.job, stay.worker
        room_at = worker
        if job.stay is stay:
            self._leave(job)
        else:
            self._duplicates[worker].remove(stay)
            if not self._counts(stay, end):
                self._tell_if_empty(worker)
                return
            job.duplicates.remove(stay)
            if job.stay is None:
                self._take_out(job)
            else:
                own, room_at = job.stay, job.stay.worker
                self._leave(job)
                self._duplicates[room_at].append(own)
                self._workers[room_at].abort(job.sample)
        if end.ok:
            self._go_on_or_back(job, stay, end.value)
        else:
            end.defused = True
            self._abort_duplicates(job)
            del self._jobs[job.sample.uid]
            job.done.fail(end.value)
        self._fill(room_at)
        if crowded:
            self._fill_from_queue(room_at)
        else:
            self._feed()
        self._tell_if_empty(worker)

    def _leave(self, job: _Job) -> None:
        """A job is at its worker no longer."""
        assert job.worker is not None
        self._unfinished[job.worker] -= 1
        self._reserved[job.worker] -= job.reserved
        del self._at[job.worker][job.sample.uid]
        job.worker = job.stay = None

    def _counts(self, duplicate: _Stay, end: Any) -> bool:
        """Whether a duplicate that has ended is the first of its job's stays to come to its end."""
        job = duplicate.job
        if duplicate not in job.duplicates:
            end.defused = True
            return False
        if not end.ok or end.value.done:
            return True
        cut = duplicate.tokens is not None and end.value.tokens >= duplicate.tokens
        if not cut or job.fate != "run":
            job.duplicates.remove(duplicate)
            return False
        return True

    def _abort(self, duplicate: _Stay) -> None:
        duplicate.job.duplicates.remove(duplicate)
        self._workers[duplicate.worker].abort(duplicate.job.sample)

    def _abort_duplicates(self, job: _Job) -> None:
        for duplicate in list(job.duplicates):
            self._abort(duplicate)

    def _go_on_or_back(self, job: _Job, stay: _Stay, rollout: Rollout) -> None:
        """What becomes of a job one of whose stays has ended."""
        left, tokens, fate = stay.worker, rollout.tokens, job.fate
        finished = rollout.done or (job.max_tokens is not None and tokens >= job.max_tokens)
        cut = stay.tokens is not None and tokens >= stay.tokens
        if cut:
            self._abort_duplicates(job)
        if finished or fate == "withdraw" or (fate == "run" and not cut):
            self._hand_back(job, rollout)
            return
        job.partial, job.fate = rollout, "run"
        job.pooled = self._rule.kv_pool and fate != "lost" and not self._lost[left]
        if fate == "lost" and self._lost[left] and job.destination is None and self._rule.on_loss == "wait":
            self._shelve(job, self._for_worker[left])
        else:
            self._go_on(job)

    def _go_on(self, job: _Job) -> None:
        """To where it was sent, if that can be, or into the queue."""
        destination, job.destination = job.destination, None
        if (
            destination is not None
            and self._active[destination]
            and self._workers[destination].policy_version >= job.min_version
        ):
            self._send(job, destination)
        else:
            self._enqueue(job)

    def _hand_back(self, job: _Job, rollout: Rollout) -> None:
        self._abort_duplicates(job)
        self._recorder.came_back(rollout)
        if rollout.done:
            self.history.observe(rollout)
            self._queue.observe(rollout)
        job.done.succeed(rollout)

    def _came_back(self, done: Any) -> None:
        """Who waits for a sample hears now; until then it can still be asked for."""
        if done.ok:
            del self._jobs[done.value.sample.uid]

    def _tell_if_active(self, worker: int) -> None:
        if self._active[worker]:
            told, self._until_active[worker] = self._until_active[worker], []
            for event in told:
                event.succeed()

    def _tell_if_empty(self, worker: int) -> None:
        if not self._at[worker] and not self._duplicates[worker]:
            if self._empty_since_s[worker] is None:
                self._empty_since_s[worker] = self._env.now
                self._tell_freed(worker)
            told, self._until_empty[worker] = self._until_empty[worker], []
            for event in told:
                event.succeed()

    def _tell_freed(self, worker: int) -> None:
        if self._active[worker]:
            told, self._freed = self._freed, self._env.event()
            told.succeed(worker)
