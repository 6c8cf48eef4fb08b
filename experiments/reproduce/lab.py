"""A lab: simulates scenarios of one set of inputs, each once, and measures the results.

Invariant: a measure is a pure function of one result, in the terms in which papers report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from experiments.reproduce.ledger import Asked, Inputs, PaperError, named
from simrl.errors import InputError
from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape, model_shape
from simrl.profile.profile import TableProfile, read_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.shipped import shipped_profile
from simrl.result.metrics import summary
from simrl.result.result import Result
from simrl.scenario import presets
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.trace.synthesis import LengthModel
from simrl.trace.trace import Trace
from simrl.validation import explain

M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")
Measures = dict[str, Any]
GIVEN = math.nan  # stands where an element of a row is an input of its prediction: it is not scored


def step_times(model: str, gpu: str, tp: int, **host_times: float | None) -> dict[str, Any]:
    """Return a scenario's `profile`: the shipped one of the model on the GPU, else a roofline of the GPU's data sheet."""
    path = shipped_profile(model_shape(model).name, gpu, tp)
    times: dict[str, Any] = {"roofline": {}} if path is None else {"path": str(path)}
    return {**times, **host_times}


def passes(inputs: Inputs, shape: ModelShape, gpu: Gpu, tp: int, **times: float) -> TableProfile:
    """Return the profile of `step_times` with the host times of the ledger's engine, or `times` in their place, for the times
    of single passes."""
    path = shipped_profile(shape.name, gpu.name, tp)
    kernels = (
        roofline_profile(shape, gpu, tp, between_passes_s=0.0)
        if path is None
        else read_profile(path)
    )
    preset = inputs["engine_preset"]
    constants = presets.named(preset, "engine.preset").constants
    scenario = {
        "cluster": {"gpu": gpu.name, "tp": tp, "host_speed": inputs["host_speed"]},
        "engine": {
            "preset": preset,
            "log_probs": "log_probs" in constants and constants["log_probs"].value,
        },
        "profile": {},
    }
    around: dict[str, Any] = presets.host_times(scenario, kernels.metadata, shape.layers)
    return kernels.with_corrections(**{**around, **times})


def run_of(
    inputs: Inputs,
    system: Mapping[str, Any],
    *,
    model: str,
    gpus: int,
    tp: int,
    lengths: Mapping[str, Any] | Trace,
    steps: int,
    warmup_steps: int,
    training: Mapping[str, Any],
    engine: Mapping[str, Any] | None = None,
    speculation: Mapping[str, Any] | None = None,
    host: Mapping[str, float] | None = None,
    framework: str | None = None,
) -> Scenario:
    """Return a scenario of a paper: the inputs that all papers have, and the row's own. `lengths` are fields of a length
    model, which has the run's number of steps unless they give another, or the trace that `Lab.run` is given. Times around
    passes are the preset's of the ledger's engine, or of the row's own; fields of `host` replace them. A framework's preset
    gives what the row does not."""
    if isinstance(lengths, Trace):
        workload: dict[str, Any] = {"trace": lengths.metadata.name}
    else:
        workload = {"synthetic": lengths_of(inputs, steps, lengths)}
    return made(
        Scenario,
        {
            "name": "published",
            "steps": steps,
            "warmup_steps": warmup_steps,
            "model": model,
            "cluster": {
                **{"gpu": inputs["gpu"], "gpus": gpus, "tp": tp},
                **named(inputs, "host_speed"),
            },
            "workload": workload,
            "framework": framework,
            "profile": step_times(model, inputs["gpu"], tp, **(host or {})),
            "engine": {
                "preset": inputs["engine_preset"],
                "max_num_seqs": inputs["max_num_seqs"],
                **(engine or {}),
            },
            "training": training,
            "speculation": speculation or {},
            "system": system,
        },
    )


def run_model(
    classes: list[dict[str, Any]], first_epoch: bool = True, **others: Any
) -> dict[str, Any]:
    """Return fields of a run model whose numbers are the ledger's."""
    return {"classes": classes, "first_epoch": first_epoch, "source": "the ledger", **others}


