"""The settings of a run as flat keys, from the file that starts it.

Invariant: a file is read as text or as data, never run. Keys are joined by dots, with underscores
for dashes; what a file beside it gives stands beneath what it says itself. A value with an
expansion or an interpolation that only a run resolves keeps its `$`.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from simrl.errors import InputError, first_line
from simrl.launch.expression import arithmetic
from simrl.launch.shell import MOST_BYTES, script_of, text_of, words_with
from simrl.launch.tables import TABLES, Table
from simrl.scenario.yaml_text import parse_override, read_yaml

Settings = dict[str, Any]
MOST_FILES = 20  # in one another
MOST_TEXT = 10_000  # characters of a value
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_OVERRIDE = re.compile(r"(\+{0,2}|~)([\w./@-]+)=(?!=)(.*)", re.DOTALL)
_OPERATORS = {"mul": "*", "div": "/", "add": "+", "sub": "-", "max": None, "min": None}


@dataclass
class Launch:
    """What a file starts: a framework and its settings. `guessed` has the places where only a run
    decides, and how they were read."""

    path: Path
    table: Table
    settings: Settings
    guessed: list[str] = field(default_factory=list)


def read_launch(path: Path) -> Launch:
    """Return what a file starts. Raise `InputError` for a file that cannot be read, starts no RL
    training, or is of no known framework."""
    readers = {
        ".yaml": _of_data,
        ".yml": _of_data,
        ".toml": _of_data,
        ".json": _of_data,
        ".py": _of_python,
    }
    launch = readers.get(path.suffix.lower(), _of_script)(path)
    launch.settings = _resolved(launch.settings)
    return launch


# Shell scripts.


def _of_script(path: Path) -> Launch:
    text = text_of(path)
    marks = {table.name: re.compile("|".join(table.programs)) for table in TABLES if table.programs}
    every = re.compile("|".join(mark.pattern for mark in marks.values()))
    for unknown in (False, True):
        script = script_of(path, text, unknown)
        for words in words_with(script.commands, path, every.search):
            for table in TABLES:
                program = table.programs and marks[table.name].search(" ".join(words))
                if program and (settings := _of_words(words, table, path, script.guessed)):
                    return Launch(path, table, {"program": program[0], **settings}, script.guessed)
    shown = ", ".join(table.title for table in TABLES)
    why = _no_rl(" ".join(chain.from_iterable(script.commands)), TABLES)
    raise InputError(
        f"{path}: {why or f'no command starts RL training with {shown}'}; name a launch script or a configuration file"
    )


def _no_rl(text: str, tables: Iterable[Table]) -> str:
    reasons = {pattern: why for table in tables for pattern, why in table.no_rl.items()}
    return next(
        (f"{why}, no RL rollouts" for pattern, why in reasons.items() if re.search(pattern, text)),
        "",
    )


def _of_words(words: list[str], table: Table, path: Path, guessed: list[str]) -> Settings:
    """Return the settings of a command: of its configuration files, and of its arguments above."""
    options = _options(words)
    settings: Settings = {}
    if (name := options.get("config_name")) is not None:  # Hydra's
        folder = str(options.get("config_path", "."))
        if (file := _beside(f"{folder}/{str(name).removesuffix('.yaml')}.yaml", path)) is not None:
            settings = _flat(_data(file))
        settings["config_name"] = name
    for option, below in table.config.items():
        names = options.pop(option, [])
        for name in names if isinstance(names, list) else [names]:
            if (file := _beside(str(name), path)) is not None:
                settings |= _flat(_data(file), below)
            else:
                guessed.append(
                    f"--{option} {name}: not found beside the script, the framework's defaults are taken"
                )
    for word in words:
        if table.style == "hydra" and (match := _OVERRIDE.fullmatch(word)):
            settings |= _flat(_typed(match[3]), _plain(match[2]))
    return settings | (options if table.style == "options" else {})


def _options(words: list[str]) -> Settings:
    """Return the values behind the words that begin with dashes; true where there is none. A word
    `@` is prime-rl's option for a file."""
    options: Settings = {}
    key = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word) or word == "@":
            key, equals, text = word.lstrip("-").partition("=")
            key = _plain(key)
            options[key] = _typed(text) if equals else True
            key = "" if equals else key
        elif key and not re.match(r"-[A-Za-z]", word):
            before, value = options[key], _typed(word)
            options[key] = (
                value
                if before is True
                else [*(before if isinstance(before, list) else [before]), value]
            )
        else:
            key = ""
    return options


def _beside(name: str, path: Path) -> Path | None:
    """Return a file that a script names, from its folder or one above."""
    if "$" in name or len(name) > 1_000:
        name = name.rpartition("}")[2].lstrip("/") or name.rpartition("/")[2]
    folders = [path.parent, *path.resolve().parents][:8]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _typed(text: str) -> Any:
    """Return the value of an argument: a number, true or false, a list, or the text itself."""
    if "$" in text or text.strip() in ("", "*") or len(text) > MOST_TEXT:
        return text
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        return parse_override(f"value={text}")[1]
    except InputError:
        return text


# YAML, TOML, JSON.


def _of_data(path: Path) -> Launch:
    settings = _flat(_data(path))
    for table in TABLES:
        if any(key in settings for key in table.known_by):
            if why := _no_rl(" ".join([*settings, str(settings.get("_target_", ""))]), [table]):
                raise InputError(f"{path}: {why}; name the configuration of an RL run")
            return Launch(path, table, settings)
    shown = "; ".join(
        f"{table.title} has {table.known_by[0]}" for table in TABLES if table.known_by
    )
    raise InputError(f"{path}: a configuration of no framework that simrl reads: {shown}")


