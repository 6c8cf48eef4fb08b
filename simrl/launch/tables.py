"""The tables of frameworks (`scenario/frameworks/*.toml`, `[read]`): which keys they have, which
fields of a scenario these set, and which change nothing that simrl simulates.

Invariant: a table is data. A field is an expression over keys (`launch/expression.py`); a default
is the framework's own, by release where it changed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from typing import Any, NamedTuple

from pydantic import Field

from simrl.launch.expression import conditions, keys_of
from simrl.scenario.presets import FRAMEWORK_FILES
from simrl.validation import Model


class SystemRule(Model):
    """A system, its parameters as expressions, and when a run has it. `note` is what differs,
    `window` the updates that are simulated, and those left out of averages."""

    when: str
    name: str
    parameters: dict[str, str] = {}
    note: str = ""
    window: str = "[12, 4]"


class Note(Model):
    """A sentence for the user, and when it holds."""

    when: str
    note: str


class Table(Model):
    """How a framework's launch is read. Regexes: `programs` find the command in a script, `classes`
    a configuration class in Python, `no_rl` what is no RL training, with the reason. `let` has names for
    expressions. `config` has the options that name a configuration file, and the key below which it stands; `known_by` keys
    that only this framework's files have. `values` are all that a key may have; for another, which is not understood, the
    default is taken. `beside` are parameters that the systems beside the launch's own take from it; `given`
    has keys that a field of the command line sets. A reason of `no_effect` may be an
    f-string with keys. A reason of `no_rl` with a semicolon has its own remedy."""

    name: str
    title: str
    version: str
    style: str = "hydra"
    programs: list[str] = []
    classes: str = ""
    config: dict[str, str] = {}
    known_by: list[str] = []
    no_rl: dict[str, str] = {}
    let: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    values: dict[str, list[str]] = {}
    fields: dict[str, str]
    overrides: dict[str, str] = {}
    beside: dict[str, str] = {}
    systems: list[SystemRule] = Field(min_length=1)
    no_effect: dict[str, str] = {}
    notes: list[Note] = []

    def default(self, key: str, release: str) -> Any:
        """Return the framework's own value of a key in a release; None if the table has none."""
        value = self.defaults.get(key)
        if not isinstance(value, dict):
            return value
        since = [name for name in value if numbers(name) <= numbers(release)]
        return value[max(since, key=numbers) if since else min(value, key=numbers)]

    def keys(self, text: str) -> frozenset[str]:
        """Return the keys that an expression rests on, through the names of `let`."""
        named = keys_of(text)
        inner = [self.keys(self.let[name]) for name in named & self.let.keys()]
        return (named - self.let.keys()).union(*inner)


class FrameworkKey(NamedTuple):
    """A key of a framework, its default there (None: not set), and the parameter of a system that
    it sets."""

    framework: str
    key: str
    default: Any
    parameter: str


def keys_of_system(name: str, parameters: Collection[str]) -> list[FrameworkKey]:
    """Return the keys that set these parameters of a system, by framework and parameter."""
    rows = [
        FrameworkKey(
            f"{table.title} {table.version}", key, table.default(key, table.version), parameter
        )
        for table in TABLES
        for rule in table.systems
        if rule.name == name
        for parameter, text in rule.parameters.items()
        if parameter in parameters
        for key in sorted(table.keys(text))
        # what chooses the system, too, sets no parameter by being a condition
        if key not in conditions(text) & table.keys(rule.when)
    ]
    return [row for i, row in enumerate(rows) if row not in rows[:i]]


def numbers(release: str) -> list[int]:
    """Return the numbers of a release, by which releases are ordered."""
    return [int(part) for part in re.findall(r"\d+", release)]


def _tables() -> list[Table]:
    tables = []
    for file in FRAMEWORK_FILES:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        if "read" in data:
            read = data["read"]
            config = read.get("config", {})
            config = dict.fromkeys(config, "") if isinstance(config, list) else config
            options = {
                option.lstrip("-").replace("-", "_"): below for option, below in config.items()
            }
            tables.append(
                Table(**{"name": file.stem, "title": file.stem, **read, "config": options})
            )
    return tables


TABLES = _tables()
