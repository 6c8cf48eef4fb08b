"""Acceptance of a model drafter's tokens, where it is a model and not recorded tokens.

    P(the first a tokens are accepted) = (p_1 · p_2 · … · p_a) ** hardness

`by_position` are the p. The hardness of a typical response is 1: it varies between responses, grows
with length where long ones are harder, and grows as the policy moves away from the drafter.
Statistics calls this proportional hazards: a hardness of 3 turns 0.8 into 0.8³. One draw a pass
decides, keyed by (seed, sample, tokens so far), so that compared systems have equal luck.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from simrl.profile.compiled import inlined, kernel
from simrl.speculation.draws import mixed, uniform
from simrl.speculation.matching import Floats
from simrl.validation import Model

Probability = Annotated[float, Field(gt=0, lt=1)]
Verification = Literal["exact_match", "rejection_sampling"]
InputKind = Literal["measured", "digitised", "assumed"]

MOST_PROBABLE = 0.999  # bound on a probability that a factor raises
_HARDNESS = (
    -1
)  # place of this draw under a sample's key; a pass draws at its tokens so far, never negative


class ModelAcceptance(Model):
    """The acceptance of a model drafter: a small model of the family, or an EAGLE-type head."""

    by_position: tuple[Probability, ...] = Field(
        min_length=1,
        description="probability that the 1st, 2nd, … draft token is accepted if all before it are; the last value repeats",
    )
    spread: float = Field(
        default=0.0, ge=0, le=10, description="standard deviation of ln hardness among responses"
    )
    length_exponent: float = Field(
        default=0.0,
        ge=-10,
        le=10,
        description="hardness grows with (response tokens / typical_tokens) to this power",
    )
    typical_tokens: float = Field(
        default=2000.0, gt=0, description="a response of this length has hardness 1"
    )
    drift_per_update: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="ln hardness that a policy update adds for a drafter that is not trained",
    )
    most_drift: float = Field(
        default=1.0, ge=0, le=10, description="maximum ln hardness that policy updates add"
    )
    verification: Verification = Field(
        default="rejection_sampling",
        description="the verification rule under which by_position was measured",
    )
    kind: InputKind = Field(default="assumed", description="how the numbers are known")
    source: str = Field(default="the scenario", description="where the numbers come from")

    def times(self, factor: float) -> ModelAcceptance:
        """Return the acceptance with every probability multiplied by `factor`, up to
        `MOST_PROBABLE`."""
        if factor == 1.0:
            return self
        by_position = tuple(min(p * factor, MOST_PROBABLE) for p in self.by_position)
        source = f"{self.source}; × {factor:g} (acceptance_factor)"
        return self.model_copy(update={"by_position": by_position, "source": source})

    def log_acceptances(self, most_tokens: int) -> Floats:
        """Return -ln P(the first j tokens are accepted) at hardness 1 for j = 1 … most_tokens,
        rising; shape (most_tokens,)."""
        p = [self.by_position[min(j, len(self.by_position) - 1)] for j in range(most_tokens)]
        return np.cumsum(-np.log(p))

    def hardness(self, key: int, response_tokens: int) -> float:
        """Return the hardness of the response with this key, before drift."""
        ln = self.length_exponent * math.log(response_tokens / self.typical_tokens)
        if self.spread:
            from scipy.special import ndtri  # takes 0.1 s to import

            ln += self.spread * float(ndtri(uniform(key, _HARDNESS)))
        return math.exp(min(max(ln, -20.0), 20.0))

    def drift(self, updates: float) -> float:
        """Return the factor of hardness after this number of policy updates since the drafter was
        last trained."""
        return math.exp(min(self.drift_per_update * updates, self.most_drift))


@kernel
def sample_key(seed: int, prompt_id: int, epoch: int, sample: int) -> int:
    """Return the key of a response's draws: equal in all systems, whatever number the sample has
    there."""
    return mixed(mixed(mixed(seed, prompt_id), epoch), sample)


@inlined
def levels_accepted(luck: float, hardness: float, log_acceptances: Floats, drafted: int) -> int:
    """Return how many of `drafted` levels are accepted with a draw of which `luck` is -ln."""
    accepted = 0
    while accepted < drafted and luck > hardness * log_acceptances[accepted]:
        accepted += 1
    return accepted


@kernel
def accepted_tokens(
    key: int, generated: int, hardness: float, log_acceptances: Floats, drafted: int
) -> int:
    """Return how many of `drafted` tokens are accepted when a response has `generated` tokens."""
    return levels_accepted(-np.log(uniform(key, generated)), hardness, log_acceptances, drafted)
