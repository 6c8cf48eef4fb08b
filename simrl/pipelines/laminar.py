"""Laminar (arXiv 2510.12633): every worker goes from sub-batch to sub-batch on its own; tails of
several are packed onto few.

Invariant: a worker changes its weights only when it has nothing left to generate, so a response has
one version, from its first token to its last, also when it moves: only to a worker with the same
weights that has work of its own, and that finishes what it received before it loads others. (Only
the responses of a lost worker go on elsewhere under other weights.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import simpy

from simrl.pipelines.context import RunContext
from simrl.pipelines.streaming import GroupStream
from simrl.runtime.events import on_fire, once_an_instant
from simrl.trace.sample import Sample


def consolidate(left: Mapping[int, int], most: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the pairs (source, destination) of workers in which the source gives all its responses
    away (best fit, the paper's Algorithm 1): the emptiest source first, to the fullest destination
    that then holds no more than `most`; ties to the lower index. A destination keeps its responses.

    `left` and `most` are responses by worker, of workers that have the same weights and are ramping
    down.
    """
    held = dict(left)
    plan: list[tuple[int, int]] = []
    destinations: set[int] = set()
    for source in sorted(left, key=lambda worker: (left[worker], worker)):
        if source in destinations:
            continue
        fitting = [d for d in held if d != source and held[d] + held[source] <= most[d]]
        if fitting:
            destination = max(fitting, key=lambda worker: (held[worker], -worker))
            held[destination] += held.pop(source)
            destinations.add(destination)
            plan.append((source, destination))
    return plan


def laminar(
    run: RunContext, *, sub_batch: int | None, ramp_down: float | None
) -> simpy.events.ProcessGenerator:
    """Train whenever a batch of groups is finished, and wait for no worker. `ramp_down` None:
    nothing is repacked."""
    stream = GroupStream(run, room=None)  # workers submit, each for itself
    sub_batches = _SubBatches(run, stream, ramp_down)
    for worker in range(len(run.workers)):
        run.env.process(sub_batches.work(worker, sub_batch))
    batch = run.workload.batch_groups
    for _ in range(run.steps):
        while len(stream.buffer) < batch:
            yield stream.news()
        yield run.trainer.train(stream.take(stream.buffer[:batch]))
        sub_batches.repack_soon()


@dataclass
class _SubBatch:
    """A worker's sub-batch: the samples left to generate, by uid, its size in responses, and the
    version of its weights."""

    done: simpy.Event
    left: dict[int, Sample] = field(default_factory=dict)
    size: int = 0
    version: int = 0

    def end_if_empty(self) -> None:
        if not self.left and not self.done.triggered:
            self.done.succeed()


class _SubBatches:
    """The sub-batches of all workers, and the rule that moves their tails together."""

    def __init__(self, run: RunContext, stream: GroupStream, ramp_down: float | None) -> None:
        self.repack_soon = once_an_instant(
            run.env, self._repack
        )  # after everything else that happens in it
        self._at = [_SubBatch(run.env.event()) for _ in run.workers]
        self._ramping: set[int] = (
            set()
        )  # workers with little left, kept up to date: there may be thousands of workers
        self._worker_of: dict[int, int] = {}  # by uid
        self._run = run
        self._stream = stream
        self._ramp_down = ramp_down

    def work(self, worker: int, groups: int | None) -> simpy.events.ProcessGenerator:
        """Take a worker through its sub-batches of `groups` groups (None: its even share of a
        batch)."""
        run, sub_batch = self._run, self._at[worker]
        while True:
            yield run.dispatcher.activated(worker)
            if run.trainer.version > sub_batch.version:
                sub_batch.version = run.trainer.version
                # Nothing runs but responses from a lost worker, which end first.
                yield run.workers[worker].load_weights(sub_batch.version, running="drain")
            number = groups or -(-run.workload.batch_groups // max(len(run.dispatcher.active), 1))
            submitted = [pair for _ in range(number) for pair in self._stream.submit(to=worker)]
            sub_batch.left, sub_batch.done = (
                {sample.uid: sample for sample, _ in submitted},
                run.env.event(),
            )
            sub_batch.size = len(submitted)
            self._note(worker)
            for sample, end in submitted:
                self._worker_of[sample.uid] = worker
                on_fire(end, partial(self._ended, sample))
            yield sub_batch.done

    def _ended(self, sample: Sample, end: Any) -> None:
        """Take a finished response out of its worker's sub-batch."""
        worker = self._worker_of.pop(sample.uid)
        sub_batch = self._at[worker]
        del sub_batch.left[sample.uid]
        if end.ok:  # a failure reaches the run through the stream
            self._note(worker)
            sub_batch.end_if_empty()
            self.repack_soon()

    def _note(self, worker: int) -> None:
        """Note whether a worker is ramping down."""
        sub_batch = self._at[worker]
        if (
            self._ramp_down is not None
            and 0 < len(sub_batch.left) <= self._ramp_down * sub_batch.size
        ):
            self._ramping.add(worker)
        else:
            self._ramping.discard(worker)

    def _repack(self) -> None:
        """Move the responses of workers that are ramping down to few of them, among workers with
        the same weights."""
        dispatcher = self._run.dispatcher
        ramping: dict[int, dict[int, int]] = defaultdict(dict)
        for worker in sorted(self._ramping and self._ramping.intersection(dispatcher.active)):
            ramping[self._at[worker].version][worker] = len(self._at[worker].left)
        for workers in ramping.values():
            for source, destination in consolidate(
                workers, {worker: self._at[worker].size for worker in workers}
            ):
                emptied = self._at[source]
                for sample in emptied.left.values():
                    self._worker_of[sample.uid] = destination
                    dispatcher.move(sample, destination)
                self._at[destination].left.update(emptied.left)
                emptied.left = {}
                self._note(source)
                self._note(destination)
                emptied.end_if_empty()
