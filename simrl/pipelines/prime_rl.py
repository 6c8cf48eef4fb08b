"""prime-rl (PrimeIntellect-ai/prime-rl@559b447, `src/prime_rl/orchestrator`): groups start while the
trainer is at most one batch behind, under a limit of responses in flight that follows the engines.

Versions and batches: batch s trains version s - 1. It ships once the trainer has published version
s - 2. So one shipped batch may wait while the one before trains, and `Rules.ahead` is 1. A group
carries the version at its start.
"""

from __future__ import annotations

import simpy

from simrl.dispatch.concurrency import POLL_S, AdaptiveConcurrency, Bursts
from simrl.pipelines.streaming import GroupStream
from simrl.runtime.events import Background, gather, idle

TARGET_LAG = 1  # batches that may be shipped beyond the version published


def budget(stream: GroupStream) -> int:
    """Return 1 if a group may start: no more than `TARGET_LAG` shipped batches are not published,
    as looked at when a batch ships and after a weight update; and a response may start, and all of
    the groups before have. Else return 0."""
    is_open = stream.updates - stream.noted_version <= TARGET_LAG
    return min(stream.run.dispatcher.free, 1) if is_open else 0


def control(stream: GroupStream, *, least: int, most: int, initial: int | None) -> None:
    """Let the limit of responses in flight follow the engines, and grow in `Bursts`."""
    _Control(stream, AdaptiveConcurrency(least, most, initial, stream.run.context_tokens))


class _Control:
    """A run's limit of responses in flight."""

    def __init__(self, stream: GroupStream, rule: AdaptiveConcurrency) -> None:
        self._stream, self._rule, self._bursts = stream, rule, Bursts(stream.group_size)
        self._in_flight = 0  # before the next response ends
        stream.on_response, stream.on_admitted = self._response_ended, self._look
        self._limit()
        stream.run.env.process(self._polls())

    def _response_ended(self, done: bool) -> None:
        left = self._in_flight - 1
        self._bursts.response_ended(left, aborted=not done)
        if done:
            self._rule.response_ended(left, self._stream.now_s)
        self._limit()

    def _limit(self) -> None:
        self._stream.run.dispatcher.limit(self._bursts.most(self._rule.limit))
        self._look()

    def _look(self) -> None:
        self._in_flight = self._stream.run.dispatcher.in_flight

    def _polls(self) -> simpy.events.ProcessGenerator:
        """Poll the engines, and begin a window, every 5 s. End where nothing else is under way."""
        run = self._stream.run
        while True:
            loads = yield gather(run.env, [worker.load() for worker in run.workers])
            self._look()
            self._bursts.begin(self._in_flight)
            excess = self._rule.observe(loads, self._in_flight, self._stream.now_s)
            self._limit()
            self._stream.shed(excess)
            self._stream.admit()
            if idle(run.env, Background):
                return
            yield Background(run.env, POLL_S)
