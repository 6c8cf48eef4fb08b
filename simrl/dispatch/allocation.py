"""Allocation: RhymeRL's two-tier scheduling (arXiv 2508.18588, §6.4, Fig. 12), prompts → ranking
groups → rollout workers.

Invariant: every allocation gives each ranking group at least `min_workers`, none more than the
table of times has columns, and hands out all workers. Groups are numbered from 0, the shortest, as
in the paper.

Tier 1 cuts the prompts, ranked by their last epoch's lengths, into N groups. Tier 2 gives the long
groups more workers, so that group i ends at about t0 + i·d and two successive steps, one ascending
and one descending, complement each other. `seconds[i, k - 1]` is τ(len_i, k) everywhere: what group
i takes with k workers (`RolloutTimes.table`), its lengths spread as in its history; MAX_WKS is the
number of its columns, or what the others' `min_workers` leave, if that is fewer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simrl.errors import InputError, refuse

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PRECISION_S = 1.0  # Fig. 12's p
LEAST_GROWTH = 1.1  # §6.3's lower bound of β
LONG_RUN_STEPS = 12
MOST_TRIED = 100  # numbers of workers
INFEASIBLE = 2  # a status of scipy.optimize.milp


Representative = Literal["responses", "medians"]
Alternation = Literal["reversed", "pairing", "none"]  # of the second of two steps


class RankingGroup(NamedTuple):
    """Prompts of similar length (tier 1), the mean that represents them, their responses' lengths
    in the history, scaled to it, and the median of the longest prompt."""

    prompts: tuple[int, ...]
    representative_tokens: float
    lengths_tokens: Floats
    longest_tokens: float


@dataclass(frozen=True)
class Allocation:
    """Workers of each ranking group (tier 2), and what they were chosen by; a tuple has one entry a
    group.

    `target_s` is t0 + i·d, which every `predicted_s` keeps. `leftover_workers` were not needed for
    that and went where `with_leftover` says. `needed_workers` is what Fig. 12's calWks returned at
    `gradient_s`.
    """

    workers: tuple[int, ...]
    predicted_s: tuple[float, ...]
    target_s: tuple[float, ...]
    t0_s: float
    gradient_s: float
    needed_workers: tuple[int, ...]

    @property
    def leftover_workers(self) -> int:
        return sum(self.workers) - sum(self.needed_workers)


def median_tokens(prompt_ids: ArrayLike, response_tokens: ArrayLike) -> dict[int, float]:
    """Return the median response of each prompt, in order of the prompt's id. Both arrays have one
    entry per response."""
    prompts, tokens = np.asarray(prompt_ids), np.asarray(response_tokens)
    order = np.lexsort((tokens, prompts))
    ids, first, count = np.unique(prompts[order], return_index=True, return_counts=True)
    tokens = tokens[order].astype(np.float64)
    medians = (tokens[first + (count - 1) // 2] + tokens[first + count // 2]) / 2
    return dict(zip(ids.tolist(), medians.tolist(), strict=True))


def ranking_groups(
    prompt_ids: ArrayLike,
    response_tokens: ArrayLike,
    groups: int,
    representative: Representative = "responses",
) -> tuple[RankingGroup, ...]:
    """Cut the prompts, ranked by the median of their historical lengths, into `groups` contiguous
    parts (tier 1, §6.2).

    The arrays have one entry per historical response. The paper says "equally"; here the shortest
    groups get one prompt more. Prompts with equal medians stand in order of their id. The
    representative length is "the mean value of the prompts' historical response lengths" (§6.4):
    over all responses of a part, so it need not rise as the medians do; or, as §6.2 calls the
    medians historical response lengths, over the prompts' medians. Raises `InputError` for fewer
    prompts than groups.
    """
    medians = median_tokens(prompt_ids, response_tokens)
    refuse(
        (
            not 1 <= groups <= len(medians),
            f"groups {groups}: {len(medians)} prompts have a history; ask for 1 to {len(medians)} groups",
        )
    )
    prompts, tokens = np.asarray(prompt_ids), np.asarray(response_tokens)
    ranked = np.array(sorted(medians, key=lambda prompt: medians[prompt]))
    ranking = []
    for part in np.array_split(ranked, groups):
        lengths = tokens[np.isin(prompts, part)].astype(np.float64)
        mean = float(lengths.mean())
        stands = (
            mean
            if representative == "responses"
            else float(np.mean([medians[prompt] for prompt in part]))
        )
        ranking.append(
            RankingGroup(tuple(part.tolist()), stands, lengths * (stands / mean), medians[part[-1]])
        )
    return tuple(ranking)


def two_tier(
    seconds: ArrayLike,
    workers: int,
    train_s: float = 0.0,
    min_workers: int = 1,
    precision_s: float = PRECISION_S,
) -> Allocation:
    """Allocate by Fig. 12 as printed (tier 2): a binary search for the smallest gradient d whose
    plan needs at most `workers`.

    Group i is to end by t0 + i·d with t0 = max(τ(len_0, MAX_WKS), train_s), and gets the fewest
    workers that do it. d is sought between 0 and d_max = (τ(len_N-1, MIN_WKS) − t0) / (N − 1),
    until `precision_s` is left. Where the paper is silent:

    - before the search has found a plan: the plan of d_max (Fig. 12 never looks at it);
    - d_max ≤ 0, where the longest group ends by t0 with MIN_WKS, and N = 1, where there is no
      gradient: d = 0;
    - workers that the plan does not need: `with_leftover`;
    - more `workers` needed than there are, even at d_max: `InputError`. Representative lengths that
      do not rise evenly can ask for a larger d than d_max; `exact` has no such bound.
    """
    table, t0, gradients = _problem(seconds, workers, train_s, min_workers)
    low, high = 0.0, 0.0
    if len(table) > 1:
        high = max((float(table[-1, min_workers - 1]) - t0) / (len(table) - 1), 0.0)
    plan = _needed_workers(gradients, high, min_workers)
    if not _enough(plan, workers):
        gradient, _ = _smallest_gradient(gradients, workers, min_workers)
        reason = "some group misses its target with all the workers it may have"
        if plan:
            reason = f"the groups need {' + '.join(map(str, plan))} = {sum(plan)} workers, there are {workers}"
        raise InputError(
            f"allocation: with the search's largest gradient, {high:g} s (t0 {t0:g} s), {reason}; "
            f"the exact allocation does with {gradient:g} s; a longer train_s or another max_workers may help the search"
        )
    while high - low > precision_s and (low < (middle := (low + high) / 2) < high):
        narrower = _needed_workers(gradients, middle, min_workers)
        if _enough(narrower, workers):
            high, plan = middle, narrower
        else:
            low = middle
    return _allocation(table, workers, t0, high, plan)


def exact(
    seconds: ArrayLike, workers: int, train_s: float = 0.0, min_workers: int = 1
) -> Allocation:
    """Solve Fig. 12's problem exactly: the smallest d ≥ 0 whose plan needs no more than `workers`,
    with the t0 of `two_tier`.

    The workers that a plan needs change only where some group just meets its target with some
    number of workers, d = (τ(len_i, k) − t0) / i: a bisection over these. There always is one: once
    the shortest group has the workers that t0 takes, a large d leaves the others their
    `min_workers`.
    """
    table, t0, gradients = _problem(seconds, workers, train_s, min_workers)
    return _allocation(table, workers, t0, *_smallest_gradient(gradients, workers, min_workers))


def best_max_workers(
    seconds: ArrayLike,
    workers: int,
    train_s: float = 0.0,
    min_workers: int = 1,
    precision_s: float = PRECISION_S,
) -> int:
    """Return the MAX_WKS, up to the number of columns, with whose `two_tier` plan a step is
    shortest in the long run (`step_s`).

    The paper leaves MAX_WKS to its user. It bounds the workers of the longest group, and where
    `train_s` is short, it is also the number for the *shortest* group, since t0 is its time with
    MAX_WKS workers. Of equally good MAX_WKS the smallest; of more than `MOST_TRIED`, that many are
    tried, closer together where they are small. Raises `InputError` where none will do.
    """
    table, *_ = _problem(seconds, workers, train_s, min_workers)
    tried: list[tuple[float, int]] = []
    refusal = None
    fewest = max(-(-workers // len(table)), min_workers)
    for most in np.unique(
        np.geomspace(fewest, table.shape[1], MOST_TRIED).round().astype(int)
    ).tolist():
        try:
            plan = two_tier(table[:, :most], workers, train_s, min_workers, precision_s)
        except InputError as error:
            refusal = error
        else:
            tried.append((step_s(plan.predicted_s, plan.workers, train_s), most))
    if not tried and refusal is not None:
        raise refusal
    return min(tried)[1]


def two_tier_workers(
    seconds: Floats, workers: int, train_s: float = 0.0, max_workers: int | None = None
) -> tuple[int, ...]:
    """Return the workers of each group by `two_tier`, with the best MAX_WKS if `max_workers` is
    None; by `exact` if the search finds no plan with a given `max_workers`; equal numbers if none
    does, or MAX_WKS allows neither."""
    try:
        table = seconds[:, : max_workers or best_max_workers(seconds, workers, train_s)]
        try:
            return two_tier(table, workers, train_s).workers
        except InputError:
            return exact(table, workers, train_s).workers
    except InputError:
        return equal_workers(len(seconds), workers)


def shortest_two_steps(seconds: ArrayLike, workers: int, min_workers: int = 1) -> tuple[int, ...]:
    """Return the workers of each group with which the longest sum of two steps, best paired, is as
    short as possible: exactly.

    Not the paper's: it shows how much the linear shape leaves. A bisection over the sums that two
    times can have. Sorted times paired with their reverse stay within B if and only if, for every
    time v > B / 2, the workers that take v or longer are no more than those that take B − v or
    less: an integer programme in which each group chooses its number of workers. Of the plans for
    the shortest B, the one with least worker-seconds. Takes a second for 64 workers, ten for 128,
    minutes for 256.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes a third of a second to import

    table, *_ = _problem(seconds, workers, 0.0, min_workers)
    groups, most = table.shape
    counts = np.arange(min_workers, most + 1)
    times = table[:, min_workers - 1 :]
    time, count = (
        times.ravel(),
        np.tile(counts, groups),
    )  # a choice is a group on a number of workers
    ticks = np.unique(time)
    one_each = LinearConstraint(np.kron(np.eye(groups), np.ones(len(counts))), 1, 1)
    all_workers = LinearConstraint(count[None], workers, workers)

    def plan_within(bound: float, cost: Floats) -> tuple[int, ...] | None:
        too_many = [
            np.where(time >= v, count, 0) - np.where(v + time <= bound, count, 0)
            for v in ticks[ticks + ticks > bound]
        ]
        pairs = [LinearConstraint(np.array(too_many), -np.inf, 0)] if too_many else []
        constraints = [one_each, all_workers, *pairs]
        whole = np.ones(time.size, dtype=np.int64)
        solved = milp(cost, integrality=whole, bounds=Bounds(0, 1), constraints=constraints)
        if solved.x is None and solved.status != INFEASIBLE:
            raise RuntimeError(f"shortest two steps: {solved.message}")
        return (
            None
            if solved.x is None
            else tuple(counts[solved.x.reshape(times.shape).argmax(axis=1)].tolist())
        )

    equal = equal_workers(groups, workers)
    paired = np.sort(np.repeat(predicted_s(table, equal), equal))
    sums = np.unique(np.add.outer(ticks, ticks))
    sums = sums[sums <= (paired + paired[::-1]).max()]
    anyhow = np.zeros(time.size)
    best = bisect_left(
        sums[:-1], True, key=lambda bound: plan_within(float(bound), anyhow) is not None
    )
    plan = plan_within(float(sums[best]), time * count / time.max())
    assert plan is not None, "the equal plan is within the longest sum"
    return plan


