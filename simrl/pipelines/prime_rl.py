"""prime-rl (PrimeIntellect-ai/prime-rl@559b447, `src/prime_rl/orchestrator`): groups start while the
trainer is at most one batch behind, under a limit of responses in flight that follows the engines.

Versions and batches: batch s trains version s - 1. It ships once the trainer has published version
s - 2. So one shipped batch may wait while the one before trains, and `Rules.ahead` is 1. A group
carries the version at its start.
"""

from __future__ import annotations

import simpy

from simrl.dispatch.concurrency import POLL_S, AdaptiveConcurrency, Bursts
from simrl.pipelines.streaming import Finished, GroupStream
from simrl.runtime.events import Background, gather, idle

TARGET_LAG = 1  # batches that may be shipped beyond the version published


def dispatches(shipped: int, version: int) -> bool:
    """Return whether groups may start: looked at when a batch ships, and after a weight update."""
    return shipped - version <= TARGET_LAG


def is_too_old(shipped: int, stamp: int, most: int) -> bool:
    """Return whether a group would train more than `most` versions late in the batch that is
    collected now (`max_off_policy_steps`)."""
    return shipped - stamp > most


def budget(stream: GroupStream) -> int:
    """Return whether a group may start: the gate is open, a response may be in flight, and all
    responses of the groups before are."""
    free = stream.run.dispatcher.free
    return min(free, 1) if dispatches(stream.updates, stream.noted_version) else 0


def stale(stream: GroupStream, group: Finished, *, most: int) -> bool:
    """Return whether a finished group is dropped."""
    return is_too_old(stream.updates, group.version, most)


def evicted(stream: GroupStream, stamp: int, *, most: int) -> bool:
    """Return whether a running group is cancelled."""
    return is_too_old(stream.updates, stamp, most)


def control(stream: GroupStream, *, least: int, most: int, initial: int | None) -> None:
    """Let the limit of responses in flight follow the engines, and grow in `Bursts`."""
    rule = AdaptiveConcurrency(least, most, initial, stream.run.context_tokens)
    _Control(stream, rule)


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
            yield Background(run.env, POLL_S)
            if idle(run.env, Background):
                return
