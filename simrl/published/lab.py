"""A lab: what is simulated or solved for one set of inputs, each once, and what is measured of it.

Invariant: a measure is a pure function of one result, in the terms in which papers report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from simrl.errors import InputError
from simrl.hardware import Gpu, ModelShape, model_shape
from simrl.metrics import summary
from simrl.points import SharedInputs
from simrl.profile import TableProfile, read_profile
from simrl.profilers.roofline import roofline_profile
from simrl.published.ledger import Asked, Inputs, PaperError
from simrl.result import Result
from simrl.scenario import Scenario
from simrl.shipped import shipped_profile
from simrl.simulate import prepare, simulate_prepared
from simrl.synthesis import LengthModel
from simrl.validation import explain

M = TypeVar("M", bound=BaseModel)
Measures = dict[str, Any]
GIVEN = math.nan  # stands where an element of a row is an input of its prediction: it is not scored


def step_times(model: str, gpu: str, tp: int, between_passes_s: float, least_pass_s: float = 0.0) -> dict[str, Any]:
    """A scenario's `profile`: the shipped one of the model on the GPU, else a roofline of the GPU's data sheet."""
    path = shipped_profile(model_shape(model).name, gpu, tp)
    times: dict[str, Any] = {"roofline": {}} if path is None else {"path": str(path)}
    return {**times, "between_passes_s": between_passes_s, "least_pass_s": least_pass_s}


def launch_s(inputs: Inputs, model: str) -> float:
    """What the host takes to launch the kernels of a pass one by one; nothing where CUDA graphs do."""
    return model_shape(model).layers * float(inputs["eager_layer_s"]) if inputs["enforce_eager"] else 0.0


def passes(shape: ModelShape, gpu: Gpu, tp: int, between_passes_s: float) -> TableProfile:
    """The profile that `step_times` means, for what is asked of single passes."""
    path = shipped_profile(shape.name, gpu.name, tp)
    if path is not None:
        return read_profile(path).with_corrections(between_passes_s=between_passes_s)
    return roofline_profile(shape, gpu, tp, between_passes_s=between_passes_s)


def run_of(
    inputs: Inputs,
    system: Mapping[str, Any],
    *,
    model: str,
    gpus: int,
    tp: int,
    lengths: Mapping[str, Any],
    steps: int,
    warmup_steps: int,
    training: Mapping[str, Any],
    engine: Mapping[str, Any] | None = None,
    speculation: Mapping[str, Any] | None = None,
    least_pass_s: float = 0.0,
) -> Scenario:
    """A scenario of a paper: its inputs, where all papers have the same ones, and what the row says besides. `lengths` are
    fields of a length model, which has as many steps as the run where they do not say otherwise."""
    passes_s = float(inputs["between_passes_s"])
    return made(
        Scenario,
        {
            "name": "published",
            "steps": steps,
            "warmup_steps": warmup_steps,
            "model": model,
            "cluster": {"gpu": inputs["gpu"], "gpus": gpus, "tp": tp},
            "workload": {"synthetic": lengths_of(inputs, steps, lengths)},
            "profile": step_times(model, inputs["gpu"], tp, passes_s, least_pass_s),
            "engine": {"max_num_seqs": inputs["max_num_seqs"], **(engine or {})},
            "training": training,
            "speculation": speculation or {},
            "system": system,
        },
    )


def lengths_of(inputs: Inputs, steps: int, lengths: Mapping[str, Any]) -> LengthModel:
    """The lengths of a paper's runs: those inputs that all papers have, and `lengths` besides."""
    return made(
        LengthModel,
        {
            "steps": steps,
            "group": inputs["group"],
            "sigma": inputs["sigma"],
            "prompt_share": inputs["prompt_share"],
            "prompt_tokens": inputs["prompt_tokens"],
            "prompt_cap_tokens": inputs["prompt_cap_tokens"],
            **lengths,
        },
    )


