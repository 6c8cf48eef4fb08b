"""Recorder: schedules and workers write what happens through it; `result` makes the four tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from simrl.result.result import TABLES, Lane, Result, SampleRow, Span, Step, Work
from simrl.runtime.rollout import Rollout, Segment
from simrl.trace.trace import Sample


class Recorder:
    """The events of a run so far; `result` makes its tables."""

    def __init__(self, lanes: Sequence[Lane], on_step: Callable[[int], None] | None = None) -> None:
        self.lanes = tuple(lanes)
        self._on_step = on_step
        self.spans: list[Span] = []
        self._roles: list[list[tuple[float, str]]] = [
            [(0.0, "rollout" if lane.name.startswith("rollout") else "train")] for lane in lanes
        ]
        self.steps: list[Step] = []
        self._rollouts: dict[int, Rollout] = {}
        self._finished: set[int] = set()  # their rows stay as they are
        self._generated: dict[int, int] = {}  # tokens of all its requests
        self._trained: dict[int, int] = {}
        self._dropped: set[int] = set()

    def span(
        self,
        lane: int,
        kind: str,
        started_s: float,
        ended_s: float,
        policy_version: int,
        tokens: int = 0,
        work: Work | None = None,
    ) -> None:
        self.spans.append(Span(lane, kind, started_s, ended_s, policy_version, tokens, work))

    def role(self, lane: int, role: str, from_s: float) -> None:
        """Set what a lane's GPUs are for from now on: "rollout" or "train"."""
        self._roles[lane].append((from_s, role))

    def request_ended(self, rollout: Rollout, generated_tokens: int | None = None) -> None:
        """Record the end of a request at a worker: the rollout as it is now, done or not, and the tokens that this request
        generated (None: those that were not there before). Of a sample at several workers, the furthest rollout counts."""
        uid, before = rollout.sample.uid, self._rollouts.get(rollout.sample.uid)
        had = before.tokens if before else 0
        new = rollout.tokens - had if generated_tokens is None else generated_tokens
        self._generated[uid] = self._generated.get(uid, 0) + new
        if rollout.tokens >= had and uid not in self._finished:
            self._rollouts[uid] = rollout

    def came_back(self, rollouts: Sequence[Rollout]) -> None:
        """Record that the dispatcher hands samples back: one that is done has this rollout, also if copies of it still run."""
        self._rollouts.update((rollout.sample.uid, rollout) for rollout in rollouts)
        self._finished.update(rollout.sample.uid for rollout in rollouts if rollout.done)

    def is_back(self, rollout: Rollout) -> bool:
        """Return whether a sample has come back finished."""
        return rollout.sample.uid in self._finished

    def trained(self, step: Step, rollouts: Sequence[Rollout]) -> None:
        """Record a policy update on these rollouts. A sample is trained once: a second time is a bug in the schedule."""
        for rollout in rollouts:
            uid = rollout.sample.uid
            if uid in self._trained or uid in self._dropped or not rollout.done:
                raise RuntimeError(f"sample {uid} in step {step.step} was trained or dropped before, or is unfinished")
            self._trained[uid] = step.step
        self.steps.append(step)
        if self._on_step is not None:
            self._on_step(step.step)

    def dropped(self, rollouts: Sequence[Rollout]) -> None:
        """Record rollouts that a rule of the schedule drops, finished or not."""
        for rollout in rollouts:
            self._rollouts.setdefault(rollout.sample.uid, rollout)
            self._dropped.add(rollout.sample.uid)

    def rollouts(self) -> list[Rollout]:
        """Return every sample as it is now, in the order of their uids."""
        return [self._rollouts[uid] for uid in sorted(self._rollouts)]

    def result(self, end_s: float, metadata: dict[str, Any]) -> Result:
        """Return the tables of everything up to `end_s`. Spans that reach beyond are cut there."""
        rollouts = self.rollouts()
        uids = [rollout.sample.uid for rollout in rollouts for _ in rollout.segments]
        segments = [segment for rollout in rollouts for segment in rollout.segments]
        return Result(
            spans=self._spans_table(end_s),
            steps=_table("steps", self.steps),
            samples=self._samples_table(rollouts),
            segments=_table_of("segments", [uids, *_columns(segments, Segment._fields)]),
            metadata={**metadata, "end_s": end_s},
        )

    def _spans_table(self, end_s: float) -> pa.Table:
        by_lane: list[list[Span]] = [[] for _ in self.lanes]
        for span in self.spans:
            if span.started_s < end_s and span.ended_s > span.started_s:
                by_lane[span.lane].append(_cut(span, end_s))
        rows: list[Span] = []
        for lane, spans in enumerate(by_lane):
            clock_s = 0.0
            for span in sorted(_beneath(spans), key=lambda s: s.started_s):
                if span.started_s < clock_s - 1e-9:
                    raise RuntimeError(f"lane {self.lanes[lane].name}: two things at {span.started_s} s ({span.kind})")
                rows += self._idle(lane, clock_s, span.started_s, span.policy_version)
                rows.append(span._replace(started_s=max(span.started_s, clock_s)))
                clock_s = span.ended_s
            rows += self._idle(lane, clock_s, end_s, -1)
        columns = [
            (*self.lanes[row.lane], self._role_at(row), *row[1:6], *(row.work or [None] * len(Work._fields)))
            for row in rows
        ]
        return _table("spans", columns)

    def _idle(self, lane: int, started_s: float, ended_s: float, policy_version: int) -> list[Span]:
        """Return the idle spans of a gap, cut where the lane's role changes."""
        if ended_s <= started_s:
            return []
        changes = [time_s for time_s, _ in self._roles[lane] if started_s < time_s < ended_s]
        cuts = [started_s, *changes, ended_s]
        return [Span(lane, "idle", a, b, policy_version, 0) for a, b in pairwise(cuts) if b > a]

    def _role_at(self, span: Span) -> str:
        return next(role for time_s, role in reversed(self._roles[span.lane]) if time_s <= span.started_s)

    def _samples_table(self, rollouts: Sequence[Rollout]) -> pa.Table:
        uids = [rollout.sample.uid for rollout in rollouts]
        tokens = [rollout.tokens for rollout in rollouts]
        drafts = [(r.drafted_tokens, r.accepted_tokens, r.verifications, r.verified_tokens) for r in rollouts]
        columns = [
            *_columns([rollout.sample for rollout in rollouts], Sample._fields),
            tokens,
            [rollout.segments[0].started_s if rollout.segments else None for rollout in rollouts],
            [rollout.segments[-1].ended_s if rollout.done else None for rollout in rollouts],
            [rollout.segments[-1].worker if rollout.segments else None for rollout in rollouts],
            [self._status(rollout) for rollout in rollouts],
            [self._trained.get(uid) for uid in uids],
            *_columns(drafts, SampleRow._fields[-5:-1]),
            [self._generated.get(uid, kept) - kept for uid, kept in zip(uids, tokens, strict=True)],
        ]
        return _table_of("samples", columns)

    def _status(self, rollout: Rollout) -> str:
        uid = rollout.sample.uid
        if uid in self._trained:
            return "trained"
        return "dropped" if uid in self._dropped else "buffered" if rollout.done else "in_flight"


