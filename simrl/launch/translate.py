"""A scenario from the settings of a launch, and what became of each of them.

Invariant: every key that a launch writes is in one of three lists: understood (it sets a field or
chooses the system), without effect here (with the reason), or not understood. What a scenario needs
and the launch lacks is assumed, and said to be.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from simrl.errors import InputError, choose, meant
from simrl.launch.expression import evaluated, keys_of
from simrl.launch.settings import Launch, Settings, is_file
from simrl.launch.tables import Table, numbers
from simrl.profile.model_shape import MODELS, known_name, model_shape
from simrl.profile.shipped import layouts
from simrl.scenario.dotted import put
from simrl.systems.recipes import parameters_of

QUESTIONS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))
SHORTEST = STEPS, _ = (
    12,
    4,
)  # updates that are simulated, and those left out of averages; more repeat their lengths
OTHERS: list[dict[str, Any]] = [  # what a launch is compared with
    {"name": "verl_colocated"},
    {"name": "one_step_off"},
    {"name": "areal", "eta": 4},
]
UNDERSTOOD, NO_EFFECT, NOT_UNDERSTOOD = "understood", "without effect here", "not understood"
FAILED = "failed"  # of an expression that cannot be computed
UNKNOWN, UNUSED = "only a run knows its value", "sets nothing in this configuration"


class Key(NamedTuple):
    """A key of a launch: the list that it is in, its value, and the fields that it sets, with their
    values, or the reason."""

    list: str
    key: str
    value: str
    field: str
    becomes: str


class Assumed(NamedTuple):
    """A field that the launch does not give: the value taken, what it is, and how to give it."""

    field: str
    value: Any
    what: str
    option: str


@dataclass
class Translation:
    """A scenario's data, the three lists of keys in one, and what is assumed."""

    launch: Launch
    data: dict[str, Any]
    keys: list[Key]
    assumed: list[Assumed]
    notes: list[str]
    sources: dict[str, str]  # of the fields
    changed: list[Assumed]  # so that it can be simulated

    def of(self, name: str) -> list[Key]:
        """Return the keys of one list."""
        return [key for key in self.keys if key.list == name]


class _Reader:
    """The keys of a launch as the names of expressions. `used` has the fields that each written key
    was needed for, with their values, `lacks` what a note says of it."""

    def __init__(self, launch: Launch, release: str, overrides: Mapping[str, Any]) -> None:
        self.table, self.release = launch.table, release
        self.settings = launch.settings | {
            key: overrides[name]
            for name, key in launch.table.overrides.items()
            if name in overrides
        }
        self.touched: set[str] = set()
        self.used: dict[str, list[tuple[str, Any]]] = {key: [] for key in self.settings}
        self.lacks: dict[str, str] = {}

    def __call__(self, key: str) -> Any:
        if key in self.table.let:
            return evaluated(self.table.let[key], self)
        self.touched.add(key)
        value = self.settings.get(key, "")
        if (
            key in self.settings
            and value != ""
            and value in self.table.values.get(key, [value])
            and not is_unknown(value)
        ):
            return value
        has_keys = any(name.startswith(f"{key}.") for name in self.settings)
        return self.default(key) if key in self.table.defaults else has_keys or None

    def default(self, key: str) -> Any:
        """Return the framework's own value of a key, of the release."""
        return self.table.default(key, self.release)

    def field(self, name: str, expression: str) -> Any:
        """Return the value that an expression gives a field, and note its keys."""
        self.touched = set()
        value = evaluated(expression, self, FAILED)
        value = FAILED if isinstance(value, list) else value  # no field is one
        for key in self.touched & self.settings.keys():
            self.used[key].append((name, value))
        return None if value is FAILED else value

    def note(self, when: str, note: str) -> bool:
        """Return whether a note holds; then its keys are not understood, unless they set a
        field."""
        self.touched = set()
        holds = bool(evaluated(when, self))
        self.lacks |= dict.fromkeys(self.touched if holds else (), note)
        return holds


def option_of(field: str) -> str:
    """Return the option of `simrl init` that gives a field."""
    return str(QUESTIONS.get(field, {}).get("option", f"{field}=X"))


def is_unknown(value: Any) -> bool:
    """Return whether only a run knows a value; of a path, the last name is enough."""
    text = value.rstrip("/") if isinstance(value, str) else ""
    name = text.rpartition("/")[2]
    is_path = "/" in text and re.search(r"[A-Za-z]", name) and not re.search(r"[$`]", name)
    return bool(re.search(r"[$`]", text)) and ("$(" in text or not is_path)


