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

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from replay.grpo.policy import PolicyConfig
from replay.grpo.tasks import Countdown
from replay.grpo.update import UpdateConfig
from replay.grpo.warm_up import WarmUpConfig
from simrl.errors import InputError, first_line
from simrl.explain import explain
from simrl.overrides import parse_override


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EngineSizes(_Model):
    """Of each rollout engine."""

    max_num_seqs: int = Field(default=64, gt=0)
    max_num_batched_tokens: int = Field(default=256, gt=0)
    block_size: int = Field(default=32, gt=0)
    kv_cache_tokens: int = Field(default=32768, gt=0)


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

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", description="of its folder, too")
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
    engine: EngineSizes = EngineSizes()

    @model_validator(mode="after")
    def _whole_steps(self) -> RunConfig:
        if self.prompts % self.prompts_per_step:
            raise ValueError("prompts is a multiple of prompts_per_step: an epoch is whole steps")
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
    try:
        written = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{file}: not a run's configuration ({first_line(error)})") from error
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
