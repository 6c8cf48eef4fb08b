"""RunContext: what a pipeline is given. A pipeline is a generator function of it, with its
parameters as keyword arguments.

Invariant: a pipeline decides from events and its own bookkeeping; it never looks into a worker and
never assumes that time is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import simpy

from simrl.runtime.events import gather
from simrl.runtime.worker import RECOMPUTE, LoadMode, OnUpdate, RolloutWorker

if TYPE_CHECKING:  # so that systems can be listed without them
    from simrl.dispatch.dispatcher import Dispatcher
    from simrl.dispatch.elastic import ElasticPool
    from simrl.profile.rollout_times import RolloutTimes
    from simrl.runtime.recorder import Recorder
    from simrl.runtime.rollout import Rollout
    from simrl.runtime.trainer import Rewarder, Trainer
    from simrl.speculation.best_of_n import BestOfN
    from simrl.trace.workload import Workload


class DynamicSampling(NamedTuple):
    """The refilling of batches when groups with equal rewards are dropped
    (`simrl.pipelines.dynamic_sampling`): a round generates `over_sampling` times a batch's groups;
    after `max_rounds` the run ends with an error (None: no limit)."""

    over_sampling: float
    max_rounds: int | None


@dataclass(frozen=True)
class RunContext:
    """The clock, the actors, the workload (endless) and the number of updates of one run.

    `times` is profiled before the run: how long a worker takes for responses of a length.
    `on_update` says what a load of weights does to requests.
    `best_of_n` says what freed workers do, `dynamic_sampling` how batches are refilled. A scored
    group that `accepts` refuses is not trained. A worker has `lanes_each` lanes. A sequence has at
    most `context_tokens`. `layouts`: the run with workers of each tensor-parallel size that a
    planner may choose; none otherwise. `pool`: GPUs that change sides; None where none does.
    `around` makes a load of weights, and what has to come before or after it, such as an evaluation.
    `prefill`: workers that prefill for the `workers`, and load the same weights.
    """

    env: simpy.Environment
    workers: Sequence[RolloutWorker]
    dispatcher: Dispatcher
    trainer: Trainer
    rewarder: Rewarder
    recorder: Recorder
    workload: Workload
    times: RolloutTimes
    steps: int
    on_update: OnUpdate = RECOMPUTE
    best_of_n: BestOfN | None = None
    dynamic_sampling: DynamicSampling | None = None
    accepts: Callable[[list[Rollout]], bool] = lambda group: True
    lanes_each: int = 1
    context_tokens: int = 1
    layouts: tuple[Layout, ...] = ()
    pool: ElasticPool | None = None
    prefill: Sequence[RolloutWorker] = ()
    around: Callable[[Callable[[], simpy.Event]], simpy.Event] = lambda load: load()

    def load_weights(self, running: LoadMode | None = None) -> simpy.Event:
        """Load the newest weights at every worker, by the system's `on_update`, or with another
        mode for what is `running`. Fires when all have them, and an evaluation of them that
        stops training is over."""
        mode, retry_s = running or self.on_update.running, self.on_update.retry_s
        workers = *self.workers, *self.prefill

        def load() -> simpy.Event:
            return gather(
                self.env,
                [each.load_weights(self.trainer.version, mode, retry_s) for each in workers],
            )

        return self.around(load)


@dataclass(frozen=True)
class Layout:
    """The GPUs of a run as workers of `tp` GPUs, which load weights in `load_s`. One layout rolls
    out at a time. It takes the GPUs over with `form`, called with the version loaded last, and a
    load of weights."""

    run: RunContext
    tp: int
    load_s: float
    form: Callable[[int], None]


Pipeline = Callable[[RunContext], simpy.events.ProcessGenerator]
