"""RollPacker's tail batching (arXiv 2509.21009): prompts with long responses are put off, and rolled out together.

Invariant: every token is generated and trained under one version. A short round begins more prompts, and more responses of
each, than a batch has, and trains the first prompts to have as many finished responses as the trace has of them. Of the other
prompts only the prompt is kept, in a queue; when a batch waits there, a long round generates it anew, without surplus. With the
stream trainer, half of the workers hand their responses of a long round to the other half at some progress, and their GPUs
compute gradients of what is scored; the update comes when the round is over.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import simpy

from simrl.errors import InputError
from simrl.pipelines.batch import Batch, Collector
from simrl.pipelines.context import RunContext
from simrl.pipelines.rlhfuse import RolloutStep
from simrl.pipelines.rounds import GroupProgress, Round, times
from simrl.runtime.events import gather
from simrl.trace.workload import Group


def stream_training(
    run: RunContext, *, stream_from: float, stream_samples: int, **rule: Any
) -> simpy.events.ProcessGenerator:
    """Train step after step, as `tail_batching` collects (`rule`); long rounds with the stream trainer, when a share
    `stream_from` of their samples is finished, in rounds of at most `stream_samples` per freed worker."""
    if run.dynamic_sampling is not None:
        raise InputError("system: stream_trainer and dynamic_sampling exclude each other; leave one of them out")
    queue: deque[Group] = deque()
    collect = tail_batching(run, queue=queue, **rule)
    for k in range(run.steps):
        if k:
            yield gather(run.env, [worker.load_weights(run.trainer.version) for worker in run.workers])
        if len(queue) < run.workload.batch_groups:
            batch = Batch(run)
            yield from collect(batch)
            batch.close()
            yield batch.complete
            yield run.trainer.train(batch.rollouts)
        else:
            step = RolloutStep(run, 1 - stream_from, _half, gradients=True)
            yield from step.roll_out(_again(run, queue, run.workload.batch_groups), stream_samples)
            yield run.trainer.train(step.batch.rollouts, prepared=step.inferred)
            step.give_back()


def _half(unfinished: int, started: int, workers: int) -> int:
    return -(-workers // 2)


def _again(run: RunContext, queue: deque[Group], size: int) -> list[Group]:
    return [[run.workload.again(sample) for sample in queue.popleft()] for _ in range(size)]


def tail_batching(
    run: RunContext,
    *,
    eta_prompts: float,
    eta_responses: float,
    long_rounds: bool,
    async_rewards: bool = True,
    queue: deque[Group] | None = None,
) -> Collector:
    """Collect short rounds of `eta_prompts` times the prompts and `eta_responses` times the responses, and long rounds. Without
    `long_rounds`, a prompt that does not finish in its short round is never trained; without `async_rewards`, rewards begin
    when the round is over. Prompts that are put off wait in `queue`."""
    queue = deque() if queue is None else queue

    def long_round(size: int) -> list[GroupProgress]:
        return [GroupProgress(group) for group in _again(run, queue, size)]

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
