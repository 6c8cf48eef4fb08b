"""What `simrl optimize` may choose: systems and their parameters, split, tensor parallelism, drafters, GPUs.

A space is the dimensions of a sweep, in a sweep's own words, so that what was searched can be copied and changed: those that
the user and the scenario's file name, and for the rest the defaults below. Invariant: choices that come to the same simulation
are the same point. A parameter goes to the systems that have it, a share is rounded to the whole workers that it makes, and
naming the method that a system drafts with anyway changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from simrl.dimensions import SYSTEMS, Alternative, Between, Dimension, Listed, Varied, cross
from simrl.errors import InputError
from simrl.hardware import model_shape
from simrl.points import Digests, Point, SharedInputs, make_point, resolved, value_of
from simrl.profile import METADATA_KEY, ProfileMetadata
from simrl.scenario import PARAMETER, Scenario, ScenarioFile, Setting, gives
from simrl.simulate import Inputs
from simrl.speculation.methods import METHODS
from simrl.sweeps import require_names, require_parameters
from simrl.systems import make_system, parameters_of
from simrl.trace import Trace

# A system of each family: synchronous, over-sampled, one step off, streamed, fully asynchronous, each worker on its own.
FAMILIES = ("verl_colocated", "april", "one_step_off", "streamrl", "areal", "verl_fully_async", "laminar", "rhymerl")
DEFAULTS: Mapping[str, Sequence[Any]] = {
    "rollout_share": (0.25, 0.375, 0.5, 0.625, 0.75, 0.875),
    "eta": (1, 2, 4, 8),
    "staleness": (0.1, 0.3, 0.5),  # those of verl's own ablation
}
SPLIT, DRAFTER, TP = f"{PARAMETER}rollout_share", f"{PARAMETER}speculation", "cluster.tp"
TENSOR_PARALLEL = (1, 2, 4, 8)  # where a roofline gives the step times of any
TEXT_DRAFTERS = {"history": "histospec", "siblings": "siblings", "ngram": "ngram"}
Chosen = Mapping[int, Alternative]  # an alternative of each dimension, by its place


@dataclass(frozen=True)
class Space:
    """The dimensions, `asked` in words; `named` are the keys that the user or the file gave, `varied_in_file` those of the
    file's `vary`, `own` the entries of systems with what the file's say of parameters that are searched, the file's first.
    `profiles` has the profile of each tp that there is, `batch_samples` the samples of a step of the trace on average, `first`
    a scenario of the file, `notes` what was left out and why."""

    varied: Varied
    asked: tuple[str, ...]
    named: frozenset[str]
    varied_in_file: frozenset[str]
    own: tuple[tuple[Any, Mapping[str, Any]], ...]
    profiles: Mapping[int, str]
    batch_samples: float
    first: Scenario
    notes: tuple[str, ...]
    _digests: Digests = field(default_factory=Digests)
    _checked: set[str] = field(default_factory=set)

    @property
    def dimensions(self) -> Sequence[Dimension]:
        return self.varied.dimensions

    @property
    def systems(self) -> int:
        """The place of the dimension of the systems."""
        return next(i for i, dimension in enumerate(self.dimensions) if SYSTEMS in dimension.keys)

    def matters(self, entry: Any) -> list[int]:
        """The places of the dimensions that change something for a system."""
        return [
            i
            for i, dimension in enumerate(self.dimensions)
            if SYSTEMS in dimension.keys or any(self._takes(entry, key) for key in dimension.keys)
        ]

    def _takes(self, entry: Any, key: str) -> bool:
        """A parameter goes to the systems that have it; what an entry says itself stands against a default."""
        name, own = _parts(entry)
        parameter = key.removeprefix(PARAMETER)
        if not key.startswith(PARAMETER):
            return True
        return parameter in parameters_of(name) and (key in self.named or parameter not in own)

    def point(self, chosen: Chosen) -> Point:
        """The point of a combination. Raises `InputError` for what no scenario can have."""
        settings = [setting for place in sorted(chosen) for setting in chosen[place]]
        (entry,) = [setting.value for setting in settings if setting.key == SYSTEMS]
        kept = [s for s in settings if s.key == SYSTEMS or (self._takes(entry, s.key) and not _is_own(entry, s))]
        scenario = self._with_profile(_whole_workers(resolved(self.varied.file, kept)))
        require_names(scenario, self._checked)
        return make_point(scenario, self._digests)

    def combinations(self, most: int) -> Iterator[Chosen] | None:
        """All of them; None if they are more than `most`, or without end."""
        return self._all() if self.size is not None and self.size <= most else None

    @property
    def size(self) -> int | None:
        """How many combinations there are; None where they are without end."""
        if any(isinstance(dimension, Between) for dimension in self.dimensions):
            return None
        count = 0
        for alternative in _alternatives(self.dimensions[self.systems]):
            places = self.matters(_entry(alternative))
            count += math.prod(len(_alternatives(self.dimensions[i])) for i in places if i != self.systems)
        return count

    def as_in_the_file(self) -> Iterator[Chosen]:
        """What the file says itself: each of its systems, then the other families, under each of its variations, with its tp
        and its or the default split, η and drafter; of what the user named without these, the first."""
        listed = _alternatives(self.dimensions[self.systems])
        for entry, parameters in self.own:
            system = next(alternative for alternative in listed if _entry(alternative) == entry)
            places = [i for i in self.matters(entry) if i != self.systems]
            several = [self._as_in_the_file(self.dimensions[i], entry, parameters) for i in places]
            for chosen in product(*several):
                yield {self.systems: system, **dict(zip(places, chosen, strict=True))}

    def _as_in_the_file(self, dimension: Dimension, entry: Any, parameters: Mapping[str, Any]) -> Sequence[Alternative]:
        """Every variation of the file, else the alternative that leaves a system as it is."""
        if isinstance(dimension, Listed) and self.varied_in_file.intersection(dimension.keys):
            return dimension.alternatives
        (key,) = dimension.keys
        name, own = _parts(entry)
        system = Setting(SYSTEMS, {"name": name, **own, **parameters}, SYSTEMS)
        try:
            value = value_of(resolved(self.varied.file, [*self.varied.file.variations[0], system]), key)
        except InputError:  # the file leaves it to the command line
            value = None
        if isinstance(dimension, Between):
            inside = isinstance(value, int | float) and dimension.low <= value <= dimension.high
            return [(Setting(key, value, dimension.text),) if inside else dimension.drawn(0.5)]
        as_it_is = [(s,) for (s,) in dimension.alternatives if s.value == value or _is_own(entry, s)]
        return as_it_is[:1] or dimension.alternatives[:1]

    def _all(self) -> Iterator[Chosen]:
        for alternative in _alternatives(self.dimensions[self.systems]):
            places = [i for i in self.matters(_entry(alternative)) if i != self.systems]
            for others in product(*(_alternatives(self.dimensions[i]) for i in places)):
                yield {self.systems: alternative, **dict(zip(places, others, strict=True))}

    def _with_profile(self, scenario: Scenario) -> Scenario:
        """With the step times of its tp, where those that it names are of another, or are not there."""
        path, found = scenario.profile.path, self.profiles.get(scenario.cluster.tp)
        if path is None or found is None or (path not in self.profiles.values() and Path(path).exists()):
            return scenario
        return scenario.model_copy(update={"profile": scenario.profile.model_copy(update={"path": found})})


def make_space(
    open_file: Callable[[Sequence[Setting]], ScenarioFile],
    dimensions: Mapping[str, Dimension],
    inputs: Inputs | None = None,
) -> Space:
    """The space of a scenario's file and the dimensions of the user, by their keys. Raises `InputError`."""
    inputs = inputs or SharedInputs()
    asked = cross(open_file, dimensions)
    first = _first(asked)
    trace = inputs.trace(first)
    named = {*dimensions, *(key for dimension in asked.dimensions for key in dimension.keys if key != SYSTEMS)}
    listed = [d for d in (*dimensions.values(), *asked.dimensions) if isinstance(d, Listed)]
    if any(gives(setting, TP) for d in listed for alternative in d.alternatives for setting in alternative):
        named.add(TP)
    more: dict[str, Sequence[Any]] = {}
    notes: list[str] = []
    values = {key: list(default) for key, default in DEFAULTS.items()}
    own: list[tuple[Any, Mapping[str, Any]]] = [(entry, {}) for entry in asked.file.systems]
    if SYSTEMS not in dimensions:
        own = _with_families(asked.file.systems, named)
        more[SYSTEMS] = [entry for i, (entry, _) in enumerate(own) if entry not in [other for other, _ in own[:i]]]
    names = dict.fromkeys(_parts(entry)[0] for entry, _ in own)
    for key, several in values.items():
        said = [parameters.get(key, parameters_of(_parts(entry)[0]).get(key)) for entry, parameters in own]
        several += dict.fromkeys(value for value in said if isinstance(value, int | float) and value not in several)
        several.sort()
    has = {parameter for name in names for parameter in parameters_of(name)}
    for parameter, several in values.items():
        if parameter in has:
            more[f"{PARAMETER}{parameter}"] = several
    profiles = _profiles(first) if first.profile.path is not None else {}
    tps, said = _tensor_parallel(asked, first, profiles)
    more[TP] = tps
    notes += said if TP not in named else []
    methods, said = _drafters(first, trace)
    notes += said if DRAFTER not in named else []
    drafting = {name: method.name for name in names if (method := make_system(name, {}).speculation) is not None}
    anyway = {name: method for name, method in drafting.items() if method not in methods}
    more[DRAFTER] = [*([None] if anyway else []), "none", *methods]
    if anyway and DRAFTER not in named:
        said = [f"{name}: {method}" for name, method in anyway.items()]
        notes.append(
            f"{DRAFTER}=null is what a system drafts with by itself ({', '.join(said)}), none is no drafts at all"
        )
    found = dict(dimensions)
    for key, choices in more.items():
        if key not in named and (len(choices) > 1 or key == SYSTEMS):
            found[key] = Listed((key,), [(Setting(key, value, f"{key}={_text(value)}"),) for value in choices])
    varied = cross(open_file, found)
    require_parameters(varied)
    return Space(
        varied=varied,
        asked=tuple(_said(key, dimension) for key, dimension in found.items()),
        named=frozenset(named),
        varied_in_file=frozenset(named - {*dimensions}),
        own=tuple(own),
        profiles=profiles,
        batch_samples=len(trace) / len(trace.step_slices),
        first=first,
        notes=tuple(notes),
    )


