"""HistoPipe (RhymeRL, arXiv 2508.18588 §4.2, §6): every worker goes from step to step on its own, long after short.

Invariant: a worker begins its part of step k when its part of step k - 1 is over and version k - 1 is published, and takes the
newest weights from its own host buffer then; so every token is at most one version old when it is trained, but for those that
an inter-step migration carries into the next step, which are marked (`Rollout.carried_tokens`). There is no barrier between
workers: they wait for one another only because version k - 1 needs all of step k - 2.

From the second epoch on, a step's prompts are ranked by the median length of their responses in their last epoch, cut into
ranking groups (`simrl.dispatch.allocation`), and given to the workers in ascending order in even steps, counted from 0, and
in descending order in odd ones. A response that is far longer than the longest of its ranking group's prompts was (by
medians) moves to a worker with more time left, or into the next step. Without weight buffers on the hosts there is a barrier:
all workers load together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import simpy

from simrl.dispatch import allocation
from simrl.pipelines.batch import Batch
from simrl.pipelines.context import RunContext
from simrl.profile.drafted import Drafted
from simrl.runtime.events import gather, on_fire
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Group, Sample

UNRANKED = -1


class HistoPipe(NamedTuple):
    """The parameters of the rule, as in `simrl systems show rhymerl`; `ranked`: ranking groups, in place of equal parts."""

    ranked: bool
    two_tier: bool
    ranking_groups: int | None
    max_workers: int | None
    representative: allocation.Representative
    alternation: allocation.Alternation
    weight_buffer: bool
    migration: bool
    alpha: float
    least_beta: float


def histopipe(run: RunContext, *, rule: HistoPipe) -> simpy.events.ProcessGenerator:
    """Train step after step, each when all its samples are finished or carried into the next step."""
    steps = _Steps(run, rule, simpy.Store(run.env))
    workers = range(len(run.workers))
    for together in [[worker] for worker in workers] if rule.weight_buffer else [[*workers]]:
        run.env.process(steps.work(together))
    for _ in range(run.steps):
        batch = yield steps.batches.get()
        yield batch.complete
        update = yield run.trainer.train(batch.rollouts)
        steps.train_s = update.finished_s - update.started_s


@dataclass
class _RankingGroup:
    """A ranking group in one step. Of its `last` unfinished samples (by uid), those that reach `outlier_tokens` are
    outliers."""

    unfinished: dict[int, Sample]
    outlier_tokens: int
    last: int


@dataclass
class _PlannedStep:
    """A step's plan, made from the history, the profile and when workers are predicted to be free, and its progress.

    By worker: the samples, the seconds they are predicted to take, the ranking group (none in a plain plan), and the predicted
    end, once begun. By uid: the worker of each submitted sample, and the group so far of each unfinished one. `kept` samples
    will be in the batch; `carried` come from the step before, and wait for the worker that is predicted to end last.
    """

    k: int
    batch: Batch
    parts: dict[int, list[Sample]] = field(default_factory=dict)
    predicted_s: dict[int, float] = field(default_factory=dict)
    rank_of: dict[int, int] = field(default_factory=dict)
    ends_s: dict[int, float] = field(default_factory=dict)
    worker_of: dict[int, int] = field(default_factory=dict)
    siblings: dict[int, list[Rollout | None]] = field(default_factory=dict)
    groups: list[_RankingGroup] = field(default_factory=list)
    kept: int = 0
    carried: list[Rollout] = field(default_factory=list)

    @property
    def last_worker(self) -> int:
        return max(self.predicted_s, key=lambda worker: (self.predicted_s[worker], worker))


@dataclass
class _Steps:
    """The steps of a run: the samples that each worker begins, and what becomes of them. `train_s` is the last update's time,
    `betas` has β by epoch. By the number of a ranking group, `UNRANKED` for samples of a plain plan: `recent` has the rollouts
    that ended since the last plan, `drafted` what drafts did for those before, as far as there were any."""

    run: RunContext
    rule: HistoPipe
    batches: simpy.Store
    steps: list[_PlannedStep] = field(default_factory=list)
    migrated: set[int] = field(default_factory=set)
    train_s: float = 0.0
    recent: dict[int, list[Rollout]] = field(default_factory=lambda: defaultdict(list))
    drafted: dict[int, Drafted] = field(default_factory=dict)
    betas: dict[int, float] = field(default_factory=dict)

    def work(self, workers: list[int]) -> simpy.events.ProcessGenerator:
        """Take workers through the steps, each of which they begin at once."""
        run, loaded = self.run, 0
        for k in count():
            while run.dispatcher.unfinished[workers].any():
                yield gather(run.env, [run.dispatcher.empty(worker) for worker in workers])
            yield run.trainer.published(k - 1)
            step = self.step(k)
            if run.trainer.version > loaded:
                loaded = run.trainer.version
                yield gather(run.env, [run.workers[worker].load_weights(loaded) for worker in workers])
                run.dispatcher.weights_changed()
            for worker in workers:
                self.begin(step, worker)

    def step(self, k: int) -> _PlannedStep:
        """Return the plan of step k, made when the first worker asks for it: until then more history may come in."""
        while len(self.steps) <= k:
            groups, step = self.run.workload.next_batch(), _PlannedStep(len(self.steps), Batch(self.run))
            self.batches.put(step.batch)
            if not (self.rule.ranked and self.rank(step, groups)):
                self.cut(step, groups)
            for group in groups:
                so_far: list[Rollout | None] = [None] * len(group)
                step.siblings.update(dict.fromkeys((sample.uid for sample in group), so_far))
            step.kept = len(step.siblings)
            self.steps.append(step)
        return self.steps[k]

    @property
    def active(self) -> list[int]:
        """Return the workers of a plan; all of them while all are lost: the first that is back takes what waits."""
        return self.run.dispatcher.active or list(range(len(self.run.workers)))

    def cut(self, step: _PlannedStep, groups: list[Group]) -> None:
        """Plan equal contiguous parts."""
        samples = [sample for group in groups for sample in group]
        cuts = np.array_split(np.arange(len(samples)), len(self.active))
        step.parts = {worker: [samples[i] for i in cut] for worker, cut in zip(self.active, cuts, strict=True)}
        step.predicted_s = dict.fromkeys(self.active, 0.0)

    def rank(self, step: _PlannedStep, groups: list[Group]) -> bool:
        """Plan ranking groups, ascending or descending. Return false in the first epoch, without history."""
        history, epoch, active = self.run.dispatcher.history, groups[0][0].epoch, self.active
        samples_of = {group[0].prompt_id: group for group in groups}
        lengths = {prompt: history.lengths(prompt, epoch) for prompt in samples_of}
        known = [tokens for tokens in lengths.values() if tokens.size]
        if not known:
            return False
        # A prompt without history is expected to be as long as the others.
        unseen = np.array([float(np.median(np.concatenate(known)))])
        lengths = {prompt: tokens if tokens.size else unseen for prompt, tokens in lengths.items()}
        prompts = np.repeat(list(lengths), [tokens.size for tokens in lengths.values()])
        number = min(self.rule.ranking_groups or len(active), len(active), len(groups))
        ranking = allocation.ranking_groups(
            prompts, np.concatenate(list(lengths.values())), number, self.rule.representative
        )
        ranks = [[sample for prompt in part.prompts for sample in samples_of[prompt]] for part in ranking]

        table = self.run.times.table(
            [part.lengths_tokens for part in ranking], list(map(len, ranks)), len(active), self.drafted_by_rank(number)
        )
        workers = allocation.equal_workers(number, len(active))
        if self.rule.two_tier:
            workers = allocation.two_tier_workers(table, len(active), self.train_s, self.rule.max_workers)
        group_s = allocation.predicted_s(table, workers)
        now_s, ends_s = self.run.env.now, self.steps[-1].ends_s if self.steps else {}
        busy_s = [max(ends_s.get(worker, now_s), now_s) - now_s for worker in active]
        places = allocation.fill(step.k, workers, self.rule.alternation, busy_s, group_s)
        for g, samples in enumerate(ranks):
            mine = [worker for worker, place in zip(active, places, strict=True) if place == g]
            for i, worker in enumerate(mine):
                step.parts[worker] = samples[i :: len(mine)]
                step.predicted_s[worker], step.rank_of[worker] = group_s[g], g
            longest = max(float(np.median(lengths[prompt])) for prompt in ranking[g].prompts)  # as they are ranked
            outlier_tokens, last = math.floor(self.beta(epoch) * longest) + 1, int(self.rule.alpha * len(samples))
            step.groups.append(_RankingGroup({sample.uid: sample for sample in samples}, outlier_tokens, last))
        return True

    def drafted_by_rank(self, groups: int) -> list[Drafted]:
        """Return what drafts did for the responses of each ranking group recently (Fig. 12: τ knows the acceptance); of all
        responses, where the group had none before."""
        for rank, rollouts in self.recent.items():
            passes = sum(r.tokens - r.verified_tokens + r.verifications for r in rollouts)
            verified = sum(r.drafted_tokens - r.unverified_tokens for r in rollouts)
            if passes > 0:
                self.drafted[rank] = Drafted(sum(r.tokens for r in rollouts) / passes, verified / passes)
        self.recent.clear()
        any_rank = self.drafted.get(UNRANKED, Drafted())
        return [self.drafted.get(rank, any_rank) for rank in range(groups)]

    def beta(self, epoch: int) -> float:
        """Return the 75th percentile of the growth of lengths over the last epoch, at least `least_beta` (§6.3)."""
        if epoch not in self.betas:
            history = self.run.dispatcher.history
            before, last = history.medians(epoch - 2), history.medians(epoch - 1)
            grown = allocation.growth_factor(before, last) if before.keys() & last.keys() else 0.0
            self.betas[epoch] = max(grown, self.rule.least_beta)
        return self.betas[epoch]

    def begin(self, step: _PlannedStep, worker: int) -> None:
        """Submit a worker's part of a step; the worker predicted to end last takes what was carried into the step."""
        going = [Rollout(sample, (), False) for sample in step.parts.get(worker, [])]
        step.ends_s[worker] = self.run.env.now + step.predicted_s.get(worker, 0.0)
        if worker == step.last_worker:
            going, step.carried = going + step.carried, []
        if going:
            self._submit(step, going, worker)

    def _submit(self, step: _PlannedStep, rollouts: list[Rollout], worker: int) -> None:
        """Submit rollouts to a worker. If they have to move, they go to workers whose weights the step may use."""
        to, version = [worker] * len(rollouts), max(step.k - 1, 0)
        partials = [rollout if rollout.segments else None for rollout in rollouts]
        samples = [rollout.sample for rollout in rollouts]
        ends = self.run.dispatcher.submit(samples, partials, to=to, min_version=version)
        for sample, end in zip(samples, ends, strict=True):
            step.worker_of[sample.uid] = worker
            on_fire(end, partial(self._ended, step, sample))
        self._watch_the_last(step)

    def _ended(self, step: _PlannedStep, sample: Sample, end: Any) -> None:
        """Add a finished sample to its group, or carry an unfinished one into the next step."""
        if not end.ok:
            raise end.value  # a worker that died, or its engine's error
        rollout: Rollout = end.value
        ranks = [rank for rank, group in enumerate(step.groups) if group.unfinished.pop(sample.uid, None)]
        self.recent[ranks[0] if ranks else UNRANKED].append(rollout)
        self._watch_the_last(step)
        if not rollout.done:
            self._carry(step, rollout)
        so_far = step.siblings.pop(sample.uid)
        so_far[so_far.index(None)] = rollout
        if None not in so_far:
            finished = [one for one in so_far if one is not None and one.done]
            if finished:
                step.batch.add(finished)
        if not step.siblings:
            step.batch.close()

    def _watch_the_last(self, step: _PlannedStep) -> None:
        """Watch the last samples of each ranking group, once they are submitted, for those that become outliers."""
        for group in step.groups if self.rule.migration else []:
            last = group.unfinished
            if len(last) > group.last or any(uid not in step.worker_of for uid in last):
                continue
            group.last = -1
            for sample in last.values():
                if sample.uid not in self.migrated:
                    worker = self.run.workers[step.worker_of[sample.uid]]
                    on_fire(worker.when(sample, group.outlier_tokens), partial(self._migrate, step, sample))

    def _migrate(self, step: _PlannedStep, sample: Sample, reached: Any) -> None:
        """Move an outlier to a worker that is busy with a longer group of its step: with the longest group, and of its workers
        the one with the fewest samples left. If there is none, carry it into the next step."""
        if sample.uid not in step.siblings:
            return  # it has ended at this very boundary
        self.migrated.add(sample.uid)
        rank = step.rank_of.get(step.worker_of[sample.uid], -1)
        left = Counter(worker for uid, worker in step.worker_of.items() if uid in step.siblings)
        longer = [worker for worker in left if step.rank_of.get(worker, -1) > rank]
        if longer:
            target = max(longer, key=lambda worker: (step.rank_of[worker], -left[worker], -worker))
            step.worker_of[sample.uid] = target
            self.run.dispatcher.move(sample, target)
        elif step.kept > 1:  # no step is left without samples
            step.kept -= 1
            self.run.dispatcher.withdraw([sample])

    def _carry(self, step: _PlannedStep, rollout: Rollout) -> None:
        """Carry a response into the next unfinished step: to the worker predicted to end last, when it begins or at once."""
        later = self.step(step.k + 1)
        while not later.siblings:
            later = self.step(later.k + 1)
        carried = rollout._replace(carried_tokens=rollout.tokens)
        later.kept += 1
        later.siblings[rollout.sample.uid] = [None]
        if later.last_worker in later.ends_s:
            self._submit(later, [carried], later.last_worker)
        else:
            later.carried.append(carried)
