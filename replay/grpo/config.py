"""RunConfig: everything that a recorded run depends on, from one YAML file.

Invariant: what leads to the warmed-up policy (task, shape, warm-up with its seed) has a digest of its own: runs that agree in
it begin with the same weights, which are made once. The run's seed is for its prompts, their order and what is drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from replay.grpo.policy import PolicyConfig
from replay.grpo.tasks import Countdown
from replay.grpo.update import UpdateConfig
from replay.grpo.warm_up import WarmUpConfig
from simrl.errors import InputError
from simrl.hardware import GPUS
from simrl.overrides import parse_override
from simrl.validation import explain
from simrl.yaml_text import read_yaml

WARM_UPS = "warm-ups"  # the folder beside those of the runs that has the policies they begin with


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EngineSizes(_Model):
    """Of each rollout engine."""

    max_num_seqs: int = Field(default=64, gt=0)
    max_num_batched_tokens: int = Field(default=256, gt=0)
    block_size: int = Field(default=32, gt=0)
    kv_cache_tokens: int = Field(default=32768, gt=0)

    @model_validator(mode="after")
    def _a_pass_holds_all(self) -> EngineSizes:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens is at least max_num_seqs: a pass has a token of each sequence")
        return self

    @property
    def kv_blocks(self) -> int:
        """Whole ones."""
        return self.kv_cache_tokens // self.block_size


class SystemChoice(_Model):
    """The schedule: `split` is synchronous, on GPUs of their own; `eta` is AReaL's."""

    name: Literal["split", "one_step_off", "areal"]
    eta: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _eta_is_areals(self) -> SystemChoice:
        if (self.eta is None) == (self.name == "areal"):
            raise ValueError("areal has an eta (its bound on staleness), no other system has")
        return self


class RunConfig(_Model):
    """A run. Prompts come again in every epoch, each time in another order; `prompts_per_step` of them make an update."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="of its folder, too")
    seed: int = Field(default=0, ge=0)
    task: Countdown = Countdown()
    policy: PolicyConfig = PolicyConfig()
    warm_up: WarmUpConfig = WarmUpConfig()
    update: UpdateConfig = UpdateConfig()
    system: SystemChoice
    prompts: int = Field(gt=0)
    prompts_per_step: int = Field(gt=0)
    group: int = Field(ge=2, le=256, description="responses to a prompt in an epoch")
    epochs: int = Field(gt=0)
    workers: int = Field(default=1, gt=0, description="rollout engines, each on a core or GPUs of its own")
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
    def _not_that_of_the_warm_ups(cls, name: str) -> str:
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
    def _whole_steps(self) -> RunConfig:
        if self.prompts % self.prompts_per_step:
            raise ValueError("prompts is a multiple of prompts_per_step: an epoch is whole steps")
        return self

    @model_validator(mode="after")
    def _cache_holds_a_response(self) -> RunConfig:
        held_tokens = self.engine.kv_blocks * self.engine.block_size
        if held_tokens < self.most_tokens:
            raise ValueError(
                f"engine.kv_cache_tokens: {held_tokens} tokens in whole blocks do not hold a prompt and its response "
                f"({self.most_tokens}); raise it, or lower task.most_tokens"
            )
        return self

    @property
    def steps(self) -> int:
        """Updates in all."""
        return self.epochs * self.prompts // self.prompts_per_step

    @property
    def most_tokens(self) -> int:
        """Of a prompt and its response."""
        return self.task.most_prompt_tokens + self.task.most_tokens

    @property
    def warm_up_digest(self) -> str:
        """Of what the warmed-up policy depends on."""
        parts = {name: getattr(self, name).model_dump(mode="json") for name in ("task", "policy", "warm_up")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def read_config(file: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run of a file, changed by `key=value` (`update.learning_rate=1e-4`). Raises `InputError` that names the file, the
    place and the remedy."""
    written: Any = OmegaConf.to_container(read_yaml(file, str(file), "a run", RunConfig.model_fields))
    for key, value in map(parse_override, overrides):
        written = _changed(written, key.split("."), value)
    try:
        return RunConfig.model_validate(written)
    except ValidationError as error:
        raise InputError(f"{file}: {explain(error, RunConfig, 'the run')[1]}") from error


def _changed(section: Any, path: Sequence[str], value: Any) -> Any:
    """A section with the value at a path; what is no mapping is left for the validation to name."""
    if not path:
        return value
    if section is not None and not isinstance(section, dict):
        return section
    section, (key, *rest) = section or {}, path
    return {**section, key: _changed(section.get(key), rest, value)}
