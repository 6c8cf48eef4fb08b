"""Which speculative decoding strategy to use next, learnt while decoding: TLT's BEG-MAB (Taming the Long Tail, §5.2).

Invariant: a batch size has one bucket, a bucket one group of strategies, all of which verify the same number of tokens; what is
chosen for a batch is always of its bucket's group. The larger the batch, the fewer tokens are verified (TLT, Table 2).

Within a group, an ε-greedy bandit: now and then a strategy at random, else the one whose rewards have the largest median over a
sliding window. The reward of a pass is its tokens per second. Where the paper is silent, this follows the code (fastrl).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

Tokens = Annotated[int, Field(ge=1, le=4096)]

# Batch sizes at which the public code begins to learn anew: each to 31, every 8th to 127, every 32nd to 256.
BATCH_GROUPS = (*range(1, 32), *range(32, 128, 8), *range(128, 257, 32))


class Strategy(NamedTuple):
    """An arm: a draft tree of `draft_depth` levels, `topk` branches at each node, of which the most probable
    `tokens_to_verify` are verified."""

    draft_depth: Tokens
    topk: Tokens
    tokens_to_verify: Tokens


class BegMab(BaseModel):
    """Parameters of BEG-MAB. Strategies that verify equally many tokens are a group; the groups, from the most tokens to the
    fewest, are matched to the buckets of batch sizes, from the smallest to the largest."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    strategies: tuple[Strategy, ...] = Field(min_length=1, description="(draft_depth, topk, tokens_to_verify) each")
    batch_thresholds: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 2, 5, 21),
        description="the smallest batch of each bucket; the default (code) is 1, 2-4, 5-20, >= 21",
    )
    epsilon: float = Field(default=0.1, ge=0, le=1, description="probability of a strategy at random (code)")
    window: int = Field(default=300, ge=1, le=1_000_000, description="rewards of an arm that count, the latest (code)")
    pool_batches: bool = Field(
        default=True,
        description="one window an arm (paper); false: one for each arm and batch size (code: sizes from 32 on in steps of "
        "8, from 128 on of 32), so that rewards, which grow with the batch, are compared at like sizes only",
    )

    @model_validator(mode="after")
    def _every_bucket_has_its_group(self) -> BegMab:
        twice = [strategy for i, strategy in enumerate(self.strategies) if strategy in self.strategies[:i]]
        if twice:
            raise ValueError(f"strategy {tuple(twice[0])} is there twice; give each once")
        first, *more = self.batch_thresholds or (0,)
        if first != 1 or any(a >= b for a, b in zip(self.batch_thresholds, more, strict=False)):
            raise ValueError(f"batch_thresholds {self.batch_thresholds} must begin with 1 and rise")
        groups = len({strategy.tokens_to_verify for strategy in self.strategies})
        if groups != len(self.batch_thresholds):
            raise ValueError(
                f"the strategies verify {groups} different numbers of tokens, and batch_thresholds makes "
                f"{len(self.batch_thresholds)} buckets; let there be one bucket for each number"
            )
        return self


class BegMabSelector:
    """BEG-MAB at work on one engine: `choose` before a pass, `observe` after it.

    All its randomness comes from `rng`: one `random()` for each choice within a group of several, one `integers(n)` for each
    choice at random. A choice learns nothing; a pass that was not speculative need not be observed.
    """

    def __init__(self, parameters: BegMab, rng: np.random.Generator) -> None:
        self._epsilon = parameters.epsilon
        self._pool_batches = parameters.pool_batches
        self._window = parameters.window
        self._thresholds = parameters.batch_thresholds
        self._rng = rng
        numbers = sorted({strategy.tokens_to_verify for strategy in parameters.strategies}, reverse=True)
        self._groups = [[s for s in parameters.strategies if s.tokens_to_verify == number] for number in numbers]
        self._strategies = frozenset(parameters.strategies)
        self._rewards: dict[tuple[Strategy, int], _RecentRewards] = {}

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
        rewards = self._rewards.get((strategy, self._place(batch)))
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
            raise ValueError(f"no pass accepts {accept_length} tokens for each of {batch} sequences in {step_s} s")
        place = (strategy, self._place(batch))
        if place not in self._rewards:
            self._rewards[place] = _RecentRewards(self._window)
        self._rewards[place].add(accept_length * batch / step_s)

    def _place(self, batch: int) -> int:
        return 0 if self._pool_batches else bisect_right(BATCH_GROUPS, batch)


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
