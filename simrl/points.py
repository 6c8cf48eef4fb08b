"""A point of a sweep: a scenario and the hash of all that its row depends on.

Invariant: a row is a pure function of what is hashed: the resolved scenario (its name and place left out), the contents of the
files that it names, and the code. So a row that is found under a hash need not be computed again, on whichever machine it was.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import simrl
from simrl.dimensions import SYSTEMS
from simrl.errors import InputError, first_line
from simrl.hardware import Gpu, ModelShape
from simrl.metrics import summary
from simrl.profile import TableProfile
from simrl.scenario import PARAMETER, Scenario, ScenarioFile, Setting
from simrl.simulate import Inputs, prepare, simulate_prepared
from simrl.speculation.methods import METHODS
from simrl.systems import RECIPES, parameters_of
from simrl.trace import Trace

T = TypeVar("T")
Outcome = dict[str, Any]  # {"row": metrics by name}, or {"error": one line}
_LABELS = ("name", "variant")  # of a scenario: nothing that is simulated depends on them


@dataclass(frozen=True)
class Point:
    """A scenario, the `document` that is hashed, and the digests of the files that the scenario names, by their paths."""

    scenario: Scenario
    document: Mapping[str, Any]
    hash: str
    files: Mapping[str, str]


class Digests:
    """Contents of files as digests, each file read once."""

    def __init__(self) -> None:
        self.of = lru_cache(None)(_digest)


def make_point(scenario: Scenario, digests: Digests) -> Point:
    """The point of a scenario, with the digests of what it names now."""
    files: dict[str, str] = {}

    def content(value: str) -> str:
        digest = digests.of(value)
        if digest is None:
            return value
        files[value] = digest
        return digest

    data = scenario.model_dump(mode="json", exclude=set(_LABELS))
    document = {"scenario": in_texts(data, content), "simrl_version": simrl.__version__, "code": code_digest()}
    if added := _added_sources(scenario):
        document["extensions"] = {f"{file.parent.name}/{file.name}": digests.of(str(file)) for file in added}
    text = json.dumps(document, sort_keys=True, ensure_ascii=False)
    return Point(scenario, document, hashlib.sha256(text.encode()).hexdigest(), files)


def in_texts(data: Any, change: Callable[[str], str]) -> Any:
    """The same plain data, each text in it (keys are none) changed."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, dict):
        return {key: in_texts(value, change) for key, value in data.items()}
    if isinstance(data, list):
        return [in_texts(value, change) for value in data]
    return data


def _digest(text: str) -> str | None:
    """Of the file that a text names, or of the config.json of a model's folder; None if it names none."""
    if "/" not in text and not text.endswith((".parquet", ".json")):
        return None
    path = Path(text)
    try:
        file = path / "config.json" if (path / "config.json").is_file() else path
        if not file.is_file():
            return None
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except (OSError, ValueError):  # no name of a file at all, or none that may be read: whoever needs it says so
        return None
    model = f"{file.resolve().parent.name} " if file.suffix == ".json" else ""  # what a config without a name is called
    return f"{model}sha256:{digest}"


def _added_sources(scenario: Scenario) -> list[Path]:
    """The files of the packages that add the scenario's system or its speculation."""
    asked = scenario.system.parameters.get("speculation")
    method = asked.get("name") if isinstance(asked, dict) else asked
    return [*RECIPES.sources(scenario.system.name), *METHODS.sources(str(method))]


@cache
def code_digest() -> str:
    """Of simrl's source here: another code is another function."""
    root = Path(simrl.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def resolved(file: ScenarioFile, settings: Sequence[Setting]) -> Scenario:
    """The scenario of a combination. A parameter of the systems (`system.eta`) goes to a system that has it; another is left
    as it is. Raises `InputError`."""
    (entry,) = [setting.value for setting in settings if setting.key == SYSTEMS]
    system = {"name": entry} if isinstance(entry, str) else dict(entry)
    varied = [setting for setting in settings if setting.key != SYSTEMS and not setting.key.startswith(PARAMETER)]
    for setting in settings:
        if setting.key.startswith(PARAMETER) and setting.key.removeprefix(PARAMETER) in parameters_of(system["name"]):
            system[setting.key.removeprefix(PARAMETER)] = setting.value
    return file.scenario(varied, system)


def value_of(scenario: Scenario, key: str) -> Any:
    """What the scenario has at a key, as plain data: `cluster.gpus`, `system.name`, `system.eta` (a default too). None where it
    has nothing."""
    first, _, rest = key.partition(".")
    if first == "system" and rest != "name":
        default = parameters_of(scenario.system.name).get(rest)
        return scenario.system.parameters.get(rest, None if default is inspect.Parameter.empty else default)
    data: Any = scenario.model_dump(mode="json", include={first})
    for part in key.split("."):
        if isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


class SharedInputs(Inputs):
    """Traces and profiles that points share, read or drawn once; the few that were used last are kept."""

    def __init__(self, traces: int = 4, profiles: int = 32) -> None:
        self._kept_traces: dict[str, Trace] = {}
        self._kept_profiles: dict[str, TableProfile] = {}
        self._traces, self._profiles = traces, profiles

    def trace(self, scenario: Scenario) -> Trace:
        drawn = scenario.workload.synthetic is not None
        key = f"{scenario.workload.model_dump_json()} {scenario.seed if drawn else ''}"
        read = super().trace
        return _kept(self._kept_traces, self._traces, key, lambda: read(scenario))

    def profile(self, scenario: Scenario, model: ModelShape, kind: Gpu) -> TableProfile:
        key = f"{scenario.profile.model_dump_json()} {model.model_dump_json()} {kind.name} {scenario.cluster.tp}"
        read = super().profile
        return _kept(self._kept_profiles, self._profiles, key, lambda: read(scenario, model, kind))


def _kept(kept: dict[str, T], most: int, key: str, make: Callable[[], T]) -> T:
    """What is kept under a key, or made and kept; what was used longest ago goes."""
    kept[key] = found = kept.pop(key) if key in kept else make()
    if len(kept) > most:
        del kept[next(iter(kept))]
    return found


def simulate_point(point: Point, inputs: Inputs) -> Outcome:
    """The row of a point, or why it has none. Raises `MemoryError` only: how much there is does not belong to the point."""
    scenario = point.scenario
    try:
        prepared = prepare(scenario, inputs)
        row = summary(simulate_prepared(prepared), scenario.warmup_steps, scenario.cluster.cost_per_gpu_hour)
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