def equal_workers(groups: int, workers: int) -> tuple[int, ...]:
    """Return an equal number of workers for every group; where that is impossible, the longest
    groups have one more."""
    few, more = divmod(workers, groups)
    return (few,) * (groups - more) + (few + 1,) * more


def predicted_s(seconds: ArrayLike, workers_per_group: Sequence[int]) -> tuple[float, ...]:
    """Return the seconds that each group takes with its workers."""
    table = np.asarray(seconds, dtype=np.float64)
    return tuple(float(row[k - 1]) for row, k in zip(table, workers_per_group, strict=True))


def with_leftover(seconds: ArrayLike, plan: Sequence[int], workers: int) -> tuple[int, ...]:
    """Return the plan with all `workers` handed out; the paper does not say where those go that it
    does not need.

    The slowest group that the remaining workers can make faster gets as many of them as its next
    gain takes (one more often gains nothing: 5 responses over 3 workers and over 4 are 2 on the
    fullest). Workers that make nothing faster go one by one to the slowest group that may have
    more. Of equally slow groups, the longer.
    """
    table, counts = np.asarray(seconds, dtype=np.float64), list(plan)
    while (left := workers - sum(counts)) > 0:
        choices = []
        for i, now in enumerate(counts):
            if now < table.shape[1]:
                faster = np.flatnonzero(table[i, now : now + left] < table[i, now - 1]) + 1
                choices.append(
                    (faster.size > 0, table[i, now - 1], i, int(faster[0]) if faster.size else 1)
                )
        _, _, slowest, more = max(choices)
        counts[slowest] += more
    return tuple(counts)


