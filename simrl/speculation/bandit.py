"""The choice of the next speculative decoding strategy, learnt while decoding: TLT's BEG-MAB
(Taming the Long Tail, §5.2).

Invariant: a batch size has one bucket, a bucket one group of strategies, all of which verify
equally many tokens; what is chosen for a batch is always of its bucket's group. The larger the
batch, the fewer tokens are verified (TLT, Table 2).

Within a group, an ε-greedy bandit: now and then a strategy at random, else the one whose rewards
have the largest median over a sliding window. The reward of a pass is its tokens per second. An arm
without a reward is worth more than any other, so such arms go first; of equals, the one that was
given first. Where the paper is silent, this follows the code (fastrl).

`choose` before a pass, `observe` after it, compiled; `tests/references/bandit.py` is the rule,
readable. A draw belongs to (key, number of draws before), so equal runs choose equally. An arm is
the index of a strategy as they were given. An arm that is alone in its group is chosen without
being compared, so its rewards are not kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simrl.profile.compiled import kernel, part
from simrl.speculation.choices import BegMab
from simrl.speculation.draws import uniform
from simrl.speculation.matching import Floats, Ints

# Rows of `counts`, one column a window of rewards: their number, and the place of the oldest in a
# full one. The first entry of the last column is the number of draws so far.
_SIZE, _OLDEST = range(2)


class BanditRule(NamedTuple):
    """The parameters. `group_first[g] … group_first[g + 1]` are the places in `group_arms` of the
    arms for batches from `thresholds[g]` on, in the order in which they were given.
    `window_of[arm]` is an arm's window of rewards, -1 for an arm that needs none."""

    epsilon: float
    thresholds: Ints
    group_first: Ints
    group_arms: Ints
    window_of: Ints


class BanditState(NamedTuple):
    """The latest rewards of each window in the order they came (a ring) and by size; shape
    (windows, window)."""

    arrived: Floats
    ordered: Floats
    counts: Ints


def bandit_rule(parameters: BegMab) -> BanditRule:
    """Return the parameters as compiled code takes them."""
    numbers = sorted(
        {strategy.tokens_to_verify for strategy in parameters.strategies}, reverse=True
    )
    groups = [
        [i for i, s in enumerate(parameters.strategies) if s.tokens_to_verify == number]
        for number in numbers
    ]
    window_of = np.full(len(parameters.strategies), -1, dtype=np.int64)
    compared = [arm for group in groups if len(group) > 1 for arm in group]
    window_of[compared] = np.arange(len(compared))
    thresholds = np.array(parameters.batch_thresholds, dtype=np.int64)
    group_arms = np.array([arm for group in groups for arm in group], dtype=np.int64)
    group_first = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    return BanditRule(parameters.epsilon, thresholds, group_first, group_arms, window_of)


def bandit_state(rule: BanditRule, window: int) -> BanditState:
    """Return the state with nothing learnt and nothing drawn; `window` is `BegMab.window`."""
    windows = int((rule.window_of >= 0).sum())
    rewards = np.zeros((windows, window))
    return BanditState(rewards, rewards.copy(), np.zeros((2, windows + 1), dtype=np.int64))


def bandit_states(rule: BanditRule, window: int, rows: int) -> BanditState:
    """Return `bandit_state` for each of some engines: arrays with a leading axis of `rows`."""
    one = bandit_state(rule, window)
    rewards = np.stack([one.arrived] * rows)
    return BanditState(rewards, rewards.copy(), np.stack([one.counts] * rows))


@kernel
def choose(rule: BanditRule, state: BanditState, key: int, batch: int) -> int:
    """Return the arm for the next pass over `batch` >= 1 sequences; advance the draws of `state`.
    With probability epsilon it is any arm of the group, also while another one has no reward
    yet."""
    group = np.searchsorted(rule.thresholds, batch, side="right") - 1
    first = rule.group_first[group]
    arms = rule.group_first[group + 1] - first
    if arms == 1:
        return rule.group_arms[first]
    if _draw(state, key) < rule.epsilon:
        return rule.group_arms[first + min(int(_draw(state, key) * arms), arms - 1)]
    best, largest = -1, -1.0
    for arm in rule.group_arms[first : first + arms]:
        reward = value(rule, state, arm)
        if reward > largest:
            best, largest = arm, reward
    return best


@kernel
def value(rule: BanditRule, state: BanditState, arm: int) -> float:
    """Return the median of the arm's recent rewards, tokens per second; infinity while there is
    none."""
    window = rule.window_of[arm]
    size = state.counts[_SIZE, window] if window >= 0 else 0
    if size == 0:
        return np.inf
    return (state.ordered[window, size // 2] + state.ordered[window, size - 1 - size // 2]) / 2


@kernel
def observe(
    rule: BanditRule, state: BanditState, arm: int, accept_length: float, batch: int, step_s: float
) -> None:
    """Add the reward of a pass: `accept_length` tokens a sequence (with the bonus token, so at
    least 1), mean over the `batch` sequences, in `step_s` seconds of drafting and verifying. (The
    code takes the strategy's median accept_length so far.)"""
    window = rule.window_of[arm]
    if window < 0:
        return
    reward = accept_length * batch / step_s
    ordered, most = state.ordered[window], state.ordered.shape[1]
    size = state.counts[_SIZE, window]
    if size == most:
        # The oldest goes: the ring's next place is its, and those above it in size move down.
        at = state.counts[_OLDEST, window]
        gone = np.searchsorted(ordered[:size], state.arrived[window, at])
        for i in range(gone, size - 1):
            ordered[i] = ordered[i + 1]
        state.counts[_OLDEST, window] = (at + 1) % most
        size -= 1
    else:
        at = size
    state.arrived[window, at] = reward
    i = size
    while i > 0 and ordered[i - 1] > reward:
        ordered[i] = ordered[i - 1]
        i -= 1
    ordered[i] = reward
    state.counts[_SIZE, window] = size + 1


@part
def _draw(state: BanditState, key: int) -> float:
    place = state.counts[0, -1]
    state.counts[0, -1] = place + 1
    return uniform(key, place)
