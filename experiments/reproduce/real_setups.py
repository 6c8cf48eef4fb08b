"""Setups of real runs: a framework with an engine on one kind of GPU, as one page or log has it, and the constants it gave.

Invariant: every row of the board is in one setup. A setup that gave constants is also predicted with what remains where they
are left out; for a stranger nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from experiments.reproduce.ledger import PLACE, Inputs, PaperError, Value, read_ledger
from experiments.reproduce.predict import FAMILIES, LEFT_OUT, Task
from simrl.scenario.yaml_text import read_yaml
from simrl.validation import explain

FILE = Path(__file__).with_name("real_setups.yaml")
Layers = Literal["dense", "experts", "hybrid"]


class Gave(BaseModel):
    """A constant that comes from rows of a setup: PRESET.KEY, what the preset's source says of it, the rows, the inputs that
    replace it where it is left out, and why these."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    constant: str
    says: str = ""
    rows: str
    left_out: dict[str, Value] = {}
    source: str


class Setup(BaseModel):
    """A setup: its ledger, its rows by the kind of the model's layers, and what it gave. A training step has no engine. `read`:
    inputs that its own unscored figures decided; `seen`: mechanisms that were chosen after its rows were seen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ledger: str | None = None
    engine: Literal["vLLM", "SGLang", "TRT-LLM"] | None = None
    gpu: str
    rows: dict[Layers, list[str]]
    read: str = ""
    seen: str = ""
    gave: list[Gave] = []

    def layers(self, row: str) -> Layers | None:
        """Return the kind of a row's model; None for a row of another setup."""
        for kind, patterns in self.rows.items():
            if any(fnmatchcase(row, pattern) for pattern in patterns):
                return kind
        return None

    @property
    def left_out(self) -> Inputs:
        """The inputs that replace the constants that the setup gave."""
        return {key: value for gave in self.gave for key, value in gave.left_out.items()}


class Cause(BaseModel):
    """Why some quantities (ROW QUANTITY) are far off."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    of: list[str]
    why: str


class Setups(BaseModel):
    """All setups by name, where constants that come from none of them were measured, and the causes of large errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    setups: dict[str, Setup]
    elsewhere: dict[str, str]
    causes: list[Cause]


@cache
def read_setups() -> Setups:
    """Return the setups. Raise `PaperError`."""
    place = f"{PLACE}/{FILE.name}"
    try:
        read = Setups.model_validate(read_yaml(FILE, place, "setups", Setups.model_fields))
    except ValidationError as error:
        raise PaperError(f"{place}: {explain(error, Setups, 'setups')[1]}") from error
    for name, setup in read.setups.items():
        known = read_ledger(setup.ledger).inputs if setup.ledger else {}
        for key in setup.left_out:
            if key not in known:
                raise PaperError(
                    f"{place}: {name}: left_out has {key!r}, which {PLACE}/ledgers/{setup.ledger}.yaml does not have"
                )
    return read


def setup_of(row: str) -> str:
    """Return the setup of a row. Raise `PaperError` for a row that is in none."""
    for name, setup in read_setups().setups.items():
        if setup.layers(row):
            return name
    raise PaperError(f"{PLACE}/{FILE.name}: no setup has the row {row}; add it to one")


def cause_of(row: str, quantity: str) -> str | None:
    """Return why a quantity of a row is far off; None if no cause is written down."""
    return next((c.why for c in read_setups().causes if f"{row} {quantity}" in c.of), None)


def left_out_tasks(rows: Mapping[str, int], **given: str) -> list[Task]:
    """Return a task for each setup that gave constants: its own among these rows (each with its number of elements), with the
    constants left out."""
    tasks = []
    for setup in read_setups().setups.values():
        if not setup.ledger or not setup.left_out:
            continue
        predicted = FAMILIES[setup.ledger].ROWS
        of_setup = {row: n for row, n in rows.items() if setup.layers(row) and row in predicted}
        if of_setup:
            inputs = {**read_ledger(setup.ledger).middle, **setup.left_out, **given}
            tasks.append(Task(setup.ledger, of_setup, LEFT_OUT, inputs))
    return tasks
