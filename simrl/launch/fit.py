"""Makes the scenario of a launch one that can be simulated.

Invariant: a run that someone starts fits its machines. Where simrl cannot simulate it as it is
written, for its memory or for a feature that is not modelled for its model, the nearest scenario
that it can simulate is taken, and each change is listed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from simrl.errors import InputError
from simrl.launch.translate import Assumed, Translation
from simrl.profile.model_shape import ModelShape, model_shape
from simrl.scenario.dotted import get, put
from simrl.scenario.load import ScenarioFile
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare

CHANGES = tomllib.loads(Path(__file__).with_name("fit.toml").read_text(encoding="utf-8"))["change"]
MOST_CHANGES = 3  # at a time


def fit(translation: Translation) -> None:
    """Change a translation to a scenario that can be simulated, and list the changes as assumed. If
    none is found, a note has the reason."""
    for key, value, why in _not_modelled(translation.data, model_shape(translation.data["model"])):
        _change(translation, {key: value}, why)
    reason = _refusal(translation.data)
    if not reason:
        return
    free = {one.field for one in translation.assumed}
    usable = [
        change
        for change in CHANGES
        if (change["field"] in free or not change.get("if_assumed")) and get(translation.data, change["field"]) != change["value"]
    ]
    for n in range(1, MOST_CHANGES + 1):
        for chosen in combinations(usable, n):
            changes = {one["field"]: one["value"] for one in chosen}
            if len(changes) == n and not _refusal(_with(translation.data, changes)):
                _change(translation, changes, f"adapted, since as written simrl finds: {reason}")
                return
    translation.notes.append(f"simrl compare refuses it as it stands: {reason}")


def _with(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        data = put(data, key, value)
    return data


def _change(translation: Translation, changes: dict[str, Any], why: str) -> None:
    translation.data = _with(translation.data, changes)
    kept = [one for one in translation.assumed if one.field not in changes]
    made = [Assumed(key, value, f"{key} ({why})", f"{key}=X") for key, value in changes.items()]
    translation.assumed = kept + made


def _refusal(data: dict[str, Any]) -> str:
    """Return why the first system of a scenario cannot be simulated; "" if it can."""
    try:
        prepare(ScenarioFile(Path("scenario"), (), data).scenarios()[0], InputCache())
    except InputError as error:
        return str(error).partition("; it fits with")[0]
    return ""


def _not_modelled(data: dict[str, Any], shape: ModelShape) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields that simrl does not have for a model, with the value to take and why."""
    if (shape.linear_layers or shape.window_layers) and get(data, "engine.prefix_caching"):
        yield "engine.prefix_caching", False, "a prefix cache of layers with states or windows is not modelled"
    if not shape.experts:
        for key, why in (
            ("cluster.dp", "the ranks of a model without experts are workers of their own"),
            ("cluster.ep", "the model has no experts"),
            ("training.expert_parallel", "the model has no experts"),
        ):
            if (get(data, key) or 1) > 1:
                yield key, 1, why