def translate(
    launch: Launch, overrides: Mapping[str, Any], release: str | None = None
) -> Translation:
    """Return the scenario of a launch; `overrides` has fields that replace what it says or lacks."""
    table, notes = launch.table, list(launch.guessed)
    overrides = {name: value for name, value in overrides.items() if value is not None}
    reader = _Reader(launch, _known_release(table, release), overrides)
    values = {name: reader.field(name, text) for name, text in table.fields.items()}
    rules = (
        one
        for one in table.systems
        if reader.field("systems", f"{one.name!r} if {one.when} else None")
    )
    rule = next(rules, table.systems[-1])
    for name, text in rule.parameters.items():
        values[f"system.{name}"] = reader.field(f"system.{name}", text)
    notes += [rule.note] if rule.note else []
    notes += [one.note for one in table.notes if reader.note(one.when, one.note)]
    is_set = {name: value for name, value in values.items() if value is not None}
    of_system = {name[7:]: value for name, value in is_set.items() if name.startswith("system.")}
    fields = {
        **dict(
            zip(("steps", "warmup_steps"), evaluated(rule.window, reader, SHORTEST), strict=True)
        ),
        **{name: value for name, value in is_set.items() if not name.startswith("system.")},
        **overrides,
    }
    defaults = parameters_of(rule.name)
    changed = {
        name: value for name, value in of_system.items() if value != defaults.get(name, value)
    }
    keys = sorted(
        _keys(launch, reader, {f"system.{name}" for name in of_system if name not in defaults})
    )
    assumed = [*_stand_ins(fields, overrides, launch.path.parent), *_assumed(fields)]
    assumed += _taken(
        reader, keys, {**fields, **dict.fromkeys([*overrides, *(one.field for one in assumed)])}
    )
    parameters = {**defaults, **of_system}
    if "workload.trace" in fields:
        notes.append("the prompts and responses of a step are the trace's, not the launch's")
    if parameters.get("dynamic_sampling"):
        notes.append(
            "groups of equal rewards are dropped: how many rests on workload.synthetic.reward_mean, 0.5 if not given"
        )
    whose = f"the default of {table.title} {release or table.version}"
    writers = {
        name: ", ".join(
            key.key for key in keys if key.list == UNDERSTOOD and name in key.field.split(", ")
        )
        for name in values
    }
    sources = {name: words or whose for name, words in writers.items()} | dict.fromkeys(
        overrides, "as given"
    )
    beside = {
        name: value
        for name, text in table.beside.items()
        if (value := evaluated(text, reader)) is not None
    }
    data = _data(launch, fields, {"name": rule.name, **changed}, parameters, beside)
    return Translation(launch, data, keys, assumed, notes, sources, [])


def _known_release(table: Table, release: str | None) -> str:
    """Return a release. Raise `InputError` for one before all that a table knows."""
    releases = {
        name for value in table.defaults.values() if isinstance(value, dict) for name in value
    }
    known = sorted(releases, key=numbers)
    if release and known and numbers(release) < numbers(known[0]):
        raise InputError(
            f"--release {release}: the releases known of {table.title} are {', '.join(known)}"
        )
    return release or table.version


def _taken(reader: _Reader, keys: list[Key], fields: Settings) -> Iterator[Assumed]:
    """Yield the fields that rest on a default in place of a value that only a run knows."""
    for key in (key.key for key in keys if key.becomes.startswith(UNKNOWN)):
        for name, value in reader.used[key]:
            if value is not None and fields.pop(name, None) == value:
                yield Assumed(name, value, f"{name}, of {key}", option_of(name))


def _stand_ins(fields: Settings, overrides: Settings, folder: Path) -> Iterator[Assumed]:
    """Put simrl's names of the models into `fields`, and yield those that only stand in."""
    experts = any(fields.get(key, 1) != 1 for key in ("cluster.ep", "training.expert_parallel"))
    for name in ("model", "training.reference_model"):
        written = str(fields.get(name, ""))
        if written:
            fields[name], is_known = _model(written, folder, experts and name == "model")
            if not is_known and name in overrides:
                model_shape(written)  # refuses it
            if not is_known:
                yield Assumed(name, fields[name], f"a stand-in for {written}", option_of("model"))


