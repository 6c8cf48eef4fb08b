"""The rollout/train split adapted while it runs, from what was idle: GPUs go where they are missing.

Invariant: a unit of GPUs, a rollout worker's, belongs to the workers or to the trainer, never to both. A worker that leaves
takes no more samples, those it has go on elsewhere with their tokens, and only when it is empty may the trainer have its GPUs,
from an update's beginning on; a worker that comes loads the newest weights before it gets samples.

AReaL's limitations section (arXiv 2505.24298) asks for such an adaptation; verl's fully asynchronous recipe schedules
dynamically between the two. The rule here: after every `every` updates, the split at which both sides would have been
equally busy with the work they did, no further than `MOST_MOVED` of all units at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import simpy

from simrl.dispatch import Dispatcher
from simrl.result import Recorder
from simrl.trainer import SimulatedTrainer
from simrl.worker import SimulatedWorker

MOST_MOVED = 0.25  # of all units, at a time: one window's idle times are no forecast


def balanced_units(units: int, rollout_units: int, rollout_busy: float, train_busy: float, least_train: int) -> int:
    """How many of the units should roll out, if the work of both sides stays as it is: `rollout_busy` and `train_busy` are the
    shares of their time in which they worked. Neither side gets nothing."""
    rollout_work = rollout_units * rollout_busy
    train_work = (units - rollout_units) * train_busy
    wanted = round(units * rollout_work / max(rollout_work + train_work, 1e-9))
    most = max(int(units * MOST_MOVED), 1)
    wanted = min(max(wanted, rollout_units - most), rollout_units + most)
    return min(max(wanted, 1), units - least_train)


def adapt(
    env: simpy.Environment,
    workers: Sequence[SimulatedWorker],
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
    since_s, since_update = env.now, trainer.version
    empty_s = [dispatcher.empty_s(worker.index) for worker in workers]
    while True:
        yield trainer.published(since_update + every)
        rolling = dispatcher.active
        seconds = env.now - since_s
        idle_s = sum(dispatcher.empty_s(w) - empty_s[w] for w in rolling)
        trained_s = sum(s.finished_s - s.started_s for s in recorder.steps[since_update:])
        wanted = balanced_units(
            len(workers), len(rolling), 1 - idle_s / (len(rolling) * seconds), trained_s / seconds, least
        )
        while not may_train(own_gpus + (len(workers) - wanted) * gpus):
            wanted -= 1  # of the counts that the trainer can do with, the next with more for it
        if wanted < len(rolling):
            leaving = rolling[wanted:]
            for w in leaving:
                dispatcher.retire(w)
            for w in leaving:
                yield dispatcher.empty(w)
                yield workers[w].lend()
                recorder.role(w, "train", env.now)
            yield trainer.resize([*trainer.lanes, *leaving])
        elif wanted > len(rolling):
            coming = [lane for lane in trainer.lanes if lane not in own][: wanted - len(rolling)]
            yield trainer.resize([lane for lane in trainer.lanes if lane not in coming])
            for w in coming:
                recorder.role(w, "rollout", env.now)
            for w, loaded in [(w, workers[w].restore()) for w in coming]:
                yield loaded
                dispatcher.activate(w)
        since_s, since_update = env.now, trainer.version
        empty_s = [dispatcher.empty_s(worker.index) for worker in workers]
