"""Judge: a model that reads responses and writes scores, on engines like the policy's.

Invariant: a response is judged once, and its update waits for the score and for the reward function
that reads it. The judge's samples are not the policy's: they are neither trained nor counted.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import simpy

from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.rules import DISPATCHES
from simrl.result.result import Lane
from simrl.runtime.events import Signal, gather, once_an_instant
from simrl.runtime.recorder import Recorder
from simrl.runtime.rollout import Rollout
from simrl.runtime.simulated_worker import cache_totals, simulated_workers as worker_fleet
from simrl.runtime.trainer import Rewarder
from simrl.scenario.model import JudgeConfig
from simrl.simulate.prepare import Prepared
from simrl.trace.sample import Response


class Judge:
    """A `Rewarder` that asks a judge's engines before a rule gives the reward.

    A request is the judge's instructions, the prompt and the response (of a group: all of its
    responses); a prefix cache finds what precedes the responses. A standalone judge reads a
    response as soon as it has ended. A colocated one takes turns: once no response is unfinished,
    the rollout engines sleep and its own wake, judge all that waits, and sleep; only then are the
    scores there (volcengine/verl@b178a3cd5, verl/experimental/reward_loop). Samples, tokens and
    spans have a recorder of their own until `stop`. `run` is the policy's, with its dispatcher
    (`rollout`), recorder and `responses`. Evaluations are not judged."""

    def __init__(
        self,
        env: simpy.Environment,
        run: Prepared,
        engines: Prepared,
        rule: Rewarder,
        rollout: Dispatcher,
        recorder: Recorder,
        responses: Mapping[int, Response],
    ) -> None:
        config = cast(JudgeConfig, engines.scenario.judge)
        self._env, self._config, self._rule = env, config, rule
        self._rollout, self._run, self._outcomes = rollout, recorder, responses
        lanes = 1 if config.gpus else engines.tp // run.gpus_per_worker
        self._recorder = Recorder([Lane("judge", 1)] * (engines.workers * lanes))
        self._responses, self._scores = dict[int, Response](), dict[int, simpy.Event]()  # by uid
        self._workers = worker_fleet(
            env,
            engines.workers,
            engines.profile.tables,
            engines.limits,
            engines.costs,
            self._responses,
            self._recorder,
            lanes=lanes,
        )
        self._dispatcher = Dispatcher(
            env,
            self._workers,
            DISPATCHES["least_requests"],
            self._recorder,
            max_concurrent=None if config.gpus else 0,  # until its turn
        )
        starts = run.trace.group_starts if config.per == "group" else np.arange(len(run.trace))
        self._tokens = np.repeat(
            engines.trace.column("response_tokens"), np.diff(starts, append=len(run.trace))
        ).tolist()
        self._look, self._turn_over = once_an_instant(env, self._begin_turn), Signal(env)
        recorder.on_finished = self._finished

    def _finished(self, rollouts: list[Rollout]) -> None:
        self._scores.update(
            (rollout.sample.uid, self._ask([rollout]))
            for rollout in rollouts
            if self._config.per == "response" and not rollout.sample.is_evaluation
        )

    def score(self, rollouts: Sequence[Rollout]) -> simpy.Event:
        return self._env.process(self._score(list(rollouts)))

    def _score(self, rollouts: list[Rollout]) -> simpy.events.ProcessGenerator:
        scores = [self._scores.pop(rollout.sample.uid, None) for rollout in rollouts]
        judged = [score for score in scores if score is not None] or [self._ask(rollouts)]
        self._look()
        yield gather(self._env, judged) if self._config.gpus else self._turn_over.next
        return (yield self._rule.score(rollouts))

    def _ask(self, rollouts: list[Rollout]) -> simpy.Event:
        """Submit a request on these responses. Return the event of its end."""
        policy = rollouts[0].sample
        self._responses[policy.uid] = Response(self._tokens[self._outcomes[policy.uid].row], 0.0)
        sample = policy._replace(prompt_tokens=self._config.prompt_tokens + policy.prompt_tokens)
        return self._dispatcher.submit(
            [sample],
            [
                Rollout(
                    sample,
                    (),
                    False,
                    observation_tokens=sum(r.tokens + r.observation_tokens for r in rollouts),
                )
            ],
        )[0]

    def _begin_turn(self) -> None:
        if not (self._config.gpus or self._rollout.unfinished.any() or self._rollout.waiting()):
            self._env.process(self._take_turn())

    def _take_turn(self) -> simpy.events.ProcessGenerator:
        yield gather(self._env, map(self._rollout.empty, self._rollout.active))
        for most in (2**31, 0):  # requests at a time: all, none
            yield gather(self._env, [worker.load_weights(0) for worker in self._workers])
            self._dispatcher.limit(most)
            yield gather(self._env, map(self._dispatcher.empty, self._dispatcher.active))
        self._turn_over.fire()

    def stop(self, now_s: float) -> dict[str, int]:
        """Stop the engines, and add their spans to the run's. Return what they did."""
        kinds = {"rollout": "judge", "load_weights": "switch"}
        for worker in self._workers:
            worker.stop(now_s)
        first = len(self._run.lanes) - len(self._workers) if self._config.gpus else 0
        self._run.spans += [
            span._replace(
                lane=first + span.lane, kind=kinds[span.kind], policy_version=-1, work=None
            )
            for span in self._recorder.spans
        ]
        rollouts = self._recorder.rollouts()
        return {
            "requests": len(rollouts),
            "finished": sum(rollout.done for rollout in rollouts),
            "generated_tokens": sum(rollout.tokens for rollout in rollouts),
            **cache_totals(self._workers),
        }