def _cut(span: Span, end_s: float) -> Span:
    """Return the part of a span before the end."""
    if span.ended_s <= end_s:
        return span
    share = (end_s - span.started_s) / (span.ended_s - span.started_s)
    return span._replace(ended_s=end_s, work=span.work and span.work.part(share))


def _beneath(spans: list[Span]) -> list[Span]:
    """Return the spans of a lane, `lost` ones cut to where there is no other: a colocated lane that has lost its rollout worker
    still trains."""
    others = sorted((span for span in spans if span.kind != "lost"), key=lambda s: s.started_s)
    shown = []
    for lost in (span for span in spans if span.kind == "lost"):
        clock_s = lost.started_s
        for span in others:
            if span.ended_s > clock_s and span.started_s < lost.ended_s:
                shown.append(lost._replace(started_s=clock_s, ended_s=span.started_s))
                clock_s = span.ended_s
        shown.append(lost._replace(started_s=clock_s))
    return others + [span for span in shown if span.ended_s > span.started_s]


def _table(name: str, rows: Sequence[Any]) -> pa.Table:
    """Return rows as the Arrow columns of a table."""
    return _table_of(name, _columns(rows, TABLES[name].names))


def _columns(rows: Sequence[Any], names: Sequence[str]) -> list[Sequence[Any]]:
    return list(zip(*rows, strict=True)) if rows else [()] * len(names)


def _table_of(name: str, columns: Sequence[Sequence[Any]]) -> pa.Table:
    schema = TABLES[name]
    return pa.table([pa.array(each, kind) for each, kind in zip(columns, schema.types, strict=True)], schema.names)
