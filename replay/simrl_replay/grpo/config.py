"""RunConfig: all inputs of a recorded run, from one YAML file.

Invariant: the inputs of the warmed-up policy (task, shape, warm-up with its seed) have a digest of
their own: runs with equal digests begin with weights that are made once. The run's seed draws its
prompts, their order and its samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from simrl.errors import InputError, broken
from simrl.profile.hardware import GPUS
from simrl.scenario.yaml_text import parse_override, read_yaml
from simrl.validation import MOST_SEED, explain
from simrl_replay.grpo.policy import PolicyConfig
from simrl_replay.grpo.tasks import Countdown
from simrl_replay.grpo.update import UpdateConfig
from simrl_replay.grpo.warm_up import WarmUpConfig

WARM_UPS = "warm-ups"  # folder of the initial policies, beside the folders of the runs


class EngineSizes(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Sizes of each rollout engine."""

    max_num_seqs: int = Field(default=64, gt=0)
    max_num_batched_tokens: int = Field(default=256, gt=0)
    block_size: int = Field(default=32, gt=0)
    kv_cache_tokens: int = Field(default=32768, gt=0)

    @model_validator(mode="after")
    def _a_pass_holds_all(self) -> EngineSizes:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens is at least max_num_seqs: a pass has a token of each sequence"
            )
        return self

    @property
    def kv_blocks(self) -> int:
        """Number of whole KV cache blocks."""
        return self.kv_cache_tokens // self.block_size


class SystemChoice(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The schedule: `split` is synchronous, with separate GPUs for rollout and training; `eta` is
    AReaL's staleness bound."""

    name: Literal["split", "one_step_off", "areal"]
    eta: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _eta_is_areals(self) -> SystemChoice:
        if (self.eta is None) == (self.name == "areal"):
            raise ValueError("areal has an eta (its bound on staleness), no other system has")
        return self


class RunConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A run. Every epoch has all prompts, in an order of its own; `prompts_per_step` of them make
    an update."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="of its folder, too")
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    task: Countdown = Countdown()
    policy: PolicyConfig = PolicyConfig()
    warm_up: WarmUpConfig = WarmUpConfig()
    update: UpdateConfig = UpdateConfig()
    system: SystemChoice
    prompts: int = Field(gt=0)
    prompts_per_step: int = Field(gt=0)
    group: int = Field(ge=2, le=256, description="responses to a prompt in an epoch")
    epochs: int = Field(gt=0)
    workers: int = Field(
        default=1, gt=0, description="rollout engines, each on a core or GPUs of its own"
    )
    device: Literal["cpu", "cuda"] = "cpu"
    gpu: str = Field(
        default="cpu",
        description="what it runs on, for the simulator: cpu, or one of its GPUs (on cuda: h100 unless given)",
    )
    engine: EngineSizes = EngineSizes()

    @model_validator(mode="before")
    @classmethod
    def _gpu_of_the_device(cls, written: Any) -> Any:
        on_cuda = isinstance(written, dict) and written.get("device") == "cuda"
        return {"gpu": "h100", **written} if on_cuda else written

    @field_validator("name")
    @classmethod
    def _not_the_warm_ups(cls, name: str) -> str:
        if name == WARM_UPS:
            raise ValueError("the folder of the warm-ups is called so; give another name")
        return name

    @field_validator("gpu")
    @classmethod
    def _known_gpu(cls, name: str) -> str:
        if name not in GPUS:
            raise ValueError(f"choose one of {', '.join(GPUS)}")
        return name

    @model_validator(mode="after")
    def _steps_are_whole_and_the_cache_holds_a_response(self) -> RunConfig:
        held_tokens = self.engine.kv_blocks * self.engine.block_size
        if wrong := broken(
            (
                self.prompts % self.prompts_per_step,
                "prompts is a multiple of prompts_per_step: an epoch is whole steps",
            ),
            (
                held_tokens < self.most_tokens,
                f"engine.kv_cache_tokens: {held_tokens} tokens in whole blocks do not hold a prompt and its response "
                f"({self.most_tokens}); raise it, or lower task.most_tokens",
            ),
        ):
            raise ValueError(wrong)
        return self

    @property
    def steps(self) -> int:
        return self.epochs * self.prompts // self.prompts_per_step

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a prompt and its response."""
        return self.task.most_prompt_tokens + self.task.most_tokens

    @property
    def warm_up_digest(self) -> str:
        parts = {
            name: getattr(self, name).model_dump(mode="json")
            for name in ("task", "policy", "warm_up")
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def read_config(file: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run of a file, changed by `key=value` (`update.learning_rate=1e-4`). Raise
    `InputError` that names the file, the place and the remedy."""
    written: Any = read_yaml(file, str(file), "a run", RunConfig.model_fields)
    for key, value in map(parse_override, overrides):
        written = _changed(written, key.split("."), value)
    try:
        return RunConfig.model_validate(written)
    except ValidationError as error:
        raise InputError(f"{file}: {explain(error, RunConfig, 'the run')[1]}") from error


def _changed(section: Any, path: Sequence[str], value: Any) -> Any:
    """Return a section with the value at a path; values that are no mapping are left to the
    validation."""
    if not path:
        return value
    if section is not None and not isinstance(section, dict):
        return section
    section, (key, *rest) = section or {}, path
    return {**section, key: _changed(section.get(key), rest, value)}
