"""The settings of a run as flat keys, from the file that starts it.

Invariant: a file is read as text or as data, never run. Keys are joined by dots, with underscores
for dashes and commas; what a file beside it gives stands beneath what it says itself. A value with
an expansion or an interpolation that only a run resolves keeps its `$`.
"""

from __future__ import annotations

import json
import os.path
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from simrl.errors import InputError, first_line, refuse
from simrl.launch.expression import arithmetic
from simrl.launch.python import calls_of
from simrl.launch.shell import commands_of, text_of
from simrl.launch.tables import TABLES, Table
from simrl.scenario.dotted import merged
from simrl.scenario.yaml_text import parse_override, read_yaml

Settings = dict[str, Any]
MOST_FILES = 40  # that `defaults` name
MOST_STEPS = 20  # of interpolations
MOST_KEYS = 5_000
MOST_BITS = 300  # of a whole number
MOST_TEXT = 10_000  # characters of a value
MOST_PYTHON, MOST_DATA = 200_000, 1_000_000  # bytes of a file
REMEDY = "name a launch script or a configuration file"
TITLES = ", ".join(table.title for table in TABLES)
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_OVERRIDE = re.compile(r"\+{0,2}([a-z_][\w./@-]*)=(?!=)(.*)", re.DOTALL)
_OPERATIONS = {"mul": "*", "div": "/", "add": "+", "sub": "-"}
_OPERATIONS |= {"multiply": "*", "divide": "/", "subtract": "-"}


@dataclass
class Launch:
    """A framework and the settings that a file starts it with. `guessed` has the places where only a
    run decides, and how they were read."""

    path: Path
    table: Table
    settings: Settings
    guessed: list[str] = field(default_factory=list)


def read_launch(path: Path) -> Launch:
    """Return what a file starts. Raise `InputError` for a file that cannot be read, starts no RL
    training, or is of no known framework."""
    is_data = path.suffix.lower() in (".yaml", ".yml", ".toml", ".json")
    read = _of_data if is_data else _of_python if path.suffix.lower() == ".py" else _of_script
    try:
        launch = read(path)
    except RecursionError as error:
        raise InputError(f"{path}: nested too deeply; {REMEDY}") from error
    if len(launch.settings) > MOST_KEYS:
        raise InputError(f"{path}: {len(launch.settings):,} keys; {MOST_KEYS:,} are the most")
    settings = {
        key: _resolved(key, value, launch.settings) for key, value in launch.settings.items()
    }
    return Launch(path, launch.table, settings, launch.guessed)


# Shell scripts.


def _of_script(path: Path) -> Launch:
    text = text_of(path)
    marks = {one.name: re.compile("|".join(one.programs or ["(?!)"])) for one in TABLES}
    every = re.compile("|".join(mark.pattern for mark in marks.values()))
    for unknown in (False, True):
        commands, script = commands_of(
            path, text, lambda text: every.search(text[:MOST_TEXT]), unknown
        )
        for words, table in ((words, table) for words in commands for table in TABLES):
            program = marks[table.name].search(" ".join(words)[:MOST_TEXT])
            if program and (settings := _of_words(words, table, path, script.guessed)):
                return Launch(path, table, {"program": program[0], **settings}, script.guessed)
    missing = [guess for guess in script.guessed if guess.startswith("--")]
    why = _no_rl(" ".join(chain.from_iterable(script.commands)), TABLES)
    nothing = next(iter(missing), f"no command starts RL training with {TITLES}")
    raise InputError(f"{path}: {why or f'{nothing}; {REMEDY}'}")


def _no_rl(text: str, tables: Iterable[Table]) -> str:
    reasons = {pattern: why for table in tables for pattern, why in table.no_rl.items()}
    return next(
        (
            why if ";" in why else f"{why}, no RL rollouts; {REMEDY}"
            for pattern, why in reasons.items()
            if re.search(pattern, text)
        ),
        "",
    )


