"""Trainer and Rewarder: what consumes rollouts, as schedules see them, and their simulated forms.

Invariant: `Trainer.version` is the number of policy updates so far; `train` and `train_parts` make exactly one. Workers can
load a version that was published; an update that is not goes to them with the next one that is.
What a phase takes follows from the work in the batch (`simrl.training`), sequence by sequence. Colocated GPUs switch to
training once an update: those that begin earlier, with log-probs, do not switch again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import simpy

from simrl.result import Recorder, Step
from simrl.rollout import Rollout
from simrl.spot_trainer import SpotTrainer
from simrl.trace import Response
from simrl.training import Ints, Phase, TrainingCosts


class Trainer(Protocol):
    """Updates the policy."""

    @property
    def version(self) -> int: ...

    def train(self, rollouts: Sequence[Rollout], prepared: Sequence[Rollout] = (), publish: bool = True) -> simpy.Event:
        """Log-probs (those of `prepared`, a part of the rollouts, are there), update and publication of the new weights.
        Fires with the `Step` when they can be loaded; without `publish`, when the update is made."""
        ...

    def train_parts(self, parts: simpy.Store) -> simpy.Event:
        """The same on mini-batches (lists of rollouts) as they come, up to a None; one update."""
        ...

    def infer(self, rollouts: Sequence[Rollout], lanes: Sequence[int]) -> simpy.Event:
        """Log-probs of some rollouts on the GPUs of some colocated lanes, beside what the others do: these switch to training
        now, and back after the update. Fires when done."""
        ...

    def published(self, version: int) -> simpy.Event:
        """Fires when `version`, or a newer one, can be loaded."""
        ...


class Rewarder(Protocol):
    """Scores responses."""

    def score(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        """Fires with the rollouts, each with its reward, once all of them have theirs."""
        ...


class SimulatedRewarder:
    """Every response is scored on its own, all at once, in `reward_s` (a rule, a verifier or a reward model elsewhere)."""

    def __init__(self, env: simpy.Environment, reward_s: float, responses: Mapping[int, Response]) -> None:
        self._env = env
        self._reward_s = reward_s
        self._responses = responses

    def score(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        scored = [rollout._replace(reward=self._responses[rollout.sample.uid].reward) for rollout in rollouts]
        return self._env.timeout(self._reward_s, value=scored)


class SimulatedTrainer:
    """A `Trainer` whose phases take what `costs` says, on the lanes of its GPUs (colocated: the rollout workers')."""

    def __init__(
        self,
        env: simpy.Environment,
        costs: TrainingCosts,
        lanes: Sequence[int],
        recorder: Recorder,
        spot: SpotTrainer | None = None,
    ) -> None:
        self.version = 0
        self.busy_s = 0.0  # so far, at updates
        self.costs = costs
        self.lanes = tuple(lanes)
        self._env = env
        self._recorder = recorder
        self._spot = spot
        self._publications = Publications(env)
        self._switched: set[int] = set()  # lanes that train already, while others roll out
        self._resizing: tuple[tuple[int, ...], simpy.Event] | None = None

    def resize(self, lanes: Sequence[int]) -> simpy.Event:
        """From its next update on, the trainer has these lanes; its states are sharded anew. Fires when it has them."""
        self._resizing = (tuple(lanes), self._env.event())
        return self._resizing[1]

    def train(self, rollouts: Sequence[Rollout], prepared: Sequence[Rollout] = (), publish: bool = True) -> simpy.Event:
        return self._env.process(self._train(list(rollouts), {rollout.sample.uid for rollout in prepared}, publish))

    def train_parts(self, parts: simpy.Store) -> simpy.Event:
        return self._env.process(self._train_parts(parts))

    def infer(self, rollouts: Sequence[Rollout], lanes: Sequence[int]) -> simpy.Event:
        return self._env.process(self._infer(list(rollouts), lanes))

    def published(self, version: int) -> simpy.Event:
        return self._publications.of(version)

    def _train(self, rollouts: list[Rollout], prepared: set[int], publish: bool) -> simpy.events.ProcessGenerator:
        started_s = self._env.now
        yield from self._resize()
        lengths, costs = _lengths(rollouts), self.costs
        yield from self._begin(lengths)
        yield from self._work(costs.inference(_lengths([r for r in rollouts if r.sample.uid not in prepared])))
        yield from self._work(costs.update(lengths, costs.minibatches))
        return (yield from self._finish(rollouts, started_s, publish))

    def _train_parts(self, parts: simpy.Store) -> simpy.events.ProcessGenerator:
        rollouts: list[Rollout] = []
        started_s = None
        while (part := (yield parts.get())) is not None:
            if started_s is None:
                started_s = self._env.now
                yield from self._resize()
            lengths = _lengths(part)
            if not rollouts:
                yield from self._begin(lengths)
            yield from self._work(self.costs.inference(lengths) + self.costs.update(lengths, 1))
            rollouts += part
        assert started_s is not None, "an update without a rollout"
        return (yield from self._finish(rollouts, started_s, publish=True))

    def _resize(self) -> simpy.events.ProcessGenerator:
        """Lanes that it leaves are free at once; those it has now take part in moving the states."""
        if self._resizing is None:
            return
        (lanes, resized), self._resizing = self._resizing, None
        self.lanes = lanes
        self.costs = replace(self.costs, gpus=sum(self._recorder.lanes[lane].gpus for lane in lanes))
        resized.succeed()
        yield from self._work([("switch", self.costs.reshard_s)])

    def _infer(self, rollouts: list[Rollout], lanes: Sequence[int]) -> simpy.events.ProcessGenerator:
        """Where there are fewer GPUs than share a sequence otherwise, those there are share it."""
        yield from self._switch(lanes)
        gpus = sum(self._recorder.lanes[lane].gpus for lane in lanes)
        shared = {"sequence_parallel": min(self.costs.config.sequence_parallel, gpus)}
        costs = replace(self.costs, gpus=gpus, config=self.costs.config.model_copy(update=shared))
        yield from self._work(costs.inference(_lengths(rollouts)), lanes)

    def _begin(self, lengths: Ints) -> simpy.events.ProcessGenerator:
        """What precedes the work of an update."""
        for kind, seconds in self.costs.before(lengths):
            if kind == "switch":
                yield from self._switch(self.lanes)
            else:
                yield from self._work([(kind, seconds)])

    def _switch(self, lanes: Sequence[int]) -> simpy.events.ProcessGenerator:
        """From rollout to training, those that have not done so yet."""
        late = [lane for lane in lanes if lane not in self._switched]
        if late:
            self._switched.update(late)
            yield from self._work([("switch", self.costs.switch_s)], late)

    def _finish(self, rollouts: list[Rollout], started_s: float, publish: bool) -> simpy.events.ProcessGenerator:
        yield from self._work(self.costs.after(self.version, publish))
        self._switched.clear()
        step = step_of(rollouts, self.version, started_s, self._env.now)
        self._recorder.trained(step, rollouts)
        self.version += 1
        if self._spot is not None:
            self._spot.policy_updated(self._env.now)
        if publish:
            self._publications.publish(self.version)
        return step

    def _work(self, phases: Sequence[Phase], lanes: Sequence[int] | None = None) -> simpy.events.ProcessGenerator:
        """The phases one after the other, on all lanes or some."""
        for kind, seconds in phases:
            phase_started_s = self._env.now
            if self._spot is not None:
                self._spot.occupied(self.lanes if lanes is None else lanes, phase_started_s)
            yield self._env.timeout(seconds)
            self.busy_s += seconds if lanes is None else 0.0
            for lane in self.lanes if lanes is None else lanes:
                self._recorder.span(lane, kind, phase_started_s, self._env.now, self.version)


class Publications:
    """Which versions can be loaded, and who waits for one."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._newest = 0
        self._waiting: list[tuple[int, simpy.Event]] = []

    def of(self, version: int) -> simpy.Event:
        """Fires when this version, or a newer one, is there."""
        event = self._env.event()
        if self._newest >= version:
            return event.succeed()
        self._waiting.append((version, event))
        return event

    def publish(self, version: int) -> None:
        """A version can be loaded."""
        self._newest = version
        ready = [event for wanted, event in self._waiting if wanted <= version]
        self._waiting = [(wanted, event) for wanted, event in self._waiting if wanted > version]
        for event in ready:
            event.succeed()


def step_of(rollouts: Sequence[Rollout], version: int, started_s: float, finished_s: float) -> Step:
    """The update of `version` on these rollouts. Off-policyness of a token: this version minus the one that generated it.
    Tokens that were carried over from an earlier step are counted apart."""
    own: list[tuple[int, int]] = []
    carried: list[tuple[int, int]] = []
    for rollout in rollouts:
        left = rollout.carried_tokens
        for segment in rollout.segments:
            age, over = version - segment.policy_version, min(left, segment.tokens)
            left -= over
            own.append((age, segment.tokens - over))
            carried.append((age, over))
    ages = np.array(own, dtype=np.int64)
    ages_carried = np.array(carried, dtype=np.int64)
    tokens = int(ages[:, 1].sum())
    return Step(
        step=version,
        policy_version=version,
        started_s=started_s,
        finished_s=finished_s,
        samples=len(rollouts),
        prompt_tokens=sum(r.sample.prompt_tokens for r in rollouts),
        response_tokens=tokens + int(ages_carried[:, 1].sum()),
        off_policyness_mean=float((ages[:, 0] * ages[:, 1]).sum()) / max(tokens, 1),
        off_policyness_max=int(ages[:, 0].max(where=ages[:, 1] > 0, initial=0)),
        carried_tokens=int(ages_carried[:, 1].sum()),
        carried_off_policyness_max=int(ages_carried[:, 0].max(where=ages_carried[:, 1] > 0, initial=0)),
    )


def _lengths(rollouts: Sequence[Rollout]) -> Ints:
    """Tokens of each sequence: prompt, response, and what an environment said in between."""
    return np.array([r.sample.prompt_tokens + r.observation_tokens + r.tokens for r in rollouts], dtype=np.int64)
