"""Generation: a fleet on the clock, and groups whose ends alone are events.

Invariant: a worker hears of a stop at its instant, with its engine at that boundary. A group's
event fires at the end of its last response, with the rollouts that the events of single samples
would have carried. So the only Python object that a response costs is its `Rollout`.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import simpy
from numpy.typing import NDArray

from simrl.engine.engine import Fleet
from simrl.engine.fleet import GROUP, STOP
from simrl.engine.state import Columns
from simrl.runtime.events import call_at, call_last, on_fire
from simrl.runtime.prompt_keys import PromptKeys
from simrl.runtime.recorder import Recorder
from simrl.runtime.rollout import Rollout, Segment, grown
from simrl.runtime.worker import GroupRun
from simrl.trace.trace import Response

if TYPE_CHECKING:
    from simrl.runtime.simulated_worker import SimulatedWorker

# Fields of a ticket that its rollout is made of.
SHOWN = ["engine", "tokens", "closed_tokens", "version", "done", "over", "order"]
SHOWN += ["started_s", "first_token_s", "ended_s"]


class Generation:
    """The requests of one fleet. The number of a worker is the number of its first engine here; the
    worker of each engine is in `workers`."""

    def __init__(
        self,
        env: simpy.Environment,
        fleet: Fleet,
        responses: Mapping[int, Response],
        recorder: Recorder,
        request_s: float,
        prompts: PromptKeys | None = None,
    ) -> None:
        self.fleet = fleet
        self._prompts = prompts or PromptKeys()
        self.workers: list[SimulatedWorker] = []
        self._env = env
        self._responses = responses
        self._recorder = recorder
        self._request_s = request_s
        self._groups: dict[int, GroupRun] = {}
        self._over: deque[list[Rollout]] = (
            deque()
        )  # of groups that end at this instant, before their events fire
        self._closed: dict[int, tuple[Segment, ...]] = {}  # by ticket
        self._wakes_s = math.inf

    # From a worker.

    def go_on(self, worker: SimulatedWorker) -> None:
        """Plan the next stop of a worker's engine, and wake for it."""
        self._plan(worker)
        if self._wakes_s > self._env.now:
            self._wakes_s = self._env.now
            call_last(self._env, partial(self._wake, self._env.now))

    def _plan(self, worker: SimulatedWorker) -> None:
        members, e = self.fleet.members, worker.engine.index
        members["watched"][e], members["version"][e] = worker.heeds_stops, worker.policy_version
        self.fleet.changed(e)

    def close_segments(self, worker: SimulatedWorker, now_s: float) -> None:
        """Close the open segments of a worker's tickets."""
        tickets = self.fleet.arrays.tickets
        for number, tokens, _ in self.fleet.tickets_in(worker.index):
            ticket = tickets[number]
            new = tokens - ticket["closed_tokens"].item()
            if new > 0:
                segment = Segment(
                    worker.lane, worker.policy_version, new, ticket["started_s"].item(), now_s
                )
                self._closed[number] = (*self._closed.get(number, ()), segment)
            ticket["closed_tokens"], ticket["started_s"] = tokens, now_s

    def sent_again(self, worker: SimulatedWorker, slots: Sequence[int], now_s: float) -> None:
        """Begin the segments of the tickets in some of a worker's slots, which are queued again."""
        self.fleet.arrays.tickets["started_s"][self._tickets(worker, slots)] = now_s

    def _tickets(self, worker: SimulatedWorker, slots: Sequence[int]) -> NDArray[np.int64]:
        """Return the tickets in some of a worker's slots; ranks in lock step have none."""
        if self.fleet.limits.dp > 1:
            return np.zeros(0, np.int64)
        numbers = self.fleet.arrays.engines.requests["ticket"][worker.index, list(slots)]
        return np.asarray(numbers[numbers >= 0])

    def start_over(self, worker: SimulatedWorker, slots: Sequence[int]) -> None:
        """Let the tickets in some of a worker's slots, whose segments are closed, lose their
        tokens."""
        tickets = Columns(self.fleet.arrays.tickets)
        for number in self._tickets(worker, slots).tolist():
            group = self._groups[tickets["group"].item(number)]
            place, tokens = number - group.first, tickets["closed_tokens"].item(number)
            self._recorder.started_over(group.samples[place], tokens)
            group.partials = [*group.partials[:place], None, *group.partials[place + 1 :]]
            tickets["closed_tokens"][number] = 0
            self._closed.pop(number, None)

    # From the schedule.

    def submit(
        self,
        groups: Sequence[GroupRun],
        workers: Sequence[int],
        cuts: Sequence[int | None],
        order: Sequence[int],
    ) -> None:
        """Submit groups. `workers` and `cuts` have the worker and the `max_tokens` of each sample;
        the samples begin in `order`."""
        begin, responses = 0, self._responses
        numbers: list[int] = []
        lengths: list[tuple[int, ...]] = []
        for group in groups:
            size = len(group.samples)
            number, first = self.fleet.open_group(
                list(workers[begin : begin + size]), group.needed or size
            )
            tickets = self.fleet.arrays.tickets
            group.first = first
            self._groups[number] = group
            numbers += range(first, first + size)
            members = zip(group.samples, group.partials, cuts[begin : begin + size], strict=True)
            for i, (sample, before, cut) in enumerate(members, first):
                had, length = before.tokens if before else 0, responses[sample.uid].tokens
                if is_cut := cut is not None and cut < length:
                    length, tickets["whole"][i] = cut, 0
                prompt, key = sample.prompt_tokens, self._prompts.key(sample)
                lengths.append((prompt, length, had, 0, key, prompt, sample.uid, is_cut))
                if before and had:
                    tickets["closed_tokens"][i], self._closed[i] = had, before.segments
            begin += size
        where, at = np.array(workers)[order], np.array(order)
        all_numbers, all_lengths = np.array(numbers)[at], np.array(lengths)[at]
        for worker in dict.fromkeys(where.tolist()):
            here = where == worker
            self.workers[worker].command(
                partial(self._begin, worker, all_numbers[here], all_lengths[here])
            )

    def withdraw(self, groups: Sequence[GroupRun]) -> None:
        """Abort the unfinished responses of groups."""
        tickets, here = Columns(self.fleet.arrays.tickets), defaultdict[int, list[int]](list)
        for group in groups:
            for number in range(group.first, group.first + len(group.samples)):
                if tickets["version"].item(number) < 0:
                    here[tickets["engine"].item(number)].append(number)
        for worker, numbers in here.items():
            self.workers[worker].command(partial(self._withdraw, worker, np.array(numbers)))

    def stop(self) -> None:
        """Record the responses that are unfinished, or end at this instant, when the workers have
        stopped."""
        for rollouts in self._over:
            self._recorder.came_back(
                [rollout for rollout in rollouts if not self._recorder.is_back(rollout)]
            )
        if not self._groups:
            return
        for worker in self.workers:
            for number, tokens, first_token_s in self.fleet.tickets_in(worker.index):
                ticket = self.fleet.arrays.tickets[number]
                ticket["tokens"], ticket["first_token_s"], ticket["done"] = tokens, first_token_s, 0
                ticket["version"] = worker.policy_version
                ticket["ended_s"] = self.fleet.engines[worker.index].now_s
        for group in self._groups.values():
            for _, rollout in self._rollouts(group):
                self._recorder.request_ended(rollout, rollout.tokens)

    # From the engines.

    def _begin(self, worker: int, numbers: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self.fleet.submit(worker, lengths, numbers, self._request_s)
        self.workers[worker].open_rollout_span(
            self.fleet.arrays.tickets["started_s"].item(numbers.item(0))
        )

    def _withdraw(self, worker: int, numbers: NDArray[np.int64]) -> None:
        slots = self.fleet.arrays.tickets["slot"][numbers]
        self.workers[worker].aside.difference_update(slots.tolist())
        if self.fleet.withdraw(worker, numbers):
            self.workers[worker].ticket_left()

    def _wake(self, time_s: float) -> None:
        """Advance the fleet to the next instant at which Python acts; handle all stops and groups
        on the way."""
        if time_s != self._wakes_s:
            return
        self._wakes_s = math.inf
        while True:
            news, number, next_s = self.fleet.advance(self._env.now, self._env.peek())
            if news == GROUP:
                self._news_of(number)
            elif news == STOP:
                self.workers[number].take_stops()
                self._plan(self.workers[number])
            else:
                break
        if next_s < self._wakes_s:
            self._wakes_s = next_s
            call_at(self._env, next_s, partial(self._wake, next_s))

    def _news_of(self, number: int) -> None:
        """Fire the event of a group that is complete or over."""
        group = self._groups[number]
        over = self.fleet.arrays.groups["out"].item(number) == 0
        rollouts = self._rollouts(group)
        if group.needed is not None:
            rollouts = sorted((place for place in rollouts if over or place[0]), key=itemgetter(0))
            if not group.complete.triggered and self.fleet.arrays.groups["left"].item(number) == 0:
                group.complete.succeed([rollout for _, rollout in rollouts if rollout.done])
        if over:
            del self._groups[number]
            for i in range(group.first, group.first + len(group.samples)):
                self._closed.pop(i, None)
            self.fleet.close_group(number, group.first, len(group.samples))
            self._over.append([rollout for _, rollout in rollouts])
            on_fire(group.over, lambda _: self._over.popleft())
            group.over.succeed(self._over[-1])

    def _rollouts(self, group: GroupRun) -> list[tuple[tuple[float, int] | None, Rollout]]:
        """Return the rollouts of a group so far, each with its place in the order of all ends; None
        for one that has not ended."""
        tickets = self.fleet.arrays.tickets[group.first : group.first + len(group.samples)][
            SHOWN
        ].tolist()
        rollouts = []
        members = zip(group.samples, group.partials, tickets, strict=True)
        for number, (sample, before, ticket) in enumerate(members, group.first):
            (
                engine,
                tokens,
                closed_tokens,
                version,
                done,
                over,
                order,
                started_s,
                first_token_s,
                ended_s,
            ) = ticket
            segments = self._closed[number] if closed_tokens else ()
            if version >= 0 and tokens > closed_tokens:
                lane = self.workers[engine].lane
                segments = (
                    *segments,
                    Segment(lane, version, tokens - closed_tokens, started_s, ended_s),
                )
            if before is not None:
                first_token_s = (
                    first_token_s if math.isnan(before.first_token_s) else before.first_token_s
                )
                rollout = grown(before, segments, first_token_s, done == 1)
            else:
                rollout = Rollout(sample, segments, done == 1, first_token_s)
            rollouts.append(((ended_s, order) if over else None, rollout))
        return rollouts
