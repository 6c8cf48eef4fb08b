"""The words of NeMo-RL, slime, miles and ROLL decide as the frameworks' own books do, in random
sequences of events.

`tests.references.samplers` keeps those books. A driver takes any books with the same methods, so
the frameworks' own classes can be driven by it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from simrl.pipelines import samplers
from simrl.pipelines.streaming import Finished
from simrl.pipelines.words import batches_ahead
from simrl.runtime.rollout import Rollout, Segment
from tests.references.samplers import (
    MilesProducer,
    NemoTargets,
    RollBuffer,
    SingleController,
    SlimePool,
)

SEQUENCES = 1000
EVENTS = 60


@dataclass
class Stream:
    """The counts of a `GroupStream`, without a run."""

    batch: int
    running: dict[int, int] = field(default_factory=dict)
    buffer: list[Finished] = field(default_factory=list)
    submitted: int = 0
    dropped: int = 0
    updates: int = 0
    version: int = 0
    noted_version: int = 0
    now_s: float = 0.0
    unfinished: int = 0
    scoring: int = 0
    group_size: int = 1
    run: Any = field(
        default_factory=lambda: SimpleNamespace(
            steps=10**6, dispatcher=SimpleNamespace(number_active=1)
        )
    )

    @property
    def kept(self) -> int:
        return self.submitted - self.dropped

    def again(self, time_s: float) -> None:
        """A budget asks to be looked at again."""

    def begin(self, stamp: int) -> int:
        self.running[self.submitted] = stamp
        self.submitted += 1
        return self.submitted - 1

    def finish(self, number: int, size: int = 1, ended: int = 0) -> None:
        rollout = Rollout(None, (Segment(0, ended, 1, 0.0, 0.0),), True)
        self.buffer.append(Finished(number, self.running.pop(number), [rollout] * size))

    def remove(self, numbers: list[int]) -> None:
        self.buffer = [group for group in self.buffer if group.number not in set(numbers)]


class Tally:
    """Decisions compared, and those that differ."""

    def __init__(self) -> None:
        self.tried = self.differing = 0
        self.examples: list[tuple[Any, ...]] = []

    def same(self, *decisions: Any) -> bool:
        self.tried += 1
        if decisions[-1] != decisions[-2]:
            self.differing += 1
            self.examples.append(decisions)
            return False
        return True


def numbers(groups: list[Finished] | None) -> list[int] | None:
    return None if groups is None else [group.number for group in groups]


def drive_nemo(books: Callable[..., Any], seed: int, tally: Tally) -> None:
    """Drive NeMo-RL's targets: batches start when they may, groups end, complete batches train."""
    random = Random(seed)
    batch, age = random.randint(1, 4), random.randint(1, 3)
    real, stream = books(batch, age), Stream(batch)
    begun = False
    for _ in range(EVENTS):
        target = 0
        while target is not None:  # the collector starts whatever it may
            target = real.next_target()
            room = batches_ahead(stream, ahead=age, at_once=lambda batch: (age + 1) * batch)
            if not tally.same("target", target, stream.kept // batch if room > 0 else None):
                return
            for _ in range(batch if target is not None else 0):
                stream.begin(stream.noted_version)
        event = random.choice(["finish", "finish", "finish", "train"])
        if event == "finish" and stream.running:
            number = random.choice(list(stream.running))
            stream.finish(number)
            real.finish(number // batch)
        elif event == "train":
            theirs = (begun or real.may_begin()) and real.train()
            groups = samplers.two_then_in_order(stream)
            if not tally.same("train", theirs, groups is not None):
                return
            if theirs:
                begun = True
                stream.remove(numbers(groups))
                stream.updates += 1
                stream.version = stream.noted_version = real.version = stream.version + 1


def drive_controller(sampler: str, books: Callable[..., Any], seed: int, tally: Tally) -> None:
    """Drive the single controller: prompts start as soon as they may, end, train in chunks; a
    step ends in a weight sync that takes a while."""
    random = Random(seed)
    batch, window = random.randint(1, 5), random.randint(0, 3)
    most, buffered = random.randint(1, 12), batch * (window + 1) + random.randint(0, 6)
    rule: dict[str, Any] = {"sampler": sampler, "window": window}
    real = books(sampler, window, batch, buffered, most)
    stream, loaded, syncing, trained = Stream(batch), 0, False, 0

    def launches() -> bool:
        started = []
        while (
            not syncing and samplers.permits(stream, **rule, in_flight=most, buffered=buffered) > 0
        ):
            started.append(stream.begin(loaded))
        return tally.same("launch", real.launch(), started)

    for _ in range(EVENTS):
        if not launches():
            return
        event = random.choice(["finish", "finish", "select", "synced"])
        if event == "finish" and stream.running:
            number = random.choice(list(stream.running))
            stream.finish(number)
            real.finish(number)
        elif event == "synced" and syncing:
            syncing, loaded = False, stream.version
            real.synced()
        elif event == "select" and not syncing:
            stale = [
                group.number
                for group in sorted(stream.buffer)
                if samplers.outside(stream, group.version, **rule)
            ]
            if not tally.same("evict", real.evict(), stale):
                return
            stream.remove(stale)
            stream.dropped += len(stale)
            left = batch - trained
            least = min(random.choice([1, 2, 32]), left)
            chosen = numbers(samplers.selectable(stream, **rule))[:left]
            chosen = chosen if len(chosen) >= least else []
            if not tally.same("select", real.select(least, left), chosen):
                return
            stream.remove(chosen)
            trained += len(chosen)
            if not launches():  # while it trains
                return
            if trained == batch:
                trained, syncing = 0, True
                stream.version += 1
                real.version = stream.version
                gone = [
                    number
                    for number, start in stream.running.items()
                    if samplers.outside(stream, start, **rule)
                ]
                if not tally.same("abort", real.sync(), gone):
                    return
                for number in gone:
                    del stream.running[number]
                stream.dropped += len(gone)


def drive_slime(books: Callable[..., Any], seed: int, tally: Tally) -> None:
    """Drive slime's pool: looks at whole seconds, groups that end or come back aborted, batches."""
    random = Random(seed)
    batch, most = random.randint(1, 5), random.randint(1, 8)
    real, stream = books(most), Stream(batch)
    again: list[int] = []  # aborted groups, which go on first
    collected = 0
    for _ in range(EVENTS):
        event = random.choice(["look", "finish", "finish", "finish", "abort", "take"])
        if event == "look":
            stream.now_s = float(int(stream.now_s) + 1)
            room = samplers.pool(stream, per_engine=most, poll_s=1.0)
            going_on, again = again[:room], again[room:]
            stream.running.update(dict.fromkeys(going_on, 0))
            new = [stream.begin(0) for _ in range(room - len(going_on))]
            if not tally.same("look", real.look(), going_on + new):
                return
        else:
            stream.now_s += 0.001
            tally.same("between looks", 0, samplers.pool(stream, per_engine=most, poll_s=1.0))
        if event == "finish" and stream.running:
            number = random.choice(sorted(stream.running))
            stream.finish(number)
            real.finish(number)
        elif event == "abort" and random.random() < 0.3:
            for number in list(stream.running):
                real.abort(number)
            again += stream.running
            stream.running.clear()
        elif event == "take" and collected == batch:
            stream.buffer, collected = stream.buffer[batch:], 0
        # a batch is collected while its groups end
        ours = numbers(stream.buffer[collected:batch])
        if not tally.same("collect", real.collect(batch - collected), ours):
            return
        collected += len(ours)


def drive_miles(books: Callable[..., Any], seed: int, tally: Tally) -> None:
    """Drive miles' producer and buffer: samples end, groups end, batches are asked for."""
    random = Random(seed)
    batch, size = random.randint(1, 4), random.randint(1, 4)
    most = random.choice([batch, batch, random.randint(1, 6)])
    factor = random.choice([2.0, 2.0, 1.0, 1.5])
    staleness = random.choice([None, 0, 1, 2])
    retry, by_sample = random.random() < 0.5, random.random() < 0.7
    interval = random.choice([1, 1, 2])
    capacity = int(factor * batch)
    real = books(batch, size, most, capacity, staleness, retry, by_sample)
    stream = Stream(batch, group_size=size)
    rule = {
        "most_samples": None if most == batch else most * size,
        "capacity_batches": factor,
        "by_sample": by_sample,
    }
    left: dict[int, int] = {}  # unfinished samples of running groups
    named: dict[int, int] = {}  # the framework's number of a group
    again: list[int] = []
    new = 0
    version = 0

    def settle() -> bool:
        nonlocal new
        stale = [
            group
            for group in stream.buffer
            if staleness is not None
            and samplers.stale_when_taken(stream, group, staleness=staleness, interval=interval)
        ]
        dropped, real.dropped = list(real.dropped), []
        if not tally.same("stale", dropped, [named[group.number] for group in stale]):
            return False
        if retry:
            again.extend(named[group.number] for group in stale)
        stream.remove([group.number for group in stale])
        stream.dropped += len(stale)
        started = []
        while samplers.in_flight(stream, **rule) > 0:
            number = stream.begin(0)
            if again:
                named[number] = again.pop(0)
            else:
                named[number], new = new, new + 1
            left[number] = size
            stream.unfinished += size
            started.append(named[number])
        return tally.same("start", real.submit(), started)

    real.ask(0)
    if not settle():
        return
    for _ in range(EVENTS):
        event = random.choice(["sample"] * 4 * size + ["train"])
        if event == "sample" and left:
            number = random.choice(sorted(left))
            left[number] -= 1
            stream.unfinished -= 1
            real.finish_sample()
            if not left[number]:
                del left[number]
                stream.finish(number, size, version)
                real.finish_group(named[number], version)
        elif event == "train":
            ready = len(stream.buffer) >= batch
            if not tally.same("ready", len(real.collected) == batch, ready):
                return
            if not ready:
                continue
            taken = [named[group.number] for group in stream.buffer[:batch]]
            if not tally.same("taken", list(real.collected), taken):
                return
            stream.buffer = stream.buffer[batch:]
            # the batch before trained and, if it was due, was synced; the next is asked for
            version = stream.updates // interval * interval
            stream.updates += 1
            real.ask(version)
        if not settle():
            return


def drive_roll(
    books: Callable[..., Any], seed: int, tally: Tally, ratios: tuple[float, ...] = (0, 1, 2, 3)
) -> None:
    """Drive ROLL's replay buffer: prompts start, end or are filtered, batches are taken, and what
    is old is aborted before the next step."""
    random = Random(seed)
    batch, size, ratio = random.randint(1, 5), random.randint(1, 3), random.choice(ratios)
    if ratio % 1:
        batch = 2 * random.randint(1, 3)
    real, stream = books(ratio, size), Stream(batch)
    rule = {"ratio": ratio}

    def starts() -> bool:
        started = []
        while samplers.prompts_of_steps(stream, **rule) > 0:
            started.append(stream.begin(stream.noted_version))
        return tally.same("start", real.start(), started)

    real.advance(batch)
    if not starts():
        return
    for _ in range(EVENTS):
        event = random.choice(["finish", "finish", "finish", "refuse", "take", "take"])
        if event in ("finish", "refuse") and stream.running:
            number = random.choice(sorted(stream.running))
            if event == "finish":
                stream.finish(number, size)
                real.finish(number)
            else:
                del stream.running[number]
                stream.dropped += 1
                real.refuse(number)
        elif event == "take":
            ours = samplers.oldest_steps(stream, **rule)
            if not tally.same("take", real.take(batch), numbers(ours)):
                return
            if ours is not None:
                stream.remove(numbers(ours))
                if not starts():
                    return
                if not tally.same("abort", real.collect_garbage(), []):
                    return
                if ratio and not starts():
                    return
                real.advance(batch)
                stream.noted_version += 1
        if not starts():
            return


DRIVES = {
    "nemo_rl_async": partial(drive_nemo, NemoTargets),
    "in_order": partial(drive_controller, "in_order", SingleController),
    "ready_first": partial(drive_controller, "ready_first", SingleController),
    "weight_fifo": partial(drive_controller, "weight_fifo", SingleController),
    "windowed": partial(drive_controller, "windowed", SingleController),
    "slime_fully_async": partial(drive_slime, SlimePool),
    "miles_async": partial(drive_miles, MilesProducer),
    "roll_async": partial(drive_roll, RollBuffer),
    "roll_async, fractions": partial(drive_roll, RollBuffer, ratios=(0.5, 1.5)),
}


@pytest.mark.parametrize("name", DRIVES)
def test_a_word_decides_as_the_books_of_its_framework(name):
    tally = Tally()
    for seed in range(SEQUENCES):
        DRIVES[name](seed, tally)
    assert tally.tried > 10 * SEQUENCES
    assert not tally.examples
