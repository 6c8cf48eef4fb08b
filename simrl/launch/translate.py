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

from simrl.launch.expression import evaluated, keys_of
from simrl.launch.settings import Launch, Settings
from simrl.launch.tables import Note, Table
from simrl.profile.model_shape import MODELS, known_name, model_shape
from simrl.scenario.dotted import put
from simrl.systems.recipes import parameters_of

QUESTIONS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))
STEPS, WARMUP = 12, 4  # updates that are simulated, and those left out of averages
OTHERS: list[dict[str, Any]] = [  # what a launch is compared with
    {"name": "verl_colocated"},
    {"name": "one_step_off"},
    {"name": "areal", "eta": 4},
]
UNDERSTOOD, NO_EFFECT, NOT_UNDERSTOOD = "understood", "without effect here", "not understood"


class Key(NamedTuple):
    """A key of a launch: its value, the list that it is in, and the field that it sets, with the
    field's value, or the reason."""

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
    """A scenario's data, its comments by field, the three lists in one, and what is assumed."""

    launch: Launch
    data: dict[str, Any]
    comments: dict[str, str]
    keys: list[Key]
    assumed: list[Assumed]
    notes: list[str]

    def of(self, name: str) -> list[Key]:
        """Return the keys of one list."""
        return [key for key in self.keys if key.list == name]


class _Reader:
    """The keys of a launch as the names of expressions: what a key is, and what was needed."""

    def __init__(self, launch: Launch, version: str) -> None:
        self.settings, self.table = launch.settings, launch.table
        self.version = version
        self.touched: set[str] = set()
        self.used: dict[str, list[tuple[str, Any]]] = {}
        self.lacks: dict[str, str] = {}

    def __call__(self, key: str) -> Any:
        if key in self.table.let:
            return evaluated(self.table.let[key], self)
        self.touched.add(key)
        value = self.settings[key] if key in self.settings else self.default(key)
        if (isinstance(value, str) and is_unknown(value)) or value == "":
            return None
        if value is None and key not in self.settings:
            return True if any(name.startswith(f"{key}.") for name in self.settings) else None
        return value

    def default(self, key: str) -> Any:
        """Return the framework's own value of a key, of the release."""
        default = self.table.defaults.get(key)
        if isinstance(default, dict):  # by the release that brought it
            releases = [name for name in default if _release(name) <= _release(self.version)]
            default = (
                default[max(releases, key=_release)] if releases else next(iter(default.values()))
            )
        return default

    def field(self, name: str, expression: str) -> Any:
        """Return the value that an expression gives a field, and note its keys."""
        self.touched = set()
        value = evaluated(expression, self)
        for key in self.touched & self.settings.keys():
            self.used.setdefault(key, []).append((name, value))
        return value

    def note(self, note: Note) -> bool:
        """Return whether a note holds; then its keys are not understood, unless they set a
        field."""
        self.touched = set()
        holds = bool(evaluated(note.when, self))
        self.lacks |= dict.fromkeys(self.touched & self.settings.keys() if holds else (), note.note)
        return holds


def is_unknown(text: str) -> bool:
    """Return whether only a run knows a text; of a path, the last name is enough."""
    return "$" in text.rstrip("/").rpartition("/")[2] or "$(" in text


def _release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def translate(launch: Launch, given: Mapping[str, Any], version: str | None = None) -> Translation:
    """Return the scenario of a launch; `given` has fields that replace what it says or lacks."""
    table, notes = launch.table, list(launch.guessed)
    reader = _Reader(launch, version or table.version)
    fields = {name: reader.field(name, text) for name, text in table.fields.items()}
    system, note = _system(table, reader)
    notes += [note] * bool(note)
    notes += [one.note for one in table.notes if reader.note(one)]
    ours = {
        name: value
        for name, value in fields.items()
        if name.startswith("system.") and value is not None
    }
    known = parameters_of(system["name"])
    system |= {
        name[7:]: value
        for name, value in ours.items()
        if name[7:] in known and name[7:] not in system
    }
    lost = ours.keys() - {f"system.{name}" for name in known}
    fields = {
        name: value for name, value in fields.items() if value is not None and name not in ours
    }
    model = str(given.get("model") or fields.get("model") or "")
    if reference := fields.get("training.reference_model"):
        fields["training.reference_model"], note = _model(str(reference), launch.path.parent, False)
        notes += [note] * bool(note)
    if model:
        experts = (
            max(fields.get(key) or 1 for key in ("cluster.ep", "training.expert_parallel")) > 1
        )
        fields["model"], stand_in = _model(model, launch.path.parent, experts)
        notes += [stand_in] * bool(stand_in)
    fields |= {key: value for key, value in given.items() if value is not None and key != "model"}
    assumed = [] if "workload.trace" in fields else list(_assumed(fields))
    if model and stand_in:
        assumed.insert(
            0,
            Assumed(
                "model", fields["model"], f"a stand-in for {model}", QUESTIONS["model"]["option"]
            ),
        )
    keys = sorted(_keys(launch, reader, lost))
    return Translation(launch, _data(launch, fields, system), _comments(keys), keys, assumed, notes)


