"""Opens the workload of a command: a scenario file or its content, or a trace with keywords, as
settings of a `ScenarioFile`.

Invariant: every scenario is made by `simrl.scenario`, from a file, from keywords or from both, so
that a scenario gives equal rows from the CLI and from Python.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress, product
from pathlib import Path
from typing import Any, NamedTuple

from simrl.commands import slips
from simrl.commands.slips import require_scenario, require_section, require_settings, with_section
from simrl.errors import InputError, first_line, meant, refuse
from simrl.files import temporary_folder
from simrl.result.result import METADATA_FILE
from simrl.scenario.load import (
    FILLED_IN,
    PARAMETER,
    Choices,
    ScenarioFile,
    Setting,
    given,
    override,
    require_parameter,
    with_parameters,
)
from simrl.scenario.model import Scenario
from simrl.scenario.yaml_text import parse_override, read_yaml, split_at_commas
from simrl.simulate.cache import InputCache
from simrl.study.grid import SYSTEMS, Dimension, Listed, by_key, listed
from simrl.systems.recipes import RECIPES, parameters_of
from simrl.trace.trace import Trace, read_trace, write_trace

LOG = logging.getLogger("simrl")
TRACE_SUFFIX, TABLE_SUFFIXES = ".parquet", (".csv", ".jsonl")
# Fields of a scenario with another name than the keyword.
FIELDS = {key: f"cluster.{key}" for key in ("gpu", "gpus", "tp")} | {
    "price": "cluster.cost_per_gpu_hour"
}
NEEDED = {  # with a trace
    "model": "--model qwen3-8b",
    "gpu": "--gpu h100",
    "gpus": "--gpus 64",
    "systems": "--system verl_colocated,areal",
}


class Opened(NamedTuple):
    """An opened scenario: its name in messages, its content if there is no file, settings, and a
    trace without a file."""

    origin: str
    data: Mapping[str, Any] | None
    settings: Sequence[Setting]
    trace: Trace | None

    def file(self, more: Sequence[Setting] = ()) -> ScenarioFile:
        """Return the scenario file with these settings, and more. Raise `InputError` for a
        framework's own name of a parameter."""
        settings = [*self.settings, *more]
        file = ScenarioFile(self.origin, settings, self.data)
        keys = [s.key.removeprefix(PARAMETER) for s in settings if s.key.startswith(PARAMETER)]
        systems = [one if isinstance(one, dict) else {"name": one} for one in file.systems]
        for name, key in ((one["name"], str(key)) for one in systems for key in (*one, *keys)):
            words = key != "name" and slips.framework_key(key, name)
            refuse((words, f"{self.origin}: system {name}: {words}"))
        return file

    def scenarios(self, choices: Choices) -> list[Scenario]:
        """Return every combination of systems and variations."""
        return self.file().scenarios(choices, parameters_of)

    def inputs(self) -> InputCache:
        """Return a cache of traces and profiles that has the trace."""
        return InputCache(self.trace)

    @contextmanager
    def on_disk(self) -> Iterator[Opened]:
        """Write a trace without a file into a temporary one, which other processes can read."""
        if self.trace is None:
            yield self
            return
        with temporary_folder() as folder:
            path = folder / "trace.parquet"
            write_trace(self.trace, path)
            yield self._replace(data={**(self.data or {}), "workload": {"trace": str(path)}})


