"""Streaming: groups go in one by one while a rule has room for more, and come out into a buffer
that the trainer takes from.

Invariant: submitted = in line + running + buffered + taken + dropped, in groups, at every moment; a group
runs until its last response is scored or it is evicted, and is taken or dropped once. What is
counted, and what bounds it, is a rule of the system (`simrl.pipelines.words`,
`simrl.pipelines.laminar`); a group that was submitted and dropped leaves its room as it was.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import simpy

from simrl.errors import InputError, StoppedError, first_line
from simrl.pipelines.context import RunContext
from simrl.runtime.events import Signal, call_at, gather, on_fire
from simrl.runtime.rollout import Rollout
from simrl.runtime.worker import GroupRun
from simrl.trace.sample import Sample
from simrl.validation import shortened

FURTHEST_AHEAD = 128  # batches that a rule may submit at once beyond those that the run trains


class Finished(NamedTuple):
    """A group whose responses are all finished and scored: the number of groups submitted before
    it, its stamp (by default, the trainer's version when it was submitted), and its responses."""

    number: int
    version: int
    rollouts: list[Rollout]

    @property
    def oldest_version(self) -> int:
        return min(
            segment.policy_version for rollout in self.rollouts for segment in rollout.segments
        )


class GroupStream:
    """The groups of one run. `room` returns how many more groups may be submitted now; it is called
    whenever that may have changed, so it changes nothing itself. None: the pipeline submits each
    group (`submit`). A scored group that the run does not accept is dropped.

    `stamp` returns the stamp of a group that is submitted now (None: the trainer's version).
    `batch` is the number of groups of an update. When a group is scored, what is `stale` in the
    buffer is dropped, unless `drop_at` is "pull".
    """

    def __init__(
        self,
        run: RunContext,
        room: Callable[[], int] | None,
        stamp: Callable[[], int] | None = None,
    ) -> None:
        self.running: dict[int, int] = {}  # stamps by number, in the order of submission
        self.buffer: list[Finished] = []  # in the order in which they were finished
        self.submitted = 0
        self.dropped = 0
        self.batch = run.workload.batch_groups
        self.taken = 0  # groups in updates so far
        self.taken_before_sync = 0  # of them, those taken before the last weight sync began
        self.updates = 0  # batches taken so far
        self.syncs = 0  # weight syncs after which the workers have loaded
        # the trainer's version when a batch was last taken, or the workers had last loaded
        self.noted_version = 0
        self.facts = run.recorder.facts
        run.recorder.facts["stream"] = self
        self.is_stale: Callable[[GroupStream, Finished], bool] = lambda stream, group: False
        self.drop_at: Literal["pull", "finish", "both"] = "pull"
        self._asked: tuple[int, ...] = ()  # the counts as of which `stale` was asked
        self._fresh = 0  # groups of the buffer, the first ones, that were not stale then
        self._stamp = stamp or (lambda: run.trainer.version)
        self._at_workers: dict[int, GroupRun] = {}
        self._evicted: set[int] = set()
        # groups that begin next, before new ones: number and what they have
        self._in_line: deque[tuple[int, list[Rollout]]] = deque()
        # that run and begin next
        self._in_pool: OrderedDict[int, list[Rollout] | None] = OrderedDict()
        # whether a group of which no response may start waits in the pool, undrawn
        self.begins_late = False
        self._finished: dict[int, list[Rollout]] = {}  # of running groups that were taken back
        self._sleeps = False  # from `sleep` to `wake`
        self._asleep: dict[int, list[Rollout]] = {}  # what was taken back meanwhile, by number
        self._looks_s: set[float] = set()  # at which the budget is looked at again
        self.paused = False  # whether no group may begin
        self.unfinished = 0  # responses of running groups, where they are followed
        self.by_response = False  # whether `room` changes whenever a response ends
        # called then, before `room`, with whether the response is done; and after `admit`
        self.on_response: Callable[[bool], object] = lambda done: None
        self.on_admitted: Callable[[], object] = lambda: None
        # responses of a group, rounded up
        self.group_size = -(-run.workload.batch_responses // self.batch)
        self.run = run
        self._room = room
        self._news = Signal(run.env)

    @property
    def version(self) -> int:
        """The trainer's version: its updates so far."""
        return self.run.trainer.version

    @property
    def now_s(self) -> float:
        return self.run.env.now

    @property
    def scoring(self) -> int:
        """Running groups whose responses have all ended."""
        return sum(group.over.triggered for group in self._at_workers.values())

    @property
    def kept(self) -> int:
        """Groups that were submitted and not dropped: what a rule of staleness counts."""
        return self.submitted - self.dropped

    def admit(self) -> None:
        """Submit groups while the rule has room for them and the workload has groups. Raise
        `InputError` if the rule counts dropped groups, or has no bound."""
        if self._room is None or self.paused:
            return
        self._begin()  # other responses than its own may have made place
        run, start = self.run, self.submitted
        most = (run.steps + FURTHEST_AHEAD) * run.workload.batch_groups
        first = room = self._checked_room(self._room)
        while room > 0 and (self._in_line or not run.workload.ended):
            if self.submitted - start > most and (room >= first or room > FURTHEST_AHEAD * most):
                raise InputError(
                    f"{self._words}: it goes on after {self.submitted - start} groups at once, and {run.steps} updates train "
                    f"{run.steps * run.workload.batch_groups}; let the room fall with each group, such as "
                    "(version + 1 + ahead) * batch - GroupStream.kept"
                )
            self._in_pool.update([self._next()])
            self._begin()
            room = self._checked_room(self._room)
        self.on_admitted()

    def _begin(self) -> None:
        """Begin groups of the pool, in its order; with `begins_late`, only while a response may start."""
        dispatcher = self.run.dispatcher
        while self._in_pool and not (self.begins_late and dispatcher.is_full):
            number, rollouts = self._in_pool.popitem(last=False)
            left = self._left(number, self._drawn() if rollouts is None else rollouts)
            self._follow(number, self._at_work(left))

    def _at_work(self, rollouts: list[Rollout]) -> GroupRun:
        """Submit a group, which goes on from what it has."""
        group = [rollout.sample for rollout in rollouts]
        partials = [rollout if rollout.segments else None for rollout in rollouts]
        if not self.by_response:
            return self.run.dispatcher.submit_groups([group], [partials])[0]
        env, ends = self.run.env, self.run.dispatcher.submit(group, partials)
        self.unfinished += len(ends)
        over = gather(env, ends)  # triggered before its last response is noted
        for end in ends:
            on_fire(end, self._response_ended)
        return GroupRun(group, partials, None, env.event(), over)

    def _response_ended(self, end: Any) -> None:
        if end.ok:  # a failure reaches the run through the group
            self._begin()
            self.unfinished -= 1
            self.on_response(end.value.done)
            self.admit()

    def shed(self, responses: int) -> None:
        """Drop running groups until `responses` of those in flight are aborted, the youngest first."""
        for number in sorted(self.running, reverse=True):
            if responses <= 0:
                return
            at_workers = self._at_workers.get(number)  # None: it waits in the pool
            responses -= self.run.dispatcher.started(at_workers.samples if at_workers else ())
            self.evict([number])

    def _checked_room(self, rule: Callable[[], int]) -> int:
        """Return the room that the rule has. Raise `InputError` if it would have another without
        the groups that were submitted and dropped."""
        submitted, dropped = self.submitted, self.dropped
        self.submitted, self.dropped = self.kept, 0
        without_dropped = self._called(rule) if dropped else None
        self.submitted, self.dropped = submitted, dropped
        room = self._called(rule)
        if without_dropped not in (None, room):
            raise InputError(
                f"{self._words}: it counts {self.dropped} dropped groups as if they ran, and the run would starve; count "
                "GroupStream.kept, the groups submitted and not dropped, in place of GroupStream.submitted"
            )
        return room

    def _called(self, rule: Callable[[], int]) -> int:
        """Return the room that the rule returns. Raise `InputError` if it raises, or returns no
        number."""
        meant = "; it returns how many more groups may be submitted now, a whole number"
        place = f"{self._pipeline}: its rule of room"
        try:
            room = rule()
        except (InputError, StoppedError):
            raise
        except Exception as error:  # a package may raise anything
            raise InputError(
                f"{place} raises {type(error).__name__} ({first_line(error)}){meant}"
            ) from error
        if not isinstance(room, int | np.integer | np.bool_ | float) or room != room:
            raise InputError(f"{place} returns {shortened(room)}{meant}")
        return room

    def submit(self, to: int) -> list[tuple[Sample, simpy.Event]]:
        """Submit the next group to one worker. Return its samples with their dispatcher events."""
        number, rollouts = self._next()
        group = [rollout.sample for rollout in rollouts or self._drawn()]
        ends = self.run.dispatcher.submit(group, to=[to] * len(group))
        on_fire(gather(self.run.env, ends), partial(self._ended, number))
        return list(zip(group, ends, strict=True))

    def _drawn(self) -> list[Rollout]:
        """Return the next group of the workload, of which nothing is generated."""
        (group,) = self.run.workload.next_groups(1)
        return [Rollout(sample, (), False) for sample in group]

    def _next(self) -> tuple[int, list[Rollout] | None]:
        """Return the group that runs from now on: its number, and what its samples have; None for one
        that is drawn when it begins."""
        number, rollouts = self._in_line.popleft() if self._in_line else (self.submitted, None)
        self.submitted += rollouts is None
        self.running[number] = self._stamp()
        return number, rollouts

    def take_batch(self, groups: list[Finished]) -> list[Rollout]:
        """Take the groups of an update. Return their responses."""
        self.updates += 1
        self.taken += len(groups)
        self.noted_version = self.version
        return self.take(groups)

    def pause(self) -> None:
        """Let no group begin before `resume`."""
        self.paused = True
        if "admission" in self.facts:
            self.facts["admission"].note(None, self.now_s)

    def resume(self) -> None:
        """Let groups begin again."""
        self.paused = False
        self.admit()

    def sleep(self) -> simpy.Event:
        """Take what runs back from the workers, with its tokens, and let no group begin, until
        `wake`. Return an event that fires when nothing is there."""
        self.pause()
        self._sleeps, drained = True, self.drained()
        self.run.dispatcher.withdraw_groups(self._generating)
        return drained

    def wake(self) -> None:
        """Let what was taken back go on, each response at its worker."""
        self._sleeps = False
        if not self._asleep:
            return
        left = [self._left(number, rollouts) for number, rollouts in self._asleep.items()]
        begun = [[rollout if rollout.segments else None for rollout in group] for group in left]
        lanes = [rollout and rollout.segments[-1].worker for group in begun for rollout in group]
        runs = self.run.dispatcher.submit_groups(
            [[rollout.sample for rollout in group] for group in left],
            begun,
            to=[
                None
                if lane is None or lane // self.run.lanes_each >= len(self.run.workers)
                else lane // self.run.lanes_each
                for lane in lanes
            ],
        )
        for number, at_workers in zip(self._asleep, runs, strict=True):
            self._follow(number, at_workers)
        self._asleep = {}

    def _left(self, number: int, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the responses of a group that are not finished; the others wait for them."""
        self._finished[number] = [rollout for rollout in rollouts if rollout.done]
        return [rollout for rollout in rollouts if not rollout.done]

    def _follow(self, number: int, at_workers: GroupRun) -> None:
        self._at_workers[number] = at_workers
        on_fire(at_workers.over, partial(self._ended, number))

    def take_back(self) -> None:
        """Abort running groups that have requests at workers. They go on before new groups, with the
        tokens that they have."""
        dispatcher, groups = self.run.dispatcher, self._at_workers.values()
        dispatcher.withdraw_groups([group for group in groups if dispatcher.started(group.samples)])

    def take(self, groups: list[Finished]) -> list[Rollout]:
        """Take groups out of the buffer. Return their responses."""
        gone = {group.number for group in groups}
        self.buffer = [group for group in self.buffer if group.number not in gone]
        return [rollout for group in groups for rollout in group.rollouts]

    def stale(self) -> list[Finished]:
        """Return the groups of the buffer that are stale. A group that was not is asked again only
        when a count has changed: then all are. Dropped at "finish", only the oldest is asked."""
        if self.drop_at == "finish":
            return [group for group in self.buffer[:1] if self.is_stale(self, group)]
        counts = (self.updates, self.version, self.noted_version, self.syncs, self.dropped)
        first = self._fresh if counts == self._asked else 0
        self._asked, self._fresh = counts, len(self.buffer)
        return [group for group in self.buffer[first:] if self.is_stale(self, group)]

    def drop(self, groups: list[Finished], retry: bool = False) -> None:
        """Drop groups of the buffer that are too stale to be trained, and submit others in their
        place: with `retry`, theirs first."""
        if groups:
            self._count_stale(self._drop(groups))
        for group in groups if retry else []:
            samples = [self.run.workload.again(rollout.sample) for rollout in group.rollouts]
            self._in_line.append((self.submitted, [Rollout(one, (), False) for one in samples]))
            self.submitted += 1
        self.admit()

    def _drop(self, groups: list[Finished]) -> int:
        """Drop groups of the buffer. Return the number of their responses."""
        rollouts = self.take(groups)
        self.dropped += len(groups)
        self.run.recorder.dropped(rollouts)
        return len(rollouts)

    def evict(self, numbers: Iterable[int]) -> None:
        """Drop running groups: their responses are aborted, and their room is free at once. Others
        are not submitted before `admit`."""
        for number in numbers:
            del self.running[number]
            self.dropped += 1
            if number in self._in_pool:
                self.run.recorder.dropped(self._in_pool.pop(number) or [])
                continue
            self._evicted.add(number)
            at_workers = self._at_workers[number]
            self._count_stale(len(at_workers.samples))
            if not at_workers.over.triggered:
                self.run.dispatcher.withdraw_groups([at_workers])

    def _count_stale(self, responses: int) -> None:
        self.facts["stale_samples"] = self.facts.get("stale_samples", 0) + responses

    def again(self, time_s: float) -> None:
        """Call `admit` again at `time_s`: for budgets that grow with time."""
        if time_s not in self._looks_s:
            self._looks_s.add(time_s)
            call_at(self.run.env, time_s, self.admit)

    @property
    def _pipeline(self) -> str:
        return f"pipeline {getattr(self._room, '__module__', '')}"

    @property
    def _words(self) -> str:
        """The rule and what it holds, for messages."""
        taken = self.kept - len(self.running) - len(self.buffer)
        return (
            f"{self._pipeline}: its room for groups is {self._called(self._room) if self._room else 0} at "
            f"version {self.run.trainer.version}; of {self.submitted} submitted, {len(self.running)} run, {len(self.buffer)} "
            f"are finished, {taken} trained, {self.dropped} dropped"
        )

    def starved(self) -> str:
        """Return why a run that stands still has no group left to wait for; "" where that is not
        its rule's doing."""
        if self._room is None or self.running:
            return ""
        called = "call GroupStream.admit whenever what it counts has changed"
        counted = "let it count GroupStream.kept, the groups submitted and not dropped, and grow with the trainer's version"
        remedy = called if self._called(self._room) > 0 else counted
        return f"{self._words}. It waits for a group, and none is submitted; {remedy}"

    def news(self) -> simpy.Event:
        """Return an event that fires when the next group is finished."""
        return self._news.next

    def news_for_update(self) -> simpy.Event:
        """Return `news` for the next update. Raises `StoppedError` if none will come: the trace has
        ended."""
        if self.run.workload.ended and not self.running and not self._in_line:
            raise StoppedError(
                f"the trace ended after {self.version} of {self.run.steps} updates: the next has {len(self.buffer)} of "
                f"{self.batch} groups (dropped: {self.dropped}); give the trace more groups, or ask for fewer steps"
            )
        return self._news.next

    def drained(self) -> simpy.Event:
        """Return an event that fires when no response of any group is unfinished."""
        return gather(self.run.env, [group.over for group in self._generating])

    @property
    def _generating(self) -> list[GroupRun]:
        """The groups with a response that is not finished."""
        return [group for group in self._at_workers.values() if not group.over.triggered]

    def _ended(self, number: int, ended: Any) -> None:
        if not ended.ok:
            raise ended.value  # a worker that died, or its engine's error
        rollouts = [*self._finished.pop(number, []), *ended.value]
        rollouts.sort(key=lambda rollout: rollout.sample.uid)
        is_evicted = number in self._evicted
        is_done = all(rollout.done for rollout in rollouts)
        if self._sleeps and not is_evicted and not is_done:
            self._asleep[number] = rollouts
            return
        if is_evicted:
            self._gone(number, rollouts)
        elif not is_done:  # taken back
            del self.running[number], self._at_workers[number]
            self._in_line.append((number, rollouts))
            self.admit()
        else:
            on_fire(self.run.rewarder.score(rollouts), partial(self._scored, number))

    def _gone(self, number: int, rollouts: list[Rollout]) -> None:
        """Record the responses of an evicted group, which has left its workers."""
        self._evicted.remove(number)
        del self._at_workers[number]
        self.run.recorder.dropped(rollouts)
        self._news.fire()

    def _scored(self, number: int, scored: Any) -> None:
        if number in self._evicted:
            self._gone(number, scored.value)
            return
        self._at_workers.pop(number, None)
        group = Finished(number, self.running.pop(number), scored.value)
        self.buffer.append(group)
        if not self.run.accepts(group.rollouts):
            self._drop([group])
        elif self.drop_at != "pull" and (stale := self.stale()):
            self._count_stale(self._drop(stale))
        self.admit()
        self._news.fire()
