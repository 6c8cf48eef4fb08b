"""Equal random events for a framework's decision functions and for simrl's words, and runs in which the framework decides."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from simrl.pipelines.buffered import Rules, buffered
from simrl.pipelines.streaming import Finished, GroupStream
from simrl.systems.recipes import make_system
from tests.helpers import Watched, counted, rows, trace, watch

SEQUENCES, EVENTS = 1_000, 60


class Framework(Protocol):
    """The decision functions of a framework, which hears of every event."""

    def submitted(self, number: int) -> None: ...
    def finished(self, number: int) -> None: ...
    def rejected(self, number: int) -> None: ...
    def updated(self, version: int) -> None: ...

    def may_start(self) -> bool:
        """Return whether one more group may start now."""

    def next_batch(self) -> list[int] | None:
        """Take the groups of the next update. None: not yet."""


@dataclass
class Counts:
    """Counts of a `GroupStream`, as a word sees them."""

    batch: int
    version: int = 0
    submitted: int = 0
    dropped: int = 0
    updates: int = 0
    taken: int = 0
    noted_version: int = 0
    syncs: int = 0
    now_s: float = 0.0
    running: dict[int, int] = field(default_factory=dict)
    buffer: list[Finished] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    run: Any = None

    @property
    def kept(self) -> int:
        return self.submitted - self.dropped

    def remove(self, numbers: list[int]) -> None:
        self.buffer = [group for group in self.buffer if group.number not in numbers]


def rules_of(name: str, **parameters: Any) -> Rules:
    """Return the words of a system."""
    pipeline = make_system(name, parameters).pipeline
    assert isinstance(pipeline, partial)
    rules = pipeline.keywords["rules"]
    assert isinstance(rules, Rules)
    return rules


def compared(
    rules: Rules, framework: Framework, counts: Counts, seed: int, greedy: bool = False
) -> tuple[int, int]:
    """Send both the same events: starts (`greedy`: as soon as one may start), ends, rejections
    (not if `greedy`), updates. Return the decisions that both made, and those that differ."""
    random = np.random.default_rng(seed)
    stream: Any = counts
    tried = differing = 0

    def may_start() -> bool:
        nonlocal tried, differing
        may = rules.budget(stream) > 0
        tried, differing = tried + 1, differing + (may != framework.may_start())
        return may

    for _ in range(EVENTS):
        event = random.choice(["submit", "submit", "finish", "finish", "reject", "update"])
        while (event == "submit" or greedy) and may_start():
            counts.running[counts.submitted] = rules.stamp(stream)
            framework.submitted(counts.submitted)
            counts.submitted += 1
            if not greedy:
                break
        if event == "update":
            for group in [g for g in counts.buffer if rules.stale and rules.stale(stream, g)]:
                counts.remove([group.number])
                counts.dropped += 1
            taken = rules.ready(stream)
            numbers = None if taken is None else [group.number for group in taken]
            tried, differing = tried + 1, differing + (numbers != framework.next_batch())
            if numbers is not None:
                counts.remove(numbers)
                counts.updates += 1
                counts.taken += len(numbers)
                counts.version = counts.noted_version = counts.syncs = counts.version + 1
                framework.updated(counts.version)
        elif event in ("finish", "reject") and counts.running:
            number = int(random.choice(list(counts.running)))
            stamp = counts.running.pop(number)
            if event == "reject" and not greedy:
                counts.dropped += 1
                framework.rejected(number)
            else:
                counts.buffer.append(Finished(number, stamp, []))
                framework.finished(number)
    return tried, differing


@dataclass
class Deciding:
    """Words that leave every decision of a run to a framework, and tell it what happened."""

    framework: Framework
    version_of: Callable[[GroupStream], int]  # the version that the framework has heard of
    heard: set[int] = field(default_factory=set)  # finished groups
    submitted: int = 0
    version: int = 0

    def tell(self, stream: GroupStream) -> None:
        """Tell the framework what has happened since it was last asked."""
        while self.submitted < stream.submitted:
            self.framework.submitted(self.submitted)
            self.submitted += 1
        for group in stream.buffer:
            if group.number not in self.heard:
                self.heard.add(group.number)
                self.framework.finished(group.number)
        if (version := self.version_of(stream)) != self.version:
            self.version = version
            self.framework.updated(self.version)

    def budget(self, stream: GroupStream) -> int:
        self.tell(stream)
        return int(self.framework.may_start())

    def ready(self, stream: GroupStream) -> list[Finished] | None:
        self.tell(stream)
        numbers = self.framework.next_batch()
        finished = {group.number: group for group in stream.buffer}
        return None if numbers is None else [finished[number] for number in numbers]


def whole_runs(
    name: str,
    parameters: dict[str, Any] | Callable[[int], dict[str, Any]],
    made: Callable[[int, int], Framework],
    seed: int,
    version_of: Callable[[GroupStream], int] = lambda stream: stream.version,
) -> tuple[Watched, Watched]:
    """Run a system on random lengths twice: as it is, and with the decisions of a framework, made
    for the groups of a batch and the responses of a group. The parameters may follow from the groups of a batch. The framework
    hears of the version that `version_of` returns."""
    random = np.random.default_rng(seed)
    batch, workers, steps = int(random.integers(1, 5)), int(random.integers(1, 4)), 6
    lengths = random.integers(1, 40, (3, batch, int(random.integers(1, 4))))
    drawn = trace([[[(4, int(n)) for n in group] for group in step] for step in lengths])
    times = {"load_s": float(random.integers(0, 8)), "publish_s": float(random.integers(0, 20))}
    if callable(parameters):
        parameters = parameters(batch)
    simrls = counted(name, parameters, drawn, steps, workers, **times)
    deciding = Deciding(made(batch, lengths.shape[2]), version_of)
    words = {"budget": deciding.budget, "ready": deciding.ready}
    system = simrls.prepared.system
    assert isinstance(system.pipeline, partial)
    rules = replace(system.pipeline.keywords["rules"], **words, stale=None)
    decided = replace(system, pipeline=partial(buffered, rules=rules))
    return simrls, watch(replace(simrls.prepared, system=decided))


def happened(run: Watched) -> tuple[Any, ...]:
    """Return the updates of a run, its trained samples and their segments: times and versions."""
    trained = [one for one in rows(run.result.samples) if one["status"] == "trained"]
    uids = {one["uid"] for one in trained}
    segments = [one for one in rows(run.result.segments) if one["uid"] in uids]
    return rows(run.result.steps), trained, segments
