"""What a run rests on: every input with its value, what kind of thing it is, and where it is from.

Invariant: read from the result's metadata alone. Kinds are the metadata's own (recorded, synthetic, measured, derived, assumed
…); a parameter that has its default is "default": an assumption until it is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from simrl.engine import EngineConfig
from simrl.training import TrainingConfig

SECTIONS: Mapping[str, type[BaseModel]] = {"training": TrainingConfig, "engine": EngineConfig}


class Input(NamedTuple):
    """One input of a run: what it is, its value, its kind, where it is from."""

    name: str
    value: str
    kind: str
    source: str


class Shared(NamedTuple):
    """An input and the runs that have it; none are named where all have it."""

    input: Input
    runs: tuple[str, ...]

    @property
    def parameter(self) -> bool:
        """Of the sections of a scenario; the others are told in words."""
        return self.input.name.partition(".")[0] in SECTIONS and "." in self.input.name


Facts = Mapping[str, Any]


def inputs(metadata: Facts) -> list[Input]:
    """Of one run."""
    return [entry for part in _PARTS for entry in part(metadata)]


def shared(of_runs: Mapping[str, Facts]) -> list[Shared]:
    """Of several runs, by name: equal inputs once, in the order of the first run that has them."""
    found: dict[Input, list[str]] = {}
    for name, metadata in of_runs.items():
        for entry in inputs(metadata):
            found.setdefault(entry, []).append(name)
    order = list(dict.fromkeys(entry.name for entry in found))
    rows = [Shared(entry, () if len(runs) == len(of_runs) else tuple(runs)) for entry, runs in found.items()]
    return sorted(rows, key=lambda row: order.index(row.input.name))


def _run(metadata: Facts) -> Iterator[Input]:
    scenario = metadata["scenario"]
    cluster = scenario["cluster"]
    yield Input("model", str(scenario["model"]), "given", "the scenario")
    yield Input(
        "cluster",
        f"{metadata['gpus']:,} {cluster['gpu']}, tp {cluster['tp']}: {metadata['rollout_workers']:,} rollout workers, "
        f"{metadata['train_gpus']:,} GPUs that train",
        "given",
        f"the scenario, and the system's split ({metadata['paper']})",
    )
    yield Input(
        "updates", f"{scenario['steps']}, of which {scenario['warmup_steps']} are warm-up", "given", "the scenario"
    )
    yield Input("seed", str(scenario["seed"]), "given", "the scenario")
    yield Input("simrl", str(metadata["simrl_version"]), "version", "")


def _rollouts(metadata: Facts) -> Iterator[Input]:
    trace, asked = metadata["trace"], metadata["scenario"]["steps"]
    steps = metadata["trace_steps"]
    passed = "" if steps >= asked else f"; its {steps} steps are passed over again, the run has {asked}"
    source = "; ".join(part for part in (_words(trace["source"]), f"licence {trace['licence']}") if part)
    cap = f", responses of at most {trace['cap_tokens']:,} tokens" if trace.get("cap_tokens") else ""
    yield Input("rollouts (trace)", f"{trace['name']}{cap}{passed}", str(trace["kind"]), source)


def _profile(metadata: Facts) -> Iterator[Input]:
    profile = metadata["profile"]
    corrections = f"; {', '.join(profile['corrections'])}" if profile["corrections"] else ""
    said = [
        profile["source"],
        profile.get("notes") or "",
        f"repeats {profile['spread']:.1%} apart" if profile.get("spread") is not None else "",
        f"held-out error {profile['held_out_error']:.1%}" if profile.get("held_out_error") is not None else "",
    ]
    yield Input(
        "step times (profile)",
        f"{profile['model']} on {profile['gpu']}, tp {profile['tp']}{corrections}",
        str(profile["kind"]),
        "; ".join(filter(None, said)),
    )
    yield Input(
        "loading weights at a worker",
        f"{metadata['load_weights_s']:.3g} s",
        str(metadata["load_weights_kind"]),
        "training.load_s"
        if metadata["load_weights_kind"] == "given"
        else "the model's bytes, the network, an overhead",
    )
    given = metadata["scenario"]["engine"]["kv_cache_tokens"] is not None
    yield Input(
        "KV cache of a worker",
        f"{metadata['kv_cache_tokens_per_worker']:,} tokens",
        "given" if given else "derived",
        "engine.kv_cache_tokens" if given else "GPU memory by its data sheet, less weights and reserve",
    )


def _speculation(metadata: Facts) -> Iterator[Input]:
    drafters = [metadata["speculation"]] if metadata.get("speculation") else []
    if metadata.get("best_of_n"):
        drafters += metadata["best_of_n"]["drafters"].values()
    for facts in drafters:
        acceptance, times = facts["acceptance"], facts["draft_times"]
        known = isinstance(acceptance, str)
        yield Input(
            "acceptance of drafts",
            str(facts["method"]),
            "measured" if known else str(acceptance["kind"]),
            acceptance if known else str(acceptance["source"]),
        )
        yield Input("times of drafting", str(facts["method"]), str(times["kind"]), str(times["source"]))


def _faults(metadata: Facts) -> Iterator[Input]:
    asked = metadata["scenario"]["faults"]
    if asked:
        happened = metadata.get("faults", [])
        yield Input("faults", f"{len(happened)} happened", "given", "; ".join(map(_words, map(json.dumps, asked))))


def _replay(metadata: Facts) -> Iterator[Input]:
    for key, value in (metadata.get("replay") or {}).items():
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            yield Input(f"engines: {key.replace('_', ' ')}", str(value), "measured", "the replay")


def _parameters(metadata: Facts) -> Iterator[Input]:
    for section, model in SECTIONS.items():
        values = metadata["scenario"][section]
        for key, field in model.model_fields.items():
            if key in values and values[key] is not None:
                kind = "default" if values[key] == field.default else "given"
                yield Input(f"{section}.{key}", _number(values[key]), kind, field.description or "")


def _number(value: Any) -> str:
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)


def _words(source: str) -> str:
    """A JSON object in a line of words; all else as it stands."""
    try:
        parsed = json.loads(source)
    except (ValueError, RecursionError):
        return source
    return ", ".join(_flat(parsed)) if isinstance(parsed, dict) else source


def _flat(facts: Mapping[str, Any]) -> Iterator[str]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        elif value is not None:
            yield f"{key} {value}"


_PARTS: Sequence[Any] = (_run, _rollouts, _profile, _speculation, _faults, _replay, _parameters)
