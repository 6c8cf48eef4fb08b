"""Trainer and Rewarder: what consumes rollouts, as schedules see them.

Invariant: `Trainer.version` is the number of policy updates so far; `train` and `train_parts` make exactly one. Workers
load published versions only; an unpublished update reaches them with the next published one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import simpy

from simrl.result.off_policyness import of_update
from simrl.result.result import Step
from simrl.runtime.rollout import Rollout


class Trainer(Protocol):
    """The trainer as pipelines see it: it updates the policy."""

    @property
    def version(self) -> int: ...

    def train(self, rollouts: Sequence[Rollout], prepared: Sequence[Rollout] = (), publish: bool = True) -> simpy.Event:
        """Compute log-probs (except of `prepared`, rollouts that have theirs), update, publish the new weights. Fires with
        the `Step` when they can be loaded; without `publish`, when the update is made."""

    def train_parts(self, parts: simpy.Store) -> simpy.Event:
        """Make one update on mini-batches (lists of rollouts) as they come, up to a None, and publish it."""

    def infer(self, rollouts: Sequence[Rollout], lanes: Sequence[int], gradients: bool = False) -> simpy.Event:
        """Compute log-probs of some rollouts, and their part of the update's gradients if asked for, on the GPUs of some
        colocated lanes while the others work on: these lanes switch to training now, and back after the update. Fires when
        done."""

    def published(self, version: int) -> simpy.Event:
        """Fires when `version`, or a newer one, can be loaded."""


class ResizableTrainer(Trainer, Protocol):
    """A trainer whose GPUs may change during a run: the lanes that it has, and its busy seconds so far, at updates."""

    lanes: tuple[int, ...]
    busy_s: float

    def resize(self, lanes: Sequence[int]) -> simpy.Event:
        """Give the trainer these lanes from its next update on; its states are sharded again. Fires when it has them."""


class Rewarder(Protocol):
    """The rewarder as pipelines see it: it scores responses."""

    def score(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        """Fires with the rollouts, each with its reward, once all of them have theirs."""


class Publications:
    """The versions that can be loaded, and the events that wait for one."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._newest = 0
        self._waiting: list[tuple[int, simpy.Event]] = []

    def of(self, version: int) -> simpy.Event:
        """Fires when this version, or a newer one, is there."""
        event = self._env.event()
        self._waiting.append((version, event))
        self.publish(self._newest)
        return event

    def publish(self, version: int) -> None:
        """Let a version be loaded."""
        self._newest = version
        waiting, self._waiting = self._waiting, [(wanted, event) for wanted, event in self._waiting if wanted > version]
        for wanted, event in waiting:
            if wanted <= version:
                event.succeed()


def step_of(rollouts: Sequence[Rollout], version: int, started_s: float, finished_s: float) -> Step:
    """Return the update of `version` on these rollouts. The first `carried_tokens` of a rollout count as carried over."""
    parts = []
    for rollout in rollouts:
        left = rollout.carried_tokens
        for segment in rollout.segments:
            carried = min(left, segment.tokens)
            left -= carried
            parts.append((segment.policy_version, segment.tokens, carried))
    age = of_update(version, parts)
    return Step(
        step=version,
        policy_version=version,
        started_s=started_s,
        finished_s=finished_s,
        samples=len(rollouts),
        prompt_tokens=sum(r.sample.prompt_tokens for r in rollouts),
        response_tokens=age.tokens + age.carried_tokens,
        off_policyness_mean=age.mean,
        off_policyness_max=age.most,
        carried_tokens=age.carried_tokens,
        carried_off_policyness_max=age.carried_most,
    )
