"""The acceptance of a draft tree, level by level: the tree is grown and pruned as in EAGLE-2, on
assumed confidences.

    strategy (draft_depth, topk, tokens_to_verify): the `topk` most probable nodes of a level get `topk` children each; of all
    grown nodes, the tokens_to_verify - 1 most probable are verified (the last token of the sequence is verified, too).

Invariant: the drafter's confidence is right on average: of nodes of probability q, a share q is
accepted. So the first j levels are accepted with the sum of the probabilities of the kept nodes of
level j, as no two of them can both be right.

`ModelAcceptance.by_position` is the mean probability of the first choice at each level. Two more
numbers describe a drafter: the chance of the next choice where all before it are wrong, and how
much the confidence differs between places.

What engines log of drafts is turned into an acceptance here, too (`with_positions`):

    accept_length           tokens a pass with drafts of `draft_shape` (steps, top-k, tokens to verify): SGLang's accept length
    accepted_per_position   share of drafts whose first j tokens were accepted: vLLM's num_accepted_tokens_per_pos / num_drafts
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from simrl.errors import InputError, refuse
from simrl.profile.compiled import kernel
from simrl.speculation.acceptance import MOST_PROBABLE, ModelAcceptance
from simrl.speculation.choices import Strategy
from simrl.speculation.matching import Floats
from simrl.trace.draws import uniforms
from simrl.validation import Model, explain

# Assumed: with these two, trees of 12 levels and 64 tokens whose acceptance gives TLT's Table 1 at
# topk 8 (accept length 8.67) give it at topk 4 to 12 within 1 %; at 16 it is 3 % too long, as more
# branches never harm a drafter that knows what it knows. The table names neither its depth nor its
# tokens.
NEXT_CHOICE = 0.3  # probability that the 2nd, 3rd, … choice is right where all before it are wrong
# sum of the parameters of the first choice's Beta distribution: larger, more alike places
CONCENTRATION = 2.0

TREES = 512  # grown for one strategy and averaged; at each place, each has another quantile of the confidence
MOST_NODES = 100_000  # of one tree while it grows
LEAST_PROBABLE = 1e-6  # of a token of a draft, where its accept length is known
_KEY = 0


def tree_log_acceptances(
    acceptance: ModelAcceptance,
    strategy: Strategy,
    next_choice: float = NEXT_CHOICE,
    concentration: float = CONCENTRATION,
) -> Floats:
    """Return -ln P(the first j levels are accepted) at hardness 1 for j = 1 … draft_depth, rising;
    shape (draft_depth,).

    Infinite from the first level on of which no tree keeps a node. It replaces
    `ModelAcceptance.log_acceptances` in `accepted_tokens`; hardness then acts on levels. Every
    strategy gets equal draws, so that strategies compare without luck. Raise `InputError` for trees
    of more than `MOST_NODES`."""
    if strategy.draft_depth * strategy.topk**2 > MOST_NODES:
        raise InputError(
            f"draft tree {tuple(strategy)}: depth × topk² is more than {MOST_NODES}; draft less"
        )
    from scipy.special import betaincinv  # takes 0.1 s to import

    means = np.exp(-np.diff(acceptance.log_acceptances(strategy.draft_depth), prepend=0.0))
    middles = (np.arange(TREES) + 0.5) / TREES
    quantiles = betaincinv(
        concentration * means[:, None], concentration * (1 - means[:, None]), middles[None, :]
    )
    quantiles *= (means / quantiles.mean(axis=1))[
        :, None
    ]  # so that the mean of the quantiles is the level's
    branches = np.ogrid[: strategy.draft_depth, : strategy.topk, :TREES]
    places = np.argsort(uniforms(_KEY, *branches), axis=2)
    reached = _levels_reached(
        np.minimum(quantiles, 1.0), places, strategy.tokens_to_verify, next_choice
    )
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log(reached), dtype=np.float64)


def accept_length(log_acceptances: Floats) -> float:
    """Return the tokens of a pass, with the one that the pass itself yields, at hardness 1."""
    return 1.0 + float(np.exp(-log_acceptances).sum())


@kernel
def _levels_reached(
    quantiles: Floats, places: NDArray[np.int64], tokens_to_verify: int, next_choice: float
) -> Floats:
    """Return P(the first j levels are accepted), the mean over the trees; shape (depth,)."""
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
                best = np.argmax(children[:born])
                beam[i] = children[best]
                children[best] = -1.0
        for _ in range(min(tokens_to_verify - 1, grown)):
            best = np.argmax(scores[:grown])
            reached[levels[best]] += scores[best]
            scores[best] = -1.0
    return reached / trees


class Logged(Model, extra="allow"):
    """An acceptance as a scenario has it, with what an engine logs of drafts."""

    accepted_per_position: (
        Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)] | None
    ) = None
    accept_length: float | None = None
    draft_shape: tuple[  # small enough that its trees are grown in seconds
        Annotated[int, Field(ge=1, le=32)],
        Annotated[int, Field(ge=1, le=16)],
        Annotated[int, Field(ge=1, le=128)],
    ] = (3, 1, 4)


def with_positions(acceptance: Any) -> Any:
    """Return an acceptance as a scenario has it, with `by_position` in place of what engines log.
    Raise `ValueError` for values that no engine logs, and for an accept length that drafts of its
    shape cannot have."""
    if not isinstance(acceptance, dict):
        return acceptance
    try:
        logged = Logged.model_validate(acceptance)
    except ValidationError as error:
        raise ValueError(explain(error, Logged, "an acceptance")[1]) from error
    parts, length = logged.model_extra or {}, logged.accept_length
    shares = [1.0, *(logged.accepted_per_position or ())]
    refuse(
        (
            ("by_position" in parts) + (len(shares) > 1) + (length is not None) > 1,
            "by_position, accepted_per_position and accept_length say the same; give one of them",
        ),
        (
            shares != sorted(shares, reverse=True),
            f"accepted_per_position is {shares[1:]}: no more drafts can have their first 2 tokens accepted than their first; "
            "give shares that do not rise",
        ),
        error=ValueError,
    )
    rates = (
        [after / before for before, after in pairwise(shares)]
        if length is None
        else [probability(length, Strategy(*logged.draft_shape))]
    )
    bounded = [min(max(rate, LEAST_PROBABLE), MOST_PROBABLE) for rate in rates]
    return {**parts, "by_position": bounded} if rates else acceptance


def probability(tokens: float, shape: Strategy) -> float:
    """Return the probability of each draft token, if all before it are right, with which drafts of
    a shape have an accept length of `tokens` (the pass's own token counts)."""

    def length(p: float) -> float:
        acceptance = ModelAcceptance(by_position=(p,))
        chain = acceptance.log_acceptances(shape.draft_depth)
        return accept_length(chain if shape.topk == 1 else tree_log_acceptances(acceptance, shape))

    least, most = length(LEAST_PROBABLE), length(MOST_PROBABLE)
    refuse(
        (
            not least <= tokens <= most,
            f"accept_length is {tokens:g}: drafts of draft_shape {list(shape)} have {least:.3g} to {most:.3g} tokens a pass; "
            "correct one of them",
        ),
        error=ValueError,
    )
    from scipy.optimize import brentq  # takes 0.3 s to import

    return float(brentq(lambda p: length(p) - tokens, LEAST_PROBABLE, MOST_PROBABLE))
