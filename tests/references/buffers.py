"""The books of trainers whose groups stream through a buffer, each as its own code keeps them: small, slow, with a counter for
each thing the framework counts. Written from the rules, and driven event by event."""

from dataclasses import dataclass, field


@dataclass
class SkyRL:
    """NovaSky-AI/SkyRL@a956457: the staleness manager counts accepted and running groups, and the step being worked on."""

    batch: int
    ahead: int
    workers: int
    accepted: int = 0
    running: int = 0
    step: int = 1

    def may_start(self) -> bool:
        beyond_training = (self.ahead + self.step) * self.batch - (self.accepted + self.running)
        return min(self.workers - self.running, beyond_training) > 0

    def start(self) -> None:
        self.running += 1

    def finish(self) -> None:
        self.running -= 1
        self.accepted += 1

    def filter(self) -> None:
        """A group that was accepted is dropped when the trainer takes it."""
        self.accepted -= 1


@dataclass
class PrimeRL:
    """PrimeIntellect-ai/prime-rl@559b447: steps count from 1, versions from 0; the gate is a flag, set at two moments."""

    batch: int
    max_off_policy_steps: int
    step: int = 1  # whose batch is collected
    version: int = 0  # published
    open: bool = True
    running: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)

    def look_at_gate(self) -> None:
        self.open = (self.step - 1) - self.version <= 1

    def oldest_fresh(self) -> int:
        return self.step - 1 - self.max_off_policy_steps

    def start(self, group: int) -> None:
        self.running[group] = self.version

    def finish(self, group: int) -> None:
        self.pending[group] = self.running.pop(group)
        self.sweep()

    def sweep(self) -> None:
        self.pending = {g: v for g, v in self.pending.items() if v >= self.oldest_fresh()}

    def may_ship(self) -> bool:
        return len(self.pending) >= self.batch and self.version >= self.step - 2

    def ship(self) -> list[int]:
        taken = list(self.pending)[: self.batch]
        for group in taken:
            del self.pending[group]
        self.step += 1
        self.look_at_gate()
        return taken

    def publish(self) -> list[int]:
        """A version is there; stale groups are cancelled before the engines pause."""
        self.version += 1
        cancelled = [g for g, v in self.running.items() if v < self.oldest_fresh()]
        for group in cancelled:
            del self.running[group]
        return cancelled

    def loaded(self) -> None:
        self.look_at_gate()