def _keys(launch: Launch, reader: _Reader, lost: set[str]) -> Iterator[Key]:
    """Yield each key that is written, in its list; `lost` are parameters that the system lacks."""
    table = launch.table
    rules = [text for rule in table.systems for text in (rule.when, *rule.parameters.values())]
    texts = [
        *table.let.values(),
        *table.fields.values(),
        *rules,
        *(note.when for note in table.notes),
    ]
    known = {key for text in texts for key in keys_of(text)}
    for key, value in launch.settings.items():
        of_key = dict(reader.used[key])
        unset = (None, FAILED)
        sets = {name: one for name, one in of_key.items() if one not in unset and name not in lost}
        why = next(
            (why for pattern, why in table.no_effect.items() if fnmatchcase(key, pattern)), ""
        )
        taken = reader.default(key)
        kind, names, becomes = NOT_UNDERSTOOD, "", ""
        if is_unknown(value) and (of_key or not why):
            becomes = UNKNOWN if taken is None else f"{UNKNOWN}; {taken} is taken"
        elif value not in table.values.get(key, [value]):
            becomes = f"no value of it{choose(value, table.values[key], '')}; {taken} is taken"
        elif sets:
            kind, names, becomes = UNDERSTOOD, ", ".join(sets), ", ".join(map(str, sets.values()))
        elif key in reader.lacks:
            becomes = reader.lacks[key]
        elif why or (key in table.defaults and value == taken):
            words = evaluated(why, reader, why) if why.startswith("f'") else why
            kind, becomes = NO_EFFECT, words or "the framework's default"
        elif FAILED in of_key.values():
            becomes = "no value that simrl can compute with"
        elif value in (None, {}) or (key in known and not lost & of_key.keys()):
            kind, becomes = NO_EFFECT, UNUSED
        else:
            above, _, last = key.rpartition(".")
            beside = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == above]
            becomes = meant(last, beside).strip(" ()")
        yield Key(kind, key, str(value).replace("\u00a0", " "), names, becomes)


def _assumed(fields: Settings) -> Iterator[Assumed]:
    """Yield what a scenario needs and `fields` lacks, and put it there."""
    fields.setdefault("workload.synthetic.prompt_cap_tokens", 2048)
    for name, question in QUESTIONS.items():
        if "assumed" in question and fields.get(name) is None and not _is_of_trace(name, fields):
            fields[name] = evaluated(question["assumed"], fields.get)
            yield Assumed(name, fields[name], question["what"], question["option"])


def _model(text: str, folder: Path, experts: bool) -> tuple[str, bool]:
    """Return simrl's name of a model, or the folder of its config.json, and True; otherwise the
    nearest model by size, of those with experts if it has some, and False."""
    if (name := known_name(text)) in MODELS:
        return name, True
    for path in (folder / text, Path(text)):
        if "$" not in text and is_file(path / "config.json"):
            return str(path.resolve()), True
    name = text.lower()
    distilled = [one for one in MODELS if ("distill" in one) is ("distill" in name)]
    if inside := [
        one for one in distilled if re.search(rf"{_squeezed(one)}(?![0-9])", _squeezed(name))
    ]:
        return max(inside, key=len), True
    sizes = re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?![a-z0-9])", name)
    active = re.findall(r"(?<![a-z0-9])a(\d+(?:\.\d+)?)b(?![a-z0-9])", name)

    shipped = {layout.model for layout in layouts()}  # whose kernels were measured

    def distance(one: str) -> float:
        shape = model_shape(one)
        pairs = [(shape.parameters, size) for size in sizes[-1:]]
        pairs += [(shape.active_parameters, size) for size in active[-1:]]
        unlike = 1 - SequenceMatcher(None, one, name.rstrip("/").rpartition("/")[2]).ratio()
        return (
            unlike
            + 0.5 * (one not in shipped)
            + sum(3 * abs(math.log(own / (float(size) or 1) / 1e9)) for own, size in pairs)
        )

    alike = [one for one in MODELS if bool(model_shape(one).experts) is (experts or bool(active))]
    return min(alike, key=distance), False


def _is_of_trace(name: str, fields: Settings) -> bool:
    """Return whether a trace has what a field would say."""
    return "workload.trace" in fields and name.startswith("workload.synthetic.")


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name)


def _data(
    launch: Launch,
    fields: Settings,
    system: dict[str, Any],
    parameters: dict[str, Any],
    beside: dict[str, Any],
) -> dict[str, Any]:
    """Return the data of the scenario file; `beside` are parameters of the systems beside the
    launch's own."""
    name = re.sub(r"\W+", "_", launch.path.stem).strip("_").lower() or launch.table.name
    data: dict[str, Any] = {"name": name}
    for key, value in sorted(
        {"workload.synthetic.steps": STEPS, **fields}.items(), key=lambda one: one[0].count(".")
    ):
        data = data if _is_of_trace(key, fields) else put(data, key, value, str(launch.path))
    shared = {"minibatches": parameters.get("minibatches", 1), **beside}
    if (
        "rollout_share" not in parameters
    ):  # else it takes the engine's, which is the asynchronous mode's
        shared["log_probs"] = parameters.get("log_probs", 1)
    if filters := parameters.get("dynamic_sampling"):
        shared["dynamic_sampling"] = parameters.get(
            "over_sampling", 1.0 if filters is True else filters
        )
    others = [{**one, **shared} for one in OTHERS if one["name"] != system["name"]]
    others = [one for one in others if system["name"] != "dapo" or one["name"] != "verl_colocated"]
    return {**data, "systems": [system, *others]}