def _of_words(words: list[str], table: Table, path: Path, guessed: list[str]) -> Settings:
    """Return the settings of a command: of its configuration files, and of its arguments above."""
    options = _options(words)
    files = {option: _list(options.pop(option)) for option in table.config if option in options}
    if table.style == "hydra":  # what stands behind the file are overrides
        files = {option: names[:1] for option, names in files.items()}
    folder, name = (str(_list(options.get(key, "."))[0]) for key in ("config_path", "config_name"))
    settings: Settings = {}
    if "config_name" in options:  # Hydra's
        files["config_name"] = [f"{folder}/{name.removesuffix('.yaml')}.yaml"]
        settings["config_name"] = name
    for option, name in ((option, name) for option, names in files.items() for name in names):
        if (file := _beside(str(name), path)) is not None:
            settings = _flat(_data(file, guessed, []), table.config.get(option, "")) | settings
        else:
            guessed.append(
                f"--{option} {name}: not found beside the script, the framework's defaults are taken"
            )
    if table.style == "options":
        return settings | options
    overrides = [match for word in words if (match := _OVERRIDE.fullmatch(word))]
    return settings | dict(
        chain.from_iterable(_flat(_typed(one[2]), _plain(one[1])).items() for one in overrides)
    )


def _options(words: list[str]) -> Settings:
    """Return the values behind the words that begin with dashes; true where there is none. A word
    `@` is prime-rl's option for a file."""
    options: dict[str, list[Any]] = {}
    values: list[Any] = []
    for word in words:
        if re.match(r"--[A-Za-z]", word) or word == "@":
            key, equals, text = word.lstrip("-").partition("=")
            options[_plain(key)] = [_typed(text)] if equals else []
            values = [] if equals else options[_plain(key)]
        elif re.match(r"-[A-Za-z]", word):
            values = []
        elif not values or not (
            word.startswith("$") or word.endswith(".py")
        ):  # more of the words that only a run knows
            values.append(_typed(word))
    return {
        key: values[0] if len(values) == 1 else values or True for key, values in options.items()
    }


def is_file(path: Path) -> bool:
    """Return whether a file is there; pathlib's own raises for a name that is too long."""
    return os.path.isfile(path)  # noqa: PTH113


def _beside(name: str, path: Path) -> Path | None:
    """Return a file that a script names, from its folder or one above; of a path that begins with
    an unknown variable, the end."""
    name = re.sub(r"^.*[$}][^/]*/", "", name)[:1000]
    folders = [path.parent, *path.resolve().parents][:8] if name else []
    return next((folder / name for folder in folders if is_file(folder / name)), None)


def _typed(text: str) -> Any:
    """Return the value of an argument: a number, true or false, a list, or the text itself."""
    if "$" in text or text.strip() in ("", "*") or len(text) > MOST_TEXT:
        return text
    try:
        return parse_override(
            f"value={ {'True': 'true', 'False': 'false', 'None': 'null'}.get(text, text) }"
        )[1]
    except InputError:
        return text


# YAML, TOML, JSON.


def _of_data(path: Path) -> Launch:
    guessed: list[str] = []
    settings = _flat(_data(path, guessed, []))
    table = next((table for table in TABLES if settings.keys() & set(table.known_by)), None)
    if table is None:
        raise InputError(f"{path}: no configuration of {TITLES}; {REMEDY}")
    if why := _no_rl(" ".join([*settings, str(settings.get("_target_", ""))]), [table]):
        raise InputError(f"{path}: {why}")
    return Launch(path, table, settings, guessed)