def fill(
    step: int,
    workers_per_group: Sequence[int],
    alternation: Alternation = "reversed",
    busy_s: ArrayLike = (),
    group_s: Sequence[float] = (),
) -> Ints:
    """Return the group of each worker in a step, counted from 0. Workers are filled in order, group
    by group, the shortest first; in odd steps the longest first (§6.2), or from the second step on
    by `best_pairing`."""
    if alternation == "pairing" and step:
        return best_pairing(busy_s, group_s, workers_per_group)
    groups = np.repeat(np.arange(len(workers_per_group)), workers_per_group)
    return groups[::-1] if alternation == "reversed" and step % 2 else groups


def best_pairing(
    busy_s: ArrayLike, group_s: Sequence[float], workers_per_group: Sequence[int]
) -> Ints:
    """Return the group of each worker in the next step, where worker w has been busy for
    `busy_s[w]`: the freest the longest.

    Of all assignments in which every group has its number of workers, this has the shortest longest
    sum, busy + group (the rearrangement inequality). After one ascending fill of groups whose times
    rise it *is* the reversed fill; it differs where times do not rise, and from the third step on.
    Equally busy workers keep their order.
    """
    slots = fill(0, workers_per_group)
    groups = np.empty_like(slots)
    by_length = slots[np.argsort(-np.asarray(group_s)[slots], kind="stable")]
    groups[np.argsort(np.asarray(busy_s, dtype=np.float64), kind="stable")] = by_length
    return groups


