"""A pipeline: k batches are rolled out one after the other on the same weights, then all workers wait for the trainer.

Invariant: the rollout of batch j·k begins when all batches before it are trained, with the weights they made; the k - 1 that
follow begin as soon as the batch before is complete. So the off-policyness of a token is at most k - 1.
"""

from dataclasses import dataclass
from itertools import count
from typing import Annotated

import simpy
from pydantic import Field, validate_call

from simrl.dispatch import DISPATCHES
from simrl.events import gather
from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch
from simrl.pipelines.full_batch import full_batch
from simrl.systems import System


@dataclass(frozen=True)
class BarrierEvery:
    """The pipeline: a function of the stage, as a class because it has a parameter."""

    k: int

    def __call__(self, stage: Stage) -> simpy.events.ProcessGenerator:
        batches: simpy.Store = simpy.Store(stage.env)
        stage.env.process(self._roll_out(stage, batches))
        return self._train(stage, batches)

    def _roll_out(self, stage: Stage, batches: simpy.Store) -> simpy.events.ProcessGenerator:
        collect = full_batch(stage)  # what belongs to a batch: the next step of the trace, to its last response
        for number in count():
            if number and number % self.k == 0:
                yield stage.trainer.published(number)
                yield gather(stage.env, [worker.load_weights(number) for worker in stage.workers])
            batch = Batch(stage)
            batches.put(batch)
            yield from collect(batch)
            batch.close()

    def _train(self, stage: Stage, batches: simpy.Store) -> simpy.events.ProcessGenerator:
        for number in range(1, stage.steps + 1):
            batch = yield batches.get()
            yield batch.complete
            yield stage.trainer.train(batch.rollouts, publish=number % self.k == 0)


@validate_call
def barrier_every(
    k: Annotated[int, Field(ge=1, le=100)] = 4, rollout_share: Annotated[float, Field(gt=0, lt=1)] = 0.75
) -> System:
    """Rollout and training overlap for k batches, then all wait: new weights every k updates; off-policyness at most k - 1.

    Weights travel once in k updates, and workers do not wait for the trainer in between. k = 1 is `split`.
    Not modelled: nothing beyond what `split` leaves out.
    """
    return System(
        name="barrier_every",
        pipeline=BarrierEvery(k),
        schedule=f"a barrier every {k} batches",
        dispatch=DISPATCHES["least_requests"],
        rollout_share=rollout_share,
        minibatches=1,
        log_probs=1,
        controller=True,  # batches go through one process
        paper="none",
        off_policyness=k - 1,
    )
