"""An elastic pool: GPUs that change sides, between the rollout workers and the trainer, within a
run and within a step.

Invariant: a unit of GPUs, a rollout worker's, belongs to the workers or to the trainer, never to
both. A worker that leaves takes no more samples, its samples go on elsewhere (their tokens are
prefilled there; where the dispatch has a pool of KV caches, these come over the network), and the
trainer has its GPUs once it is empty; a worker that comes loads the newest weights before it gets
samples. Rules of who asks and who leaves are plain functions and small states: they see counts and
seconds, among them those that the run's own switches took, and no actor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import simpy

if TYPE_CHECKING:  # so that systems can be listed without them
    from simrl.dispatch.dispatcher import Dispatcher
    from simrl.runtime.recorder import Recorder
    from simrl.runtime.trainer import ResizableTrainer
    from simrl.runtime.worker import Worker


class ElasticPool:
    """The units of a run, all of them workers, of `unit_gpus` each. `units` are the trainer's own,
    which it has at first; `may_train` says whether it fits a number of GPUs, of which a
    data-parallel rank takes `gpus_per_rank`."""

    def __init__(
        self,
        env: simpy.Environment,
        workers: Sequence[Worker],
        dispatcher: Dispatcher,
        trainer: ResizableTrainer,
        recorder: Recorder,
        may_train: Callable[[int], bool],
        gpus_per_rank: int = 1,
    ) -> None:
        self.dispatcher, self.trainer, self.may_train = dispatcher, trainer, may_train
        self.units = list(trainer.lanes)
        self.unit_gpus, self._gpus_per_rank = recorder.lanes[0].gpus, gpus_per_rank
        self._env, self.workers, self._recorder = env, workers, recorder
        self._left: list[int] = []  # other units that have left rollout, for the trainer to take
        self.rule: Rule | None = None  # of the trainer's own units, between updates
        self.rolls_out = False  # whether these roll out now
        self._spread = True

    @property
    def running(self) -> int:
        """The responses that are not finished."""
        return int(self.dispatcher.unfinished.sum())

    def sizes(self, minibatch_groups: int) -> list[int]:
        """Return the numbers of units on which the trainer can train: memory suffices, and the
        groups of a mini-batch divide among its ranks."""
        return [
            n
            for n in range(1, len(self.workers) + 1)
            if self.may_train(n * self.unit_gpus)
            and minibatch_groups % (n * self.unit_gpus // self._gpus_per_rank) == 0
        ]

    def begin(self) -> None:
        """Let the trainer's units be the trainer's from the start; otherwise they roll out."""
        for unit in self.units:
            self.dispatcher.retire(unit)
            self.workers[unit].lend()
            self._recorder.role(unit, "train", self._env.now)

    def to_trainer(self, units: Sequence[int]) -> simpy.events.ProcessGenerator:
        """Take units out of rollout."""
        for unit in units:
            self.dispatcher.retire(unit)
        for unit in units:
            yield self.dispatcher.empty(unit)
            yield self.workers[unit].lend()
            self._recorder.role(unit, "train", self._env.now)

    def to_rollout(self, units: Iterable[int]) -> simpy.events.ProcessGenerator:
        """Let units that the trainer has left roll out, each once it has the newest weights."""
        units = list(units)
        for unit in units:
            self._recorder.role(unit, "rollout", self._env.now)
        for unit, loaded in [(unit, self.workers[unit].restore()) for unit in units]:
            yield loaded
            self.dispatcher.activate(unit)

    def rebalance(self, most_running: int, sizes: Sequence[int]) -> simpy.events.ProcessGenerator:
        """Let workers leave after a mini-batch, and the trainer take what it can."""
        number = len(self.trainer.lanes)
        counts = len(self.dispatcher.active), self.running, most_running
        yield from self.move_out(leaving(*counts, number, sizes))
        self.resize(grown(number, len(self.units) + len(self._left) - number, sizes))

    def move_out(self, number: int) -> simpy.events.ProcessGenerator:
        """Take the last `number` units out of rollout; the others are filled with their groups, the
        last unit first (RLinf counts from the other end)."""
        order, held = self.dispatcher.active[::-1], self.dispatcher.held()
        units, rest = order[:number], order[number:]
        groups = [
            list(group)
            for unit in units
            for _, group in groupby(held[unit], lambda sample: (sample.epoch, sample.prompt_id))
        ]
        if groups:
            loads, mean = [len(held[unit]) for unit in rest], self.running // len(rest)
            for group, place in zip(groups, filled(map(len, groups), loads, mean), strict=True):
                for sample in group:
                    self.dispatcher.move(sample, rest[place])
        self._left += [unit for unit in units if unit not in self.units]
        yield from self.to_trainer(units)

    def resize(self, number: int) -> None:
        """Give the trainer a number of units: its own, then those that left rollout first."""
        if number != len(self.trainer.lanes):
            self.trainer.resize([*self.units, *self._left][:number])

    def come_back(self, with_trainers: bool) -> simpy.events.ProcessGenerator:
        """Let all units roll out that left, and the trainer's own `with_trainers`."""
        units, self._left = self._left + with_trainers * self.units, []
        yield from self.to_rollout(units)

    def follow(self, rule: Rule, rolls_out: bool, spread: bool = True) -> None:
        """Let a rule lend the trainer's own units to rollout between updates; at first they are
        there if `rolls_out`. With `spread`, all samples are dealt anew when they come."""
        self.rule, self.rolls_out, self._spread = rule, rolls_out, spread
        if not rolls_out:
            self.begin()

    def switch(self) -> simpy.events.ProcessGenerator:
        """Let the trainer's own units change sides: its states go to the host, or come back. The
        rule notes the seconds."""
        started_s, returns = self._env.now, self.rolls_out
        if returns:
            yield from self.to_trainer(self.units)
        yield self.trainer.switch()
        if not returns:
            yield from self.to_rollout(self.units)
            for samples in self.dispatcher.held() if self._spread else []:
                for sample in samples:
                    self.dispatcher.move(sample)
        self.rolls_out = not returns
        if self.rule is not None:
            self.rule.switched("trainer" if returns else "rollout", self._env.now - started_s)


