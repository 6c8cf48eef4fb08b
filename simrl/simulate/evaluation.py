"""Evaluator: evaluates a policy version every few updates, with requests at the rollout workers.

Between steps, as verl, NeMo-RL, SkyRL, TRL, slime and AReaL evaluate in the loop of the trainer:
once all workers have loaded the version, nothing for training starts until the evaluation is over.
Requests that run go on. Newer weights wait, so all tokens of the evaluation are of its version.

Beside training, as prime-rl (PrimeIntellect-ai/prime-rl@559b447, `orchestrator/dispatcher.py`):
evaluation and training share the limit of responses in flight. With PREFER_EVAL no response of
training starts until all of the evaluation have; its tail then runs beside new groups. The
evaluation is pinned to the version at its start by name only: newer weights reach its requests,
which are never cancelled.

Invariant: samples of an evaluation have uids, prompts and epochs that no sample of the workload
has (`Sample.is_evaluation`), so histories, caches and draws of training do not know them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy

from simrl.pipelines.context import RunContext
from simrl.runtime.events import gather, on_fire
from simrl.scenario.model import EvaluationConfig
from simrl.trace.sample import EVALUATION
from simrl.trace.trace import Trace
from simrl.trace.workload import Workload


class Evaluator:
    """The evaluations of one run. `beside`: training goes on meanwhile."""

    def __init__(
        self, run: RunContext, config: EvaluationConfig, trace: Trace, beside: bool
    ) -> None:
        self._run, self._config, self._trace, self._beside = run, config, trace, beside
        self._next_uid, self._loaded = EVALUATION, 0
        self._under_way: simpy.Process | None = None
        if config.at_start:
            self._begin(0, None)

    def around(self, load: Callable[[], simpy.Event]) -> simpy.Event:
        """Load weights, and evaluate them if that is due. Return an event that fires when the
        workers have loaded and training may go on."""
        if self._under_way is not None and self._under_way.is_alive and not self._beside:
            return self._run.env.process(self._after(self._under_way, load))
        loaded, before = load(), self._loaded
        self._loaded = self._run.trainer.version
        if self._loaded // self._config.every == before // self._config.every:
            return loaded
        evaluated = self._begin(self._loaded, loaded)
        return loaded if self._beside else evaluated

    def _after(
        self, evaluated: simpy.Event, load: Callable[[], simpy.Event]
    ) -> simpy.events.ProcessGenerator:
        yield evaluated
        yield self.around(load)

    def _begin(self, version: int, loaded: simpy.Event | None) -> simpy.Process:
        """Evaluate a version as soon as it is loaded. Return a process until that is over."""
        self._run.dispatcher.hold(not self._beside, self._config.prefer == "eval")
        self._under_way = self._run.env.process(self._evaluate(version, loaded))
        return self._under_way

    def _evaluate(self, version: int, loaded: simpy.Event | None) -> simpy.events.ProcessGenerator:
        if loaded is not None:
            yield loaded
        drawn, size = Workload(self._trace, first_uid=self._next_uid), self._config.samples
        samples = [
            sample._replace(
                step=version, epoch=EVALUATION + version, prompt_id=EVALUATION + sample.prompt_id
            )
            for group in drawn.next_groups(self._config.prompts or drawn.batch_groups)
            for sample in [*group, *drawn.more_of(group, (size or 0) - len(group))][:size]
        ]
        self._run.workload.responses.update(drawn.responses)
        self._next_uid += len(drawn.responses)
        ends = self._run.dispatcher.submit(samples)
        for end in ends:
            on_fire(end, self._response_ended)
        yield gather(self._run.env, ends)
        self._run.dispatcher.hold(False, self._config.prefer == "eval")
        if (stream := self._run.recorder.facts.get("stream")) is not None:
            stream.admit()  # what was held back had no room

    def _response_ended(self, end: Any) -> None:
        """Let groups begin in the place of a response."""
        if end.ok and (stream := self._run.recorder.facts.get("stream")) is not None:
            stream.on_response(end.value.done)
            stream.admit()
