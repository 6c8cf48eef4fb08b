"""Jobs that wait, to be let in, for a free place, for one worker or for weights, and the places
that workers have free.

Invariant: a job that waits is either in the queue or on one shelf. Queues have no way to remove a
sample, so a job taken out of the queue leaves a void entry there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import simpy
from numpy.typing import NDArray

from simrl.runtime.history import LengthHistory
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Sample

NO_LIMIT = 1 << 40  # samples at a worker


@dataclass(slots=True, eq=False)
class Job:
    """A sample that was submitted and has not come back: its place, and its fate when its copy
    ends.

    It is at a worker (`copy`), in the queue, or on a shelf; a move or a withdrawal takes effect
    when its copy has ended.
    """

    sample: Sample
    done: simpy.Event
    partial: Rollout | None
    max_tokens: int | None
    min_version: int
    destination: int | None
    copy: Copy | None = None
    duplicates: list[Copy] = field(default_factory=list)
    shelf: dict[int, Job] | None = None
    fate: Literal["run", "move", "lost", "withdraw"] = "run"
    reserved_tokens: int = 0
    pooled: bool = False  # the KV cache of `partial` is in the pool

    @property
    def so_far(self) -> Rollout:
        return self.partial or Rollout(self.sample, (), False)


@dataclass(slots=True, eq=False)
class Copy:
    """A job at a worker: its copy, or a duplicate. It ends at `end_tokens` tokens at the latest."""

    job: Job
    worker: int
    end_tokens: int | None


class Queue(Protocol):
    """The order in which waiting samples start."""

    def push(self, sample: Sample, partial: Rollout | None) -> None: ...

    def pop(self) -> Sample: ...

    def observe(self, rollout: Rollout) -> None:
        """Note a finished response; `history` has it already."""

    def __len__(self) -> int: ...


class Fifo:
    """First come, first served."""

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


class Waiting:
    """The queue, and the shelves of jobs by uid: for one worker, for a worker with newer weights,
    or until fewer than `most` jobs are in flight (None: any number may be), from their start to
    their return."""

    def __init__(self, queue: Queue, workers: int, most: int | None = None) -> None:
        self.queue = queue
        self.for_worker: list[dict[int, Job]] = [{} for _ in range(workers)]
        self.for_weights: dict[int, Job] = {}
        # In the order of their submission. A dict would get slower with each first job taken out.
        self.outside: OrderedDict[int, Job] = OrderedDict()
        self.evaluations: OrderedDict[int, Job] = OrderedDict()  # `prefers`: they start first
        self.prefers, self.held = True, False  # held: no job of training starts
        self.most = NO_LIMIT if most is None else most
        self.in_flight: set[int] = set()
        self._queued: dict[int, Job] = {}
        self._void: Counter[int] = Counter()  # void entries of the queue, by uid

    def enqueue(self, job: Job) -> None:
        self._queued[job.sample.uid] = job
        self.queue.push(job.sample, job.partial)

    def dequeue(self) -> Job | None:
        """Return the first job of the queue; None if that entry is void."""
        uid = self.queue.pop().uid
        if uid not in self._void:
            return self._queued.pop(uid)
        self._void[uid] -= 1
        if not self._void[uid]:
            del self._void[uid]
        return None

    def in_order(self, samples: Sequence[Sample], at: Sequence[int]) -> list[int]:
        """Return the places of some samples, which come together, in the order in which the empty
        queue hands them out."""
        place_of = {samples[i].uid: i for i in at}
        for i in at:
            self.queue.push(samples[i], None)
        return [place_of[self.queue.pop().uid] for _ in at]

    def shelve(self, job: Job, shelf: dict[int, Job]) -> None:
        job.shelf = shelf
        shelf[job.sample.uid] = job

    @property
    def holds_training(self) -> bool:
        """True if a sample of training would wait outside before others start."""
        return bool(self.outside or self.held or (self.prefers and self.evaluations))

    def let_in(self) -> Job | None:
        """Return a job that waits outside and may start now."""
        training = {} if self.held else self.outside
        shelves = [self.evaluations, training][:: 1 if self.prefers else -1]
        if not any(shelves) or len(self.in_flight) >= self.most:
            return None
        job = next(iter((shelves[0] or shelves[1]).values()))
        self.take_out(job)
        self.in_flight.add(job.sample.uid)
        return job

    def take_out(self, job: Job) -> None:
        """End a job's wait, if it waits."""
        if self._queued.pop(job.sample.uid, None) is not None:
            self._void[job.sample.uid] += 1
        elif job.shelf is not None:
            del job.shelf[job.sample.uid]
            job.shelf = None


class Places:
    """The unfinished samples at each worker, and the places that are free: of `per_worker` at most,
    and as many as `kv_tokens` of KV cache hold with `chunk_tokens` more for each. A worker that
    holds none has one, however small its cache."""

    def __init__(
        self, workers: int, per_worker: int | None, chunk_tokens: int | None, kv_tokens: int | None
    ) -> None:
        self.unfinished = np.zeros(workers, dtype=np.int64)
        self.active = np.ones(workers, dtype=bool)
        self._reserved_tokens = np.zeros(
            workers, dtype=np.int64
        )  # each job to the end of its chunk
        self._most = NO_LIMIT if per_worker is None else per_worker
        self._chunk_tokens = chunk_tokens or 0
        self._kv_tokens = kv_tokens

    def take(self, worker: int, job: Job) -> None:
        """Count a job that starts at the worker."""
        job.reserved_tokens = job.so_far.context_tokens + self._chunk_tokens
        self.unfinished[worker] += 1
        self._reserved_tokens[worker] += job.reserved_tokens

    def give_back(self, worker: int, job: Job) -> None:
        """Discount a job that has left the worker."""
        self.unfinished[worker] -= 1
        self._reserved_tokens[worker] -= job.reserved_tokens

    def free_at(self, worker: int) -> bool:
        """Return whether a worker has a free place."""
        unfinished = self.unfinished.item(worker)
        if not self.active.item(worker) or unfinished >= self._most:
            return False
        reserved_tokens = self._reserved_tokens.item(worker) + self._chunk_tokens
        return self._kv_tokens is None or unfinished == 0 or reserved_tokens <= self._kv_tokens

    def free(self) -> NDArray[np.bool_]:
        """Return whether each worker has a free place."""
        free: NDArray[np.bool_] = self.active & (self.unfinished < self._most)
        if self._kv_tokens is not None:
            free &= (self.unfinished == 0) | (
                self._reserved_tokens + self._chunk_tokens <= self._kv_tokens
            )
        return free

    def number_free(self) -> int:
        """Return the number of samples that may be placed at once; 1 at most where it depends on
        their lengths."""
        if self._kv_tokens is not None:
            return int(self.free().any())
        return int(np.maximum(self._most - self.unfinished[self.active], 0).sum())
