"""Presets: constants of engines (`engines.toml`) and frameworks (`frameworks/*.toml`), each with
its range and source.

Invariant: a preset gives values that a scenario does not give itself, before the scenario is
validated; so a scenario's fields say everything, and `constants` finds which of them are a
preset's. A preset from a file of the user's stands whole in the scenario, in place of the file's
name: no file is read again.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from simrl.errors import InputError, first_line, meant, printable, refuse
from simrl.files import write_whole_file
from simrl.profile.hardware import gpu
from simrl.profile.metadata import SAMPLER, ProfileMetadata
from simrl.training.config import Seconds, TrainingConfig
from simrl.validation import Model, explain

KERNELS_ALONE = ("derived", "extrapolated", "assumed")  # kinds of profiles without the host's time
USUAL = "vllm-0.19"  # the engine of a shipped profile where none is named
MOST_BYTES = 100_000  # of a file
EXAMPLE = 'a constant is {value = 0.5, low = 0.4, high = 0.6, kind = "measured", source = "where it is from"}'


class Constant(Model):
    """A preset's value of a field, the range in which it is known, and its source."""

    value: float | bool | str
    kind: Literal["measured", "stated", "open"]
    source: Annotated[str, Field(min_length=1)]
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _value_is_in_its_range(self) -> Constant:
        low, value, high = self.low, self.value, self.high
        if (low, high) != (None, None) and (
            None in (low, high) or not isinstance(value, float) or not low <= value <= high  # type: ignore[operator]
        ):
            raise ValueError(
                f"value {value}, low {low}, high {high}: give low ≤ value ≤ high, or neither low nor high"
            )
        return self

    @property
    def words(self) -> str:
        """The value and its range."""
        shown = f"{self.value:g}" if type(self.value) is float else str(self.value).lower()
        return shown if self.low is None else f"{shown} ({self.low:g} to {self.high:g})"


class Used(NamedTuple):
    """A preset's constant in a scenario."""

    preset: str
    key: str
    constant: Constant


class EngineConstants(Model):
    """The constants that an engine may have; a framework has fields of `training`."""

    between_passes_s: Seconds = 0.0
    messages_s: Seconds = 0.0
    sequence_overhead_s: Annotated[float, Field(ge=0, le=1)] = 0.0
    log_probs_s: Annotated[float, Field(ge=0, le=1)] = 0.0
    hidden_pass_s: Annotated[float, Field(ge=0, le=1)] = 0.0
    hidden_sequence_s: Annotated[float, Field(ge=0, le=1)] = 0.0
    layer_launch_s: Annotated[float, Field(ge=0, le=1)] = 0.0
    async_scheduling: bool = False
    scheduler: Literal["vllm", "sglang"] = "vllm"
    log_probs: bool = False
    reserve_bytes: Annotated[float, Field(ge=0)] = 0.0


class Preset(Model):
    """An engine or a framework. `engine` is the engine that a framework drives: a shipped one, or
    one of the same file."""

    name: str
    about: str
    engine: str | Preset | None = None
    constants: dict[str, Constant]

    @property
    def is_engine(self) -> bool:
        return self.engine is None and bool(self.constants.keys() & EngineConstants.model_fields)

    @model_validator(mode="after")
    def _constants_are_fields(self) -> Preset:
        kind, name = (
            (EngineConstants, "an engine") if self.is_engine else (TrainingConfig, "a framework")
        )
        try:
            kind.model_validate({key: constant.value for key, constant in self.constants.items()})
        except ValidationError as error:
            raise ValueError(explain(error, kind, name)[1]) from error
        return self


def read_presets(path: Path, below: str | None = None) -> dict[str, Preset]:
    """Return the presets of a file by its tables, or of those `below` one. Raise `InputError`
    naming file, table and key."""
    place = str(path)
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES).decode("utf-8")
            if file.read(1):
                raise ValueError(f"more than {MOST_BYTES:,} bytes")
        presets = {}
        for name, table in (
            tomllib.loads(text) if below is None else tomllib.loads(text).get(below, {})
        ).items():
            place = f"{path}, [{name}]"
            if not isinstance(table, dict):
                raise InputError(f"{path}: {name} is in no table; write it below a [name]")
            facts = {key: table.pop(key) for key in ("about", "engine") if key in table}
            presets[name] = Preset.model_validate({"name": name, **facts, "constants": table})
        engines = {name: preset for name, preset in presets.items() if preset.is_engine}
        for name, preset in presets.items():
            place, engine = f"{path}, [{name}]", preset.engine
            if isinstance(engine, str) and engine not in engines and engine not in ENGINES:
                known = [*engines, *ENGINES]
                raise InputError(
                    f"{place}: engine is {engine!r}{meant(engine, known)}; name one of {', '.join(known)}"
                )
            presets[name] = preset.model_copy(update={"engine": engines.get(str(engine), engine)})
        return presets
    except ValidationError as error:
        message = explain(error, Preset, "a preset")[1].replace("constants.", "", 1)
        raise InputError(f"{place}: {message}; {EXAMPLE}") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        )
        raise InputError(
            f"{path}: cannot be read as presets ({reason}); name a TOML file of them"
        ) from error


