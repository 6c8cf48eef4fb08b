"""RLHFuse (arXiv 2409.13221), inter-stage fusion: while the tail of a rollout runs on a few workers, the others' GPUs infer.

Invariant: on-policy; every sample of a step is generated with one version and trained in that step. Once no more than a share
of a step's samples is unfinished, those go on at the few workers that hold most of them, their tokens kept, their KV cache
prefilled anew (§4.2). GPUs that hold no sample from then on switch to training and compute the log-probs of what is finished,
round after round; when the tail is done, all GPUs compute the rest and update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import simpy

from simrl.events import call_last, gather, on_fire
from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch
from simrl.rollout import Rollout


@dataclass(frozen=True)
class RLHFuse:
    """The pipeline with its parameters: see `simrl.systems.rlhfuse`."""

    threshold: float
    destinations: int | None
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

    def number_of_destinations(self, unfinished: int, started: int, workers: int) -> int:
        """So few workers that none gets more of the tail than each had of the whole step, if they are not given."""
        if self.destinations is not None:
            return min(self.destinations, workers)
        return math.ceil(unfinished / math.ceil(started / workers))


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

    def look(self) -> None:
        self.told = False
        if not self.in_tail and self.unfinished <= self.rule.threshold * self.started:
            self.in_tail = True
            if self.rule.migration and self.unfinished:
                self.migrate()
        news, self.news = self.news, self.stage.env.event()
        news.succeed()

    def migrate(self) -> None:
        """The tail goes on at the workers that hold most of it, shared evenly; the others are free when they have let it go."""
        dispatcher = self.stage.dispatcher
        active, held = dispatcher.active, dispatcher.held()
        count = self.rule.number_of_destinations(self.unfinished, self.started, len(active))
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
        """Rounds while the tail runs, each of as many samples at least as workers are free: fewer would leave GPUs idle."""
        while self.rule.fusion and self.unfinished:
            ready = self.finished[len(self.inferred) :]
            free = self.free_workers() if self.in_tail else []
            if free and len(ready) >= len(free):
                for worker in free:
                    if worker not in self.freed:
                        self.free(worker)
                self.inferred += ready
                yield self.stage.trainer.infer(ready, free)
            else:
                yield self.news

    def free_workers(self) -> list[int]:
        """Those that hold no sample, and are there."""
        dispatcher = self.stage.dispatcher
        lost = dispatcher.lost
        return [worker for worker, samples in enumerate(dispatcher.held()) if not samples and worker not in lost]

    def give_back(self) -> None:
        """The workers that were freed take samples again, but those that were lost meanwhile."""
        lost = self.stage.dispatcher.lost
        for worker in self.freed:
            if worker not in lost:
                self.stage.dispatcher.activate(worker)
