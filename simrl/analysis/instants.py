"""Instants of two runs, event by event: dispatch and seal of groups, weight syncs, updates, and the
ages of trained responses.

Invariant: computed from the tables alone. Events are matched by name: a group by prompt and epoch, a
sync by its version, an update by its number, a response by prompt, sample and epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from statistics import median

from simrl.analysis.run_view import RunView
from simrl.result.timeline import spans


@dataclass(frozen=True)
class Instants:
    """Events of one kind that are in both runs.

    kind     "dispatch" (of a group: the start of its first response), "seal" (the end of its last), "sync" (the end of a load
             at the last worker), "update" (its end): seconds since the start of the run; "age_begun", "age_sealed" (version
             of the update that trained a response, minus the version that generated its first, its last tokens): versions
    alone    events of the predicted run alone, of the measured run alone
    median, largest  of predicted - measured, with its sign; `at` is the event of the largest
    events   name, predicted, measured
    """

    kind: str
    alone: tuple[int, int]
    median: float | None
    largest: float | None
    at: str
    events: tuple[tuple[str, float, float], ...]


def compare_instants(p: RunView, m: RunView) -> tuple[Instants, ...]:
    """Return the kinds of events of two runs, matched one by one."""
    pairs = zip(_instants(p).items(), _instants(m).values(), strict=True)
    return tuple(_matched(kind, predicted, measured) for (kind, predicted), measured in pairs)


def _matched(kind: str, p: Mapping[str, float], m: Mapping[str, float]) -> Instants:
    events = tuple((name, p[name], m[name]) for name in p if name in m)
    apart = {name: predicted - measured for name, predicted, measured in events}
    at = max(apart, key=lambda name: abs(apart[name]), default="")
    middle = median(apart.values()) if apart else None
    alone = len(p) - len(events), len(m) - len(events)
    return Instants(kind, alone, middle, apart.get(at), at, events)


def _instants(view: RunView) -> dict[str, dict[str, float]]:
    """Return the instants of a run by kind and name."""
    samples = view.result.samples.to_pandas()
    groups = samples.fillna({"finished_s": inf}).groupby(["prompt_id", "epoch"], sort=False)
    names = [f"group {prompt}/{epoch}" for prompt, epoch in groups.groups]
    timeline = spans(view.result)
    loads = timeline.where(timeline.of_kind("load_weights") & (timeline.policy_version > 0))
    ends = sorted(zip(loads.policy_version.tolist(), loads.ended_s.tolist(), strict=True))
    segments = view.result.segments.to_pandas().query("tokens > 0").groupby("uid")["policy_version"]
    trained = samples.dropna(subset="trained_step").set_index("uid")["trained_step"].astype(int)
    versions = trained.map(view.result.steps.column("policy_version").to_pandas())
    ages = {"age_begun": versions - segments.first(), "age_sealed": versions - segments.last()}
    started_s, finished_s = groups["started_s"].min(), groups["finished_s"].max()
    return {
        "dispatch": {n: s for n, s in zip(names, started_s.tolist(), strict=True) if s == s},
        "seal": {n: s for n, s in zip(names, finished_s.tolist(), strict=True) if s < inf},
        "sync": {f"version {version}": ended_s for version, ended_s in ends},
        "update": {f"update {k}": s for k, s in enumerate(view.updated_s.tolist())},
        **{
            kind: {f"sample {view.names[uid]}": age for uid, age in of.dropna().items()}
            for kind, of in ages.items()
        },
    }
