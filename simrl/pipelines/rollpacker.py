"""RollPacker's tail batching (arXiv 2509.21009): prompts with long responses are put off, and rolled out together.

Invariant: every token is generated and trained under one version. A short round begins more prompts, and more responses of
each, than a batch has, and trains the first prompts to have as many finished responses as the trace has of them. Of the other
prompts only the prompt is kept, in a queue; when a batch waits there, a long round generates it anew, without surplus.
"""

from __future__ import annotations

from collections import deque

import simpy

from simrl.pipelines.batch import Batch, Collector
from simrl.pipelines.context import RunContext
from simrl.pipelines.rounds import GroupProgress, Round, times
from simrl.trace.workload import Group


def tail_batching(
    run: RunContext, *, eta_prompts: float, eta_responses: float, long_rounds: bool, async_rewards: bool = True
) -> Collector:
    """Collect short rounds of `eta_prompts` times the prompts and `eta_responses` times the responses, and long rounds. Without
    `long_rounds`, a prompt that does not finish in its short round is never trained; without `async_rewards`, rewards begin
    when the round is over."""
    queue: deque[Group] = deque()

    def long_round(size: int) -> list[GroupProgress]:
        groups = [queue.popleft() for _ in range(size)]
        return [GroupProgress([run.workload.again(sample) for sample in group]) for group in groups]

    def short_round(size: int) -> list[GroupProgress]:
        groups = run.workload.next_groups(times(eta_prompts, size))
        extra = [times(eta_responses, len(group)) - len(group) for group in groups]
        return [
            GroupProgress(group + run.workload.more_of(group, more), needed=len(group))
            for group, more in zip(groups, extra, strict=True)
        ]

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        prompts = (long_round if len(queue) >= batch.size else short_round)(batch.size)
        a_round = Round(
            run, prompts, batch.size, on_complete=lambda group: batch.add(group.trainable) if async_rewards else None
        )
        yield a_round.over
        for prompt in () if async_rewards else a_round.first:
            batch.add(prompt.trainable)
        for prompt in a_round.first:
            run.recorder.dropped(prompt.finished[prompt.needed :] + prompt.unfinished)
        for prompt in a_round.rest:
            run.recorder.dropped(prompt.finished + prompt.unfinished)
            if long_rounds:
                queue.append(prompt.samples[: prompt.needed])

    return collect
