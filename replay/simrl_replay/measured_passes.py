"""The passes of a replay: counted beside the simulated ones, and a second prediction with their
seconds.

Invariant: the second prediction takes from a replay the seconds of its passes and loads, and no
decision. So an error splits in two: the host was slower or faster than its profile, and the schedule
was predicted otherwise. The second part alone says something about simrl, conditional on the measured
speed; the first is about the profile and the host. Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow.compute as pc
import simpy
from numpy.typing import NDArray

from simrl.analysis.agreement import Agreement, agree
from simrl.engine.state import RECORDED
from simrl.profile.profile import pass_s
from simrl.result.result import Result
from simrl.result.timeline import spans
from simrl.runtime.simulated_worker import SimulatedWorker
from simrl.simulate.prepare import Prepared
from simrl.simulate.run import Schedule, simulated_workers
from simrl_replay.host import PASS
from simrl_replay.vllm_adapter import PassWork

Passes = NDArray[np.void]  # a record a pass: `RECORDED`, or `PASSES` of a real engine
PASSES = np.dtype([(name, np.float64) for name in PASS])
MORE_PASSES = 1000  # that a prediction may make beyond four times the measured ones


class Counts(NamedTuple):
    """Passes of an engine up to the end of the last trained sample, the requests that decoded in
    them, and the tokens of contexts that they computed, in sum."""

    passes: int
    decodes: int
    prefill_tokens: int


class EngineCounts(NamedTuple):
    """Counts of an engine: predicted, predicted given the measured speed, measured. `parted` is the
    first pass with other work than predicted, `parted_given` than predicted given the measured speed;
    None if every pass is equal."""

    predicted: Counts
    given: Counts
    measured: Counts
    parted: int | None
    parted_given: int | None


@dataclass(frozen=True)
class Split:
    """The makespan's error in two factors: 1 + makespan_err = (1 + speed_err) (1 + schedule_err).

    given         agreement of the prediction that was given the measured speed with the measured run
    speed_err     predicted / predicted given the measured speed - 1: the host's part
    schedule_err  predicted given the measured speed / measured - 1: simrl's part
    passes_err    profiled / measured seconds of all measured passes - 1
    core_share    CPU seconds of the engines' threads / measured seconds of their passes
    engines       counts, by engine
    """

    given: Agreement
    speed_err: float | None
    schedule_err: float | None
    passes_err: float
    core_share: float
    engines: tuple[EngineCounts, ...]

    @property
    def equal_passes(self) -> bool:
        """True if each engine made as many passes as predicted, each with the predicted work."""
        return all(engine.parted is None for engine in self.engines)

    def as_json(self) -> dict[str, Any]:
        """Return the parts for `json.dumps`, without the agreement's events."""
        real = self.given.real_differences
        engines = [
            {
                name: each._asdict() if isinstance(each, Counts) else each
                for name, each in e._asdict().items()
            }
            for e in self.engines
        ]
        return {
            "speed_err": self.speed_err,
            "schedule_err": self.schedule_err,
            "passes_err": self.passes_err,
            "core_share": self.core_share,
            "errors": asdict(self.given.errors),
            "near_ties": len(self.given.differences) - len(real),
            "real_differences": len(real),
            "decisions": [difference.text for difference in real],
            "parts_at_near_tie": any(
                difference.near_tie_ms is not None
                for difference in self.given.differences
                if difference.at_s == self.given.differences[0].at_s
            ),
            "engines": engines,
        }

    @property
    def line(self) -> str:
        """The parts of the error in a line."""
        errors = self.speed_err, self.schedule_err, self.given.errors.sample_mape
        if None in errors:
            return "Nothing finished in both runs: the error has no parts"
        speed, schedule, samples = (float(error or 0.0) for error in errors)
        passes = sum(engine.measured.passes for engine in self.engines)
        as_predicted = (
            f"all {passes:,} passes have the predicted work"
            if self.equal_passes
            else f"{passes:,} passes, {sum(e.predicted.passes for e in self.engines):,} predicted"
        )
        return (
            f"Of the error, {speed:+.1%} is the speed of this machine, whose passes took other times than profiled, and "
            f"{schedule:+.1%} the schedule: predicted again with the measured seconds of each pass, the makespan is so far "
            f"off, samples' ends {samples:.1%}, and {len(self.given.real_differences)} decisions really differ; {as_predicted}"
        )


def passes_of(rows: Sequence[float], start_s: float) -> Passes:
    """Return the passes that an engine reported (`host.Counted`), in seconds of a run that started at
    `start_s` on the engine's clock."""
    passes = np.array(rows, np.float64).view(PASSES)
    for name in ("began_s", "ended_s"):
        passes[name] -= start_s
    return passes


