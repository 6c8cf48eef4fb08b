"""Trainer and Rewarder: what consumes rollouts, as schedules see them, and their simulated forms.

Invariant: `Trainer.version` is the number of policy updates published so far; `train` makes exactly one. What a phase
takes follows from the work in the batch (`simrl.training`), sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import simpy

from simrl.result import Recorder, Step
from simrl.rollout import Rollout
from simrl.training import TrainingCosts


class Trainer(Protocol):
    """Updates the policy."""

    @property
    def version(self) -> int: ...

    def train(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        """Log-probs, update and publication of the new weights. Fires with the `Step` when they can be loaded."""
        ...


class Rewarder(Protocol):
    """Scores responses."""

    def score(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        """Fires with the same rollouts once all of them have their reward."""
        ...


class SimulatedRewarder:
    """Every response is scored on its own, all at once, in `reward_s` (a rule, a verifier or a reward model elsewhere)."""

    def __init__(self, env: simpy.Environment, reward_s: float) -> None:
        self._env = env
        self._reward_s = reward_s

    def score(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        return self._env.timeout(self._reward_s, value=list(rollouts))


class SimulatedTrainer:
    """A `Trainer` whose phases take what `costs` says, on the lanes of its GPUs (colocated: the rollout workers')."""

    def __init__(self, env: simpy.Environment, costs: TrainingCosts, lanes: Sequence[int], recorder: Recorder) -> None:
        self.version = 0
        self._env = env
        self._costs = costs
        self._lanes = tuple(lanes)
        self._recorder = recorder

    def train(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        return self._env.process(self._train(list(rollouts)))

    def _train(self, rollouts: list[Rollout]) -> simpy.events.ProcessGenerator:
        started_s = self._env.now
        for kind, seconds in self._costs.phases([(r.sample.prompt_tokens, r.tokens) for r in rollouts]):
            phase_started_s = self._env.now
            yield self._env.timeout(seconds)
            for lane in self._lanes:
                self._recorder.span(lane, kind, phase_started_s, self._env.now, self.version)
        step = self._step(rollouts, started_s)
        self._recorder.trained(step, rollouts)
        self.version += 1
        return step

    def _step(self, rollouts: list[Rollout], started_s: float) -> Step:
        """Off-policyness of a token: this update's version minus the version that generated it."""
        ages = [(self.version - s.policy_version, s.tokens) for r in rollouts for s in r.segments]
        tokens = sum(n for _, n in ages)
        return Step(
            step=self.version,
            policy_version=self.version,
            started_s=started_s,
            finished_s=self._env.now,
            samples=len(rollouts),
            prompt_tokens=sum(r.sample.prompt_tokens for r in rollouts),
            response_tokens=tokens,
            off_policyness_mean=sum(age * n for age, n in ages) / tokens,
            off_policyness_max=max(age for age, _ in ages),
        )
