"""The acceptance of a drafter from what engines log of it.

accept_length           tokens a pass with drafts of `draft_shape` (steps, top-k, tokens to verify): SGLang's accept length
accepted_per_position   share of drafts whose first j tokens were accepted: vLLM's num_accepted_tokens_per_pos / num_drafts
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from simrl.errors import refuse
from simrl.speculation.acceptance import MOST_PROBABLE, ModelAcceptance
from simrl.speculation.choices import Strategy
from simrl.speculation.trees import accept_length, tree_log_acceptances

LEAST_PROBABLE = 1e-6


def with_positions(acceptance: Any) -> Any:
    """Return an acceptance as a scenario has it, with `by_position` in place of what engines log.
    Raise `ValueError` for an accept length that drafts of its shape cannot have."""
    if not isinstance(acceptance, dict):
        return acceptance
    parts, rates = dict(acceptance), []
    if shares := parts.pop("accepted_per_position", None):
        rates = [after / before for before, after in pairwise([1.0, *shares])]
    if length := parts.pop("accept_length", None):
        rates = [probability(length, Strategy(*parts.pop("draft_shape", (3, 1, 4))))]
    bounded = [min(max(rate, LEAST_PROBABLE), MOST_PROBABLE) for rate in rates]
    return parts | ({"by_position": bounded} if rates else {})


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
