"""Evaluator: evaluates a policy version every few updates, with requests at the rollout workers.

Between steps, as verl, NeMo-RL, SkyRL, TRL, slime and AReaL evaluate in the loop of the trainer:
once all workers have loaded the version, nothing for training starts until the evaluation is over.
Requests that run go on. Newer weights wait, so all its tokens are of the version.

Beside training, as prime-rl (PrimeIntellect-ai/prime-rl@559b447, `orchestrator/dispatcher.py`):
evaluation and training share the permits. With PREFER_EVAL nothing for training starts until the
whole evaluation has started; its tail then runs beside new groups. An evaluation is pinned to the
version at its start by name only: newer weights reach its requests, which are never cancelled.

Invariant: samples of an evaluation have uids, prompts and epochs that no sample of the workload
has (`Sample.is_evaluation`), so histories, caches and draws of training do not know them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import simpy

from simrl.dispatch.dispatcher import Dispatcher
from simrl.runtime.events import gather, on_fire
from simrl.runtime.recorder import Recorder
from simrl.runtime.trainer import Trainer
from simrl.scenario.evaluation import EvaluationConfig
from simrl.trace.sample import EVALUATION, Response, Sample
from simrl.trace.trace import Trace


class Evaluator:
    """The evaluations of one run. `beside`: they do not stop training. `each`: workers load one by
    one, and an evaluation begins when its version is published."""

    def __init__(
        self,
        env: simpy.Environment,
        config: EvaluationConfig,
        beside: bool,
        each: bool,
        rows: list[list[tuple[Sample, Response]]],
        responses: dict[int, Response],
        dispatcher: Dispatcher,
        trainer: Trainer,
        recorder: Recorder,
    ) -> None:
        self._env, self._every, self._beside = env, config.every, beside
        self._rows, self._responses = rows, responses
        self._dispatcher, self._trainer, self._recorder = dispatcher, trainer, recorder
        self._uids = count(EVALUATION)
        self._before = 0  # the version for which it was last decided
        self._under_way: simpy.Event | None = None
        dispatcher.prefer(evaluation=config.prefer == "eval")
        if config.at_start:
            self._evaluate(0)
        if each:
            env.process(self._follow())

    def around(self, load: Callable[[], simpy.Event]) -> simpy.Event:
        """Load weights, and evaluate them if that is due. Return an event that fires when the
        workers have loaded and training may go on."""
        if self._under_way is not None and not self._beside:
            return self._env.process(self._after(self._under_way, load))
        version, loaded = self._trainer.version, load()
        before, self._before = self._before, version
        if version // self._every == before // self._every:
            return loaded
        if self._beside:
            on_fire(loaded, lambda _: self._evaluate(version))
            return loaded
        self._dispatcher.hold(True)
        return self._env.process(self._between(loaded, version))

    def _after(
        self, evaluated: simpy.Event, load: Callable[[], simpy.Event]
    ) -> simpy.events.ProcessGenerator:
        yield evaluated
        return (yield self.around(load))

    def _between(self, loaded: simpy.Event, version: int) -> simpy.events.ProcessGenerator:
        loads = yield loaded
        yield self._evaluate(version)
        return loads

    def _follow(self) -> simpy.events.ProcessGenerator:
        """Begin an evaluation whenever its version is published."""
        for version in count(self._every, self._every):
            yield self._trainer.published(version)
            self._evaluate(version)

    def _evaluate(self, version: int) -> simpy.Event:
        """Submit an evaluation. Return an event that fires when it is over."""
        self._dispatcher.hold(not self._beside)
        samples = []
        for prompt, group in enumerate(self._rows):
            for i, (sample, response) in enumerate(group):
                place = next(self._uids), version, EVALUATION + version, EVALUATION + prompt, i
                samples.append(Sample(*place, sample.prompt_tokens))
                self._responses[samples[-1].uid] = response
        ends = self._dispatcher.submit(samples)
        for end in ends:
            on_fire(end, self._ended)
        self._under_way = over = gather(self._env, ends)
        on_fire(over, partial(self._over, version, self._env.now))
        return over

    def _over(self, version: int, began_s: float, over: Any) -> None:
        if not over.ok:
            raise over.value  # a worker that died, or its engine's error
        self._under_way = None
        self._recorder.evaluated.append((version, began_s, self._env.now))
        self._dispatcher.hold(False)

    def _ended(self, end: Any) -> None:
        """Let groups begin in the place of a response that ended."""
        stream = self._recorder.facts.get("stream")
        if end.ok and stream is not None:
            stream.on_response(end.value.done)
            stream.admit()


def rows_of(
    trace: Trace, prompts: int | None, samples: int | None
) -> list[list[tuple[Sample, Response]]]:
    """Return the samples of an evaluation with their responses, by prompt: the trace's first
    groups, over again where it has too few; of a group with too few responses, too."""
    starts = [*trace.group_starts.tolist(), len(trace)]
    groups = list(zip(starts[:-1], starts[1:], strict=True))
    in_step = sum(end <= trace.step_slices[0][2] for _, end in groups)
    rows = []
    for number in range(prompts or in_step):
        first, end = groups[number % len(groups)]
        group = list(zip(trace.samples(first, end), trace.responses(first, end), strict=True))
        rows.append([group[i % len(group)] for i in range(samples or len(group))])
    return rows
