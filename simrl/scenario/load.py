"""Loads scenarios: a YAML file with `${…}` references, overrides, variations and systems.

A file names one or several `systems` and may `vary` any field; each combination becomes one frozen,
validated `Scenario`. Paths in a file are relative to the file, paths in an override to the current
folder. An override takes three steps: `override` reads the text, `put` gives the value to its
dotted key in plain data, and pydantic makes a field of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from simrl.errors import LONGEST_NAME, InputError, meant, refuse
from simrl.profile.hardware import known_gpu
from simrl.profile.model_shape import MODELS, known_name
from simrl.profile.shipped import SHIPPED
from simrl.scenario.dotted import References, get, put, wrong_reference
from simrl.scenario.model import Scenario
from simrl.scenario.presets import is_preset_file, preset_of_file
from simrl.scenario.yaml_text import parse_override, read_yaml, split_at_commas
from simrl.trace.synthesis import LengthModel
from simrl.validation import explain, in_words, shortened

FILLED_IN = (
    "system",
    "variant",
    "file",
)  # fields that a file does not have: it has `systems` and `vary`
_SECTIONS = {
    key: field.annotation for key, field in Scenario.model_fields.items() if key not in FILLED_IN
}
_LISTS = {  # of the file, with an example
    "systems": "[verl_colocated, {name: areal, eta: 8}]",
    "vary": "[{cluster.gpus: 64}, {cluster.gpus: 256}]",
}
_KEYS = (*_SECTIONS, *_LISTS)
NAMES = [
    *_KEYS,
    *(
        f"{key}.{part}"
        for key, kind in _SECTIONS.items()
        for part in getattr(kind, "model_fields", ())
    ),
]
_PRESETS = ("engine.preset", "framework")
_FILES = (
    *("workload.trace", "evaluation.lengths.trace", "profile.path", "judge.profile.path"),
    *("profile.tau", "speculation.draft_profile"),
)
_MODELS = ("model", "judge.model")  # names, or folders
_GPUS = ("cluster.gpu", "cluster.train.gpu", "judge.gpu")  # names, or files of data sheets
_PATHS = (*_FILES, *_PRESETS, *_GPUS)
_EITHER = {"workload.trace": "workload.synthetic", "profile.path": "profile.roofline"}
_EITHER |= {
    other: key for key, other in _EITHER.items()
}  # of such a pair, an override of one replaces the other

PARAMETER = "system."  # begins a key that is a parameter of the systems
ParametersOf = Callable[[str], Mapping[str, Any]]  # the parameters of a system, by its name


class Setting(NamedTuple):
    """A value for a dotted key, and its giver: the words with which a message names the source."""

    key: str
    value: Any
    giver: str


class Choices(NamedTuple):
    """The three choices of systems, several of each or none: every combination is a system. Without
    pipelines, the systems of the file stay; a dispatch or a speculation replaces theirs."""

    pipelines: Sequence[str] = ()
    dispatches: Sequence[str] = ()
    speculations: Sequence[str | Mapping[str, Any]] = ()


_NO_CHOICES = Choices()


class ScenarioFile:
    """A file after the `key=value` overrides: its systems, its variations, and the scenarios that
    they make.

    An override with several values, `16,32`, is a variation. An override of a key that the file
    varies replaces the variation, which `overruled` reports. An override of a part of a varied
    section, or of a section with a varied part, is refused, for a part would be lost. All methods
    raise `InputError` naming file, key and value. Without a file, `data` has its contents, and
    `path` is its name in messages.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Sequence[Setting] = (),
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path = Path(path)
        data = read_yaml(path, str(path), "a scenario", _KEYS) if data is None else data
        refuse((not data, f"{path}: no keys; a scenario has {', '.join(_KEYS)}"))
        for key in (key for key in data if key not in _KEYS):
            raise _unknown(str(key), str(path), data[key])
        if wrong := wrong_reference(repr(data)):
            raise InputError(f"{path}: {wrong}")
        self._presets: dict[tuple[str, str], dict[str, Any]] = {}  # each file is read once
        last = {
            setting.key: setting for setting in settings
        }  # of equal keys the last one holds, one value or several
        settings = [setting for setting in settings if setting is last[setting.key]]
        values = [
            _values(s) if isinstance(s.value, str) and "," in s.value else [s] for s in settings
        ]
        parameters = [several for several in values if several[0].key.startswith(PARAMETER)]
        fields = [several for several in values if several not in parameters]
        self._several = {several[0].key: several for several in fields if len(several) > 1}
        self._settings = [several[0] for several in fields if len(several) == 1]
        systems = data.get("systems") if "systems" in last else ()
        self._replaced = systems if isinstance(systems, list) else []
        data = self._with(data, self._settings)
        keys = {setting.key for setting in self._settings if setting.value is not None}
        for other in {_EITHER[key] for key in keys & _EITHER.keys()} - {
            setting.key for setting in self._settings
        }:
            data = put(data, other, None) if get(data, other) is not None else data
        self._data = {key: value for key, value in data.items() if key not in _LISTS}
        references = References(self._data, str(path))
        self._parameters = [
            [s._replace(value=references.resolved(s.value, s.key)) for s in several]
            for several in parameters
        ]
        lists = references.resolved({key: data.get(key) for key in _LISTS})
        self.systems = self._systems(lists["systems"])
        self._varied = self._entries_of_vary(lists["vary"])
        self.variations = self.variations_beside(())

    def scenario(self, varied: Sequence[Setting], system: Any) -> Scenario:
        """Return the scenario with these values and this system (a name, or a dictionary that has
        one)."""
        data = _with_known_names(self._with(self._data, varied), self.path.parent)
        data = {
            **References(data, str(self.path)).resolved(data),
            "system": {str(key): value for key, value in _named(system).items()},
            "variant": ", ".join(f"{setting.key}={in_words(setting.value)}" for setting in varied),
            "file": str(self.path),
        }
        try:
            return Scenario.model_validate(self._with_files(data)).with_profile()
        except ValidationError as error:
            key, message = explain(error, Scenario, "scenario")
            settings = (*varied, *self._settings)
            givers = [
                s.giver
                for s in settings
                if f"{key}.".startswith(f"{s.key}.") or s.key.startswith(f"{key}.")
            ]
            raise InputError(f"{', '.join([str(self.path), *givers[:1]])}: {message}") from error

    def scenarios(
        self, choices: Choices = _NO_CHOICES, parameters_of: ParametersOf | None = None
    ) -> list[Scenario]:
        """Return every combination of the variations and systems, in the file's order; `choices`
        make systems of their own. An override of `system.eta` goes to the systems that have such a
        parameter by `parameters_of`; without it, to all."""
        systems = self._with_parameters(_chosen(self.systems, choices), parameters_of)
        return [self.scenario(varied, entry) for varied in self.variations for entry in systems]

    def data(self, parameters_of: ParametersOf | None = None) -> dict[str, Any]:
        """Return the contents of a file that may lie anywhere: the keys after the overrides,
        references followed, paths absolute."""
        data = _located(
            References(self._data, str(self.path)).resolved(self._data), self.path.parent.absolute()
        )
        variations = [
            {setting.key: setting.value for setting in entry} for entry in self.variations if entry
        ]
        systems = self._with_parameters(self.systems, parameters_of)
        return {**data, "systems": systems, **({"vary": variations} if variations else {})}

    def overruled(self, keys: Iterable[str]) -> list[str]:
        """Return a line for each of these keys that the file varies, for a caller that gives them
        other values."""
        varied = {
            key: [s.value for entry in self._varied for s in entry if s.key == key] for key in keys
        }
        return [
            f"{self.path}: vary has {key} {shortened(_distinct(values))}; the command line replaces them"
            for key, values in varied.items()
            if values
        ]

    def replaced(self) -> list[str]:
        """Return a line for each system of the file with parameters that a setting replaces by its
        name alone."""
        names = {entry["name"] for entry in map(_named, self.systems) if len(entry) == 1}
        return [
            f"{self.path}: systems has {in_words(entry)}; {entry['name']} runs with its defaults"
            for entry in self._replaced
            if isinstance(entry, dict) and entry.get("name") in names and len(entry) > 1
        ]

    def variations_beside(self, settings: Iterable[Setting]) -> list[list[Setting]]:
        """Return the settings of each entry of `vary`, without overridden keys and the keys of
        these settings; equal entries once, and one empty entry without `vary`."""
        settings = [*self._settings, *settings]
        several = [
            values
            for key, values in self._several.items()
            if all(key != setting.key for setting in settings)
        ]
        settings += [values[0] for values in several]
        for varied, setting in product(
            (setting for entry in self._varied for setting in entry), settings
        ):
            _require_whole(setting, varied, self.path)
        keys = {setting.key for setting in settings}
        entries = _distinct(
            [[setting for setting in entry if setting.key not in keys] for entry in self._varied]
        )
        return [[*entry, *values] for entry in entries for values in product(*several)]

    def _with(self, data: Mapping[str, Any], settings: Iterable[Setting]) -> Mapping[str, Any]:
        """Return data with the values of settings."""
        for setting in settings:
            place = f"{self.path}, {setting.giver}"
            data = put(data, setting.key, setting.value, place)
            if setting.key.partition(".")[0] not in _KEYS:
                raise _unknown(setting.key, place, setting.value)
        return data

    def _with_files(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return data with paths from the current folder, also to a model that is a folder beside
        the file, and with the presets of files."""
        data = _located(data, self.path.parent)
        for key in _PRESETS:
            if isinstance(text := get(data, key), str) and is_preset_file(text):
                if (key, text) not in self._presets:
                    self._presets[key, text] = preset_of_file(text, key)
                data = put(data, key, self._presets[key, text])
        return data

    def _with_parameters(
        self, systems: list[Any], parameters_of: ParametersOf | None
    ) -> list[dict[str, Any]]:
        """Return the systems with every combination of the overrides of their parameters, each
        once."""
        names = dict.fromkeys(_named(entry)["name"] for entry in systems)
        if parameters_of is not None:
            for setting, *_ in self._parameters:
                require_parameter(setting.key, names, parameters_of)
        combinations = list(product(*self._parameters))
        return _distinct(
            [
                with_parameters(entry, some, parameters_of)
                for entry in systems
                for some in combinations
            ]
        )

    def _systems(self, systems: Any) -> list[Any]:
        if isinstance(systems, str):  # split,areal
            systems = override(f"systems={systems}").value
        entries = _entries(
            "systems", [systems] if isinstance(systems, dict) else systems, self.path
        )
        if not entries:
            raise InputError(f"{self.path}: no systems; give a list such as {_LISTS['systems']}")
        for i, entry in enumerate(entries):
            if not isinstance(entry, str) and not (
                isinstance(entry, dict) and isinstance(entry.get("name"), str)
            ):
                raise InputError(
                    f"{self.path}: entry {i + 1} of systems is {entry!r}; give a name, or {{name: areal, eta: 8}}"
                )
        return entries

    def _entries_of_vary(self, entries: Any) -> list[list[Setting]]:
        entries = _entries("vary", entries, self.path) or [{}]
        for i, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise InputError(
                    f"{self.path}: entry {i + 1} of vary is {entry!r}; give key: value, such as {{cluster.gpus: 64}}"
                )
            for key in entry:
                if str(key).split(".")[0] in _LISTS:
                    raise InputError(
                        f"{self.path}: vary has {key}; it takes fields such as cluster.gpus, and systems are a list already"
                    )
        return [
            [Setting(str(k), value, f"vary {k}={value}") for k, value in entry.items()]
            for entry in entries
        ]


def load_scenarios(
    path: str | Path,
    overrides: Sequence[str] = (),
    system: str | None = None,
    choices: Choices = _NO_CHOICES,
    parameters_of: ParametersOf | None = None,
) -> list[Scenario]:
    """Return every combination of the file's `vary` and `systems`, in the file's order, after the
    `key=value` overrides.

    With `system`, it replaces the file's systems, and overrides that are no key of a scenario are
    its parameters, written `eta=8` or `system.eta=8`. `choices` and `parameters_of` are as in
    `ScenarioFile.scenarios`. Raise `InputError` as `ScenarioFile` does.
    """
    settings = [override(text) for text in overrides]
    if system is not None:
        parameters = [s for s in settings if s.key.split(".")[0] not in _KEYS]
        settings = [s for s in settings if s not in parameters]
        entry = {**{s.key.removeprefix(PARAMETER): s.value for s in parameters}, "name": system}
        settings.insert(0, Setting("systems", [entry], f"system {system}"))
    return ScenarioFile(path, settings).scenarios(choices, parameters_of)


# Settings.


def override(text: str) -> Setting:
    """Return the setting `key=value` of a command line. Raise `InputError` for another text."""
    key, equals, written = text.partition("=")
    if key == "systems" and equals:  # a,b or [a,b]
        parts = [parse_override(f"{key}={part}")[1] for part in split_at_commas(written) if part]
        value: Any = [
            entry for part in parts for entry in (part if isinstance(part, list) else [part])
        ]
    else:
        key, value = parse_override(text)
    setting = Setting(key, value, f"override {text!r}")
    return given(*setting) if _may_have_paths(key) else setting


def _values(setting: Setting) -> list[Setting]:
    """Return a setting for each value of a text such as `16,32`; the setting itself if it has one
    value."""
    key, text, _ = setting
    is_field = key.startswith(PARAMETER) or (key.partition(".")[0] in _SECTIONS and key != "name")
    parts = (
        [part for part in split_at_commas(text) if part] if is_field and key not in _FILES else []
    )
    return [setting._replace(value=parse_override(f"{key}={part}")[1]) for part in parts] or [
        setting
    ]


def given(key: str, value: Any, giver: str) -> Setting:
    """Return a setting from outside a file: its paths are relative to the current folder."""
    if _may_have_paths(key):
        value = get(_located(put({}, key, value), Path.cwd()), key)
    return Setting(key, value, giver)


def _may_have_paths(key: str) -> bool:
    return any(f"{path}.".startswith(f"{key}.") for path in _PATHS)


def gives(setting: Setting, key: str) -> bool:
    """Return whether a setting decides a key below its own. A dictionary is merged and decides the
    keys in it; any other value replaces all that was there and decides every key."""
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
    """Raise `InputError` if only a part of a setting, or of a variation, would hold."""
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
    """Raise `InputError` for a key such as `system.eta` that is a parameter of none of the
    systems."""
    parameter, known = (
        key.removeprefix(PARAMETER),
        {name: list(parameters_of(name)) for name in systems},
    )
    if not any(parameter in names for names in known.values()):
        near = meant(parameter, [name for names in known.values() for name in names])
        has = "; ".join(
            f"{system} has {', '.join(names) or 'none'}" for system, names in known.items()
        )
        raise InputError(f"{key}: no parameter of these systems{near}; {has}")


def takes(system: str, key: str, parameters_of: ParametersOf) -> bool:
    """Return whether a key changes something for a system: a field of a scenario, or a parameter
    that the system has."""
    return not key.startswith(PARAMETER) or key.removeprefix(PARAMETER) in parameters_of(system)


def with_parameters(
    entry: Any, settings: Iterable[Setting], parameters_of: ParametersOf | None
) -> dict[str, Any]:
    """Return a system's entry with the values of `system.KEY` among the settings, if the system has
    a parameter KEY; with all of them where `parameters_of` is None."""
    system = _named(entry)
    taken = [s for s in settings if s.key.startswith(PARAMETER)]
    if parameters_of is not None:
        taken = [s for s in taken if takes(system["name"], s.key, parameters_of)]
    return {**system, **{s.key.removeprefix(PARAMETER): s.value for s in taken}}


def _chosen(systems: list[Any], choices: Choices) -> list[Any]:
    """Return the systems that the choices make, each once."""
    if not any(choices):
        return systems
    named = [{"name": pipeline} for pipeline in choices.pipelines] or [
        _named(entry) for entry in systems
    ]
    dispatches = [{"dispatch": rule} for rule in choices.dispatches] or [{}]
    speculations = [{"speculation": _value(method)} for method in choices.speculations] or [{}]
    return _distinct(
        [
            {**entry, **rule, **method}
            for entry, rule, method in product(named, dispatches, speculations)
        ]
    )


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


def _unknown(key: str, place: str, value: object) -> InputError:
    first, last = key.partition(".")[0], key.rpartition(".")[2]
    return InputError(
        f"{place}: unknown key {key}; responses per prompt are workload.synthetic.group={value}; a trace has its own"
        if last in LengthModel.ELSEWHERE
        else f"{place}: unknown key {first[:LONGEST_NAME]}{meant(first, NAMES)}; a scenario has {', '.join(_KEYS)}"
    )


def _entries(key: str, entries: Any, path: Path) -> list[Any]:
    if entries is not None and not isinstance(entries, list):
        raise InputError(f"{path}: {key} is {entries!r}; give a list such as {_LISTS[key]}")
    return entries or []


def _with_known_names(data: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return data in which a model and GPUs have simrl's names, however they are spelled:
    `Qwen/Qwen3-8B`, `H100`."""
    for key in _MODELS:
        model = get(data, key)
        if (
            isinstance(model, str)
            and (name := known_name(model)) in MODELS
            and not os.path.exists(folder / model)  # noqa: PTH110 (pathlib's raises for a long name)
        ):
            data = put(data, key, name)
    for key in _GPUS:
        if isinstance(gpu := get(data, key), str):
            data = put(data, key, known_gpu(gpu))
    return data


def _located(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return data with its paths as paths from a folder; a name that is none, such as a shipped
    preset's, stays."""
    data = dict(data)
    for key in (*_PATHS, *_MODELS):
        text = get(data, key)
        if isinstance(text, str) and (
            is_preset_file(text)
            if key in (*_PRESETS, *_GPUS)
            else not key.endswith("profile.path") or text != SHIPPED
            if key in _FILES
            else text.lower() not in MODELS and os.path.exists(folder / text)  # noqa: PTH110 (pathlib's raises for a long name)
        ):
            data = put(data, key, str(folder / os.path.expanduser(text)))  # noqa: PTH111 (pathlib's raises for an unknown ~user)
    return data