@dataclass
class StepSwitch:
    """verl V1's rule for `separate_async` (verl-project/verl@1dda039,
    trainer/ppo/v1/trainer_separate_async.py, `hybrid_rollout`): the trainer's GPUs roll out at the
    end of a step if too few groups are ready for the next, and come back when `threshold` are.

    A step trains `batch` groups in `minibatches` updates. `standalone` is the share of the GPUs
    that always roll out. `cost_window` switches each way are averaged.
    """

    batch: int
    minibatches: int
    standalone: float
    ratio: float = 0.4
    step_up: float = 0.05
    step_down: float = 0.03
    release_steps: int = 2
    cost_window: int = 3
    poll_s: float = 2.0
    _in_a_row: int = 0  # steps with idle time; negative: without
    _step: tuple[float, int] = (0.0, 0)  # seconds waited for missing groups, and these groups
    _all: tuple[float, int] = (0.0, 0)
    _costs: dict[str, deque[float]] = field(default_factory=dict)

    @property
    def threshold(self) -> int:
        """The ready groups at which the trainer takes its GPUs back."""
        least = self.batch // self.minibatches
        return min(max(round(self.ratio * self.batch), least), self.batch)

    def waited(self, seconds: float, missing: int) -> None:
        """Note how long an update waited for its groups, of which `missing` were not ready."""
        self._step = self._step[0] + seconds, self._step[1] + missing

    def switched(self, to: Literal["rollout", "trainer"], seconds: float) -> None:
        """Note the seconds of a switch."""
        self._costs.setdefault(to, deque(maxlen=self.cost_window)).append(seconds)

    def waits(self, finished: int, ready: bool) -> bool:
        """Return whether lent GPUs go on rolling out: too few groups are `finished`, or the next
        update is not `ready`."""
        return finished < self.threshold or not ready

    def lends(self, ready: int, last: bool = False) -> bool:
        """Return whether the trainer's GPUs roll out now, after a step; `ready` groups may be
        trained in the next one."""
        seconds, missing = self._step
        self._step = 0.0, 0
        if seconds > 0 and missing > 0:
            self._all = self._all[0] + seconds, self._all[1] + missing
        idle, before = seconds > self.poll_s, self._in_a_row
        self._in_a_row = max(before, 0) + 1 if idle else min(before, 0) - 1
        if self._in_a_row >= self.release_steps:
            self.ratio = min(1.0, self.ratio + self.step_up)
        elif -self._in_a_row >= self.release_steps:
            self.ratio = max(1 / self.minibatches, self.ratio - self.step_down)
        lacking = self.threshold - ready
        if last or lacking <= 0 or not self._all[1] or len(self._costs) < 2:
            return lacking > 0 and not last
        gain = lacking * (self._all[0] / self._all[1]) * (1 - self.standalone)
        return gain > sum(sum(costs) / len(costs) for costs in self._costs.values())

    def over(self) -> None:
        """End the step's synchronisation, after the switch."""


