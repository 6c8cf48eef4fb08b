"""The search space of `simrl advise`: systems and their parameters, split, parallelism of a worker,
drafters, GPUs.

A space has the dimensions of a sweep, in the words of a sweep, so that a search can be copied and
changed: the dimensions of the user and of the scenario's file, and the defaults below for the rest.
Invariant: choices that lead to one simulation are one point. A parameter goes to the systems that
have it, a share is rounded to whole workers, and the name of the method that a system drafts with
anyway changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from simrl.errors import InputError
from simrl.profile.advice import derived
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import METADATA_KEY, ProfileMetadata
from simrl.profile.shipped import file_name
from simrl.scenario.load import PARAMETER, ScenarioFile, Setting, given, gives, takes
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.training_checks import require_parallelism
from simrl.speculation.methods import METHODS, MTP, QUANTISED
from simrl.study.grid import (
    SYSTEMS,
    Alternative,
    Between,
    Dimension,
    Listed,
    Varied,
    cross,
    listed,
    resolved,
    value_of,
)
from simrl.study.point import Digests, Point
from simrl.study.splits import units, with_workers
from simrl.study.sweep import require_names
from simrl.systems.recipes import make_system, parameters_of
from simrl.trace.trace import Trace

# A system of each family: synchronous, over-sampled, one step off, streamed, fully asynchronous,
# each worker on its own.
FAMILIES = (
    "verl_colocated",
    "april",
    "one_step_off",
    "streamrl",
    "areal",
    "verl_fully_async",
    "laminar",
    "rhymerl",
)
OF_POOLS = FAMILIES[2:]  # those whose training GPUs do not roll out
DEFAULTS: Mapping[str, Sequence[Any]] = {
    "rollout_share": (0.25, 0.375, 0.5, 0.625, 0.75, 0.875),
    "eta": (1, 2, 4, 8),
    "staleness": (0.1, 0.3, 0.5),  # of verl's own ablation
}
DRAFTER, SHARE, TP = f"{PARAMETER}speculation", f"{PARAMETER}rollout_share", "cluster.tp"
# Of a worker; set as a whole, as few layouts of a worker of experts are measured.
LAYOUT = (TP, "cluster.dp", "cluster.ep")
TENSOR_PARALLEL = (1, 2, 4, 8)  # where a roofline gives the step times of any
# The fields that are equal in profiles of one engine.
ENGINE = ("model", "gpu", "precision", "kv_precision", "kind", "source", "versions")
TEXT_DRAFTERS = {"history": "histospec", "siblings": "siblings", "ngram": "ngram"}
Layout = tuple[int, int, int]  # tp, dp and ep
Chosen = Mapping[str, Alternative]  # an alternative of each dimension, by the name of the dimension
# Keys, their values, and notes on values that are left out.
Searched = tuple[tuple[str, ...], Sequence[tuple[Any, ...]], Sequence[str]]
Entries = Sequence[
    tuple[Any, Mapping[str, Any]]
]  # systems, and their own values of parameters that are searched


@dataclass(frozen=True)
class Space:
    """The dimensions, also in `words`. `named` are the keys of the user or the file,
    `varied_in_file` the keys of the file's `vary`; `entries` are the systems, the file's first,
    each with its own values of parameters that are searched. `profiles` has the profile of each
    layout of a worker, `batch_samples` and `batch_groups` the mean numbers of samples and of
    prompts in a step of the trace, `first` a scenario of the file; `notes` say which choices were
    left out, and why."""

    varied: Varied
    words: tuple[str, ...]
    named: frozenset[str]
    varied_in_file: frozenset[str]
    entries: Entries
    profiles: Mapping[Layout, str]
    batch_samples: float
    batch_groups: int
    first: Scenario
    notes: tuple[str, ...]
    _digests: Digests = field(default_factory=Digests)
    _checked: set[tuple[str, str, str]] = field(default_factory=set)

    @property
    def systems(self) -> list[Setting]:
        return self.varied.settings(SYSTEMS)

    def matters(self, entry: Any) -> dict[str, Dimension]:
        """Return the dimensions, by name, that change something for a system. A value in its entry
        wins over a default."""
        name, parameters = parts(entry)
        keys = {
            key
            for dimension in self.varied.dimensions
            for key in dimension.keys
            if takes(name, key, parameters_of)
        }
        keys -= {
            key for parameter in parameters if (key := f"{PARAMETER}{parameter}") not in self.named
        }
        return {
            "+".join(d.keys): d for d in self.varied.dimensions[:-1] if keys.intersection(d.keys)
        }

    def point(self, chosen: Chosen) -> Point:
        """Return the point of a combination. Raise `InputError` for a value that no scenario can
        have."""
        (system,) = chosen[SYSTEMS]
        settings = [setting for alternative in chosen.values() for setting in alternative]
        kept = [setting for setting in settings if not _drafts_anyway(system.value, setting)]
        scenario = self._with_profile(
            whole_workers(resolved(self.varied.file, kept), SHARE not in self.named)
        )
        require_names(scenario, self._checked)
        return Point(scenario, self._digests)

    @property
    def size(self) -> int | None:
        """The number of combinations; None where they are without end."""
        if any(isinstance(dimension, Between) for dimension in self.varied.dimensions):
            return None
        return sum(math.prod(map(len, choices.values())) for choices in self._choices())

    def combinations(self, most: int) -> Iterator[Chosen] | None:
        """Return all combinations; None if they are more than `most`, or without end."""
        if self.size is None or self.size > most:
            return None
        return (chosen for choices in self._choices() for chosen in _each(choices))

    def _choices(self) -> Iterator[dict[str, Sequence[Alternative]]]:
        """Yield for each system the lists that matter to it."""
        for system in self.systems:
            lists = {
                name: d.alternatives
                for name, d in self.matters(system.value).items()
                if isinstance(d, Listed)
            }
            yield {SYSTEMS: [(system,)], **lists}

    def as_in_the_file(self) -> Iterator[Chosen]:
        """Yield the file's own choices: each of its systems, then the other families, under each of
        its variations, with its tp and its or the default split, η and drafter; the first value of
        any other key of the user."""
        for entry, parameters in self.entries:
            name, written = parts(entry)
            system = Setting(SYSTEMS, {"name": name, **written, **parameters}, SYSTEMS)
            scenario = None  # the file leaves something to the command line
            with suppress(InputError):
                scenario = resolved(self.varied.file, [*self.varied.file.variations[0], system])
            choices = {
                name: self._as_in_the_file(d, entry, scenario)
                for name, d in self.matters(entry).items()
            }
            yield from _each({SYSTEMS: [(Setting(SYSTEMS, entry, SYSTEMS),)], **choices})

    def _as_in_the_file(
        self, dimension: Dimension, entry: Any, scenario: Scenario | None
    ) -> Sequence[Alternative]:
        """Return every variation of the file, else the alternative that leaves a system
        unchanged."""
        if isinstance(dimension, Listed) and self.varied_in_file.intersection(dimension.keys):
            return dimension.alternatives
        has = {key: None if scenario is None else value_of(scenario, key) for key in dimension.keys}
        if isinstance(dimension, Between):
            ((key, value),) = has.items()
            inside = isinstance(value, int | float) and dimension.low <= value <= dimension.high
            return [(Setting(key, value, dimension.text),) if inside else dimension.drawn(0.5)]
        alternatives = dimension.alternatives
        as_it_is = [
            a
            for a in alternatives
            if all(s.value == has[s.key] or _drafts_anyway(entry, s) for s in a)
        ]
        return as_it_is[:1] or alternatives[:1]

    def _with_profile(self, scenario: Scenario) -> Scenario:
        """Return the scenario with the step times of its layout, if it names another layout's, or a
        missing file."""
        cluster = scenario.cluster
        path, measured = (
            scenario.profile.path,
            self.profiles.get((cluster.tp, cluster.dp, cluster.ep)),
        )
        if (
            path is None
            or measured is None
            or (path not in self.profiles.values() and Path(path).exists())
        ):
            return scenario
        return scenario.with_fields("profile", path=measured)


def make_space(
    open_file: Callable[[Sequence[Setting]], ScenarioFile], dimensions: Mapping[str, Dimension]
) -> Space:
    """Return the space of a scenario's file and the dimensions of the user, by their keys. Raise
    `InputError`."""
    of_user = cross(open_file, dimensions)
    first = resolved(of_user.file, of_user.first())
    trace = InputCache().trace(first)
    groups = np.stack([trace.column("step"), trace.column("prompt_id")])
    named = {
        *dimensions,
        *(key for dimension in of_user.dimensions for key in dimension.keys if key != SYSTEMS),
    }
    lists = [
        d.alternatives for d in (*dimensions.values(), *of_user.dimensions) if isinstance(d, Listed)
    ]
    values = [
        setting for alternatives in lists for alternative in alternatives for setting in alternative
    ]
    named.update(key for key in LAYOUT if any(gives(setting, key) for setting in values))
    entries: Entries = [(entry, {}) for entry in of_user.file.systems]
    searched = dict(dimensions)
    if SYSTEMS not in dimensions:
        families = FAMILIES if first.cluster.train is None else OF_POOLS
        entries = _with_families(of_user.file.systems, named, families)
        systems = [entry for entry, _ in entries]
        searched[SYSTEMS] = listed(
            SYSTEMS, [entry for i, entry in enumerate(systems) if entry not in systems[:i]]
        )
    profiles = _profiles(Path(first.profile.path)) if first.profile.path is not None else {}
    notes: list[str] = []
    for keys, choices, left_out in (
        *(_parameters(entries) if first.cluster.train is None else _pools(first, entries)),
        _layouts(of_user, first, profiles),
        _drafters(first, trace, entries),
    ):
        if named.isdisjoint(keys):
            notes += left_out
            if len(choices) > 1:
                searched["+".join(keys)] = _listed(keys, choices)
    varied = cross(open_file, searched)
    varied.require_parameters()
    return Space(
        varied=varied,
        words=tuple(_in_words(key, dimension) for key, dimension in searched.items()),
        named=frozenset(named),
        varied_in_file=frozenset(named - {*dimensions}),
        entries=entries,
        profiles=profiles,
        batch_samples=len(trace) / len(trace.step_slices),
        batch_groups=max(np.unique(groups, axis=1).shape[1] // len(trace.step_slices), 1),
        first=first,
        notes=tuple(notes),
    )


def _listed(keys: tuple[str, ...], choices: Sequence[tuple[Any, ...]]) -> Listed:
    """Return the alternatives that set these keys together."""
    return Listed(
        keys,
        [
            tuple(given(k, v, f"{k}={v}") for k, v in zip(keys, values, strict=True))
            for values in choices
        ],
    )


def _parameters(entries: Entries) -> Iterator[Searched]:
    """Yield each parameter that a system has with its default values and the values of the entries,
    and no notes."""
    has = [{**parameters_of(parts(entry)[0]), **parameters} for entry, parameters in entries]
    for parameter, default in DEFAULTS.items():
        values = [known[parameter] for known in has if parameter in known]
        if values:
            numbers = (value for value in values if isinstance(value, int | float))
            yield (
                (f"{PARAMETER}{parameter}",),
                [(value,) for value in sorted({*default, *numbers})],
                [],
            )


def _pools(first: Scenario, entries: Entries) -> Iterator[Searched]:
    """Yield the parameters without the split, and in its place the GPUs of both pools: all that the
    scenario has, a half and a quarter of them, if these are whole workers and whole ranks of
    training."""
    yield from (
        searched
        for searched in _parameters(entries)
        if searched[0] != (f"{PARAMETER}rollout_share",)
    )
    for key, gpus, unit in (
        ("cluster.gpus", first.cluster.gpus, first.cluster.worker_gpus),
        (
            "cluster.train.gpus",
            first.cluster.train.gpus if first.cluster.train else 0,
            first.training.gpus_per_rank,
        ),
    ):
        yield (key,), [(n,) for n in (gpus // 4, gpus // 2, gpus) if n and n % unit == 0], []


def _each(choices: Mapping[str, Sequence[Alternative]]) -> Iterator[Chosen]:
    return (dict(zip(choices, chosen, strict=True)) for chosen in product(*choices.values()))


def _in_words(key: str, dimension: Dimension) -> str:
    """Return a dimension as a command line has it."""
    if isinstance(dimension, Between):
        return dimension.text
    texts = (
        [s.value if isinstance(s.value, str) else json.dumps(s.value) for s in column]
        for column in zip(*dimension.alternatives, strict=True)
    )
    words = [
        f"{name}={','.join(column)}" for name, column in zip(dimension.keys, texts, strict=True)
    ]
    return " ".join(words if len(words) == 1 else [*words, "--zip", key.replace("+", ",")])


def _with_families(entries: Sequence[Any], named: set[str], families: Sequence[str]) -> Entries:
    """Return the systems of the file and of the families; values of parameters that are searched
    are taken out of an entry and returned beside it."""
    split: list[tuple[Any, Mapping[str, Any]]] = []
    for entry in entries:
        name, parameters = parts(entry)
        searched = [
            key for key in parameters if key in DEFAULTS and f"{PARAMETER}{key}" not in named
        ]
        chosen = {
            key: parameters.pop(key) for key in searched if isinstance(parameters[key], int | float)
        }
        split.append(({"name": name, **parameters} if parameters else name, chosen))
    return [*split, *((name, {}) for name in families if name not in [entry for entry, _ in split])]


def _layouts(varied: Varied, first: Scenario, profiles: Mapping[Layout, str]) -> Searched:
    """Return the layouts of a worker that have step times and divide the model's heads, as tp alone
    where all have the dp and ep of the scenario, and a note on tp without step times."""
    gpus = [
        setting.value
        for setting in varied.settings("cluster.gpus")
        if isinstance(setting.value, int)
    ]
    cluster, shape, path = first.cluster, model_shape(first.model), first.profile.path
    most = max(gpus, default=cluster.gpus)

    def possible(known: Iterable[Layout]) -> list[Layout]:
        return [
            (tp, dp, ep)
            for tp, dp, ep in sorted(known)
            if shape.heads % tp == 0 and tp * dp <= most
        ]

    measured = possible(profiles if path else ((tp, 1, 1) for tp in {*TENSOR_PARALLEL, cluster.tp}))
    missing = ", ".join(
        str(tp)
        for tp, _, _ in possible(
            (n, 1, 1) for n in {*TENSOR_PARALLEL} - {n for n, _, _ in profiles}
        )
    )
    note = (
        [f"{TP} {missing}: left out, as {_lacks(first, int(missing.partition(',')[0]))}"]
        if profiles and missing
        else []
    )
    if path is None or {(dp, ep) for _, dp, ep in measured} == {(cluster.dp, cluster.ep)}:
        return (TP,), [(tp,) for tp, _, _ in measured], note
    return LAYOUT, measured, note


def _lacks(first: Scenario, tp: int) -> str:
    """Return the words on a missing profile for more GPUs of a worker, and the command that makes
    it."""
    cluster, path = first.cluster, Path(first.profile.path or "")
    one = first.with_fields("cluster", tp=tp, dp=1, ep=tp if cluster.ep > 1 else 1)
    precision, wanted = first.precision, one.wanted_profile
    kinds = [precision.weights] * (precision.weights != "bf16") + [f"kv {precision.kv_cache}"] * (
        precision.kv_cache != "bf16"
    )
    words = f" in {' and '.join(kinds)}" if kinds else ""
    ways = derived(wanted, model_shape(first.model), path.with_name(file_name(wanted)), first.model)
    return "; ".join(
        [
            f"{path.parent.name}/ has no profile of {first.model} on {cluster.gpu}{words} for it",
            *ways,
        ]
    )


def _profiles(path: Path) -> dict[Layout, str]:
    """Return the profiles of one model, GPU and engine beside a profile, by the layout of a worker;
    empty if that profile cannot be read."""
    metadata_of_first, by_layout = _metadata(path), dict[Layout, str]()
    for file in (path, *sorted(path.parent.glob("*.parquet"))):
        metadata = _metadata(file)
        if (
            metadata_of_first
            and metadata
            and all(getattr(metadata, key) == getattr(metadata_of_first, key) for key in ENGINE)
        ):
            by_layout.setdefault((metadata.tp, metadata.dp, metadata.ep), str(file))
    return by_layout


def _metadata(path: Path) -> ProfileMetadata | None:
    try:
        return ProfileMetadata.model_validate_json(
            (pq.read_schema(path).metadata or {})[METADATA_KEY]
        )
    except (pa.ArrowException, OSError, KeyError, ValidationError):
        return None


def _drafters(scenario: Scenario, trace: Trace, entries: Entries) -> Searched:
    """Return no drafts and the methods whose acceptance is counted on the trace's tokens or given
    by the scenario, first null where a system drafts with another; and notes on the rest."""
    inputs, notes = scenario.speculation, []
    counted = "response_ids" in trace.table.column_names
    epochs = trace.column("epoch")[: trace.step_slices[: scenario.steps][-1][2]]
    groups = np.stack([trace.column("step"), trace.column("prompt_id")])
    useless = {}
    if epochs.min() == epochs.max():
        useless["history"] = f"the {scenario.steps} updates simulated are of one epoch"
    if np.unique(groups, axis=1).shape[1] == len(trace):
        useless["siblings"] = "no prompt has two responses"
    known = {
        drafter: method
        for drafter, method in TEXT_DRAFTERS.items()
        if counted or drafter in inputs.runs
    }
    methods = [method for drafter, method in known.items() if drafter not in useless]
    if methods:
        basis = (
            "counted on the trace's tokens"
            if counted
            else "drawn as the scenario says (speculation.runs)"
        )
        notes.append(f"drafts of {', '.join(methods)}: {basis}")
    notes += [
        f"{known[drafter]}: left out, as {why}"
        for drafter, why in useless.items()
        if drafter in known
    ]
    models = {name: METHODS[name]().model for name in ("draft_model", "tlt")}
    methods += [name for name, model in models.items() if model in inputs.acceptance]
    offered = {
        "mtp": MTP,
        "efficient_rollout": QUANTISED[0],
    }  # offered if their acceptance is given
    methods += [name for name, model in offered.items() if model in inputs.acceptance]
    assumed = [name for name, model in models.items() if model not in inputs.acceptance]
    assumed += [method for drafter, method in TEXT_DRAFTERS.items() if drafter not in known]
    if assumed:
        notes.append(
            f"drafters {', '.join(assumed)}: left out, as nobody measured their acceptance; {DRAFTER}=none,{assumed[0]} "
            "searches with an assumed one"
        )
    anyway = [
        f"{name}: {method}"
        for name in dict.fromkeys(parts(entry)[0] for entry, _ in entries)
        if (method := _own_method(name)) not in ("none", *methods)
    ]
    if anyway:
        notes.append(
            f"{DRAFTER}=null is what a system drafts with by itself ({', '.join(anyway)}), none is no drafts at all"
        )
    return (
        (DRAFTER,),
        [(method,) for method in (*([None] if anyway else []), "none", *methods)],
        notes,
    )


def whole_workers(scenario: Scenario, admissible: bool = False) -> Scenario:
    """Return the scenario with its share of rollout GPUs rounded to whole workers; if `admissible`,
    to the nearest number that leaves train GPUs which the layout of training divides."""
    share = scenario.system.parameters.get("rollout_share")
    gpus, unit = scenario.cluster.gpus, scenario.cluster.worker_gpus
    if not isinstance(share, float) or not 0 < share < 1:
        return scenario
    workers, of_all = units(scenario)
    if admissible and scenario.cluster.train is None:
        nearest = sorted(range(1, of_all + 1), key=lambda n: (abs(n - workers), n))
        workers = next((n for n in nearest if _trains(scenario, gpus - n * unit)), workers)
    return with_workers(scenario, workers) if 0 < workers * unit < gpus else scenario


def _trains(scenario: Scenario, gpus: int) -> bool:
    """Return whether this many GPUs can be divided as the training section says."""
    with suppress(InputError):
        require_parallelism(scenario.training, model_shape(scenario.model), gpus)
        return gpus > 0
    return False


def _drafts_anyway(entry: Any, setting: Setting) -> bool:
    """Return whether a setting only names the method that a system drafts with anyway; null always
    is that method."""
    name, parameters = parts(entry)
    return setting.key == DRAFTER and setting.value in (
        None,
        parameters.get("speculation", _own_method(name)),
    )


def _own_method(name: str) -> str:
    """Return the method that a system drafts with by itself."""
    method = make_system(name, {}).speculation
    return "none" if method is None else method.name


def parts(entry: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of a system, and the parameters in its entry."""
    return (
        (entry, {})
        if isinstance(entry, str)
        else (entry["name"], {k: v for k, v in entry.items() if k != "name"})
    )
