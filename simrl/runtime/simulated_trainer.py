"""Trainer and Rewarder on a simulated clock.

Invariant: colocated GPUs switch to training once an update: GPUs that begin earlier, with
log-probs, do not switch again. Where workers pause for the publication, their load begins with it
and takes as much longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import simpy

from simrl.errors import refuse
from simrl.runtime.recorder import Recorder
from simrl.runtime.rollout import NOTHING_TO_TRAIN, Rollout, scored
from simrl.runtime.spot_trainer import SpotTrainer
from simrl.runtime.trainer import Publications, step_of
from simrl.trace.trace import Response
from simrl.training.costs import Ints, Phase, TrainingCosts


class SimulatedRewarder:
    """A `Rewarder` that scores all responses in parallel, in `reward_s` (a rule, a verifier or a
    reward model elsewhere)."""

    def __init__(
        self,
        env: simpy.Environment,
        reward_s: float,
        responses: Mapping[int, Response],
        kills: bool = False,
    ) -> None:
        self._env = env
        self._reward_s = reward_s
        self._responses = responses
        self._kills = kills  # a response that ended early was killed, and has reward 0

    def score(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        done = []
        for rollout in rollouts:
            response = self._responses[rollout.sample.uid]
            killed = self._kills and rollout.tokens != response.tokens
            done.append(scored(rollout, 0.0 if killed else response.reward))
        return self._env.timeout(self._reward_s, value=done)


class SimulatedTrainer:
    """A `Trainer` whose phases take as long as `costs` says, on the lanes of its GPUs (colocated:
    the rollout workers'). A group that `accepts` refuses is dropped after its log-probs. `old` has
    the lengths of the old responses that an update verifies for the step to come."""

    def __init__(
        self,
        env: simpy.Environment,
        costs: TrainingCosts,
        lanes: Sequence[int],
        recorder: Recorder,
        spot: SpotTrainer | None = None,
        accepts: Callable[[list[Rollout]], bool] | None = None,
        old: Callable[[int], Ints] | None = None,
    ) -> None:
        self._old = old
        self.version = 0
        self.busy_s = 0.0  # so far, at updates
        self.costs = costs
        self.lanes = tuple(lanes)
        self._env = env
        self._recorder = recorder
        self._spot = spot
        self._accepts = accepts
        self._publications = Publications(env)
        # on the trainer's GPUs, while paused workers load already
        self._publishing: simpy.Event | None = None
        self._switched: set[int] = set()  # lanes that train already, while others roll out
        self._with_gradients: set[int] = set()  # uids of the next update whose gradients are there
        self._resizing: tuple[tuple[int, ...], simpy.Event] | None = None

    def resize(self, lanes: Sequence[int]) -> simpy.Event:
        self._resizing = (tuple(lanes), self._env.event())
        return self._resizing[1]

    def switch(self) -> simpy.Event:
        return self._env.process(self._change_sides())

    def train(
        self, rollouts: Sequence[Rollout], prepared: Sequence[Rollout] = (), publish: bool = True
    ) -> simpy.Event:
        return self._env.process(
            self._train(list(rollouts), {rollout.sample.uid for rollout in prepared}, publish)
        )

    def train_parts(self, parts: simpy.Store) -> simpy.Event:
        return self._env.process(self._train_parts(parts))

    def infer(
        self, rollouts: Sequence[Rollout], lanes: Sequence[int], gradients: bool = False
    ) -> simpy.Event:
        return self._env.process(self._infer(list(rollouts), lanes, gradients))

    def published(self, version: int) -> simpy.Event:
        return self._publications.of(version)

    def carried_out(self, kind: str, seconds: float, of: Sequence[Rollout]) -> simpy.Event:
        """Return an event that fires when a phase of some rollouts is over, here after its predicted
        seconds."""
        return self._env.timeout(seconds)

    def _train(
        self, rollouts: list[Rollout], prepared: set[int], publish: bool
    ) -> simpy.events.ProcessGenerator:
        started_s, lengths = self._env.now, _lengths(rollouts)
        yield from self._begin(lengths)
        left = _lengths([r for r in rollouts if r.sample.uid not in prepared])
        yield from self._work(self._inference(self.costs, left), of=rollouts)
        rollouts = self._accepted(rollouts)
        left = _lengths([r for r in rollouts if r.sample.uid not in self._with_gradients])
        self._with_gradients.clear()
        yield from self._work(self.costs.update(left, self.costs.minibatches), of=rollouts)
        return (yield from self._finish(rollouts, started_s, publish))

    def _train_parts(self, parts: simpy.Store) -> simpy.events.ProcessGenerator:
        rollouts: list[Rollout] = []
        started_s, begins = self._env.now, None
        while (part := (yield parts.get())) is not None:
            if not part:
                yield from self._take_lanes()
                continue
            lengths, begins = _lengths(part), begins is None
            if begins:
                started_s = self._env.now
                yield from self._begin(lengths)
            yield from self._work(self._inference(self.costs, lengths), of=part)
            part = self._accepted(part)
            yield from self._work(self.costs.update(_lengths(part), 1, begins), of=part)
            rollouts += part
        return (yield from self._finish(rollouts, started_s, publish=True))

    def _inference(self, costs: TrainingCosts, lengths: Ints) -> list[Phase]:
        """Return the log-prob phase, and the copy of its hidden states for a drafter's training."""
        phases, tokens = costs.inference(lengths), int(lengths.sum())
        if phases and self._spot is not None:
            copied_s = self._spot.collect_s(tokens, costs.ranks, costs.gpu, costs.gpus)
            phases += [("log_prob", copied_s)] * (copied_s > 0)
        return phases

    def _accepted(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the rollouts of groups that are trained; the others are dropped."""
        if self._accepts is None:
            return rollouts
        groups: dict[tuple[int, int], list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault((rollout.sample.epoch, rollout.sample.prompt_id), []).append(rollout)
        accepted: list[Rollout] = []
        for group in groups.values():
            if self._accepts(group):
                accepted += group
            else:
                self._recorder.dropped(group)
        return accepted

    def _infer(
        self, rollouts: list[Rollout], lanes: Sequence[int], gradients: bool
    ) -> simpy.events.ProcessGenerator:
        """Compute log-probs, and with `gradients` also gradients, on these lanes. A sequence or an
        expert is shared by at most the GPUs of these lanes."""
        yield from self._switch(lanes)
        gpus = sum(self._recorder.lanes[lane].gpus for lane in lanes)
        shared = {
            key: min(getattr(self.costs.config, key), gpus)
            for key in ("sequence_parallel", "expert_parallel")
        }
        if gpus % self.costs.config.gpus_per_rank:
            shared |= {"tensor_parallel": 1, "pipeline_parallel": 1}
        costs = replace(self.costs, gpus=gpus, config=self.costs.config.model_copy(update=shared))
        yield from self._work(self._inference(costs, _lengths(rollouts)), lanes)
        if gradients:
            self._with_gradients.update(rollout.sample.uid for rollout in rollouts)
            yield from self._work(costs.gradients(_lengths(rollouts)), lanes)

    def _begin(self, lengths: Ints) -> simpy.events.ProcessGenerator:
        """Prepare an update: wait for the publication, resize, take over the batch, switch."""
        if self._publishing is not None:
            yield self._publishing
        yield from self._take_lanes()
        yield from self._work(self.costs.transfer(lengths))
        if self.costs.switch:
            yield from self._switch(self.lanes)

    def _take_lanes(self) -> simpy.events.ProcessGenerator:
        """Resize, if that was asked for. Lanes that the trainer leaves are free at once; the others
        move states."""
        if self._resizing is None:
            return
        (self.lanes, resized), self._resizing = self._resizing, None
        self.costs = replace(
            self.costs, gpus=sum(self._recorder.lanes[lane].gpus for lane in self.lanes)
        )
        resized.succeed()
        yield from self._work([("switch", self.costs.reshard_s)])

    def _change_sides(self) -> simpy.events.ProcessGenerator:
        if self._publishing is not None:
            yield self._publishing
        yield from self._work([("switch", self.costs.switch_s)])

    def _switch(self, lanes: Sequence[int]) -> simpy.events.ProcessGenerator:
        """Switch lanes from rollout to training, except those that have switched."""
        late = [lane for lane in lanes if lane not in self._switched]
        if late:
            self._switched.update(late)
            yield from self._work([("switch", self.costs.switch_s)], late)

    def _finish(
        self, rollouts: list[Rollout], started_s: float, publish: bool
    ) -> simpy.events.ProcessGenerator:
        refuse((not rollouts, NOTHING_TO_TRAIN))
        after = self.costs.after(self.version, publish)
        if self._old is not None:
            after = self.costs.verification(self._old(self.version + 1)) + after
        if self.costs.pauses and publish:
            self._publishing = self._env.process(self._work(after))  # the loads take as much longer
        else:
            yield from self._work(after)
        self._switched.clear()
        step = step_of(rollouts, self.version, started_s, self._env.now)
        self._recorder.trained(step, rollouts)
        self.version += 1
        if self._spot is not None:
            self._spot.policy_updated(self._env.now)
        if publish:
            self._publications.publish(self.version)
        return step

    def _work(
        self,
        phases: Sequence[Phase],
        lanes: Sequence[int] | None = None,
        of: Sequence[Rollout] = (),
    ) -> simpy.events.ProcessGenerator:
        """Work through the phases of some rollouts, on all lanes or on some."""
        for kind, seconds in phases:
            started_s, occupied = self._env.now, self.lanes if lanes is None else lanes
            if self._spot is not None:
                self._spot.occupied(occupied, started_s)
            yield self.carried_out(kind, seconds, of)
            self.busy_s += seconds if lanes is None else 0.0
            for lane in occupied:
                self._recorder.span(lane, kind, started_s, self._env.now, self.version)


def _lengths(rollouts: Sequence[Rollout]) -> Ints:
    """Return the tokens of each sequence: prompt, response, and observations of the environment, in
    the order of the prompts, as frameworks hand them on."""
    in_order = sorted(rollouts, key=lambda r: r.sample.uid)
    return np.array(
        [r.sample.prompt_tokens + r.observation_tokens + r.tokens for r in in_order], dtype=np.int64
    )