# of verl's default policy: its clip of an increase, its decrease, seconds of a switch and of a
# group before one is known, and the cycles whose switches are averaged
LEAST_UP, MOST_UP, DOWN, UNKNOWN_SWITCH_S, UNKNOWN_GROUP_S, CYCLES = 0.02, 0.1, 0.02, 10, 1000, 3


@dataclass
class DynamicSchedule:
    """verl's rule for its fully asynchronous recipe (verl-project/verl@1dda039,
    experimental/fully_async_policy/dynamic_schedule): the trainer's GPUs roll out after a weight
    synchronisation if it pays, and come back when `threshold` groups wait for the trainer.

    `cycle` groups are trained between two synchronisations. The policy "default" is `adaptive`: it
    weighs gain and cost, and adapts the ratio; "fixed_ratio" lends whenever groups are missing.
    """

    cycle: int
    ratio: float = 0.3
    adaptive: bool = True
    poll_s: float = 1.0
    _group_s: float = UNKNOWN_GROUP_S
    _waited: tuple[float, int] = (0.0, 0)
    _switch_s: float = 0.0  # of this cycle
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=CYCLES))

    @property
    def threshold(self) -> int:
        """The waiting groups at which the trainer takes its GPUs back."""
        return int(self.cycle * self.ratio)

    def waited(self, seconds: float, missing: int) -> None:
        """Note how long an update waited for its groups, of which `missing` were not ready."""
        self._waited = self._waited[0] + seconds, self._waited[1] + missing

    def switched(self, to: Literal["rollout", "trainer"], seconds: float) -> None:
        """Note the seconds of a switch."""
        self._switch_s += seconds

    def waits(self, finished: int, ready: bool) -> bool:
        """Return whether lent GPUs go on rolling out: too few groups are `finished`."""
        return finished < self.threshold

    def lends(self, surplus: int) -> bool:
        """Return whether the trainer's GPUs roll out after this synchronisation; `surplus` groups
        were generated beyond those that the cycles so far trained."""
        lacking = self.ratio * self.cycle - surplus
        if not self.adaptive or lacking <= 0:
            return lacking > 0
        seconds, missing = self._waited
        if seconds > 0 and missing > 0:
            self._group_s = seconds / missing
        cost_s = sum(self._costs) / len(self._costs) if self._costs else UNKNOWN_SWITCH_S
        return lacking * self._group_s > cost_s

    def over(self) -> None:
        """Adapt the ratio to the cycle that ends, after its switches."""
        missing, switch_s = self._waited[1], self._switch_s
        self._waited, self._switch_s = (0.0, 0), 0.0
        if self.adaptive and switch_s > 0:
            self._costs.append(switch_s)
        if self.adaptive:
            up = min(MOST_UP, max(LEAST_UP, missing / self.cycle)) if missing else -DOWN
            self.ratio = min(1.0, self.ratio + up)


@dataclass(frozen=True)
class EachUpdate:
    """ROLL's rule (`partial_gpu_mode`; alibaba/ROLL@8eb27cc, pipeline/agentic/agentic_pipeline.py):
    the trainer's GPUs roll out from each load of weights until the next batch is taken."""

    poll_s: float = 0.0

    def waits(self, finished: int, ready: bool) -> bool:
        """Return whether lent GPUs go on rolling out: no batch is `ready`."""
        return not ready

    def lends(self, ready: int) -> bool:
        """Return that they do after each synchronisation."""
        return True

    def waited(self, seconds: float, missing: int) -> None:
        """Note nothing, as `switched` and `over`."""

    def switched(self, to: Literal["rollout", "trainer"], seconds: float) -> None: ...

    def over(self) -> None: ...


