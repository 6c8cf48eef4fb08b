"""Trainers and rewarder of a real run, with the interfaces of the simulated ones: `LearningTrainer` of
a recorded run, `PhaseTrainer` of a replay.

Invariant: an update is recorded, with the samples it trained on, before its event fires; spans are
the real phases, by the learner's clock. Versions of the schedule count from the start of this part
of the run; versions of the learner and the records count from the start of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import simpy

from simrl.errors import InputError, StoppedError
from simrl.result.result import Step
from simrl.runtime.recorder import Recorder
from simrl.runtime.rollout import Rollout
from simrl.runtime.simulated_trainer import SimulatedTrainer
from simrl.runtime.spot_trainer import SpotTrainer
from simrl.runtime.trainer import Publications, step_of
from simrl.trace.trace import Sample
from simrl.training.costs import TrainingCosts
from simrl_replay.clock import WallClock
from simrl_replay.grpo.learner import Update, Updated
from simrl_replay.grpo.phase_learner import LogProbs, Publish, Train
from simrl_replay.grpo.policy import TokenIds
from simrl_replay.grpo.update import Trajectory
from simrl_replay.host import Failed
from simrl_replay.link import ProcessLink, raise_death

UPDATE_DEADLINE_S = 3600.0  # for one update of the learner
NO_UPDATE = "no update for {:g} s; see its log"
WHOLE_BATCHES = (
    "updates of a recorded run have whole batches; choose the system split, one_step_off or areal"
)


class Scored(NamedTuple):
    """Time at which responses were scored, and their number."""

    started_s: float
    ended_s: float
    samples: int


class TaskRewarder:
    """The rewarder of a task: a function scores responses, in this process and at once."""

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
    """A `Trainer` whose updates a learner makes in a process of its own. `recorded` is called with
    each update and its step; `meanwhile` is called when the learner has begun an update, for work
    that should not delay the schedule."""

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
        self._answer: simpy.Event | None = None  # fires with the learner's report
        self._asked_s = 0.0
        gone = partial(raise_death, link)
        env.listen(link.connection, self._hear, gone, lambda: self._answer is not None)
        env.check(lambda: look_at(link, env, self._asked_s if self._answer is not None else None))

    def train(
        self, rollouts: Sequence[Rollout], prepared: Sequence[Rollout] = (), publish: bool = True
    ) -> simpy.Event:
        return self._env.process(self._train(list(rollouts)))

    def train_parts(self, parts: simpy.Store) -> simpy.Event:
        raise InputError(f"{self._link.name}: {WHOLE_BATCHES}")

    def infer(
        self, rollouts: Sequence[Rollout], lanes: Sequence[int], gradients: bool = False
    ) -> simpy.Event:
        raise InputError(f"{self._link.name}: {WHOLE_BATCHES}")

    def published(self, version: int) -> simpy.Event:
        return self._publications.of(version)

    def _train(self, rollouts: list[Rollout]) -> simpy.events.ProcessGenerator:
        started_s = self._env.now
        self._answer, self._asked_s = self._env.event(), self._env.wall_s()
        batch = trajectories(rollouts, self._prompt_ids, self._first_version)
        self._link.send([Update(self._first_version + self.version, batch)])
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

    def _time_s(self, monotonic_s: float) -> float:
        return monotonic_s - self._env.monotonic_s

    def _hear(self, reports: Sequence[Any]) -> None:
        for report in reports:
            if isinstance(report, Failed):
                raise failure(self._link, report)
            assert isinstance(report, Updated) and self._answer is not None
            self._answer.succeed(report)
            self._answer = None


class PhaseTrainer(SimulatedTrainer):
    """A `SimulatedTrainer` whose phases a learner carries out in a process of its own, for as long
    as they take there. `figures` has the learner's figures of each phase, by kind."""

    def __init__(
        self,
        env: WallClock,
        costs: TrainingCosts,
        lanes: Sequence[int],
        recorder: Recorder,
        link: ProcessLink,
        prompt_ids: Callable[[Sample], tuple[int, ...]],
        spot: SpotTrainer | None = None,
    ) -> None:
        super().__init__(env, costs, lanes, recorder, spot)
        self.figures: dict[str, list[dict[str, float]]] = {}
        self._clock, self._link, self._prompt_ids = env, link, prompt_ids
        self._minibatches = 1
        self._waiting: deque[tuple[str, simpy.Event]] = deque()  # phases, in their order
        self._heard_s = 0.0
        gone = partial(raise_death, link)
        env.listen(link.connection, self._hear, gone, lambda: bool(self._waiting))
        env.check(lambda: look_at(link, env, self._heard_s if self._waiting else None))

    def train(
        self, rollouts: Sequence[Rollout], prepared: Sequence[Rollout] = (), publish: bool = True
    ) -> simpy.Event:
        self._minibatches = self.costs.minibatches
        return super().train(rollouts, prepared, publish)

    def train_parts(self, parts: simpy.Store) -> simpy.Event:
        self._minibatches = 1  # of a part
        return super().train_parts(parts)

    def infer(
        self, rollouts: Sequence[Rollout], lanes: Sequence[int], gradients: bool = False
    ) -> simpy.Event:
        raise InputError(f"{self._link.name}: it trains on all its GPUs; leave --train out")

    def carried_out(self, kind: str, seconds: float, of: Sequence[Rollout]) -> simpy.Event:
        command: LogProbs | Train | Publish
        match kind:
            case "log_prob":
                command = LogProbs(self.version, trajectories(of, self._prompt_ids))
            case "train":
                command = Train(self._minibatches)
            case "publish":
                command = Publish()
            case _:
                return super().carried_out(kind, seconds, of)
        self._waiting.append((kind, self._clock.event()))
        self._heard_s = self._clock.wall_s()
        self._link.send([command])
        return self._waiting[-1][1]

    def _hear(self, reports: Sequence[Any]) -> None:
        self._heard_s = self._clock.wall_s()
        for report in reports:
            if isinstance(report, Failed):
                raise failure(self._link, report)
            kind, event = self._waiting.popleft()
            seconds = {"seconds": report.ended_s - report.started_s}
            self.figures.setdefault(kind, []).append(seconds | report.figures)
            event.succeed()


def look_at(link: ProcessLink, env: WallClock, asked_s: float | None) -> None:
    """Raise `StoppedError` for a command of `asked_s` (None: there is none) that exceeds its
    deadline."""
    if asked_s is not None and env.wall_s() - asked_s > UPDATE_DEADLINE_S:
        raise StoppedError(f"{link.name}: {NO_UPDATE.format(UPDATE_DEADLINE_S)}")


def failure(link: ProcessLink, report: Failed) -> StoppedError:
    """Return the error of a learner that failed."""
    error = StoppedError(f"{link.name}: {report.message}")
    error.__cause__ = RuntimeError(report.trace)
    return error


def trajectories(
    rollouts: Sequence[Rollout],
    prompt_ids: Callable[[Sample], tuple[int, ...]],
    first_version: int = 0,
) -> tuple[Trajectory, ...]:
    """Return rollouts as a learner trains on them; the schedule's version 0 is its
    `first_version`."""
    groups: dict[tuple[int, int], int] = {}
    batch = []
    for rollout in rollouts:
        sample = rollout.sample
        group = groups.setdefault((sample.epoch, sample.prompt_id), len(groups))
        segments = tuple((s.policy_version + first_version, s.tokens) for s in rollout.segments)
        ids = TokenIds(prompt_ids(sample), rollout.token_ids or ())
        batch.append(Trajectory(ids, rollout.reward, group, segments))
    return tuple(batch)
