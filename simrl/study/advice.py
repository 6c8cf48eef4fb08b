"""Advice: the choice on each candidate cluster, the hours and cost of a whole run there, its
memory, and how sure that is.

Invariant: every figure comes from a simulated run. Hours are the time of the planned updates at the
simulated rate: checkpoints and evaluations in a window of whole periods, and lengths that grow at
the beginning, the middle and the end of the growth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from simrl.errors import InputError
from simrl.files import is_broken, sealed
from simrl.result.metrics import prices
from simrl.result.result import Result
from simrl.scenario.calibration import other_fits
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.study.answer import Answer, Reasons, answer, reasons_of
from simrl.study.compare import SEEDS, further_seeds
from simrl.study.goal import Goal
from simrl.study.model_error import RATIO_ERROR, SOURCE, STEP_ERROR, STEP_SOURCE
from simrl.study.point import Point
from simrl.study.search import Option
from simrl.study.search_space import Space
from simrl.study.store import Outcomes, write_json
from simrl.trace.trace import Trace

# updates of a window that is lengthened to whole periods of checkpoints and evaluations
MOST_PERIOD = 120
SHARES = (0.5, 0.6, 0.7, 0.8)  # of a GPU's memory, tried below the scenario's
AS_FAST = 0.01  # loss of speed for which less memory is still advised
SIMPSON = (1 / 6, 4 / 6, 1 / 6)


@dataclass(frozen=True)
class KvPool:
    """The KV pool of a worker: its tokens, the share in use on average, the most sequences at a
    time and the number allowed; and the least share of a GPU's memory at which the run is as fast,
    with its loss."""

    kv_tokens: int
    used: float
    peak_sequences: int
    max_num_seqs: int
    utilization: float
    least_utilization: float
    loss: float


@dataclass(frozen=True)
class WholeRun:
    """The whole run of an option. `stages` are the seconds of an update at the beginning, the
    middle and the end of the growth of lengths (one without growth); `spread` is the largest
    distance of the rates with other seeds and other fits of a calibration, as a share."""

    option: Option
    reasons: Reasons
    stages: tuple[float, ...]
    hours: float
    gpu_hours: float
    cost: float | None
    spread: float

    @property
    def gpus(self) -> int:
        """The GPUs of the cluster; of two pools, those that roll out."""
        return self.option.point.scenario.cluster.gpus

    @property
    def interval_hours(self) -> tuple[float, float]:
        """The hours less and plus the model's error and the spread."""
        off = STEP_ERROR + self.spread
        return self.hours / (1 + off), self.hours * (1 + off)

    def as_json(self) -> dict[str, Any]:
        """Return the data of `--json`."""
        low, high = self.interval_hours
        return {
            "gpus": self.gpus,
            "system": self.option.row["system"],
            "tp": self.option.point.scenario.cluster.tp,
            "samples_per_s": self.option.row["samples_per_s"],
            "spread": self.spread,
            "hours": self.hours,
            "hours_low": low,
            "hours_high": high,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            "stages_s": self.stages,
        }


