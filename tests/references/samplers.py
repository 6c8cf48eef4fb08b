"""Which groups asynchronous trainers start, take and drop, written from the frameworks' code as each
of them keeps its books: queues, permits and slots. `simrl` states the same rules as functions of
counts and stamps (`simrl.pipelines.samplers`)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field


@dataclass
class NemoTargets:
    """NeMo-RL's collector since July 2026 (NVIDIA-NeMo/RL@7ea279a, `trajectory_collector`): one
    whole batch for each target step."""

    batch: int
    age: int
    version: int = 0
    trained: int = -1  # the last target that was trained
    reserved: set[int] = field(default_factory=set)  # targets whose batch is being generated
    ready: dict[int, int] = field(default_factory=dict)  # finished groups by target

    def next_target(self) -> int | None:
        """Return the target that a batch may be started for now."""
        first = self.version + (self.version > 0)
        for target in range(first, self.version + self.age + 1):
            complete = self.ready.get(target, 0) == self.batch
            if target > self.trained and target not in self.reserved and not complete:
                self.reserved.add(target)
                return target
        return None

    def finish(self, target: int) -> None:
        self.ready[target] = self.ready.get(target, 0) + 1
        if self.ready[target] == self.batch:
            self.reserved.discard(target)

    def may_begin(self) -> bool:
        """Return whether the first update may begin: its batch and the next are complete."""
        return all(self.ready.get(target, 0) == self.batch for target in (0, 1))

    def train(self) -> bool:
        """Train the batch of this version, if it is complete."""
        if self.ready.get(self.version, 0) < self.batch:
            return False
        self.trained = self.version
        return True


@dataclass
class Slot:
    """A prompt of the single controller: its place in the order of dispatch, the weights it began
    with, and the step its batch is for."""

    number: int
    start: int
    target: int
    ready: bool = False


@dataclass
class SingleController:
    """NeMo-RL's single controller (NVIDIA-NeMo/RL@7ea279a, `staleness_sampler` and
    `single_controller`): two kinds of permits, a gate for each batch, and slots in a list."""

    sampler: str
    window: int
    batch: int
    capacity: int
    permits: int
    version: int = 0  # the trainer's
    loaded: int = 0  # the engines'
    syncing: bool = False
    dispatched: int = 0
    slots: list[Slot] = field(default_factory=list)

    def launch(self) -> list[int]:
        """Start prompts, one after the other, until one has to wait."""
        launched = []
        while not self.syncing and self.capacity > 0 and self.permits > 0:
            gated = self.sampler != "windowed"
            if gated and self.dispatched // self.batch > self.version + self.window:
                break
            self.capacity -= 1
            self.permits -= 1
            self.slots.append(Slot(self.dispatched, self.loaded, self.dispatched // self.batch))
            launched.append(self.dispatched)
            self.dispatched += 1
        return launched

    def finish(self, number: int) -> None:
        for slot in self.slots:
            if slot.number == number:
                slot.ready = True
                self.permits += 1

    def select(self, least: int, most: int) -> list[int]:
        """Take the groups that may train now, if there are `least`."""
        chosen = [slot for slot in self.slots if slot.ready and self._may_train(slot)][:most]
        if len(chosen) < least:
            return []
        self._remove(chosen)
        return [slot.number for slot in chosen]

    def _may_train(self, slot: Slot) -> bool:
        if self.sampler == "in_order":
            return slot.target == self.version
        if self.sampler == "ready_first":
            return True
        since = self.version - self.window
        if self.sampler == "windowed":
            return slot.start >= since
        return slot.start == min(s.start for s in self.slots if s.start >= since)

    def evict(self) -> list[int]:
        """Drop what is ready and can never be trained."""
        gone = [slot for slot in self.slots if slot.ready and self._never_trains(slot)]
        self._remove(gone)
        return [slot.number for slot in gone]

    def _never_trains(self, slot: Slot) -> bool:
        if self.sampler == "in_order":
            return slot.target < self.version
        return self.sampler != "ready_first" and slot.start < self.version - self.window

    def sync(self) -> list[int]:
        """Begin a weight sync: nothing starts, and what runs and can never be trained is
        aborted."""
        self.syncing = True
        gone = []
        if self.sampler == "windowed":
            since = self.version - self.window
            gone = [slot for slot in self.slots if not slot.ready and slot.start < since]
        self._remove(gone)
        self.permits += len(gone)
        return [slot.number for slot in gone]

    def synced(self) -> None:
        self.syncing, self.loaded = False, self.version

    def _remove(self, slots: list[Slot]) -> None:
        gone = {slot.number for slot in slots}
        self.slots = [slot for slot in self.slots if slot.number not in gone]
        self.capacity += len(slots)


@dataclass
class SlimePool:
    """slime's fully asynchronous worker (THUDM/slime@624b824, `fully_async_rollout`): a pool of
    groups that is looked at every second, a queue, and the prompts that came back aborted."""

    concurrency: int
    active: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)  # of the active ones, not yet noticed
    queue: deque[int] = field(default_factory=deque)
    again: deque[int] = field(default_factory=deque)
    new: int = 0

    def look(self) -> list[int]:
        """Notice what is done, and start groups."""
        self.active -= self.done
        self.done.clear()
        started = []
        while len(self.active) < self.concurrency and len(self.queue) < self.concurrency:
            if self.again:
                group = self.again.popleft()
            else:
                group, self.new = self.new, self.new + 1
            self.active.add(group)
            started.append(group)
        return started

    def finish(self, group: int) -> None:
        self.done.add(group)
        self.queue.append(group)

    def abort(self, group: int) -> None:
        self.done.add(group)
        self.again.append(group)

    def collect(self, most: int) -> list[int]:
        return [self.queue.popleft() for _ in range(min(most, len(self.queue)))]


@dataclass
class MilesProducer:
    """miles' fully asynchronous producer and its buffer (radixark/miles@31f1ca9,
    `fully_async_rollout`, `fully_async_data_buffer`): slots by sample, a buffer that blocks the
    producer when it is full, and a consumer that drops stale groups as it takes them."""

    batch: int
    size: int  # samples a group
    most: int  # groups in flight
    capacity: int  # groups in the buffer
    staleness: int | None
    retry: bool
    by_sample: bool = True
    samples: int = 0  # in flight
    active: int = 0  # groups in flight
    new: int = 0
    again: deque[int] = field(default_factory=deque)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # finished, not in the buffer
    buffer: deque[tuple[int, int]] = field(default_factory=deque)  # group, version
    batches: deque[list[int]] = field(default_factory=deque)
    collected: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    called: int | None = None  # the engines' version when the batch was asked for

    def submit(self) -> list[int]:
        submitted = []
        while not self.waiting and self._has_room():
            if self.again:
                group = self.again.popleft()
            else:
                group, self.new = self.new, self.new + 1
            self.samples += self.size
            self.active += 1
            submitted.append(group)
        return submitted

    def _has_room(self) -> bool:
        if self.by_sample:
            return self.samples + self.size <= self.most * self.size
        return self.active < self.most

    def finish_sample(self) -> None:
        self.samples -= 1

    def finish_group(self, group: int, version: int) -> None:
        self.active -= 1
        self.waiting.append((group, version))
        self._flow()

    def ask(self, version: int) -> None:
        """Ask for a batch, while the engines have `version`."""
        self.called, self.collected = version, []
        self._flow()

    def _flow(self) -> None:
        """Move groups: into the buffer while it has room, and out of it while a batch is asked
        for."""
        moved = True
        while moved:
            moved = False
            if self.waiting and len(self.buffer) < self.capacity:
                self.buffer.append(self.waiting.popleft())
                moved = True
            if self.called is not None and len(self.collected) < self.batch and self.buffer:
                group, version = self.buffer.popleft()
                moved = True
                if self.staleness is None or self.called - version <= self.staleness:
                    self.collected.append(group)
                    continue
                self.dropped.append(group)
                if self.retry:
                    self.again.append(group)


@dataclass
class RollBuffer:
    """ROLL's replay buffer (alibaba/ROLL@8eb27cc, `generate_scheduler`): prompts by the step at
    which they began, and one budget over all steps."""

    ratio: float
    size: int  # samples a prompt
    step: int = -1
    budget: int = 0
    running: dict[int, set[int]] = field(default_factory=dict)  # by step
    finished: dict[int, deque[int]] = field(default_factory=dict)
    completed: int = 0
    new: int = 0

    def advance(self, batch: int) -> None:
        self.step += 1
        if not self.budget:
            self.budget = math.ceil(batch * self.ratio)
        self.budget += batch
        self.running[self.step], self.finished[self.step] = set(), deque()

    def start(self) -> list[int]:
        started = []
        while sum(map(len, self.running.values())) + self.completed < self.budget:
            self.running[self.step].add(self.new)
            started.append(self.new)
            self.new += 1
        return started

    def finish(self, prompt: int) -> None:
        step = self._leave(prompt)
        self.finished[step].append(prompt)
        self.completed += 1

    def refuse(self, prompt: int) -> None:
        """Forget a prompt whose group is filtered."""
        self._leave(prompt)

    def _leave(self, prompt: int) -> int:
        [step] = [step for step, prompts in self.running.items() if prompt in prompts]
        self.running[step].remove(prompt)
        return step

    def take(self, batch: int) -> list[int] | None:
        """Take a batch of prompts, or None: some are still waited for."""
        taken: list[int] = []
        oldest = self.step - math.ceil(self.ratio)
        for step in sorted(self.finished):
            most = batch - len(taken)
            if step == oldest and self.ratio % 1:
                most = math.ceil(int(batch * self.size * (self.ratio % 1)) / self.size)
            ready = list(self.finished[step])[:most]
            if len(ready) < most and (self.running[step] or step == self.step):
                return None
            taken += ready
            if len(taken) >= batch:
                break
        for queue in self.finished.values():
            for prompt in taken:
                if prompt in queue:
                    queue.remove(prompt)
        return taken

    def collect_garbage(self) -> list[int]:
        """Abort what runs and is too old, and forget its steps."""
        old = [s for s in self.finished if s <= self.step - math.ceil(self.ratio)]
        aborted = [prompt for step in old for prompt in sorted(self.running[step])]
        for step in old:
            assert not self.finished[step]
            del self.finished[step], self.running[step]
        return aborted