@dataclass
class PrimePermits:
    """prime-rl's dispatcher: a permit for each episode, and admissions in a window, of which an end gives one back."""

    group: int
    limit: int
    in_flight: int = 0
    admissions: int = 0

    def may_start(self) -> bool:
        return self.in_flight < self.limit and self.admissions < max(self.group, self.limit // 10)

    def start(self) -> None:
        self.in_flight += 1
        self.admissions += 1

    def end(self) -> None:
        self.in_flight -= 1
        self.admissions = max(0, self.admissions - 1)

    def cancel(self) -> None:
        self.in_flight -= 1

    def window(self) -> None:
        self.admissions = 0


class PrimeConcurrency:
    """prime-rl's controller, line by line of its rule: what grows, trims, cuts, drains and escalates."""

    def __init__(self, least, most, initial, context_tokens):
        self.least, self.most, self.context_tokens = least, most, context_tokens
        self.cap = initial if initial is not None else least
        self.limit, self.started = self.cap, initial is not None
        self.grow_until, self.queues_before = -1.0, {}
        self.queue_polls, self.cooldown, self.grace = 0, 0, 0
        self.draining = self.escalated = False

    def clamp(self, cap):
        return max(self.least, min(cap, self.most))

    def end(self, in_flight, now):
        was = in_flight + 1
        if now < self.grow_until and was >= 0.9 * self.limit:
            self.cap = self.clamp(self.cap * 1.25 ** (1 / was))
            self.limit = int(self.cap)

    def poll(self, loads, in_flight, now):
        running = queued = 0
        usage, signal = 0.0, "clear"
        preempted = False
        for engine, load in enumerate(loads):
            running += load.running
            queued += load.waiting
            usage = max(usage, load.kv_usage)
            if load.preemptions > 0:
                preempted = True
            if load.waiting > 0 and self.queues_before.get(engine, 0) > 0:
                signal = "soft"
        self.queues_before = {engine: load.waiting for engine, load in enumerate(loads)}
        if running > 0 and queued > running / 2:
            self.queue_polls += 1
        else:
            self.queue_polls = 0
        overload = self.queue_polls >= 6
        if usage > 0.6:
            signal = "soft"
        if preempted or overload:
            signal = "hard"
        if self.draining and in_flight <= self.limit and signal != "hard":
            self.draining = False
            self.grace = 6
        if self.escalated and not self.draining:
            self.grace -= 1
            if self.grace <= 0:
                self.escalated = False
        if self.cooldown > 0:
            self.cooldown -= 1
        may_grow = signal == "clear" and queued == 0 and not self.draining
        self.grow_until = now + 15.0 if may_grow else -1.0
        if not self.started:
            self.started = True
            self.cap = self.clamp(sum(load.kv_tokens for load in loads) / self.context_tokens)
            self.limit = int(self.cap)
        if self.draining:
            return 0
        if signal == "hard":
            share = 0.5 if self.escalated else (0.9 if overload else 0.8)
            if overload:
                self.queue_polls = 0
            self.draining = self.escalated = True
            return self.lower(int(self.clamp(in_flight * share)), in_flight)
        if usage > 0.8 and in_flight > 0 and self.cooldown == 0:
            self.cooldown = 6
            excess = self.lower(int(self.clamp(in_flight * 0.7 / usage)), in_flight)
            return excess if usage > 0.9 else 0
        return 0

    def lower(self, target, in_flight):
        self.cap = self.limit = min(target, self.limit)
        return max(0, in_flight - self.limit)


@dataclass
class TRL:
    """TRL 1.16's AsyncGRPOTrainer: slots, a queue in order of finishing, and a version that a weight sync raises."""

    slots: int
    size: int
    queue_most: int
    max_staleness: int
    version: int = 0
    busy: int = 0
    queue: list[tuple[int, int]] = field(default_factory=list)  # group, its version

    def may_start(self) -> bool:
        return self.busy < self.slots and len(self.queue) * self.size < self.queue_most

    def pull(self, batch: int) -> list[int] | None:
        """Take groups for an update; stale ones are discarded on the way."""
        self.queue = [(g, v) for g, v in self.queue if self.version - v <= self.max_staleness]
        if len(self.queue) < batch:
            return None
        taken, self.queue = self.queue[:batch], self.queue[batch:]
        return [group for group, _ in taken]


@dataclass
class OpenInstruct:
    """allenai/open-instruct@e6c3044: `async_steps` batches of prompts at first, then one for each result that is popped; step t
    is prepared while t - (the step that trains) is at most `async_steps`."""

    batch: int
    async_steps: int
    started: int = 0
    popped: int = 0
    step: int = 0  # that is prepared
    trained: int = 0  # steps; the trainer takes the next one at once
    collected: int = 0
    results: list[int] = field(default_factory=list)  # the version of each group

    def may_start(self) -> bool:
        return self.started < self.async_steps * self.batch + self.popped

    def prepares(self) -> bool:
        consumed = min(self.trained, self.step - 1)  # the last step that the trainer took
        return self.step - consumed <= self.async_steps

    def pop(self) -> None:
        """Pop what may be popped; a batch is whole with `batch` groups that are not stale."""
        while self.results and self.prepares():
            version = self.results.pop(0)
            self.popped += 1
            if self.step - version > self.async_steps:
                continue
            self.collected += 1
            if self.collected == self.batch:
                self.collected = 0
                self.step += 1


@dataclass
class PipelineRL:
    """ServiceNow/PipelineRL@58d3934: with `max_lag`, groups of an update and of the lag at first, then an update's groups more
    with every version that was propagated."""

    attempts: int
    groups_per_update: int
    max_lag: int
    submitted: int = 0
    may_submit: int = 0

    def __post_init__(self) -> None:
        self.may_submit = -(-self.max_lag // self.attempts) + self.groups_per_update

    def may_start(self) -> bool:
        return self.submitted < self.may_submit

    def propagated(self) -> None:
        self.may_submit += self.groups_per_update