@dataclass(frozen=True)
class Plan(WholeRun):
    """The advice for one cluster: the choice, planned as a whole run. `offered` is the plan of the
    framework's own best, where the framework lacks the choice; `left_out` names parts of a run that
    the hours lack."""

    answer: Answer
    offered: WholeRun | None
    memory: KvPool | None
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """The advice of all clusters, whose goals have the same updates and batches."""

    plans: tuple[Plan, ...]

    @property
    def name(self) -> str:
        return self.plans[0].answer.name

    def as_json(self) -> dict[str, Any]:
        """Return the data of `--json`; the keys are stable."""
        errors = {
            "ratio": RATIO_ERROR,
            "ratio_source": SOURCE,
            "step": STEP_ERROR,
            "step_source": STEP_SOURCE,
        }
        goal = self.plans[0].answer.goal
        return {
            "name": self.name,
            "updates": goal.updates,
            "batch_samples": goal.batch_samples,
            "model_error": errors,
            "clusters": [
                {
                    **plan.as_json(),
                    "offered": plan.offered.as_json() if plan.offered else None,
                    "level": plan.answer.tied,
                    "memory": asdict(plan.memory) if plan.memory else None,
                    "left_out": plan.left_out,
                    "optimization": plan.answer.as_json(),
                }
                for plan in self.plans
            ],
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row per cluster."""
        return [
            {key: value for key, value in plan.as_json().items() if key != "stages_s"}
            for plan in self.plans
        ]


def goal_on(space: Space, updates: int, **limits: Any) -> Goal:
    """Return the goal of a search of the space: the fastest settled run within the limits."""
    price = max(price or 0.0 for price in prices(space.first.cluster.model_dump()))
    return Goal(space.batch_samples, price, updates=updates, settled=True, **limits)


def advise(
    searches: Mapping[Any, tuple[Space, Goal]],
    outcomes: Outcomes,
    traces: Sequence[str] = (),
    **settings: Any,
) -> Advice:
    """Search each space, by its GPUs (`answer` takes the `settings`), and plan the whole run of the
    choice. `traces` have the lengths of its beginning, middle and end, if they grow. Raise
    `InputError` where nothing keeps the limits."""
    plans = []
    for gpus, (space, goal) in searches.items():
        outcomes.phases_of = f"{gpus} GPUs: "
        best = answer(space, goal, outcomes, **settings)
        outcomes.phase("the whole run of the choice", 2 * (SEEDS + 2) + 2 + len(SHARES))
        plans.append(_plan(best, outcomes, traces))
    return Advice(tuple(plans))


def _plan(best: Answer, outcomes: Outcomes, traces: Sequence[str]) -> Plan:
    scenario, left_out = whole_periods(best.choice.option.point.scenario)
    stages = growth_stages(scenario, traces)
    run = _whole_run(best.choice.option, best.goal, outcomes, traces)
    launching = best.launching
    another = launching.settings is not None and launching.refused
    return Plan(
        **vars(run),
        answer=best,
        offered=_whole_run(launching.option, best.goal, outcomes, traces) if another else None,
        memory=_memory(stages[len(stages) // 2], outcomes),
        left_out=tuple([*left_out, *_unstated(scenario, len(stages) > 1)]),
    )


def _whole_run(option: Option, goal: Goal, outcomes: Outcomes, traces: Sequence[str]) -> WholeRun:
    """Simulate the option with further seeds, with other fits of its calibration, and at each stage
    of the growth of lengths. Raise `InputError` for a stage that cannot be simulated: lengths that
    grow beyond memory."""
    stages = growth_stages(whole_periods(option.point.scenario)[0], traces)
    middle = len(stages) // 2
    try:
        rows = outcomes.rows([*stages, *further_seeds(stages[middle]), *other_fits(stages[middle])])
    except InputError as error:
        raise InputError(
            f"the whole run of the choice cannot be simulated: {error}", error.cause
        ) from error
    rates = [row["samples_per_s"] for row in rows]
    seconds = [goal.batch_samples / rate for rate in rates[: len(stages)]]
    mean_s = float(np.dot(SIMPSON, seconds)) if len(stages) > 1 else seconds[0]
    hours, row = goal.updates * mean_s / 3600, rows[middle]
    price = row["cost_per_1k_samples"]
    assert outcomes.folder is not None
    return WholeRun(
        option=option,
        reasons=outcomes.each(partial(reasons_of, outcomes.folder), [option])[0],
        stages=tuple(seconds),
        hours=hours,
        gpu_hours=hours * row["gpus"],
        cost=price / row["gpu_hours_per_1k_samples"] * hours * row["gpus"] if price else None,
        spread=max(abs(rate / rates[middle] - 1) for rate in rates[len(stages) :]),
    )


def whole_periods(scenario: Scenario) -> tuple[Scenario, list[str]]:
    """Return the scenario with enough updates after the warm-up for whole periods of its
    checkpoints and evaluations, and lines on those that are too rare for that."""
    training = scenario.training
    window = scenario.steps - scenario.warmup_steps
    every = scenario.evaluation.every if scenario.evaluation is not None else 1
    period, left_out = (every if every <= MOST_PERIOD else 1), []
    for what in ("checkpoint", "evaluate"):
        every, seconds = getattr(training, f"{what}_every"), getattr(training, f"{what}_s")
        if not every or not seconds:
            continue
        if math.lcm(period, every) > MOST_PERIOD:
            left_out.append(
                f"{what}: {seconds:g} s every {every:,} updates, too rare to be simulated"
            )
            scenario = scenario.with_fields("training", **{f"{what}_every": 0})
        else:
            period = math.lcm(period, every)
    return scenario.model_copy(
        update={"steps": scenario.warmup_steps + -(-window // period) * period}
    ), left_out


def growth_stages(scenario: Scenario, traces: Sequence[str] = ()) -> list[Scenario]:
    """Return the scenario with the lengths of the beginning, the middle and the end of the growth
    that its length model has, or of these traces; the scenario alone if lengths do not grow."""
    if traces:
        return [scenario.with_fields("workload", trace=path) for path in traces]
    synthetic = scenario.workload.synthetic
    if (
        synthetic is None
        or not isinstance(synthetic.mean_tokens, tuple)
        or len({*synthetic.mean_tokens}) == 1
    ):
        return [scenario]
    first, last = synthetic.mean_tokens
    return [
        scenario.with_fields(
            "workload", synthetic=synthetic.model_copy(update={"mean_tokens": (mean, mean)})
        )
        for mean in (first, (first + last) / 2, last)
    ]


def grown(trace: Trace, factor: float) -> Trace:
    """Return the trace with each response longer by the factor, up to the cap of the run. Raise
    `InputError` where text or turns were recorded: a longer response's text is unknown."""
    if kept := {"response_ids", "turn_tokens"}.intersection(trace.table.column_names):
        raise InputError(
            f"--growth {factor:g}: trace {trace.metadata.name!r} has {' and '.join(sorted(kept))}, and nobody knows what "
            "longer responses would say; give a trace of lengths alone"
        )
    columns = {
        n: trace.table.column(n).combine_chunks()
        for n in trace.table.column_names
        if n != "finish_reason"
    }
    recorded, metadata = trace.column("response_tokens"), trace.metadata
    longer = np.minimum(np.rint(recorded * factor), metadata.cap_tokens).clip(1)
    if metadata.context_cap_tokens is not None:
        longer = np.minimum(
            longer,
            np.maximum(metadata.context_cap_tokens - trace.column("prompt_tokens"), recorded),
        )
    name = f"{metadata.name}, responses × {factor:g} up to {metadata.cap_tokens:,} tokens"
    named = metadata.model_copy(update={"name": name})
    return Trace.from_columns({**columns, "response_tokens": longer.astype(np.int32)}, named)


def _unstated(scenario: Scenario, grows: bool) -> list[str]:
    """Return what a whole run usually has and this scenario does not state."""
    training = scenario.training
    stated = {
        "no checkpoints (training.checkpoint_every, checkpoint_s)": training.checkpoint_every,
        "no validation (training.evaluate_every, evaluate_s)": training.evaluate_every
        or scenario.evaluation,
        "no growth of responses (--growth 1.5, if they are 1.5 times as long at the end)": grows,
    }
    return [what for what, is_stated in stated.items() if not is_stated]


def _memory(scenario: Scenario, outcomes: Outcomes) -> KvPool | None:
    """Return the use of the KV pool, and the least share of a GPU's memory at which the run is as
    fast; it is kept in the folder."""
    as_it_is = Point(scenario, outcomes.digests)
    assert outcomes.folder is not None
    path = outcomes.folder / "memory" / f"{as_it_is.hash}.json"
    with suppress(
        OSError, ValueError, TypeError, RecursionError
    ):  # what is damaged or was changed is simulated again
        kept = json.loads(path.read_text(encoding="utf-8"))
        if "sha256" in kept and not is_broken(kept):
            return TypeAdapter(KvPool).validate_python(
                {key: kept[key] for key in kept if key != "sha256"}
            )
    result = simulate_prepared(prepare(scenario, InputCache()))
    full = result.metadata.get("full_batch")
    if not full:
        return None
    mean, peak = _running(result)
    pool = int(result.metadata["kv_cache_tokens_per_worker"])
    engine = scenario.engine
    used, present = mean * full["context_tokens"] / pool, engine.gpu_memory_utilization
    # The pool shrinks faster than the share, as the weights stay: a smaller share has no room for
    # what is in use.
    lower = (
        []
        if engine.kv_cache_tokens
        else [share for share in SHARES if used * present < share < present]
    )
    least, loss = present, 0.0
    smaller = [scenario.with_fields("engine", gpu_memory_utilization=share) for share in lower]
    points = [as_it_is, *(Point(changed, outcomes.digests) for changed in smaller)]
    rate, *others = (
        (outcome.get("row") or {}).get("samples_per_s", 0.0) for outcome in outcomes.of(points)
    )
    for share, other in zip(lower, others, strict=True):
        if rate and other > (1 - AS_FAST) * rate:
            least, loss = share, 1 - other / rate
            break
    memory = KvPool(pool, used, peak, engine.max_num_seqs, present, least, loss)
    write_json(path, sealed(asdict(memory)), own=True)
    return memory


def _running(result: Result) -> tuple[float, int]:
    """Return the mean and the largest number of sequences in a worker's batch while it runs, over
    its spans."""
    spans = result.spans.to_pandas()
    spans = spans[(spans["kind"] == "rollout") & spans["slot_s"].notna()]
    seconds = spans["ended_s"] - spans["started_s"]
    sequences = (spans["slot_s"] / seconds).to_numpy()
    return float(np.average(sequences, weights=seconds)), math.ceil(float(sequences.max()))
