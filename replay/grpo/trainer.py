"""Trainer and rewarder of a real run, as schedules see them: what the simulated ones only take time for, these do.

Invariant: an update is recorded, with the samples it trained on, before the schedule hears of it; spans are when phases really
were, by the learner's clock. Versions of the schedule count from the start of this part of the run; the learner's and the
records' from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import simpy

from replay.clock import WallClock
from replay.grpo.learner import Answered, Update, Updated
from replay.host import Failed
from replay.link import ProcessLink
from simrl.errors import StoppedError
from simrl.result import Recorder, Step
from simrl.rollout import Rollout
from simrl.trace import Sample
from simrl.trainer import Publications, step_of

UPDATE_DEADLINE_S = 3600.0  # that a learner may take for one


class Scored(NamedTuple):
    """When responses were scored, and how many."""

    started_s: float
    ended_s: float
    samples: int


class TaskRewarder:
    """Scores responses by a function, here and at once."""

    def __init__(self, env: WallClock, reward: Callable[[Sample, Sequence[int]], float]) -> None:
        self.spans: list[Scored] = []
        self._env = env
        self._reward = reward

    def score(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        started_s = self._env.wall_s()
        scored = [r._replace(reward=self._reward(r.sample, r.token_ids or ())) for r in rollouts]
        self.spans.append(Scored(started_s, self._env.wall_s(), len(rollouts)))
        return self._env.timeout(0.0, value=scored)


class LearningTrainer:
    """A `Trainer` whose updates a learner makes in a process of its own. `recorded` hears of each with its step; `meanwhile` is
    called when the learner is at work on one: for what has time, since the schedule waits for nothing sooner."""

    def __init__(
        self,
        env: WallClock,
        link: ProcessLink,
        lane: int,
        recorder: Recorder,
        first_version: int,
        prompt_ids: Callable[[Sample], tuple[int, ...]],
        recorded: Callable[[Step, Sequence[Rollout], Updated], None],
        meanwhile: Callable[[], None],
    ) -> None:
        self.version = 0
        self._env = env
        self._link = link
        self._lane = lane
        self._recorder = recorder
        self._first_version = first_version
        self._prompt_ids = prompt_ids
        self._recorded = recorded
        self._meanwhile = meanwhile
        self._publications = Publications(env)
        self._answer: simpy.Event | None = None  # that is waited for
        self._asked_s = 0.0
        env.listen(link.connection, self._hear, self._gone)
        env.check(self._look)

    def train(self, rollouts: Sequence[Rollout], prepared: Sequence[Rollout] = (), publish: bool = True) -> simpy.Event:
        return self._env.process(self._train(list(rollouts)))

    def train_parts(self, parts: simpy.Store) -> simpy.Event:
        raise NotImplementedError  # no system of a recorded run trains in parts

    def infer(self, rollouts: Sequence[Rollout], lanes: Sequence[int]) -> simpy.Event:
        raise NotImplementedError  # nor computes log-probs beside the rollouts

    def published(self, version: int) -> simpy.Event:
        return self._publications.of(version)

    def _train(self, rollouts: list[Rollout]) -> simpy.events.ProcessGenerator:
        started_s = self._env.now
        self._answer, self._asked_s = self._env.event(), self._env.wall_s()
        self._link.send([Update(self._first_version + self.version, tuple(map(self._answered, rollouts)))])
        self._meanwhile()
        updated: Updated = yield self._answer
        for kind, phase_started_s, phase_ended_s in updated.phases:
            span_s = (self._time_s(phase_started_s), self._time_s(phase_ended_s))
            self._recorder.span(self._lane, kind, *span_s, self.version)
        step = step_of(rollouts, self.version, started_s, self._env.now)
        self._recorder.trained(step, rollouts)
        self._recorded(step, rollouts, updated)
        self.version += 1
        self._publications.publish(self.version)
        return step

    def _answered(self, rollout: Rollout) -> Answered:
        sample = rollout.sample
        segments = tuple((s.policy_version + self._first_version, s.tokens) for s in rollout.segments)
        return Answered(
            (sample.epoch, sample.prompt_id),
            self._prompt_ids(sample),
            rollout.token_ids or (),
            rollout.reward,
            segments,
        )

    def _time_s(self, monotonic_s: float) -> float:
        return monotonic_s - self._env.monotonic_s

    def _hear(self, reports: Sequence[Any]) -> None:
        for report in reports:
            if isinstance(report, Failed):
                raise StoppedError(f"{self._link.name}: {report.message}") from RuntimeError(report.trace)
            assert isinstance(report, Updated) and self._answer is not None
            self._answer.succeed(report)
            self._answer = None

    def _look(self) -> None:
        """An update that never ends."""
        if self._answer is not None and self._env.wall_s() - self._asked_s > UPDATE_DEADLINE_S:
            raise StoppedError(f"{self._link.name}: no update for {UPDATE_DEADLINE_S:g} s; its log may say why")

    def _gone(self) -> None:
        raise StoppedError(f"{self._link.name}: {self._link.death()}")
