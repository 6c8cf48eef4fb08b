"""RLHFuse (arXiv 2409.13221), inter-stage fusion: while the tail of a rollout runs on a few workers, the others' GPUs infer.

Invariant: on-policy; every sample of a step is generated with one version and trained in that step. Once no more than a share
of a step's samples is unfinished, those go on at the few workers that hold most of them, their tokens kept, their KV cache
prefilled anew. GPUs that hold no sample from then on switch to training and compute the log-probs of what is finished,
round after round; when the tail is done, all GPUs compute the rest and update. Where the tail's workers are all lost, the GPUs
that were freed go on with it, after the round that runs. (The paper has no losses.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import simpy

from simrl.events import call_last, gather, on_fire
from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch
from simrl.profile import RolloutTimes
from simrl.rollout import Rollout

_LONGEST = 1 << 40  # tokens: more than any response has


@dataclass(frozen=True)
class RLHFuse:
    """The pipeline with its parameters: see `simrl.systems.rlhfuse`."""

    threshold: float
    destinations: int | None
    slowdown: float
    round_samples: int
    migration: bool
    fusion: bool

    def __call__(self, stage: Stage) -> simpy.events.ProcessGenerator:
        for k in range(stage.steps):
            if k:
                yield gather(stage.env, [worker.load_weights(stage.trainer.version) for worker in stage.workers])
            step = _Step(self, stage)
            yield from step.roll_out()
            yield stage.trainer.train(step.batch.rollouts, prepared=step.inferred)
            step.give_back()

    def number_of_destinations(self, unfinished: int, started: int, workers: int, times: RolloutTimes) -> int:
        """If they are not given, so few workers that none gets more of the tail than each had of the whole step, which it could
        hold, and that the longest response takes at most `slowdown` longer than with the tail spread over all workers."""
        if self.destinations is not None:
            return min(self.destinations, workers)
        most_s = (1 + self.slowdown) * times.batch_s(_LONGEST, math.ceil(unfinished / workers))
        fewest = math.ceil(unfinished / math.ceil(started / workers))
        for count in range(fewest, workers):
            if times.batch_s(_LONGEST, math.ceil(unfinished / count)) <= most_s:
                return count
        return workers


class _Step:
    """One step's rollout: what is finished, what of it is inferred, the workers that were freed for that."""

    def __init__(self, rule: RLHFuse, stage: Stage) -> None:
        self.rule = rule
        self.stage = stage
        self.batch = Batch(stage)
        self.started = 0
        self.finished: list[Rollout] = []
        self.inferred: list[Rollout] = []
        self.freed: list[int] = []
        self.in_tail = False
        self.inferring = False
        self.recalled = False
        self.news = stage.env.event()
        self.told = False

    @property
    def unfinished(self) -> int:
        return self.started - len(self.finished)

    def roll_out(self) -> simpy.events.ProcessGenerator:
        """To the last reward, and to the end of the round of inference that runs then."""
        stage, groups = self.stage, self.stage.workload.next_batch()
        samples = [sample for group in groups for sample in group]
        self.started = len(samples)
        ends = stage.dispatcher.submit(samples)
        for end in ends:
            on_fire(end, self.ended)
        each = iter(ends)
        of_groups = [gather(stage.env, [next(each) for _ in group]) for group in groups]
        for of_group in of_groups:
            on_fire(of_group, lambda end: self.batch.add(end.value) if end.ok else None)
        on_fire(stage.dispatcher.loss(), self.somebody_lost)
        inference = stage.env.process(self.infer_in_rounds())
        yield gather(stage.env, of_groups)
        self.batch.close()
        yield inference
        yield self.batch.complete

    def ended(self, end: Any) -> None:
        """A response is finished."""
        if end.ok:  # else who gathers them hears of it
            self.finished.append(end.value)
            self.tell()

    def tell(self) -> None:
        """Wakes the inference when all that ends at this instant has ended."""
        if not self.told:
            self.told = True
            call_last(self.stage.env, self.look)

    def somebody_lost(self, loss: Any) -> None:
        if self.unfinished:
            on_fire(self.stage.dispatcher.loss(), self.somebody_lost)
            self.tell()

    def look(self) -> None:
        self.told = False
        if self.freed and self.unfinished and not self.inferring and not self.stage.dispatcher.active:
            self.recalled = True
            self.give_back()
        if not self.in_tail and self.unfinished <= self.rule.threshold * self.started:
            self.in_tail = True
            if self.rule.migration and self.unfinished and self.stage.dispatcher.active:
                self.migrate()
        news, self.news = self.news, self.stage.env.event()
        news.succeed()

    def migrate(self) -> None:
        """The tail goes on at the workers that hold most of it, shared evenly; the others are free when they have let it go."""
        dispatcher = self.stage.dispatcher
        active, held = dispatcher.active, dispatcher.held()
        count = self.rule.number_of_destinations(self.unfinished, self.started, len(active), self.stage.times)
        by_held = sorted(active, key=lambda worker: -len(held[worker]))
        load = {worker: len(held[worker]) for worker in by_held[:count]}
        for worker in sorted(by_held[count:]):
            for sample in held[worker]:
                target = min(load, key=lambda destination: (load[destination], destination))
                load[target] += 1
                dispatcher.move(sample, target)
            self.free(worker)

    def free(self, worker: int) -> None:
        self.freed.append(worker)
        self.stage.dispatcher.retire(worker)
        on_fire(self.stage.dispatcher.empty(worker), lambda _: self.tell())

    def infer_in_rounds(self) -> simpy.events.ProcessGenerator:
        """Rounds while the tail runs, of at least one sample a free worker, for fewer would leave GPUs idle, and at most
        `round_samples`: the update waits for the last round."""
        while self.rule.fusion and self.unfinished:
            free = self.free_workers() if self.in_tail and not self.recalled else []
            done = len(self.inferred)
            ready = self.finished[done : done + self.rule.round_samples * len(free)]
            if free and len(ready) >= len(free):
                for worker in free:
                    if worker not in self.freed:
                        self.free(worker)
                self.inferred += ready
                self.inferring = True
                yield self.stage.trainer.infer(ready, free)
                self.inferring = False
                self.tell()
            else:
                yield self.news

    def free_workers(self) -> list[int]:
        """Those that hold no sample, and are there; none while one that was freed still has to let go of some."""
        lost, held = self.stage.dispatcher.lost, self.stage.dispatcher.number_held()
        if any(held[worker] for worker in self.freed):
            return []
        return [worker for worker, number in enumerate(held) if not number and worker not in lost]

    def give_back(self) -> None:
        """The workers that were freed take samples again."""
        freed, self.freed = self.freed, []
        for worker in freed:
            self.stage.dispatcher.activate(worker)
