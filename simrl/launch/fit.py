"""Makes the scenario of a launch one that can be simulated.

Invariant: a run that someone starts fits its machines. Where simrl cannot simulate it as it is
written, for its memory or for a feature that is not modelled for its model, the nearest scenario
that it can simulate is taken, and each change is listed.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from simrl.errors import InputError
from simrl.launch.translate import Assumed, Translation, option_of
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.scenario.dotted import get, put
from simrl.scenario.load import ScenarioFile
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.systems.recipes import parameters_of

CHANGES = tomllib.loads(Path(__file__).with_name("fit.toml").read_text(encoding="utf-8"))["change"]
MOST_CHANGES = 2  # at a time
SHARES = [0.5, 0.75, 0.625, 0.25, 0.875]  # of the GPUs, for rollout


def fit(translation: Translation) -> bool:
    """Change a translation to a scenario that can be simulated, and list the changes as assumed. If
    none is found, a note has the reason. Return whether one was found. Of the systems beside the launch's own, those that the
    GPUs allow stay, with a share of them for rollout."""
    inputs = InputCache()
    changes = {key: (value, why) for key, value, why in _not_modelled(translation.data)}
    data = _with(translation.data, {key: value for key, (value, _) in changes.items()})
    if reason := _refusal(data, inputs):
        free = {one.field for one in translation.assumed}
        is_given = {name for name, source in translation.sources.items() if source == "as given"}
        usable = [one for one in CHANGES if one["field"] in free or not one.get("if_assumed")]
        usable = [one for one in usable if one["field"] not in is_given]
        sets = (few for n in range(1, MOST_CHANGES + 1) for few in combinations(usable, n))
        tried = ({one["field"]: one["value"] for one in few} for few in sets)
        if (
            fitting := next((one for one in tried if not _refusal(_with(data, one), inputs)), None)
        ) is None:
            translation.notes.append(f"simrl compare refuses it as it stands: {reason}")
            return False
        for key, value in fitting.items():
            changes[key] = value, f"as written: {reason}"
        data = _with(data, fitting)
    own, *others = data["systems"]
    allowed = {other["name"]: _allowed(data, other, inputs) for other in others}
    if left := [name for name, one in allowed.items() if one is None]:
        translation.notes.append(
            f"not beside it, for these GPUs do not allow it: {', '.join(left)}"
        )
    translation.data = {**data, "systems": [own, *filter(None, allowed.values())]}
    translation.assumed = [one for one in translation.assumed if one.field not in changes]
    for key, (value, why) in changes.items():
        translation.changed.append(Assumed(key, value, why, option_of(key)))
    return True


def _allowed(
    data: dict[str, Any], system: dict[str, Any], inputs: InputCache
) -> dict[str, Any] | None:
    """Return a system with the first share of the GPUs for rollout that can be simulated; None if
    none can."""
    known = parameters_of(system["name"])
    shares = [{"rollout_share": share} for share in SHARES if "rollout_share" in known] or [{}]
    plain = {key: value for key, value in system.items() if value != known.get(key, value)}
    if isinstance(known.get("dynamic_sampling"), bool) and "dynamic_sampling" in plain:
        plain["dynamic_sampling"] = True  # a switch
    tried = ({"name": system["name"], **plain, **share} for share in shares)
    return next((one for one in tried if not _refusal({**data, "systems": [one]}, inputs)), None)


def _with(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        data = put(data, key, value)
    return data


def require_possible(data: dict[str, Any]) -> None:
    """Raise `InputError` for a GPU, a trace or lengths that no change of other fields makes
    possible."""
    gpu(data["cluster"]["gpu"])
    InputCache().trace(ScenarioFile(Path("scenario"), (), data).scenarios()[0])


def _refusal(data: dict[str, Any], inputs: InputCache) -> str:
    """Return why the first system of a scenario cannot be simulated; "" if it can."""
    try:
        prepare(ScenarioFile(Path("scenario"), (), data).scenarios()[0], inputs)
    except InputError as error:
        return str(error).partition("; it fits with")[0]
    return ""


def _not_modelled(data: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields that simrl does not have for a model, with the value to take and why."""
    shape = model_shape(data["model"])
    if (shape.linear_layers or shape.window_layers) and get(data, "engine.prefix_caching"):
        yield "engine.prefix_caching", False, "a prefix cache of states or windows is not modelled"
    for key in ("cluster.dp", "cluster.ep", "training.expert_parallel"):
        size = get(data, key) or 1
        if size > 1 and not shape.experts:
            why = "ranks are workers of their own" if key == "cluster.dp" else "no experts"
            yield key, 1, f"{data['model']}: {why}"
        elif key != "cluster.dp" and shape.experts and shape.experts % size:
            divisor = 1 if key == "cluster.ep" else math.gcd(size, shape.experts)
            yield key, divisor, f"{data['model']} has {shape.experts} experts"
