"""GroupRuns: groups that simulated workers generate while nobody watches their single responses.

Invariant: a group's event fires at the end of its last response, with what its samples' own events would have had; the other
ends are no events. So a response costs no Python but for its `Rollout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import simpy

from simrl.engine.fleet import GROUP, IDLE, LOUD, Fleet
from simrl.runtime.events import call_at, call_last
from simrl.runtime.recorder import Recorder
from simrl.runtime.rollout import Rollout, Segment
from simrl.trace.trace import Response, Sample

if TYPE_CHECKING:
    from simrl.runtime.simulated_worker import SimulatedWorker


class _Group(NamedTuple):
    """A group at the workers; its tickets are numbered from `first` on."""

    samples: Sequence[Sample]
    first: int
    done: simpy.Event


class GroupRuns:
    """The groups at some workers, which wake when this says so."""

    def __init__(
        self,
        env: simpy.Environment,
        workers: Sequence[SimulatedWorker],
        make_fleet: Callable[[], Fleet],
        responses: Mapping[int, Response],
        recorder: Recorder,
        request_s: float,
    ) -> None:
        self._env = env
        self._workers = workers
        self._make_fleet = make_fleet
        self._responses = responses
        self._recorder = recorder
        self._request_s = request_s
        self._groups: dict[int, _Group] = {}
        self._closed: dict[int, tuple[Segment, ...]] = {}  # by ticket
        self._numbers: list[int] = []  # of the tickets submitted at this instant
        self._lengths: list[tuple[int, int]] = []
        self._wakes_s = math.inf

    @cached_property
    def _fleet(self) -> Fleet:
        """The workers' engines, which wake themselves until the first group is submitted."""
        fleet = self._make_fleet()
        for worker in self._workers:
            worker.group_runs = self
            fleet.arrays.loud[worker.index], fleet.arrays.versions[worker.index] = worker.is_loud, worker.policy_version
        return fleet

    def submit(self, groups: Sequence[Sequence[Sample]], workers: Sequence[int]) -> list[simpy.Event]:
        """Submit groups; `workers` has the worker of each sample, in order. Return an event for each group; it fires with its
        rollouts."""
        if not self._numbers:
            call_last(self._env, self._flush)
        events, begin, responses = [], 0, self._responses
        for samples in groups:
            number, first = self._fleet.open_group(list(workers[begin : begin + len(samples)]))
            begin += len(samples)
            self._groups[number] = group = _Group(samples, first, self._env.event())
            self._numbers.extend(range(first, first + len(samples)))
            self._lengths += [(sample.prompt_tokens, responses[sample.uid].tokens) for sample in samples]
            events.append(group.done)
        return events

    def flush(self) -> None:
        """Begin what was submitted at this instant."""
        if self._numbers:
            self._flush()

    # From a worker.

    def look_ahead(self, worker: int) -> None:
        """Wake when a worker stops next, at the latest."""
        me = self._workers[worker]
        self._fleet.arrays.loud[worker], self._fleet.arrays.versions[worker] = me.is_loud, me.policy_version
        self._fleet.look_ahead(worker)
        self._wake_at(self._fleet.next_s)

    def here(self, worker: int) -> int:
        """Return the tickets in a worker's engine."""
        return self._fleet.arrays.here.item(worker)

    def enter(self, worker: int, slot: int, number: int) -> None:
        """Let a request of a worker be a ticket."""
        self._fleet.enter(worker, slot, number)

    def ended(self, worker: int, slot: int) -> None:
        """Note the end of a worker's request that is a ticket."""
        self._fleet.note(worker, slot)

    def move_to_next_stop(self, worker: int) -> None:
        self._fleet.move_to_next_stop(worker)

    def close_segments(self, worker: int, now_s: float) -> None:
        """Close the open segments of a worker's tickets."""
        tickets, version = self._fleet.arrays.tickets, self._workers[worker].policy_version
        for number, tokens, _ in self._fleet.running(worker):
            ticket = tickets[number]
            new = tokens - ticket["closed_tokens"].item()
            if new > 0:
                segment = Segment(worker, version, new, ticket["started_s"].item(), now_s)
                self._closed[number] = (*self._closed.get(number, ()), segment)
            ticket["closed_tokens"], ticket["started_s"] = tokens, now_s

    # From the schedule.

    def stop(self) -> None:
        """Record what is unfinished, when the workers have stopped."""
        if not self._groups:
            return
        running = {
            number: (tokens, first_token_s)
            for worker in range(len(self._workers))
            for number, tokens, first_token_s in self._fleet.running(worker)
        }
        for number, (tokens, first_token_s) in running.items():
            ticket = self._fleet.arrays.tickets[number]
            ticket["tokens"], ticket["first_token_s"] = tokens, first_token_s
            ticket["version"] = self._workers[ticket["worker"]].policy_version
            ticket["ended_s"] = self._fleet.engines[ticket["worker"]].now_s
        for group in self._groups.values():
            for i, rollout in enumerate(self._rollouts(group)):
                self._recorder.request_ended(rollout._replace(done=group.first + i not in running), rollout.tokens)

    # From the engines.

    def _flush(self) -> None:
        numbers, lengths = np.array(self._numbers), np.array(self._lengths)
        self._numbers, self._lengths = [], []
        arrays = self._fleet.arrays
        worker_of = arrays.tickets["worker"][numbers]
        loud = arrays.loud[worker_of] == 1
        if loud.any():
            for number, worker, length in zip(numbers[loud], worker_of[loud], lengths[loud].tolist(), strict=True):
                self._workers[worker].begin_ticket(int(number), *length)
            numbers, lengths, worker_of = numbers[~loud], lengths[~loud], worker_of[~loud]
        if numbers.size:
            emptied_s = self._fleet.begin(numbers, lengths, self._env.now, self._request_s).tolist()
            tickets = self._fleet.arrays.tickets
            workers, at = np.unique(worker_of, return_index=True)
            for worker, started_s in zip(workers.tolist(), tickets["started_s"][numbers[at]].tolist(), strict=True):
                if emptied_s[worker] < math.inf:
                    self._workers[worker].close_rollout_span(emptied_s[worker])
                self._workers[worker].open_rollout_span(started_s)
        self._wake_at(self._fleet.next_s)

    def _wake_at(self, time_s: float) -> None:
        if time_s < self._wakes_s:
            self._wakes_s = time_s
            call_at(self._env, time_s, partial(self._wake, time_s))

    def _wake(self, time_s: float) -> None:
        """Take the stops up to the next one that is an event."""
        if time_s != self._wakes_s:
            return
        self._wakes_s = math.inf
        while True:
            what, number, stop_s = self._fleet.advance(self._env.now, self._env.peek())
            if what == GROUP:
                group = self._groups.pop(number)
                group.done.succeed(self._rollouts(group))
                self._fleet.close_group(number, group.first, len(group.samples))
            elif what == IDLE:
                self._workers[number].close_rollout_span(stop_s)
            elif what == LOUD:
                self._workers[number].wake()
            else:
                self._wake_at(stop_s)
                return

    def _rollouts(self, group: _Group) -> list[Rollout]:
        size = len(group.samples)
        tickets = self._fleet.arrays.tickets[group.first : group.first + size].tolist()
        rollouts = []
        for number, sample, ticket in zip(range(group.first, group.first + size), group.samples, tickets, strict=True):
            worker, _, tokens, closed_tokens, version, started_s, first_token_s, ended_s = ticket
            segments = self._closed.pop(number) if closed_tokens else ()
            if tokens > closed_tokens:
                segments = (*segments, Segment(worker, version, tokens - closed_tokens, started_s, ended_s))
            rollouts.append(Rollout(sample, segments, True, first_token_s))
        return rollouts
