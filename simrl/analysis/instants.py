"""Instants of two runs, event by event: dispatch and seal of each group, weight syncs, updates, and
the ages of trained responses.

Invariant: computed from the tables alone. Events are matched by name: a group by trace step, prompt
and epoch, a sync by its version, an update by its number, a response by its uid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from simrl.analysis.run_view import RunView
from simrl.result.timeline import spans

GROUP = ["trace_step", "prompt_id", "epoch"]


@dataclass(frozen=True)
class Instants:
    """Events of one kind that are in both runs.

    kind     "dispatch" (of a group: the start of its first response), "seal" (the end of its last), "sync" (the end of a load
             at the last worker), "update" (its end): seconds since the start of the run; "age_begun", "age_sealed" (version
             of the update that trained a response, minus the version that generated its first, its last token): versions
    alone    events of the predicted run alone, of the measured run alone
    median, largest  of predicted - measured, with its sign; `where` is the event of the largest
    events   name, predicted, measured
    """

    kind: str
    alone: tuple[int, int]
    median: float | None
    largest: float | None
    where: str
    events: tuple[tuple[str, float, float], ...]


def compare_instants(p: RunView, m: RunView) -> tuple[Instants, ...]:
    """Return the kinds of events of two runs, matched one by one."""
    pairs = zip(_instants(p).items(), _instants(m).values(), strict=True)
    return tuple(_matched(kind, predicted, measured) for (kind, predicted), measured in pairs)


def _matched(kind: str, p: Mapping[str, float], m: Mapping[str, float]) -> Instants:
    events = tuple((name, p[name], m[name]) for name in p if name in m)
    apart = {name: predicted - measured for name, predicted, measured in events}
    where = max(apart, key=lambda name: abs(apart[name]), default="")
    return Instants(
        kind=kind,
        alone=(len(p) - len(events), len(m) - len(events)),
        median=median(apart.values()) if apart else None,
        largest=apart.get(where),
        where=where,
        events=events,
    )


def _instants(view: RunView) -> dict[str, dict[str, float]]:
    """Return the instants of a run by kind and name."""
    samples, segments = view.result.samples.to_pandas(), view.result.segments.to_pandas()
    samples["finished_s"] = samples["finished_s"].where(samples["finished_s"].notna(), float("inf"))
    groups = samples.groupby(GROUP, sort=False).agg({"started_s": "min", "finished_s": "max"})
    groups.index = [
        f"step {step}, prompt {prompt}, epoch {epoch}" for step, prompt, epoch in groups.index
    ]
    timeline = spans(view.result)
    loads = timeline.where(timeline.of_kind("load_weights") & (timeline.policy_version > 0))
    synced: dict[str, float] = {}
    for version, ended_s in zip(loads.policy_version.tolist(), loads.ended_s.tolist(), strict=True):
        name = f"version {version}"
        synced[name] = max(synced.get(name, ended_s), ended_s)
    trained = samples[samples["trained_step"].notna()].set_index("uid")["trained_step"].astype(int)
    versions = trained.map(dict(enumerate(view.result.steps.column("policy_version").to_pylist())))
    by_sample = segments[segments["tokens"] > 0].groupby("uid")["policy_version"]
    ages = {
        f"age_{word}": versions - edge
        for word, edge in (("begun", by_sample.first()), ("sealed", by_sample.last()))
    }
    return {
        "dispatch": groups["started_s"].dropna().to_dict(),
        "seal": groups["finished_s"][groups["finished_s"] < float("inf")].to_dict(),
        "sync": synced,
        "update": {f"update {k}": at_s for k, at_s in enumerate(view.updated_s.tolist())},
        **{
            kind: {f"sample {view.names[uid]}": age for uid, age in of.dropna().items()}
            for kind, of in ages.items()
        },
    }
