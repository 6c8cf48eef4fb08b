"""One step off: the rollout of a batch overlaps the training of the batch before (verl one_step_off; DeepScaleR).

Batch k is rolled out while batch k - 1 trains, on the weights that the training of batch k - 2 published: off-policyness is
exactly 1 from the second batch on.
"""

import simpy

from simrl.events import gather
from simrl.pipelines import Stage


def one_step_off(stage: Stage) -> simpy.events.ProcessGenerator:
    """Needs disjoint rollout and training GPUs. The rollout that overlaps the last training is left in flight."""
    env, trainer = stage.env, stage.trainer
    training = env.event().succeed()
    for step in range(stage.steps + 1):
        if step > 0:
            yield gather(env, [worker.load_weights(trainer.version) for worker in stage.workers])
        samples = [sample for group in next(stage.batches) for sample in group]
        rollout = gather(env, stage.dispatcher.submit(samples))
        if step == stage.steps:
            break
        scored = yield stage.rewarder.score((yield rollout))
        yield training
        training = trainer.train(scored)
    yield training