def _data(path: Path, depth: int = 0) -> dict[str, Any]:
    """Return a file's data on that of the files that its `defaults` name."""
    text = text_of(path)
    try:
        if path.suffix == ".toml":
            data: Any = tomllib.loads(text)
        elif path.suffix == ".json":
            data = json.loads(text)
        else:
            data = read_yaml(path, str(path), "a configuration", ("model",), references=False)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {first_line(error)}; correct the file") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: no keys; name a configuration file")
    below: dict[str, Any] = {}
    for entry in _list(data.pop("defaults", [])) if depth < MOST_FILES else []:
        group, name = (
            next(iter(entry.items())) if isinstance(entry, dict) and entry else ("", entry)
        )
        group = str(group).removeprefix("override ").lstrip("/")
        name, _, package = str(name).partition("@")
        file = path.parent / group.partition("@")[0] / f"{name.removesuffix('.yaml')}.yaml"
        if name != "_self_" and file.is_file():
            inner = _data(file, depth + 1) if file.stat().st_size else {}
            key = group.partition("@")[2] or package or group
            for part in reversed(
                [part for part in re.split(r"[./]", key) if part not in ("", "_here_", "_global_")]
            ):
                inner = {part: inner}
            below = _merged(below, inner)
    return _merged(below, data)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(below[key], value)
        if isinstance(value, dict) and isinstance(below.get(key), dict)
        else value
        for key, value in above.items()
    }
    return {**below, **both}


def _flat(data: Any, prefix: str = "") -> Settings:
    """Return data by dotted keys; mappings in a list by their place in it."""
    if isinstance(data, dict) and data:
        parts: Iterable[tuple[Any, Any]] = data.items()
    elif isinstance(data, list) and any(isinstance(value, dict) for value in data):
        parts = enumerate(data)
    else:
        return {prefix: data} if prefix else {}
    flat: Settings = {}
    for key, value in parts:
        flat |= _flat(value, f"{prefix}.{_plain(str(key))}" if prefix else _plain(str(key)))
    return flat


def _plain(key: str) -> str:
    return re.sub(r"[-,]", "_", key)


def _resolved(settings: Settings) -> Settings:
    """Return settings with the values of `${a.b}`, `${.b}`, `${oc.env:X,8}` and `${mul:2,${a.b}}`."""
    return {key: _value(key, value, settings) for key, value in settings.items()}


def _value(key: str, value: Any, settings: Settings) -> Any:
    for _ in range(MOST_FILES):
        if not isinstance(value, str) or len(value) > MOST_TEXT or not _INNERMOST.search(value):
            break
        if (whole := _INNERMOST.fullmatch(value)) and (
            target := _target(whole[1], key)
        ) in settings:
            value = settings[target]
            continue
        value = _typed(_INNERMOST.sub(lambda match: _text(match[1], key, settings), value))
    return value


def _target(name: str, key: str) -> str:
    """Return the key that an interpolation in the value of a key names."""
    dots = len(name) - len(name.lstrip("."))
    above = key.split(".")[:-dots] if dots else []
    return _plain(".".join([*above, name[dots:]]))


def _text(inner: str, key: str, settings: Settings) -> str:
    """Return the text for an interpolation; one that only a run resolves as `$[…]`."""
    function, colon, arguments = inner.partition(":")
    parts = [part.strip() for part in arguments.split(",")]
    if colon and function == "oc.env" and len(parts) > 1:
        return ",".join(parts[1:])
    if colon and function in _OPERATORS:
        sign = _OPERATORS[function]
        value = arithmetic(f" {sign} ".join(parts)) if sign else None
        if sign is None and all(re.fullmatch(r"\d+", part) for part in parts):
            value = (max if function == "max" else min)(map(int, parts))
        return f"$[{inner}]" if value is None else str(value)
    value = settings.get(_target(inner, key))
    return f"$[{inner}]" if value is None or isinstance(value, list) else str(value)


# Python, read as text.


def _of_python(path: Path) -> Launch:
    """Return the keywords of a framework's configuration class in a Python file."""
    try:
        tree = ast.parse(text_of(path, MOST_BYTES // 4))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path}: no Python that can be read ({first_line(error)})") from error
    names: Settings = {}
    calls: list[ast.Call] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = _constant(node.value, names)
        elif isinstance(node, ast.Call):
            calls.append(node)
    for table in TABLES:
        for call in calls if table.classes else []:
            if re.fullmatch(table.classes, ast.unparse(call.func).rpartition(".")[2]):
                settings = {
                    word.arg: _constant(word.value, names) for word in call.keywords if word.arg
                }
                models = [
                    _constant(word.value, names)
                    for other in calls
                    if ast.unparse(other.func).endswith("Trainer")
                    for word in other.keywords
                    if word.arg == "model"
                ]
                settings |= {"model_name_or_path": models[0]} if models else {}
                settings["config_class"] = ast.unparse(call.func).rpartition(".")[2]
                return Launch(path, table, settings)
    raise InputError(
        f"{path}: no call of a configuration class such as GRPOConfig(…); name a launch script or a configuration file"
    )


def _constant(node: ast.expr, names: Settings) -> Any:
    """Return the value of a literal, of a name of one, or of arithmetic; other code as `$[…]`."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        text = re.sub(
            r"[A-Za-z_]\w*", lambda name: str(names.get(name[0], name[0])), ast.unparse(node)[:400]
        )
        value = arithmetic(text)
        return f"$[{ast.unparse(node)[:200]}]" if value is None else value
