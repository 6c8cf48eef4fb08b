"""BEG-MAB written readably: what `simrl.speculation.bandit` does in compiled functions, by either rule.

All randomness comes from the selector's `rng`, so tests give both the same draws.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque

import numpy as np

from simrl.speculation.bandit import RENEWED, SIZES
from simrl.speculation.choices import BegMab, Strategy


class BegMabSelector:
    """BEG-MAB at work on one engine: `choose` before a pass, `observe` after it.

    All its randomness comes from `rng`: one `random()` for each choice within a group of several, one `integers(n)` for each
    choice at random, and by the code's rule one `random()` for each pass of an arm of a group of several. A choice learns
    nothing; a pass that was not speculative need not be observed.
    """

    def __init__(self, parameters: BegMab, rng: np.random.Generator) -> None:
        self._epsilon = parameters.epsilon
        self._window = parameters.window
        self._code = parameters.rule == "code"
        self._thresholds = parameters.batch_thresholds
        self._rng = rng
        numbers = sorted(
            {strategy.tokens_to_verify for strategy in parameters.strategies}, reverse=True
        )
        self._groups = [
            [s for s in parameters.strategies if s.tokens_to_verify == number] for number in numbers
        ]
        for group in self._groups if self._code else []:
            group.sort(key=lambda strategy: "_".join(map(str, strategy)))
        self._strategies = frozenset(parameters.strategies)
        self._rewards: dict[tuple[Strategy, int], _RecentRewards] = {}
        self._accepted: dict[tuple[Strategy, int], deque[float]] = {}
        self._medians: dict[Strategy, float] = {}

    def candidates(self, batch: int) -> tuple[Strategy, ...]:
        """The strategies for `batch` sequences, the first of equals first. `ValueError` if batch < 1."""
        if batch < 1:
            raise ValueError(f"a batch of {batch} sequences has no strategy")
        return tuple(self._groups[bisect_right(self._thresholds, batch) - 1])

    def choose(self, batch: int) -> Strategy:
        """The strategy for the next pass over `batch` sequences.

        An arm without a reward is worth more than any other, so such arms go first; not before the draw, though: with
        probability epsilon it is any arm of the group. Of equals, the one that was given first, or (code) the first by name.
        """
        arms = self.candidates(batch)
        if len(arms) == 1:
            return arms[0]
        if self._rng.random() < self._epsilon:
            return arms[int(self._rng.integers(len(arms)))]
        return max(arms, key=lambda arm: self.value(arm, batch))

    def value(self, strategy: Strategy, batch: int) -> float:
        """The median of the arm's recent rewards at this batch, tokens per second; infinite as long as there is none."""
        rewards = self._rewards.get((strategy, self._size(batch)))
        return math.inf if rewards is None else rewards.median

    def _size(self, batch: int) -> int:
        """The smallest batch of the group of batch sizes that has a window of its own; the paper has one group."""
        return SIZES[bisect_right(SIZES, batch) - 1] if self._code else 1

    def observe(self, strategy: Strategy, accept_length: float, batch: int, step_s: float) -> None:
        """What a pass did: `accept_length` tokens a sequence (the bonus token included, so at least 1), mean over the `batch`
        sequences, in `step_s` seconds of drafting and verifying.

        By the code's rule a reward has the median of all accept lengths in the strategy's windows, as it was when last taken:
        it is taken anew with a probability of a tenth, and while it is 0. This pass's is not among them yet.

        Raises `ValueError` for a strategy that is no arm, and for numbers that no pass can have.
        """
        if strategy not in self._strategies:
            raise ValueError(f"{strategy} is none of the strategies")
        if not (batch >= 1 and 1 <= accept_length < math.inf and 0 < step_s < math.inf):
            raise ValueError(
                f"no pass accepts {accept_length} tokens for each of {batch} sequences in {step_s} s"
            )
        if len(self.candidates(batch)) == 1:
            return
        place, tokens = (strategy, self._size(batch)), accept_length
        if self._code:
            if self._rng.random() < RENEWED or not self._medians.get(strategy):
                lengths = [
                    n
                    for (of, _), window in self._accepted.items()
                    if of == strategy
                    for n in window
                ]
                self._medians[strategy] = float(np.median(lengths)) if lengths else 0.0
            tokens = self._medians[strategy]
        if place not in self._rewards:
            self._rewards[place] = _RecentRewards(self._window)
            self._accepted[place] = deque(maxlen=self._window)
        self._rewards[place].add(tokens * batch / step_s)
        self._accepted[place].append(accept_length)


class _RecentRewards:
    """The latest rewards in the order they came and in order of size, so that the median costs no sorting."""

    def __init__(self, window: int) -> None:
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []
        self._window = window

    def add(self, reward: float) -> None:
        if len(self._arrived) == self._window:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        self._arrived.append(reward)
        insort(self._sorted, reward)

    @property
    def median(self) -> float:
        """The middle one, or the mean of the two in the middle."""
        middle = len(self._sorted) // 2
        return (self._sorted[middle] + self._sorted[~middle]) / 2
