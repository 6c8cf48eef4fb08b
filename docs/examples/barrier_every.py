"""A pipeline: k batches are rolled out one after the other on one policy version, then all workers wait for the trainer.

Invariant: the rollout of batch j·k begins when all batches before it are trained, with the weights they made; the k - 1 that
follow begin as soon as the batch before is complete. So the off-policyness of a token is at most k - 1.
"""

from functools import partial
from itertools import count
from typing import Annotated

import simpy
from pydantic import Field, validate_call

from simrl.dispatch.rules import DISPATCHES
from simrl.pipelines.batch import Batch
from simrl.pipelines.context import RunContext
from simrl.pipelines.full_batch import full_batch
from simrl.runtime.events import gather
from simrl.systems.system import System


def pipeline(run: RunContext, *, k: int) -> simpy.events.ProcessGenerator:
    """Train batch after batch, and publish every `k`th update."""
    batches: simpy.Store = simpy.Store(run.env)
    run.env.process(roll_out(run, batches, k))
    for number in range(1, run.steps + 1):
        batch = yield batches.get()
        yield batch.complete
        yield run.trainer.train(batch.rollouts, publish=number % k == 0)


def roll_out(run: RunContext, batches: simpy.Store, k: int) -> simpy.events.ProcessGenerator:
    """Roll out batch after batch; after every `k`th, wait for the trainer and load its weights."""
    collect = full_batch(
        run
    )  # what belongs to a batch: the next step of the trace, to its last response
    for number in count():
        if number and number % k == 0:
            yield run.trainer.published(number)
            yield gather(run.env, [worker.load_weights(number) for worker in run.workers])
        batch = Batch(run)
        batches.put(batch)
        yield from collect(batch)
        batch.close()


@validate_call
def barrier_every(
    k: Annotated[int, Field(ge=1, le=100)] = 4,
    rollout_share: Annotated[float, Field(gt=0, lt=1)] = 0.75,
) -> System:
    """Rollout and training overlap for k batches, then all wait: new weights every k updates; off-policyness at most k - 1.

    Weights travel once in k updates, and workers do not wait for the trainer in between. k = 1 is `split`.
    Not modelled: nothing beyond what `split` leaves out.
    """
    return System(
        name="barrier_every",
        pipeline=partial(pipeline, k=k),
        schedule=f"a barrier every {k} batches",
        dispatch=DISPATCHES["least_requests"],
        rollout_share=rollout_share,
        minibatches=1,
        log_probs=1,
        controller=True,  # batches go through one process
        paper="none",
        off_policyness=k - 1,
    )
