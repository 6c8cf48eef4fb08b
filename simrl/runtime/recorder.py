"""Recorder: schedules and workers record events here; `result` makes the four tables.

Invariant: trained rollouts of a simulation are put away as rows of these tables, many at a time.
Memory holds these rows, and the rollouts that are not yet trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from simrl.result.result import TABLES, Lane, Result, SampleRow, Span, Step, Work
from simrl.runtime.rollout import Rollout, Segment
from simrl.trace.trace import Sample

MOST_TRAINED = 2**16  # rollouts that are trained and not yet put away


class _Rows(NamedTuple):
    """Rows of rollouts. `context`, of shape (2, rollouts), has the generated tokens and those of
    prompt and environment."""

    samples: pa.Table
    segments: pa.Table
    context: NDArray[np.int64]


class Recorder:
    """The events of a run so far; `result` makes its tables. `on_put_away` is called with the uids
    of samples that no schedule needs any more."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        on_step: Callable[[int], None] | None = None,
        on_put_away: Callable[[Sequence[int]], None] = lambda uids: None,
    ) -> None:
        self.lanes = tuple(lanes)
        self._on_step = on_step
        self.spans: list[Span] = []
        self._roles: list[list[tuple[float, str]]] = [
            [(0.0, lane.name.partition("-")[0])] for lane in lanes
        ]
        self.steps: list[Step] = []
        self.facts: dict[str, Any] = {}  # of the pipeline
        self._rollouts: dict[int, Rollout] = {}
        self._finished: set[int] = set()  # their rows stay as they are
        self._generated: dict[int, int] = {}  # tokens of all its requests
        self._discarded: dict[int, int] = {}  # tokens that a request lost when it started over
        self._trained: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._on_put_away = on_put_away
        # called with the responses that came back finished
        self.on_finished: Callable[[list[Rollout]], object] = lambda finished: None
        # called with the responses that a rule drops, finished or not
        self.on_dropped: Callable[[Sequence[Rollout]], object] = lambda dropped: None
        self._put_away: list[_Rows] = []
        self._is_put_away = bytearray()  # by uid

    def span(
        self,
        lane: int,
        kind: str,
        started_s: float,
        ended_s: float,
        policy_version: int,
        tokens: int = 0,
        work: Work | None = None,
        lanes: int = 1,
    ) -> None:
        """Record a span of a lane, or of several `lanes` side by side, of which the first has all
        counts."""
        self.spans.append(Span(lane, kind, started_s, ended_s, policy_version, tokens, work))
        seconds = (
            work and work._replace(decodes=0.0, slot_s=0.0, preemptions=0.0) if lanes > 1 else None
        )
        for other in range(lane + 1, lane + lanes):
            self.spans.append(Span(other, kind, started_s, ended_s, policy_version, 0, seconds))

    def role(self, lane: int, role: str, from_s: float) -> None:
        """Set the role of a lane's GPUs from `from_s` on: "rollout" or "train"."""
        self._roles[lane].append((from_s, role))

    def request_ended(self, rollout: Rollout, generated_tokens: int | None = None) -> None:
        """Record the end of a request at a worker: its rollout, done or not, and the tokens that it
        generated (None: all that are new to the recorder). Of a sample at several workers, the
        longest rollout counts."""
        uid, before = rollout.sample.uid, self._rollouts.get(rollout.sample.uid)
        had = before.tokens if before else 0
        new = rollout.tokens - had if generated_tokens is None else generated_tokens
        self._generated[uid] = self._generated.get(uid, 0) + new
        if rollout.tokens >= had and not self.is_back(rollout):
            self._rollouts[uid] = rollout

    def started_over(self, sample: Sample, tokens: int) -> None:
        """Record that a request loses `tokens` that it generated, and what other workers did."""
        self._discarded[sample.uid] = self._discarded.get(sample.uid, 0) + tokens
        self._rollouts.pop(sample.uid, None)

    def came_back(self, rollouts: Sequence[Rollout]) -> None:
        """Record rollouts that the dispatcher returns. A done one is final, also if copies of its
        sample still run."""
        self._rollouts.update((rollout.sample.uid, rollout) for rollout in rollouts)
        finished = [rollout for rollout in rollouts if rollout.done and not self.is_back(rollout)]
        self._finished.update(rollout.sample.uid for rollout in finished)
        self.on_finished(finished)

    def is_back(self, rollout: Rollout) -> bool:
        """Return whether a sample has come back finished."""
        return rollout.sample.uid in self._finished or self._gone(rollout.sample.uid)

    def _gone(self, uid: int) -> bool:
        return uid < len(self._is_put_away) and self._is_put_away[uid] == 1

    def trained(self, step: Step, rollouts: Sequence[Rollout]) -> None:
        """Record a policy update on these rollouts. To train a sample twice is a bug of the
        schedule."""
        for rollout in rollouts:
            uid = rollout.sample.uid
            if uid in self._trained or uid in self._dropped or self._gone(uid) or not rollout.done:
                raise RuntimeError(
                    f"sample {uid} in step {step.step} was trained or dropped before, or is unfinished"
                )
            self._trained[uid] = step.step
        self.steps.append(step)
        if len(self._trained) >= MOST_TRAINED and rollouts and rollouts[0].token_ids is None:
            self._put_trained_away()
        if self._on_step is not None:
            self._on_step(step.step)

    def dropped(self, rollouts: Sequence[Rollout]) -> None:
        """Record rollouts, finished or not, that a rule of the schedule drops."""
        for rollout in rollouts:
            if not self._gone(rollout.sample.uid):
                self._rollouts.setdefault(rollout.sample.uid, rollout)
                self._dropped.add(rollout.sample.uid)
        self.on_dropped(rollouts)

    def rollouts(self) -> list[Rollout]:
        """Return the present rollout of every sample that is not put away, in the order of uids."""
        return [self._rollouts[uid] for uid in sorted(self._rollouts)]

    def context(self) -> NDArray[np.int64]:
        """Return for every rollout, in the order of uids, its generated tokens and those of prompt
        and environment; shape (2, rollouts)."""
        rollouts = self.rollouts()
        contexts = np.hstack([*(rows.context for rows in self._put_away), _context(rollouts)])
        uids = [
            *(rows.samples["uid"].to_numpy() for rows in self._put_away),
            [r.sample.uid for r in rollouts],
        ]
        return contexts[:, np.argsort(np.concatenate(uids))]

    def result(self, updated_s: float, metadata: dict[str, Any]) -> Result:
        """Return the tables of all that began before the last update ended (`updated_s`). The run
        ends with the passes that ran then, whose tokens are in segments and spans; all other spans
        are cut there."""
        passes_s = (
            span.ended_s
            for span in self.spans
            if (span.kind in ("rollout", "judge") or span.work is not None)
            and span.started_s < updated_s
        )
        end_s = max(updated_s, max(passes_s, default=0.0))
        rows = self._rows(self.rollouts())
        if self._put_away:
            samples, segments, _ = zip(*self._put_away, rows, strict=True)
            rows = rows._replace(
                samples=self._with_late_copies(_in_order(samples)), segments=_in_order(segments)
            )
        return Result(
            spans=self._spans_table(updated_s, end_s),
            steps=_table("steps", self.steps),
            samples=rows.samples,
            segments=rows.segments,
            metadata={**metadata, "end_s": end_s},
        )

    def _put_trained_away(self) -> None:
        uids = sorted(self._trained)
        self._put_away.append(self._rows([self._rollouts.pop(uid) for uid in uids]))
        self._is_put_away.extend(bytes(max(uids[-1] + 1 - len(self._is_put_away), 0)))
        for uid in uids:
            self._is_put_away[uid] = 1
            self._generated.pop(uid, None)
            self._discarded.pop(uid, None)
        self._finished.difference_update(uids)
        self._trained.clear()
        self._on_put_away(uids)

    def _rows(self, rollouts: Sequence[Rollout]) -> _Rows:
        uids = [rollout.sample.uid for rollout in rollouts for _ in rollout.segments]
        segments = [segment for rollout in rollouts for segment in rollout.segments]
        table = _table_of("segments", [uids, *_columns(segments, Segment._fields)])
        return _Rows(self._samples_table(rollouts), table, _context(rollouts))

    def _with_late_copies(self, samples: pa.Table) -> pa.Table:
        """Return the samples, with the tokens of copies that ended after their samples were put
        away."""
        late = [uid for uid in self._generated if self._gone(uid)]
        if not late:
            return samples
        tokens = samples["duplicate_tokens"].to_numpy().copy()
        tokens[np.searchsorted(samples["uid"].to_numpy(), late)] += [
            self._generated[uid] for uid in late
        ]
        return samples.set_column(
            samples.column_names.index("duplicate_tokens"), "duplicate_tokens", [tokens]
        )

    def _spans_table(self, updated_s: float, end_s: float) -> pa.Table:
        by_lane: list[list[Span]] = [[] for _ in self.lanes]
        for span in self.spans:
            if span.started_s < updated_s and span.ended_s > span.started_s:
                by_lane[span.lane].append(_cut(span, end_s))
        rows: list[Span] = []
        for lane, spans in enumerate(by_lane):
            clock_s = 0.0
            for span in sorted(_beneath(spans), key=lambda s: s.started_s):
                if span.started_s < clock_s - 1e-9:
                    raise RuntimeError(
                        f"lane {self.lanes[lane].name}: two things at {span.started_s} s ({span.kind})"
                    )
                rows += self._idle(lane, clock_s, span.started_s, span.policy_version)
                rows.append(span._replace(started_s=max(span.started_s, clock_s)))
                clock_s = span.ended_s
            rows += self._idle(lane, clock_s, end_s, -1)
        columns = [
            (
                *self.lanes[row.lane],
                self._role_at(row),
                *row[1:6],
                *(row.work or [None] * len(Work._fields)),
            )
            for row in rows
        ]
        return _table("spans", columns)

    def _idle(self, lane: int, started_s: float, ended_s: float, policy_version: int) -> list[Span]:
        """Return the idle spans of a gap, divided where the lane's role changes."""
        if ended_s <= started_s:
            return []
        changes = [time_s for time_s, _ in self._roles[lane] if started_s < time_s < ended_s]
        cuts = [started_s, *changes, ended_s]
        return [Span(lane, "idle", a, b, policy_version, 0) for a, b in pairwise(cuts) if b > a]

    def _role_at(self, span: Span) -> str:
        return next(
            role for time_s, role in reversed(self._roles[span.lane]) if time_s <= span.started_s
        )

    def _samples_table(self, rollouts: Sequence[Rollout]) -> pa.Table:
        uids = [rollout.sample.uid for rollout in rollouts]
        tokens = [rollout.tokens for rollout in rollouts]
        drafts = [
            (r.drafted_tokens, r.accepted_tokens, r.verifications, r.verified_tokens)
            for r in rollouts
        ]
        columns = [
            *_columns([rollout.sample for rollout in rollouts], Sample._fields),
            tokens,
            [rollout.segments[0].started_s if rollout.segments else None for rollout in rollouts],
            [rollout.segments[-1].ended_s if rollout.done else None for rollout in rollouts],
            [rollout.segments[-1].worker if rollout.segments else None for rollout in rollouts],
            [self._status(rollout) for rollout in rollouts],
            [self._trained.get(uid) for uid in uids],
            *_columns(drafts, SampleRow._fields[-5:-1]),
            [
                self._generated.get(uid, kept) - kept + self._discarded.get(uid, 0)
                for uid, kept in zip(uids, tokens, strict=True)
            ],
        ]
        return _table_of("samples", columns)

    def _status(self, rollout: Rollout) -> str:
        uid = rollout.sample.uid
        if uid in self._trained or rollout.sample.is_evaluation:
            return "trained" if uid in self._trained else "evaluation"
        return "dropped" if uid in self._dropped else "buffered" if rollout.done else "in_flight"


