"""The rollout/train split adapted while it runs, from what was idle: GPUs go where they are missing.

Invariant: a unit of GPUs, a rollout worker's, belongs to the workers or to the trainer, never to both. A worker that leaves
takes no more samples, those it has go on elsewhere with their tokens, and only when it is empty may the trainer have its GPUs,
from an update's beginning on; a worker that comes loads the newest weights before it gets samples.

AReaL's limitations section (arXiv 2505.24298) asks for such an adaptation; verl's fully asynchronous recipe schedules
dynamically between the two. The rule here looks at the trainer's idle time alone: after every `every` updates, it gets as many
GPUs as would have kept it busy for `TARGET` of the time with the work it had. A trainer that waits has GPUs to spare; one
that never does may be what holds the rollout up. (Rollout GPUs that wait, wait for a step's last responses as well, and ones
that do not may be ahead of a trainer they only make staler: neither tells which side is short.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import simpy

from simrl.dispatch import Dispatcher
from simrl.result import Recorder
from simrl.trainer import SimulatedTrainer

TARGET = 0.85  # of its time that the trainer should be busy
BUSY_ENOUGH = (0.75, 0.95)  # nothing moves in between
MOST_MOVED = 0.125  # of all units, at a time: one window's idle time is no forecast


class LentWorker(Protocol):
    """What a worker lets be done with its GPUs."""

    def lend(self) -> simpy.Event: ...

    def restore(self) -> simpy.Event: ...


def wanted_train_units(units: int, train_units: int, train_busy: float, least: int) -> int:
    """How many units the trainer should have, of so many it has now and was busy with for a share of its time. Rollout keeps
    one at least."""
    low, high = BUSY_ENOUGH
    if low <= train_busy <= high:
        return train_units
    wanted = math.ceil(train_units * train_busy / TARGET)
    most = max(int(units * MOST_MOVED), 1)
    wanted = max(wanted, train_units + 1) if train_busy > high else min(wanted, train_units - 1)
    wanted = min(max(wanted, train_units - most), train_units + most)
    return min(max(wanted, least), units - 1)


def adapt(
    env: simpy.Environment,
    workers: Sequence[LentWorker],
    dispatcher: Dispatcher,
    trainer: SimulatedTrainer,
    recorder: Recorder,
    every: int,
    may_train: Callable[[int], bool],
) -> simpy.events.ProcessGenerator:
    """The process that adapts. `workers` are all units, the trainer's too; `may_train` says whether the trainer can do with so
    many GPUs."""
    gpus = recorder.lanes[0].gpus
    own = [lane for lane in trainer.lanes if lane >= len(workers)]  # GPUs that make no unit
    own_gpus = sum(recorder.lanes[lane].gpus for lane in own)
    least = next(n for n in range(len(workers) + 1) if may_train(own_gpus + n * gpus))
    while True:
        # From the end of an update to the end of another; the wait for the very first batch is like no other, and what was
        # under way when units moved is neither.
        yield trainer.published(trainer.version + 1)
        since_s, busy_s = env.now, trainer.busy_s
        yield trainer.published(trainer.version + every)
        lent = [lane for lane in trainer.lanes if lane not in own]
        wanted = wanted_train_units(len(workers), len(lent), (trainer.busy_s - busy_s) / (env.now - since_s), least)
        while wanted < len(workers) - 1 and not may_train(own_gpus + wanted * gpus):
            wanted += 1  # of the counts that the trainer can do with, the next
        if not may_train(own_gpus + wanted * gpus):
            continue
        if wanted > len(lent):
            leaving = dispatcher.active[-(wanted - len(lent)) :]
            for w in leaving:
                dispatcher.retire(w)
            for w in leaving:
                yield dispatcher.empty(w)
                yield workers[w].lend()
                recorder.role(w, "train", env.now)
            yield trainer.resize([*trainer.lanes, *leaving])
        elif wanted < len(lent):
            coming = lent[: len(lent) - wanted]
            yield trainer.resize([lane for lane in trainer.lanes if lane not in coming])
            for w in coming:
                recorder.role(w, "rollout", env.now)
            for w, loaded in [(w, workers[w].restore()) for w in coming]:
                yield loaded
                dispatcher.activate(w)
