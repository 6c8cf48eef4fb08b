"""Scenario: everything one simulation depends on. Same scenario, same bytes out.

A scenario file is YAML with `${…}` references (OmegaConf). It names one or several `systems` and may `vary` any field; each
combination becomes one frozen, validated `Scenario`. Paths in a file are relative to the file, those in an override to the
current folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from simrl.engine import EngineConfig
from simrl.errors import InputError, first_line, meant
from simrl.faults import Fault
from simrl.hardware import MODELS
from simrl.overrides import parse_override
from simrl.speculation.inputs import SpeculationInputs
from simrl.synthesis import LengthModel
from simrl.training import MOST_SECONDS, TrainingConfig
from simrl.validation import explain, shortened
from simrl.yaml_text import read_yaml


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ClusterConfig(_Model):
    """The GPUs. `tp` of them make one rollout worker."""

    gpu: str = Field(
        description="a100, h100, h200, h800, h20, b200, a40, a6000 or rtxpro6000: its memory, rates and links, where no "
        "profile says them"
    )
    gpus: int = Field(gt=0, le=1_000_000, description="all of them, those that roll out and those that train")
    tp: int = Field(gt=0, description="tensor-parallel size: GPUs of one rollout worker")
    cost_per_gpu_hour: float = Field(default=0.0, ge=0, description="in the currency you like; 0 leaves cost out")


class WorkloadConfig(_Model):
    """What is generated: a recorded trace, or a synthetic one. A trace that is too short is passed over again."""

    trace: str | None = Field(default=None, description="a trace file (Parquet), as `simrl trace import` writes it")
    synthetic: LengthModel | None = Field(default=None, description="or a model of lengths, drawn with the seed")

    @model_validator(mode="after")
    def _one_of_them(self) -> WorkloadConfig:
        if (self.trace is None) == (self.synthetic is None):
            raise ValueError("give either a trace (path) or synthetic (a length model), the other as null")
        return self


class RooflineConfig(_Model):
    """Efficiencies of `simrl.profilers.roofline.roofline_profile`; what is not given has that function's default."""

    compute_efficiency: float | None = Field(
        default=None, ge=0.001, le=1, description="of the data sheet's dense bfloat16 rate; 0.7 if not given"
    )
    memory_efficiency: float | None = Field(
        default=None, ge=0.001, le=1, description="of its memory bandwidth; 0.8 if not given"
    )
    link_efficiency: float | None = Field(
        default=None, ge=0.001, le=1, description="of its link's bandwidth; 0.7 if not given"
    )
    between_passes_s: float | None = Field(
        default=None, ge=0, le=MOST_SECONDS, description="host time between two passes; 0.001 if not given"
    )


class ProfileConfig(_Model):
    """Step times: a profile file, or a roofline of the cluster's GPU; with the corrections that a measurement gave."""

    path: str | None = Field(
        default=None, description="a profile file (Parquet): `profiles/`, `simrl profile`, `simrl measure`"
    )
    roofline: RooflineConfig | None = Field(
        default=None, description="or step times from the data sheet of the cluster's GPU; {} takes the defaults"
    )
    forward_correction: float = Field(
        default=1.0, ge=0.01, le=100, description="multiplies every forward pass; 1 = as profiled"
    )
    between_passes_s: float | None = Field(
        default=None, ge=0, le=MOST_SECONDS, description="replaces the profile's pause between passes"
    )
    sequence_overhead_s: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="what every decoding sequence adds to a pass: work of the host that no profile of kernels has",
    )
    least_pass_s: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="no pass is shorter, the pause apart: what the host takes to launch its kernels one by one where there "
        "are no CUDA graphs (vLLM's enforce_eager), 0.2 to 0.6 ms a layer",
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> ProfileConfig:
        if (self.path is None) == (self.roofline is None):
            raise ValueError(
                "give either path (a profile file) or roofline (its efficiencies, {} for the defaults), the other as null"
            )
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

    name: str = Field(description="also of the folder of its results")
    seed: int = Field(default=0, ge=0, description="of all draws: the same seed is the same luck for every system")
    steps: int = Field(gt=0, description="policy updates to simulate")
    warmup_steps: int = Field(
        default=0, ge=0, description="first updates left out of every average: the pipelines fill"
    )
    model: str = Field(
        description="a model that simrl knows, such as qwen3-8b, or a folder with a Hugging Face config.json"
    )
    cluster: ClusterConfig
    workload: WorkloadConfig
    profile: ProfileConfig
    engine: EngineConfig = EngineConfig()
    training: TrainingConfig = TrainingConfig()
    speculation: SpeculationInputs = Field(
        default=SpeculationInputs(), description="how much of drafts is accepted where tokens do not say it"
    )
    faults: tuple[Fault, ...] = Field(default=(), description="workers that are slow, lost, or late with their weights")
    system: SystemConfig
    variant: str = Field(default="", description="what was varied to get here, as `key=value, …`")
    file: str = Field(default="scenario", exclude=True, description="where it was read, for messages")

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError("use the letters a-z, digits, '.', '_' and '-', a letter or digit first")
        return name

    @model_validator(mode="after")
    def _steps_are_left(self) -> Scenario:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leaves none of the {self.steps} steps; lower it")
        return self


