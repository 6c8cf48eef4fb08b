"""GroupRuns: groups that simulated workers generate while nobody watches their single responses.

Invariant: a group's event fires at the end of its last response, with what its samples' own events would have had; the other
ends are no events. So a response costs no Python but for its `Rollout`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import simpy
from numpy.typing import NDArray

from simrl.engine.fleet import GROUP, IDLE, LOUD, Fleet
from simrl.runtime.events import call_at, call_last, on_fire
from simrl.runtime.recorder import Recorder
from simrl.runtime.rollout import Rollout, Segment, grown
from simrl.runtime.worker import GroupRun
from simrl.trace.trace import Response

if TYPE_CHECKING:
    from simrl.runtime.simulated_worker import SimulatedWorker


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
        self._groups: dict[int, GroupRun] = {}
        self._over: deque[list[Rollout]] = deque()  # of groups over at this instant, which nobody has heard yet
        self._closed: dict[int, tuple[Segment, ...]] = {}  # by ticket
        # Of the tickets that were submitted, and withdrawn, at this instant:
        self._numbers: list[int] = []
        self._lengths: list[tuple[int, ...]] = []
        self._withdrawn: list[int] = []
        self._wakes_s = math.inf

    @cached_property
    def _fleet(self) -> Fleet:
        """The workers' engines, which wake themselves until the first group is submitted."""
        fleet = self._make_fleet()
        for worker in self._workers:
            worker.group_runs = self
            fleet.arrays.loud[worker.index], fleet.arrays.versions[worker.index] = worker.is_loud, worker.policy_version
        return fleet

    def submit(
        self, groups: Sequence[GroupRun], workers: Sequence[int], cuts: Sequence[int | None], order: Sequence[int]
    ) -> None:
        """Submit groups; `workers` and `cuts` have the worker and the `max_tokens` of each sample, which begin in `order`."""
        self._flush_soon()
        begin, responses = 0, self._responses
        numbers: list[int] = []
        lengths: list[tuple[int, ...]] = []
        for group in groups:
            size = len(group.samples)
            number, first = self._fleet.open_group(list(workers[begin : begin + size]), group.needed or size)
            tickets = self._fleet.arrays.tickets
            group.first = first
            self._groups[number] = group
            numbers += range(first, first + size)
            mine = zip(group.samples, group.partials, cuts[begin : begin + size], strict=True)
            for i, (sample, before, cut) in enumerate(mine, first):
                had, length = before.tokens if before else 0, responses[sample.uid].tokens
                if cut is not None and cut < length:
                    length, tickets["whole"][i] = cut, 0
                lengths.append((sample.prompt_tokens, length, had, sample.prompt_id, sample.uid))
                if before and had:
                    tickets["closed_tokens"][i], self._closed[i] = had, before.segments
            begin += size
        self._numbers += [numbers[i] for i in order]
        self._lengths += [lengths[i] for i in order]

    def withdraw(self, groups: Sequence[GroupRun]) -> None:
        """Take the unfinished responses of groups back."""
        self._flush_soon()
        for group in groups:
            assert group.first is not None
            versions = self._fleet.arrays.tickets["version"][group.first : group.first + len(group.samples)]
            self._withdrawn += (group.first + np.flatnonzero(versions < 0)).tolist()

    def _flush_soon(self) -> None:
        if not self._numbers and not self._withdrawn:
            call_last(self._env, self.flush)

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

    def ended(self, worker: int, slot: int) -> None:
        """Note the end of a worker's request that is a ticket."""
        self._fleet.note(worker, slot)

    def move_to_next_stop(self, worker: int) -> None:
        self._fleet.move_to_next_stop(worker)

    def close_segments(self, worker: int, now_s: float) -> None:
        """Close the open segments of a worker's tickets."""
        tickets, me = self._fleet.arrays.tickets, self._workers[worker]
        for number, tokens, _ in self._fleet.running(worker):
            ticket = tickets[number]
            new = tokens - ticket["closed_tokens"].item()
            if new > 0:
                segment = Segment(me.lane, me.policy_version, new, ticket["started_s"].item(), now_s)
                self._closed[number] = (*self._closed.get(number, ()), segment)
            ticket["closed_tokens"], ticket["started_s"] = tokens, now_s

    # From the schedule.

    def stop(self) -> None:
        """Record what is unfinished, or over at this very instant, when the workers have stopped."""
        for rollouts in self._over:
            self._recorder.came_back([rollout for rollout in rollouts if not self._recorder.is_back(rollout)])
        if not self._groups:
            return
        running = {
            number: (tokens, first_token_s)
            for worker in range(len(self._workers))
            for number, tokens, first_token_s in self._fleet.running(worker)
        }
        for number, (tokens, first_token_s) in running.items():
            ticket = self._fleet.arrays.tickets[number]
            ticket["tokens"], ticket["first_token_s"], ticket["done"] = tokens, first_token_s, 0
            ticket["version"] = self._workers[ticket["worker"]].policy_version
            ticket["ended_s"] = self._fleet.engines[ticket["worker"]].now_s
        for group in self._groups.values():
            for _, rollout in self._rollouts(group):
                self._recorder.request_ended(rollout, rollout.tokens)

    # From the engines.

    def flush(self) -> None:
        """Begin what was submitted at this instant, and end what was withdrawn."""
        if self._numbers:
            numbers, lengths = np.array(self._numbers), np.array(self._lengths)
            self._numbers, self._lengths = [], []
            self._begin(numbers, lengths)
        if self._withdrawn:
            numbers, self._withdrawn = np.array(self._withdrawn), []
            quiet = self._quiet(numbers)
            for number in numbers[~quiet].tolist():
                me = self._worker_of(number)
                me.command(partial(self._withdraw_here, me, number))
            emptied_s = self._fleet.withdraw(numbers[quiet], self._env.now)
            for worker in np.flatnonzero(emptied_s < math.inf).tolist():
                self._workers[worker].close_rollout_span(emptied_s.item(worker))
        if self._groups:
            self._wake_at(self._fleet.next_s)

    def _quiet(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each ticket's engine has nothing else."""
        arrays = self._fleet.arrays
        return np.asarray(arrays.loud[arrays.tickets["worker"][numbers]] == 0)

    def _begin(self, numbers: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        quiet = self._quiet(numbers)
        for number, length in zip(numbers[~quiet].tolist(), lengths[~quiet].tolist(), strict=True):
            me = self._worker_of(number)
            me.command(partial(self._begin_here, me, number, *length))
        numbers, lengths = numbers[quiet], lengths[quiet]
        if numbers.size:
            emptied_s = self._fleet.begin(numbers, lengths, self._env.now, self._request_s).tolist()
            tickets = self._fleet.arrays.tickets
            workers, at = np.unique(tickets["worker"][numbers], return_index=True)
            for worker, started_s in zip(workers.tolist(), tickets["started_s"][numbers[at]].tolist(), strict=True):
                if emptied_s[worker] < math.inf:
                    self._workers[worker].close_rollout_span(emptied_s[worker])
                self._workers[worker].open_rollout_span(started_s)

    def _worker_of(self, number: int) -> SimulatedWorker:
        worker: int = self._fleet.arrays.tickets["worker"].item(number)
        return self._workers[worker]

    def _begin_here(
        self, me: SimulatedWorker, number: int, prompt: int, response: int, had: int, prompt_key: int, sample_key: int
    ) -> None:
        """Begin a ticket at a loud worker."""
        cut = self._fleet.arrays.tickets["whole"].item(number) == 0
        slot = me.engine.submit(prompt, response, had, 0, prompt_key, sample_key, continues=cut)
        me.engine.now_s += self._request_s
        self._fleet.enter(me.index, slot, number)
        me.open_rollout_span(me.engine.now_s)

    def _withdraw_here(self, me: SimulatedWorker, number: int) -> None:
        """End a ticket at a loud worker."""
        if self._fleet.take_out(number):
            me.ticket_left()

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
                self._news_of(number)
            elif what == IDLE:
                self._workers[number].close_rollout_span(stop_s)
            elif what == LOUD:
                self._workers[number].wake()
            else:
                self._wake_at(stop_s)
                return

    def _news_of(self, number: int) -> None:
        """Tell that a group is complete, or over."""
        group = self._groups[number]
        over = self._fleet.arrays.out.item(number) == 0
        rollouts = self._rollouts(group)
        if group.needed is not None:
            rollouts = sorted((each for each in rollouts if over or each[0] >= 0), key=itemgetter(0))
            if not group.complete.triggered and self._fleet.arrays.left.item(number) == 0:
                group.complete.succeed([rollout for _, rollout in rollouts if rollout.done])
        if over:
            del self._groups[number]
            assert group.first is not None
            for i in range(group.first, group.first + len(group.samples)):
                self._closed.pop(i, None)
            self._fleet.close_group(number, group.first, len(group.samples))
            self._over.append([rollout for _, rollout in rollouts])
            on_fire(group.over, lambda _: self._over.popleft())
            group.over.succeed(self._over[-1])

    def _rollouts(self, group: GroupRun) -> list[tuple[int, Rollout]]:
        """Return the rollouts of a group as they are known, each with its place among all ends; -1 if it has none yet."""
        assert group.first is not None
        tickets = self._fleet.arrays.tickets[group.first : group.first + len(group.samples)].tolist()
        rollouts = []
        for number, (sample, before, ticket) in enumerate(
            zip(group.samples, group.partials, tickets, strict=True), group.first
        ):
            worker, _, _, tokens, closed_tokens, version, _, done, *_, order, started_s, first_token_s, ended_s = ticket
            segments = self._closed[number] if closed_tokens else ()
            if version >= 0 and tokens > closed_tokens:
                segments = (
                    *segments,
                    Segment(self._workers[worker].lane, version, tokens - closed_tokens, started_s, ended_s),
                )
            if before is not None:
                first_token_s = first_token_s if math.isnan(before.first_token_s) else before.first_token_s
                rollout = grown(before, segments, first_token_s, done == 1)
            else:
                rollout = Rollout(sample, segments, done == 1, first_token_s)
            rollouts.append((order, rollout))
        return rollouts
