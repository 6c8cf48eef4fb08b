"""Finds what was meant by arguments that a command does not take, for a message that says what to
write."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from simrl.commands.systems import OF_LAYOUT
from simrl.errors import InputError, meant
from simrl.profile.shipped import ROOT
from simrl.result.result import METADATA_FILE
from simrl.scenario.load import FILLED_IN, NAMES, PARAMETER
from simrl.scenario.model import Scenario
from simrl.study.grid import SYSTEMS
from simrl.systems.recipes import RECIPES, parameters_of
from simrl.trace.synthesis import LengthModel

FIELDS = {*Scenario.model_fields, SYSTEMS, "vary", *LengthModel.ELSEWHERE} - set(FILLED_IN)
OF_RESULTS = ("comparison.json", "sweep.json", "agreement.json")
LOGGED = {".log": "verl --metrics --group N", ".txt": "verl --metrics --group N"}
IMPORTED = {**LOGGED, ".csv": "csv", ".jsonl": "jsonl"}
WITH_A_TRACE = "--model qwen3-8b --gpu h100 --gpus 64 --system verl_colocated,areal"


def require_scenario(call: str, path: str, more: Sequence[Any]) -> None:
    """Raise `InputError` for a path that is no scenario, trace, table of lengths or folder of a
    run. The message says what it is and what to write; `more` are the arguments behind it."""
    file, command = Path(path), f"simrl {call}"
    try:
        is_folder = file.is_dir()
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; name a scenario (YAML) or a trace (Parquet)"
        ) from error
    if is_folder:
        if (file / METADATA_FILE).is_file():
            return  # a run's own folder has its scenario
        if any((file / name).exists() for name in OF_RESULTS):
            raise InputError(
                f"{path}: a folder of results, which simrl explain, diff and report read; {command} takes a scenario file"
            )
        names = sorted(entry.name for entry in file.glob("*") if entry.suffix in (".yaml", ".yml"))[
            :6
        ]
        inside = (
            f"; name a file in it ({', '.join(names)})"
            if names
            else "; name a scenario file (YAML) or a trace"
        )
        raise InputError(f"{path}: a folder{inside}")
    if file.exists():
        if file.suffix in LOGGED:
            trace = file.with_suffix(".parquet").name
            raise InputError(
                f"{path}: no scenario (YAML); make it a trace with simrl {_importing(path, trace)}, then {command} {trace} "
                f"{WITH_A_TRACE}"
            )
        return
    later = next(
        (str(text) for text in more if "=" not in str(text) and Path(str(text)).is_file()), None
    )
    if later is not None:
        system = (
            f" --system {path}" if path.lower() in RECIPES else f" {path}" if "=" in path else ""
        )
        raise InputError(f"{path}: the scenario goes first: {command} {later}{system}")
    if "=" in path:
        raise InputError(
            f"{path}: no scenario before it; write {command} SCENARIO {path}, where SCENARIO is a file such as "
            f"experiments/math_14b.yaml (simrl examples lists some), or a trace with {WITH_A_TRACE}"
        )
    shipped = {
        entry.stem: f"experiments/{entry.name}" for entry in (ROOT / "experiments").glob("*.yaml")
    }
    beside = [
        entry for kind in ("*.yaml", "*.yml", "*.parquet") for entry in file.parent.glob(kind)
    ]
    close = get_close_matches(file.name, [entry.name for entry in beside], n=1)
    near = f" (did you mean {file.with_name(close[0])}?)" if close else ""
    if not near and (named := meant(file.stem, shipped)):
        example = next(stem for stem in shipped if stem in named)
        near = (
            f" (did you mean {shipped[example]}?)"
            if Path(shipped[example]).exists()
            else f"; simrl examples copy {example} writes such a file"
        )
    raise InputError(f"{path}: no such file{near}; name a scenario (YAML) or a trace (Parquet)")


def _importing(path: str, trace: str) -> str:
    """Return the command that imports a file, by its suffix."""
    framework, _, options = IMPORTED.get(Path(path).suffix, "verl").partition(" ")
    return f"trace import {' '.join([framework, path, *options.split()])} -o {trace}"


def require_settings(texts: Iterable[Any]) -> None:
    """Raise `InputError` for the first text that is no KEY=VALUE."""
    texts = [text for text in texts if isinstance(text, str)]
    for i, text in enumerate(texts):
        key, equals, _ = text.partition("=")
        if equals and key:
            continue
        name = key.rstrip(":")
        if re.fullmatch(r"[a-z_]+(\.\w+)*", name) and (
            name.split(".")[0] in FIELDS or is_bare_parameter(name)
        ):
            value = next(
                (word for behind in texts[i + 1 :] if (word := behind.lstrip("="))), "VALUE"
            )
            raise InputError(
                f"override {text!r}: write KEY=VALUE without spaces, such as {name}={value}"
            )
        if (system := text.strip(",").lower()) in RECIPES:
            raise InputError(
                f"override {text!r}: a system is named with --system {system}, or systems={system},…"
            )
        if Path(text).exists():
            raise InputError(
                f"override {text!r}: one file a command, before the others; KEY=VALUE follow it"
            )
        raise InputError(
            f"override {text!r}: write KEY=VALUE, such as steps=20; several values are one word, cluster.gpus=64,128"
        )


def _all_parameters() -> frozenset[str]:
    parameters: set[str] = set()
    for name in RECIPES:
        with suppress(
            InputError
        ):  # of a package that cannot be loaded: the error belongs where that system is named
            parameters.update(parameters_of(name))
    return frozenset(parameters)


def is_bare_parameter(key: str) -> bool:
    """Return whether a key is a parameter of a system without its `system.`, and no field of a
    scenario."""
    return key not in FIELDS and key in _all_parameters()


def with_section(key: str) -> str:
    """Return a key, `eta`, as a scenario has it: `system.eta`; also one that is nearly a parameter,
    or a framework's name of one, which the systems that are run refuse in their words."""
    if key.partition(".")[0] in FIELDS or key.startswith(PARAMETER):
        return key
    is_near = "." not in key and not meant(key, NAMES) and meant(key, _all_parameters())
    is_own = is_near or is_bare_parameter(key) or any(framework_key(key, name) for name in RECIPES)
    return f"{PARAMETER}{key}" if is_own else key


