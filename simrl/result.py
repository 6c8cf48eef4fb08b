"""Result: what happened, as four Arrow tables, and the recorder that schedules and workers write it through.

Invariant of a `Result`: every GPU-second between 0 and `end_s` lies in exactly one span (idle time is a span of kind
"idle"), and every sample that was submitted has one row in `samples` with one status. The replayer writes the same tables,
so predicted against measured is a join.

spans      lane, gpus, role (what the GPUs are for then: rollout, also where they train in turn, or train), kind, started_s,
           ended_s, policy_version, tokens — kinds: rollout, train_drafter (on idle rollout workers), load_weights, evaluate,
           lost, transfer, switch, log_prob, train, publish, checkpoint, idle. What the passes of a rollout went to, in the
           columns of `Work`; empty for other kinds, and where an engine does not tell (a real one)
steps      one row a policy update: step, policy_version (before it), started_s, finished_s, samples, prompt_tokens,
           response_tokens, off_policyness_mean (over tokens), off_policyness_max; of the tokens that were carried over from
           an earlier step, which these two leave out: carried_tokens, carried_off_policyness_max
samples    uid, trace_step, epoch, prompt_id, sample, prompt_tokens, generated_tokens, started_s, finished_s (empty while
           unfinished), worker (the last), status (trained, dropped, buffered, in_flight), trained_step; with speculation,
           drafted_tokens (also those thrown away unverified, of which decoupled drafting has many), accepted_tokens of them,
           verifications (passes that verified a draft), verified_tokens (what these yielded); with best-of-N,
           duplicate_tokens: those generated for it besides, by stays that were not the first to finish. All other columns are
           of the stays that were, or, while none is, of those that have the most tokens
segments   uid, worker, policy_version, tokens, started_s, ended_s
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from simrl.errors import InputError, first_line, meant
from simrl.parquet import read_parquet
from simrl.result_check import check_metadata, check_times, checked_tables
from simrl.rollout import Rollout

TABLES = ("spans", "steps", "samples", "segments")
METADATA_FILE = "result.json"


class Lane(NamedTuple):
    """A set of GPUs that do the same at every moment: a rollout worker, or the trainer."""

    name: str
    gpus: int


class Work(NamedTuple):
    """What the passes of a span of rollout went to. The seconds sum to its length, but for the host's work between passes.

    decode_s               decoding, as passes without anything else would take
    prefill_s              what prefill makes them longer, of tokens that are computed for the first time; and of those computed
    recompute_*_s          again because the cache was lost: the response moved or went on after a break, was preempted for want
                           of KV blocks, got new weights, or a drafter started that needs it
    drafts_stood_s         drafting, and what verification makes a pass longer, by the drafted tokens that stood
    drafts_wasted_s        and by those that did not
    slowed_s               what a slow worker (a fault) takes longer
    decodes                sequences that decoded, summed over passes
    preemptions            of running requests, for want of KV blocks
    """

    decode_s: float = 0.0
    prefill_s: float = 0.0
    recompute_moved_s: float = 0.0
    recompute_preempted_s: float = 0.0
    recompute_reloaded_s: float = 0.0
    recompute_redrafted_s: float = 0.0
    drafts_stood_s: float = 0.0
    drafts_wasted_s: float = 0.0
    slowed_s: float = 0.0
    decodes: float = 0.0
    preemptions: float = 0.0

    def part(self, share: float) -> Work:
        """Of a part of the span."""
        return Work(*(share * value for value in self))


class Span(NamedTuple):
    """One lane doing one thing."""

    lane: int
    kind: str
    started_s: float
    ended_s: float
    policy_version: int
    tokens: int
    work: Work | None = None


class Step(NamedTuple):
    """One policy update."""

    step: int
    policy_version: int
    started_s: float
    finished_s: float
    samples: int
    prompt_tokens: int
    response_tokens: int
    off_policyness_mean: float
    off_policyness_max: int
    carried_tokens: int = 0
    carried_off_policyness_max: int = 0


@dataclass(frozen=True)
class Result:
    """The tables of one run (columns above) and its metadata: system, scenario, sources of trace and profile, end_s."""

    spans: pa.Table
    steps: pa.Table
    samples: pa.Table
    segments: pa.Table
    metadata: dict[str, Any]

    def write(self, folder: Path) -> None:
        """One Parquet file a table and the metadata as JSON, into a folder that exists."""
        for name in TABLES:
            pq.write_table(getattr(self, name), folder / f"{name}.parquet", compression="zstd")
        (folder / METADATA_FILE).write_text(
            json.dumps(self.metadata, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def read_result(folder: str | Path) -> Result:
    """Reads what `Result.write` wrote. Raises `InputError` for a folder that holds no result, and for one whose tables do not
    hold together (`simrl.result_check`)."""
    folder = Path(folder)
    _require_a_result(folder)
    try:
        metadata = json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))
        tables = {name: read_parquet(folder / f"{name}.parquet") for name in TABLES}
    except (OSError, ValueError, RecursionError, InputError) as error:
        raise InputError(f"{folder}: not a result folder ({first_line(error)}); `simrl run` writes one") from error
    check_metadata(metadata, f"{folder}/{METADATA_FILE}")
    rows = {"spans": SpanRow, "steps": Step, "samples": SampleRow, "segments": SegmentRow}
    tables = checked_tables(tables, rows, str(folder))
    check_times(tables, metadata.get("end_s", math.inf), str(folder))
    return Result(metadata=metadata, **tables)


def _require_a_result(folder: Path) -> None:
    """Whoever names a folder wrongly hears what is there in its place."""
    if folder.is_dir():
        if not (folder / METADATA_FILE).exists():
            raise InputError(
                f"{folder}: not a result folder, it has no {METADATA_FILE}; name one that `simrl run` wrote"
            )
        return
    if folder.exists():
        raise InputError(f"{folder}: not a result folder but a file; name the folder that `simrl run` wrote")
    beside = [each.name for each in folder.parent.iterdir() if each.is_dir()] if folder.parent.is_dir() else []
    raise InputError(
        f"{folder}: not a result folder, it does not exist{meant(folder.name, beside)}; name one that `simrl run` wrote"
    )


def find_result(folder: str | Path) -> Result:
    """A result folder; the one in a folder of `simrl run`; of a replay's, what was measured. Raises `InputError`."""
    folder = Path(folder)
    if (folder / METADATA_FILE).exists() or not folder.is_dir():
        return read_result(folder)
    inside = sorted(each.parent for each in folder.glob(f"*/{METADATA_FILE}"))
    measured = [each for each in inside if each.name == "measured"]
    if len(measured or inside) == 1:
        return read_result((measured or inside)[0])
    if inside:
        names = ", ".join(each.name for each in inside)
        raise InputError(
            f"{folder}: has {len(inside)} results; name one of them, such as {inside[0]} (there are {names})"
        )
    return read_result(folder)