def two_step_sums(
    group_s: Sequence[float],
    workers_per_group: Sequence[int],
    alternation: Alternation = "reversed",
) -> Floats:
    """Return the seconds that each worker is busy in two steps, (workers,)."""
    times = np.asarray(group_s, dtype=np.float64)
    first = times[fill(0, workers_per_group)]
    return np.add(first, times[fill(1, workers_per_group, alternation, first, group_s)])


def step_s(
    group_s: Sequence[float],
    workers_per_group: Sequence[int],
    train_s: float = 0.0,
    pairing: bool = False,
) -> float:
    """Return the seconds of a step in the long run where all steps are alike, over the last
    `LONG_RUN_STEPS` of three times as many.

    HistoPipe's rule (§6.2), with weights that arrive at once: a worker begins its part of step n
    when it is done with step n − 1 and step n − 2 is trained (off-policyness 1); a step is trained,
    `train_s` long, when all its workers are done and the step before is trained. Steps alternate
    between an ascending and a reversed fill, or go by `best_pairing`.
    """
    times = np.asarray(group_s, dtype=np.float64)
    fills = fill(0, workers_per_group), fill(1, workers_per_group)
    free, trained = np.zeros(len(fills[0])), [0.0, 0.0]
    for step in range(3 * LONG_RUN_STEPS):
        begins = np.maximum(free, trained[-2])
        groups = (
            best_pairing(begins, group_s, workers_per_group)
            if pairing and step
            else fills[step % 2]
        )
        free = begins + times[groups]
        trained.append(max(float(free.max()), trained[-1]) + train_s)
    return (trained[-1] - trained[-1 - LONG_RUN_STEPS]) / LONG_RUN_STEPS


