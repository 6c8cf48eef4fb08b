"""HistoPipe (RhymeRL, arXiv 2508.18588 §4.2, §6): every worker goes from step to step on its own, long after short.

Invariant: a worker begins its part of step k when its part of step k - 1 is over and version k - 1 is published, and takes the
newest weights from its own host buffer then; so every token is at most one version old when it is trained, but for those that
an inter-step migration carries into the next step, which are marked (`Rollout.carried_tokens`). There is no barrier between
workers: what makes them wait for one another is only that version k - 1 needs all of step k - 2.

From the second epoch on, a step's prompts are ranked by the median length of their responses in their last epoch, cut into
ranking groups, and given to the workers in ascending order in one step and in descending order in the next (ascending where
the step, counted from 0, is even), so that short and long parts complement each other. With two tiers, long groups get more
workers (`simrl.dispatch.allocation`). A response that is far longer than its ranking group ever was moves to a worker with
more time left, or into the next step.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal

import numpy as np
import simpy

from simrl.dispatch import allocation
from simrl.errors import InputError
from simrl.events import on_fire
from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch
from simrl.rollout import Rollout
from simrl.trace import Sample
from simrl.worker import TokensReached
from simrl.workload import Group


@dataclass(frozen=True)
class HistoPipe:
    """The pipeline with its parameters: see `simrl.systems.rhymerl`."""

    ranked: bool
    two_tier: bool
    ranking_groups: int | None
    max_workers: int | None
    alternation: Literal["reversed", "pairing"]
    migration: bool
    alpha: float
    least_beta: float

    def __call__(self, stage: Stage) -> simpy.events.ProcessGenerator:
        run = _Run(self, stage)
        for worker in range(len(stage.workers)):
            stage.env.process(run.work(worker))
        return run.train()


class _RankingGroup:
    """The samples of a ranking group in one step: those unfinished, and from how many tokens on one is an outlier."""

    def __init__(self, samples: list[Sample], outlier_tokens: int, watched_from: int) -> None:
        self.unfinished = {sample.uid: sample for sample in samples}
        self.outlier_tokens = outlier_tokens
        self.watched_from = watched_from  # so many unfinished ones, or fewer, are the last of the group


@dataclass
class _Step:
    """A step's plan: what each worker gets, how long that is thought to take, and the batch it becomes."""

    k: int
    batch: Batch
    parts: dict[int, list[Sample]]
    predicted_s: dict[int, float]
    rank_of: dict[int, int] = field(
        default_factory=dict
    )  # the ranking group of each worker; empty where nothing is ranked
    group_of: dict[int, _RankingGroup] = field(default_factory=dict)  # by uid; empty where nothing is ranked
    siblings: dict[int, list[Rollout | None]] = field(default_factory=dict)  # by uid: what has come of its group so far
    left: int = 0
    kept: int = 0  # samples that will be in the batch
    worker_of: dict[int, int] = field(default_factory=dict)
    ends_s: dict[int, float] = field(default_factory=dict)  # when a worker that has begun is thought to be done
    carried: list[Rollout] = field(default_factory=list)  # partial rollouts from the step before, for who begins last


