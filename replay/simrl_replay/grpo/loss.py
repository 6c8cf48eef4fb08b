"""Objective of an update: group-normalised advantages (GRPO), and the clipped objective, decoupled
as in AReaL.

A token has three policies: π_behaviour generated it, the update stays near π_proximal, π is being
trained. The objective of a token (AReaL, arXiv 2505.24298, §5.2, after Hilton et al.) is

    π_proximal / π_behaviour · min(ratio · A, clip(ratio, 1 − clip_low, 1 + clip_high) · A),    ratio = π / π_proximal

The first factor is a constant to the gradient, and capped. With behaviour = proximal it is 1: GRPO,
and DAPO (arXiv 2503.14476) where clip_high > clip_low. There is no penalty for leaving a reference
model (as in DAPO).

Invariant: pure functions of flat tensors, one value per response token or per response; only
statistics are averaged here. Their results have gradients only if an argument has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from pydantic import BaseModel, Field

_EPSILON = 1e-6  # added to a standard deviation


class LossConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Parameters of the objective. A clip of null does not clip on its side."""

    clip_low: float | None = Field(default=0.2, ge=0, le=1)
    clip_high: float | None = Field(
        default=0.28, ge=0, description="DAPO §3.1: higher than clip_low; PPO: the same"
    )
    normalise_std: bool = Field(
        default=True,
        description="advantages over the standard deviation of their group (GRPO); false: less the mean alone (Dr. GRPO)",
    )
    weight_cap: float | None = Field(
        default=5.0,
        gt=0,
        description="of π_proximal / π_behaviour: truncated importance sampling; null: no cap",
    )


class TokenLosses(NamedTuple):
    """Per token: the loss (the negative objective), whether the clip stopped its gradient, and
    whether its weight was capped. Shapes: (tokens,)."""

    losses: torch.Tensor
    clipped: torch.Tensor
    capped: torch.Tensor


def advantages(
    rewards: Sequence[float], groups: Sequence[int], normalise_std: bool
) -> torch.Tensor:
    """Return the advantage of each response: its reward minus the mean of its group, divided by the
    group's standard deviation if `normalise_std`. Exactly 0 in a group of equal rewards. Shape:
    (responses,)."""
    values, of = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)
    out = torch.zeros_like(values)
    for group in of.unique():
        own = of == group
        reward = values[own]
        if reward.min() < reward.max():
            scale = reward.std(correction=0) + _EPSILON if normalise_std else 1.0
            out[own] = (reward - reward.mean()) / scale
    return out.float()


def token_losses(
    log_probs: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    config: LossConfig,
) -> TokenLosses:
    """Return the loss of each token, from its log-probs under the three policies and the advantage
    of its response, all of shape (tokens,). Only `log_probs` gets gradients."""
    proximal, behaviour = proximal.detach(), behaviour.detach()
    ratio = (log_probs - proximal).exp()
    lowest = None if config.clip_low is None else 1 - config.clip_low
    highest = None if config.clip_high is None else 1 + config.clip_high
    bounded = ratio if lowest is None and highest is None else ratio.clamp(lowest, highest)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    weight = (proximal - behaviour).exp()
    capped = (
        torch.zeros_like(weight, dtype=torch.bool)
        if config.weight_cap is None
        else weight > config.weight_cap
    )
    if config.weight_cap is not None:
        weight = weight.clamp(max=config.weight_cap)
    return TokenLosses(-weight * surrogate, bounded * advantages < ratio * advantages, capped)


def kl(log_probs: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Estimate KL(of ‖ π) at each token drawn by `of`: r − 1 − log r with r = π / of, never
    negative (Schulman's k3). Both arguments are log-probs. Shape: (tokens,)."""
    difference = log_probs - of
    return difference.exp() - 1 - difference
