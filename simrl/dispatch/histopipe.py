"""HistoPipe's planning (RhymeRL, arXiv 2508.18588 §6): which worker gets which prompts of a step,
and where an outlier goes.

Invariant: a plan is made from the lengths of finished responses, the profile, and what drafts did;
it gives every sample of a step to one worker. §6.2: prompts are ranked by the median of their
responses in their last epoch, and cut into ranking groups, which the workers get in ascending order
in even steps, counted from 0, and in descending order in odd ones. §6.4: the time of a group, τ(l,
dp), gives the long groups more workers (`simrl.dispatch.allocation`). §6.3: a response far longer
than the longest prompt of its ranking group was is an outlier, and migrates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from simrl.dispatch import allocation
from simrl.profile.drafted import Drafted
from simrl.runtime.history import LengthHistory
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Group, Sample

if TYPE_CHECKING:  # compiled
    from simrl.profile.rollout_times import RolloutTimes

UNRANKED = -1  # the group of samples that a plain plan has placed
SubBatches = Literal["prompts", "responses"]


class HistoPipe(NamedTuple):
    """The parameters of the rule, as in `simrl systems show rhymerl`; `ranked`: ranking groups, in
    place of equal parts. `sub_batches`: what is dealt to the workers of a ranking group, whole
    prompts or single responses. `over_sampling`: groups of a round, in batches. `parts`:
    mini-batches that training takes as they come (None: whole batches)."""

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
    sub_batches: SubBatches
    over_sampling: float
    parts: int | None


@dataclass
class RankedSamples:
    """A ranking group in one step. Of its `last` unfinished samples (by uid), those that reach
    `outlier_tokens` are outliers."""

    unfinished: dict[int, Sample]
    outlier_tokens: int
    last: int


@dataclass
class Plan:
    """A step's plan. By worker: its samples, the seconds they are predicted to take, and its
    ranking group (none in a plain plan)."""

    parts: dict[int, list[Sample]] = field(default_factory=dict)
    predicted_s: dict[int, float] = field(default_factory=dict)
    rank_of: dict[int, int] = field(default_factory=dict)
    groups: list[RankedSamples] = field(default_factory=list)

    @property
    def last_worker(self) -> int:
        """Worker that is predicted to end last."""
        return max(self.predicted_s, key=lambda worker: (self.predicted_s[worker], worker))

    def destination(self, worker: int, unfinished: Mapping[int, int]) -> int | None:
        """Return where an outlier of a worker goes (§6.3, intra-step): to a worker that is busy
        with a longer group, with the longest, and of its workers to the one with the fewest samples
        left. None if there is none: into the next step. `unfinished` samples are by worker, of the
        workers that have some."""
        rank = self.rank_of.get(worker, UNRANKED)
        return max(
            [other for other in unfinished if self.rank_of.get(other, UNRANKED) > rank],
            key=lambda other: (self.rank_of[other], -unfinished[other], -other),
            default=None,
        )


def units(groups: Sequence[Group], sub_batches: SubBatches) -> Sequence[Group]:
    """Return what stays together at a worker: the groups, or each sample alone."""
    if sub_batches == "prompts":
        return groups
    return [[sample] for group in groups for sample in group]


def equal_parts(parts: Sequence[Group], workers: Sequence[int]) -> Plan:
    """Plan equal contiguous parts of these units: the first epoch has no history."""
    cuts = np.array_split(np.arange(len(parts)), len(workers))
    of_worker = [[sample for i in cut for sample in parts[i]] for cut in cuts]
    return Plan(dict(zip(workers, of_worker, strict=True)), dict.fromkeys(workers, 0.0))


class Planner:
    """Plans step after step. It knows what drafts did for the responses of each ranking group, and
    β by epoch."""

    def __init__(self, rule: HistoPipe, history: LengthHistory, times: RolloutTimes) -> None:
        self._rule = rule
        self._history = history
        self._times = times
        self._recent: dict[
            int, list[Rollout]
        ] = {}  # by ranking group: rollouts that ended since the last plan
        self._drafted: dict[
            int, Drafted
        ] = {}  # by ranking group, of the rollouts before, as far as there were any
        self._betas: dict[int, float] = {}  # by epoch

    def observe(self, rollout: Rollout, rank: int) -> None:
        """Note a rollout of a ranking group that has ended."""
        self._recent.setdefault(rank, []).append(rollout)

    def plan(
        self,
        k: int,
        groups: Sequence[Group],
        workers: Sequence[int],
        busy_s: Sequence[float],
        train_s: float,
    ) -> Plan:
        """Plan step k for workers that are predicted to be busy for `busy_s` more; `train_s`: of
        the last update."""
        ranking = self._ranking(groups, len(workers)) if self._rule.ranked else ()
        if not ranking:
            return equal_parts(units(groups, self._rule.sub_batches), workers)
        numbered = dict(zip(_numbers(groups), groups, strict=True))
        dealt = [
            units([numbered[number] for number in part.prompts], self._rule.sub_batches)
            for part in ranking
        ]
        ranks = [list(chain(*of_rank)) for of_rank in dealt]
        counts, group_s = self._workers_of(ranking, dealt, len(workers), train_s)
        places = allocation.fill(k, counts, self._rule.alternation, busy_s, group_s)
        plan = Plan(groups=[self._ranked(*pair) for pair in zip(ranks, ranking, strict=True)])
        for rank in range(len(ranks)):
            of_rank = [
                worker for worker, place in zip(workers, places, strict=True) if place == rank
            ]
            for i, worker in enumerate(of_rank):
                plan.parts[worker] = list(chain(*dealt[rank][i :: len(of_rank)]))
                plan.predicted_s[worker], plan.rank_of[worker] = group_s[rank], rank
        return plan

    def _ranking(self, groups: Sequence[Group], workers: int) -> Sequence[allocation.RankingGroup]:
        """Return tier 1 of §6.4: the prompts, ranked by their history, in groups; nothing without
        history. A prompt without history is expected to be as long as the others."""
        lengths = {
            number: self._history.lengths(group[0].prompt_id, group[0].epoch)
            for number, group in zip(_numbers(groups), groups, strict=True)
        }
        known = [tokens for tokens in lengths.values() if tokens.size]
        if not known:
            return ()
        unseen = np.array([float(np.median(np.concatenate(known)))])
        tokens = [of_prompt if of_prompt.size else unseen for of_prompt in lengths.values()]
        prompts = np.repeat(list(lengths), [of_prompt.size for of_prompt in tokens])
        number = min(self._rule.ranking_groups or workers, workers, len(groups))
        return allocation.ranking_groups(
            prompts, np.concatenate(tokens), number, self._rule.representative
        )

    def _workers_of(
        self,
        ranking: Sequence[allocation.RankingGroup],
        dealt: Sequence[Sequence[Group]],
        workers: int,
        train_s: float,
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return tier 2 of §6.4: the workers of each ranking group, and the seconds that it takes
        with them."""
        drafted = self._drafted_by_rank(len(ranking))
        table = self._times.table(
            [part.lengths_tokens for part in ranking],
            [sum(map(len, of_rank)) for of_rank in dealt],
            workers,
            drafted,
            max(len(unit) for of_rank in dealt for unit in of_rank),
        )
        counts = allocation.equal_workers(len(ranking), workers)
        if self._rule.two_tier:
            counts = allocation.two_tier_workers(table, workers, train_s, self._rule.max_workers)
        return counts, allocation.predicted_s(table, counts)

    def _drafted_by_rank(self, groups: int) -> list[Drafted]:
        """Return what drafts did for the recent responses of each ranking group (Fig. 12: τ knows
        the acceptance); of all responses, where the group had none before."""
        for rank, rollouts in self._recent.items():
            passes = sum(r.tokens - r.verified_tokens + r.verifications for r in rollouts)
            verified = sum(r.drafted_tokens - r.unverified_tokens for r in rollouts)
            if passes > 0:
                self._drafted[rank] = Drafted(
                    sum(r.tokens for r in rollouts) / passes, verified / passes
                )
        self._recent.clear()
        any_rank = self._drafted.get(UNRANKED, Drafted())
        return [self._drafted.get(rank, any_rank) for rank in range(groups)]

    def _ranked(self, samples: Sequence[Sample], part: allocation.RankingGroup) -> RankedSamples:
        """Return a ranking group's samples with the bounds of §6.3: its last α may be outliers,
        from β times its longest prompt on, as prompts are ranked."""
        outlier_tokens = math.floor(self._beta(samples[0].epoch) * part.longest_tokens) + 1
        by_uid = {sample.uid: sample for sample in samples}
        return RankedSamples(by_uid, outlier_tokens, int(self._rule.alpha * len(samples)))

    def _beta(self, epoch: int) -> float:
        """Return the 75th percentile of the growth of lengths over the last epoch, at least
        `least_beta` (§6.3)."""
        if epoch not in self._betas:
            before, last = self._history.medians(epoch - 2), self._history.medians(epoch - 1)
            grown = allocation.growth_factor(before, last) if before.keys() & last.keys() else 0.0
            self._betas[epoch] = max(grown, self._rule.least_beta)
        return self._betas[epoch]


def _numbers(groups: Sequence[Group]) -> list[int]:
    """Return a number for each group, in the order of epochs and prompts: a step that draws more
    than a batch may have a prompt of two epochs."""
    firsts = [group[0] for group in groups]
    order = np.lexsort(([first.prompt_id for first in firsts], [first.epoch for first in firsts]))
    return list(np.argsort(order).tolist())
