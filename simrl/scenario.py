"""Scenario: everything one simulation depends on. Same scenario, same bytes out.

A scenario file is YAML with `${…}` references (OmegaConf). It names one or several `systems` and may `vary` any field; each
combination becomes one frozen, validated `Scenario`. Paths in a file are relative to the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simrl.engine import EngineConfig
from simrl.errors import InputError, first_line
from simrl.synthesis import LengthModel
from simrl.training import TrainingConfig


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClusterConfig(_Model):
    """The GPUs. `tp` of them make one rollout worker."""

    gpu: str
    gpus: int = Field(gt=0)
    tp: int = Field(gt=0)
    cost_per_gpu_hour: float = Field(default=0.0, ge=0, description="in the currency you like; 0 leaves cost out")


class WorkloadConfig(_Model):
    """What is generated: a recorded trace, or a synthetic one. A trace that is too short is passed over again."""

    trace: str | None = None
    synthetic: LengthModel | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> WorkloadConfig:
        if (self.trace is None) == (self.synthetic is None):
            raise ValueError("give either a trace (path) or synthetic (a length model)")
        return self


class RooflineConfig(_Model):
    """Efficiencies of `simrl.profilers.roofline.roofline_profile`; what is not given has that function's default."""

    compute_efficiency: float | None = Field(default=None, gt=0, le=1)
    memory_efficiency: float | None = Field(default=None, gt=0, le=1)
    link_efficiency: float | None = Field(default=None, gt=0, le=1)
    between_passes_s: float | None = Field(default=None, ge=0)


class ProfileConfig(_Model):
    """Step times: a profile file, or a roofline of the cluster's GPU; with the corrections that a measurement gave."""

    path: str | None = None
    roofline: RooflineConfig | None = None
    forward_correction: float = Field(default=1.0, gt=0, description="multiplies every forward pass; 1 = as profiled")
    between_passes_s: float | None = Field(
        default=None, ge=0, description="replaces the profile's pause between passes"
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> ProfileConfig:
        if (self.path is None) == (self.roofline is None):
            raise ValueError("give either path (a profile file) or roofline (its efficiencies, {} for the defaults)")
        return self


class SystemConfig(BaseModel):
    """A recipe's name and its parameters, flat: `{name: areal, eta: 8}`. The recipe checks the parameters."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Scenario(_Model):
    """One simulation."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(default=0, ge=0)
    steps: int = Field(gt=0, description="policy updates to simulate")
    warmup_steps: int = Field(
        default=0, ge=0, description="first updates left out of every average: the pipelines fill"
    )
    model: str
    cluster: ClusterConfig
    workload: WorkloadConfig
    profile: ProfileConfig
    engine: EngineConfig = EngineConfig()
    training: TrainingConfig = TrainingConfig()
    system: SystemConfig
    variant: str = Field(default="", description="what was varied to get here, as `key=value, …`")

    @model_validator(mode="after")
    def _steps_are_left(self) -> Scenario:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leaves none of the {self.steps} steps; lower it")
        return self


def load_scenarios(path: str | Path, overrides: Sequence[str] = (), system: str | None = None) -> list[Scenario]:
    """Every combination of the file's `vary` and `systems`, in the file's order, after the `key=value` overrides.

    An override of a key that the file varies wins over the variation. With `system`, the file's systems are left aside
    for that one, and overrides that are no key of a scenario are its parameters. Raises `InputError` naming file, key and
    value.
    """
    path = Path(path)
    config = _read(path)
    if system is not None:
        own = [
            item for item in overrides if item.split("=", 1)[0].split(".")[0] not in (*Scenario.model_fields, "vary")
        ]
        overrides = [item for item in overrides if item not in own]
        parameters = OmegaConf.to_container(_overrides(own))
        assert isinstance(parameters, dict)
        config["systems"] = [{"name": system, **parameters}]
    config = _merge(config, _overrides(overrides), path)
    systems = config.pop("systems", None)
    variations = config.pop("vary", None) or [{}]
    if OmegaConf.is_config(systems):
        systems = OmegaConf.to_container(systems, resolve=True)
    if OmegaConf.is_config(variations):
        variations = OmegaConf.to_container(variations, resolve=True)
    if not isinstance(systems, list) or not systems:
        raise InputError(
            f"{path}: systems is {systems!r}; give a list such as [verl_colocated, {{name: areal, eta: 8}}]"
        )
    if not isinstance(variations, list) or not all(isinstance(v, dict) for v in variations):
        raise InputError(
            f"{path}: vary is {variations!r}; give a list such as [{{cluster.gpus: 64}}, {{cluster.gpus: 256}}]"
        )
    fixed = {item.split("=", 1)[0] for item in overrides}
    distinct: list[dict[str, Any]] = []
    for variation in variations:
        kept = {key: value for key, value in variation.items() if key not in fixed}
        if kept not in distinct:
            distinct.append(kept)
    return [_scenario(config, variation, system, path) for variation in distinct for system in systems]


def _read(path: Path) -> DictConfig:
    try:
        config = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise InputError(f"{path}: {place}: {error.problem or first_line(error)}; correct the YAML") from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise InputError(f"{path}: cannot be read ({what})") from error
    if not isinstance(config, DictConfig) or not config:
        raise InputError(f"{path}: no keys; a scenario has name, model, cluster, workload, profile, systems, …")
    return config


def _overrides(items: Sequence[str]) -> DictConfig:
    for item in items:
        if "=" not in item or item.startswith("="):
            raise InputError(f"override {item!r}: write key=value, such as cluster.gpus=128")
    try:
        return OmegaConf.from_dotlist(list(items))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise InputError(f"overrides {' '.join(items)}: {first_line(error)}") from error


def _merge(config: DictConfig, more: DictConfig, path: Path) -> DictConfig:
    try:
        merged = OmegaConf.merge(config, more)
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: override does not fit: {first_line(error)}") from error
    assert isinstance(merged, DictConfig)
    return merged


def _scenario(config: DictConfig, variation: dict[str, Any], system: Any, path: Path) -> Scenario:
    config = config.copy()
    try:
        for key, value in variation.items():
            OmegaConf.update(config, key, value)
        data = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: {first_line(error)}; correct the reference or the key") from error
    assert isinstance(data, dict)
    data["system"] = {"name": system} if isinstance(system, str) else system
    data["variant"] = ", ".join(f"{key}={value}" for key, value in variation.items())
    for section, key in (("workload", "trace"), ("profile", "path")):
        part = data.get(section)
        if isinstance(part, dict) and isinstance(part.get(key), str):
            part[key] = str(path.parent / part[key])
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{path}: {_explain(error)}") from error


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "scenario"
    if first["type"] == "extra_forbidden":
        return f"unknown key {place}; {_known_keys(first['loc'][:-1])}"
    if first["type"] == "missing":
        return f"key {place} is missing"
    message = first["msg"].removeprefix("Value error, ")
    value = "" if isinstance(first["input"], dict | BaseModel) else f" is {first['input']!r}"
    return f"{place}{value}: {message[:1].lower()}{message[1:]}"


def _known_keys(place: tuple[Any, ...]) -> str:
    model: Any = Scenario
    for key in place:
        kind = model.model_fields[key].annotation
        model = next(
            t for t in (kind, *getattr(kind, "__args__", ())) if isinstance(t, type) and issubclass(t, BaseModel)
        )
    names = [name for name in model.model_fields if not (model is Scenario and name in ("system", "variant"))]
    names += ["systems", "vary"] if model is Scenario else []
    return f"{'.'.join(map(str, place)) or 'a scenario'} has {', '.join(names)}"