def _said(key: str, dimension: Dimension) -> str:
    """As a command line has it."""
    if isinstance(dimension, Between):
        return dimension.text
    return (
        f"{key}={','.join(_text(setting.value) for alternative in dimension.alternatives for setting in alternative)}"
    )


def _first(varied: Varied) -> Scenario:
    """A scenario of the file, to see what it rests on."""
    dimensions = [d for d in varied.dimensions if isinstance(d, Listed)]
    settings = [setting for dimension in dimensions for setting in dimension.alternatives[0]]
    settings += [setting for d in varied.dimensions if isinstance(d, Between) for setting in d.drawn(0.0)]
    return resolved(varied.file, settings)


def _with_families(entries: Sequence[Any], named: set[str]) -> list[tuple[Any, Mapping[str, Any]]]:
    """The file's systems and those of the families, without what an entry says of a parameter that is searched, and that."""
    found: list[tuple[Any, Mapping[str, Any]]] = []
    for entry in entries:
        name, own = _parts(entry)
        searched = [key for key in own if key in DEFAULTS and f"{PARAMETER}{key}" not in named]
        chosen = {key: own.pop(key) for key in searched if isinstance(own[key], int | float)}
        found.append(({"name": name, **own} if own else name, chosen))
    return [*found, *((name, {}) for name in FAMILIES if name not in [entry for entry, _ in found])]