def _system(table: Table, reader: _Reader) -> tuple[dict[str, Any], str]:
    for rule in table.systems:
        if reader.field("systems", f"{rule.name!r} if {rule.when} else None"):
            parameters = {
                name: reader.field(f"system.{name}", text) for name, text in rule.parameters.items()
            }
            return {
                "name": rule.name,
                **{k: v for k, v in parameters.items() if v is not None},
            }, rule.note
    return {"name": table.systems[-1].name}, table.systems[-1].note


def _keys(launch: Launch, reader: _Reader, lost: set[str]) -> Iterator[Key]:
    """Yield each key that is written, in its list."""
    elsewhere = {key for text in _expressions(launch.table) for key in keys_of(text)}
    for key, value in launch.settings.items():
        shown = str(value)
        sets = [
            (name, one)
            for name, one in reader.used.get(key, [])
            if one is not None and name not in lost
        ]
        patterns = launch.table.no_effect.items()
        why = next((why for pattern, why in patterns if fnmatchcase(key, pattern)), "")
        if isinstance(value, str) and is_unknown(value) and not why:
            taken = reader.default(key)
            yield Key(
                NOT_UNDERSTOOD,
                key,
                shown,
                "",
                f"only a run knows its value; {taken} is taken"
                if taken is not None
                else "only a run knows its value",
            )
        elif sets:
            names = dict.fromkeys(name for name, _ in sets)
            yield Key(
                UNDERSTOOD,
                key,
                shown,
                ", ".join(names),
                ", ".join(str(one) for _, one in dict(sets).items()),
            )
        elif key in reader.lacks:
            yield Key(NOT_UNDERSTOOD, key, shown, "", reader.lacks[key])
        elif why:
            yield Key(NO_EFFECT, key, shown, "", why)
        elif value is None or (
            key in elsewhere and not lost & {name for name, _ in reader.used.get(key, [])}
        ):
            yield Key(NO_EFFECT, key, shown, "", "sets nothing in this configuration")
        else:
            yield Key(NOT_UNDERSTOOD, key, shown, "", "")


def _expressions(table: Table) -> Iterator[str]:
    yield from (*table.let.values(), *table.fields.values())
    for rule in table.systems:
        yield from (rule.when, *rule.parameters.values())
    yield from (note.when for note in table.notes)


def _assumed(fields: Settings) -> Iterator[Assumed]:
    """Yield what a scenario needs and `fields` lacks, and put it there."""
    fields.setdefault("workload.synthetic.prompt_cap_tokens", 2048)
    for name, question in QUESTIONS.items():
        if "assumed" in question and fields.get(name) is None:
            fields[name] = evaluated(question["assumed"], fields.get)
            yield Assumed(name, fields[name], question["what"], question["option"])


def _model(text: str, folder: Path, experts: bool) -> tuple[str, str]:
    """Return simrl's name of a model, or the folder of its config.json; and, where it is neither,
    the note that the nearest model by size stands in for it, of those with experts if it has
    some."""
    if (name := known_name(text)) in MODELS:
        return name, ""
    for path in (folder / text, Path(text)):
        if "$" not in text and (path / "config.json").is_file():
            return str(path.resolve()), ""
    name = text.lower()
    squeezed = _squeezed(name)
    distilled = [one for one in MODELS if ("distill" in one) is ("distill" in name)]
    if inside := [one for one in distilled if re.search(rf"{_squeezed(one)}(?![0-9])", squeezed)]:
        return max(inside, key=len), ""
    sizes = re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?![a-z0-9])", name)
    active = re.findall(r"(?<![a-z0-9])a(\d+(?:\.\d+)?)b(?![a-z0-9])", name)

    def distance(one: str) -> float:
        shape = model_shape(one)
        if not sizes:  # the name that is most alike
            return -SequenceMatcher(None, one, name.rpartition("/")[2]).ratio()
        pairs = [
            (shape.parameters, sizes),
            *([(shape.active_parameters, active)] if active else []),
        ]
        return sum(
            abs(math.log(parameters / float(written[-1]) / 1e9)) for parameters, written in pairs
        )

    alike = [one for one in MODELS if bool(model_shape(one).experts) is (experts or bool(active))]
    nearest = min(alike, key=distance)
    return nearest, f"{text} is no model that simrl knows; {nearest} stands in for it"


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name)


def _data(launch: Launch, fields: Settings, system: dict[str, Any]) -> dict[str, Any]:
    """Return the data of the scenario file."""
    name = re.sub(r"\W+", "_", launch.path.stem).strip("_").lower() or launch.table.name
    data: dict[str, Any] = {"name": name, "steps": STEPS, "warmup_steps": WARMUP}
    if "workload.trace" in fields:
        fields = {
            key: value for key, value in fields.items() if not key.startswith("workload.synthetic.")
        }
    else:
        fields = {"workload.synthetic.steps": STEPS, **fields}
    for key in sorted(fields, key=lambda key: key.count(".")):
        data = put(data, key, fields[key], str(launch.path))
    shared = {key: system[key] for key in ("minibatches", "log_probs") if key in system}
    others = [{**one, **shared} for one in OTHERS if one["name"] != system["name"]]
    return {**data, "systems": [system, *others]}


def _comments(keys: list[Key]) -> dict[str, str]:
    """Return by field the keys that set it."""
    comments: dict[str, str] = {}
    for key in keys:
        for name in key.field.split(", ") if key.list == UNDERSTOOD else ():
            comments[name] = f"{comments[name]}, {key.key}" if name in comments else key.key
    return comments
