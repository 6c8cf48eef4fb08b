"""Pipelines: who waits for whom. One file a pipeline, each a generator that runs on a simulated or a wall clock.

Invariant: a pipeline decides from events and its own bookkeeping; it never looks into a worker and never assumes that
time is simulated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import simpy

from simrl.dispatch import Dispatcher
from simrl.profile import RolloutTimes
from simrl.result import Recorder
from simrl.rollout import Rollout
from simrl.speculation.best_of_n import BestOfN
from simrl.trainer import Rewarder, Trainer
from simrl.worker import RolloutWorker
from simrl.workload import Workload


@dataclass(frozen=True)
class Stage:
    """Everything a pipeline moves: the clock, the actors, the workload (endless) and how many updates to make. `times` is what
    was profiled before the run: how long a worker takes for responses of a length; `best_of_n` is what freed workers do. A
    scored group that `accepts` does not want is not trained."""

    env: simpy.Environment
    workers: list[RolloutWorker]
    dispatcher: Dispatcher
    trainer: Trainer
    rewarder: Rewarder
    recorder: Recorder
    workload: Workload
    times: RolloutTimes
    steps: int
    best_of_n: BestOfN | None = None
    accepts: Callable[[list[Rollout]], bool] = lambda group: True


Pipeline = Callable[[Stage], simpy.events.ProcessGenerator]
