"""The simulations of frameworks.md: the frameworks with the keys that their users can set, the workloads, a row of a run, and
the search of each framework's best settings.

A task is one framework on one workload; it is a pure function of the scenario, so tasks may run in any process and order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc

from experiments.shared import scenario_from
from simrl.errors import InputError
from simrl.result.metrics import gpu_seconds, summary, window
from simrl.result.result import Result
from simrl.scenario.load import PARAMETER, ScenarioFile
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate_prepared
from simrl.study.executors import Outcomes as Coming
from simrl.study.goal import Goal
from simrl.study.grid import SYSTEMS, Dimension, listed
from simrl.study.point import Point
from simrl.study.polish import polish
from simrl.study.search import Option, judged, search
from simrl.study.search_space import make_space
from simrl.study.store import Outcomes
from simrl.systems.recipes import parameters_of

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "frameworks"  # the scenarios, and what the command writes beside the page
WORKLOADS = {
    "dense": "Dense, single-turn",
    "dense_agents": "Dense, agents",
    "moe": "Mixture of experts, single-turn",
    "moe_agents": "Mixture of experts, agents",
}
BOUND = 4  # batches: the largest staleness of the bounded search
SHARES = (0.375, 0.5, 0.625, 0.75, 0.875)
WIDEST = 3  # values of a key in a grid of several keys
NEAR, FURTHER = (
    2,
    1,
)  # points around the best of the grid, and then around the best without the bound
Row = dict[str, Any]


class Batch(NamedTuple):
    """The groups and responses of a step of the workload."""

    groups: int
    responses: int


Keys = Callable[[Batch], Mapping[str, Sequence[Any]]]


class Framework(NamedTuple):
    """A framework and one of its trainers.

    `mode` is what a user sets to have it; `system` and `entry` are the recipe and the parameters that make it this framework;
    `source` says whose rule that is, `bound` the default bound on staleness and its key, `sync` what a weight sync does to
    running responses. `keys` are the parameters that the search varies, with their values, the default among them; the search
    begins with all combinations of those in `grid` (at most `WIDEST` values of each, where there are several). `updates`
    is the number of updates that train a batch. `preset` has the framework's own constants, in place of the page's.
    """

    name: str
    mode: str
    system: str
    source: str
    bound: str
    sync: str
    keys: Keys = lambda batch: {}
    grid: Sequence[str] = ("rollout_share",)
    entry: Callable[[Batch], Mapping[str, Any]] = lambda batch: {}
    updates: int = 1
    preset: Mapping[str, Any] = {}

    @property
    def title(self) -> str:
        return f"{self.name} {self.mode}".rstrip()


def split_and(**keys: Sequence[Any]) -> Keys:
    """Return these values, and the shares of rollout GPUs."""
    return lambda batch: {"rollout_share": SHARES, **keys}


SGLANG = {"engine.preset": "sglang-0.5"}
NEMO_RL = {"framework": "nemo-rl-0.6", "training.tensor_parallel": 2}  # which divides the weights
FRAMEWORKS: dict[str, Framework] = {
    "colocated": Framework(
        "Colocated", "", "verl_colocated",
        "verl ≤ 0.8 `main_ppo`; slime `--colocate`, OpenRLHF's hybrid engine, synchronous NeMo-RL and SkyRL alike",
        "0", "nothing runs",
    ),
    "verl_sync": Framework(
        "verl V1", "`sync`", "verl_v1_sync", "verl@1dda039, 0.9", "0", "nothing runs",
    ),
    "verl_colocate_async": Framework(
        "verl V1", "`colocate_async`", "verl_v1_colocate_async", "verl@1dda039, 0.9",
        "8 steps, `sampler.max_off_policy_threshold`", "aborted, prefilled again",
        lambda batch: {
            "warmup_batches": (0.5, 1.0, 2.0, 4.0), "max_span": (3, 5, 8), "on_stale": ("drop", "wait"),
        },
        ("warmup_batches",),
    ),
    "verl_separate_async": Framework(
        "verl V1", "`separate_async`", "verl_v1_separate_async", "verl@1dda039, 0.9",
        "8 steps, `sampler.max_off_policy_threshold`", "aborted, prefilled again",
        split_and(
            warmup_batches=(0.5, 1.0, 2.0, 4.0), max_span=(3, 5, 8), on_stale=("drop", "wait"),
            enable_switch=(False, True),
        ),
        ("rollout_share",), updates=4,
    ),
    "verl_fully_async": Framework(
        "verl", "`fully_async_policy`", "verl_fully_async", "verl@1dda039, experimental",
        "0.1 of 4 updates, `staleness_threshold`", "stop, prefilled again",
        split_and(
            staleness=(0.1, 0.5, 1.0, 2.0), sync_step=(1, 2, 4), per_replica=(16, 32, 64),
            dynamic_schedule=(None, "default"),
        ),
        ("rollout_share", "staleness"), lambda batch: {"mini_batch": batch.groups // 4}, updates=4,
    ),
    "one_step_off": Framework(
        "verl", "`one_step_off_policy`", "one_step_off", "verl, experimental", "1, fixed", "the sync waits for the rollout",
        split_and(),
    ),
    "slime_partial": Framework(
        "slime", "`--partial-rollout`", "april", "APRIL, arXiv 2509.18521; slime's `--over-sampling-batch-size`",
        "none", "stop, prefilled again", lambda batch: {"over_sampling": (1.25, 1.5, 2.0, 3.0, 4.0)}, ("over_sampling",),
        preset=SGLANG,
    ),
    "slime_train_async": Framework(
        "slime", "`train_async.py`", "slime_train_async", "slime@624b824", "1, `--update-weights-interval`",
        "the sync waits for the rollout", split_and(update_weights_interval=(1, 2, 4)), preset=SGLANG,
    ),
    "slime_fully_async": Framework(
        "slime", "`fully_async_rollout`", "slime_fully_async", "slime@624b824", "none", "aborted, prefilled again",
        lambda batch: {
            "rollout_share": SHARES, "sglang_server_concurrency": (1, batch.groups // 16, batch.groups // 8, batch.groups // 4),
            "update_weights_interval": (1, 2),
        },
        ("rollout_share", "sglang_server_concurrency"),
    ),
    "miles": Framework(
        "miles", "`--fully-async`", "miles_async", "miles@31f1ca9", "none, `--max-weight-staleness`", "stop, prefilled again",
        lambda batch: {
            "rollout_share": SHARES, "max_concurrent_samples": (None, 2 * batch.responses, 4 * batch.responses),
            "data_buffer_capacity_factor": (0.5, 1.0, 2.0, 4.0), "max_weight_staleness": (None, 1, 2, 4),
            "pause_generation_mode": ("retract", "in_place"),
        },
        ("rollout_share", "max_concurrent_samples"),
        preset=SGLANG,
    ),
    "areal": Framework(
        "AReaL", "", "areal", "AReaL 0.3 and its paper's launch files",
        "η = 8, `max_head_offpolicyness`; `max_concurrent_rollouts` 4 batches", "stop, prefilled again",
        lambda batch: {
            "rollout_share": SHARES, "eta": (1, 2, 4, 8), "max_concurrent": (batch.groups, 2 * batch.groups, None),
        },
        ("rollout_share", "eta"), lambda batch: {"on_stale": "train"}, preset=SGLANG,
    ),
    "nemo_rl": Framework(
        "NeMo-RL 0.7", "`async_grpo`", "nemo_rl_async", "NeMo-RL v0.7.0", "1, `max_trajectory_age_steps`",
        "go on, KV kept (its performance recipes)", split_and(max_age=(1, 2, 4), in_flight=(True, False)),
        ("rollout_share", "max_age"), preset=NEMO_RL,
    ),
    "nemo_rl_main": Framework(
        "NeMo-RL main", "`async_grpo`", "nemo_rl_async", "NeMo-RL@7ea279a", "1, `max_trajectory_age_steps`",
        "go on, KV kept (its performance recipes)", split_and(max_age=(1, 2, 4), in_flight=(True, False)),
        ("rollout_share", "max_age"), lambda batch: {"version": "main"}, preset=NEMO_RL,
    ),
    "nemo_rl_controller": Framework(
        "NeMo-RL", "single controller", "nemo_rl_single_controller", "NeMo-RL@7ea279a",
        "1, `max_lookahead_versions`; 32 prompts at once", "go on, KV kept",
        lambda batch: {
            "rollout_share": SHARES, "sampler": ("in_order", "ready_first", "windowed"), "window": (1, 2, 4),
            "max_inflight_prompts": (64, 128, 256, 32), "max_buffered_rollouts": (None, 512),
        },
        ("window", "max_inflight_prompts"),
        lambda batch: {"min_groups_for_streaming_train": min(32, batch.groups)}, preset=NEMO_RL,
    ),
    "openrlhf": Framework(
        "OpenRLHF", "`--async_train`", "one_step_off",
        "no recipe has its name: one_step_off with a group at one engine, as `simrl init` reads its launch",
        "1, `async_queue_size`", "the sync waits for the rollout", split_and(),
        entry=lambda batch: {"dispatch": "round_robin_groups"},
    ),
    "openrlhf_partial": Framework(
        "OpenRLHF", "`--partial_rollout`", "nemo_rl_async",
        "no recipe has its name: nemo_rl_async with a group at one engine, as `simrl init` reads its launch",
        "1, `async_queue_size`", "go on, KV kept", split_and(max_age=(1, 2, 4)),
        ("rollout_share", "max_age"), lambda batch: {"dispatch": "round_robin_groups", "in_flight": True},
    ),
    "roll": Framework(
        "ROLL", "`async_generation_ratio`", "roll_async", "ROLL@8eb27cc, its examples' ratio", "1, `async_generation_ratio`",
        "stop, prefilled again",
        split_and(async_generation_ratio=(1.0, 2.0, 4.0, 0.5), partial_gpu_mode=(False, True)),
        ("rollout_share", "async_generation_ratio"),
    ),
    "rlinf": Framework(
        "RLinf", "`auto_scheduler`", "rlinf_dynamic", "RLinf@a3816b5", "0", "move to other engines, prefilled again",
        split_and(max_running_requests=(32, 64, 128, 256), pre_process=(False, True), wait_before_last=(False, True)),
        preset=SGLANG,
    ),
    "prime_rl": Framework(
        "prime-rl", "", "prime_rl", "prime-rl@559b447", "8, `max_off_policy_steps`", "stop, KV kept",
        split_and(max_off_policy_steps=(3, 5, 8), max_inflight=(256, 512, 1024, 2048)),
        ("rollout_share", "max_off_policy_steps"),
    ),
    "skyrl": Framework(
        "SkyRL", "`fully_async`", "skyrl_async", "SkyRL@a956457, 0.3", "4, `max_staleness_steps`", "stop, KV kept",
        split_and(max_staleness_steps=(1, 2, 4, 8)),
        ("rollout_share", "max_staleness_steps"),
    ),
    "trl": Framework(
        "TRL", "`AsyncGRPOTrainer`", "trl_async", "TRL 1.16, experimental", "4, `max_staleness`", "stop, KV kept",
        lambda batch: {
            "rollout_share": SHARES, "max_staleness": (2, 4, 8),
            "max_inflight_tasks": (batch.responses // 2, batch.responses, 2 * batch.responses, None),
            "queue_maxsize": (128, 1024),
        },
        ("rollout_share", "max_inflight_tasks"),
    ),
    "open_instruct": Framework(
        "Open-Instruct", "`grpo_fast`", "open_instruct", "Open-Instruct@e6c3044", "8, `async_steps`", "go on, KV kept",
        split_and(async_steps=(1, 2, 4, 8)),
        ("rollout_share", "async_steps"),
    ),
    "pipeline_rl": Framework(
        "PipelineRL", "", "pipeline_rl", "PipelineRL@58d3934", "none, `max_lag`; a full buffer drops", "stop, KV kept",
        lambda batch: {
            "rollout_share": SHARES, "llm_max_rollouts": (16, 32, 64, 128),
            "max_lag": (None, batch.responses, 2 * batch.responses, 4 * batch.responses),
        },
        ("rollout_share", "max_lag"),
    ),
}  # fmt: skip


class Workload(NamedTuple):
    """One of `WORKLOADS`, with its settings as they are, or smaller for a test."""

    name: str
    changes: Mapping[str, Any] = {}

    def file(self, settings: Sequence[Any] = ()) -> ScenarioFile:
        return ScenarioFile(self.path, settings)

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.yaml"

    @property
    def plain(self) -> Scenario:
        """The workload under the first system of its file."""
        return scenario_from(self.path, self.changes, "verl_colocated")

    @property
    def batch(self) -> Batch:
        lengths = self.plain.workload.synthetic
        assert lengths is not None
        return Batch(lengths.prompts_per_step, lengths.prompts_per_step * lengths.group)

    def settings(self, framework: Framework) -> dict[str, Any]:
        """Return the fields of the scenario beside the system: every framework trains the same batches."""
        plain = self.plain
        return {
            **self.changes,
            "steps": plain.steps * framework.updates,
            "warmup_steps": plain.warmup_steps * framework.updates,
        }

    def at_defaults(self, framework: Framework, preset: Mapping[str, Any] = {}) -> Scenario:
        """Return the framework at its defaults, with the page's constants or another preset's."""
        entry = {"name": framework.system, **framework.entry(self.batch)}
        return scenario_from(self.path, self.settings(framework) | {**preset}, entry)


class Task(NamedTuple):
    """A framework on a workload. `search`: its best settings, too. `keep` is a folder for simulated points."""

    workload: Workload
    framework: str
    search: bool = True
    keep: Path | None = None


def rows_of(task: Task) -> list[Row]:
    """Return the rows of a task: `default`, then `bounded` and `best` if they are searched, and `own`, the defaults with the
    framework's own preset (single-turn only, for the time). A row has `error` in place of figures if it cannot be."""
    framework, workload = FRAMEWORKS[task.framework], task.workload
    outcomes = Outcomes(task.keep, Measured(framework.updates))

    def row(
        kind: str, outcome: Mapping[str, Any], changed: Mapping[str, Any], tried: int = 1
    ) -> Row:
        return {
            "workload": workload.name, "framework": task.framework, "kind": kind,
            "settings": json.dumps(changed, sort_keys=True), "tried": tried,
            **(outcome.get("row") or {"error": outcome["error"]}),
        }  # fmt: skip

    (at_defaults,) = outcomes.of([Point(workload.at_defaults(framework))])
    rows = [row("default", at_defaults, {})]
    if task.search:
        for kind, (option, tried) in tuned(framework, workload, outcomes, at_defaults).items():
            outcome = {"row": option.row} if option else {"error": "no settled run"}
            rows.append(row(kind, outcome, changes(option, framework, workload), tried))
    if framework.preset and not workload.name.endswith("agents"):
        own = Point(workload.at_defaults(framework, framework.preset))
        rows.append(row("own", outcomes.of([own])[0], {}))
    return rows


