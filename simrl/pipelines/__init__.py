"""Pipelines: who waits for whom. One file a pipeline, each a generator that runs on a simulated or a wall clock.

Invariant: a pipeline decides from events and its own bookkeeping; it never looks into a worker and never assumes that
time is simulated.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import simpy

from simrl.dispatch import Dispatcher
from simrl.result import Recorder
from simrl.trace import Sample
from simrl.trainer import Rewarder, Trainer
from simrl.worker import RolloutWorker

Batch = list[list[Sample]]  # the groups of one training step


@dataclass(frozen=True)
class Stage:
    """Everything a pipeline moves: the clock, the actors, the workload (endless) and how many updates to make."""

    env: simpy.Environment
    workers: list[RolloutWorker]
    dispatcher: Dispatcher
    trainer: Trainer
    rewarder: Rewarder
    recorder: Recorder
    batches: Iterator[Batch]
    steps: int


Pipeline = Callable[[Stage], simpy.events.ProcessGenerator]