def _tensor_parallel(varied: Varied, first: Scenario, profiles: Mapping[int, str]) -> tuple[list[int], list[str]]:
    """The tp that have step times and divide the model's heads."""
    listed = [d for d in varied.dimensions if isinstance(d, Listed)]
    settings = [setting for dimension in listed for alternative in dimension.alternatives for setting in alternative]
    gpus = [s.value for s in settings if s.key == "cluster.gpus" and isinstance(s.value, int)]
    most = max(gpus, default=first.cluster.gpus)
    heads = model_shape(first.model).heads
    known = sorted(profiles if first.profile.path is not None else {*TENSOR_PARALLEL, first.cluster.tp})
    tps = [tp for tp in known if heads % tp == 0 and tp <= most]
    if first.profile.path is None:
        return tps, []
    if not profiles:
        return [], []
    missing = [tp for tp in TENSOR_PARALLEL if tp not in profiles and heads % tp == 0 and tp <= most]
    said = [
        f"cluster.tp {', '.join(map(str, missing))}: left out, as {Path(first.profile.path).parent.name}/ has no profile of "
        f"{first.model} on {first.cluster.gpu} for it"
    ]
    return tps, said if missing else []


def _profiles(scenario: Scenario) -> dict[int, str]:
    """Profiles of the same model, GPU and engine in the folder of the one that a scenario names, by their tp; empty if that
    one cannot be read."""
    assert scenario.profile.path is not None
    path = Path(scenario.profile.path)
    own = _metadata(path)
    if own is None:
        return {}
    found = {own.tp: str(path)}
    for other in sorted(path.parent.glob("*.parquet")):
        metadata = _metadata(other)
        if metadata is not None and _engine(metadata) == _engine(own):
            found.setdefault(metadata.tp, str(path.parent / other.name))
    return found


