"""A measured run of which only events are known, such as NeMo-RL's, as a `Result` to compare with a
predicted run of its schedule on its trace.

Invariant: what events do not tell is taken from the predicted run or left out: the worker of a
response is the predicted one, and all rollout workers are busy while any response runs.
"""

from __future__ import annotations

import numpy as np

from simrl.result.off_policyness import of_update
from simrl.result.result import REST_LANE, Result, Step
from simrl.result.timeline import rolls_out, spans
from simrl.runtime.recorder import Recorder
from simrl.runtime.rollout import Rollout, Segment
from simrl.trace.importers.rollout_trace import RolloutTrace


def measured_result(run: RolloutTrace, predicted: Result) -> Result:
    """Return the tables of a run whose events were read."""
    worker = dict(
        zip(*(predicted.samples.column(n).to_pylist() for n in ("uid", "worker")), strict=True)
    )
    recorded = zip(run.trace.samples(0, len(run.trace)), run.responses["parts"], strict=True)
    rollouts = [
        Rollout(sample, tuple(Segment(worker.get(sample.uid) or 0, *part) for part in parts), True)
        for sample, parts in recorded
    ]
    lanes = [lane for lane in spans(predicted).lanes if lane.name != REST_LANE]
    workers = sum(map(rolls_out, lanes))
    record = Recorder(sorted(lanes, key=lambda lane: not rolls_out(lane)))
    record.came_back(rollouts)
    edges_s = np.unique(
        np.r_[
            run.responses["started_s"],
            run.responses["finished_s"],
            run.syncs["started_s"],
            run.syncs["ended_s"],
        ]
    )
    middle_s = (edges_s[1:] + edges_s[:-1]) / 2

    def running(table, start, end):
        return np.searchsorted(np.sort(table[start]), middle_s) > np.searchsorted(
            np.sort(table[end]), middle_s
        )

    rolls = running(run.responses, "started_s", "finished_s") & ~running(
        run.syncs, "started_s", "ended_s"
    )
    for a, b in zip(edges_s[:-1][rolls].tolist(), edges_s[1:][rolls].tolist(), strict=True):
        record.span(0, "rollout", a, b, -1, lanes=workers)
    for version, a, b in run.syncs.itertuples(index=False):
        record.span(0, "load_weights", a, b, version, lanes=workers)
    for k, started_s, ended_s in run.updates.itertuples(index=False):
        members = [
            r for r, step in zip(rollouts, run.responses["trained_step"], strict=True) if step == k
        ]
        off = of_update(k, [(s.policy_version, s.tokens, 0) for r in members for s in r.segments])
        prompts = sum(r.sample.prompt_tokens for r in members)
        record.trained(
            Step(k, k, started_s, ended_s, len(members), prompts, off.tokens, off.mean, off.most),
            members,
        )
        if len(lanes) > workers:
            record.span(workers, "train", started_s, ended_s, k)
    last_s = max([*run.updates["ended_s"][-1:], *([] if len(run.updates) else edges_s[-1:])])
    return record.result(last_s, {"label": run.trace.metadata.source, "events": True})