def changes(option: Option | None, framework: Framework, workload: Workload) -> dict[str, Any]:
    """Return the parameters of an option that are not the framework's defaults."""
    if option is None:
        return {}
    defaults = {**parameters_of(framework.system), **framework.entry(workload.batch)}
    chosen = option.point.scenario.system.parameters
    return {key: value for key, value in chosen.items() if value != defaults.get(key)}


def tuned(
    framework: Framework, workload: Workload, outcomes: Outcomes, at_defaults: Mapping[str, Any]
) -> dict[str, tuple[Option | None, int]]:
    """Return the fastest settled option with staleness of at most `BOUND` batches, and without a bound, each with the number of
    points that were tried; None if there is none."""
    batch, name = workload.batch, framework.system
    fixed = dict(framework.entry(batch))
    if "dispatch" in parameters_of(name):
        fixed.setdefault("dispatch", parameters_of(name)["dispatch"])
    dimensions = {
        key: listed(key, [value])
        for key, value in {
            **workload.settings(framework), "cluster.tp": workload.plain.cluster.tp, f"{PARAMETER}speculation": None,
        }.items()
    }  # fmt: skip
    dimensions[SYSTEMS] = listed(SYSTEMS, [{"name": name, **fixed}])
    keys = dict(framework.keys(batch))
    several = len(framework.grid) > 1
    grid = {
        key: _thinned(values) if several else values
        for key, values in keys.items()
        if key in framework.grid
    }
    defaults = {**parameters_of(name), **fixed}
    space, coarse = (
        make_space(workload.file, {**dimensions, **_dimensions(lists)})
        for lists in (keys, {key: grid.get(key, (defaults[key],)) for key in keys})
    )
    bounded = Goal(batch.responses, max_off_policyness=BOUND, settled=True)
    searched = search(coarse, bounded, outcomes, coarse.size or 1, seed=0)
    if all(defaults[key] in values for key, values in keys.items()):
        for chosen in space.as_in_the_file():  # the defaults, which the grid may lack
            point = space.point(chosen)
            searched.chosen[point.hash] = chosen
            if point.hash not in searched.seen:
                searched.add(point, at_defaults, bounded)
    searched.sort()
    polish(space, bounded, outcomes, searched, NEAR if keys else 0)
    first = next(iter(searched.allowed), None), searched.points
    free = Goal(batch.responses, settled=True)
    again = replace(searched, options=[_judged(option, free) for option in searched.options])
    again.sort()
    polish(space, free, outcomes, again, FURTHER if keys else 0)
    return {"bounded": first, "best": (next(iter(again.allowed), None), again.points)}


