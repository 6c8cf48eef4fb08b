"""What a scenario says of speculation: how much is accepted where it cannot be measured from tokens, and who builds indexes.

Invariant: an input that nobody gave is a stated default, and says so (`kind: assumed`); which were used is in every result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from simrl.errors import InputError, meant
from simrl.hardware import MODELS
from simrl.speculation.acceptance import ModelAcceptance, Verification
from simrl.speculation.methods import EAGLE, Speculation
from simrl.speculation.run_model import Bucket, ResponseClass, RunModel

TextDrafter = Literal["history", "ngram", "siblings"]


class HistoryWorkers(BaseModel):
    """The CPU workers that build HistoSpec's indexes (RhymeRL §5.3)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    workers: int = Field(default=8, ge=1, le=100_000, description="index builders, one core each")
    tokens_per_s: float = Field(
        default=2e6, gt=0, description="of each; what one core of this project's machine builds, at the least"
    )
    memory_bytes: float = Field(default=640e9, gt=0, description="of all nodes (RhymeRL: 8 nodes with less than 80 GB)")
    bytes_per_token: float = Field(default=16.0, gt=0, description="of an index in memory")


class SpeculationInputs(BaseModel):
    """The section `speculation` of a scenario. What a trace's tokens say comes before what is said here."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    verification: Verification | None = Field(
        default=None,
        description="exact_match accepts a token only if it equals the sampled one, rejection_sampling more; null is the "
        "method's own: exact_match for specactor, else rejection_sampling",
    )
    temperature: float = Field(
        default=1.0,
        ge=0,
        le=10,
        description="of sampling; what is given here belongs to it, nothing is computed from it",
    )
    acceptance: dict[str, ModelAcceptance] = Field(
        default={}, description="of model drafters, by name: eagle, qwen2.5-0.5b … What is not given is assumed"
    )
    runs: dict[TextDrafter, RunModel] = Field(
        default={}, description="of text drafters on traces without token ids, as `simrl acceptance` fits them"
    )
    history_workers: HistoryWorkers = HistoryWorkers()
    acceptance_factor: float = Field(
        default=1.0,
        gt=0,
        le=2,
        description="multiplies the probability that a drafted token is accepted, to see what hangs on it; 1 = as counted, "
        "drawn or given. Drafts from texts cannot have more than 1, those from running siblings no other",
    )
    draft_profile: str | None = Field(
        default=None, description="of the method's draft model, as `simrl measure` writes it; null derives its times"
    )
    draft_round_s: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="of a round of a model's drafts besides its passes: the host's time, sampling, hand-over; null: as the "
        "method says (tlt 2 ms, the others none, both assumed)",
    )

    @field_validator("acceptance")
    @classmethod
    def _of_known_models(cls, given: dict[str, ModelAcceptance]) -> dict[str, ModelAcceptance]:
        for name in given:
            if name != EAGLE and name not in MODELS and not Path(name).exists():
                raise ValueError(
                    f"{name!r} is no drafter{meant(name, (EAGLE, *MODELS))}; give the acceptance of eagle or of a model: "
                    f"{', '.join(MODELS)}"
                )
        return given

    def acceptance_of(self, speculation: Speculation) -> ModelAcceptance:
        """The acceptance of a method's model drafter under the scenario's verification rule.

        Raises `InputError` where the rule is another one than the acceptance was found under, or the method needs another.
        """
        own: Verification = "exact_match" if speculation.exact_match else "rejection_sampling"
        rule = self.verification or own
        if speculation.exact_match and rule != own:
            raise InputError(
                f"speculation.verification is {rule}, and {speculation.name} verifies by exact match; set it to exact_match"
            )
        given = self.acceptance.get(speculation.model)
        if given is None:
            given = assumed_acceptance(speculation.model, rule)
        elif given.verification != rule:
            raise InputError(
                f"speculation.acceptance.{speculation.model} was found under {given.verification}, the scenario verifies by "
                f"{rule}; give the acceptance under that rule"
            )
        return given.times(self.acceptance_factor)

    def runs_of(self, drafter: TextDrafter) -> RunModel:
        """The run model of a text drafter."""
        return self.runs.get(drafter, ASSUMED_RUNS[drafter])


def assumed_acceptance(model: str, verification: Verification) -> ModelAcceptance:
    """What stands where nobody measured. EAGLE: such that a tree of 48 tokens and depth 8 accepts 6.5 tokens freshly trained,
    and 4.6 as it was at first (TLT Table 4). Small models: 0.75, of which exact match (Σ p·q instead of Σ min(p, q)) leaves
    0.65. Long responses accept less (SpecActor §5: 49 to 72 % on the last ones)."""
    exact = verification == "exact_match"
    if model == EAGLE:
        return ModelAcceptance(
            by_position=(0.75 if exact else 0.85,),
            drift_per_update=0.05,
            most_drift=0.78,
            verification=verification,
            source="assumed; the level is TLT Table 4's, read through a tree of 48 tokens",
        )
    return ModelAcceptance(
        by_position=(0.65 if exact else 0.75,),
        spread=0.2,
        length_exponent=0.1,
        verification=verification,
        source="assumed",
    )


def _assumed(gap_tokens: float, hit_tokens: float, first_epoch: bool) -> RunModel:
    """Hits of two lengths, few long ones with most of the tokens (RhymeRL Fig. 8), and gaps of one to a few tokens."""
    short, long = (
        Bucket(up_to_tokens=2, share=0.7, mean_tokens=1.4),
        Bucket(up_to_tokens=128, share=0.3, mean_tokens=hit_tokens),
    )
    gap = Bucket(up_to_tokens=64, share=1.0, mean_tokens=gap_tokens)
    return RunModel(
        classes=(ResponseClass(share=1.0, share_of_long=1.0, wrong_drafts=0.5, gaps=(gap,), hits=(short, long)),),
        first_epoch=first_epoch,
        source="assumed",
    )


ASSUMED_RUNS: dict[str, RunModel] = {
    "history": _assumed(2.0, 16.0, False),
    "siblings": _assumed(3.0, 12.0, True),
    "ngram": _assumed(5.0, 8.0, True),
}
