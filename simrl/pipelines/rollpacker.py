"""RollPacker's tail batching (arXiv 2509.21009): prompts with long responses are put off, and rolled out together.

Invariant: every token is generated and trained under one version. A prompt counts as finished with as many finished responses
as the trace has of it. A short round begins more prompts, and more responses of each, than a batch has, and trains the first
prompts to finish, each with its first responses. Of the other prompts nothing is kept but the prompt: it waits in a queue. When
a batch of prompts waits there, a long round generates those anew, no more than needed, to the last response.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import simpy

from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch, Collector
from simrl.pipelines.rounds import Progress, Round, times
from simrl.workload import Group


def tail_batching(eta_prompts: float, eta_responses: float, long_rounds: bool) -> Callable[[Stage], Collector]:
    """Short rounds begin `eta_prompts` times the prompts and `eta_responses` times the responses. Without `long_rounds`, a
    prompt that does not finish in its short round is never trained."""

    def collector(stage: Stage) -> Collector:
        queue: deque[Group] = deque()

        def long_round(size: int) -> list[Progress]:
            groups = [queue.popleft() for _ in range(size)]
            return [Progress([stage.workload.again(sample) for sample in group]) for group in groups]

        def short_round(size: int) -> list[Progress]:
            groups = stage.workload.next_groups(times(eta_prompts, size))
            extra = [times(eta_responses, len(group)) - len(group) for group in groups]
            return [
                Progress(group + stage.workload.more_of(group, more), needed=len(group))
                for group, more in zip(groups, extra, strict=True)
            ]

        def collect(batch: Batch) -> simpy.events.ProcessGenerator:
            prompts = (long_round if len(queue) >= batch.size else short_round)(batch.size)
            a_round = Round(stage, prompts, batch.size, on_complete=lambda group: batch.add(group.trainable))
            yield a_round.over
            for prompt in a_round.first:
                stage.recorder.dropped(prompt.others)
            for prompt in a_round.rest:
                stage.recorder.dropped(prompt.finished + prompt.unfinished)
                if long_rounds:
                    queue.append(prompt.samples[: prompt.needed])

        return collect

    return collector
