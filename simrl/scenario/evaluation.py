"""The `evaluation` section of a scenario: evaluations of the policy, executed at the rollout
workers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, PositiveInt, model_validator

from simrl.trace.synthesis import LengthModel
from simrl.validation import numbers_are_no_truth

When = Literal["between_steps", "beside_training"]


class EvaluationConfig(
    BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
):
    """Evaluations of a policy version as requests at the rollout workers. Their tokens are neither
    trained nor dropped."""

    _numbers = numbers_are_no_truth

    every: PositiveInt
    """updates between evaluations: versions `every`, 2 × `every` … are evaluated, of a version that
    no worker loads the first later one"""
    at_start: bool = False
    """an evaluation of the first weights, before the first rollout"""
    when: When | None = None
    """between_steps: once the workers have loaded the version, nothing for training begins until
    the evaluation is over, and newer weights wait (verl, NeMo-RL, SkyRL, TRL, slime, AReaL);
    beside_training: evaluation and training share the workers and the limit of responses in flight,
    and newer weights do not wait (prime-rl). If not given: as the system does"""
    prefer: Literal["eval", "train"] = "eval"
    """of responses that wait for the limit of responses in flight, those that start first"""
    prompts: PositiveInt | None = None
    """prompts of an evaluation, the first ones of the lengths below; all of their first step if not
    given"""
    samples: PositiveInt | None = None
    """responses a prompt; as many as it has there if not given"""
    trace: str | None = None
    """lengths: a trace file (Parquet); the workload's if neither is given"""
    synthetic: LengthModel | None = None
    """lengths: or a model, drawn with the seed"""

    @model_validator(mode="after")
    def _one_of_them(self) -> EvaluationConfig:
        if self.trace is not None and self.synthetic is not None:
            raise ValueError("give trace (a file) or synthetic (a length model), not both")
        return self
