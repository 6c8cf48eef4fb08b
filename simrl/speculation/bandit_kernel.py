"""TLT's BEG-MAB (`simrl.speculation.bandit`, where the rule is told) as compiled functions over arrays.

Invariant: given the same draws, the arms chosen are those of `BegMabSelector`, one by one. All state is in three arrays, so
that an engine can look ahead on copies; its draws belong to (key, how many were drawn before), so the copies meet the same
luck.

An arm is the index of a strategy as they were given. An arm that is alone in its group is chosen without being compared, so its
rewards are not kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simrl.speculation.bandit import BATCH_GROUPS, BegMab
from simrl.speculation.draws import uniform

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Rows of `counts`, one column a window of rewards: how many are in it, and where the oldest of a full one stands. The first
# entry of the last column is the number of draws so far.
SIZE, OLDEST = range(2)


class BanditRule(NamedTuple):
    """What does not change. `group_first[g] … group_first[g + 1]` are the places in `group_arms` of the arms for batches from
    `thresholds[g]` on, in the order in which they were given. `window_of[arm]` is an arm's first window of rewards, -1 for an
    arm that needs none; if rewards are not pooled, it has one for each group of batches, which begin at 1 and
    `place_starts`."""

    epsilon: float
    thresholds: Ints
    group_first: Ints
    group_arms: Ints
    window_of: Ints
    place_starts: Ints


class BanditState(NamedTuple):
    """What changes. The latest rewards of each window in the order they came (a ring) and by size; shape (windows, window)."""

    arrived: Floats
    ordered: Floats
    counts: Ints


def bandit_rule(parameters: BegMab) -> BanditRule:
    """The parameters as compiled code takes them."""
    numbers = sorted({strategy.tokens_to_verify for strategy in parameters.strategies}, reverse=True)
    groups = [[i for i, s in enumerate(parameters.strategies) if s.tokens_to_verify == number] for number in numbers]
    place_starts = np.array(() if parameters.pool_batches else BATCH_GROUPS, dtype=np.int64)
    window_of = np.full(len(parameters.strategies), -1, dtype=np.int64)
    compared = [arm for group in groups if len(group) > 1 for arm in group]
    window_of[compared] = np.arange(len(compared)) * (place_starts.size + 1)
    return BanditRule(
        epsilon=parameters.epsilon,
        thresholds=np.array(parameters.batch_thresholds, dtype=np.int64),
        group_first=np.cumsum([0, *map(len, groups)], dtype=np.int64),
        group_arms=np.array([arm for group in groups for arm in group], dtype=np.int64),
        window_of=window_of,
        place_starts=place_starts,
    )


def bandit_state(parameters: BegMab) -> BanditState:
    """Nothing learnt, nothing drawn."""
    return state_of(bandit_rule(parameters), parameters.window)


def state_of(rule: BanditRule, window: int) -> BanditState:
    """The same, with so many rewards a window."""
    windows = int((rule.window_of >= 0).sum()) * (rule.place_starts.size + 1)
    rewards = np.zeros((windows, window))
    return BanditState(rewards, rewards.copy(), np.zeros((2, windows + 1), dtype=np.int64))


def copied(state: BanditState) -> BanditState:
    """The same state, for a look ahead."""
    return BanditState(state.arrived.copy(), state.ordered.copy(), state.counts.copy())


@njit(cache=True)
def choose(rule: BanditRule, state: BanditState, key: int, batch: int) -> int:
    """The arm for the next pass over `batch` >= 1 sequences. Advances the draws of `state`."""
    group = np.searchsorted(rule.thresholds, batch, side="right") - 1
    first = rule.group_first[group]
    arms = rule.group_first[group + 1] - first
    if arms == 1:
        return rule.group_arms[first]
    if _draw(state, key) < rule.epsilon:
        return rule.group_arms[first + min(int(_draw(state, key) * arms), arms - 1)]
    best = rule.group_arms[first]
    largest = -1.0
    for i in range(first, first + arms):
        reward = value(rule, state, rule.group_arms[i], batch)
        if reward > largest:
            best, largest = rule.group_arms[i], reward
    return best


@njit(cache=True)
def value(rule: BanditRule, state: BanditState, arm: int, batch: int) -> float:
    """The median of the arm's recent rewards, tokens per second; infinite as long as there is none."""
    window = _window(rule, arm, batch)
    size = state.counts[SIZE, window] if window >= 0 else 0
    if size == 0:
        return np.inf
    return (state.ordered[window, size // 2] + state.ordered[window, size - 1 - size // 2]) / 2


@njit(cache=True)
def observe(rule: BanditRule, state: BanditState, arm: int, accept_length: float, batch: int, step_s: float) -> None:
    """What a pass with this arm did; the arguments are those of `BegMabSelector.observe`, not checked here."""
    window = _window(rule, arm, batch)
    if window < 0:
        return
    reward = accept_length * batch / step_s
    ordered, most = state.ordered[window], state.ordered.shape[1]
    size = state.counts[SIZE, window]
    if size == most:
        # The oldest goes: the ring's next place is its, and those above it in size move down.
        at = state.counts[OLDEST, window]
        gone = np.searchsorted(ordered[:size], state.arrived[window, at])
        for i in range(gone, size - 1):
            ordered[i] = ordered[i + 1]
        state.counts[OLDEST, window] = (at + 1) % most
        size -= 1
    else:
        at = size
    state.arrived[window, at] = reward
    i = size
    while i > 0 and ordered[i - 1] > reward:
        ordered[i] = ordered[i - 1]
        i -= 1
    ordered[i] = reward
    state.counts[SIZE, window] = size + 1


@njit(cache=True)
def _window(rule: BanditRule, arm: int, batch: int) -> int:
    if rule.window_of[arm] < 0:
        return -1
    return rule.window_of[arm] + np.searchsorted(rule.place_starts, batch, side="right")


@njit(cache=True)
def _draw(state: BanditState, key: int) -> float:
    place = state.counts[0, -1]
    state.counts[0, -1] = place + 1
    return uniform(key, place)
