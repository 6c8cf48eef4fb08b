"""A point of a sweep: a scenario and the hash of all that its row depends on.

Invariant: a row is a pure function of the hashed data: the resolved scenario (without its name and place), the contents of
the files that it names, and the code. So a row that is kept under a hash is valid on every machine.
"""

from __future__ import annotations

import hashlib
import json
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import simrl
from simrl.errors import InputError, first_line
from simrl.result.metrics import prices, summary
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.speculation.methods import METHODS
from simrl.study.code_digest import code_digest
from simrl.systems.recipes import RECIPES

T = TypeVar("T")
Outcome = dict[str, Any]  # {"row": metrics by name}, or {"error": one line}
_LABELS = ("name", "variant")  # of a scenario: nothing that is simulated depends on them
_HASHED_APART = {*_LABELS, "system"}
_FILES = (".parquet", ".json")  # ends of names of files that have no folder
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')


@dataclass(frozen=True)
class Point:
    """A scenario, its hash, and the digests of the files that it names, by their paths, and of those that add its system."""

    scenario: Scenario
    hash: str
    files: Mapping[str, str]
    code: Mapping[str, Any]

    @property
    def document(self) -> dict[str, Any]:
        """All that is hashed, to read."""
        data = self.scenario.model_dump(mode="json", exclude=set(_LABELS))
        return {"scenario": in_texts(data, lambda text: self.files.get(text, text)), **self.code}


class Digests:
    """Digests of files by path, each file read once."""

    def __init__(self) -> None:
        self.of = lru_cache(None)(_digest)


def make_point(scenario: Scenario, digests: Digests) -> Point:
    """Return the point of a scenario, with the present digests of the files that it names."""
    code: dict[str, Any] = {"simrl_version": simrl.__version__, "code": code_digest()}
    if added := _added_sources(scenario):
        code["extensions"] = {f"{file.parent.name}/{file.name}": digests.of(str(file)) for file in added}
    system = json.dumps(
        scenario.system.model_dump(mode="json"), sort_keys=True
    )  # its names are in the order of the user
    text = f"{scenario.model_dump_json(exclude=_HASHED_APART)} {system}"
    quoted = map(json.loads, _QUOTED.findall(text)) if "\\" in text else text.split('"')[1::2]
    names = [name for name in quoted if "/" in name or ("." in name and name.endswith(_FILES))]
    files = {name: digest for name in names if (digest := digests.of(name)) is not None}
    for name, digest in files.items():
        text = text.replace(f'"{name}"', f'"{digest}"')
    text = f"{text} {list(files.values())} {code}"
    return Point(scenario, hashlib.sha256(text.encode()).hexdigest(), files, code)


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
    """Return the digest of the file that a text names, or of the config.json of a model's folder; None if it names none."""
    path = Path(text)
    try:
        file = path / "config.json" if (path / "config.json").is_file() else path
        if not file.is_file():
            return None
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except (OSError, ValueError):  # no name of a file, or none that may be read: its reader reports it
        return None
    model = f"{file.resolve().parent.name} " if file.suffix == ".json" else ""  # what a config without a name is called
    return f"{model}sha256:{digest}"


def _added_sources(scenario: Scenario) -> list[Path]:
    """Return the files of the packages that add the scenario's system or its speculation."""
    asked = scenario.system.parameters.get("speculation")
    method = asked.get("name") if isinstance(asked, dict) else asked
    return [*RECIPES.sources(scenario.system.name), *METHODS.sources(str(method))]


def simulate_point(point: Point, inputs: InputCache) -> Outcome:
    """Return the row of a point, or why it has none. Raise only `MemoryError`: memory belongs to the machine, not to the
    point."""
    scenario = point.scenario
    try:
        prepared = prepare(scenario, inputs)
        row = summary(simulate_prepared(prepared), scenario.warmup_steps, *prices(scenario.cluster.model_dump()))
    except InputError as error:
        return {"error": str(error)}
    except MemoryError:
        raise
    except Exception as error:  # one point in a thousand that meets a bug must not cost the others
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, {place.name}"
        return {"error": f"a bug: {type(error).__name__}: {first_line(error)} ({where})"}
    del row["variant"]
    kinds = {"trace_kind": prepared.trace.metadata.kind, "profile_kind": prepared.profile.metadata.kind}
    return {"row": {**row, **kinds}}