def made(model: type[M], data: Mapping[str, Any]) -> M:
    """A model of what a row says. Raises `PaperError` for a key that is unknown or missing, as it is under all inputs; for a
    value that cannot be, which may be drawn, `InputError`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        of_keys = error.errors()[0]["type"] in ("extra_forbidden", "missing")
        kind = PaperError if of_keys else InputError
        raise kind(f"its {model.__name__}: {explain(error, model, model.__name__)[1]}") from error


class Rollouts(NamedTuple):
    """Of the rollouts of a colocated run, a mean over the updates after the warm-up."""

    rollout_s: float  # from the first pass to the last
    idle_share: float  # of the rollout workers' time in it
    earliest_idle_share: float  # of the worker that finishes first
    worker_s: float  # from the first pass to a worker's last, a mean over workers


class Lab:
    """Simulates scenarios and solves for what they need, each at most once. What is solved is of one set of inputs."""

    def __init__(self) -> None:
        self._inputs = SharedInputs()
        self._found: dict[str, Measures] = {}
        self._solved: dict[Callable[[Inputs], float], tuple[float | InputError, set[str]]] = {}

    def once(self, solve: Callable[[Inputs], float], inputs: Inputs) -> float:
        """What `solve` makes of the inputs, or the `InputError` that it raises. What it looks up of them counts as asked for by
        each row that needs it, not by the first alone."""
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

    def run(self, scenario: Scenario) -> Measures:
        """What `simrl compare` has in a row, the seconds of each phase of an update, and those of rollouts. Raises
        `InputError` for a scenario that cannot be."""
        key = scenario.model_dump_json()
        if key not in self._found:
            result = simulate_prepared(prepare(scenario, self._inputs))
            self._found[key] = measures(result, scenario.warmup_steps)
        return self._found[key]


def measures(result: Result, warmup_steps: int) -> Measures:
    """`simrl.metrics.summary`, and under `phase_s` the seconds an update of each kind of span, the longest lane's; of rollouts
    what `rollouts` says; `continued_share` of the samples; `response_tokens_per_s` are trained ones, `generated_tokens_per_s`
    all that is generated after the warm-up."""
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
    """A rollout is what workers generate under one policy version."""
    spans = result.spans.to_pandas()
    spans = spans[(spans["kind"] == "rollout") & (spans["policy_version"] >= warmup_steps)]
    spans = spans[spans["policy_version"] < result.steps.num_rows]
    ends = spans.groupby(["policy_version", "lane"], observed=True).agg(
        first_s=("started_s", "min"), last_s=("ended_s", "max")
    )
    rows = []
    for _, workers in ends.groupby("policy_version"):
        start_s, last_s = workers["first_s"].min(), workers["last_s"].to_numpy()
        length_s = last_s.max() - start_s
        rows.append(
            (
                length_s,
                float(np.mean(last_s.max() - last_s) / length_s),
                (last_s.max() - last_s.min()) / length_s,
                float(np.mean(last_s - start_s)),
            )
        )
    if not rows:
        return Rollouts(*[float("nan")] * len(Rollouts._fields))
    return Rollouts(*(float(x) for x in np.mean(rows, axis=0)))


def continued_share(result: Result, warmup_steps: int) -> float:
    """Of the samples trained after the warm-up, those that went on at another worker or under newer weights."""
    samples = result.samples.select(["uid", "trained_step"]).to_pandas()
    trained = samples.loc[samples["trained_step"] >= warmup_steps, "uid"]
    stays = result.segments.select(["uid", "worker", "policy_version"]).to_pandas()
    stays = stays[stays["uid"].isin(trained)].drop_duplicates()
    return float((stays["uid"].value_counts() > 1).sum() / max(len(trained), 1))


def phases(result: Result, warmup_steps: int) -> dict[str, float]:
    """Seconds an update by kind of span, of the lane that has most of it."""
    spans = result.spans.to_pandas()
    spans["s"] = _seconds_within(spans, *measured(result, warmup_steps))
    by_lane = spans.groupby(["kind", "lane"], observed=True)["s"].sum()
    updates = result.steps.num_rows - warmup_steps
    return {str(kind): float(lanes.max() / updates) for kind, lanes in by_lane.groupby("kind", observed=True)}


def generated_tokens_per_s(result: Result, warmup_steps: int) -> float:
    """What all workers generate, trained or not; a stay that is measured in part counts with this part of its tokens."""
    start_s, end_s = measured(result, warmup_steps)
    stays = result.segments.select(["tokens", "started_s", "ended_s"]).to_pandas()
    stays = stays[stays["ended_s"] > stays["started_s"]]
    shares = _seconds_within(stays, start_s, end_s) / (stays["ended_s"] - stays["started_s"])
    return float((stays["tokens"] * shares).sum() / (end_s - start_s))


def measured(result: Result, warmup_steps: int) -> tuple[float, float]:
    """From the end of the warm-up to the end of the last update."""
    finished_s = result.steps.column("finished_s").to_numpy()
    return float(finished_s[warmup_steps - 1]) if warmup_steps else 0.0, float(finished_s[-1])


def _seconds_within(times: Any, start_s: float, end_s: float) -> Any:
    return (np.minimum(times["ended_s"], end_s) - np.maximum(times["started_s"], start_s)).clip(lower=0)
