"""Laminar (arXiv 2510.12633): every worker goes from sub-batch to sub-batch on its own; tails of several are packed onto few.

Invariant: a worker changes its weights only when it has nothing left to generate, so a response has one version, from its
first token to its last, also when it moves: it moves only to a worker with the same weights that has work of its own, and that
worker then ends what came to it before it loads others. Nobody waits for anybody: workers pull what is published from the
relay on their host, the trainer takes finished groups from a buffer, those that were finished first before others. (Only what
a lost worker had goes on elsewhere under the weights that are there.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import simpy

from simrl.events import call_last, on_fire
from simrl.pipelines import Stage
from simrl.pipelines.streaming import GroupStream
from simrl.trace import Sample


def consolidate(left: Mapping[int, int], most: Mapping[int, int]) -> list[tuple[int, int]]:
    """Which workers give all they have left to which (best fit, the paper's Algorithm 1): the emptiest first, each to the
    fullest that then holds no more than `most`; ties to the lower index. A worker that was given something keeps what it has.

    `left` and `most` are responses by worker, of workers that have the same weights and are ramping down.
    """
    held = dict(left)
    plan: list[tuple[int, int]] = []
    receivers: set[int] = set()
    for source in sorted(left, key=lambda worker: (left[worker], worker)):
        if source in receivers:
            continue
        fitting = [d for d in held if d != source and held[d] + held[source] <= most[d]]
        if fitting:
            destination = max(fitting, key=lambda worker: (held[worker], -worker))
            held[destination] += held.pop(source)
            receivers.add(destination)
            plan.append((source, destination))
    return plan


@dataclass(frozen=True)
class Laminar:
    """The pipeline with its parameters: see `simrl.systems.laminar`. `ramp_down` is None where nothing is repacked."""

    sub_batch: int | None
    ramp_down: float | None

    def __call__(self, stage: Stage) -> simpy.events.ProcessGenerator:
        run = _Run(self, stage)
        for worker in range(len(stage.workers)):
            stage.env.process(run.work(worker))
        return run.train()


class _Run:
    """One run: what each worker still has to generate, and under which weights."""

    def __init__(self, rule: Laminar, stage: Stage) -> None:
        self.rule = rule
        self.stage = stage
        self.stream = GroupStream(stage, room=lambda: 0)  # workers submit, each for itself
        workers = len(stage.workers)
        self.left: list[dict[int, Sample]] = [{} for _ in range(workers)]  # by uid
        self.worker_of: dict[int, int] = {}
        self.most = [0] * workers  # responses of the sub-batch, as it began
        self.version = [0] * workers
        self.done = [stage.env.event() for _ in range(workers)]
        self.ramping: set[int] = set()  # workers that have little left
        self.looking = False

    def train(self) -> simpy.events.ProcessGenerator:
        """Trains whenever a batch of groups is there; waits for no worker."""
        batch = self.stage.workload.batch_groups
        for _ in range(self.stage.steps):
            while len(self.stream.buffer) < batch:
                yield self.stream.news()
            yield self.stage.trainer.train(self.stream.take(self.stream.buffer[:batch]))
            self.look_whether_to_repack()

    def work(self, worker: int) -> simpy.events.ProcessGenerator:
        """One worker's way through its sub-batches."""
        stage = self.stage
        while True:
            yield stage.dispatcher.activated(worker)
            if stage.trainer.version > self.version[worker]:
                self.version[worker] = stage.trainer.version
                # Nothing runs, but for what came from a worker that was lost: that ends first.
                yield stage.workers[worker].load_weights(self.version[worker], running="drain")
            self.done[worker] = stage.env.event()
            groups = self.rule.sub_batch or -(-stage.workload.batch_groups // max(len(stage.dispatcher.active), 1))
            submitted = [pair for _ in range(groups) for pair in self.stream.submit(to=worker)]
            self.left[worker] = {sample.uid: sample for sample, _ in submitted}
            self.most[worker] = len(submitted)
            self.look_whether_ramping(worker)
            for sample, end in submitted:
                self.worker_of[sample.uid] = worker
                on_fire(end, partial(self.ended, sample))
            yield self.done[worker]

    def ended(self, sample: Sample, end: Any) -> None:
        """A response is finished: its worker may be done, or ramping down."""
        worker = self.worker_of.pop(sample.uid)
        del self.left[worker][sample.uid]
        if not end.ok:
            return  # the stream tells
        self.look_whether_ramping(worker)
        self.look_whether_done(worker)
        self.look_whether_to_repack()

    def look_whether_ramping(self, worker: int) -> None:
        if 0 < len(self.left[worker]) <= (self.rule.ramp_down or 0.0) * self.most[worker]:
            self.ramping.add(worker)
        else:
            self.ramping.discard(worker)

    def look_whether_done(self, worker: int) -> None:
        if not self.left[worker] and not self.done[worker].triggered:
            self.done[worker].succeed()

    def look_whether_to_repack(self) -> None:
        """Once an instant, when all that happens in it has happened."""
        if self.rule.ramp_down is not None and not self.looking:
            self.looking = True
            call_last(self.stage.env, self.repack)

    def repack(self) -> None:
        """Among workers with the same weights, those that are ramping down empty themselves into few of them."""
        self.looking = False
        ramping: dict[int, dict[int, int]] = defaultdict(dict)
        for worker in sorted(self.ramping):
            if self.stage.dispatcher.takes_samples(worker):
                ramping[self.version[worker]][worker] = len(self.left[worker])
        for workers in ramping.values():
            for source, destination in consolidate(workers, dict(enumerate(self.most))):
                for sample in self.left[source].values():
                    self.worker_of[sample.uid] = destination
                    self.stage.dispatcher.move(sample, destination)
                self.left[destination].update(self.left[source])
                self.left[source] = {}
                self.look_whether_ramping(source)
                self.look_whether_ramping(destination)
                self.look_whether_done(source)
