"""AReaL (arXiv 2505.24298): generation never waits for training; staleness is bounded where groups are admitted.

Admission (§5.1, and the code's capacity): with B groups a step, i the current version and N_r the groups submitted so far
and not dropped, floor((N_r - 1) / B) ≤ i + η, and no more than `max_concurrent` groups at once. The oldest finished groups
train first, each once. On an update, running requests are interrupted, load the weights, recompute their KV cache and go on,
so a response may carry segments of several versions. The bound is on counts: a straggler can still be trained staler than η.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import simpy

from simrl.events import gather, on_fire
from simrl.pipelines import Stage
from simrl.pipelines.batchwise import submit_groups
from simrl.rollout import Rollout
from simrl.worker import LoadMode


def capacity(eta: int, version: int, batch: int, max_concurrent: int, running: int, accepted: int) -> int:
    """How many more groups may be submitted now (AReaL's `StalenessManager`); not positive means none."""
    return min(max(1, max_concurrent) - running, (eta + version + 1) * batch - (accepted + running))


@dataclass(frozen=True)
class Areal:
    """The pipeline with its parameters: see `simrl.systems.areal`."""

    eta: int
    interruptible: bool
    max_concurrent: int | None
    on_stale: Literal["train", "drop"]

    def __call__(self, stage: Stage) -> simpy.events.ProcessGenerator:
        return _Run(self, stage).trainer_loop()


class _Run:
    """One run's bookkeeping: groups running, groups accepted (finished or trained, and not dropped), the buffer."""

    def __init__(self, rule: Areal, stage: Stage) -> None:
        self.rule = rule
        self.stage = stage
        self.batch = stage.workload.batch_groups
        self.running = 0
        self.accepted = 0
        self.buffer: deque[list[Rollout]] = deque()
        self.news = stage.env.event()

    def trainer_loop(self) -> simpy.events.ProcessGenerator:
        """Trains whenever a batch of groups is there, then updates every worker in flight."""
        stage, trainer = self.stage, self.stage.trainer
        self.admit()
        for _ in range(stage.steps):
            self.drop_stale()
            while len(self.buffer) < self.batch:
                yield self.news
                self.drop_stale()
            batch = [self.buffer.popleft() for _ in range(self.batch)]
            yield trainer.train([rollout for group in batch for rollout in group])
            mode: LoadMode = "recompute" if self.rule.interruptible else "drain"
            loads = [worker.load_weights(trainer.version, running=mode) for worker in stage.workers]
            self.admit()
            yield gather(stage.env, loads)

    def admit(self) -> None:
        """Submits groups while the rule allows."""
        stage, rule = self.stage, self.rule
        concurrent = self.batch if rule.max_concurrent is None else rule.max_concurrent
        while capacity(rule.eta, stage.trainer.version, self.batch, concurrent, self.running, self.accepted) > 0:
            self.running += 1
            [end] = submit_groups(stage, stage.workload.next_groups(1))
            on_fire(end, self.group_ended)

    def group_ended(self, ended: Any) -> None:
        if not ended.ok:
            raise ended.value  # a worker that died, or its engine's error
        on_fire(self.stage.rewarder.score(ended.value), self.group_scored)

    def group_scored(self, scored: Any) -> None:
        self.running -= 1
        self.accepted += 1
        self.buffer.append(scored.value)
        self.admit()
        self.tell()

    def drop_stale(self) -> None:
        """With `on_stale="drop"`, groups with a token older than η leave the buffer and the count."""
        if self.rule.on_stale == "train":
            return
        oldest = self.stage.trainer.version - self.rule.eta
        kept: deque[list[Rollout]] = deque()
        for group in self.buffer:
            if min(s.policy_version for r in group for s in r.segments) < oldest:
                self.stage.recorder.dropped(group)
                self.accepted -= 1
            else:
                kept.append(group)
        self.buffer = kept
        self.admit()

    def tell(self) -> None:
        """Wakes the trainer loop if it waits."""
        news, self.news = self.news, self.stage.env.event()
        news.succeed()
