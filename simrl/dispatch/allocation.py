"""Allocation: RhymeRL's two-tier scheduling (arXiv 2508.18588, §6.4, Fig. 12), prompts → ranking groups → rollout workers.

Invariant: plain functions of their arguments; every allocation gives each ranking group at least `min_workers`, none more
than the table of times has columns, and hands out all workers. Groups are numbered from 0, the shortest, as in the paper.

Tier 1 cuts the prompts, ranked by their last epoch's lengths, into N groups (`ranking_groups`). Tier 2 gives the long
groups more workers than the short ones, so that group i ends at about t0 + i·d and two successive steps, one ascending and
one descending, complement each other. `seconds[i, k - 1]` is τ(len_i, k) everywhere: what group i takes with k workers
(`simrl.profile.RolloutTimes.table`); MAX_WKS is the number of its columns, or what the others' `min_workers` leave, if that
is fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simrl.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PRECISION_S = 1.0  # Fig. 12's p
LEAST_GROWTH = 1.1  # §6.3's lower bound of β
LONG_RUN_STEPS = 12
MOST_TRIED = 100  # numbers of workers
INFEASIBLE = 2  # a status of scipy.optimize.milp


class RankingGroup(NamedTuple):
    """Prompts of about the same length (tier 1), and the mean length of their responses in the history."""

    prompts: tuple[int, ...]
    representative_tokens: float


@dataclass(frozen=True)
class Allocation:
    """Workers of each ranking group (tier 2), and what they were chosen by; a tuple has one entry a group.

    `target_s` is t0 + i·d, which every `predicted_s` keeps. `leftover_workers` were not needed for that and went where
    `with_leftover` says. `needed_workers` is what Fig. 12's calWks returned at `gradient_s`.
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
    """The median response of each prompt, in order of the prompt's id. Both arrays have one entry a response."""
    prompts, tokens = np.asarray(prompt_ids), np.asarray(response_tokens)
    order = np.lexsort((tokens, prompts))
    ids, first, count = np.unique(prompts[order], return_index=True, return_counts=True)
    tokens = tokens[order].astype(np.float64)
    medians = (tokens[first + (count - 1) // 2] + tokens[first + count // 2]) / 2
    return dict(zip(ids.tolist(), medians.tolist(), strict=True))


def ranking_groups(prompt_ids: ArrayLike, response_tokens: ArrayLike, groups: int) -> tuple[RankingGroup, ...]:
    """Tier 1 (§6.2): the prompts, ranked by the median of their historical lengths, cut into `groups` contiguous parts.

    The arrays have one entry a historical response. Parts differ by at most one prompt; the paper says "equally", here the
    shortest groups get the one more. Prompts with the same median stand in order of their id. The representative length is
    the mean over all responses of a part, as §6.4 has it, so it need not rise as the medians do. Raises `InputError` for
    fewer prompts than groups.
    """
    medians = median_tokens(prompt_ids, response_tokens)
    if not 1 <= groups <= len(medians):
        raise InputError(f"groups {groups}: {len(medians)} prompts have a history; ask for 1 to {len(medians)} groups")
    prompts, tokens = np.asarray(prompt_ids), np.asarray(response_tokens)
    ids = np.array(list(medians))
    ranked = ids[np.argsort(list(medians.values()), kind="stable")]
    return tuple(
        RankingGroup(tuple(part.tolist()), float(tokens[np.isin(prompts, part)].mean()))
        for part in np.array_split(ranked, groups)
    )


def two_tier(
    seconds: ArrayLike, workers: int, train_s: float = 0.0, min_workers: int = 1, precision_s: float = PRECISION_S
) -> Allocation:
    """Tier 2, Fig. 12 as printed: a binary search for the smallest gradient d whose plan needs no more than `workers`.

    Group i is to end by t0 + i·d with t0 = max(τ(len_0, MAX_WKS), train_s), and gets the fewest workers that do it. d is
    sought between 0 and d_max = (τ(len_N-1, MIN_WKS) − t0) / (N − 1), until `precision_s` is left. What the paper leaves
    open, and the rule here:

    - a MAX_WKS that no group can have while the others have MIN_WKS: what they can;
    - the plan before the search has found one: that of d_max (Fig. 12 never looks at it);
    - d_max ≤ 0, where the longest group ends by t0 with MIN_WKS, and N = 1, where there is no gradient: d = 0;
    - workers that the plan does not need: `with_leftover`;
    - more `workers` needed than there are, even at d_max: refused. Representative lengths that do not rise evenly can ask for
      a larger d than d_max; `exact` has no such bound.

    Where `train_s` is short, t0 is what MAX_WKS workers make of the *shortest* group, and so it gets that many: the choice of
    MAX_WKS matters (`best_max_workers`). Raises `InputError` where `workers` cannot do, saying which number is in the way.
    """
    table = _checked(seconds, workers, min_workers)
    t0 = max(float(table[0, -1]), train_s)
    gradients = _gradients(table, t0)
    low, high = 0.0, 0.0
    if len(table) > 1:
        high = max((float(table[-1, min_workers - 1]) - t0) / (len(table) - 1), 0.0)
    plan = _needed_workers(gradients, high, min_workers)
    if plan is None or sum(plan) > workers:
        gradient, _ = _smallest_gradient(gradients, workers, min_workers)
        raise InputError(
            f"allocation: with the search's largest gradient, {high:g} s (t0 {t0:g} s), {_too_few(plan, workers)}; "
            f"the exact allocation does with {gradient:g} s; a longer train_s or another max_workers may help the search"
        )
    while high - low > precision_s and (low < (middle := (low + high) / 2) < high):
        found = _needed_workers(gradients, middle, min_workers)
        if found is None or sum(found) > workers:
            low = middle
        else:
            high, plan = middle, found
    return _allocation(table, workers, t0, high, plan)


def exact(seconds: ArrayLike, workers: int, train_s: float = 0.0, min_workers: int = 1) -> Allocation:
    """Fig. 12's problem solved exactly: the smallest d ≥ 0 whose plan needs no more than `workers`, the same t0.

    What a plan needs falls as d grows, and changes only where some group just meets its target with some number of
    workers, d = (τ(len_i, k) − t0) / i: a bisection over these. There always is one: once the shortest group has
    what t0 takes, a large d leaves the others their `min_workers`. Raises `InputError` as `two_tier` does, but for d_max.
    """
    table = _checked(seconds, workers, min_workers)
    t0 = max(float(table[0, -1]), train_s)
    return _allocation(table, workers, t0, *_smallest_gradient(_gradients(table, t0), workers, min_workers))


def best_max_workers(
    seconds: ArrayLike, workers: int, train_s: float = 0.0, min_workers: int = 1, precision_s: float = PRECISION_S
) -> int:
    """The MAX_WKS, up to the number of columns, with whose `two_tier` plan a step is shortest in the long run (`step_s`).

    The paper leaves MAX_WKS to its user. It cuts both ways: it bounds what the longest group gets, and where `train_s` is
    short, it is also what the *shortest* group gets, since t0 is what MAX_WKS workers make of it. Steps alternate between
    ascending and reversed; of equally good MAX_WKS the smallest. Of more than `MOST_TRIED`, as many are tried, closer together
    where they are small. Raises `InputError` as `two_tier` does where none will do.
    """
    table = _checked(seconds, workers, min_workers)
    found: list[tuple[float, int]] = []
    refusal = None
    fewest = max(-(-workers // len(table)), min_workers)
    for most in np.unique(np.geomspace(fewest, table.shape[1], MOST_TRIED).round().astype(int)).tolist():
        try:
            plan = two_tier(table[:, :most], workers, train_s, min_workers, precision_s)
        except InputError as error:
            refusal = error
        else:
            found.append((step_s(plan.predicted_s, plan.workers, train_s), most))
    if refusal is not None and not found:
        raise refusal
    return min(found)[1]


def shortest_two_steps(seconds: ArrayLike, workers: int, min_workers: int = 1) -> tuple[int, ...]:
    """The workers of each group for which the longest sum of two steps, best paired, is as short as it can be: exactly.

    Not the paper's, but what its gradient is to bring about; it tells how much the linear shape leaves. A bisection over
    the sums that two times can have. Sorted times paired with their reverse stay within B if and only if, for every time
    v > B / 2, the workers that take v or longer are no more than those that take B − v or less: an integer programme in
    which each group chooses its number of workers (scipy's HiGHS). Of the plans for the shortest B, the one with the least
    worker-seconds. Takes a second for 64 workers, ten for 128, and minutes for 256.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes a third of a second to import

    table = _checked(seconds, workers, min_workers)
    groups, most = table.shape
    counts = np.arange(min_workers, most + 1)
    times = table[:, min_workers - 1 :]
    time, count = times.ravel(), np.tile(counts, groups)  # a choice is a group on a number of workers
    ticks = np.unique(time)
    one_each = LinearConstraint(np.kron(np.eye(groups), np.ones(len(counts))), 1, 1)
    all_workers = LinearConstraint(count[None], workers, workers)

    def plan_within(bound: float, cost: Floats) -> tuple[int, ...] | None:
        long = ticks[ticks + ticks > bound]
        too_many = [np.where(time >= v, count, 0) - np.where(v + time <= bound, count, 0) for v in long]
        pairs = [LinearConstraint(np.array(too_many), -np.inf, 0)] if too_many else []
        found = milp(
            cost,
            integrality=np.ones(time.size, dtype=np.int64),
            bounds=Bounds(0, 1),
            constraints=[one_each, all_workers, *pairs],
        )
        if found.x is None and found.status != INFEASIBLE:
            raise RuntimeError(f"shortest two steps: {found.message}")
        return None if found.x is None else tuple(counts[found.x.reshape(times.shape).argmax(axis=1)].tolist())

    sums = np.unique(np.add.outer(ticks, ticks))
    equal = equal_workers(groups, workers)
    sums = sums[sums <= _paired_longest_s(predicted_s(table, equal), equal)]
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        if plan_within(float(sums[middle]), np.zeros(time.size)) is None:
            low = middle + 1
        else:
            high = middle
    plan = plan_within(float(sums[high]), time * count / time.max())
    assert plan is not None, "the equal plan is within the longest sum"
    return plan


def equal_workers(groups: int, workers: int) -> tuple[int, ...]:
    """As many workers for every group; where that is impossible, the longest groups have the one more."""
    few, more = divmod(workers, groups)
    return (few,) * (groups - more) + (few + 1,) * more


def predicted_s(seconds: ArrayLike, workers_per_group: Sequence[int]) -> tuple[float, ...]:
    """What each group takes with its workers."""
    table = np.asarray(seconds, dtype=np.float64)
    return tuple(float(row[k - 1]) for row, k in zip(table, workers_per_group, strict=True))


def _needed_workers(gradients: Floats, gradient_s: float, min_workers: int) -> tuple[int, ...] | None:
    """Fig. 12's calWks: the fewest workers, at least `min_workers`, with which each group meets its target.

    `gradients[i, k - 1]` is the gradient from which on k workers do for group i, (τ(len_i, k) − t0) / i: comparing these
    with d is comparing τ with t0 + i·d, without rounding. None where even MAX_WKS are too few for some group.
    """
    met = gradients[:, min_workers - 1 :] <= gradient_s
    if not met.any(axis=1).all():
        return None
    return tuple((met.argmax(axis=1) + min_workers).tolist())


def with_leftover(seconds: ArrayLike, plan: Sequence[int], workers: int) -> tuple[int, ...]:
    """The plan with all `workers` handed out; the paper does not say where those go that it does not need.

    Again and again the slowest group that the remaining workers can make faster gets as many of them as its next gain takes
    (one more worker often gains nothing: 5 responses over 3 workers and over 4 are 2 on the fullest). Those
    that make nothing faster go one by one to the slowest group that may have more. Of equally slow groups, the longer.
    """
    table = np.asarray(seconds, dtype=np.float64)
    plan, groups = list(plan), range(len(plan))
    while (left := workers - sum(plan)) > 0:
        open_groups = [i for i in groups if plan[i] < table.shape[1]]

        def gains(i: int, left: int = left) -> Ints:
            """The numbers of further workers at which group i becomes faster than it is."""
            now = plan[i]
            faster: Ints = np.flatnonzero(table[i, now : now + left] < table[i, now - 1]) + 1
            return faster

        slowest = max(open_groups, key=lambda i: (len(gains(i)) > 0, table[i, plan[i] - 1], i))
        more = gains(slowest)
        plan[slowest] += int(more[0]) if len(more) else 1
    return tuple(plan)


def ascending_fill(workers_per_group: Sequence[int]) -> Ints:
    """The group of each worker in an odd step: workers are filled in order, group by group, the shortest first."""
    return np.repeat(np.arange(len(workers_per_group)), workers_per_group)


def reversed_fill(workers_per_group: Sequence[int]) -> Ints:
    """The group of each worker in an even step: the longest group first (§6.2)."""
    return ascending_fill(workers_per_group)[::-1]


def best_pairing(busy_s: ArrayLike, group_s: Sequence[float], workers_per_group: Sequence[int]) -> Ints:
    """The group of each worker in the next step, where worker w has been busy for `busy_s[w]`: the freest the longest.

    Of all assignments in which every group has its number of workers, this has the shortest longest sum, busy + group, and
    the least sum of squares (the rearrangement inequality), so no assignment solver is needed. After one ascending fill
    of groups whose times rise it *is* the reversed fill; it differs where times do not rise, and from the third step on,
    because it knows what two steps have left uneven. Equally busy workers keep their order.
    """
    busy = np.asarray(busy_s, dtype=np.float64)
    slots = ascending_fill(workers_per_group)
    if busy.shape != slots.shape:
        raise InputError(f"best_pairing: {busy.size} workers, but the groups have {slots.size}; give one time a worker")
    longest_first = slots[np.argsort(-np.asarray(group_s)[slots], kind="stable")]
    groups = np.empty_like(slots)
    groups[np.argsort(busy, kind="stable")] = longest_first
    return groups


def two_step_sums(group_s: Sequence[float], workers_per_group: Sequence[int], pairing: bool = False) -> Floats:
    """Seconds that each worker is busy in two steps, (workers,): an ascending fill, then a reversed one or `best_pairing`'s."""
    times = np.asarray(group_s, dtype=np.float64)
    first = times[ascending_fill(workers_per_group)]
    second = best_pairing(first, group_s, workers_per_group) if pairing else reversed_fill(workers_per_group)
    sums: Floats = first + times[second]
    return sums


def step_s(
    group_s: Sequence[float], workers_per_group: Sequence[int], train_s: float = 0.0, pairing: bool = False
) -> float:
    """Seconds a step in the long run where all steps are alike: what the complementary steps are for, as one number.

    HistoPipe's rule (§6.2), with weights that arrive at once: a worker begins its part of step n when it is done with
    step n − 1 and step n − 2 is trained (off-policyness 1); a step is trained, `train_s` long, when all its workers are done
    and the step before is trained. Steps alternate between an ascending and a reversed fill, or after the first one go by
    `best_pairing` to when each worker can begin. Taken over the last `LONG_RUN_STEPS` of three times as many.
    """
    times = np.asarray(group_s, dtype=np.float64)
    fills = ascending_fill(workers_per_group), reversed_fill(workers_per_group)
    free, trained = np.zeros(len(fills[0])), [0.0, 0.0]
    for step in range(3 * LONG_RUN_STEPS):
        begins = np.maximum(free, trained[-2])
        groups = best_pairing(begins, group_s, workers_per_group) if pairing and step else fills[step % 2]
        free = begins + times[groups]
        trained.append(max(float(free.max()), trained[-1]) + train_s)
    return (trained[-1] - trained[-1 - LONG_RUN_STEPS]) / LONG_RUN_STEPS


def growth_factor(previous: Mapping[int, float], current: Mapping[int, float]) -> float:
    """β of §6.3: the 75th percentile of the growth of lengths between two epochs, at least 1.1.

    Both give a prompt's length in its epoch (`median_tokens`: the paper's measure of a prompt, though it does not say whose
    growth is meant); growth is current / previous over the prompts in both. Raises `InputError` if there are none.
    """
    both = sorted(previous.keys() & current.keys())
    if not both:
        raise InputError("growth of lengths: the two epochs have no prompt in common; give epochs of the same prompts")
    return max(LEAST_GROWTH, float(np.percentile([current[p] / previous[p] for p in both], 75)))


def _checked(seconds: ArrayLike, workers: int, min_workers: int) -> Floats:
    """The table, up to what a group can have while the others have `min_workers`; refuses what cannot be allocated."""
    table = np.asarray(seconds, dtype=np.float64)
    if table.ndim != 2 or table.size == 0:
        raise InputError(f"allocation: times of shape {table.shape}; give seconds of (groups, workers of a group)")
    groups = len(table)
    if not np.isfinite(table).all() or (table <= 0).any():
        group, k = np.argwhere(~np.isfinite(table) | (table <= 0))[0]
        raise InputError(f"allocation: group {group} on {k + 1} workers takes {table[group, k]} s; times are positive")
    if (np.diff(table, axis=1) > 0).any():
        group, k = np.argwhere(np.diff(table, axis=1) > 0)[0]
        raise InputError(
            f"allocation: group {group} takes {table[group, k]:g} s on {k + 1} workers and {table[group, k + 1]:g} s on "
            f"{k + 2}; more workers cannot take longer"
        )
    if workers < groups * min_workers:
        raise InputError(
            f"allocation: {workers} workers are fewer than {groups} groups × {min_workers} (min_workers) = "
            f"{groups * min_workers}; ask for fewer groups"
        )
    if not 1 <= min_workers <= table.shape[1]:
        raise InputError(
            f"allocation: min_workers {min_workers}, max_workers {table.shape[1]}; 1 ≤ min ≤ max is needed"
        )
    most = min(table.shape[1], workers - (groups - 1) * min_workers)
    if workers > groups * most:
        raise InputError(
            f"allocation: {workers} workers are more than {groups} groups × {most} (max_workers) = {groups * most}; "
            "raise max_workers or ask for more groups"
        )
    return table[:, :most]


def _gradients(table: Floats, t0: float) -> Floats:
    """The gradient from which on k workers do for group i, (groups, MAX_WKS); of group 0, all or nothing."""
    group = np.arange(1, len(table))
    first = np.where(table[:1] <= t0, -np.inf, np.inf)
    return np.concatenate([first, (table[1:] - t0) / group[:, None]])


def _smallest_gradient(gradients: Floats, workers: int, min_workers: int) -> tuple[float, tuple[int, ...]]:
    """The smallest d ≥ 0 whose plan needs no more than `workers`, with that plan."""
    candidates = np.unique(np.maximum(gradients[1:, min_workers - 1 :], 0.0)).tolist() or [0.0]
    low, high = 0, len(candidates) - 1  # the smallest is in candidates[low : high + 1]; the last will do
    while low < high:
        middle = (low + high) // 2
        plan = _needed_workers(gradients, candidates[middle], min_workers)
        if plan is None or sum(plan) > workers:
            low = middle + 1
        else:
            high = middle
    plan = _needed_workers(gradients, candidates[high], min_workers)
    assert plan is not None, "at the largest gradient the fewest workers do"
    return candidates[high], plan


def _allocation(table: Floats, workers: int, t0: float, gradient_s: float, plan: tuple[int, ...]) -> Allocation:
    handed_out = with_leftover(table, plan, workers)
    targets = tuple(t0 + i * gradient_s for i in range(len(table)))
    return Allocation(handed_out, predicted_s(table, handed_out), targets, t0, gradient_s, plan)


def _too_few(plan: tuple[int, ...] | None, workers: int) -> str:
    if plan is None:
        return "some group misses its target with all the workers it may have"
    return f"the groups need {' + '.join(map(str, plan))} = {sum(plan)} workers, there are {workers}"


def _paired_longest_s(group_s: Sequence[float], workers_per_group: Sequence[int]) -> float:
    """The longest sum of two steps, best paired."""
    times = np.sort(np.repeat(group_s, workers_per_group))
    return float((times + times[::-1]).max())
