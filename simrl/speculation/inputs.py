"""A scenario's inputs to speculation: acceptance where it cannot be measured from tokens, and the
builders of indexes.

Invariant: an input that is not given is a stated default and marked so (`kind: assumed`); every
result has the inputs used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from simrl.errors import InputError, choose
from simrl.profile.model_shape import MODELS
from simrl.speculation.acceptance import ModelAcceptance, Verification
from simrl.speculation.methods import EAGLE, MTP, OLD_RESPONSE, QUANTISED, Speculation
from simrl.speculation.run_model import Bucket, ResponseClass, RunModel
from simrl.speculation.trees import with_positions
from simrl.validation import Section

TextDrafter = Literal["history", "ngram", "siblings"]
PARTS = (EAGLE, MTP, *QUANTISED, OLD_RESPONSE)  # drafters that are no models of their own


class HistoryWorkers(Section):
    """The CPU workers that build HistoSpec's indexes (RhymeRL §5.3)."""

    workers: int = Field(default=8, ge=1, le=100_000, description="index builders, one core each")
    tokens_per_s: float = Field(
        default=2e6,
        gt=0,
        description="indexing rate of a worker; a lower bound for one core of this project's machine",
    )
    memory_bytes: float = Field(
        default=640e9,
        gt=0,
        description="memory of all nodes together (RhymeRL: 8 nodes with less than 80 GB)",
    )
    bytes_per_token: float = Field(default=16.0, gt=0, description="size of an index in memory")
    link_bytes_per_s: float = Field(
        default=50e9,
        gt=0,
        description="link to a rollout host, over which the indexes of its prompts are sent in turn; 400 Gb/s (RhymeRL §7)",
    )
    compressed_bytes_per_token: float | None = Field(
        default=None,
        gt=0,
        description="keep the tokens of an index without room compressed, at this size, and index them again for the next "
        "epoch; 0.43 to 0.88 was measured (zstd 1, experiments/history_memory.md); none: no compression",
    )
    codec_tokens_per_s: float = Field(
        default=1e8,
        gt=0,
        description="rate at which a worker compresses or decompresses tokens; a lower bound for one core of this project's "
        "machine (zstd 1: 133 M and 428 M tokens/s)",
    )
    swap_bytes_per_s: float | None = Field(
        default=None,
        gt=0,
        description="SSDs of all nodes together, where an index without room, or its compressed tokens, is written and read "
        "back for the next epoch; none: no swap",
    )
    prefetch: bool = Field(
        default=True,
        description="bring the indexes of the next step's prompts back while a step runs; else when a response begins",
    )

    @model_validator(mode="after")
    def _compresses(self) -> Self:
        if (self.compressed_bytes_per_token or 0.0) > self.bytes_per_token:
            raise ValueError(
                f"compressed_bytes_per_token {self.compressed_bytes_per_token:g} is more than bytes_per_token "
                f"{self.bytes_per_token:g}: compressing would save nothing; give a smaller one (0.43 to 0.88 was measured)"
            )
        return self


