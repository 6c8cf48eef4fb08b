"""How much of a draft tree is accepted, level by level: the tree is grown and pruned as EAGLE-2 does it, on assumed
confidences.

    strategy (draft_depth, topk, tokens_to_verify): of the most probable `topk` nodes of a level, `topk` children each; of all
    that grew, the most probable tokens_to_verify - 1 are verified (the last token of the sequence is verified, too).

Invariant: what a drafter believes is right on average: a node of probability q is accepted in a share q of the cases. So the
first j levels are accepted with the sum of the probabilities of the nodes of level j that are kept, as no two of them can
both be right.

`ModelAcceptance.by_position` gives the mean probability of the first choice at each level. Two numbers more say what a tree
lives on: the chance of the next choice where all choices before it are wrong, and how much the confidence differs between
places: a tree grows deep where the drafter is sure, and wide where it is not.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from scipy.special import betaincinv

from simrl.errors import InputError
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.bandit import Strategy
from simrl.speculation.draws import mixed, uniform

Floats = NDArray[np.float64]

TREES = 512  # grown for one strategy; what they reach is averaged. At each place each has another quantile of the confidence
MOST_NODES = 100_000  # of one tree while it grows
_KEY = 0


class TreeShape(BaseModel):
    """What a drafter believes beside its first choice. Assumed: with these defaults, trees of 12 levels and 64 tokens whose
    acceptance gives TLT's Table 1 at topk 8 (accept length 8.67) give it at topk 4 to 12 within 1 %; at 16 it is 3 % too
    long, as more branches never harm a drafter that knows what it knows. The table names neither its depth nor its tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    next_choice: float = Field(
        default=0.3,
        gt=0,
        lt=1,
        description="probability that the 2nd, 3rd, … choice is right where all before it are wrong",
    )
    concentration: float = Field(
        default=2.0,
        gt=0,
        le=1e6,
        description="how alike places are: the first choice's probability is Beta distributed, and its parameters sum to this",
    )


def tree_log_acceptances(acceptance: ModelAcceptance, strategy: Strategy, shape: TreeShape | None = None) -> Floats:
    """-ln P(the first j levels are accepted) at hardness 1 for j = 1 … draft_depth, rising; shape (draft_depth,).

    Infinite from the first level on of which no tree keeps a node. It takes the place of `ModelAcceptance.log_acceptances` in
    `accepted_tokens`; the hardness of a response then acts on levels, as it does on tokens there. The same trees' worth of
    draws for every strategy, so that strategies compare without luck. Raises `InputError` for trees of more than
    `MOST_NODES`.
    """
    shape = shape or TreeShape()
    if strategy.draft_depth * strategy.topk**2 > MOST_NODES:
        raise InputError(f"draft tree {tuple(strategy)}: depth × topk² is more than {MOST_NODES}; draft less")
    means = np.exp(-np.diff(acceptance.log_acceptances(strategy.draft_depth), prepend=0.0))
    middles = (np.arange(TREES) + 0.5) / TREES
    quantiles = betaincinv(
        shape.concentration * means[:, None], shape.concentration * (1 - means[:, None]), middles[None, :]
    )
    quantiles *= (means / quantiles.mean(axis=1))[:, None]  # the mean of so many quantiles, too, is the level's
    places = np.argsort(_draws(strategy.draft_depth, strategy.topk), axis=2)
    reached = _levels_reached(np.minimum(quantiles, 1.0), places, strategy.tokens_to_verify, shape.next_choice)
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log(reached), dtype=np.float64)


def accept_length(log_acceptances: Floats) -> float:
    """Tokens of a pass, the one that it yields besides included, at hardness 1."""
    return 1.0 + float(np.exp(-log_acceptances).sum())


@njit(cache=True)
def _draws(depth: int, topk: int) -> Floats:
    """A draw for each place of each tree; shape (depth, topk, TREES)."""
    draws = np.empty((depth, topk, TREES))
    for level in range(depth):
        for parent in range(topk):
            key = mixed(mixed(_KEY, level), parent)
            for tree in range(TREES):
                draws[level, parent, tree] = uniform(key, tree)
    return draws


@njit(cache=True)
def _levels_reached(quantiles: Floats, places: NDArray[np.int64], tokens_to_verify: int, next_choice: float) -> Floats:
    """P(the first j levels are accepted), the mean over the trees; shape (depth,)."""
    depth, topk, trees = places.shape
    reached = np.zeros(depth)
    most = topk + (depth - 1) * topk * topk
    scores, levels = np.zeros(most), np.zeros(most, dtype=np.int64)
    beam, children = np.zeros(topk), np.zeros(topk * topk)
    for tree in range(trees):
        grown, parents = 0, 1
        beam[0] = 1.0
        for level in range(depth):
            for parent in range(parents):
                first = quantiles[level, places[level, parent, tree]]
                # The second choice is no more probable than the first.
                chance = min(next_choice, first / (1.0 - first)) if first < 1.0 else next_choice
                left, share = 1.0 - first, first
                for rank in range(topk):
                    children[parent * topk + rank] = beam[parent] * share
                    share = left * chance
                    left -= share
            born = parents * topk
            scores[grown : grown + born] = children[:born]
            levels[grown : grown + born] = level
            grown += born
            parents = topk
            for i in range(topk):
                best = _largest(children, born)
                beam[i] = children[best]
                children[best] = -1.0
        for _ in range(min(tokens_to_verify - 1, grown)):
            best = _largest(scores, grown)
            reached[levels[best]] += scores[best]
            scores[best] = -1.0
    return reached / trees


@njit(cache=True)
def _largest(values: Floats, n: int) -> int:
    """Where the largest of the first n stands; of equals the first."""
    best = 0
    for i in range(1, n):
        if values[i] > values[best]:
            best = i
    return best
