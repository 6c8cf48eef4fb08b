"""AReaL (arXiv 2505.24298): generation never waits for training; staleness is bounded where groups are admitted.

Admission (§5.1, and the code's capacity): with B groups a step, i the current version and N_r the groups submitted so far
and not dropped, floor((N_r - 1) / B) ≤ i + η, and no more than `max_concurrent` groups at once. Of the finished groups, those
that were submitted first train first, each once (§5.1; the code sorts by the time of submission). On an update, running
requests are interrupted, load the weights, recompute their KV cache and go on, so a response may carry segments of several
versions (§4.1).

Invariant: up to version i, no more than (i + η + 1) · B groups were submitted. So a trainer that takes them in the order of
their submission never trains a token older than η; one that goes on without a straggler may train it staler. The paper leaves
open what happens then: it is trained, dropped, or waited for: with `on_stale="wait"`, an update waits until the groups that it
would leave can all be trained in time, if each later update trains a batch (`in_time`). By the inequality it can wait for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import simpy

from simrl.events import gather
from simrl.pipelines import Stage
from simrl.pipelines.dynamic_sampling import rewards_differ
from simrl.pipelines.streaming import Finished, GroupStream
from simrl.worker import LoadMode


def capacity(eta: int, version: int, batch: int, max_concurrent: int, running: int, accepted: int) -> int:
    """How many more groups may be submitted now (AReaL's `StalenessManager`); not positive means none."""
    return min(max(1, max_concurrent) - running, (eta + version + 1) * batch - (accepted + running))


def in_time(left: Iterable[int], version: int, eta: int, batch: int) -> bool:
    """Whether the groups that the update of `version` leaves untrained, told by the version each was submitted under, can be
    trained at most η updates later than that: for each deadline, no more are due than the updates until then have room for."""
    due = sorted(submitted + eta for submitted in left)
    return all(number <= (deadline - version) * batch for number, deadline in enumerate(due, start=1))


@dataclass(frozen=True)
class Areal:
    """The pipeline with its parameters: see `simrl.systems.areal`."""

    eta: int
    interruptible: bool
    max_concurrent: int | None
    on_stale: Literal["train", "wait", "drop"]
    dynamic_sampling: bool = False

    def __call__(self, stage: Stage) -> simpy.events.ProcessGenerator:
        return _Run(self, stage).train()


class _Run:
    """One run: the trainer's loop, and the rule that admits."""

    def __init__(self, rule: Areal, stage: Stage) -> None:
        self.rule = rule
        self.stage = stage
        self.batch = stage.workload.batch_groups
        self.concurrent = self.batch if rule.max_concurrent is None else rule.max_concurrent
        self.stream = GroupStream(stage, self.room, rewards_differ if rule.dynamic_sampling else lambda group: True)

    def train(self) -> simpy.events.ProcessGenerator:
        """Trains whenever a batch of groups is there, then updates every worker in flight."""
        stage, trainer = self.stage, self.stage.trainer
        mode: LoadMode = "recompute" if self.rule.interruptible else "drain"
        self.stream.admit()
        for _ in range(stage.steps):
            while (batch := self.next_batch()) is None:
                yield self.stream.news_for(self.batch)
            yield trainer.train(self.stream.take(batch))
            loads = [worker.load_weights(trainer.version, running=mode) for worker in stage.workers]
            self.stream.admit()
            yield gather(stage.env, loads)

    def room(self) -> int:
        stream, rule, version = self.stream, self.rule, self.stage.trainer.version
        running = len(stream.running)
        return capacity(
            rule.eta,
            version,
            self.batch,
            self.concurrent,
            running,
            accepted=stream.submitted - stream.dropped - running,
        )

    def next_batch(self) -> list[Finished] | None:
        """The finished groups that were submitted first, if they make a batch and none is missing that cannot wait."""
        stream, rule, version = self.stream, self.rule, self.stage.trainer.version
        if rule.on_stale == "drop":
            stream.drop([g for g in stream.buffer if g.oldest_version < version - rule.eta])
            stream.admit()
        if len(stream.buffer) < self.batch:
            return None
        finished = sorted(stream.buffer)
        left = [*stream.running.values(), *(group.version for group in finished[self.batch :])]
        if rule.on_stale == "wait" and not in_time(left, version, rule.eta, self.batch):
            return None
        return finished[: self.batch]