def _dimensions(lists: Mapping[str, Sequence[Any]]) -> dict[str, Dimension]:
    return {
        f"{PARAMETER}{key}": listed(f"{PARAMETER}{key}", list(values))
        for key, values in lists.items()
    }


def _thinned(values: Sequence[Any]) -> Sequence[Any]:
    """Return at most `WIDEST` values, without the last ones and, of five, without the first."""
    surplus = max(len(values) - WIDEST, 0)
    return values[surplus // 2 : len(values) - (surplus - surplus // 2)]


def _judged(option: Option, goal: Goal) -> Option:
    return judged(option.point, {"row": option.row}, goal)


class Measured:
    """An executor (`simrl.study.executors`) in this process of rows made by `row_of`; `updates` train a batch."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    def outcomes(self, points: Sequence[Point]) -> Coming:
        for i, point in enumerate(points):
            try:
                prepared = prepare(point.scenario, _inputs)
                yield i, {"row": row_of(prepared, simulate_prepared(prepared), self._updates)}
            except InputError as error:
                yield i, {"error": str(error), "cause": error.cause}


_inputs = InputCache()  # of this process


def row_of(prepared: Prepared, result: Result, updates: int) -> Row:
    """Return the figures of a run.

    off_policyness_max         largest staleness of a trained token, in batches (`staleness`)
    stale_mean, stale_p99      mean and 99th percentile over the trained tokens
    idle                       share of all GPU-seconds in which a GPU waits, for rollout or for training
    length_share               mean tokens of the trained responses over the mean of the trace's
    drift                      trained samples a second in the second half of the window over the first half's
    Others are of `simrl.result.metrics.summary`; `step_s` is of a batch.
    """
    scenario = prepared.scenario
    warmup = scenario.warmup_steps
    row = summary(result, warmup)
    age, tokens = staleness(result, warmup, updates)
    gpu_s = gpu_seconds(result, *window(result, warmup))
    steps = result.steps.slice(warmup)
    half = steps.num_rows // 2
    (early_s, late_s), (early, late) = (
        (_seconds(result, warmup, half), _seconds(result, warmup + half, steps.num_rows - half)),
        (_samples(steps.slice(0, half)), _samples(steps.slice(half))),
    )
    trained = pc.sum(steps.column("response_tokens")).as_py() / _samples(steps)
    return {
        "rollout_gpus": prepared.gpus if prepared.colocated else prepared.rollout_gpus,
        "train_gpus": prepared.train_gpus,
        "colocated": prepared.colocated,
        "samples_per_s": row["samples_per_s"],
        "step_s": row["step_s"] * updates,
        "stale_mean": float(np.average(age, weights=tokens)),
        "stale_p99": percentile(age, tokens, 0.99),
        "off_policyness_max": int(age.max()),
        "carried_off_policyness_max": 0,  # those carried are counted among the others here
        "idle": sum(s for (_, kind), s in gpu_s.items() if kind == "idle") / sum(gpu_s.values()),
        "rollout_bubble": row["rollout_bubble"],
        "train_idle": row["train_idle"],
        "dropped_share": row["dropped_share"],
        "length_share": trained / float(prepared.trace.column("response_tokens").mean()),
        "gpu_hours_per_1k_samples": row["gpu_hours_per_1k_samples"],
        "settled": bool(row["settled"]),
        "drift": (late / late_s) / (early / early_s),
        "system": row["system"],
    }


def staleness(result: Result, warmup_steps: int, updates: int) -> tuple[Any, Any]:
    """Return the staleness and the tokens of each part of a response that was trained after the warm-up.

    Staleness is counted in batches: how many of them ended, in updates of the trainer, between the weights that generated a
    token and the update that trains it. Where one update trains a batch, it is simrl's off-policyness, carried tokens
    included; where `updates` share a batch, the later ones of a batch are no staler than mini-batches are elsewhere.
    """
    samples, segments, steps = result.samples, result.segments, result.steps
    trained = pc.fill_null(samples.column("trained_step"), -1).to_numpy()
    row = np.searchsorted(samples.column("uid").to_numpy(), segments.column("uid").to_numpy())
    tokens, step = segments.column("tokens").to_numpy(), trained[row]
    counted = (step >= warmup_steps) & (tokens > 0)
    trains = steps.column("policy_version").to_numpy()[step[counted]] // updates
    generated = segments.column("policy_version").to_numpy()[counted] // updates
    return trains - generated, tokens[counted]


def percentile(values: Any, weights: Any, share: float) -> int:
    """Return the smallest value that this share of the weight does not exceed."""
    counts = np.bincount(values, weights)
    return int(np.searchsorted(np.cumsum(counts), share * counts.sum() * (1 - 1e-12)))


def _seconds(result: Result, first: int, count: int) -> float:
    ends = result.steps.column("finished_s").to_numpy()
    return float(ends[first + count - 1] - ends[first - 1])


def _samples(steps: Any) -> int:
    return int(steps.column("samples").to_numpy().sum())


def digest() -> str:
    """Return a digest of this file, on which the kept rows depend."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
