"""A point: a scenario and the hash of all that its row depends on.

Invariant: a row is a pure function of the hashed data: the resolved scenario (without its name
and place), the contents of the files that it names, and the code. So a row that is kept under a
hash is valid on every machine.
"""

from __future__ import annotations

import hashlib
import json
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import simrl
from simrl.errors import InputError, first_line
from simrl.result.metrics import prices, summary
from simrl.result.result import Result
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.simulate.without_effect import without_effect
from simrl.speculation.methods import METHODS
from simrl.study.code_digest import code_digest
from simrl.systems.recipes import RECIPES

Row = dict[str, Any]  # metrics by name
Outcome = dict[str, Any]  # {"row": its row}, or {"error": one line, "cause": of all such errors}
# of a scenario: nothing that is simulated depends on them
_LABELS = ("name", "variant", "calibration")
_HASHED_APART = {*_LABELS, "system"}
_FILES = (".parquet", ".json", ".csv")  # ends of names of files that have no folder
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')


class Digests(dict[str, str | None]):
    """Digests of files by path, each file read once."""

    def __missing__(self, text: str) -> str | None:
        self[text] = digest = _digest(text)
        return digest


@dataclass(frozen=True)
class Point:
    """A scenario and, computed when first used, its hash. `digests` are shared by the points of a
    search or sweep."""

    scenario: Scenario
    digests: Digests = field(default_factory=Digests, compare=False, repr=False)

    @cached_property
    def code(self) -> dict[str, Any]:
        """The version and digest of simrl's code, and the digests of files that add the system."""
        code: dict[str, Any] = {"simrl_version": simrl.__version__, "code": code_digest()}
        if added := _added_sources(self.scenario):
            names = {f"{file.parent.name}/{file.name}": str(file) for file in added}
            code["extensions"] = {name: self.digests[path] for name, path in names.items()}
        return code

    @cached_property
    def text(self) -> str:
        """The scenario as JSON, without its labels."""
        # The parameters of a system are in the order of the user.
        system = json.dumps(self.scenario.system.model_dump(mode="json"), sort_keys=True)
        return f"{self.scenario.model_dump_json(exclude=_HASHED_APART)} {system}"

    @cached_property
    def files(self) -> dict[str, str]:
        """The digests of the files that the scenario names, by path."""
        text = self.text
        quoted = map(json.loads, _QUOTED.findall(text)) if "\\" in text else text.split('"')[1::2]
        names = [name for name in quoted if "/" in name or ("." in name and name.endswith(_FILES))]
        return {name: digest for name in names if (digest := self.digests[name]) is not None}

    @cached_property
    def hash(self) -> str:
        """The hash of the scenario, the contents of its files, and the code."""
        text = self.text
        for name, digest in self.files.items():
            text = text.replace(f'"{name}"', f'"{digest}"')
        text = f"{text} {list(self.files.values())} {self.code}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def document(self) -> dict[str, Any]:
        """All that is hashed, to read."""
        data = self.scenario.model_dump(mode="json", exclude=set(_LABELS))
        return {"scenario": in_texts(data, lambda text: self.files.get(text, text)), **self.code}


def in_texts(data: Any, change: Callable[[str], str]) -> Any:
    """Return plain data with each text in it changed, but not the keys."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, dict):
        return {key: in_texts(value, change) for key, value in data.items()}
    if isinstance(data, list):
        return [in_texts(value, change) for value in data]
    return data


def _digest(text: str) -> str | None:
    """Return the digest of the file that a text names, or of the config.json of a model's folder;
    None if it names none."""
    path = Path(text)
    try:
        file = path / "config.json" if (path / "config.json").is_file() else path
        if not file.is_file():
            return None
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except (
        OSError,
        ValueError,
    ):  # no name of a file, or none that may be read: its reader reports it
        return None
    model = (
        f"{file.resolve().parent.name} " if file.suffix == ".json" else ""
    )  # what a config without a name is called
    return f"{model}sha256:{digest}"


def _added_sources(scenario: Scenario) -> list[Path]:
    """Return the files of the packages that add the scenario's system or its speculation."""
    speculation = scenario.system.parameters.get("speculation")
    method = speculation.get("name") if isinstance(speculation, dict) else speculation
    return [*RECIPES.sources(scenario.system.name), *METHODS.sources(str(method))]


def row_of(scenario: Scenario, result: Result) -> Row:
    """Return the metrics of a run over its window, `simrl.result.metrics.summary`."""
    return summary(result, scenario.warmup_steps, *prices(scenario.cluster.model_dump()))


def simulate_point(point: Point, inputs: InputCache) -> Outcome:
    """Return the row of a point, or why it has none. Raise only `MemoryError`: memory belongs to
    the machine, not to the point."""
    try:
        prepared = prepare(point.scenario, inputs)
        row = row_of(point.scenario, simulate_prepared(prepared))
    except InputError as error:
        return {"error": str(error), "cause": error.cause}
    except MemoryError:
        raise
    except Exception as error:  # one point in a thousand that meets a bug must not cost the others
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, {place.name}"
        return {
            "error": f"a bug: {type(error).__name__}: {first_line(error)} ({where})",
            "cause": f"a bug in {where}",
        }
    del row["variant"]
    return {
        "row": {
            **row,
            "trace_kind": prepared.trace.metadata.kind,
            "profile_kind": prepared.profile.metadata.kind,
            "without_effect": "; ".join(
                f"{key} ({reason})" for key, reason in without_effect(prepared).items()
            ),
        }
    }