class Recorder:
    """Collects what happens while it happens; `result` makes the tables of it."""

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
        self._generated: dict[int, int] = {}  # tokens of all stays
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
        """From now on a lane's GPUs are for "rollout" or for "train"."""
        self._roles[lane].append((from_s, role))

    def stay_ended(self, rollout: Rollout, generated_tokens: int | None = None) -> None:
        """A stay on a worker is over: the rollout as it is now, done or not, and how many of its tokens are of this stay (None:
        those that were not there before). Of a sample that is at several workers, the furthest rollout counts."""
        uid, has = rollout.sample.uid, rollout.tokens
        before = self._rollouts.get(uid)
        had = before.tokens if before else 0
        self._generated[uid] = self._generated.get(uid, 0) + (
            has - had if generated_tokens is None else generated_tokens
        )
        if has >= had and uid not in self._finished:
            self._rollouts[uid] = rollout

    def came_back(self, rollout: Rollout) -> None:
        """The dispatcher hands a sample back: if it is done, this is its rollout, whatever else is generated for it."""
        self._rollouts[rollout.sample.uid] = rollout
        if rollout.done:
            self._finished.add(rollout.sample.uid)

    def trained(self, step: Step, rollouts: Sequence[Rollout]) -> None:
        """A policy update on these rollouts. A sample is trained once: a second time is a bug in the schedule."""
        for rollout in rollouts:
            uid = rollout.sample.uid
            if uid in self._trained or uid in self._dropped or not rollout.done:
                raise RuntimeError(f"sample {uid} in step {step.step} was trained or dropped before, or is unfinished")
            self._trained[uid] = step.step
        self.steps.append(step)
        if self._on_step is not None:
            self._on_step(step.step)

    def dropped(self, rollouts: Sequence[Rollout]) -> None:
        """Thrown away by a rule of the schedule, finished or not."""
        for rollout in rollouts:
            self._rollouts.setdefault(rollout.sample.uid, rollout)
            self._dropped.add(rollout.sample.uid)

    def rollouts(self) -> list[Rollout]:
        """Every sample as it is now, in the order of their uids."""
        return [self._rollouts[uid] for uid in sorted(self._rollouts)]

    def result(self, end_s: float, metadata: dict[str, Any]) -> Result:
        """The tables of everything up to `end_s`. Spans that reach beyond are cut there."""
        return Result(
            spans=self._spans_table(end_s),
            steps=_table(Step, self.steps),
            samples=self._samples_table(),
            segments=self._segments_table(),
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
        table = _table(SpanRow, [SpanRow(*row[:6], *(row.work or _NO_WORK)) for row in rows])
        lanes = [self.lanes[row.lane] for row in rows]
        columns = {
            "lane": pa.array([x.name for x in lanes]).dictionary_encode(),
            "gpus": pa.array([x.gpus for x in lanes], pa.int32()),
            "role": pa.array([self._role_at(row) for row in rows], pa.string()).dictionary_encode(),
        }
        return pa.table({**columns, **{name: table.column(name) for name in table.column_names if name != "lane"}})

    def _idle(self, lane: int, started_s: float, ended_s: float, policy_version: int) -> list[Span]:
        """A gap, cut where the lane's role changes."""
        if ended_s <= started_s:
            return []
        changes = [time_s for time_s, _ in self._roles[lane] if started_s < time_s < ended_s]
        cuts = [started_s, *changes, ended_s]
        return [Span(lane, "idle", a, b, policy_version, 0) for a, b in pairwise(cuts) if b > a]

    def _role_at(self, span: Span) -> str:
        return next(role for time_s, role in reversed(self._roles[span.lane]) if time_s <= span.started_s)

    def _samples_table(self) -> pa.Table:
        rows = []
        for rollout in self.rollouts():
            sample, segments, tokens = rollout.sample, rollout.segments, rollout.tokens
            uid = sample.uid
            if uid in self._trained:
                status = "trained"
            elif uid in self._dropped:
                status = "dropped"
            else:
                status = "buffered" if rollout.done else "in_flight"
            rows.append(
                SampleRow(
                    uid,
                    sample.step,
                    sample.epoch,
                    sample.prompt_id,
                    sample.sample,
                    sample.prompt_tokens,
                    tokens,
                    segments[0].started_s if segments else None,
                    segments[-1].ended_s if rollout.done else None,
                    segments[-1].worker if segments else None,
                    status,
                    self._trained.get(uid),
                    rollout.drafted_tokens,
                    rollout.accepted_tokens,
                    rollout.verifications,
                    rollout.verified_tokens,
                    self._generated.get(uid, tokens) - tokens,
                )
            )
        return _table(SampleRow, rows)

    def _segments_table(self) -> pa.Table:
        rows = [SegmentRow(rollout.sample.uid, *s) for rollout in self.rollouts() for s in rollout.segments]
        return _table(SegmentRow, rows)


def _cut(span: Span, end_s: float) -> Span:
    """A span as far as it comes before the end."""
    if span.ended_s <= end_s:
        return span
    share = (end_s - span.started_s) / (span.ended_s - span.started_s)
    return span._replace(ended_s=end_s, work=span.work and span.work.part(share))


def _beneath(spans: list[Span]) -> list[Span]:
    """The spans of a lane, those of kind "lost" only where there is nothing else: a colocated lane that has lost its rollout
    worker still trains."""
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


class SpanRow(NamedTuple):
    """A row of `spans`, what its lane says besides left out."""

    lane: int
    kind: str
    started_s: float
    ended_s: float
    policy_version: int
    tokens: int
    decode_s: float | None
    prefill_s: float | None
    recompute_moved_s: float | None
    recompute_preempted_s: float | None
    recompute_reloaded_s: float | None
    recompute_redrafted_s: float | None
    drafts_stood_s: float | None
    drafts_wasted_s: float | None
    slowed_s: float | None
    decodes: float | None
    preemptions: float | None


_NO_WORK = (None,) * len(Work._fields)


class SampleRow(NamedTuple):
    """A row of `samples`."""

    uid: int
    trace_step: int
    epoch: int
    prompt_id: int
    sample: int
    prompt_tokens: int
    generated_tokens: int
    started_s: float | None
    finished_s: float | None
    worker: int | None
    status: str
    trained_step: int | None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    verified_tokens: int = 0
    duplicate_tokens: int = 0


class SegmentRow(NamedTuple):
    """A row of `segments`."""

    uid: int
    worker: int
    policy_version: int
    tokens: int
    started_s: float
    ended_s: float


def _table(row_type: Any, rows: Sequence[Any]) -> pa.Table:
    """Rows of a NamedTuple as Arrow columns; its annotations give the types."""
    kinds = {int: pa.int64(), float: pa.float64(), str: pa.dictionary(pa.int32(), pa.string())}
    hints = get_type_hints(row_type)
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(row_type._fields)
    arrays = {}
    for name, values in zip(row_type._fields, columns, strict=True):
        kind = kinds[get_args(hints[name])[0] if get_args(hints[name]) else hints[name]]
        if pa.types.is_dictionary(kind):
            arrays[name] = pa.array(values, pa.string()).dictionary_encode()
        else:
            arrays[name] = pa.array(values, kind)
    return pa.table(arrays)
