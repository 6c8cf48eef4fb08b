"""Buffered: groups start by a budget, wait in a buffer when they are finished, and train when a
rule has the groups of an update. The pipeline of all frameworks that are made of these words.

Words are functions of the `GroupStream`; `simrl.pipelines.words` has those that several frameworks
share. A system is a handful of them (`Rules`).

Invariant: batches train in the order in which they were taken, and at most `Rules.ahead` of them
wait for the trainer. A word decides from counts, stamps and the clock; it changes nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import simpy

from simrl.dispatch.elastic import Rule
from simrl.pipelines.context import RunContext
from simrl.pipelines.streaming import Finished, GroupStream
from simrl.runtime.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The words of a system.

    `budget` returns how many more groups may start now (not positive: none); it is asked when a
    group is scored or dropped, after a sync, and, if it counts `by_response`, whenever a response
    ends. `ready` returns the finished groups that the next update trains; None: not yet. `groups`
    has the groups of an update, given the groups of a batch of the trace. `stamp` marks a group at
    its submission.

    `stale` says whether a finished group is dropped, when the buffer is looked at ("pull"), when
    a group is scored, too ("both"), or, the oldest group only, just then ("finish"). It counts
    what trained, was taken, synced or dropped, and what is before the group in the buffer. `evict`
    says whether a running group with a stamp is aborted and dropped, when a batch was taken
    ("pull") or before the workers load ("sync"). The budget refills what was dropped.

    Weights are synced after every `updates_per_sync` updates. A sync waits for nothing, until the
    next batch is "ready", or, while no group begins, until no response is unfinished ("generated")
    or no group runs ("scored"). While the workers load, groups begin if it `admits`, and the trainer
    goes on if it `overlaps`. (`System.on_update` says what a load does to running requests.)

    If the trainer is on the workers' GPUs, it `sleeps`: what runs is taken back before an update, and
    goes on at the same workers once they have loaded. `at_sync` is called when a sync begins.

    `retries`: what is dropped at a pull begins again, before new groups. `takes_back`: running
    groups are aborted before the workers load, and go on by the budget, before new groups.

    `ahead` batches may be taken before the trainer is free. The buffer is looked at when a group is
    finished, or every `poll_s` seconds from the first look for an update on. `begin` starts what
    else the system needs, such as a controller of its concurrency.
    """

    budget: Callable[[GroupStream], int]
    ready: Callable[[GroupStream], list[Finished] | None]
    by_response: bool = False
    groups: Callable[[int], int] = lambda batch: batch
    stamp: Callable[[GroupStream], int] = lambda stream: stream.version
    stale: Callable[[GroupStream, Finished], bool] | None = None
    drop_at: Literal["pull", "finish", "both"] = "pull"
    evict: Callable[[GroupStream, int], bool] | None = None
    evict_at: Literal["pull", "sync"] = "sync"
    updates_per_sync: int = 1
    sync_after: Literal["nothing", "ready", "generated", "scored"] = "nothing"
    admits: bool = True
    overlaps: bool = False
    sleeps: bool = False
    at_sync: Callable[[GroupStream], object] = lambda stream: None
    retries: bool = False
    takes_back: bool = False
    ahead: int = 0
    poll_s: float = 0.0
    begin: Callable[[GroupStream], object] = lambda stream: None


def buffered(run: RunContext, *, rules: Rules) -> simpy.events.ProcessGenerator:
    """Train what is ready, and sync the weights after every few updates."""
    stream = GroupStream(run, lambda: rules.budget(stream), lambda: rules.stamp(stream))
    stream.batch = rules.groups(stream.batch)
    stream.by_response = rules.by_response
    if rules.stale is not None:
        stream.is_stale, stream.drop_at = rules.stale, rules.drop_at
    rules.begin(stream)
    stream.admit()
    updates: deque[simpy.Event] = deque()  # that have batches and are not over
    for number in range(1, run.steps + 1):
        yield from _take_back(stream, rules)
        looked_s, missing = run.env.now, max(0, stream.batch - len(stream.buffer))
        while (groups := _look(stream, rules)) is None:
            yield from _next_look(stream, rules.poll_s, looked_s)
        if run.pool is not None and run.pool.rule is not None:
            run.pool.rule.waited(run.env.now - looked_s, missing)
        rollouts = stream.take_batch(groups)
        _evict(stream, rules, "pull")
        stream.admit()
        update = _update(stream, rules, rollouts, number, updates[-1] if updates else None)
        if not rules.ahead:
            yield from update
            continue
        updates.append(run.env.process(update))
        while len(updates) > rules.ahead:
            yield updates.popleft()
    yield from updates


