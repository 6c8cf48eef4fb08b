"""How much of a draft a model drafter's target accepts, where it is a model rather than recorded tokens.

    P(the first a tokens are accepted) = (p_1 · p_2 · … · p_a) ** hardness

`by_position` has the p. The hardness of a response is 1 in the middle: it varies between responses, grows with length where
long ones are harder, and grows as the policy moves away from the drafter. Proportional hazards, in the words of statistics: a
hardness of 3 turns 0.8 into 0.8³. One draw a pass decides, and it belongs to (seed, sample, tokens so far): systems that are
compared meet the same luck.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from scipy.special import ndtri

from simrl.speculation.draws import mixed, uniform

Floats = NDArray[np.float64]
Probability = Annotated[float, Field(gt=0, lt=1)]
Verification = Literal["exact_match", "rejection_sampling"]

MOST_PROBABLE = 0.999  # that a token is accepted, where a factor raises it
# Places of draws under a sample's key; those of passes are the tokens so far, never negative.
_HARDNESS = -1


class ModelAcceptance(BaseModel):
    """The acceptance of a drafter that is a model: a small model of the family, an EAGLE-type head."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    by_position: tuple[Probability, ...] = Field(
        min_length=1,
        description="probability that the 1st, 2nd, … draft token is accepted if all before it are; the last one repeats",
    )
    spread: float = Field(default=0.0, ge=0, le=10, description="standard deviation of ln hardness among responses")
    length_exponent: float = Field(
        default=0.0, ge=-10, le=10, description="hardness grows with (response tokens / typical_tokens) to this power"
    )
    typical_tokens: float = Field(default=2000.0, gt=0, description="a response of this length has hardness 1")
    drift_per_update: float = Field(
        default=0.0, ge=0, le=10, description="ln hardness that a policy update adds for a drafter that is not trained"
    )
    most_drift: float = Field(default=1.0, ge=0, le=10, description="ln hardness that such updates add at most")
    verification: Verification = Field(
        default="rejection_sampling", description="the rule under which by_position was found"
    )
    kind: Literal["measured", "digitised", "assumed"] = Field(
        default="assumed", description="how the numbers are known"
    )
    source: str = Field(default="the scenario", description="where the numbers come from")

    def times(self, factor: float) -> ModelAcceptance:
        """With every probability multiplied, as far as one can be."""
        if factor == 1.0:
            return self
        by_position = tuple(min(p * factor, MOST_PROBABLE) for p in self.by_position)
        source = f"{self.source}; × {factor:g} (acceptance_factor)"
        return self.model_copy(update={"by_position": by_position, "source": source})

    def log_acceptances(self, most_tokens: int) -> Floats:
        """-ln P(the first j tokens are accepted) at hardness 1 for j = 1 … most_tokens, rising; shape (most_tokens,)."""
        p = [self.by_position[min(j, len(self.by_position) - 1)] for j in range(most_tokens)]
        return np.cumsum(-np.log(p))

    def hardness(self, key: int, response_tokens: int) -> float:
        """Of the response with this key, before drift."""
        ln = self.length_exponent * math.log(response_tokens / self.typical_tokens)
        if self.spread:
            ln += self.spread * float(ndtri(uniform(key, _HARDNESS)))
        return math.exp(min(max(ln, -20.0), 20.0))

    def drift(self, updates: float) -> float:
        """The factor of hardness after so many policy updates since the drafter was last trained."""
        return math.exp(min(self.drift_per_update * updates, self.most_drift))


def sample_key(seed: int, prompt_id: int, epoch: int, sample: int) -> int:
    """The key of a response's draws: the same in all systems, whatever number the sample has there."""
    key = mixed(seed, prompt_id)
    return int(mixed(mixed(key, epoch), sample))


@njit(cache=True)
def accepted_tokens(key: int, generated: int, hardness: float, log_acceptances: Floats, drafted: int) -> int:
    """How many of `drafted` tokens are accepted when a response has `generated` tokens."""
    draw = uniform(key, generated)
    accepted = 0
    while accepted < drafted and draw < np.exp(-hardness * log_acceptances[accepted]):
        accepted += 1
    return accepted