def _engine(metadata: ProfileMetadata) -> tuple[Any, ...]:
    return metadata.model, metadata.gpu, metadata.kind, metadata.source, tuple(sorted(metadata.versions.items()))


def _metadata(path: Path) -> ProfileMetadata | None:
    try:
        return ProfileMetadata.model_validate_json((pq.read_schema(path).metadata or {})[METADATA_KEY])
    except (pa.ArrowException, OSError, KeyError, ValidationError):
        return None


def _drafters(scenario: Scenario, trace: Trace) -> tuple[list[str], list[str]]:
    """The methods whose acceptance is counted on the trace's tokens or given by the scenario, and what is said of the rest."""
    inputs, found, said = scenario.speculation, [], []
    counted = "response_ids" in trace.table.column_names
    slices = trace.step_slices[: scenario.steps]
    epochs = trace.column("epoch")[: slices[-1][2]]
    groups = np.stack([trace.column("step"), trace.column("prompt_id")])
    for drafter, method in TEXT_DRAFTERS.items():
        if not counted and drafter not in inputs.runs:
            continue
        if drafter == "history" and epochs.min() == epochs.max():
            said.append(f"{method}: left out, as the {scenario.steps} updates simulated are of one epoch")
        elif drafter == "siblings" and np.unique(groups, axis=1).shape[1] == len(trace):
            said.append(f"{method}: left out, as no prompt has two responses")
        else:
            found.append(method)
    basis = "counted on the trace's tokens" if counted else "drawn as the scenario says (speculation.runs)"
    said[:0] = [f"drafts of {', '.join(found)}: {basis}"] if found else []
    models = {name: METHODS[name]().model for name in ("draft_model", "tlt")}
    found += [name for name, model in models.items() if model in inputs.acceptance]
    assumed = [name for name, model in models.items() if model not in inputs.acceptance]
    assumed += [method for drafter, method in TEXT_DRAFTERS.items() if not counted and drafter not in inputs.runs]
    if assumed:
        said.append(
            f"drafters {', '.join(assumed)}: left out, as nobody measured their acceptance; {DRAFTER}=none,{assumed[0]} "
            "searches with an assumed one"
        )
    return found, said


def _whole_workers(scenario: Scenario) -> Scenario:
    """A share of the GPUs that roll out is what it makes: whole workers."""
    share, gpus, tp = scenario.system.parameters.get("rollout_share"), scenario.cluster.gpus, scenario.cluster.tp
    if not isinstance(share, float) or not 0 < share < 1:
        return scenario
    workers = int(gpus * share + 1e-9) // tp
    exact = workers * tp / gpus
    shown = math.ceil(exact * 1e4) / 1e4
    rounded = shown if int(gpus * shown + 1e-9) // tp == workers else exact
    if not 0 < rounded < 1:
        return scenario
    system = scenario.system.model_copy(update={"rollout_share": rounded})
    return scenario.model_copy(update={"system": system})


def _is_own(entry: Any, setting: Setting) -> bool:
    """Whether it only names what a system drafts with anyway; null is that, whatever it is."""
    if setting.key != DRAFTER:
        return False
    name, own = _parts(entry)
    method = make_system(name, {}).speculation
    anyway = own.get("speculation", "none" if method is None else method.name)
    return setting.value is None or bool(setting.value == anyway)


def _parts(entry: Any) -> tuple[str, dict[str, Any]]:
    """The name of a system, and the parameters that its entry gives."""
    return (entry, {}) if isinstance(entry, str) else (entry["name"], {k: v for k, v in entry.items() if k != "name"})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _entry(alternative: Alternative) -> Any:
    return next(setting.value for setting in alternative if setting.key == SYSTEMS)


def _alternatives(dimension: Dimension) -> Sequence[Alternative]:
    assert isinstance(dimension, Listed)
    return dimension.alternatives
