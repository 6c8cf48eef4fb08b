"""Trainer and Rewarder, the consumers of rollouts, as schedules see them.

Invariant: `Trainer.version` is the number of policy updates so far; `train` and `train_parts` make
exactly one update. Workers load published versions only; an unpublished update reaches them with
the next published one.
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
    def version(self) -> int:
        """The number of updates so far."""

    def train(
        self, rollouts: Sequence[Rollout], prepared: Sequence[Rollout] = (), publish: bool = True
    ) -> simpy.Event:
        """Compute log-probs (the rollouts `prepared` have theirs), update, and publish the new
        weights. Fires with the `Step` when they can be loaded; without `publish`, when the update
        is made."""

    def train_parts(self, parts: simpy.Store) -> simpy.Event:
        """Make one update on mini-batches (lists of rollouts) as they arrive, until a None, and
        publish it. At an empty one, a trainer that can resizes."""

    def infer(
        self, rollouts: Sequence[Rollout], lanes: Sequence[int], gradients: bool = False
    ) -> simpy.Event:
        """Compute log-probs of some rollouts, and with `gradients` their part of the update's
        gradients, on some colocated lanes while the others continue. These lanes switch to training
        now, and back after the update. Fires when done."""

    def published(self, version: int) -> simpy.Event:
        """Return an event that fires when `version`, or a newer one, can be loaded."""


class ResizableTrainer(Trainer, Protocol):
    """A trainer whose GPUs may change during a run: its lanes, and its busy seconds so far, at
    updates."""

    lanes: tuple[int, ...]
    busy_s: float

    def resize(self, lanes: Sequence[int]) -> simpy.Event:
        """Give the trainer these lanes from its next update on, or from an empty part of this one
        on; its states are resharded. Fires when it has them."""

    def switch(self) -> simpy.Event:
        """Copy its states to the host, so that its GPUs can roll out, or back. Fires when done."""


class Rewarder(Protocol):
    """The rewarder as pipelines see it: it scores responses."""

    def score(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        """Score rollouts. Fires with all of them, each with its reward."""


class Publications:
    """The newest version that can be loaded, and the events that wait for later ones."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._newest = 0
        self._waiting: list[tuple[int, simpy.Event]] = []

    def of(self, version: int) -> simpy.Event:
        """Return an event that fires when this version, or a newer one, is published."""
        event = self._env.event()
        self._waiting.append((version, event))
        self.publish(self._newest)
        return event

    def publish(self, version: int) -> None:
        """Publish a version."""
        self._newest = version
        ready = [event for wanted, event in self._waiting if wanted <= version]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] > version]
        for event in ready:
            event.succeed()


def step_of(rollouts: Sequence[Rollout], version: int, started_s: float, finished_s: float) -> Step:
    """Return the update of `version` on these rollouts. The first `carried_tokens` of a rollout
    count as carried over."""
    parts = []
    for rollout in rollouts:
        carried_left = rollout.carried_tokens
        for segment in rollout.segments:
            carried = min(carried_left, segment.tokens)
            carried_left -= carried
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