def open_workload(
    call: str,
    workload: Any,
    systems: Any,
    overrides: Any,
    setup: Mapping[str, Any] | None,
    values: Any = None,
    choices: Sequence[Any] = (),
) -> Opened:
    """Open a workload. The keywords of `setup` become settings. Overrides of a `run` that are
    parameters of its system become parameters. Raise `InputError` for a file that is neither a
    scenario nor a trace, and for keywords that a trace needs and that are missing; `values` are
    further arguments, which the message may name, and an override may set none of the `choices`."""
    if isinstance(workload, str | os.PathLike):
        more = [text for texts in (overrides, values) if isinstance(texts, list) for text in texts]
        require_scenario(call, os.fspath(workload), more)
    fields = {name: value for name, value in (setup or {}).items() if value is not None}
    profile, cap_tokens, columns = (
        fields.pop(name, None) for name in ("profile", "cap_tokens", "columns")
    )
    if columns and (is_scenario(workload) or Path(str(workload)).suffix == TRACE_SUFFIX):
        raise InputError(
            f"{workload}: no table whose columns could be named; leave --column out, or name a CSV"
        )
    overriding = every = settings_of(overrides)
    if call == "run" and systems:
        systems, overriding = _with_own(one_system(systems[0]), overriding)
    settings = (
        [Setting(SYSTEMS, listed_systems(call, systems), "argument systems")] if systems else []
    )
    settings += [
        given(FIELDS.get(k, k), _plain(v), f"argument {k}={v!r}") for k, v in fields.items()
    ]
    options = [
        Setting(key, chosen, f"option --{'pipeline' if key == SYSTEMS else key}")
        for key, chosen in zip((SYSTEMS, "dispatch", "speculation"), choices, strict=False)
        if chosen
    ]
    refuse(
        *(
            (
                one.key.removeprefix(PARAMETER) == other.key.removeprefix(PARAMETER)
                and one.value != other.value,
                f"simrl.{call}: {one.giver} and {other.giver} set one key; give one of them",
            )
            for one, other in product([*settings, *options], every)
        )
    )
    settings += overriding
    if is_scenario(workload):
        if profile is not None:
            named = {"path": None, "roofline": None, **_profile(profile)}
            settings.insert(0, given("profile", named, f"argument profile={str(profile)!r}"))
        if isinstance(workload, Mapping):
            return Opened(f"simrl.{call}", _plain(workload), settings, None)
        return Opened(os.fspath(workload), _result_of(workload), settings, None)

    trace, path = _trace(workload, cap_tokens, columns_of(columns))
    values = {setting.key: setting.value for setting in settings}
    given_keys = {*values, *(key.partition(".")[0] for key in values if "." not in key)}
    lacks = {
        n: o
        for n, o in NEEDED.items()
        if not given_keys & {k := FIELDS.get(n, n), k.partition(".")[0]}
    }
    if lacks:
        what = (
            " or ".join(lacks)
            if len(lacks) < 3
            else f"{', '.join([*lacks][:-1])} or {[*lacks][-1]}"
        )
        raise InputError(
            f"simrl.{call}: no {what}; a trace needs {'them' if len(lacks) > 1 else 'one'}: add {' '.join(lacks.values())}, or "
            "name a scenario with it as workload.trace=…"
        )
    updates = values.get("steps", len(trace.step_slices))
    data = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", trace.metadata.name).strip("-._") or "trace",
        "steps": updates,
        "warmup_steps": updates // 4 if isinstance(updates, int) else 0,
        "cluster": {"tp": 1},
        "workload": {"trace": trace.metadata.name if path is None else path},
        **({} if profile is None else {"profile": _profile(profile)}),
    }
    return Opened(f"simrl.{call}", data, settings, trace if path is None else None)


