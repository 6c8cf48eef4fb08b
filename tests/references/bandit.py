"""BEG-MAB written readably: what `simrl.speculation.bandit` does in compiled functions.

All randomness comes from the selector's `rng`, so tests give both the same draws.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque

import numpy as np

from simrl.speculation.choices import BegMab, Strategy


class BegMabSelector:
    """BEG-MAB at work on one engine: `choose` before a pass, `observe` after it.

    All its randomness comes from `rng`: one `random()` for each choice within a group of several, one `integers(n)` for each
    choice at random. A choice learns nothing; a pass that was not speculative need not be observed.
    """

    def __init__(self, parameters: BegMab, rng: np.random.Generator) -> None:
        self._epsilon = parameters.epsilon
        self._window = parameters.window
        self._thresholds = parameters.batch_thresholds
        self._rng = rng
        numbers = sorted(
            {strategy.tokens_to_verify for strategy in parameters.strategies}, reverse=True
        )
        self._groups = [
            [s for s in parameters.strategies if s.tokens_to_verify == number] for number in numbers
        ]
        self._strategies = frozenset(parameters.strategies)
        self._rewards: dict[Strategy, _RecentRewards] = {}

    def candidates(self, batch: int) -> tuple[Strategy, ...]:
        """The strategies for `batch` sequences, in the order in which they were given. `ValueError` if batch < 1."""
        if batch < 1:
            raise ValueError(f"a batch of {batch} sequences has no strategy")
        return tuple(self._groups[bisect_right(self._thresholds, batch) - 1])

    def choose(self, batch: int) -> Strategy:
        """The strategy for the next pass over `batch` sequences.

        An arm without a reward is worth more than any other, so such arms go first; not before the draw, though: with
        probability epsilon it is any arm of the group. Of equals, the one that was given first.
        """
        arms = self.candidates(batch)
        if len(arms) == 1:
            return arms[0]
        if self._rng.random() < self._epsilon:
            return arms[int(self._rng.integers(len(arms)))]
        return max(arms, key=lambda arm: self.value(arm, batch))

    def value(self, strategy: Strategy, batch: int) -> float:
        """The median of the arm's recent rewards, tokens per second; infinite as long as there is none."""
        rewards = self._rewards.get(strategy)
        return math.inf if rewards is None else rewards.median

    def observe(self, strategy: Strategy, accept_length: float, batch: int, step_s: float) -> None:
        """What a pass did: `accept_length` tokens a sequence (the bonus token included, so at least 1), mean over the `batch`
        sequences, in `step_s` seconds of drafting and verifying.

        The code gives as accept_length the median of all that the strategy reached so far, at any batch size, which leaves
        only the time to vary; its caller may do so here.

        Raises `ValueError` for a strategy that is no arm, and for numbers that no pass can have.
        """
        if strategy not in self._strategies:
            raise ValueError(f"{strategy} is none of the strategies")
        if not (batch >= 1 and 1 <= accept_length < math.inf and 0 < step_s < math.inf):
            raise ValueError(
                f"no pass accepts {accept_length} tokens for each of {batch} sequences in {step_s} s"
            )
        if strategy not in self._rewards:
            self._rewards[strategy] = _RecentRewards(self._window)
        self._rewards[strategy].add(accept_length * batch / step_s)


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