def _data(path: Path, guessed: list[str], read: list[Path]) -> dict[str, Any]:
    """Return the data of a file, merged over the data of the files that its `defaults` name; `read`
    has the files that were read so far."""
    read.append(path)
    if len(read) > MOST_FILES:
        raise InputError(f"{path}: `defaults` name more than {MOST_FILES} files; correct them")
    readers = {".toml": tomllib.loads, ".json": json.loads}
    text = text_of(path, MOST_DATA)
    try:
        if (parse := readers.get(path.suffix.lower())) is not None:
            data: Any = parse(text)
        elif re.search(r"(?m)^\s*[^#\s]", text):
            data = read_yaml(path, str(path), "a configuration", ("model",), references=False)
        else:
            return {}  # comments alone
    except ValueError as error:
        raise InputError(f"{path}: {first_line(error)}; correct the file") from error
    refuse((not isinstance(data, dict), f"{path}: no keys; {REMEDY}"))
    below: dict[str, Any] = {}
    for entry in _list(data.pop("defaults", [])):
        group, name = (
            next(iter(entry.items()), ("", "")) if isinstance(entry, dict) else ("", entry)
        )
        (folder, _, at), (name, _, package) = str(group).partition("@"), str(name).partition("@")
        folder = folder.removeprefix("override ").lstrip("/")
        file = path.parent / folder / f"{name.removesuffix('.yaml')}.yaml"
        if name != "_self_" and is_file(file):
            inner = _data(file, guessed, read)
            for part in reversed(re.findall(r"[^./]+", at or package or folder)):
                inner = inner if part in ("_here_", "_global_") else {part: inner}
            below = merged(below, inner)
        elif name not in ("_self_", "") and not is_file(file):
            guessed.append(f"defaults: {name}: not found beside {path.name}, left out")
    return merged(below, data)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _flat(data: Any, prefix: str = "") -> Settings:
    """Return data by dotted keys; mappings in a list by their place in it."""
    if isinstance(data, list) and any(isinstance(value, dict) for value in data):
        data = dict(enumerate(data))
    if not isinstance(data, dict) or not data:
        return {prefix: data} if prefix else {}
    inner = (
        _flat(value, f"{prefix}.{_plain(str(key))}".lstrip(".")) for key, value in data.items()
    )
    return dict(chain.from_iterable(one.items() for one in inner))


def _plain(key: str) -> str:
    return re.sub(r"[-,]", "_", key)


def _resolved(key: str, value: Any, settings: Settings) -> Any:
    """Return a value in which `${a.b}`, `${.b}`, `${oc.env:X,8}` and `${mul:2,${a.b}}` are
    followed."""

    def text(match: re.Match[str]) -> str:
        function, colon, arguments = match[1].partition(":")
        parts = [part.strip() for part in arguments.split(",")]
        inner: Any = settings.get(_target(match[1], key))
        if function in ("oc.env", "oc.select") and len(parts) > 1:
            inner = settings.get(parts[0], ",".join(parts[1:]))
        elif function in ("max", "min") and all(part.isdigit() for part in parts):
            inner = (max if function == "max" else min)(map(int, parts))
        elif colon:
            inner = arithmetic(f" {_OPERATIONS.get(function, '')} ".join(parts))
        return f"$[{match[1]}]" if inner is None or isinstance(inner, list) else str(inner)

    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return "$[a number of more digits than a field has]"
    for _ in range(MOST_STEPS):
        if not isinstance(value, str) or len(value) > MOST_TEXT or not _INNERMOST.search(value):
            break
        whole = _INNERMOST.fullmatch(value)
        target = _target(whole[1], key) if whole else ""
        value = settings[target] if target in settings else _typed(_INNERMOST.sub(text, value))
    return value


def _target(name: str, key: str) -> str:
    """Return the key that an interpolation in the value of a key names."""
    dots = len(name) - len(name.lstrip("."))
    return _plain(".".join([*(key.split(".")[:-dots] if dots else []), name[dots:]]))


# Python.


def _of_python(path: Path) -> Launch:
    """Return the keywords of a framework's configuration class in a Python file, or the options in
    the text that it hands to its launcher."""
    text = text_of(path, MOST_PYTHON)
    calls, guessed = calls_of(path, text), list[str]()
    models = [
        words["model"] for name, words in calls if name.endswith("Trainer") and "model" in words
    ]
    for table, (name, keywords) in ((table, call) for table in TABLES for call in calls):
        if table.classes and table.name in text and re.fullmatch(table.classes, name):
            words = str(keywords.pop("train_args", "")).split()
            named = {"model_name_or_path": models[0]} if models else {}
            settings = {**named, **keywords, **_of_words(words, table, path, guessed)}
            return Launch(path, table, {"config_class": name, **settings}, guessed)
    raise InputError(
        f"{path}: no call of a configuration class such as GRPOConfig(…); name the script with the command line that starts it"
    )