def growth_factor(previous: Mapping[int, float], current: Mapping[int, float]) -> float:
    """Return β of §6.3: the 75th percentile of the growth of each prompt's median length between
    two epochs, at least 1.1. At least one prompt is in both."""
    growth = [
        current[prompt] / previous[prompt] for prompt in sorted(previous.keys() & current.keys())
    ]
    return max(LEAST_GROWTH, float(np.percentile(growth, 75)))


def _problem(
    seconds: ArrayLike, workers: int, train_s: float, min_workers: int
) -> tuple[Floats, float, Floats]:
    """Return the table up to the workers that a group can have while the others have `min_workers`,
    t0, and the gradients.

    `gradients[i, k - 1]` is the gradient from which on k workers do for group i, (τ(len_i, k) − t0)
    / i; for group 0, all or nothing. Raises `InputError` for numbers of workers that cannot be
    allocated.
    """
    table = np.asarray(seconds, dtype=np.float64)
    groups = len(table)
    most = min(table.shape[1], workers - (groups - 1) * min_workers)
    refuse(
        (
            workers < groups * min_workers,
            f"allocation: {workers} workers are fewer than {groups} groups × {min_workers} (min_workers) = "
            f"{groups * min_workers}; ask for fewer groups",
        ),
        (
            not 1 <= min_workers <= table.shape[1],
            f"allocation: min_workers {min_workers}, max_workers {table.shape[1]}; 1 ≤ min ≤ max is needed",
        ),
        (
            workers > groups * most,
            f"allocation: {workers} workers are more than {groups} groups × {most} (max_workers) = {groups * most}; "
            "raise max_workers or ask for more groups",
        ),
    )
    table = table[:, :most]
    t0 = max(float(table[0, -1]), train_s)
    first = np.where(table[:1] <= t0, -np.inf, np.inf)
    return table, t0, np.concatenate([first, (table[1:] - t0) / np.arange(1, groups)[:, None]])


def _needed_workers(gradients: Floats, gradient_s: float, min_workers: int) -> tuple[int, ...]:
    """Return Fig. 12's calWks: the fewest workers, at least `min_workers`, with which each group
    meets its target.

    Comparing the gradients with d is comparing τ with t0 + i·d, without rounding. Empty where even
    MAX_WKS are too few for some group.
    """
    met = gradients[:, min_workers - 1 :] <= gradient_s
    return tuple((met.argmax(axis=1) + min_workers).tolist()) if met.any(axis=1).all() else ()


def _enough(plan: tuple[int, ...], workers: int) -> bool:
    return 0 < sum(plan) <= workers


def _smallest_gradient(
    gradients: Floats, workers: int, min_workers: int
) -> tuple[float, tuple[int, ...]]:
    """Return the smallest d ≥ 0 whose plan needs no more than `workers`, with that plan. The
    largest will do."""
    candidates = np.unique(np.maximum(gradients[1:, min_workers - 1 :], 0.0)).tolist() or [0.0]

    smallest = candidates[
        bisect_left(
            candidates[:-1],
            True,
            key=lambda gradient_s: _enough(
                _needed_workers(gradients, gradient_s, min_workers), workers
            ),
        )
    ]
    return smallest, _needed_workers(gradients, smallest, min_workers)


def _allocation(
    table: Floats, workers: int, t0: float, gradient_s: float, plan: tuple[int, ...]
) -> Allocation:
    handed_out = with_leftover(table, plan, workers)
    targets = tuple(t0 + i * gradient_s for i in range(len(table)))
    return Allocation(handed_out, predicted_s(table, handed_out), targets, t0, gradient_s, plan)
