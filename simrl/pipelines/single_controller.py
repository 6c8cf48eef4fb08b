"""NeMo-RL's single controller (NVIDIA-NeMo/RL@7ea279a, `algorithms.single_controller`): prompts take
permits to start, and a sampler says which finished groups an update trains. A chunk trains as soon
as the trainer is free and `least` groups can be selected; one update is a batch of groups.

Invariant: a prompt starts with the weights that the workers loaded last, and none starts during a
weight sync, while running ones go on. Only `windowed` drops groups, finished or running.
"""

from __future__ import annotations

from functools import partial

import simpy

from simrl.errors import refuse
from simrl.pipelines.batchwise import OneByOne
from simrl.pipelines.context import RunContext
from simrl.pipelines.samplers import Sampler, outside, permits, selectable
from simrl.pipelines.streaming import GroupStream

BUFFERED = 64  # `max_buffered_rollouts`
STALLED = (
    "system: min_groups_for_streaming_train: {} waits for {} groups that began with one version, and only {} did, so that "
    "NeMo-RL stands still, too; lower it to 1"
)


def single_controller(
    run: RunContext,
    *,
    sampler: Sampler,
    window: int,
    in_flight: int,
    buffered: int | None,
    least: int,
) -> simpy.events.ProcessGenerator:
    """Train chunks of what the sampler selects, and sync the weights after each update."""
    batch = run.workload.batch_groups
    needed = 1 if sampler == "windowed" else (window + 1) * batch
    buffered = max(BUFFERED, needed) if buffered is None else buffered
    refuse(
        (
            buffered < needed,
            f"system: max_buffered_rollouts: {sampler} needs {needed}, {window + 1} batches of {batch} groups, not {buffered}",
        )
    )
    room = partial(permits, sampler=sampler, window=window, in_flight=in_flight, buffered=buffered)
    stream = GroupStream(run, lambda: room(stream), lambda: stream.noted_version)
    offered = partial(selectable, sampler=sampler, window=window)
    outdated = partial(outside, stream, sampler=sampler, window=window)
    stream.admit()
    for _ in range(run.steps):
        parts, left = OneByOne(run.env), batch
        updated = run.trainer.train_parts(parts)
        while left:
            yield parts.needed.next
            stream.drop([group for group in stream.buffer if outdated(group.version)])
            while len(chunk := offered(stream)[:left]) < min(least, left):
                news = stream.news_for_update()
                refuse((not stream.running, STALLED.format(sampler, min(least, left), len(chunk))))
                yield news
            left -= len(chunk)
            parts.put(stream.take(chunk))
            stream.admit()
        yield parts.needed.next
        parts.put(None)
        yield updated
        stream.pause()
        stream.evict([number for number, start in stream.running.items() if outdated(start)])
        yield run.load_weights()
        stream.noted_version = run.trainer.version
        stream.resume()