class _Run:
    """One run's bookkeeping."""

    def __init__(self, rule: HistoPipe, stage: Stage) -> None:
        self.rule = rule
        self.stage = stage
        self.steps: list[_Step] = []
        self.batches: simpy.Store = simpy.Store(stage.env)
        self.train_s = 0.0
        self.migrated: set[int] = set()
        self.betas: dict[int, float] = {}
        self.lately: list[Rollout] = []  # what ended since the last plan

    # The trainer's side.

    def train(self) -> simpy.events.ProcessGenerator:
        """Step after step, each when all its samples are in."""
        stage = self.stage
        for _ in range(stage.steps):
            batch = yield self.batches.get()
            yield batch.complete
            step = yield stage.trainer.train(batch.rollouts)
            self.train_s = step.finished_s - step.started_s

    # A worker's side.

    def work(self, worker: int) -> simpy.events.ProcessGenerator:
        """One worker's way through the steps."""
        stage, loaded = self.stage, 0
        for k in count():
            yield stage.dispatcher.empty(worker)
            yield stage.trainer.published(k - 1)
            step = self.step(k)
            if stage.trainer.version > loaded:
                loaded = stage.trainer.version
                yield stage.workers[worker].load_weights(loaded)
                stage.dispatcher.weights_changed()
            self.begin(step, worker)

    def begin(self, step: _Step, worker: int) -> None:
        """Submits a worker's part of a step; who is predicted to be last takes what was carried into it."""
        samples = step.parts.get(worker, [])
        step.ends_s[worker] = self.stage.env.now + step.predicted_s.get(worker, 0.0)
        partials: list[Rollout | None] = [None] * len(samples)
        if step.carried and worker == max(step.predicted_s, key=lambda w: (step.predicted_s[w], w)):
            samples = [*samples, *(rollout.sample for rollout in step.carried)]
            partials += step.carried
            step.carried = []
        if samples:
            self.submit(step, samples, partials, worker)

    def submit(self, step: _Step, samples: list[Sample], partials: list[Rollout | None], worker: int) -> None:
        """To a worker, with weights that the step may have."""
        to, version = [worker] * len(samples), max(step.k - 1, 0)
        for sample, end in zip(
            samples, self.stage.dispatcher.submit(samples, partials, to=to, min_version=version), strict=True
        ):
            step.worker_of[sample.uid] = worker
            on_fire(end, partial(self.ended, step, sample))
        for group in {id(g): g for uid in samples if (g := step.group_of.get(uid.uid))}.values():
            self.watch_the_last(step, group)

    # Planning a step.

    def step(self, k: int) -> _Step:
        """The plan of step k, made when the first worker asks for it: until then more history may come in."""
        while len(self.steps) <= k:
            groups = self.stage.workload.next_batch()
            batch = Batch(self.stage)
            self.batches.put(batch)
            plan = self.rank(len(self.steps), batch, groups) if self.rule.ranked else None
            step = plan or self.plain(len(self.steps), batch, groups)
            for group in groups:
                come: list[Rollout | None] = [None] * len(group)
                step.siblings.update(dict.fromkeys((sample.uid for sample in group), come))
                step.left += len(group)
            step.kept = step.left
            self.steps.append(step)
        return self.steps[k]

    @property
    def active(self) -> list[int]:
        """The workers that a step is planned for; all of them while all are lost: the first that is back takes what waits."""
        return self.stage.dispatcher.active or list(range(len(self.stage.workers)))

    def plain(self, k: int, batch: Batch, groups: list[Group]) -> _Step:
        """Equal contiguous parts, as there is nothing to rank by."""
        active = self.active
        samples = [sample for group in groups for sample in group]
        cuts = np.array_split(np.arange(len(samples)), len(active))
        parts = {worker: [samples[i] for i in cut] for worker, cut in zip(active, cuts, strict=True)}
        return _Step(k, batch, parts, dict.fromkeys(active, 0.0))

    def rank(self, k: int, batch: Batch, groups: list[Group]) -> _Step | None:
        """Ranking groups on the workers, ascending or descending; None in the first epoch, without history."""
        stage, history = self.stage, self.stage.dispatcher.history
        epoch = groups[0][0].epoch
        lengths = {group[0].prompt_id: history.lengths(group[0].prompt_id, epoch) for group in groups}
        known = [tokens for tokens in lengths.values() if tokens.size]
        if not known:
            return None
        # A prompt that was never seen is thought to be as long as the others are.
        unseen = np.array([float(np.median(np.concatenate(known)))])
        lengths = {prompt: tokens if tokens.size else unseen for prompt, tokens in lengths.items()}
        prompts = np.repeat(list(lengths), [tokens.size for tokens in lengths.values()])
        active = self.active
        number = min(self.rule.ranking_groups or len(active), len(active), len(groups))
        ranking = allocation.ranking_groups(prompts, np.concatenate(list(lengths.values())), number)
        samples_of = {group[0].prompt_id: group for group in groups}
        ranked = [[sample for prompt in part.prompts for sample in samples_of[prompt]] for part in ranking]

        representative = [part.representative_tokens for part in ranking]
        table = (
            stage.times.table(representative, [len(samples) for samples in ranked], len(active)) / self.tokens_a_pass()
        )
        workers = self.workers_per_group(table)
        group_s = allocation.predicted_s(table, workers)
        if self.rule.alternation == "pairing" and self.steps:
            now_s = stage.env.now
            busy = [max(self.steps[-1].ends_s.get(worker, now_s), now_s) - now_s for worker in active]
            places = allocation.best_pairing(busy, group_s, workers)
        else:
            places = (allocation.reversed_fill if k % 2 else allocation.ascending_fill)(workers)
        step = _Step(k, batch, {}, {})
        for g, samples in enumerate(ranked):
            mine = [worker for worker, place in zip(active, places, strict=True) if place == g]
            for i, worker in enumerate(mine):
                step.parts[worker] = samples[i :: len(mine)]
                step.predicted_s[worker], step.rank_of[worker] = group_s[g], g
            longest = max(int(lengths[prompt].max()) for prompt in ranking[g].prompts)
            outlier_tokens = math.floor(self.beta(epoch) * longest) + 1
            group = _RankingGroup(samples, outlier_tokens, int(self.rule.alpha * len(samples)))
            if self.rule.migration:
                step.group_of.update(dict.fromkeys((sample.uid for sample in samples), group))
        return step

    def tokens_a_pass(self) -> float:
        """What a pass yields of a response now that speculation goes as it does (RhymeRL Fig. 12: τ knows the acceptance):
        of the responses that ended since the last plan."""
        tokens = sum(rollout.tokens for rollout in self.lately)
        accepted = sum(rollout.accepted_tokens for rollout in self.lately)
        self.lately = []
        return tokens / (tokens - accepted) if tokens > accepted else 1.0

    def workers_per_group(self, table: allocation.Floats) -> tuple[int, ...]:
        """The two-tier plan; the exact one where the search finds none; equal numbers if `max_workers` allows neither."""
        groups, workers = table.shape
        equal = allocation.equal_workers(groups, workers)
        if not self.rule.two_tier:
            return equal
        try:
            most = self.rule.max_workers or allocation.best_max_workers(table, workers, self.train_s)
            table = table[:, :most]
            try:
                return allocation.two_tier(table, workers, self.train_s).workers
            except InputError:
                return allocation.exact(table, workers, self.train_s).workers
        except InputError:
            return equal

    def beta(self, epoch: int) -> float:
        """The 75th percentile of the growth of lengths over the last epoch, at least `least_beta` (§6.3)."""
        if epoch not in self.betas:
            history = self.stage.dispatcher.history
            before, last = history.medians(epoch - 2), history.medians(epoch - 1)
            grown = allocation.growth_factor(before, last) if before.keys() & last.keys() else 0.0
            self.betas[epoch] = max(grown, self.rule.least_beta)
        return self.betas[epoch]

    # What comes out, and what is too long.

    def ended(self, step: _Step, sample: Sample, end: Any) -> None:
        """A sample is finished, or is carried into the next step."""
        if not end.ok:
            raise end.value  # a worker that died, or its engine's error
        rollout: Rollout = end.value
        self.lately.append(rollout)
        group = step.group_of.get(sample.uid)
        if group is not None:
            del group.unfinished[sample.uid]
            self.watch_the_last(step, group)
        if not rollout.done:
            self.carry(step, rollout)
        come = step.siblings.pop(sample.uid)
        come[come.index(None)] = rollout
        if None not in come:
            finished = [one for one in come if one is not None and one.done]
            if finished:
                step.batch.add(finished)
        step.left -= 1
        if step.left == 0:
            step.batch.close()

    def watch_the_last(self, step: _Step, group: _RankingGroup) -> None:
        """Once only the last α of a ranking group are unfinished, those are outliers that pass β × its longest history."""
        if len(group.unfinished) > group.watched_from or any(uid not in step.worker_of for uid in group.unfinished):
            return
        group.watched_from = -1
        for sample in group.unfinished.values():
            if sample.uid not in self.migrated:
                worker = self.stage.workers[step.worker_of[sample.uid]]
                told = worker.when(TokensReached(sample, group.outlier_tokens))
                on_fire(told, partial(self.migrate, step, sample))

    def migrate(self, step: _Step, sample: Sample, told: Any) -> None:
        """An outlier goes to a worker that is busy with a longer group of the same step, the longest and of its workers the one
        with the fewest samples left; where there is none, as for the longest group itself, it goes on in the next step."""
        if sample.uid not in step.siblings:
            return  # it has ended at this very boundary
        self.migrated.add(sample.uid)
        own = step.worker_of[sample.uid]
        left = Counter(worker for uid, worker in step.worker_of.items() if uid in step.siblings)
        longer = [worker for worker in left if step.rank_of.get(worker, -1) > step.rank_of.get(own, -1)]
        if longer:
            target = max(longer, key=lambda worker: (step.rank_of[worker], -left[worker], -worker))
            step.worker_of[sample.uid] = target
            self.stage.dispatcher.move(sample, target)
        elif step.kept > 1:  # a step is not left without any sample
            step.kept -= 1
            self.stage.dispatcher.withdraw([sample])

    def carry(self, step: _Step, rollout: Rollout) -> None:
        """Into the next step: to the worker that is predicted to be its last, when that begins; now if it has begun."""
        later = self.step(step.k + 1)
        while later.left == 0:  # complete already: its workers had less to do
            later = self.step(later.k + 1)
        carried = rollout._replace(carried_tokens=rollout.tokens)
        later.left += 1
        later.kept += 1
        later.siblings[rollout.sample.uid] = [None]
        last = max(later.predicted_s, key=lambda w: (later.predicted_s[w], w))
        if last in later.ends_s:
            self.submit(later, [rollout.sample], [carried], last)
        else:
            later.carried.append(carried)