class SpeculationInputs(Section):
    """The section `speculation` of a scenario. If the trace has token ids, these are used
    instead."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {  # vLLM's speculative_config, which a system says
        **dict.fromkeys(
            ("method", "name"),
            "a system has it, systems: [{name: areal, speculation: {}}], or --speculation {}",
        ),
        "model": "a method has it, speculation: {name: draft_model, model: {}} of a system",
        "num_speculative_tokens": "a method has it, speculation: {name: ngram, window: {kind: fixed, tokens: {}}} of a system",
    }

    verification: Verification | None = Field(
        default=None,
        description="exact_match accepts a token only if it equals the sampled one, rejection_sampling accepts more; null: the "
        "method's rule, exact_match for specactor, else rejection_sampling",
    )
    temperature: float = Field(
        default=1.0,
        ge=0,
        le=10,
        description="sampling temperature at which the acceptance values below were measured (recorded only, not used in any "
        "formula)",
    )
    acceptance: dict[str, Annotated[ModelAcceptance, BeforeValidator(with_positions)]] = Field(
        default={},
        description="acceptance of model drafters, by name: eagle, mtp, int4, qwen2.5-0.5b …; a drafter not given has assumed "
        "values. In place of by_position, what engines log: accepted_per_position, or accept_length with draft_shape [steps, "
        "topk, tokens]",
    )
    runs: dict[TextDrafter, RunModel] = Field(
        default={},
        description="run models of text drafters for traces without token ids, as `simrl acceptance` fits them",
    )
    history_workers: HistoryWorkers = HistoryWorkers()
    acceptance_factor: float = Field(
        default=1.0,
        gt=0,
        le=2,
        description="multiplies the probability that a drafted token is accepted, to test how a result depends on it; 1: as "
        "counted, drawn or given. At most 1 for text drafters; always 1 for drafts from running siblings",
    )
    draft_profile: str | None = Field(
        default=None,
        description="profile of the method's draft model, as `simrl measure` writes it; null derives its times",
    )
    draft_round_s: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="time of a round of a model's drafts outside its passes: host, sampling; without a decoupled drafter's "
        "messages; null: the method's "
        "value (tlt: 2 ms, assumed; others: the time between the engine's passes, at least the launch of a layer)",
    )

    @field_validator("acceptance")
    @classmethod
    def _of_known_models(cls, acceptance: dict[str, ModelAcceptance]) -> dict[str, ModelAcceptance]:
        for name in acceptance:
            if name not in (*PARTS, *MODELS) and not Path(name).exists():
                raise ValueError(
                    f"{name!r} is no drafter; give the acceptance of {', '.join(PARTS)} or of a model"
                    f"{choose(name, (*PARTS, *MODELS), 'simrl profile names')}"
                )
        return acceptance

    def acceptance_of(self, speculation: Speculation) -> ModelAcceptance:
        """Return the acceptance of a method's model drafter under the scenario's verification rule.
        Raise `InputError` where it was measured under another rule, or the method needs another."""
        usual: Verification = "exact_match" if speculation.exact_match else "rejection_sampling"
        rule = self.verification or usual
        if speculation.exact_match and rule != usual:
            raise InputError(
                f"speculation.verification is {rule}, and {speculation.name} verifies by exact match; set it to exact_match"
            )
        acceptance = self.acceptance.get(speculation.model)
        if acceptance is None:
            acceptance = assumed_acceptance(speculation.model, rule)
        elif acceptance.verification != rule:
            raise InputError(
                f"speculation.acceptance.{speculation.model} was measured under {acceptance.verification}, the scenario "
                f"verifies by {rule}; give the acceptance under that rule"
            )
        if speculation.follows:
            acceptance = acceptance.model_copy(update={"drift_per_update": 0.0})
        return acceptance.times(self.acceptance_factor)

    def runs_of(self, drafter: TextDrafter) -> RunModel:
        """Return the run model of a text drafter."""
        return self.runs.get(drafter, ASSUMED_RUNS[drafter])


def assumed_acceptance(model: str, verification: Verification) -> ModelAcceptance:
    """Return the default where nothing was measured. EAGLE: such that a tree of 48 tokens and depth
    8 accepts 6.5 tokens freshly trained, and 4.6 with the initial drafter (TLT Table 4). MTP heads:
    0.85 at the first depth, as DeepSeek-V3 states (85 to 90 %), less at each further one, drift as
    EAGLE's. The policy in fewer bits: 0.91, about what `first_accept_length` says of 5 to 15 draft
    tokens. Small models: 0.75. Long responses accept less (SpecActor §5: 49 to 72 % on the last ones). Both rules
    of verification accept alike: how much less exact match accepts (Σ p·q instead of Σ min(p, q),
    if the draws are independent) is known only where it was measured."""
    levels, source, differs = _ASSUMED.get(
        model, ((0.75,), "", {"spread": 0.2, "length_exponent": 0.1})
    )
    source = f"assumed; {source}" if source else "assumed"
    return ModelAcceptance(by_position=levels, verification=verification, source=source, **differs)


_DRIFTS = {"drift_per_update": 0.05, "most_drift": 0.78}
_STARTS = "between the accept lengths with which EfficientRollout's code starts"
_ASSUMED: dict[str, tuple[tuple[float, ...], str, dict[str, Any]]] = {
    EAGLE: ((0.85,), "the level is TLT Table 4's, read through a tree of 48 tokens", _DRIFTS),
    MTP: (
        (0.85, 0.75, 0.65),
        "the first depth is DeepSeek-V3's, arXiv 2412.19437 §5.4.3",
        _DRIFTS,
    ),
    **dict.fromkeys(QUANTISED, ((0.91,), _STARTS, {})),
}


def _assumed(
    gap_tokens: float, hit_tokens: float, first_epoch: bool, length_exponent: float = 0.0
) -> RunModel:
    """Return a model with hits of two lengths, few long ones with most of the tokens (RhymeRL Fig.
    8), and short gaps."""
    short = Bucket(up_to_tokens=2, share=0.7, mean_tokens=1.4)
    long = Bucket(up_to_tokens=128, share=0.3, mean_tokens=hit_tokens)
    gap = Bucket(up_to_tokens=64, share=1.0, mean_tokens=gap_tokens)
    every = ResponseClass(
        share=1.0, share_of_long=1.0, wrong_drafts=0.5, gaps=(gap,), hits=(short, long)
    )
    return RunModel(
        classes=(every,), first_epoch=first_epoch, length_exponent=length_exponent, source="assumed"
    )


ASSUMED_RUNS: dict[str, RunModel] = {
    "history": _assumed(2.0, 16.0, False),
    "siblings": _assumed(3.0, 12.0, True),
    "ngram": _assumed(5.0, 8.0, True, 1.0),  # almost nothing in the last responses (SpecActor §5.2)
}