Rule = StepSwitch | DynamicSchedule | EachUpdate


def grown(train: int, free: int, sizes: Iterable[int]) -> int:
    """Return the largest of the sizes that a trainer of `train` units reaches with `free` more
    (RLinf/RLinf@a3816b5, scheduler/dynamic_scheduler/manager.py, `ActorManager.try_allocate`)."""
    return max([train, *(size for size in sizes if size <= train + free)])


def leaving(workers: int, running: int, most_running: int, train: int, sizes: Iterable[int]) -> int:
    """Return how many workers leave after a mini-batch: all if nothing runs; else of those that are
    not needed for the `running` responses, at `most_running` each, as many as lift a trainer of
    `train` units to a larger size (RLinf's `RolloutManager.migrate_policy`)."""
    if running == 0:
        return workers
    spare = max(0, workers - math.ceil(running / most_running)) if workers > 1 else 0
    return grown(train, spare, sizes) - train


def filled(moving: Iterable[int], running: Sequence[int], expected: int) -> list[int]:
    """Return for each moving group, given its unfinished responses, the instance that takes it:
    one after the other is filled up to `expected`, the last takes the rest (RLinf's "sequential").
    `running` responses are at each instance already."""
    places, place, load = [], 0, running[0]
    for responses in moving:
        while place < len(running) - 1 and load >= expected:
            place += 1
            load = running[place]
        places.append(place)
        load += responses
    return places


# `adapt_split_every`: the split follows the trainer's idle time. The trainer has a unit from the
# beginning of an update on. AReaL's limitations section (arXiv 2505.24298) asks for such an
# adaptation. After every few updates, the trainer gets the GPUs that would have kept it busy for
# `TARGET` of the time. (Rollout idle time is not a usable signal: workers also idle while the last
# responses of a step finish, and busy workers may only be running ahead of the trainer.)

TARGET = 0.85  # share of the time in which the trainer should be busy
BUSY_ENOUGH = (0.75, 0.95)  # nothing moves in between
# share of all units that move at a time: the idle time of a few updates is no forecast
MOST_MOVED = 0.125


def wanted_train_units(units: int, train_units: int, train_busy: float, least: int) -> int:
    """Return how many of all `units` the trainer should have, if it was busy for a share
    `train_busy` of the time with `train_units`. Rollout keeps at least one."""
    low, high = BUSY_ENOUGH
    if low <= train_busy <= high:
        return train_units
    wanted = math.ceil(train_units * train_busy / TARGET)
    most = max(int(units * MOST_MOVED), 1)
    wanted = max(wanted, train_units + 1) if train_busy > high else min(wanted, train_units - 1)
    wanted = min(max(wanted, train_units - most), train_units + most)
    return min(max(wanted, least), units - 1)


def adapt(env: simpy.Environment, pool: ElasticPool, every: int) -> simpy.events.ProcessGenerator:
    """Lend the trainer its units, then adapt the split after every `every` updates."""
    trainer, may_train, gpus = pool.trainer, pool.may_train, pool.unit_gpus
    units = len(pool.workers)
    pool.begin()
    least = next(n for n in range(units + 1) if may_train(n * gpus))
    while True:
        # Measured from the end of an update to the end of another; the wait for the first batch,
        # and the update during which units moved, are not typical.
        yield trainer.published(trainer.version + 1)
        since_s, busy_s = env.now, trainer.busy_s
        yield trainer.published(trainer.version + every)
        lent = trainer.lanes
        wanted = wanted_train_units(
            units, len(lent), (trainer.busy_s - busy_s) / (env.now - since_s), least
        )
        while wanted < units - 1 and not may_train(wanted * gpus):
            wanted += 1  # the next number that the trainer fits
        if not may_train(wanted * gpus):
            continue
        if wanted > len(lent):
            leaving = pool.dispatcher.active[-(wanted - len(lent)) :]
            yield from pool.to_trainer(leaving)
            yield trainer.resize([*trainer.lanes, *leaving])
        elif wanted < len(lent):
            coming = lent[: len(lent) - wanted]
            yield trainer.resize([lane for lane in trainer.lanes if lane not in coming])
            yield from pool.to_rollout(coming)
