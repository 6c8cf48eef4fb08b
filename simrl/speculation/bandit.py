"""The choice of the next speculative decoding strategy, learnt while decoding: TLT's BEG-MAB
(Taming the Long Tail, §5.2).

Invariant: a batch size has one bucket, a bucket one group of strategies, all of which verify
equally many tokens; what is chosen for a batch is always of its bucket's group. The larger the
batch, the fewer tokens are verified (TLT, Table 2).

Within a group, an ε-greedy bandit: now and then a strategy at random, else the one whose rewards
have the largest median over a sliding window. The reward of a pass is its tokens per second. An arm
without a reward is worth more than any other, so such arms go first.

The paper and its public code (fastrl@bce3df7, eagle_mab.py and eagle_worker.py) differ, and
`BegMab.rule` names whose rule holds:

                    paper                       code
    a window        of an arm                   of an arm at a group of batch sizes (`SIZES`)
    accept length   of the pass                 median over all windows of the arm, taken anew in a
                                                tenth of the passes; 0 for the arm's first pass
    of equal arms   the one given first         the first by name, "10_8_64" before "8_4_16"

`choose` before a pass, `observe` after it, compiled; `tests/references/bandit.py` has both rules,
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
# The smallest batch of each group of batch sizes that has windows of its own, in the code.
SIZES = (*range(1, 32), *range(32, 128, 8), *range(128, 257, 32))
RENEWED = 0.1  # probability with which a pass takes the median of accept lengths anew, in the code


class BanditRule(NamedTuple):
    """The parameters. `group_first[g] … group_first[g + 1]` are the places in `group_arms` of the
    arms for batches from `thresholds[g]` on, the first of equals first. `window_of[arm, i]` is an
    arm's window of rewards for batches from `sizes[i]` on, -1 for an arm that needs none. `median`:
    rewards are of the arm's median accept length."""

    epsilon: float
    thresholds: Ints
    group_first: Ints
    group_arms: Ints
    sizes: Ints
    window_of: Ints
    median: bool


class BanditState(NamedTuple):
    """The latest rewards of each window in the order they came (a ring) and by size, and the accept
    lengths of these passes; shape (windows, window). `medians`: of each arm's accept lengths."""

    arrived: Floats
    ordered: Floats
    accepted: Floats
    medians: Floats
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
    code = parameters.rule == "code"
    sizes = np.array(SIZES if code else (1,), dtype=np.int64)
    thresholds = np.array(parameters.batch_thresholds, dtype=np.int64)
    window_of = np.full((len(parameters.strategies), sizes.size), -1, dtype=np.int64)
    firsts = np.searchsorted(sizes, thresholds, side="right") - 1
    lasts = [*(np.searchsorted(sizes, thresholds[1:] - 1, side="right") - 1), sizes.size - 1]
    windows = 0
    for group, first, last in zip(groups, firsts, lasts, strict=True):
        if code:
            group.sort(key=lambda arm: "_".join(map(str, parameters.strategies[arm])))
        for arm in group if len(group) > 1 else ():
            # A batch may have shrunk out of its bucket when its pass is over.
            window_of[arm] = windows + np.clip(np.arange(sizes.size), first, last) - first
            windows += last - first + 1
    group_arms = np.array([arm for group in groups for arm in group], dtype=np.int64)
    group_first = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    return BanditRule(
        parameters.epsilon, thresholds, group_first, group_arms, sizes, window_of, code
    )


def bandit_state(rule: BanditRule, window: int) -> BanditState:
    """Return the state with nothing learnt and nothing drawn; `window` is `BegMab.window`."""
    windows = int(rule.window_of.max()) + 1
    rewards, medians = np.zeros((windows, window)), np.zeros(len(rule.window_of))
    accepted = np.zeros((windows * rule.median, window))
    counts = np.zeros((2, windows + 1), dtype=np.int64)
    return BanditState(rewards, rewards.copy(), accepted, medians, counts)


def bandit_states(rule: BanditRule, window: int, rows: int) -> BanditState:
    """Return `bandit_state` for each of some engines: arrays with a leading axis of `rows`."""
    return BanditState._make(np.stack([array] * rows) for array in bandit_state(rule, window))


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
        reward = value(rule, state, arm, batch)
        if reward > largest:
            best, largest = arm, reward
    return best


@kernel
def value(rule: BanditRule, state: BanditState, arm: int, batch: int) -> float:
    """Return the median of the arm's recent rewards at a batch, tokens per second; infinity while
    there is none."""
    window = _window(rule, arm, batch)
    size = state.counts[_SIZE, window] if window >= 0 else 0
    if size == 0:
        return np.inf
    return (state.ordered[window, size // 2] + state.ordered[window, size - 1 - size // 2]) / 2


@kernel
def observe(
    rule: BanditRule,
    state: BanditState,
    key: int,
    arm: int,
    accept_length: float,
    batch: int,
    step_s: float,
) -> None:
    """Add the reward of a pass: `accept_length` tokens a sequence (with the bonus token, so at
    least 1), mean over the `batch` sequences, in `step_s` seconds of drafting and verifying. With
    the code's rule, advance the draws of `state`."""
    window, tokens = _window(rule, arm, batch), accept_length
    if window < 0:
        return
    if rule.median:
        if _draw(state, key) < RENEWED or state.medians[arm] == 0.0:
            state.medians[arm] = _median_accepted(rule, state, arm)
        tokens = state.medians[arm]
    reward = tokens * batch / step_s
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
    if rule.median:
        state.accepted[window, at] = accept_length
    i = size
    while i > 0 and ordered[i - 1] > reward:
        ordered[i] = ordered[i - 1]
        i -= 1
    ordered[i] = reward
    state.counts[_SIZE, window] = size + 1


@part
def _window(rule: BanditRule, arm: int, batch: int) -> int:
    return rule.window_of[arm, np.searchsorted(rule.sizes, batch, side="right") - 1]


@part
def _median_accepted(rule: BanditRule, state: BanditState, arm: int) -> float:
    """Return the median over all windows of an arm; 0 while it has no pass."""
    first, end = rule.window_of[arm, 0], rule.window_of[arm, -1] + 1
    lengths, n = np.zeros(state.counts[_SIZE, first:end].sum()), 0
    for window in range(first, end):
        for i in range(state.counts[_SIZE, window]):
            lengths[n] = state.accepted[window, i]
            n += 1
    return np.median(lengths) if n > 0 else 0.0


@part
def _draw(state: BanditState, key: int) -> float:
    place = state.counts[0, -1]
    state.counts[0, -1] = place + 1
    return uniform(key, place)