# What `load_scenarios` fills in, and what a file has instead.
FILLED_IN = ("system", "variant", "file")
_KEYS = (*(key for key in Scenario.model_fields if key not in FILLED_IN), "systems", "vary")
_NAMES = [
    *_KEYS,
    *(
        f"{key}.{part}"
        for key, field in Scenario.model_fields.items()
        if key not in FILLED_IN
        for part in getattr(field.annotation, "model_fields", ())
    ),
]
_PATHS = (("workload", "trace"), ("profile", "path"), ("speculation", "draft_profile"))


PARAMETER = "system."  # begins a key that is a parameter of the systems
ParametersOf = Callable[[str], Mapping[str, Any]]  # of a system, by its name


class Setting(NamedTuple):
    """A value for a dotted key, and who gives it: the words with which a message names it."""

    key: str
    value: Any
    giver: str


class Choices(NamedTuple):
    """A system's three choices, several of each if given: every combination is a system. Without pipelines, those of the file's
    systems stand; a dispatch or a speculation takes the place of theirs."""

    pipelines: Sequence[str] = ()
    dispatches: Sequence[str] = ()
    speculations: Sequence[str | Mapping[str, Any]] = ()


class ScenarioFile:
    """A file after the `key=value` overrides: the systems that it names, its variations, and the scenarios that they make.

    An override of a key that the file varies wins over the variation, which `overruled` says; of one that would give a part of
    what is varied, or the other way round, a part would be lost, and it is refused. Raises `InputError` naming file, key and
    value, as all of its methods do. Where there is no file, `data` is what it would hold, and `path` what messages call it.
    """

    def __init__(
        self, path: str | Path, settings: Sequence[Setting] = (), data: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path = Path(path)
        self._config = _read(path) if data is None else _known_keys(_from_data(data, path), path)
        self._parameters = [setting for setting in settings if setting.key.startswith(PARAMETER)]
        self._settings = [setting for setting in settings if not setting.key.startswith(PARAMETER)]
        for setting in self._settings:
            _set(self._config, setting, str(path))
        self.systems = self._systems()
        self._varied = self._entries_of_vary()
        self.variations = self.variations_beside(())

    def scenario(self, varied: Sequence[Setting], system: Any) -> Scenario:
        """The one with these values and this system (a name, or a dictionary that has one)."""
        return _scenario(self._config, varied, self._settings, system, self.path)

    def scenarios(
        self,
        choices: Choices = Choices(),  # noqa: B008 (immutable)
        parameters_of: ParametersOf | None = None,
    ) -> list[Scenario]:
        """Every combination of its variations and systems, in its order; `choices` make systems of their own. An override of
        `system.eta` goes to the systems that have such a parameter, which `parameters_of` knows; to all where nobody does."""
        systems = _chosen(self.systems, choices)
        for setting in self._parameters:
            systems = _with_parameter(systems, setting, parameters_of)
        return [self.scenario(varied, entry) for varied in self.variations for entry in systems]

    def overruled(self, keys: Iterable[str]) -> list[str]:
        """A line for each of these keys that the file varies, for whoever gives them other values."""
        lines = []
        for key in dict.fromkeys(keys):
            several = [setting.value for entry in self._varied for setting in entry if setting.key == key]
            distinct = [value for i, value in enumerate(several) if value not in several[:i]]
            if distinct:
                lines.append(
                    f"{self.path}: vary has {key} {shortened(distinct)}; what the command line says replaces it"
                )
        return lines

    def variations_beside(self, settings: Iterable[Setting]) -> list[list[Setting]]:
        """What each entry of `vary` sets, without the keys that are overridden or among these settings, each once; an empty
        one without `vary`."""
        settings = [*self._settings, *settings]
        for varied in (setting for entry in self._varied for setting in entry):
            for setting in settings:
                _require_whole(setting, varied, self.path)
        keys = {setting.key for setting in settings}
        left = [[setting for setting in entry if setting.key not in keys] for entry in self._varied]
        return [entry for i, entry in enumerate(left) if entry not in left[:i]]

    def _systems(self) -> list[Any]:
        found = _entries(self._config, "systems", "[verl_colocated, {name: areal, eta: 8}]", self.path)
        if not found:
            raise InputError(f"{self.path}: no systems; give a list such as [verl_colocated, {{name: areal, eta: 8}}]")
        for i, entry in enumerate(found):
            if not isinstance(entry, str) and not (isinstance(entry, dict) and isinstance(entry.get("name"), str)):
                raise InputError(
                    f"{self.path}: entry {i + 1} of systems is {entry!r}; give a name, or {{name: areal, eta: 8}}"
                )
        return found

    def _entries_of_vary(self) -> list[list[Setting]]:
        entries = _entries(self._config, "vary", "[{cluster.gpus: 64}, {cluster.gpus: 256}]", self.path) or [{}]
        for i, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise InputError(
                    f"{self.path}: entry {i + 1} of vary is {entry!r}; give key: value, such as {{cluster.gpus: 64}}"
                )
        return [[_varied(key, value, self.path) for key, value in entry.items()] for entry in entries]


def load_scenarios(
    path: str | Path,
    overrides: Sequence[str] = (),
    system: str | None = None,
    choices: Choices = Choices(),  # noqa: B008 (immutable)
    parameters_of: ParametersOf | None = None,
) -> list[Scenario]:
    """Every combination of the file's `vary` and `systems`, in the file's order, after the `key=value` overrides.

    With `system`, the file's systems are left aside for that one, and overrides that are no key of a scenario are its
    parameters, written `eta=8` or `system.eta=8`. `choices` make systems of their own; `parameters_of` is as in
    `ScenarioFile.scenarios`. Raises `InputError` as `ScenarioFile` does.
    """
    settings = [override(text) for text in overrides]
    if system is not None:
        own = [s for s in settings if s.key.split(".")[0] not in _KEYS]
        settings = [s for s in settings if s not in own]
        entry = {**{s.key.removeprefix(PARAMETER): s.value for s in own}, "name": system}
        settings.insert(0, Setting("systems", [entry], f"system {system}"))
    return ScenarioFile(path, settings).scenarios(choices, parameters_of)


def require_parameter(key: str, systems: Iterable[str], parameters_of: ParametersOf) -> None:
    """Raises `InputError` for a key such as `system.eta` that is a parameter of none of the systems."""
    parameter, of_each = key.removeprefix(PARAMETER), {name: list(parameters_of(name)) for name in systems}
    if not any(parameter in known for known in of_each.values()):
        near = meant(parameter, [each for known in of_each.values() for each in known])
        has = "; ".join(f"{name} has {', '.join(known) or 'none'}" for name, known in of_each.items())
        raise InputError(f"{key}: no parameter of these systems{near}; {has}")


def _with_parameter(systems: list[Any], setting: Setting, parameters_of: ParametersOf | None) -> list[Any]:
    """The systems, those that have it with the parameter."""
    parameter = setting.key.removeprefix(PARAMETER)
    named = [{"name": entry} if isinstance(entry, str) else entry for entry in systems]
    if parameters_of is None:
        return [{**entry, parameter: setting.value} for entry in named]
    require_parameter(setting.key, dict.fromkeys(entry["name"] for entry in named), parameters_of)
    return [
        {**entry, parameter: setting.value} if parameter in parameters_of(entry["name"]) else entry for entry in named
    ]


def _chosen(systems: list[Any], choices: Choices) -> list[Any]:
    """The systems that the choices make, each once."""
    if not any(choices):
        return systems
    named = [{"name": entry} if isinstance(entry, str) else entry for entry in systems]
    named = [{"name": pipeline} for pipeline in choices.pipelines] or named
    dispatches = [{"dispatch": rule} for rule in choices.dispatches] or [{}]
    speculations = [{"speculation": _value(method)} for method in choices.speculations] or [{}]
    chosen = [{**entry, **rule, **method} for entry, rule, method in product(named, dispatches, speculations)]
    return [made for i, made in enumerate(chosen) if made not in chosen[:i]]


def _value(method: str | Mapping[str, Any]) -> Any:
    """`{name: histospec, gate: open}` as an object, a name as it is."""
    if isinstance(method, str) and method.startswith("{"):
        return parse_override(f"speculation={method}")[1]
    return method


def _read(path: Path) -> DictConfig:
    return _known_keys(read_yaml(path, str(path), "a scenario", _KEYS), path)


def _from_data(data: Mapping[str, Any], path: Path) -> Any:
    try:
        return OmegaConf.create(dict(data))
    except (OmegaConfBaseException, ValueError) as error:
        raise InputError(
            f"{path}: does not fit a scenario ({first_line(error)}); give numbers, texts, lists"
        ) from error


def _known_keys(config: Any, path: Path) -> DictConfig:
    if not isinstance(config, DictConfig) or not config:
        raise InputError(f"{path}: no keys; a scenario has {', '.join(_KEYS)}")
    for key in config:
        if key not in _KEYS:
            raise InputError(f"{path}: unknown key {key!s}{meant(key, _NAMES)}; a scenario has {', '.join(_KEYS)}")
    return config


def override(text: str) -> Setting:
    """`key=value` of a command line. A path in it is meant from the current folder, as everywhere on a command line."""
    key, value = parse_override(text)
    return given(key, value, f"override {text!r}")


def given(key: str, value: Any, giver: str) -> Setting:
    """The same, parsed already."""
    for section, name in _PATHS:
        if key == f"{section}.{name}" and isinstance(value, str):
            value = _path(value, Path.cwd())
        elif key == section and isinstance(value, dict) and isinstance(value.get(name), str):
            value = {**value, name: _path(value[name], Path.cwd())}
    return Setting(key, value, giver)


def _path(text: str, folder: Path) -> str:
    return str(folder / os.path.expanduser(text))  # noqa: PTH111 (pathlib's raises for an unknown ~user)


def _varied(key: Any, value: Any, path: Path) -> Setting:
    if str(key).split(".")[0] in ("systems", "vary"):
        raise InputError(
            f"{path}: vary has {key}; it takes fields such as cluster.gpus, and systems are a list already"
        )
    return Setting(str(key), value, f"vary {key}={value}")


def gives(setting: Setting, key: str) -> bool:
    """Whether a setting decides a key below its own: a dictionary what it has, for it is merged; all else, which takes the
    place of what was there, everything."""
    if not key.startswith(f"{setting.key}."):
        return False
    inner: Any = setting.value
    for part in key.removeprefix(f"{setting.key}.").split("."):
        if not isinstance(inner, dict):
            return True
        if part not in inner:
            return False
        inner = inner[part]
    return True


def _require_whole(setting: Setting, varied: Setting, path: Path) -> None:
    """Raises `InputError` where a setting and a variation both hold, each in part."""
    if gives(setting, varied.key) or gives(varied, setting.key):
        raise InputError(
            f"{path}, {setting.giver}: vary has {varied.key}, too, and only one of them can be; give {varied.key}=…, or leave "
            "the file's out with vary=null"
        )
    left_out = _left_out(setting.value, varied.value, varied.key) if setting.key == varied.key else None
    if left_out is not None:
        raise InputError(
            f"{path}, {setting.giver}: vary has {left_out}, which this leaves out; give it, too, or leave the file's out with "
            "vary=null"
        )


def _left_out(new: Any, old: Any, key: str) -> str | None:
    """The first key of a dictionary, or of one in it, that the dictionary in its place has not."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return None
    for part, inner in old.items():
        place = f"{key}.{part}"
        left_out = _left_out(new[part], inner, place) if part in new else place
        if left_out is not None:
            return left_out
    return None


def _set(config: DictConfig, setting: Setting, origin: str) -> None:
    """Gives a key its value; dictionaries are merged, and a number in a key is a place in a list."""
    keys = setting.key.split(".")
    if not all(re.fullmatch(r"\w+", key) for key in keys):
        raise InputError(f"{origin}, {setting.giver}: {setting.key!r} is no key; write one such as cluster.gpus")
    if keys[0] not in _KEYS:
        near = meant(keys[0], _NAMES)
        raise InputError(f"{origin}, {setting.giver}: unknown key {keys[0]}{near}; a scenario has {', '.join(_KEYS)}")
    try:
        for i in range(1, len(keys)):
            parent = OmegaConf.select(config, ".".join(keys[:i]))
            if parent is not None and not OmegaConf.is_config(parent):
                raise InputError(f"{origin}, {setting.giver}: {'.'.join(keys[:i])} is {parent!r}, it has no {keys[i]}")
        merge = isinstance(setting.value, dict) and isinstance(OmegaConf.select(config, setting.key), DictConfig)
        OmegaConf.update(config, setting.key, setting.value, merge=merge)
    except (OmegaConfBaseException, ValueError, TypeError, IndexError) as error:
        raise InputError(f"{origin}, {setting.giver}: does not fit ({first_line(error)}); correct the key") from error


def _entries(config: DictConfig, key: str, example: str, path: Path) -> list[Any]:
    """Takes the list `key` out of the config; empty where there is none."""
    try:
        value = OmegaConf.select(config, key)
        entries = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise _bad_reference(error, path) from error
    config.pop(key, None)
    if entries is not None and not isinstance(entries, list):
        raise InputError(f"{path}: {key} is {entries!r}; give a list such as {example}")
    return entries or []


def _scenario(
    config: DictConfig, varied: Sequence[Setting], overrides: Sequence[Setting], system: Any, path: Path
) -> Scenario:
    config = config.copy()
    for setting in varied:
        _set(config, setting, str(path))
    data = _resolved(config, path)
    data["system"] = {"name": system} if isinstance(system, str) else {str(k): v for k, v in system.items()}
    data["variant"] = ", ".join(f"{setting.key}={setting.value}" for setting in varied)
    data["file"] = str(path)
    for section, key in _PATHS:
        part = data.get(section)
        if isinstance(part, dict) and isinstance(part.get(key), str):
            part[key] = _path(part[key], path.parent)
    model = data.get("model")
    with suppress(OSError):  # no name of a file at all; whoever looks for the model will say so
        if isinstance(model, str) and model.lower() not in MODELS and (path.parent / model).exists():
            data["model"] = str(path.parent / model)
    _require_characters(data, "", path)
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        key, message = explain(error, Scenario, "scenario")
        givers = [
            s.giver for s in (*varied, *overrides) if f"{key}.".startswith(f"{s.key}.") or s.key.startswith(f"{key}.")
        ]
        raise InputError(f"{', '.join([str(path), *givers[:1]])}: {message}") from error


def _require_characters(value: Any, place: str, path: Path) -> None:
    """Half a character (a lone surrogate, which YAML can escape and a command line can hold) could not be written again."""
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise InputError(f"{path}: {place} is {value!r}: no character ends it; write it as UTF-8")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _require_characters(str(key), "a key", path)
            _require_characters(inner, f"{place}.{key}".strip("."), path)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _require_characters(inner, f"{place}.{i}", path)


def _resolved(config: DictConfig, path: Path) -> dict[str, Any]:
    """As plain data, references followed."""
    try:
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _bad_reference(error, path) from error
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def _bad_reference(error: OmegaConfBaseException, path: Path) -> InputError:
    place = f"{error.full_key}: " if error.full_key else ""
    return InputError(f"{path}: {place}{first_line(error)}; correct the reference or the key")
