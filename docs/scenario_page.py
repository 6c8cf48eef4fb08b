"""Writes docs/scenario.md from the models of a scenario: every key with its type, default and meaning.

python docs/scenario_page.py
"""

from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from simrl.commands.systems import takes
from simrl.scenario.load import FILLED_IN
from simrl.scenario.model import Scenario

PAGE = Path(__file__).parent / "scenario.md"
HEAD = """\
# Scenario

<!-- Written by docs/scenario_page.py from the models in simrl/scenario/ and what they contain. Change it there. -->

A scenario is a YAML file with everything that a simulation depends on: equal scenarios give byte-identical results.
`experiments/quickstart.yaml` is an example to copy. An unknown key or an impossible value is refused in one line that names it.

- Paths in a file are relative to the file, paths on a command line to the current folder.
- `${model}` stands for the value of the key `model`, `${cluster.gpu}` for the value of `gpu` in the section `cluster`. Where
  `vary` changes that key, the value is the varied one; but in `systems`, in `vary` and in a parameter of the systems on a
  command line it stays the one of the file or of an override. Other forms (`${.gpu}`, `${a[0]}`, `\\${model}`) are refused.
- Values follow YAML 1.2: `017` is 17; `1:30:00` and `1_000` are texts. A switch takes `true` and `false`, also as
  `on` and `off`. Of a section with `<<`, its own keys win over the keys that it merges.
- Any key can be given on the command line, as `cluster.gpus=64 seed=3`; several values, `cluster.gpus=64,128`, are compared.
  `systems=split,areal` lists systems, and `eta=4` (or `system.eta=4`) sets a parameter of the systems that have it. A trace
  replaces a length model (`workload.trace=my_run.parquet`), a roofline replaces a profile (`profile.roofline={}`). A section
  (`'training={mfu: 0.3}'`) is merged into the section of the file; a list replaces the list of the file. An override
  that overlaps a key of `vary` (`cluster` and `cluster.gpus`) is refused, since one of them would be lost. `vary=null` leaves
  out the `vary` of the file.
- `framework` and `engine.preset` name [presets](presets.md): known constants of a framework and an engine, or a file of yours.
- Every value has a bound. Where the table names none, whole numbers go to 10^12, other numbers to 10^18, texts to 10,000
  characters and lists to 1,000,000 values, and no number is infinite. A value beyond its bound is refused in a line.
- A key that an option and a `KEY=VALUE` give different values, and an option that is given twice, are refused. Of two
  `KEY=VALUE` with one key, the last one holds.
- Units are in the names: `_s` seconds, `_tokens` tokens, `_bytes` bytes. A default of *none* means that the key may be left
  out or `null`; *required* means that it must be given.

Two keys belong to the file and not to one simulation. `systems` is a list of [systems](systems.md), each a name or a name
with parameters: `[verl_colocated, {name: areal, eta: 8}]`. `vary` is a list of changes, such as
`[{cluster.gpus: 64}, {cluster.gpus: 256}]`. Each change is simulated with every system. A key that is given on the command
line is no longer varied; `compare`, `sweep` and `advise` print which keys these are.

"""


def page() -> str:
    """The text of docs/scenario.md."""
    sections: list[str] = []
    _section(Scenario, "the file", sections, skip=FILLED_IN)
    return HEAD + "\n".join(sections)


def _section(
    model: type[BaseModel], path: str, sections: list[str], skip: tuple[str, ...] = ()
) -> None:
    """A table of a model's keys; then those of the models in it."""
    doc = " ".join((model.__doc__ or "").split())
    rows = [
        f"## {path}\n",
        f"{doc.split(' Raises ')[0]}\n",
        "| key | takes | default | meaning |",
        "|---|---|---|---|",
    ]
    inner: list[tuple[type[BaseModel], str]] = []
    for key, field in model.model_fields.items():
        if key in skip or field.exclude:
            continue
        parts = _models(field.annotation)
        place = f"{path}.{key}" if path != "the file" else key
        if len(parts) == 1:
            inner.append((parts[0], place))
            below = f"[below](#{_anchor(place)})"
        elif parts:
            inner += [(part, f"{place}: {_kind(part)}") for part in parts]
            below = "one of " + ", ".join(
                f"[{_kind(part)}](#{_anchor(f'{place}: {_kind(part)}')})" for part in parts
            )
        else:
            below = _takes(model, key)
        kind = key == "kind" and len(get_args(field.annotation)) == 1
        meaning = (
            "kind of fault"
            if kind
            else " ".join((field.description or (parts[0].__doc__ if parts else "") or "").split())
        )
        assert meaning, f"{model.__name__}.{key} has no description; say in its Field what it means"
        rows.append(f"| `{key}` | {_cell(below)} | {_cell(_default(field))} | {_cell(meaning)} |")
    sections.append("\n".join(rows) + "\n")
    for part, place in inner:
        _section(part, place, sections)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models that a type names, each once."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (
            [annotation]
            if "name" not in annotation.model_fields or annotation.__name__ != "SystemConfig"
            else []
        )
    return list(dict.fromkeys(model for part in get_args(annotation) for model in _models(part)))


def _kind(model: type[BaseModel]) -> str:
    kind = model.model_fields.get("kind")
    return (
        str(get_args(kind.annotation)[0])
        if kind is not None and get_args(kind.annotation)
        else model.__name__
    )


def _takes(model: type[BaseModel], key: str) -> str:
    schema = TypeAdapter(model).json_schema()["properties"][key]
    return takes(schema).replace(" or null", "").replace(",000.0", ",000")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "*required*"
    if value is None or value in ((), {}):
        return "*none*"
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value) or "*empty*"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
