"""Loads scenarios: a YAML file with `${…}` references (OmegaConf), overrides, variations and systems.

A file names one or several `systems` and may `vary` any field; each combination becomes one frozen, validated `Scenario`. Paths
in a file are relative to the file, paths in an override to the current folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from simrl.errors import LONGEST_NAME, InputError, first_line, meant
from simrl.profile.hardware import known_gpu
from simrl.profile.model_shape import MODELS, known_name
from simrl.profile.shipped import SHIPPED
from simrl.scenario.model import Scenario
from simrl.scenario.presets import is_preset_file, preset_of_file
from simrl.scenario.yaml_text import parse_override, read_yaml, require_no_call, split_at_commas
from simrl.trace.synthesis import LengthModel
from simrl.validation import explain, in_words, shortened

FILLED_IN = ("system", "variant", "file")  # fields that a file does not have: it has `systems` and `vary`
_SECTIONS = {key: field.annotation for key, field in Scenario.model_fields.items() if key not in FILLED_IN}
_KEYS = (*_SECTIONS, "systems", "vary")
NAMES = [*_KEYS, *(f"{key}.{part}" for key, kind in _SECTIONS.items() for part in getattr(kind, "model_fields", ()))]
_PRESETS = ("engine.preset", "framework")
_FILES = ("workload.trace", "profile.path", "speculation.draft_profile")
_PATHS = (*_FILES, *_PRESETS)
_EITHER = {"workload.trace": "workload.synthetic", "profile.path": "profile.roofline"}
_EITHER |= {other: key for key, other in _EITHER.items()}  # of such a pair, an override of one replaces the other

PARAMETER = "system."  # begins a key that is a parameter of the systems
ParametersOf = Callable[[str], Mapping[str, Any]]  # the parameters of a system, by its name


class Setting(NamedTuple):
    """A value for a dotted key, and who gives it: the words with which a message names it."""

    key: str
    value: Any
    giver: str


class Choices(NamedTuple):
    """A system's three choices, several of each if given: every combination is a system. Without pipelines, the systems of the
    file stay; a dispatch or a speculation replaces theirs."""

    pipelines: Sequence[str] = ()
    dispatches: Sequence[str] = ()
    speculations: Sequence[str | Mapping[str, Any]] = ()


_NO_CHOICES = Choices()


class _Alike(NamedTuple):
    """What scenarios have in common that differ only in the values of some keys: the resolved data, and the valid sections that
    no such key is in."""

    data: Mapping[str, Any]
    sections: Mapping[str, Any]


class ScenarioFile:
    """A file after the `key=value` overrides: its systems, its variations, and the scenarios that they make.

    An override with several values, `16,32`, is a variation. An override of a key that the file varies replaces the
    variation, which `overruled` reports. An override of a part of what
    is varied, or the other way round, is refused, for a part would be lost. All methods raise `InputError` naming file, key and
    value. Without a file, `data` is what it would hold, and `path` its name in messages.
    """

    def __init__(
        self, path: str | Path, settings: Sequence[Setting] = (), data: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path = Path(path)
        self._config = _from_data(data, path) if data is not None else read_yaml(path, str(path), "a scenario", _KEYS)
        self._alike: dict[tuple[str, ...], _Alike | None] = {}  # scenarios that differ in these keys alone
        self._presets: dict[tuple[str, str], dict[str, Any]] = {}  # each file is read once
        if not isinstance(self._config, DictConfig) or not self._config:
            raise InputError(f"{path}: no keys; a scenario has {', '.join(_KEYS)}")
        for key, value in self._config.items_ex(resolve=False):
            _require_known(str(key), str(path), value)
        last = {setting.key: setting for setting in settings}  # of equal keys the last one holds, one value or several
        values = [_values(setting) for setting in settings if setting is last[setting.key]]
        self._parameters = [each for each in values if each[0].key.startswith(PARAMETER)]
        fields = [each for each in values if each not in self._parameters]
        self._several = {each[0].key: each for each in fields if len(each) > 1}
        self._settings = [each[0] for each in fields if len(each) == 1]
        for setting in self._settings:
            _set(self._config, setting, path)
        keys = {setting.key for setting in self._settings if setting.value is not None}
        for other in {_EITHER[key] for key in keys & _EITHER.keys()} - {setting.key for setting in self._settings}:
            if OmegaConf.select(self._config, other) is not None:
                OmegaConf.update(self._config, other, None)
        self.systems = self._systems()
        self._varied = self._entries_of_vary()
        self.variations = self.variations_beside(())

    def scenario(self, varied: Sequence[Setting], system: Any) -> Scenario:
        """Return the scenario with these values and this system (a name, or a dictionary that has one)."""
        own = {
            "system": {str(key): value for key, value in _named(system).items()},
            "variant": ", ".join(f"{setting.key}={in_words(setting.value)}" for setting in varied),
            "file": str(self.path),
        }
        keys = tuple(setting.key for setting in varied) if all(_is_plain(s.value) for s in varied) else None
        if keys and (alike := self._alike.get(keys)) is not None:
            with suppress(ValidationError):  # the long way says why
                return self._validated({**_with_values(alike, varied), **own})
        config = self._config.copy()
        for setting in varied:
            _set(config, setting, self.path)
        _use_known_names(config, self.path.parent)
        try:
            scenario = self._validated({**_plain(config, None, self.path), **own})
            if keys and keys not in self._alike:
                self._alike[keys] = _alike(config, keys, _plain(config, None, self.path), scenario)
            return scenario
        except ValidationError as error:
            key, message = explain(error, Scenario, "scenario")
            settings = (*varied, *self._settings)
            givers = [s.giver for s in settings if f"{key}.".startswith(f"{s.key}.") or s.key.startswith(f"{key}.")]
            raise InputError(f"{', '.join([str(self.path), *givers[:1]])}: {message}") from error

    def _validated(self, data: dict[str, Any]) -> Scenario:
        _find_files(data, self.path.parent, self._presets)
        return Scenario.model_validate(data).with_profile()

    def scenarios(self, choices: Choices = _NO_CHOICES, parameters_of: ParametersOf | None = None) -> list[Scenario]:
        """Return every combination of the variations and systems, in the file's order; `choices` make systems of their own. An
        override of `system.eta` goes to the systems that have such a parameter by `parameters_of`; without it, to all."""
        systems = self._with_parameters(_chosen(self.systems, choices), parameters_of)
        return [self.scenario(varied, entry) for varied in self.variations for entry in systems]

    def data(self, parameters_of: ParametersOf | None = None) -> dict[str, Any]:
        """Return what a file would hold that stands anywhere: the keys after the overrides, references followed, paths
        absolute."""
        data: dict[str, Any] = _plain(self._config, None, self.path)
        _locate(data, self.path.parent.absolute())
        variations = [{setting.key: setting.value for setting in entry} for entry in self.variations if entry]
        systems = self._with_parameters(self.systems, parameters_of)
        return {**data, "systems": systems, **({"vary": variations} if variations else {})}

    def _with_parameters(self, systems: list[Any], parameters_of: ParametersOf | None) -> list[dict[str, Any]]:
        """Return the systems with every combination of the overrides of their parameters, each once."""
        names = dict.fromkeys(_named(entry)["name"] for entry in systems)
        if parameters_of is not None:
            for setting, *_ in self._parameters:
                require_parameter(setting.key, names, parameters_of)
        alternatives = list(product(*self._parameters))
        return _distinct([with_parameters(entry, own, parameters_of) for entry in systems for own in alternatives])

    def overruled(self, keys: Iterable[str]) -> list[str]:
        """Return a line for each of these keys that the file varies, for a caller that gives them other values."""
        varied = {key: [s.value for entry in self._varied for s in entry if s.key == key] for key in keys}
        return [
            f"{self.path}: vary has {key} {shortened(_distinct(values))}; the command line replaces them"
            for key, values in varied.items()
            if values
        ]

    def variations_beside(self, settings: Iterable[Setting]) -> list[list[Setting]]:
        """Return what each entry of `vary` sets, without overridden keys and the keys of these settings, each entry once; an
        empty entry without `vary`."""
        settings = [*self._settings, *settings]
        several = [values for key, values in self._several.items() if all(key != setting.key for setting in settings)]
        settings += [values[0] for values in several]
        for varied, setting in product((setting for entry in self._varied for setting in entry), settings):
            _require_whole(setting, varied, self.path)
        keys = {setting.key for setting in settings}
        entries = _distinct([[setting for setting in entry if setting.key not in keys] for entry in self._varied])
        return [[*entry, *values] for entry in entries for values in product(*several)]

    def _systems(self) -> list[Any]:
        systems = _entries(self._config, "systems", "[verl_colocated, {name: areal, eta: 8}]", self.path)
        if not systems:
            raise InputError(f"{self.path}: no systems; give a list such as [verl_colocated, {{name: areal, eta: 8}}]")
        for i, entry in enumerate(systems):
            if not isinstance(entry, str) and not (isinstance(entry, dict) and isinstance(entry.get("name"), str)):
                raise InputError(
                    f"{self.path}: entry {i + 1} of systems is {entry!r}; give a name, or {{name: areal, eta: 8}}"
                )
        return systems

    def _entries_of_vary(self) -> list[list[Setting]]:
        entries = _entries(self._config, "vary", "[{cluster.gpus: 64}, {cluster.gpus: 256}]", self.path) or [{}]
        for i, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise InputError(
                    f"{self.path}: entry {i + 1} of vary is {entry!r}; give key: value, such as {{cluster.gpus: 64}}"
                )
            for key in entry:
                if str(key).split(".")[0] in ("systems", "vary"):
                    raise InputError(
                        f"{self.path}: vary has {key}; it takes fields such as cluster.gpus, and systems are a list already"
                    )
        return [[Setting(str(k), value, f"vary {k}={value}") for k, value in entry.items()] for entry in entries]


def load_scenarios(
    path: str | Path,
    overrides: Sequence[str] = (),
    system: str | None = None,
    choices: Choices = _NO_CHOICES,
    parameters_of: ParametersOf | None = None,
) -> list[Scenario]:
    """Return every combination of the file's `vary` and `systems`, in the file's order, after the `key=value` overrides.

    With `system`, it replaces the file's systems, and overrides that are no key of a scenario are its parameters, written
    `eta=8` or `system.eta=8`. `choices` and `parameters_of` are as in `ScenarioFile.scenarios`. Raise `InputError` as
    `ScenarioFile` does.
    """
    settings = [override(text) for text in overrides]
    if system is not None:
        own = [s for s in settings if s.key.split(".")[0] not in _KEYS]
        settings = [s for s in settings if s not in own]
        entry = {**{s.key.removeprefix(PARAMETER): s.value for s in own}, "name": system}
        settings.insert(0, Setting("systems", [entry], f"system {system}"))
    return ScenarioFile(path, settings).scenarios(choices, parameters_of)


# Settings.


def override(text: str) -> Setting:
    """Return the setting `key=value` of a command line. Raise `InputError` for another text."""
    key, equals, written = text.partition("=")
    if key == "systems" and equals:  # a,b or [a,b]
        parts = [parse_override(f"{key}={part}")[1] for part in split_at_commas(written) if part]
        value: Any = [entry for part in parts for entry in (part if isinstance(part, list) else [part])]
    else:
        key, value = parse_override(text)
    return given(key, value, f"override {text!r}")


def _values(setting: Setting) -> list[Setting]:
    """Return a setting for each value of a text such as `16,32`; the setting itself if it has one value."""
    if (
        not isinstance(setting.value, str)
        or "," not in setting.value
        or setting.key in _FILES
        or not _is_field(setting.key)
    ):
        return [setting]
    parts = [part for part in split_at_commas(setting.value) if part]
    return [setting._replace(value=parse_override(f"{setting.key}={part}")[1]) for part in parts] or [setting]


def given(key: str, value: Any, giver: str) -> Setting:
    """Return a setting that no file gives: its paths are relative to the current folder."""
    section, _, name = key.rpartition(".")
    inside = {name: dict(value) if isinstance(value, dict) else value}
    _locate({section: inside} if section else inside, Path.cwd())
    return Setting(key, inside[name], giver)


def _is_field(key: str) -> bool:
    return key.startswith(PARAMETER) or (key.partition(".")[0] in _SECTIONS and key != "name")


def gives(setting: Setting, key: str) -> bool:
    """Return whether a setting decides a key below its own. A dictionary, which is merged, decides the keys that it has; any
    other value replaces what was there, and decides all."""
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
    """Raise `InputError` if a setting and a variation would each hold in part."""
    if gives(setting, varied.key) or gives(varied, setting.key):
        raise InputError(
            f"{path}, {setting.giver}: vary sets {varied.key} too, and only one of them can hold; give {varied.key}=…, or "
            "remove the file's with vary=null"
        )
    inner = _keys_below(varied.value, varied.key) if setting.key == varied.key else ()
    for left_out in (key for key in inner if not gives(setting, key)):
        raise InputError(
            f"{path}, {setting.giver}: vary has {left_out}, which this leaves out; give it too, or remove the file's "
            "with vary=null"
        )


def _keys_below(value: Any, key: str) -> Iterator[str]:
    for part, inner in value.items() if isinstance(value, dict) else ():
        yield f"{key}.{part}"
        yield from _keys_below(inner, f"{key}.{part}")


# Systems.


def require_parameter(key: str, systems: Iterable[str], parameters_of: ParametersOf) -> None:
    """Raise `InputError` for a key such as `system.eta` that is a parameter of none of the systems."""
    parameter, of_each = key.removeprefix(PARAMETER), {name: list(parameters_of(name)) for name in systems}
    if not any(parameter in known for known in of_each.values()):
        near = meant(parameter, [each for known in of_each.values() for each in known])
        has = "; ".join(f"{name} has {', '.join(known) or 'none'}" for name, known in of_each.items())
        raise InputError(f"{key}: no parameter of these systems{near}; {has}")


def takes(system: str, key: str, parameters_of: ParametersOf) -> bool:
    """Return whether a key changes something for a system: a field of a scenario, or a parameter that the system has."""
    return not key.startswith(PARAMETER) or key.removeprefix(PARAMETER) in parameters_of(system)


def with_parameters(entry: Any, settings: Iterable[Setting], parameters_of: ParametersOf | None) -> dict[str, Any]:
    """Return a system's entry with the values of `system.KEY` among the settings, if the system has a parameter KEY; with all
    of them where `parameters_of` is None."""
    system = _named(entry)
    own = [s for s in settings if s.key.startswith(PARAMETER)]
    if parameters_of is not None:
        own = [s for s in own if takes(system["name"], s.key, parameters_of)]
    return {**system, **{s.key.removeprefix(PARAMETER): s.value for s in own}}


def _chosen(systems: list[Any], choices: Choices) -> list[Any]:
    """Return the systems that the choices make, each once."""
    if not any(choices):
        return systems
    named = [{"name": pipeline} for pipeline in choices.pipelines] or [_named(entry) for entry in systems]
    dispatches = [{"dispatch": rule} for rule in choices.dispatches] or [{}]
    speculations = [{"speculation": _value(method)} for method in choices.speculations] or [{}]
    return _distinct([{**entry, **rule, **method} for entry, rule, method in product(named, dispatches, speculations)])


def _named(entry: Any) -> dict[str, Any]:
    return {"name": entry} if isinstance(entry, str) else entry


def _value(method: str | Mapping[str, Any]) -> Any:
    """Return `{name: histospec, gate: open}` as an object, a name as it is."""
    if isinstance(method, str) and method.startswith("{"):
        return parse_override(f"speculation={method}")[1]
    return method


def _distinct(values: list[Any]) -> list[Any]:
    return [value for i, value in enumerate(values) if value not in values[:i]]


# The file's data.


def _from_data(data: Mapping[str, Any], path: Path) -> Any:
    require_no_call(data, str(path))
    try:
        return OmegaConf.create(dict(data))
    except (OmegaConfBaseException, ValueError) as error:
        raise InputError(
            f"{path}: does not fit a scenario ({first_line(error)}); give numbers, texts, lists"
        ) from error


def _require_known(key: str, place: str, value: object) -> None:
    first, last = key.partition(".")[0], key.rpartition(".")[2]
    if first not in _KEYS:
        raise InputError(
            f"{place}: unknown key {key}; responses per prompt are workload.synthetic.group={value}; a trace has its own"
            if last in LengthModel.ELSEWHERE
            else f"{place}: unknown key {first[:LONGEST_NAME]}{meant(first, NAMES)}; a scenario has {', '.join(_KEYS)}"
        )


def _set(config: DictConfig, setting: Setting, path: Path) -> None:
    """Give a key its value; dictionaries are merged, and a number in a key is a place in a list."""
    keys, place = setting.key.split("."), f"{path}, {setting.giver}"
    if not all(re.fullmatch(r"\w+", key) for key in keys):
        raise InputError(f"{place}: {setting.key!r} is no key; write one such as cluster.gpus")
    _require_known(setting.key, place, setting.value)
    require_no_call(setting.value, place)
    try:
        for i in range(1, len(keys)):
            parent = OmegaConf.select(config, ".".join(keys[:i]))
            if parent is not None and not OmegaConf.is_config(parent):
                raise InputError(f"{place}: {'.'.join(keys[:i])} is {parent!r}, it has no {keys[i]}")
        merge = isinstance(setting.value, dict) and isinstance(OmegaConf.select(config, setting.key), DictConfig)
        OmegaConf.update(config, setting.key, setting.value, merge=merge)
    except (OmegaConfBaseException, ValueError, TypeError, IndexError) as error:
        raise InputError(f"{place}: does not fit ({first_line(error)}); correct the key") from error


def _use_known_names(config: DictConfig, folder: Path) -> None:
    """Write a model and a GPU that are spelled otherwise (`Qwen/Qwen3-8B`, `H100`) as simrl and its files name them."""
    with suppress(
        OmegaConfBaseException, OSError, ValueError
    ):  # what is wrong with them is said where they are checked
        model = OmegaConf.select(config, "model")
        if isinstance(model, str) and known_name(model) in MODELS and not (folder / model).exists():
            config["model"] = known_name(model)
        for key in ("cluster.gpu", "cluster.train.gpu"):
            if isinstance(gpu := OmegaConf.select(config, key), str):
                OmegaConf.update(config, key, known_gpu(gpu))


def _is_plain(value: Any) -> bool:
    """Return whether a value stands for itself alone."""
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and not set("$?") & set(value))


def _alike(config: DictConfig, keys: Sequence[str], data: dict[str, Any], scenario: Scenario) -> _Alike | None:
    """Return what scenarios with these keys have in common, given one of them and its data; None where one key is in another,
    is a number or the framework, or a reference of the config may lead to it."""
    parts = [part for key in keys for part in key.split(".")]
    alone = [key for key in keys if sum(f"{key}.".startswith(f"{other}.") for other in keys) == 1]
    written = repr(OmegaConf.to_container(config, resolve=False))
    references = re.findall(r"\$\{([^}]*)", written)
    followed = (f"{r}.".startswith(f"{key}.") or f"{key}.".startswith(f"{r}.") for r, key in product(references, keys))
    known = all(re.fullmatch(r"\w+(\.\w+)*", reference) for reference in references)
    if len(alone) < len(keys) or any(map(str.isdigit, parts)) or any(followed) or not known or "framework" in keys:
        return None
    changed = {key.partition(".")[0] for key in keys}
    profile = data.get("profile")
    if changed & {"model", "cluster", "precision"} and (profile is None or profile.get("path") in (None, SHIPPED)):
        return None  # the shipped profile follows them
    return _Alike(
        data, {name: getattr(scenario, name) for name in _SECTIONS if name not in changed and name != "model"}
    )


def _with_values(alike: _Alike, varied: Sequence[Setting]) -> dict[str, Any]:
    """Return the data of a scenario that is like others but for these values. It shares what it does not change."""
    data: dict[str, Any] = {**alike.data, **alike.sections}
    for setting in varied:
        *keys, last = setting.key.split(".")
        inside = data
        for key in keys:
            inside[key] = inside[key].copy()
            inside = inside[key]
        inside[last] = setting.value
    return data


def _entries(config: DictConfig, key: str, example: str, path: Path) -> list[Any]:
    """Remove the list `key` from the config and return it; an empty list if there is none."""
    entries = _plain(config, key, path)
    config.pop(key, None)
    if key == "systems" and isinstance(entries, str | dict):
        entries = override(f"systems={entries}").value if isinstance(entries, str) else [entries]
    if entries is not None and not isinstance(entries, list):
        raise InputError(f"{path}: {key} is {entries!r}; give a list such as {example}")
    return entries or []


def _plain(config: DictConfig, key: str | None, path: Path) -> Any:
    """Return plain data of a key, or of all, references followed."""
    try:
        value = config if key is None else OmegaConf.select(config, key)
        if not OmegaConf.is_config(value):
            return value
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=key is None)
    except OmegaConfBaseException as error:
        place = f"{error.full_key}: " if error.full_key else ""
        raise InputError(f"{path}: {place}{first_line(error)}; correct the reference or the key") from error


def _find_files(data: dict[str, Any], folder: Path, presets: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Replace the paths in a file's data, and a model that is a folder beside the file, by paths from the current folder, and
    files of presets by what they hold, each read once."""
    for part, name, path in _locate(data, folder):
        if path in _PRESETS:
            key = path, part[name]
            part[name] = presets.get(key) or presets.setdefault(key, preset_of_file(part[name], path))
    model = data.get("model")
    with suppress(OSError, ValueError):  # no name of a file; `model_shape` raises
        if isinstance(model, str) and model.lower() not in MODELS and (folder / model).exists():
            data["model"] = str(folder / model)


def _is_path(key: str, text: str) -> bool:
    """Return whether the value of one of `_PATHS` is a path, and no name of something that simrl has."""
    return is_preset_file(text) if key in _PRESETS else (key, text) != ("profile.path", SHIPPED)


def _locate(data: dict[str, Any], folder: Path) -> list[tuple[dict[str, Any], str, str]]:
    """Replace the paths in data by paths from a folder; a name that is none, such as a shipped preset's, stays. Return the
    places: a section, a key in it, and both."""
    places = []
    for path in _PATHS:
        section, _, name = path.rpartition(".")
        part = data.get(section) if section else data
        text = part.get(name) if isinstance(part, dict) else None
        if isinstance(part, dict) and isinstance(text, str) and _is_path(path, text):
            part[name] = str(folder / os.path.expanduser(text))  # noqa: PTH111 (pathlib's raises for an unknown ~user)
            places.append((part, name, path))
    return places
