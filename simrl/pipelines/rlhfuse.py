"""RLHFuse (arXiv 2409.13221), inter-stage fusion: while the tail of a rollout runs on a few
workers, the others' GPUs infer.

Invariant: on-policy; every sample of a step is generated with one version and trained in that step.
Once no more than a share of a step's samples is unfinished, those go on at the few workers that
hold most of them. GPUs that hold no sample from then on switch to training and compute the
log-probs of what is finished, round after round. Where the tail's workers are all lost, the GPUs
that were freed go on with it, after the round that runs. (The paper has no losses.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import simpy

from simrl.pipelines.batch import Batch, submit_groups
from simrl.pipelines.context import RunContext
from simrl.runtime.events import Signal, on_fire, once_an_instant
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Group

if TYPE_CHECKING:  # compiled
    from simrl.profile.rollout_times import RolloutTimes

_LONGEST = 1 << 40  # tokens: more than any response has


def rlhfuse(
    run: RunContext,
    *,
    threshold: float,
    destinations: int | None,
    slowdown: float,
    round_samples: int,
    migration: bool,
    fusion: bool,
) -> simpy.events.ProcessGenerator:
    """Train step after step; GPUs that the tail of a rollout does not need compute log-probs
    meanwhile."""
    destinations_of = (
        partial(number_of_destinations, run.times, destinations, slowdown) if migration else None
    )
    for k in range(run.steps):
        if k:
            yield run.load_weights()
        step = RolloutStep(run, threshold, destinations_of)
        yield from step.roll_out(run.workload.next_batch(), round_samples if fusion else 0)
        yield run.trainer.train(step.batch.rollouts, prepared=step.inferred)
        step.give_back()


def number_of_destinations(
    times: RolloutTimes,
    destinations: int | None,
    slowdown: float,
    unfinished: int,
    started: int,
    workers: int,
) -> int:
    """Return the number of workers for the tail: `destinations`, or the fewest with which none gets
    more of the tail than each had of the whole step, which it could hold, and the longest response
    takes at most `slowdown` longer than on all workers."""
    if destinations is not None:
        return min(destinations, workers)
    most_s = (1 + slowdown) * times.batch_s(_LONGEST, math.ceil(unfinished / workers))
    fewest = math.ceil(unfinished / math.ceil(started / workers))
    for number in range(fewest, workers):
        if times.batch_s(_LONGEST, math.ceil(unfinished / number)) <= most_s:
            return number
    return workers


class RolloutStep:
    """The rollout of one step: its finished responses, those with inferred log-probs, and the
    workers freed to infer. With `gradients`, freed workers also compute the gradients of scored
    groups (RollPacker)."""

    def __init__(
        self,
        run: RunContext,
        threshold: float,
        destinations_of: Callable[[int, int, int], int] | None,
        gradients: bool = False,
    ) -> None:
        self.batch = Batch(run)
        self.batch.accepts = self._scored
        self._gradients = gradients
        self.inferred: list[Rollout] = []
        self._run = run
        self._threshold = threshold
        self._destinations_of = destinations_of
        self._started = 0
        self._finished: list[Rollout] = []
        self._freed: list[int] = []
        self._in_tail = False
        self._inferring = False
        self._recalled = False
        self._news = Signal(run.env)
        self._wake = once_an_instant(run.env, self._look)

    @property
    def _unfinished(self) -> int:
        return self._started - len(self._finished)

    def roll_out(self, groups: list[Group], round_samples: int) -> simpy.events.ProcessGenerator:
        """Roll groups out to the last reward, and to the end of the round of inference that runs
        then."""
        self._started = sum(map(len, groups))
        finished = submit_groups(self._run, self.batch, groups, self._response_ended)
        on_fire(self._run.dispatcher.loss(), self._worker_lost)
        inference = self._run.env.process(self._infer_in_rounds(round_samples))
        yield finished
        self.batch.close()
        yield inference
        yield self.batch.complete

    def give_back(self) -> None:
        """Let the workers that were freed take samples again."""
        while self._freed:
            self._run.dispatcher.activate(self._freed.pop(0))

    def _scored(self, group: list[Rollout]) -> bool:
        """Look when a group is scored; return whether it is trained."""
        self._wake()
        return self._run.accepts(group)

    def _response_ended(self, end: Any) -> None:
        if end.ok:  # a failure reaches the run through its group
            self._finished.append(end.value)
            self._wake()

    def _worker_lost(self, loss: Any) -> None:
        if self._unfinished:
            on_fire(self._run.dispatcher.loss(), self._worker_lost)
            self._wake()

    def _look(self) -> None:
        """Begin the tail when it is time, recall freed workers when no others are left, and wake
        the inference."""
        if (
            self._freed
            and self._unfinished
            and not self._inferring
            and not self._run.dispatcher.active
        ):
            self._recalled = True
            self.give_back()
        if not self._in_tail and self._unfinished <= self._threshold * self._started:
            self._in_tail = True
            if (
                self._destinations_of is not None
                and self._unfinished
                and self._run.dispatcher.active
            ):
                self._migrate(self._destinations_of)
        self._news.fire()

    def _migrate(self, destinations_of: Callable[[int, int, int], int]) -> None:
        """Move the tail to the workers that hold most of it, shared evenly; the others are free
        when they have let it go."""
        dispatcher = self._run.dispatcher
        active, held = dispatcher.active, dispatcher.held()
        number = destinations_of(self._unfinished, self._started, len(active))
        by_held = sorted(active, key=lambda worker: -len(held[worker]))
        load = {worker: len(held[worker]) for worker in by_held[:number]}
        for worker in sorted(by_held[number:]):
            for sample in held[worker]:
                target = min(load, key=lambda destination: (load[destination], destination))
                load[target] += 1
                dispatcher.move(sample, target)
            self._free(worker)

    def _free(self, worker: int) -> None:
        self._freed.append(worker)
        self._run.dispatcher.retire(worker)
        on_fire(self._run.dispatcher.empty(worker), lambda _: self._wake())

    def _infer_in_rounds(self, round_samples: int) -> simpy.events.ProcessGenerator:
        """Infer in rounds while the tail runs. A round has at least one sample per free worker, or
        GPUs would idle, and at most `round_samples`, as the update waits for the last round."""
        while round_samples and self._unfinished:
            free = self._free_workers() if self._in_tail and not self._recalled else []
            done = len(self.inferred)
            scored = [rollout for group in self.batch.groups for rollout in group]
            usable = scored if self._gradients else self._finished
            ready = usable[done : done + round_samples * len(free)]
            if free and len(ready) >= len(free):
                for worker in free:
                    if worker not in self._freed:
                        self._free(worker)
                self.inferred += ready
                self._inferring = True
                count = self._run.lanes_each
                lanes = [
                    lane for worker in free for lane in range(worker * count, (worker + 1) * count)
                ]
                yield self._run.trainer.infer(ready, lanes, self._gradients)
                self._inferring = False
                self._wake()
            else:
                yield self._news.next

    def _free_workers(self) -> list[int]:
        """Return the workers that hold no sample and are not lost; none while a freed one still has
        to let go of samples."""
        lost, held = self._run.dispatcher.lost, self._run.dispatcher.unfinished.tolist()
        if any(held[worker] for worker in self._freed):
            return []
        return [worker for worker, number in enumerate(held) if not number and worker not in lost]
