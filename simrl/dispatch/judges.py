"""Rewards by a model on GPUs: each finished response, or group, is a request to the judge's engines.

Invariant: a response has its reward when the judge's own response has ended, and after the seconds
of the reward function that asked. Standalone engines judge a response as soon as it has ended.
Colocated ones take turns with the rollout engines: once no response is unfinished, those sleep,
the judge wakes, judges all that waits, and sleeps; only then are the rewards there (verl's reward
loop, volcengine/verl@b178a3cd5, experimental/reward_loop: `wake_up`, all scores, `sleep`).

A request is the judge's instructions, the prompt and the response (of a group: all of its
responses). A prefix cache finds what precedes the responses, which the requests of a group share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import simpy

from simrl.runtime.events import gather, on_fire, once_an_instant
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Response, Sample

if TYPE_CHECKING:
    from simrl.dispatch.dispatcher import Dispatcher
    from simrl.runtime.recorder import Recorder
    from simrl.runtime.trainer import Rewarder


class Requests(NamedTuple):
    """The requests to a judge: the tokens of its instructions, its response to each row of the
    trace, and whether a request has a whole group."""

    prompt_tokens: int
    response_tokens: Sequence[int]
    of_groups: bool


class Turns(NamedTuple):
    """The rollout engines with which a colocated judge shares GPUs: their dispatcher, the run's
    recorder, their lanes, and the seconds in which one side's weights leave and the other's come."""

    rollout: Dispatcher
    recorder: Recorder
    lanes: Sequence[int]
    swap_s: float


class Judge:
    """A `Rewarder` whose scores a model computes. `responses` are the judge's, which its workers
    look up; `rule` is the reward function that asks it, `outcomes` the policy's responses."""

    def __init__(
        self,
        env: simpy.Environment,
        requests: Requests,
        dispatcher: Dispatcher,
        responses: dict[int, Response],
        rule: Rewarder,
        outcomes: Mapping[int, Response],
        turns: Turns | None = None,
    ) -> None:
        self._env, self._requests, self._dispatcher = env, requests, dispatcher
        self._responses, self._rule, self._outcomes = responses, rule, outcomes
        self._turns, self._is_awake = turns, turns is None
        self._verdicts: dict[int, simpy.Event] = {}
        self._waiting: list[tuple[Sample, Rollout, simpy.Event]] = []  # for the judge's turn
        self._ask_for_turn = once_an_instant(env, self._begin_turn)

    def ended(self, rollout: Rollout) -> None:
        """Judge a response that has ended."""
        self._verdicts[rollout.sample.uid] = self._judge([rollout])

    def score(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        ends = (
            [self._judge(rollouts)]
            if self._requests.of_groups
            else [
                self._verdicts.pop(rollout.sample.uid, None) or self._judge([rollout])
                for rollout in rollouts
            ]
        )
        scored = self._env.event()

        def judged(_: Any) -> None:
            on_fire(self._rule.score(rollouts), lambda end: scored.succeed(end.value))

        on_fire(gather(self._env, ends), judged)
        if self._turns is not None:
            self._ask_for_turn()
        return scored

    def _judge(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        """Return the event of the request on these responses: now, or in the judge's next turn."""
        first, wanted = rollouts[0].sample, self._requests
        tokens = wanted.response_tokens[self._outcomes[first.uid].row]
        sample = first._replace(prompt_tokens=wanted.prompt_tokens + first.prompt_tokens)
        shown = sum(rollout.tokens + rollout.observation_tokens for rollout in rollouts)
        request = Rollout(sample, (), False, observation_tokens=shown)
        self._responses[sample.uid] = Response(tokens, 0.0)
        if self._is_awake:
            return self._dispatcher.submit([sample], [request])[0]
        self._waiting.append((sample, request, self._env.event()))
        return self._waiting[-1][2]

    def _begin_turn(self) -> None:
        """Let the judge's turn begin if no response is unfinished."""
        assert self._turns is not None
        rollout = self._turns.rollout
        if self._waiting and not rollout.unfinished.any() and not rollout.waiting():
            waiting, self._waiting = self._waiting, []
            self._env.process(self._take_turn(self._turns, waiting))

    def _take_turn(
        self, turns: Turns, waiting: Sequence[tuple[Sample, Rollout, simpy.Event]]
    ) -> simpy.events.ProcessGenerator:
        copies = [turns.rollout.empty(worker) for worker in turns.rollout.active]
        yield gather(self._env, copies)  # duplicates that are aborted
        yield from self._swap(turns)
        samples, requests, events = zip(*waiting, strict=True)
        yield gather(self._env, self._dispatcher.submit(samples, requests))
        yield from self._swap(turns)
        for event in events:
            event.succeed()

    def _swap(self, turns: Turns) -> simpy.events.ProcessGenerator:
        started_s = self._env.now
        yield self._env.timeout(turns.swap_s)
        for lane in turns.lanes:
            turns.recorder.span(lane, "switch", started_s, self._env.now, -1)