def _context(rollouts: Sequence[Rollout]) -> NDArray[np.int64]:
    not_generated = [
        rollout.sample.prompt_tokens + rollout.observation_tokens for rollout in rollouts
    ]
    return np.array([[rollout.tokens for rollout in rollouts], not_generated], np.int64)


def _in_order(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of several tables in the order of their uids."""
    plain = pa.schema(
        (field.name, pa.string() if pa.types.is_dictionary(field.type) else field.type)
        for field in tables[0].schema
    )
    table = pa.concat_tables([table.cast(plain) for table in tables])
    return (
        table.take(np.argsort(table["uid"].to_numpy(), kind="stable"))
        .combine_chunks()
        .cast(tables[0].schema)
    )


def _cut(span: Span, end_s: float) -> Span:
    """Return the part of a span before the end."""
    if span.ended_s <= end_s:
        return span
    share = (end_s - span.started_s) / (span.ended_s - span.started_s)
    return span._replace(ended_s=end_s, work=span.work and span.work.part(share))


def _beneath(spans: list[Span]) -> list[Span]:
    """Return the spans of a lane, `lost` ones cut to the gaps between others: a colocated lane
    whose rollout worker is lost still trains."""
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
    """Return columns as a table of this name, without the schema's marks of nullable columns."""
    schema = TABLES[name]
    return pa.table(
        [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)],
        schema.names,
    )
