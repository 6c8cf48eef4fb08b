"""A measured run of which only events are known, such as NeMo-RL's, as a `Result` to compare with a
predicted run of its schedule on its trace.

Invariant: events do not say at which worker a response was, so the predicted worker stands for it,
and rollout workers are busy while any response runs and no weights are loaded.
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
    columns = (predicted.samples.column(name).to_pylist() for name in ("uid", "worker"))
    worker = {uid: worker or 0 for uid, worker in zip(*columns, strict=True)}
    rollouts = [
        Rollout(sample, tuple(Segment(worker.get(sample.uid, 0), *part) for part in parts), True)
        for sample, parts in zip(
            run.trace.samples(0, len(run.trace)), run.responses["parts"], strict=True
        )
    ]
    lanes = [lane for lane in spans(predicted).lanes if lane.name != REST_LANE]
    workers = sum(map(rolls_out, lanes))
    record = Recorder(sorted(lanes, key=lambda lane: not rolls_out(lane)))
    record.came_back(rollouts)
    edges = [
        np.sort(table[name])
        for table, ended in ((run.responses, "finished_s"), (run.syncs, "ended_s"))
        for name in ("started_s", ended)
    ]
    edges_s = np.unique(np.concatenate(edges))
    begun, over, loading, loaded = (np.searchsorted(e, edges_s[:-1], "right") for e in edges)
    rolls = (begun > over) & (loading == loaded)
    for from_s, to_s in zip(edges_s[:-1][rolls].tolist(), edges_s[1:][rolls].tolist(), strict=True):
        record.span(0, "rollout", from_s, to_s, -1, lanes=workers)
    for version, from_s, to_s in run.syncs.itertuples(index=False):
        record.span(0, "load_weights", from_s, to_s, version, lanes=workers)
    for k, from_s, to_s in run.updates.itertuples(index=False):
        chosen = (run.responses["trained_step"] == k).to_numpy().nonzero()[0]
        trained = [rollouts[row] for row in chosen]
        off = of_update(k, [(s.policy_version, s.tokens, 0) for r in trained for s in r.segments])
        prompt_tokens = sum(rollout.sample.prompt_tokens for rollout in trained)
        counts = len(trained), prompt_tokens, off.tokens, off.mean, off.most
        record.trained(Step(k, k, from_s, to_s, *counts), trained)
        if len(lanes) > workers:
            record.span(workers, "train", from_s, to_s, k)
    end_s = run.updates["ended_s"].max() if len(run.updates) else edges_s[-1]
    facts = {"label": run.trace.metadata.source, "events": True, "prefix_cache": None}
    return record.result(float(end_s), {**predicted.metadata, **facts})