def is_preset_file(text: str) -> bool:
    """Return whether a preset's name is a file, `my.toml`, or a table in it, `my.toml#name`."""
    return text.endswith(".toml") or ".toml#" in text


def preset_of_file(text: str, key: str) -> dict[str, Any]:
    """Return the data of the engine or the framework (by the key) that a file has. Raise
    `InputError`."""
    path, hashed, table = text.partition(".toml#")
    file, kind = (
        Path(f"{path}.toml" if hashed else text),
        "framework" if key == "framework" else "engine",
    )
    tables = {
        name: preset
        for name, preset in read_presets(file).items()
        if preset.is_engine == (kind == "engine")
    }
    first = next(iter(tables), "")
    refuse(
        (not tables, f"has no table of {kind} constants, such as [mine]; {EXAMPLE}"),
        (
            table not in tables and (hashed or len(tables) > 1),
            f"has the {kind}s {', '.join(tables)}; write {key}={file}#{first}",
        ),
        error=lambda words: InputError(f"{file}: {words}"),
    )
    return tables[table if hashed else first].model_dump(exclude_none=True)


def write_presets(path: Path, presets: Mapping[str, Preset], by: str) -> None:
    """Write a file of presets, which `by` made."""
    lines = [f"# {by}. Format: docs/presets.md."]
    for name, preset in presets.items():
        lines += ["", f"[{_quoted(name)}]", f"about = {_quoted(preset.about)}"]
        lines += [f"engine = {_quoted(preset.engine)}"] if isinstance(preset.engine, str) else []
        for key, constant in preset.constants.items():
            fields = constant.model_dump(exclude_none=True).items()
            lines.append(
                f"{key} = {{ {', '.join(f'{field} = {_quoted(value)}' for field, value in fields)} }}"
            )
    with write_whole_file(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _quoted(value: str | float | bool) -> str:
    return json.dumps(printable(value) if isinstance(value, str) else value, ensure_ascii=False)


ENGINES = read_presets(Path(__file__).with_name("engines.toml"))
FRAMEWORK_FILES = sorted(
    Path(__file__).with_name("frameworks").glob("*.toml"), reverse=True
)  # verl, which most use, first
FRAMEWORKS = {
    name: preset
    for file in FRAMEWORK_FILES
    for name, preset in read_presets(file, "presets").items()
}
OF_ENGINE = (
    "async_scheduling",
    "scheduler",
    "reserve_bytes",
    "log_probs",
)  # constants that are fields of `engine`; the others are of its passes


def with_presets(data: Any) -> Any:
    """Return a scenario's data with the fields that its framework and its engine give; what is no
    data, as it is. Raise ValueError for an unknown name."""
    if not isinstance(data, Mapping):
        return data
    filled = dict(data)
    if (framework := data.get("framework")) is not None:
        preset = named(framework, "framework")
        engine = (
            preset.engine.model_dump(exclude_none=True)
            if isinstance(preset.engine, Preset)
            else preset.engine
        )
        filled["engine"] = _filled(data.get("engine"), {"preset": engine})
        filled["training"] = _filled(
            data.get("training"), {key: one.value for key, one in preset.constants.items()}
        )
    engine = filled.get("engine")
    if isinstance(engine, Mapping) and engine.get("preset") is not None:
        constants = named(engine["preset"], "engine.preset").constants
        filled["engine"] = _filled(
            engine, {key: constants[key].value for key in OF_ENGINE if key in constants}
        )
    return filled


def named(preset: object, key: str) -> Preset:
    """Return the preset that a scenario has under a key, by its name or whole. Raise ValueError."""
    presets = FRAMEWORKS if key == "framework" else ENGINES
    if isinstance(preset, str) and preset in presets:
        return presets[preset]
    if not isinstance(preset, Mapping):
        near = (
            " (use vllm-0.19 for 0.19 and newer)"
            if str(preset).startswith(("vllm-0.2", "vllm-0.3", "vllm-0.4", "vllm-1"))
            and presets is ENGINES
            else meant(str(preset), presets)
        )
        raise ValueError(
            f"{key} is {preset!r}{near}; there are {', '.join(presets)}, and files such as my.toml"
        )
    try:
        whole = Preset.model_validate(preset)
    except ValidationError as error:
        raise ValueError(f"{key}: {explain(error, Preset, 'a preset')[1]}") from error
    if whole.is_engine != (presets is ENGINES):
        raise ValueError(
            f"{key} is {whole.name!r}, whose constants are no {'engine' if presets is ENGINES else 'framework'}'s"
        )
    return whole


def _filled(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a section with values for the fields that it does not give; a value that is no section
    is left to pydantic."""
    if section is None or isinstance(section, Mapping):
        return {
            **{key: value for key, value in values.items() if value is not None},
            **(section or {}),
        }
    return section


def constants(scenario: Mapping[str, Any], profile: ProfileMetadata) -> Iterator[Used]:
    """Yield the constants of presets that a validated scenario has."""
    if (framework := scenario.get("framework")) is not None:
        yield from _used(named(framework, "framework"), "training", scenario["training"])
    engine = scenario["engine"].get("preset")
    if engine is not None:
        yield from _used(named(engine, "engine.preset"), "engine", scenario["engine"])
    for preset, key, field in _around_passes(scenario, profile):
        section = "profile" if key == field else "engine"
        yield Used(preset.name, f"{section}.{key}", preset.constants[key])


def _around_passes(
    scenario: Mapping[str, Any], has: ProfileMetadata
) -> Iterator[tuple[Preset, str, str]]:
    """Yield the constants of the engine's preset that are the time around a scenario's passes, with
    the preset and the field of `profile` to which each adds, and which neither the scenario gives
    nor the profile `has`. They hold for the preset's own scheduling: log-probs are hidden where
    sequences are. A named engine's work on the host counts beside what the profile has."""
    engine, profile = scenario["engine"], scenario["profile"]
    preset = passes_preset(engine.get("preset"), has.kind)
    if preset is None:
        return
    applying = {
        "between_passes_s": ("between_passes_s", True),
        "messages_s": ("between_passes_s", scenario["cluster"]["tp"] > 1),
        "sequence_overhead_s": ("sequence_overhead_s", True),
        "log_probs_s": (
            "least_sequence_s"
            if "hidden_sequence_s" in preset.constants
            else "sequence_overhead_s",
            engine.get("log_probs"),
        ),
        "hidden_pass_s": ("least_pass_s", True),
        "hidden_sequence_s": ("least_sequence_s", True),
        "layer_launch_s": ("least_pass_s", engine.get("enforce_eager")),
    }
    for key, (field, applies) in applying.items():
        in_roofline = (profile.get("roofline") or {}).get(field)  # the pause may be there
        given = profile.get(field) is not None or in_roofline is not None
        in_profile = key in has.own_times and (engine.get("preset") is None or on_gpu(preset, key))
        if key in preset.constants and applies and not given and not in_profile:
            yield preset, key, field


def on_gpu(preset: Preset, key: str) -> bool:
    """Return whether a constant is the GPU's time: the sampler, where a preset hides the host's."""
    return key in SAMPLER and "hidden_pass_s" in preset.constants


def host_times(
    scenario: Mapping[str, Any], profile: ProfileMetadata, layers: int, factor: float = 1.0
) -> dict[str, float]:
    """Return the seconds around passes by the fields of `profile` that a scenario does not give,
    from its engine's preset, the host's on hosts of the scenario's speed. Open constants count
    `factor` times."""
    times: dict[str, float] = {}
    cluster = scenario["cluster"]
    speed = cluster.get("host_speed") or gpu(cluster.get("sheet") or cluster["gpu"]).host_speed
    for preset, key, field in _around_passes(scenario, profile):
        constant = preset.constants[key]
        value = (
            float(constant.value)
            * (layers if key == "layer_launch_s" else 1)
            * (factor if constant.kind == "open" else 1.0)
        )
        times[field] = times.get(field, 0.0) + value / (1.0 if on_gpu(preset, key) else speed)
    return times


def _used(preset: Preset, section: str, values: Mapping[str, Any]) -> Iterator[Used]:
    for key, constant in preset.constants.items():
        if key in values and values[key] == constant.value:
            yield Used(preset.name, f"{section}.{key}", constant)


def known_fields(framework: Any) -> frozenset[str]:
    """Return the fields of `training` that a framework gives."""
    return (
        frozenset(named(framework, "framework").constants) if framework is not None else frozenset()
    )


def passes_preset(engine: Any, profile_kind: str) -> Preset | None:
    """Return the preset of the host's time around passes: none for a measured profile, which has
    it, unless one is named."""
    engine = engine or (USUAL if profile_kind in KERNELS_ALONE else None)
    return None if engine is None else named(engine, "engine.preset")