def framework_key(key: str, name: str) -> str:
    """Return which parameter of a system a framework's own key sets, in words; "" for another key
    or system."""
    from simrl.launch.tables import TABLES, keys_of_system

    rules = [rule.parameters for table in TABLES for rule in table.systems if rule.name == name]
    names = {parameter for parameters in rules for parameter in parameters} - OF_LAYOUT
    rows = keys_of_system(name, () if key in names else names)
    alike = [row for row in rows if f".{row.key}".endswith(f".{key}")]
    return "; ".join(f"{row.framework}'s {key} is {row.parameter} here" for row in alike[:1])


def option_meant(option: str, value: str, commands: Mapping[str, Iterable[str]]) -> str:
    """Return what to write in place of an option that a command lacks: an override, or the command
    that has it (`commands`: the options of each); "" where nothing is known."""
    key = option.lstrip("-").partition("=")[0]
    value = option.partition("=")[2] or value or "VALUE"
    name = key.replace("-", "_")
    if name in _INSTEAD_OF:
        return f"; {_INSTEAD_OF[name].format(value)}"
    if name.split(".")[0] in FIELDS and (name in FIELDS or "." in name):
        return f"; write {name}={value}, without dashes"
    if is_bare_parameter(name):
        return f"; write {PARAMETER}{name}={value}, without dashes"
    has = [command for command, options in commands.items() if f"--{key}" in options]
    return f"; it is an option of simrl {', '.join(has[:3])}" if has else ""


_INSTEAD_OF = {  # an option of another name
    **dict.fromkeys(
        LengthModel.ELSEWHERE,
        "responses per prompt are --group {0} of a log, or workload.synthetic.group={0}",
    ),
    **dict.fromkeys(
        ("staleness", "max_staleness"),
        "a bound on staleness is --max-off-policyness {}, in simrl advise",
    ),
    "history": "simrl acceptance my_run.parquet counts what a history of responses predicts",
}
_INSTEAD_OF_COMMANDS = {
    "version": "simrl --version prints it",
    "reproduce": "published results are predicted in a checkout, by python -m experiments.reproduce",
}
_INSTEAD = {
    "speculation": "--speculation {}",
    "engine": "engine.preset={}",
    "profile": "profile.path={}",
}
_INSTEAD |= {"workload": "workload.trace={}", "cluster": "cluster.gpu={}"}


def require_section(key: str, value: Any) -> None:
    """Raise `InputError` for a section of a scenario whose value is a name."""
    if key in _INSTEAD and isinstance(value, str):
        raise InputError(
            f"override {f'{key}={value}'!r}: {key} is a section with keys of its own; write {_INSTEAD[key].format(value)}"
        )


def misplaced(word: str, group: str) -> str:
    """Return what to write in place of a file or a name where a command of a group ("simrl trace")
    belongs; "" where nothing is known."""
    suffix = Path(word).suffix
    if group == "simrl" and (suffix in (".yaml", ".yml", ".parquet") or os.sep in word):
        return f"; did you mean simrl compare {word}?"
    if group == "simrl trace import" and suffix:
        return f"; did you mean simrl {_importing(word, 'my_run.parquet')}?"
    if group in ("simrl systems", "simrl speculation", "simrl presets") or suffix or word == "list":
        return f"; did you mean {group}{f' show {word}' if word != 'list' else ''}?"
    if (group, word) == ("simrl", "optimize"):
        words = sys.argv[sys.argv.index(word) + 1 :]
        if {"--help", "-h"}.intersection(words):
            return "; it is simrl advise now: see simrl advise --help"
        if not words or words[0].startswith("-"):
            words = ["SCENARIO", *words]
        words += ["--details"] * ("--details" not in words)
        if not {"--robust", "--no-robust"}.intersection(words):
            words.append("--robust")  # it varied all inputs by default
        return f"; it is simrl advise now: run simrl advise {shlex.join(words)}"
    if group == "simrl" and word in _INSTEAD_OF_COMMANDS:
        return f"; {_INSTEAD_OF_COMMANDS[word]}"
    return f"; did you mean simrl systems show {word.lower()}?" if word.lower() in RECIPES else ""