def _result_of(workload: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the scenario of a folder that `simrl run` or `simrl compare` wrote for a run; None for
    another path."""
    file = Path(workload) / METADATA_FILE
    if not file.is_file():
        return None
    try:
        scenario = dict(json.loads(file.read_text(encoding="utf-8"))["scenario"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{workload}: not a result folder ({first_line(error)}); `simrl run` writes one"
        ) from error
    return {
        "systems": [scenario.pop("system")] if "system" in scenario else [],
        **{key: value for key, value in scenario.items() if key not in FILLED_IN},
    }


def is_scenario(workload: Any) -> bool:
    """Return whether a workload is a scenario, and no trace."""
    if isinstance(workload, str | os.PathLike):
        return Path(workload).suffix not in (TRACE_SUFFIX, *TABLE_SUFFIXES)
    return isinstance(workload, Mapping)


def listed_systems(call: str, systems: Any) -> list[Any]:
    """Return systems as a scenario lists them; a text such as {name: areal, eta: 4} is an
    object."""
    if isinstance(systems, str | Mapping):
        raise InputError(
            f"simrl.{call}: systems is {systems!r}; give a list, such as [{systems!r}]"
        )
    parts = [
        part
        for one in systems
        for part in (split_at_commas(one) if isinstance(one, str) else [one])
        if part
    ]
    return [one_system(system) for system in parts]


def one_system(system: Any) -> Any:
    """Return a system as a scenario has it: its name, or an object with its parameters."""
    if isinstance(system, str) and system.startswith("{"):
        return parse_override(f"system={system}")[1]
    return _plain(system)


def settings_of(overrides: Any) -> list[Setting]:
    """Return the settings of a dictionary by dotted keys, or of texts KEY=VALUE."""
    if isinstance(overrides, str):
        raise InputError(
            f"overrides is {overrides!r}; give a list, such as [{overrides!r}], or a dictionary"
        )
    if isinstance(overrides, Mapping):
        return [
            given(with_section(key), _plain(value), f"override {key}={value!r}")
            for key, value in overrides.items()
        ]
    require_settings(overrides or ())
    settings = [
        setting if isinstance(setting, Setting) else override(setting)
        for setting in overrides or ()
    ]
    for setting in settings:
        require_section(setting.key, setting.value)
    return [setting._replace(key=with_section(setting.key)) for setting in settings]


def without_parameters(systems: Sequence[Any], overrides: Any) -> tuple[Sequence[Any], Any]:
    """Return the systems with the parameters among the overrides (eta=2), each where a system has
    it, and the other overrides. Raise `InputError` for a parameter that none has."""
    settings = settings_of(overrides)
    parameters = [setting for setting in settings if setting.key.startswith(PARAMETER)]
    if not parameters:
        return systems, overrides
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in systems]
    for setting in parameters:
        require_parameter(setting.key, [str(entry.get("name")) for entry in entries], parameters_of)
    left = [setting not in parameters for setting in settings]
    others = (
        dict(compress(overrides.items(), left))
        if isinstance(overrides, Mapping)
        else list(compress(overrides, left))
    )
    return [with_parameters(entry, parameters, parameters_of) for entry in entries], others


def _with_own(entry: Any, settings: Sequence[Setting]) -> tuple[list[Any], list[Setting]]:
    """Return a system with the settings that are parameters of it, and the others."""
    entry = entry if isinstance(entry, Mapping) else {"name": entry}
    taken = [setting for setting in settings if _is_parameter(setting.key, entry.get("name"))]
    parameters = {setting.key.removeprefix(PARAMETER): setting.value for setting in taken}
    return [{**entry, **parameters}], [setting for setting in settings if setting not in taken]


def _is_parameter(key: str, system: Any) -> bool:
    """Return whether a dotted key is a parameter of a system, and no field of a scenario, misspelt
    or not."""
    if "." in key or key in slips.FIELDS:
        return key.startswith(PARAMETER)
    known = parameters_of(system) if system in RECIPES else ()
    return bool(meant(key, known)) or not meant(key, slips.FIELDS)


def dimensions(values: Any) -> dict[str, Dimension]:
    """Return what varies, by key, from a dictionary of lists or from texts KEY=A,B,C."""
    if isinstance(values, Mapping):
        return {
            with_section(key): listed(with_section(key), several) for key, several in values.items()
        }
    require_settings(values or ())
    return by_key(
        [
            with_section(key) + equals + rest
            for key, equals, rest in (column.partition("=") for column in values or ())
        ]
    )


def fixed(settings: Sequence[Setting]) -> dict[str, Dimension]:
    """Return settings as dimensions with one value, by key."""
    return {
        s.key: listed(SYSTEMS, s.value) if s.key == SYSTEMS else Listed((s.key,), [(s,)])
        for s in settings
    }


def texts_of(values: Any) -> list[str]:
    """Return what varies as texts KEY=A,B,C."""
    if not isinstance(values, Mapping):
        return list(values or ())
    return [
        f"{key}={','.join(map(str, several)) if isinstance(several, list | tuple | range) else several}"
        for key, several in values.items()
    ]


def report_overruled(file: ScenarioFile, keys: Any) -> None:
    """Log which of these keys the file varies, before minutes are spent on a simulation."""
    for line in file.overruled(keys):
        LOG.info(line)


def folder_or_temporary(folder: Path | None) -> AbstractContextManager[Path]:
    """Give the folder, or without one a temporary folder."""
    return temporary_folder() if folder is None else nullcontext(folder)


def columns_of(columns: Any) -> dict[str, str]:
    """Return a table's columns by our names, from texts OURS=THEIRS and YAML files with lines
    `OURS: THEIRS`, or a dictionary."""
    if isinstance(columns, Mapping):
        return dict(columns)
    by_ours: dict[str, str] = {}
    for text in [columns] if isinstance(columns, str) else columns or ():
        for part in re.split(r",(?=[\w/]+=)", text):
            ours, equals, theirs = part.partition("=")
            refuse(
                (
                    not equals and Path(part).suffix not in (".yaml", ".yml"),
                    f"--column {part}: write OURS=THEIRS, such as response_tokens=out_len, or name a YAML file of OURS: THEIRS",
                )
            )
            by_ours |= (
                {ours: theirs} if equals else read_yaml(Path(part), part, "a mapping", ("OURS",))
            )
    return {str(ours): str(theirs) for ours, theirs in by_ours.items()}


def _trace(
    workload: Any, cap_tokens: int | None, columns: dict[str, str]
) -> tuple[Trace, str | None]:
    """Return a trace, and its file if it is one."""
    if isinstance(workload, str | os.PathLike):
        if cap_tokens is not None:
            raise InputError(
                f"cap_tokens={cap_tokens}: {os.fspath(workload)} has its own; leave it out"
            )
        if (suffix := Path(workload).suffix) in TABLE_SUFFIXES:
            from simrl.trace.importers.tabular import import_csv, import_jsonl

            return (import_csv if suffix == ".csv" else import_jsonl)(Path(workload), columns), None
        return read_trace(os.fspath(workload)), os.fspath(workload)
    if isinstance(workload, Trace):
        return workload, None
    from simrl.trace.importers.tabular import (
        import_frame,
    )  # needs pandas, which takes 0.2 s to import

    return import_frame(workload, columns, cap_tokens=cap_tokens), None


def _profile(profile: Any) -> dict[str, Any]:
    return {"roofline": {}} if os.fspath(profile) == "roofline" else {"path": os.fspath(profile)}


def _plain(value: Any) -> Any:
    """Return a value as YAML has it: paths as texts, numbers of numpy as Python's, tuples as
    lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.item() if hasattr(value, "item") else value
