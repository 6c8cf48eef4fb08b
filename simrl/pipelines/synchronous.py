"""Synchronous: rollout, reward, training, one after the other, all tokens from the current weights.

verl colocated (HybridFlow, arXiv 2409.19256) runs it with the trainer on the rollout workers' GPUs, an Open-R1-style split
on two sets of GPUs of which one always waits. Off-policyness is 0.
"""

import simpy

from simrl.events import gather
from simrl.pipelines import Stage


def synchronous(stage: Stage) -> simpy.events.ProcessGenerator:
    """Step v + 1 begins when every worker has the weights that step v made."""
    env, trainer = stage.env, stage.trainer
    for _ in range(stage.steps):
        samples = [sample for group in next(stage.batches) for sample in group]
        rollouts = yield gather(env, stage.dispatcher.submit(samples))
        scored = yield stage.rewarder.score(rollouts)
        yield trainer.train(scored)
        yield gather(env, [worker.load_weights(trainer.version) for worker in stage.workers])
