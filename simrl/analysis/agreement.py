"""Agreement: the distance of a measured run from the predicted one, in time and in decisions.

Invariant: computed from the tables of two results alone, over the samples that finished in both. So
any two runs of one schedule on one trace can be compared: a simulation with a replay, also an
interrupted one, and two repeats with each other.

Most errors are on the *rollout clock*: the seconds up to an instant in which at least one worker
rolled out. Training that is held for a stated time in both runs would dilute an error of the wall
clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from simrl.analysis.decisions import Discrepancy, differences
from simrl.analysis.instants import Instants, compare_instants
from simrl.analysis.run_view import RunView, view_run
from simrl.errors import InputError, refuse
from simrl.result.check import require
from simrl.result.metrics import gpu_seconds, rollout_bubble
from simrl.result.result import Result
from simrl.result.timeline import Floats, Ints, spans

T = TypeVar("T")


@dataclass(frozen=True)
class Both(Generic[T]):
    """A value of the predicted run and one of the measured run."""

    predicted: T
    measured: T


@dataclass(frozen=True)
class Figures:
    """Figures of whole runs; None where a run has no such figure.

    rollout_s, wall_s  rollout clock and wall clock at the last update that both runs made
    bubble             share of idle GPU time of rollout workers (`metrics.rollout_bubble`), from the start of the first rollout
                       to the end of the last
    acceptance         accepted / drafted tokens, and
    accept_length      tokens that a pass with a draft yields, both of the samples that finished in both runs
    """

    rollout_s: Both[float | None]
    wall_s: Both[float | None]
    bubble: Both[float | None]
    acceptance: Both[float | None]
    accept_length: Both[float | None]


@dataclass(frozen=True)
class Errors:
    """Errors of predicted figures; None where there is nothing to compare.

    makespan_err       (predicted - measured) / measured of the rollout clock
    wall_err           (predicted - measured) / measured of the wall clock, which includes training, rewards and waiting
    sample_mape        mean |predicted - measured| / measured of when a sample finished, on the rollout clock
    latency_mape       mean |predicted - measured| / measured of a sample's seconds from start to finish, on the wall clock
    bubble_err         predicted - measured
    acceptance_err     predicted - measured
    accept_length_err  (predicted - measured) / measured
    """

    makespan_err: float | None
    wall_err: float | None
    sample_mape: float | None
    latency_mape: float | None
    bubble_err: float | None
    acceptance_err: float | None
    accept_length_err: float | None


@dataclass(frozen=True)
class Share:
    """A worker's share in the samples of one policy update.

    started_s, ended_s  first start of these samples at the worker, and their last end, in seconds since the start of the run
    tokens              tokens of these samples that the worker generated
    batch               samples of any update at the worker in that time, as a mean over the time that it rolled out
    accept_length       tokens that a pass with a draft yielded, of the samples that finished there; None without drafts
    policy_versions     versions of the weights that generated the tokens
    """

    started_s: float
    ended_s: float
    tokens: int
    batch: float
    accept_length: float | None
    policy_versions: tuple[int, ...]


@dataclass(frozen=True)
class UpdatePart:
    """The samples of a policy update at one worker, or at all (`worker` is None); None for a run
    without such samples."""

    step: int
    worker: int | None
    predicted: Share | None
    measured: Share | None


@dataclass(frozen=True)
class Agreement:
    """Agreement of a predicted run with a measured one.

    updates          updates of either run
    samples          samples that finished in both runs
    finished_in_one  samples that finished in this run alone
    finished_ahead   samples among these that waited for a later update when their run ended
    steps, parts     updates that both runs made: as a whole, and by worker
    differences      different decisions, in time
    instants         dispatch and seal of groups, weight syncs, updates and ages of responses, event by event
    not_drafted      method of speculation that drafted nothing in the predicted run
    """

    workers: int
    updates: Both[int]
    samples: int
    finished_in_one: Both[int]
    finished_ahead: Both[int]
    figures: Figures
    errors: Errors
    near_tie_s: float
    steps: tuple[UpdatePart, ...]
    parts: tuple[UpdatePart, ...]
    differences: tuple[Discrepancy, ...]
    instants: tuple[Instants, ...]
    not_drafted: str | None

    @property
    def real_differences(self) -> tuple[Discrepancy, ...]:
        """Return the differences that are no near-ties."""
        return tuple(d for d in self.differences if d.near_tie_ms is None)

    def as_json(self) -> dict[str, Any]:
        """Return the agreement for `json.dumps`."""
        return asdict(self)


@dataclass(frozen=True)
class Spread:
    """Spread of repeats of one run: sizes of the errors over all ordered pairs."""

    repeats: int
    largest: Errors
    mean: Errors


def agree(predicted: Result, measured: Result, near_tie_s: float | None = None) -> Agreement:
    """Compare two runs of one schedule on one trace.

    Two events of a run within `near_tie_s` may change places; by default within two passes, since a
    command of either run waits for the end of a pass. Raise `InputError` for runs of different
    systems or traces, or on different numbers of workers.
    """
    for result in (predicted, measured):
        require(result.metadata, "end_s")
    p, m = view_run(predicted), view_run(measured)
    uids = _finished_in_both(p, m)
    figures = _figures(p, m, uids)
    tie_s = 2 * max(_pass_s(p), _pass_s(m)) if near_tie_s is None else near_tie_s
    updates = min(len(p.updated_s), len(m.updated_s))
    places: list[int | None] = [None, *range(p.workers)]
    compared = [
        UpdatePart(k, w, _share(p, k, w), _share(m, k, w)) for k in range(updates) for w in places
    ]
    parts = [part for part in compared if part.predicted or part.measured]
    return Agreement(
        workers=p.workers,
        updates=Both(len(p.updated_s), len(m.updated_s)),
        samples=len(uids),
        finished_in_one=Both(len(p.finished_s) - len(uids), len(m.finished_s) - len(uids)),
        finished_ahead=Both(_ahead(p, uids), _ahead(m, uids)),
        figures=figures,
        errors=_errors(p, m, uids, figures),
        near_tie_s=tie_s,
        steps=tuple(part for part in parts if part.worker is None),
        parts=tuple(part for part in parts if part.worker is not None),
        differences=tuple(sorted(differences(p, m, uids, tie_s), key=lambda d: d.at_s)),
        instants=compare_instants(p, m),
        not_drafted=method_without_drafts(predicted),
    )


def method_without_drafts(result: Result) -> str | None:
    """Return the method of speculation if it drafted nothing."""
    speculation = result.metadata.get("speculation")
    if speculation is None or np.any(result.samples.column("drafted_tokens").to_numpy()):
        return None
    return str(speculation["method"])


def repeat_spread(results: Sequence[Result]) -> Spread | None:
    """Return the errors between repeats of one run, the scale for the errors of a prediction; None
    for fewer than two."""
    if len(results) < 2:
        return None
    views = [view_run(result) for result in results]
    pairs = [(a, b, _finished_in_both(a, b)) for a, b in permutations(views, 2)]
    by_pair = [asdict(_errors(a, b, uids, _figures(a, b, uids))) for a, b, uids in pairs]
    sizes = {
        key: [abs(errors[key]) for errors in by_pair if errors[key] is not None]
        for key in by_pair[0]
    }
    return Spread(
        repeats=len(results),
        largest=Errors(**{name: max(values, default=None) for name, values in sizes.items()}),
        mean=Errors(
            **{
                name: sum(values) / len(values) if values else None
                for name, values in sizes.items()
            }
        ),
    )


def finished_on_clock(predicted: Result, measured: Result) -> tuple[Ints, Floats, Floats]:
    """Return the samples that finished in both runs (uids) and when, on the rollout clock of either
    run."""
    p, m = view_run(predicted), view_run(measured)
    uids = _finished_in_both(p, m)
    return np.array(uids, np.int64), _completions(p, uids), _completions(m, uids)


def _finished_in_both(p: RunView, m: RunView) -> list[int]:
    """Return the uids of the samples that finished in both runs. Raise `InputError` for runs that
    cannot be compared."""
    systems = p.result.metadata.get("system"), m.result.metadata.get("system")
    refuse(
        (
            None not in systems and systems[0] != systems[1],
            f"predicted is {systems[0]}, measured {systems[1]}; compare two runs of one system",
        ),
        (
            p.workers != m.workers,
            f"predicted has {p.workers} rollout worker{'s' * (p.workers != 1)}, measured {m.workers}; "
            "compare runs with equal numbers",
        ),
    )
    uids = sorted(p.finished_s.keys() & m.finished_s.keys())
    tokens = [
        dict(zip(v.samples["uid"].tolist(), v.samples["generated_tokens"].tolist(), strict=True))
        for v in (p, m)
    ]
    for uid in sorted(p.names.keys() & m.names.keys()):
        if p.names[uid] != m.names[uid]:
            raise InputError(
                f"sample {uid} is {p.names[uid]} (prompt/sample/epoch) predicted and {m.names[uid]} measured: runs of "
                "different traces; compare two of one trace"
            )
    # A recorded run that went beyond the end of its trace had new samples of other lengths, which
    # cannot be predicted.
    again = _repeated(p) | _repeated(m)
    other = {uid for uid in uids if tokens[0][uid] != tokens[1][uid]}
    for uid in sorted(other - again):
        raise InputError(
            f"sample {p.names[uid]} (prompt/sample/epoch) has {tokens[0][uid]} tokens predicted and {tokens[1][uid]} "
            "measured: runs of different traces, or seeds; compare two of one trace"
        )
    return [uid for uid in uids if uid not in again] if other else uids


def _repeated(view: RunView) -> set[int]:
    """Return the samples of repeated trace steps."""
    uid, step = view.samples["uid"], view.samples["trace_step"]
    return set(uid[np.maximum.accumulate(step) > step].tolist())


def _ahead(view: RunView, in_both: Sequence[int]) -> int:
    """Return the number of samples that finished in this run alone and waited for a later update
    when it ended."""
    buffered = view.result.samples.filter(
        pc.equal(view.result.samples.column("status"), "buffered")
    )
    return len(set(buffered.column("uid").to_pylist()) & view.finished_s.keys() - set(in_both))


# Distances in time.


def _figures(p: RunView, m: RunView, uids: Sequence[int]) -> Figures:
    until = Both(_until(p, m, uids), _until(m, p, uids))
    rates = [_draft_rates(view, np.isin(view.samples["uid"], uids)) for view in (p, m)]
    return Figures(
        rollout_s=Both(
            float(p.clock(until.predicted)) or None, float(m.clock(until.measured)) or None
        ),
        wall_s=Both(until.predicted or None, until.measured or None),
        bubble=Both(_bubble(p, until.predicted), _bubble(m, until.measured)),
        acceptance=Both(rates[0][0], rates[1][0]),
        accept_length=Both(rates[0][1], rates[1][1]),
    )


def _errors(p: RunView, m: RunView, uids: Sequence[int], figures: Figures) -> Errors:
    latencies = [np.array([v.finished_s[uid] - v.started_s[uid] for uid in uids]) for v in (p, m)]
    return Errors(
        makespan_err=_relative(figures.rollout_s),
        wall_err=_relative(figures.wall_s),
        sample_mape=_mape(_completions(p, uids), _completions(m, uids)),
        latency_mape=_mape(*latencies),
        bubble_err=_apart(figures.bubble),
        acceptance_err=_apart(figures.acceptance),
        accept_length_err=_relative(figures.accept_length),
    )


def _until(view: RunView, other: RunView, uids: Sequence[int]) -> float:
    """Return the second of the last update that both runs made; without one, of the end of the last
    common sample."""
    updates = min(len(view.updated_s), len(other.updated_s))
    if updates:
        return float(view.updated_s[updates - 1])
    return max((view.finished_s[uid] for uid in uids), default=0.0)


def _completions(view: RunView, uids: Sequence[int]) -> Floats:
    return np.asarray(view.clock([view.finished_s[uid] for uid in uids]), np.float64)


def _bubble(view: RunView, until_s: float) -> float | None:
    rolled = spans(view.result).within(0.0, until_s)
    rolled = rolled.where(rolled.of_kind("rollout"))
    # Events do not tell the idle time of a worker.
    if not len(rolled.kind) or view.result.metadata.get("events"):
        return None
    first_s, last_s = float(rolled.started_s.min()), float(rolled.ended_s.max())
    return rollout_bubble(gpu_seconds(view.result, first_s, last_s))


def _draft_rates(view: RunView, chosen: NDArray[np.bool_]) -> tuple[float | None, float | None]:
    """Return accepted / drafted tokens of some samples, and the tokens that a pass with a draft
    yields; None without drafts."""
    drafted, accepted, verifications, verified = (
        int(view.samples[name][chosen].sum())
        for name in ("drafted_tokens", "accepted_tokens", "verifications", "verified_tokens")
    )
    return (
        accepted / drafted if drafted else None,
        verified / verifications if verifications else None,
    )


def _relative(both: Both[float | None]) -> float | None:
    return (
        None if both.predicted is None or not both.measured else both.predicted / both.measured - 1
    )


def _apart(both: Both[float | None]) -> float | None:
    return (
        None if both.predicted is None or both.measured is None else both.predicted - both.measured
    )


def _mape(predicted: Floats, measured: Floats) -> float | None:
    some = measured > 0
    apart = np.abs(predicted[some] - measured[some]) / measured[some]
    return float(np.mean(apart)) if some.any() else None


# Updates and workers.


def _share(view: RunView, step: int, worker: int | None) -> Share | None:
    segments, samples = view.segments, view.samples
    of_segments, of_samples = segments["trained_step"] == step, samples["trained_step"] == step
    if worker is not None:
        of_segments &= segments["worker"] == worker
        of_samples &= samples["worker"] == worker
    if not of_segments.any():
        return None
    started_s, ended_s = (
        float(segments["started_s"][of_segments].min()),
        float(segments["ended_s"][of_segments].max()),
    )
    return Share(
        started_s=started_s,
        ended_s=ended_s,
        tokens=int(segments["tokens"][of_segments].sum()),
        batch=_batch(
            view, range(view.workers) if worker is None else (worker,), started_s, ended_s
        ),
        accept_length=_draft_rates(view, of_samples)[1],
        policy_versions=tuple(np.unique(segments["policy_version"][of_segments]).tolist()),
    )


def _batch(view: RunView, workers: Sequence[int], start_s: float, end_s: float) -> float:
    """Return the mean number of samples at a worker while it rolls out, over the window and the
    workers."""
    samples_s, rollout_s = 0.0, 0.0
    for worker in workers:
        clock, at_worker = view.clocks[worker], view.segments["worker"] == worker
        first, last = clock(start_s), clock(end_s)
        begins, ends = (
            np.clip(clock(view.segments[n][at_worker]), first, last)
            for n in ("started_s", "ended_s")
        )
        samples_s += float((ends - begins).sum())
        rollout_s += float(last - first)
    return samples_s / rollout_s if rollout_s else 0.0


def _pass_s(view: RunView) -> float:
    """Return the median seconds of a sample's token, times the tokens that a pass yields."""
    tokens = view.segments["tokens"]
    if not len(tokens):
        return 0.0
    token_s = float(
        np.median((view.segments["ended_s"] - view.segments["started_s"]) / np.maximum(tokens, 1))
    )
    return token_s * (_draft_rates(view, np.ones(len(view.samples["uid"]), bool))[1] or 1.0)
