"""Dispatcher: hands samples to workers, by the rule of a `Dispatch`, and moves them.

Invariant: a pipeline waits on the event that `Dispatcher.submit` returned, never on one copy at a
worker, so that a sample may wait, move or be cut into chunks without its pipeline knowing. A rule
sees samples, which do not tell their length; the number of unfinished samples at each worker, as
the dispatcher itself knows it; and the lengths of finished responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from simrl.dispatch.groups import submit_and_follow, together
from simrl.dispatch.programs import CHECK_S, Programs
from simrl.dispatch.rules import Dispatch
from simrl.dispatch.waiting import NO_LIMIT, Copy, Fifo, Job, Places, Waiting
from simrl.runtime.events import Background, Signal, gather, idle, on_fire, succeed_all
from simrl.runtime.history import LengthHistory
from simrl.runtime.recorder import Recorder
from simrl.runtime.rollout import Rollout
from simrl.runtime.worker import GroupRun, RolloutWorker
from simrl.trace.sample import Sample


class Dispatcher:
    """Hands samples to workers by a rule, and keeps them going until they are finished, cut or
    withdrawn."""

    def __init__(
        self,
        env: simpy.Environment,
        workers: Sequence[RolloutWorker],
        rule: Dispatch,
        recorder: Recorder,
        kv_cache_tokens: int | None = None,
        max_concurrent: int | None = None,
        history: LengthHistory | None = None,
        acting_weight: float = 1.0,
    ) -> None:
        self.history = LengthHistory() if history is None else history
        self._env = env
        self._workers = list(workers)
        self._rule = rule
        self._recorder = recorder
        kv_tokens = kv_cache_tokens if rule.kv_room else None
        self._places = Places(len(workers), rule.per_worker, rule.chunk_tokens, kv_tokens)
        self._waiting = Waiting(rule.queue(self.history), len(workers), max_concurrent)
        self._most = max_concurrent or NO_LIMIT
        self._jobs: dict[int, Job] = {}
        self._expected: set[int] = set()  # samples that the history waits for
        self._copies: list[dict[Copy, None]] = [
            {} for _ in workers
        ]  # in the order they came; aborted ones till they end
        self._duplicates = np.zeros(len(workers), np.int64)  # of them
        self._until_empty: list[list[simpy.Event]] = [[] for _ in workers]
        self._until_active: list[list[simpy.Event]] = [[] for _ in workers]
        self._empty = [True] * len(workers)  # as announced by `freed`
        self._lost: set[int] = set()
        self._retired: set[int] = set()
        self._loss, self._freed = Signal(env), Signal(env)
        self._placed = 0
        self.programs = Programs(len(workers), kv_cache_tokens or 0, acting_weight)
        if rule.programs:
            env.process(self._check_programs())

    @property
    def unfinished(self) -> NDArray[np.int64]:
        """Unfinished samples at each worker; duplicates not counted."""
        return self._places.unfinished

    @property
    def in_flight(self) -> int:
        """Number of samples that have started and not come back, of those submitted one by one."""
        return len(self._waiting.in_flight)

    @property
    def free(self) -> int:
        """Number of samples that may start now; 0 while others wait."""
        if self._waiting.holds_training or len(self._waiting.queue):
            return 0
        return min(self._waiting.most - self.in_flight, self._places.number_free())

    def started(self, samples: Iterable[Sample]) -> int:
        """Return how many of these samples are in flight."""
        return sum(sample.uid in self._waiting.in_flight for sample in samples)

    def limit(self, most: int) -> None:
        """Let at most `most` samples be in flight from now on, and no more than the scenario's
        `max_concurrent`; others wait outside, in the order of submission."""
        self._waiting.most = min(most, self._most)
        while (job := self._waiting.let_in()) is not None:
            self._go_on(job)
        self._feed()

    def hold(self, training: bool, prefers: bool) -> None:
        """Let samples of training wait outside, or start again. `prefers`: of samples that wait
        outside, evaluations' start first."""
        self._waiting.held, self._waiting.prefers = training, prefers
        self.limit(self._waiting.most)

    def submit_groups(
        self,
        groups: Sequence[Sequence[Sample]],
        partials: Sequence[Sequence[Rollout | None]] | None = None,
        needed: Sequence[int] | None = None,
        max_tokens: Sequence[Sequence[int | None]] | None = None,
        to: Sequence[int | None] | None = None,
    ) -> list[GroupRun]:
        """Submit groups of which only the ends count: a simulation need not follow each sample. A
        group can be withdrawn (`withdraw_groups`); nothing else can be asked of its samples.
        `needed` is of `GroupRun`, the rest as in `submit`, with more `max_tokens` than a partial
        has; `to` is of all samples in a row, None for those that the rule places."""
        before = partials or [[None] * len(group) for group in groups]
        counts: Sequence[int | None] = needed or [None] * len(groups)
        runs = [
            GroupRun(*group, self._env.event(), self._env.event())
            for group in zip(groups, before, counts, strict=True)
        ]
        idle = not self._jobs and not len(self._waiting.queue) and bool(self._places.active.all())
        cuts = [
            most
            for group in max_tokens or [[None] * len(group) for group in groups]
            for most in group
        ]
        whole = self._workers[0].groups
        if whole is None or not idle:
            submit_and_follow(runs, self.submit, cuts, to)
            return runs
        samples = [sample for group in groups for sample in group]
        self._expect(samples)
        places, order = np.zeros(len(samples), np.int64), []
        for _, at in together(cuts):
            at = self._waiting.in_order(samples, at)
            order += at
            places[at] = self._rule.place(
                [samples[i] for i in at], self._load(), self._placed, self.history
            )
            for i, worker in enumerate(to or ()):
                places[i] = places[i] if worker is None else worker
            self._placed += len(at)
            self._places.unfinished += np.bincount(places[at], minlength=len(self._workers))
        for run in runs:
            on_fire(run.complete, self._came_back_in_groups)
            on_fire(run.over, self._came_back_in_groups)
        whole.submit(
            runs, places.tolist(), cuts, sorted(order) if self._rule.queue is Fifo else order
        )
        return runs

    def withdraw_groups(self, runs: Sequence[GroupRun]) -> None:
        """Take the unfinished responses of groups back."""
        if (whole := self._workers[0].groups) is not None:
            whole.withdraw([run for run in runs if run.first >= 0])
        followed = [sample for run in runs if run.first < 0 for sample in run.samples]
        self.withdraw([sample for sample in followed if sample.uid in self._jobs])

    def _expect(self, samples: Sequence[Sample]) -> None:
        new = [sample for sample in samples if sample.uid not in self._expected]
        self._expected.update(sample.uid for sample in new)
        self.history.expect(new)

    def forget(self, uids: Iterable[int]) -> None:
        """Forget samples that will not be submitted again."""
        self._expected.difference_update(uids)

    def _came_back_in_groups(self, event: Any) -> None:
        new = [rollout for rollout in event.value if not self._recorder.is_back(rollout)]
        self._recorder.came_back(new)
        self.history.observe([rollout for rollout in new if rollout.done])

    def submit(
        self,
        samples: Sequence[Sample],
        partials: Sequence[Rollout | None] | None = None,
        max_tokens: int | None = None,
        to: Sequence[int | None] | None = None,
        min_version: int = 0,
    ) -> list[simpy.Event]:
        """Return an event for each sample, in order; it fires with the sample's `Rollout`: done, or
        not done if the response reached `max_tokens` or was withdrawn. A sample must have come back
        before it is submitted again.

        `partials` are the rollouts so far. `to` names the worker of each sample in place of the
        rule; a sample that has to move later goes only to a worker with weights of `min_version` or
        newer.
        """
        events = []
        self._expect(samples)
        for i, sample in enumerate(samples):
            if sample.uid in self._jobs:
                raise ValueError(f"sample {sample.uid} is submitted although it has not come back")
            partial, destination = partials[i] if partials else None, None if to is None else to[i]
            job = Job(sample, self._env.event(), partial, max_tokens, min_version, destination)
            self._jobs[sample.uid] = job
            on_fire(job.done, self._came_back)
            events.append(job.done)
            if (
                job.partial is not None
                and max_tokens is not None
                and job.partial.tokens >= max_tokens
            ):
                self._hand_back(job, job.partial)
            else:
                self._waiting.shelve(
                    job,
                    self._waiting.evaluations if sample.is_evaluation else self._waiting.outside,
                )
        self.limit(self._waiting.most)
        return events

    def withdraw(self, samples: Iterable[Sample]) -> simpy.Event:
        """Take unfinished samples back: their events fire with the tokens so far. Return an event
        that fires with the rollouts, in order; a sample that had ended meanwhile is done."""
        jobs = [self._jobs[sample.uid] for sample in samples]
        for job in jobs:
            if job.done.triggered:
                continue  # its event fires at this very instant
            job.fate = "withdraw"
            if job.copy is not None:
                self._workers[job.copy.worker].abort(job.sample)
            else:
                self._waiting.take_out(job)
                self._hand_back(job, job.so_far)
        return gather(self._env, [job.done for job in jobs])

    def move(self, sample: Sample, worker: int | None = None) -> None:
        """Let a sample go on at another worker (None: where the rule says): its tokens come along;
        its KV cache does not, without a pool. A sample that was withdrawn, or ends meanwhile, does
        not move."""
        job = self._jobs[sample.uid]
        if job.done.triggered or job.fate == "withdraw":
            return
        if job.copy is not None and job.fate == "run":
            if job.copy.worker != worker:
                job.fate, job.destination = "move", worker
                self._workers[job.copy.worker].abort(sample)
            return
        job.destination = worker
        if job.copy is None and sample.uid in self._waiting.in_flight:
            self._waiting.take_out(job)
            self._go_on(job)
            self._feed()

    def duplicate(self, sample: Sample, worker: int, partial: Rollout, cached: float = 0.0) -> bool:
        """Let a sample that is at a worker be generated at another one, too, from `partial` on;
        `cached` is the share of its KV cache that comes over the network. The first copy to come to
        its end counts, and the others are aborted at once.

        Returns whether there is a duplicate now: not of a sample that ends, moves or waits, nor at
        a worker that has it already, takes no samples, or has too old weights.
        """
        job = self._jobs.get(sample.uid)
        if (
            job is None
            or job.done.triggered
            or job.copy is None
            or job.fate != "run"
            or not self._places.active[worker]
        ):
            return False
        here = [copy.worker for copy in (job.copy, *job.duplicates)]
        if worker in here or self._workers[worker].policy_version < job.min_version:
            return False
        copy = Copy(job, worker, job.copy.end_tokens)
        job.duplicates.append(copy)
        self._duplicates[worker] += 1
        self._submit(copy, partial, cached)
        return True

    def held(self) -> list[list[Sample]]:
        """Return the unfinished samples at each worker, in the order they came there; duplicates
        not counted."""
        return [
            [copy.job.sample for copy in copies if copy.job.copy is copy] for copies in self._copies
        ]

    def duplicated(self) -> list[list[Sample]]:
        """Return the samples of which each worker has a duplicate, in the order they came there;
        aborted ones till they end."""
        return [
            [copy.job.sample for copy in copies if copy.job.copy is not copy]
            for copies in self._copies
        ]

    def waiting(self) -> list[Rollout]:
        """Return the rollouts that are at no worker, as they are."""
        return [
            job.so_far for job in self._jobs.values() if job.copy is None and not job.done.triggered
        ]

    @property
    def active(self) -> list[int]:
        """The workers that take samples."""
        return list(np.flatnonzero(self._places.active).tolist())

    @property
    def number_active(self) -> int:
        """The number of workers that take samples."""
        return int(np.count_nonzero(self._places.active))

    @property
    def is_full(self) -> bool:
        """True if as many samples are in flight as may be: another would wait outside."""
        return self.in_flight >= self._waiting.most

    @property
    def lost(self) -> list[int]:
        """The workers that are lost, and not back yet."""
        return sorted(self._lost)

    def empty(self, worker: int) -> simpy.Event:
        """Return an event that fires when neither a sample nor a duplicate is at the worker."""
        event = self._env.event()
        self._until_empty[worker].append(event)
        self._fire_if_empty(worker)
        return event

    def activated(self, worker: int) -> simpy.Event:
        """Return an event that fires when the worker takes samples; at once if it does."""
        event = self._env.event()
        if self._places.active[worker]:
            return event.succeed()
        self._until_active[worker].append(event)
        return event

    def loss(self) -> simpy.Event:
        """Return an event that fires when the next worker is lost."""
        return self._loss.next

    def freed(self) -> simpy.Event:
        """Return an event that fires with the next worker that takes samples and, from then on, has
        nothing."""
        return self._freed.next

    def retire(self, worker: int, lost: bool = False) -> None:
        """Give the worker no more samples; those it has go on elsewhere (a lost worker ends its
        copies itself)."""
        (self._lost if lost else self._retired).add(worker)
        self._places.active[worker] = False
        for job in [copy.job for copy in self._copies[worker] if copy.job.copy is copy]:
            if job.fate == "run":
                job.fate = "lost" if lost else "move"
            if not lost:
                self._workers[worker].abort(job.sample)
        if not lost:
            self._abort(self._copies[worker])
        if not (lost and self._rule.on_loss == "wait"):
            for job in list(self._waiting.for_worker[worker].values()):
                self._waiting.take_out(job)
                self._waiting.enqueue(job)
        self._feed()
        if lost:
            self._loss.fire()

    def activate(self, worker: int, lost: bool = False) -> None:
        """End the retirement of a worker, or its loss. It takes samples again once neither
        lasts."""
        (self._lost if lost else self._retired).discard(worker)
        if worker in self._lost or worker in self._retired:
            return
        self._places.active[worker] = True
        succeed_all(self._until_active[worker])
        self._fill(worker)
        self.weights_changed()
        if not self._copies[worker]:
            self._freed.fire(worker)

    def weights_changed(self) -> None:
        """Start the samples that waited for a worker's new weights."""
        for job in list(self._waiting.for_weights.values()):
            self._waiting.take_out(job)
            self._waiting.enqueue(job)
        self._feed()

    def _feed(self) -> None:
        """Start what waits in the queue, as much of it as there are free places."""
        queue = self._waiting.queue
        while len(queue) and (free := self._places.number_free()):
            jobs: list[Job] = []
            while len(queue) and len(jobs) < free:
                if (job := self._waiting.dequeue()) is not None:
                    jobs.append(job)
            for version in sorted({job.min_version for job in jobs}):
                self._place([job for job in jobs if job.min_version == version], version)

    def _place(self, jobs: list[Job], min_version: int) -> None:
        """Place jobs that need the same version among the workers with free places. The rule does
        not know their number: a job placed at a worker that is full by then is placed again among
        the others."""
        for job in jobs if self._rule.programs else ():
            to = self.programs.request(job.so_far, self._env.now, self.active)
            if to is None:
                self._waiting.shelve(job, {})  # until `_check_programs` moves it
            else:
                self._start(job, to)
        while jobs and not self._rule.programs:
            able = self._places.free()
            if min_version:
                able &= np.array([worker.policy_version >= min_version for worker in self._workers])
            workers = able.nonzero()[0]
            if not workers.size:
                for job in jobs:
                    self._waiting.shelve(job, self._waiting.for_weights)
                return
            samples = [job.sample for job in jobs]
            places = self._rule.place(samples, self._load()[workers], self._placed, self.history)
            again = []
            for job, place in zip(jobs, places, strict=True):
                worker = int(workers[place])
                if self._places.free_at(worker):
                    self._start(job, worker)
                    self._placed += 1
                else:
                    again.append(job)
            jobs = again

    def _load(self) -> NDArray[np.int64]:
        """Return what rules see of each worker: duplicates take no place of a sample, but samples
        go where there are none."""
        return self._places.unfinished + self._duplicates

    def _fill(self, worker: int) -> None:
        """Start what waits for just this worker, or for weights as new as it has, while it has a
        free place."""
        shelf = self._waiting.for_worker[worker]
        while shelf and self._places.free_at(worker):
            self._start(next(iter(shelf.values())), worker)
        if self._waiting.for_weights and self._places.free_at(worker):
            version = self._workers[worker].policy_version
            able = (job for job in self._waiting.for_weights.values() if job.min_version <= version)
            if (job := next(able, None)) is not None:
                self._start(job, worker)

    def _fill_from_queue(self, worker: int) -> None:
        """Do what `_feed` does if no other worker has a free place: there is nothing to place."""
        while len(self._waiting.queue) and self._places.free_at(worker):
            if (job := self._waiting.dequeue()) is None:
                continue
            if job.min_version > self._workers[worker].policy_version:
                self._waiting.shelve(job, self._waiting.for_weights)
            else:
                self._start(job, worker)
                self._placed += 1

    def _check_programs(self) -> simpy.events.ProcessGenerator:
        """Pause and resume programs every few seconds. End where nothing else is under way."""
        while not idle(self._env, Background):
            yield self._env.timeout(CHECK_S) if self._jobs else Background(self._env, CHECK_S)
            for uid, worker in self.programs.check(self._env.now, self.active).items():
                self.move(self._jobs[uid].sample, worker)

    def turn(self, rollout: Rollout, ended: bool) -> None:
        """Note that a turn of a sample has ended, or that its tool has answered: with rules that
        admit programs, a paused one leaves its worker now."""
        if rollout.sample.uid in self.programs.all:
            if ended:
                self.programs.turn_ended(rollout)
            elif self.programs.request(rollout, self._env.now, self.active) is None:
                self.move(rollout.sample)

    def _start(self, job: Job, worker: int) -> None:
        if self._rule.programs:
            self.programs.put(job.sample.uid, worker, self._env.now)
        self._waiting.take_out(job)
        self._abort(copy for copy in job.duplicates if copy.worker == worker)
        job.destination = None
        self._places.take(worker, job)
        end_tokens = job.max_tokens
        if self._rule.chunk_tokens is not None:
            chunk_end = job.so_far.tokens + self._rule.chunk_tokens
            end_tokens = chunk_end if end_tokens is None else min(end_tokens, chunk_end)
        job.copy = Copy(job, worker, end_tokens)
        self._submit(job.copy, job.partial, job.pooled)

    def _submit(self, copy: Copy, partial: Rollout | None, cached: float) -> None:
        """Start a copy at its worker from `partial` on; its KV cache comes along if it is of the
        worker's weights."""
        worker, segments = self._workers[copy.worker], partial.segments if partial else ()
        self._copies[copy.worker][copy], self._empty[copy.worker] = None, False
        cached = (
            cached if segments and segments[-1].policy_version == worker.policy_version else 0.0
        )
        end = worker.submit(copy.job.sample, partial, copy.end_tokens, cached)
        on_fire(end, lambda end: self._copy_ended(copy, end))

    def _copy_ended(self, copy: Copy, end: Any) -> None:
        crowded = len(self._waiting.queue) > 0  # then no worker had a free place
        job, first, worker = copy.job, copy.job.copy, copy.worker
        del self._copies[worker][copy]
        if first is not copy:
            self._duplicates[worker] -= 1
            if not self._duplicate_counts(copy, end):
                self._fire_if_empty(worker)
                return
        if first is None:
            self._waiting.take_out(job)
        else:
            worker, job.copy = first.worker, None
            self._places.give_back(worker, job)
            if first is not copy:  # the duplicate has overtaken it
                self._duplicates[worker] += 1
                self._workers[worker].abort(job.sample)
        if end.ok:
            self._go_on_or_back(job, copy, end.value)
        else:
            end.defused = True
            self._abort(job.duplicates)
            del self._jobs[job.sample.uid]
            job.done.fail(end.value)
        self._fill(worker)
        if crowded:
            self._fill_from_queue(worker)
        else:
            self._feed()
        self._fire_if_empty(copy.worker)

    def _duplicate_counts(self, copy: Copy, end: Any) -> bool:
        """Return whether a duplicate that has ended is the first copy of its job to come to its
        end. One that ends early, its worker lost or retired, leaves its job as it is."""
        job = copy.job
        if copy not in job.duplicates:
            end.defused = True
            return False
        job.duplicates.remove(copy)
        if not end.ok or end.value.done:
            return True
        return (
            job.fate == "run"
            and copy.end_tokens is not None
            and end.value.tokens >= copy.end_tokens
        )

    def _abort(self, duplicates: Iterable[Copy]) -> None:
        """Abort duplicates, but for those that are aborted already."""
        for copy in list(duplicates):
            if copy in copy.job.duplicates:
                copy.job.duplicates.remove(copy)
                self._workers[copy.worker].abort(copy.job.sample)

    def _go_on_or_back(self, job: Job, copy: Copy, rollout: Rollout) -> None:
        """Decide what becomes of a job of which a copy has ended."""
        tokens, fate, left_lost = rollout.tokens, job.fate, copy.worker in self._lost
        finished = rollout.done or (job.max_tokens is not None and tokens >= job.max_tokens)
        cut = copy.end_tokens is not None and tokens >= copy.end_tokens
        if cut:
            self._abort(job.duplicates)
        if finished or fate == "withdraw" or (fate == "run" and not cut):
            self._hand_back(job, rollout)
            return
        job.partial, job.fate = rollout, "run"
        job.pooled = self._rule.kv_pool and fate != "lost" and not left_lost
        if (
            fate == "lost"
            and left_lost
            and job.destination is None
            and self._rule.on_loss == "wait"
        ):
            self._waiting.shelve(job, self._waiting.for_worker[copy.worker])
        else:
            self._go_on(job)

    def _go_on(self, job: Job) -> None:
        """Send a job to its destination, at once or when that has a free place, if it takes
        samples; else into the queue."""
        to, job.destination = job.destination, None
        if (
            to is None
            or not self._places.active[to]
            or self._workers[to].policy_version < job.min_version
        ):
            self._waiting.enqueue(job)
        elif self._places.free_at(to):
            self._start(job, to)
        else:
            self._waiting.shelve(job, self._waiting.for_worker[to])

    def _hand_back(self, job: Job, rollout: Rollout) -> None:
        self._abort(job.duplicates)
        self._recorder.came_back([rollout])
        if rollout.done:
            self.history.observe([rollout])
            self._waiting.queue.observe(rollout)
        job.done.succeed(rollout)

    def _came_back(self, done: Any) -> None:
        """Forget a job when its pipeline hears of it; until then it can still be asked for."""
        if done.ok:
            del self._jobs[done.value.sample.uid]
            if done.value.sample.uid in self.programs.all:
                self.programs.release(done.value.sample.uid)
            self._waiting.in_flight.discard(done.value.sample.uid)
            if self._waiting.outside or self._waiting.evaluations:
                self.limit(self._waiting.most)

    def _fire_if_empty(self, worker: int) -> None:
        if self._copies[worker]:
            return
        if not self._empty[worker]:
            self._empty[worker] = True
            if self._places.active[worker]:
                self._freed.fire(worker)
        succeed_all(self._until_empty[worker])