def _look(stream: GroupStream, rules: Rules) -> list[Finished] | None:
    """Drop what is stale in the buffer. Return the groups of the next update, or None."""
    if rules.stale is not None and rules.drop_at != "finish":
        stream.drop(stream.stale(), rules.retries)
    return rules.ready(stream)


def _next_look(stream: GroupStream, poll_s: float, since_s: float) -> simpy.events.ProcessGenerator:
    """Wait for the next finished group, and then for a look, of looks every `poll_s` seconds."""
    yield stream.news_for_update()
    if poll_s:
        yield stream.run.env.timeout(until_next(stream.now_s - since_s, poll_s))


def _take_back(stream: GroupStream, rules: Rules) -> simpy.events.ProcessGenerator:
    """Let the trainer have its own GPUs again when the rule that lends them says so."""
    if (pool := stream.run.pool) is None or not pool.rolls_out or pool.rule is None:
        return
    looked_s = stream.now_s
    while pool.rule.waits(ready=_look(stream, rules) is not None, finished=len(stream.buffer)):
        yield from _next_look(stream, pool.rule.poll_s, looked_s)
    yield from pool.switch()


def _lends(stream: GroupStream, rules: Rules, rule: Rule) -> bool:
    """Return whether the trainer's own GPUs are lent: of finished groups, those count that are not
    stale in the next step."""
    noted, stream.noted_version = stream.noted_version, stream.version
    ready = sum(not (rules.stale and rules.stale(stream, group)) for group in stream.buffer)
    stream.noted_version = noted
    return rule.lends(ready)


def until_next(waited_s: float, poll_s: float) -> float:
    """Return the seconds to the next look, of looks every `poll_s` seconds."""
    looks = math.ceil(round(waited_s / poll_s, 9))
    return max(looks * poll_s - waited_s, 0.0)


def _evict(stream: GroupStream, rules: Rules, moment: Literal["pull", "sync"]) -> None:
    """Evict what has become stale while it runs, if this is the moment for it."""
    if (evict := rules.evict) is not None and rules.evict_at == moment:
        stream.evict([number for number, stamp in stream.running.items() if evict(stream, stamp)])


def _update(
    stream: GroupStream,
    rules: Rules,
    rollouts: list[Rollout],
    number: int,
    before: simpy.Event | None,
) -> simpy.events.ProcessGenerator:
    """Make an update, after the one `before`, and sync the weights if it is due."""
    if before is not None:
        yield before
    syncs = number % rules.updates_per_sync == 0
    if rules.sleeps:
        yield stream.sleep()
    yield stream.run.trainer.train(rollouts, publish=syncs)
    if syncs and rules.overlaps:
        stream.run.env.process(_sync(stream, rules))
    elif syncs:
        yield from _sync(stream, rules)


def _sync(stream: GroupStream, rules: Rules) -> simpy.events.ProcessGenerator:
    """Bring the newest weights to all workers."""
    rules.at_sync(stream)
    last = stream.updates == stream.run.steps
    while rules.sync_after == "ready" and not last and _look(stream, rules) is None:
        yield stream.news_for_update()
    if rules.sync_after in ("generated", "scored") or not rules.admits:
        stream.pause()
    if rules.sync_after == "generated":
        yield stream.drained()
    while rules.sync_after == "scored" and stream.running:
        yield stream.news()
    _evict(stream, rules, "sync")
    if rules.takes_back:
        stream.take_back()
    pool = stream.run.pool
    lends = pool is not None and pool.rule is not None and _lends(stream, rules, pool.rule)
    if lends:
        stream.pause()  # what begins may go to the trainer's GPUs
    loaded = stream.run.load_weights()
    stream.taken_before_sync = stream.taken
    if rules.admits and not lends:
        stream.resume()
    yield loaded
    if pool is not None and pool.rule is not None:
        if lends:
            yield from pool.switch()
        pool.rule.over()
    stream.noted_version = stream.version
    stream.syncs += 1
    stream.wake()
    stream.resume()
