"""Presets: constants of engines (`engines.toml`) and frameworks (`frameworks.toml`), each with its range and source.

Invariant: a preset gives values that a scenario does not give itself, before the scenario is validated; so a scenario's fields
say everything, and `constants` finds which of them are a preset's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from simrl.errors import meant

KERNELS_ALONE = ("derived", "assumed")  # kinds of profiles without the host's time
USUAL = "vllm-0.19"  # the engine of a shipped profile where none is named


class Constant(BaseModel):
    """A preset's value of a field, the range in which it is known, and its source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float | bool | str
    kind: Literal["measured", "stated", "open"]
    source: str
    low: float | None = None
    high: float | None = None

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


class Preset(BaseModel):
    """An engine or a framework. `engine` is the engine that a framework drives."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    engine: str | None = None
    constants: dict[str, Constant]


def _read(file: str) -> dict[str, Preset]:
    tables = tomllib.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return {
        name: Preset(
            about=table.pop("about"),
            engine=table.pop("engine", None),
            constants={k: Constant(**v) for k, v in table.items()},
        )
        for name, table in tables.items()
    }


ENGINES, FRAMEWORKS = _read("engines.toml"), _read("frameworks.toml")
OF_ENGINE = (
    "async_scheduling",
    "reserve_bytes",
)  # an engine's constants that are fields of `engine`; the others are of its passes


def with_presets(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scenario's data with the fields that its framework and its engine give. Raise ValueError for an unknown name."""
    filled = dict(data)
    if (framework := data.get("framework")) is not None:
        preset = _named(FRAMEWORKS, framework, "framework")
        filled["engine"] = _filled(data.get("engine"), {"preset": preset.engine})
        filled["training"] = _filled(data.get("training"), {key: one.value for key, one in preset.constants.items()})
    engine = _given(filled.get("engine"))
    if engine.get("preset") is not None:
        constants = _named(ENGINES, engine["preset"], "engine.preset").constants
        filled["engine"] = _filled(engine, {key: constants[key].value for key in OF_ENGINE if key in constants})
    return filled


def _named(presets: Mapping[str, Preset], name: object, key: str) -> Preset:
    if not isinstance(name, str) or name not in presets:
        raise ValueError(f"{key} is {name!r}{meant(str(name), presets)}; there are {', '.join(presets)}")
    return presets[name]


def _given(section: Any) -> dict[str, Any]:
    """Return what a section gives itself."""
    if isinstance(section, BaseModel):
        return section.model_dump(exclude_unset=True)
    return dict(section) if isinstance(section, Mapping) else {}


def _filled(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a section with values for the fields that it does not give; one that is no section is left to the validation."""
    if section is not None and not isinstance(section, BaseModel | Mapping):
        return section
    return {**{key: value for key, value in values.items() if value is not None}, **_given(section)}


def constants(scenario: Mapping[str, Any], profile_kind: str) -> Iterator[Used]:
    """Yield the constants of presets that a validated scenario has."""
    if (framework := scenario.get("framework")) is not None:
        yield from _used(framework, "training", FRAMEWORKS[framework].constants, scenario["training"])
    engine = scenario["engine"].get("preset")
    if engine is not None:
        of_engine = {key: ENGINES[engine].constants[key] for key in OF_ENGINE if key in ENGINES[engine].constants}
        yield from _used(engine, "engine", of_engine, scenario["engine"])
    if (of_passes := passes_preset(engine, profile_kind)) is not None:
        profile = scenario["profile"]
        for key, constant in ENGINES[of_passes].constants.items():
            own = key == "between_passes_s" and (profile.get("roofline") or {}).get(key) is not None
            if key in ("between_passes_s", "sequence_overhead_s") and profile[key] is None and not own:
                yield Used(of_passes, f"profile.{key}", constant)
            if key == "layer_launch_s" and scenario["engine"]["enforce_eager"] and not profile["least_pass_s"]:
                yield Used(of_passes, f"engine.{key}", constant)


def _used(preset: str, section: str, constants: Mapping[str, Constant], values: Mapping[str, Any]) -> Iterator[Used]:
    for key, constant in constants.items():
        if values.get(key) == constant.value:
            yield Used(preset, f"{section}.{key}", constant)


def known_fields(framework: str | None) -> frozenset[str]:
    """Return the fields of `training` that a framework gives."""
    return frozenset(FRAMEWORKS[framework].constants) if framework in FRAMEWORKS else frozenset()


def passes_preset(engine: str | None, profile_kind: str) -> str | None:
    """Return the preset of the host's time around passes: none for a measured profile, which has it, unless one is named."""
    return engine or (USUAL if profile_kind in KERNELS_ALONE else None)