def split_error(
    prepared: Prepared,
    measured: Result,
    passes: Sequence[Passes],
    generated: Prepared | None = None,
) -> Split:
    """Return the parts of the error of a prediction, whose replay made these passes. `generated` is
    the scenario with the responses that the replay generated, if drafts were counted on others."""
    seconds = np.zeros((len(passes), 4 * max(map(len, passes)) + MORE_PASSES))
    predicted, before = _recorded(prepared, seconds)
    for row, each in zip(seconds, passes, strict=True):
        row[: len(each)] = each["ended_s"] - each["began_s"]
    again, after = _recorded(generated or prepared, seconds, _load_seconds(measured, len(passes)))
    agreement = agree(again, measured)
    works = [
        [_work(each, result) for each in engines]
        for result, engines in ((predicted, before), (again, after), (measured, passes))
    ]
    every = np.concatenate(passes)
    measured_s = float((every["ended_s"] - every["began_s"]).sum())
    return Split(
        agreement,
        agree(predicted, again).errors.makespan_err,
        agreement.errors.makespan_err,
        _profiled_s(prepared, every) / measured_s - 1,
        float(every["cpu_s"].sum()) / measured_s,
        tuple(
            EngineCounts(_counts(p), _counts(g), _counts(m), _parting(p, m), _parting(g, m))
            for p, g, m in zip(*works, strict=True)
        ),
    )


def _recorded(
    prepared: Prepared, seconds: NDArray[np.float64], loads: Sequence[Sequence[float]] = ()
) -> tuple[Result, list[Passes]]:
    """Simulate, with the seconds of each engine's passes where they are not 0, and of its loads if
    any are given. Return the result, and the passes."""
    if loads:  # the host's work for a request is a part of the measured passes
        costs = prepared.costs._replace(request_s=0.0, load_s=0.0, pause_s=0.0)
        prepared = replace(prepared, costs=costs)
    schedule = Schedule(prepared, simpy.Environment(), simulated_workers)
    workers = [cast(SimulatedWorker, worker) for worker in schedule.workers]
    for worker, each in zip(workers, loads, strict=False):
        _let_load(worker, each)
    record = np.zeros(seconds.shape, RECORDED)
    record["seconds"] = seconds
    workers[0].engine.fleet.follow(record)
    schedule.run()
    result = schedule.result()
    engines = [worker.engine for worker in workers]
    return result, [record[engine.index, : engine.totals["passes"]] for engine in engines]


def _let_load(worker: SimulatedWorker, seconds: Sequence[float]) -> None:
    """Let the loads of a worker take these seconds one after another, and later ones their mean."""
    load, left = worker.load_weights, iter(seconds)
    usual_s = float(np.mean(seconds)) if len(seconds) else 0.0

    def load_weights(*arguments: Any, **named: Any) -> simpy.Event:
        worker.load_delay_s = next(left, usual_s)
        return load(*arguments, **named)

    setattr(worker, "load_weights", load_weights)  # noqa: B010 (a method of one worker)


def _load_seconds(measured: Result, workers: int) -> list[list[float]]:
    """Return the seconds of each worker's loads, in their order."""
    timeline = spans(measured)
    loads = timeline.where(timeline.of_kind("load_weights"))
    timed: list[list[float]] = [[] for _ in range(workers)]
    for lane, began_s, ended_s in sorted(
        zip(loads.lane, loads.started_s, loads.ended_s, strict=True)
    ):
        timed[int(lane)].append(float(ended_s - began_s))
    return timed


def _work(passes: Passes, result: Result) -> NDArray[np.int64]:
    """Return the requests that decode and the tokens of contexts of each pass that began before the
    last trained sample ended: later passes depend on when a run ends."""
    trained = result.samples.filter(pc.equal(result.samples.column("status"), "trained"))
    until_s = max(trained.column("finished_s").to_pylist(), default=np.inf)
    made = passes[passes["began_s"] < until_s]
    prefill = made["prefill_tokens" if made.dtype == PASSES else "prefill"]
    return np.stack([made["decodes"], prefill], axis=1).astype(np.int64)


def _counts(work: NDArray[np.int64]) -> Counts:
    return Counts(len(work), *(int(each) for each in work.sum(axis=0)))


def _parting(one: NDArray[np.int64], other: NDArray[np.int64]) -> int | None:
    pairs = zip_longest(one.tolist(), other.tolist())
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def _profiled_s(prepared: Prepared, passes: Passes) -> float:
    """Return the profiled seconds of measured passes, in sum."""
    work = passes[list(PassWork._fields)].tolist()
    return sum(float(pass_s(prepared.profile.even, *each, 0.0)) for each in work)