def lengths_of(inputs: Inputs, steps: int, lengths: Mapping[str, Any]) -> LengthModel:
    """Return the lengths of a paper's runs: the inputs that all papers have, and `lengths`."""
    common = named(inputs, "group", "sigma", "prompt_share", "prompt_tokens", "prompt_cap_tokens")
    return made(LengthModel, {"steps": steps, **common, **lengths})


def made(model: type[M], data: Mapping[str, Any]) -> M:
    """Return a validated model. Raise `PaperError` for a key that is unknown or missing, as it is under all inputs, and
    `InputError` for an impossible value, which may be drawn."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        of_keys = error.errors()[0]["type"] in ("extra_forbidden", "missing")
        kind = PaperError if of_keys else InputError
        raise kind(f"its {model.__name__}: {explain(error, model, model.__name__)[1]}") from error


class Level(NamedTuple):
    """The absolute figures of a run, which stand beside a ratio of two runs: `run` is what runs, as JSON."""

    run: str
    step_s: float
    rollout_s: float
    response_tokens_per_s: float


def level_of(scenario: Scenario, run: Measures) -> Level:
    """Return the level of a run. Of runs that differ in the split of their GPUs alone, which rows search, the last counts."""
    system = {k: v for k, v in scenario.system.model_dump().items() if k != "rollout_share"}
    lengths = scenario.workload.synthetic
    described = {
        **system,
        "model": scenario.model,
        "gpus": scenario.cluster.gpus,
        "cap_tokens": None if lengths is None else lengths.cap_tokens,
        "mean_tokens": None if lengths is None else lengths.mean_tokens,
    }
    figures = (float(run[key]) for key in Level._fields[1:])
    return Level(json.dumps(described, default=str), *figures)


class Rollouts(NamedTuple):
    """Rollouts of a colocated run, a mean over the updates after the warm-up."""

    rollout_s: float  # from the first pass to the last
    idle_share: float  # of the rollout workers' time in it
    earliest_idle_share: float  # of the worker that finishes first
    worker_s: float  # from the first pass to a worker's last, a mean over workers


class Lab:
    """Simulates scenarios and solves for their inputs, each at most once. Solutions belong to one set of inputs."""

    def __init__(self, more: Callable[[Result, int], Measures] | None = None) -> None:
        """`more` measures a result, behind as many warm-up steps, beside `measures`."""
        self._inputs = InputCache()
        self._more = more
        self._found: dict[str, Measures] = {}
        self._solved: dict[Callable[[Inputs], float], tuple[float | InputError, set[str]]] = {}
        self.levels: dict[str, Level] = {}
        """of the row that is being predicted: the levels of its runs, by what they run"""

    def once(self, solve: Callable[[Inputs], float], inputs: Inputs) -> float:
        """Return the solution for these inputs, or raise its `InputError`. Inputs that it looks up count as asked for by each
        row that needs it, not only by the first."""
        if solve not in self._solved:
            noted = Asked(inputs, set())
            found: float | InputError
            try:
                found = solve(noted)
            except InputError as error:
                found = error
            self._solved[solve] = found, noted.names
        found, names = self._solved[solve]
        if isinstance(inputs, Asked):
            inputs.names |= names
        if isinstance(found, InputError):
            raise found
        return found

    def run(self, scenario: Scenario, trace: Trace | None = None) -> Measures:
        """Return a row of `simrl compare`, the seconds of each phase of an update, and the measures of rollouts. `trace` is the
        one that the scenario names, if any: one trace a name. Raise `InputError` for an impossible scenario."""
        key = scenario.model_dump_json()
        if key not in self._found:
            inputs = self._inputs if trace is None else InputCache(trace)
            result = simulate_prepared(prepare(scenario, inputs))
            found = measures(result, scenario.warmup_steps)
            self._found[key] = found | (
                self._more(result, scenario.warmup_steps) if self._more else {}
            )
        level = level_of(scenario, self._found[key])
        self.levels[level.run] = level
        return self._found[key]


Predict = Callable[[Lab, Inputs], list[float]]  # a row's elements


def row(predict: Callable[Concatenate[Lab, Inputs, P], list[float]]) -> Callable[P, Predict]:
    """Return a function that takes the parameters of a row (behind the lab and the inputs) and returns its prediction."""

    def of(*args: P.args, **kwargs: P.kwargs) -> Predict:
        return lambda lab, inputs: predict(lab, inputs, *args, **kwargs)

    return of


def measures(result: Result, warmup_steps: int) -> Measures:
    """Return `metrics.summary`; under `phase_s` the seconds an update of each kind of span, on the longest lane; `rollouts`;
    `continued_share` of the samples; `response_tokens_per_s`, of trained tokens; `generated_tokens_per_s`, of all generated
    after the warm-up."""
    row = summary(result, warmup_steps)
    steps = result.steps.slice(warmup_steps)
    trained = int(steps.column("response_tokens").to_numpy().sum())
    return {
        **row,
        "response_tokens_per_s": trained / (row["step_s"] * steps.num_rows),
        "phase_s": phases(result, warmup_steps),
        **rollouts(result, warmup_steps)._asdict(),
        "continued_share": continued_share(result, warmup_steps),
        "generated_tokens_per_s": generated_tokens_per_s(result, warmup_steps),
    }


def rollouts(result: Result, warmup_steps: int) -> Rollouts:
    """Measure rollouts: all that workers generate under one policy version."""
    spans = result.spans.to_pandas()
    spans = spans[(spans["kind"] == "rollout") & (spans["policy_version"] >= warmup_steps)]
    spans = spans[spans["policy_version"] < result.steps.num_rows]
    ends = spans.groupby(["policy_version", "lane"], observed=True).agg(
        first_s=("started_s", "min"), last_s=("ended_s", "max")
    )
    rows = []
    for _, workers in ends.groupby("policy_version"):
        start_s, last_s = workers["first_s"].min(), workers["last_s"].to_numpy()
        end_s, length_s = last_s.max(), last_s.max() - start_s
        idle, earliest_idle = (
            float(np.mean(end_s - last_s) / length_s),
            (end_s - last_s.min()) / length_s,
        )
        rows.append((length_s, idle, earliest_idle, float(np.mean(last_s - start_s))))
    if not rows:
        return Rollouts(*[float("nan")] * len(Rollouts._fields))
    return Rollouts(*(float(x) for x in np.mean(rows, axis=0)))


def continued_share(result: Result, warmup_steps: int) -> float:
    """Return the share of samples trained after the warm-up that went on at another worker or under newer weights."""
    samples = result.samples.select(["uid", "trained_step"]).to_pandas()
    trained = samples.loc[samples["trained_step"] >= warmup_steps, "uid"]
    segments = result.segments.select(["uid", "worker", "policy_version"]).to_pandas()
    segments = segments[segments["uid"].isin(trained)].drop_duplicates()
    return float((segments["uid"].value_counts() > 1).sum() / max(len(trained), 1))


def phases(result: Result, warmup_steps: int) -> dict[str, float]:
    """Return seconds an update by kind of span, on the lane that has most of it."""
    spans = result.spans.to_pandas()
    spans["s"] = _seconds_within(spans, *measured(result, warmup_steps))
    by_lane = spans.groupby(["kind", "lane"], observed=True)["s"].sum()
    updates = result.steps.num_rows - warmup_steps
    return {
        str(kind): float(lanes.max() / updates)
        for kind, lanes in by_lane.groupby("kind", observed=True)
    }


def generated_tokens_per_s(result: Result, warmup_steps: int) -> float:
    """Return the rate at which all workers generate, trained or not; a segment partly inside the window counts in
    proportion."""
    start_s, end_s = measured(result, warmup_steps)
    segments = result.segments.select(["tokens", "started_s", "ended_s"]).to_pandas()
    segments = segments[segments["ended_s"] > segments["started_s"]]
    shares = _seconds_within(segments, start_s, end_s) / (
        segments["ended_s"] - segments["started_s"]
    )
    return float((segments["tokens"] * shares).sum() / (end_s - start_s))


def measured(result: Result, warmup_steps: int) -> tuple[float, float]:
    """Return the window: from the end of the warm-up to the end of the last update."""
    finished_s = result.steps.column("finished_s").to_numpy()
    return float(finished_s[warmup_steps - 1]) if warmup_steps else 0.0, float(finished_s[-1])


def _seconds_within(times: Any, start_s: float, end_s: float) -> Any:
    return (np.minimum(times["ended_s"], end_s) - np.maximum(times["started_s"], start_s)).clip(
        lower=0
    )
